"""
The cache, the sampler and the packing: what must always hold between sampler and learner, each with a control that must fail.
"""
import weakref

import pytest
import torch
import torch.nn.functional as F

import kvcache
import rollout as rollout_file
from grpo import replay
from kvcache import EVICT, KVCache, keep, score_h2o, score_rkv, score_snapkv
from model import Config, Transformer
from fast.sampling import sample
from grpo import pack
from rollout import Rollout, generate

RAW = dict(model_type="qwen3", hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
           head_dim=16, vocab_size=50, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True)
SMALL = dict(budget=24, window=8, sinks=2)
STOP = (3, 7, 9)


def toy(seed=0, **changes):
    """A random model whose attention is sharp: at the usual 0.02 sparse and dense would agree and every control would pass."""
    torch.manual_seed(seed)
    model = Transformer(Config.from_dict({**RAW, **changes}))
    for p in model.parameters():
        p.data.normal_(0, 0.35) if p.dim() > 1 else p.data.normal_(1, 0.2)
    return model


def prompts(*lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (n,), generator=g).tolist() for n in lengths]


def gap(model, r, policy="shadow"):
    """Largest |learner - sampler| over the sampled tokens."""
    with torch.no_grad():
        return (replay(model, r, (policy,))[policy] - r.logp_roll).abs().max().item()


@pytest.fixture(scope="module")
def model():
    return toy()


@pytest.mark.parametrize("evict", EVICT)
def test_replay_identity(model, evict):
    """Ragged prompts (one below the budget), G > 1, early stops: the learner scores what the sampler sampled."""
    r = generate(model, prompts(61, 40, 97, 20), 3, 12, evict=evict, stop_ids=STOP, seed=1, temperature=0.8, **SMALL)
    assert r.lengths.min() < 12 == r.lengths.max()  # some stopped early, some were cut
    assert [k.shape[2] for k in r.kept] == ([61, 40, 97, 20] if evict == "none" else [24, 24, 24, 20])
    assert gap(model, r) <= 1e-4
    if evict == "none":
        assert gap(model, r, "dense") <= 1e-4
        return
    assert gap(model, r, "dense") > 1  # the log dropped
    shifted = r.select(range(4))
    shifted.kept = [(k + 1).clamp(max=len(p) - 1) if k.shape[2] < len(p) else k for k, p in zip(r.kept, r.prompts)]
    assert gap(model, shifted) > 1e-2  # the log shifted by one key
    if evict != "recent":  # recent keeps the same keys everywhere
        shared = r.select(range(4))
        shared.kept = [k[:, :1].expand_as(k) for k in r.kept]
        assert gap(model, shared) > 1e-2  # one KV head's log used for all
        shared.kept = [k[:1].expand_as(k) for k in r.kept]
        assert gap(model, shared) > 1e-2  # one layer's log used for all


def test_eviction_starts_after_the_prompt(model):
    """Response token 0 is dense, tokens 1.. are sparse; lifetimes that end one row early or late are another policy."""
    a = generate(model, prompts(90, 70), 2, 6, evict="none", seed=5, **SMALL)
    b = generate(model, prompts(90, 70), 2, 6, evict="snapkv", seed=5, **SMALL)
    assert torch.equal(a.tokens[..., 0], b.tokens[..., 0]) and torch.equal(a.logp_roll[..., 0], b.logp_roll[..., 0])
    assert (a.logp_roll[..., 1] - b.logp_roll[..., 1]).abs().max() > 0.1
    packed = pack(b, ("shadow",))
    P, n = 90, 5
    assert packed.until.shape == (3, 2, 90 + 70 + 4 * 5)  # R - 1 rows per copy
    evicted = torch.ones(3, 2, P, dtype=torch.bool).scatter(2, b.kept[0], False)
    assert (packed.until[:, :, :P][evicted] == P).all() and (packed.until[:, :, :P][~evicted] == P + 2 * n).all()
    assert (packed.until[:, :, P:P + n] == P + n).all()
    assert packed.pos[P:P + 2 * n].tolist() == [*range(P, P + n)] * 2
    assert packed.rows["shadow"][0].tolist() == [[P - 1, *range(P, P + n)], [P - 1, *range(P + n, P + 2 * n)]]


def test_pack_both_policies(model):
    """[prompt | dense copies | shadow copies]: which rows, which lifetimes, for response keys that die early too."""
    r = generate(model, prompts(40), 2, 4, seed=3, **SMALL)
    r.lengths[0, 1] = 2
    r.until[1, 0, 0, 0, 1] = 3  # at layer 1, KV head 0, sample 0: the key of response token 1 is gone for the query of token 3
    packed = pack(r)
    P = 40
    assert packed.rows["dense"].tolist() == [[[39, 40, 41, 42], [39, 43, -1, -1]]]
    assert packed.rows["shadow"].tolist() == [[[39, 44, 45, 46], [39, 47, -1, -1]]]
    assert packed.ids[P:].tolist() == [*r.tokens[0, 0, :3], r.tokens[0, 1, 0]] * 2
    assert packed.until[0, 0, P:].tolist() == [43, 43, 43, 44, 47, 47, 47, 48]
    r.until[1, 0, 0, 0, 0] = 2
    assert pack(r).until[1, 0, P:].tolist() == [43, 43, 43, 44, 46, 47, 47, 48]
    evicted = torch.ones(3, 2, P, dtype=torch.bool).scatter(2, r.kept[0], False)
    assert (packed.until[:, :, :P][evicted] == 44).all() and (packed.until[:, :, :P][~evicted] == 48).all()
    with pytest.raises(ValueError, match="policies"):
        pack(r, ("sparse",))
    r.kept = r.kept * 2
    with pytest.raises(ValueError, match="does not fit"):
        pack(r)


OWN = dict(**SMALL, response_budget=10, period=5)
METHODS = [e for e in EVICT if e != "none"]


@pytest.mark.parametrize("evict", METHODS)
def test_replay_identity_with_response_eviction(model, evict):
    """Ragged prompts, early stops, response keys that die on the way: the learner still scores what the sampler sampled."""
    r = generate(model, prompts(61, 40, 97, 20), 3, 33, evict=evict, stop_ids=STOP[:1], seed=2, temperature=0.8, **OWN)
    assert r.lengths.min() < 33 == r.lengths.max() and (r.lengths > 16).sum() > 3  # some stopped early, some were cut
    assert gap(model, r) <= 1e-4
    wrong = lambda until: Rollout(**{**r.__dict__, "until": until})
    dead = r.until < 33
    assert gap(model, wrong(torch.full_like(r.until, 33))) > 1e-2  # the log of the response dropped
    assert gap(model, wrong(torch.where(dead, r.until + 1, r.until))) > 1e-2  # each key dies one step late
    assert gap(model, wrong(r.until.roll(1, -1))) > 1e-2  # shifted by one key
    if evict != "recent":  # recent keeps the same keys everywhere
        assert gap(model, wrong(r.until[:, :1].expand_as(r.until))) > 1e-2  # one KV head's log used for all
        assert gap(model, wrong(r.until[:1].expand_as(r.until))) > 1e-2  # one layer's


@pytest.mark.parametrize("evict", METHODS)
def test_response_keys_that_live(model, evict):
    """How many are alive at each step, and that the window is among them: counted from the log."""
    r = generate(model, prompts(61, 40), 2, 33, evict=evict, seed=2, **OWN)
    for step in range(32):  # the query of step `step` sees the keys born until then and not yet dead
        alive = r.until[..., :step + 1] > step                                                        # (L, nkv, B, G, step + 1)
        held = step if step < 15 else 10 + step % 5  # the first eviction is after step 14, when 15 are there
        assert (alive.sum(-1) == held + 1).all()  # and the step's own key
        assert alive[..., -min(8 + step % 5, step) - 1:].all()
    assert r.until.max() == 33 and set(r.until.unique().tolist()) == {15, 20, 25, 30, 33}
    if evict == "recent":
        want = torch.tensor([next((t for t in range(15, 33, 5) if u < t - 10), 33) for u in range(33)])
        assert (r.until == want).all()


def test_response_storage(model):
    """Room for response_budget + period keys however long the response, to the byte; a budget that is never reached changes nothing."""
    per_key = 2 * 3 * 2 * 16 * 4
    for R in (9, 16, 17, 60):
        r = generate(model, prompts(100, 100), 3, R, **OWN)
        assert r.kv["kept"] == per_key * (2 * 24 + 2 * 3 * min(R - 1, 15))
    ask = dict(group=2, max_new_tokens=20, seed=2, period=4, **SMALL)
    for evict in ("h2o", "snapkv"):  # what is held beside the cache is no longer than the response
        r = generate(model, prompts(40), 2, 6, evict=evict, response_budget=9, period=10**12, **SMALL)
        assert (r.until == 6).all() and gap(model, r) <= 1e-4
    a, b, c = (generate(model, prompts(40, 33), **ask, response_budget=n) for n in (None, 19, 9))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logp_roll, b.logp_roll) and (b.until == 20).all()
    assert not torch.equal(a.logp_roll, c.logp_roll)


def test_h2o_adds_up_attention(model):
    """One layer, by hand: after two evictions the kept keys are those with the most attention from all queries that saw them."""
    torch.manual_seed(0)
    c, P, K, period = model.config, 12, 6, 4
    cache = KVCache(c, [P, P], 2, 20, "h2o", budget=8, window=2, sinks=1, response_budget=K, period=period)
    nh, nkv, hs = c.n_head, c.n_kv_head, c.head_size
    draw = lambda n, heads: torch.randn(n, heads, hs) * 1.5
    for layer in range(c.n_layer):
        cache.write_prompts(slice(0, 2), layer, draw(2 * P, nh), draw(2 * P, nkv), draw(2 * P, nkv))
    pk, keys = cache.prompt[0][0], torch.zeros(4, nkv, 0, hs)
    alive, total = torch.ones(4, nkv, 0, dtype=torch.bool), torch.zeros(4, nkv, 0)
    for t in range(1, 13):
        q, k, v = draw(4, nh), draw(4, nkv), draw(4, nkv)
        for layer in range(c.n_layer):
            cache.attend(layer, q, k, v)
        cache.advance()
        keys = torch.cat((keys, k[:, :, None]), 2)
        alive, total = F.pad(alive, (0, 1), value=True), F.pad(total, (0, 1))
        for s in range(4):
            for h in range(nh):
                kv = h // (nh // nkv)
                att = torch.cat((pk[s // 2, kv], keys[s, kv])) @ q[s, h] * hs ** -0.5
                att[8:][~alive[s, kv]] = float("-inf")
                total[s, kv] += att.softmax(0)[8:]
        cache.evict_responses(t)
        if t in (8, 12):  # 4 keys are fewer than the budget
            for s in range(4):
                for kv in range(nkv):
                    rank = total[s, kv].masked_fill(~alive[s, kv], -1)
                    rank[t - 2:] = 99
                    alive[s, kv] = False
                    alive[s, kv, rank.argsort(descending=True)[:K]] = True
        assert torch.equal(cache.until[0, :, :, :t] > t - 1 if t % 4 else cache.until[0, :, :, :t] > t, alive)
    assert int(cache.response_filled) == K and int(cache.t) == 12


def test_rkv_by_hand():
    """Two equal keys, one that is like nothing: of the equal ones the later stays, and attention breaks the rest."""
    k = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])[:, None]  # (5, 1, 4)
    q = torch.zeros(1, 1, 4)
    # cosines beside the diagonal: keys 1 and 2 are alike; for key 1 the latest alike is 2, for key 2 it is 1: neither is counted
    s = score_rkv(q, k, 1, None, weight=0.0)
    assert torch.allclose(s, torch.full((1, 5), -0.2), atol=1e-6)
    k[3] = k[2]  # three alike: rows 1 and 2 spare key 3, row 3 spares key 2; what is left: (1,2), (2,1), (3,1)
    mean = torch.tensor([[0.0, 2, 1, 0, 0]]) / 5
    s = score_rkv(q, k, 1, None, weight=0.0)
    assert torch.allclose(s, -mean.softmax(-1), atol=1e-6)
    q[0, 0, 0] = 2 * 4.0  # looks at key 0
    att = torch.tensor([[4.0, 0, 0, 0, 0]]).softmax(-1)
    assert torch.allclose(score_rkv(q, k, 1, None, weight=0.3), 0.3 * att - 0.7 * mean.softmax(-1), atol=1e-6)
    elsewhere = torch.tensor([[3.0]])
    att = torch.tensor([[4.0, 0, 0, 0, 0, 3]]).softmax(-1)[:, :5]
    assert torch.allclose(score_rkv(q, k, 1, None, elsewhere, weight=1.0), att, atol=1e-6)


def test_h2o_by_hand():
    """Every query counts, each over the keys it saw; heads of a KV head add up."""
    k = torch.eye(3)[:, None] * 20                               # (3, 1, 3)
    q = torch.zeros(3, 2, 3)
    q[2, 0, 0] = 20                                              # the last query of head 0 looks at key 0, all else is even
    want = torch.tensor([[1 + 1 / 2 + 1 + 1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 2 + 1 / 3, 1 / 3]])
    assert torch.allclose(score_h2o(q, k, 1, None), want, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("evict", METHODS)
def test_response_eviction_on_a_gpu(evict):
    """fp32, the kernels and the recorded step: between replays keys are evicted, and the learner follows."""
    net = toy().to("cuda")
    r = generate(net, prompts(61, 40, 97, 20), 3, 60, evict=evict, seed=2, **OWN)
    assert gap(net, r) <= 1e-3 and r.until.min() == 15
    assert gap(net, Rollout(**{**r.__dict__, "until": torch.full_like(r.until, 60)})) > 1e-2


@pytest.mark.parametrize("evict", [e for e in EVICT if e != "none"])
def test_budget_of_the_prompt_is_dense(model, evict):
    """budget >= P is the dense method, bit for bit; budget = P - 1 is not."""
    ask = dict(group=2, max_new_tokens=8, window=8, sinks=2, seed=2)
    dense = generate(model, prompts(40, 33), evict="none", **ask)
    same = generate(model, prompts(40, 33), evict=evict, budget=40, **ask)
    assert torch.equal(dense.tokens, same.tokens) and torch.equal(dense.logp_roll, same.logp_roll)
    less = generate(model, prompts(40, 33), evict=evict, budget=20, **ask)
    assert not torch.equal(dense.logp_roll, less.logp_roll)


@pytest.mark.parametrize("P", [1, 2, 11, 23, 24, 25, 96])
def test_kept_per_prompt(model, P):
    """min(P, budget) keys, ascending, sinks and window among them, for every length around the budget."""
    for evict in EVICT.keys() - {"none"}:
        (kept,) = generate(model, prompts(P), 2, 3, evict=evict, **SMALL).kept
        assert kept.shape == (3, 2, min(P, 24)) and (kept[..., 1:] > kept[..., :-1]).all()
        if P > 24:
            for must in (0, 1, *range(P - 8, P)):
                assert (kept == must).any(-1).all()


def test_ragged_prompt_equals_alone(model):
    """A prompt's cache and greedy answer do not depend on its neighbours in the batch, nor on how prefill is cut."""
    ps = prompts(61, 40, 97, 20, seed=4)
    ask = dict(group=2, max_new_tokens=8, temperature=0.0, stop_ids=STOP, **SMALL)
    together = generate(model, ps, **ask)
    cut = generate(model, ps, prefill_rows=64, **ask)
    for b, p in enumerate(ps):
        for other, i in ((generate(model, [p], **ask), 0), (cut, b)):
            assert torch.equal(other.kept[i], together.kept[b])
            assert torch.equal(other.tokens[i], together.tokens[b])
            assert (other.logp_roll[i] - together.logp_roll[b]).abs().max() < 1e-4
    assert generate(model, ps, **ask).kept[0].equal(together.kept[0])  # the second run compresses like the first


def test_snapkv_votes_by_hand():
    """One KV head, two query heads, keys one-hot: votes are softmax weights that can be written down."""
    P, W, hs = 8, 2, 8
    k = torch.eye(P, hs)[:, None] * 10.0                       # (8, 1, 8) key j answers to channel j
    q = torch.zeros(W, 2, hs)
    q[0, 0, 3] = q[1, 0, 3] = q[0, 1, 5] = q[1, 1, 4] = 50.0   # head 0 looks at key 3, head 1 at keys 5 and 4
    votes = score_snapkv(q, k, 1, None)
    assert torch.allclose(votes, torch.tensor([[0, 0, 0, 1.0, 0.5, 0.5, 0, 0]]), atol=1e-6)  # sum over W, mean over heads
    pooled = score_snapkv(q, k, 3, None)
    assert torch.allclose(pooled, torch.tensor([[0, 0, 1.0, 1.0, 1.0, 0.5, 0, 0]]), atol=1e-6)
    # causal inside the window: query row 6 looking at key 7 would see nothing of it and spread evenly over 0..6
    q = torch.zeros(W, 1, hs)
    q[0, 0, 7] = 50.0
    votes = score_snapkv(q, k, 1, None)
    assert torch.allclose(votes, torch.tensor([[1 / 7 + 1 / 8] * 6 + [0, 0]]), atol=1e-6)
    assert keep(pooled, 6, 2, 1).tolist() == [[0, 2, 3, 4, 6, 7]]


def test_heads_vote_for_themselves():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, 4, 16, generator=g) * 2, torch.randn(50, 2, 16, generator=g)
    kept = keep(score_snapkv(q, k, 7, None), 24, 8, 2)
    swapped = keep(score_snapkv(q[:, [2, 3, 0, 1]], k[:, [1, 0]], 7, None), 24, 8, 2)
    assert torch.equal(swapped, kept[[1, 0]]) and not torch.equal(kept[0], kept[1])


def test_storage_is_freed(model, monkeypatch):
    """Storage equals the formula to the byte, and when a layer is written nothing of the layers before it is left."""
    refs, alive = [], []
    write = KVCache.write_prompts

    def spy(cache, which, layer, q, k, v):
        alive.append(sum(r() is not None for l, r in refs if l < layer))
        write(cache, which, layer, q, k, v)
        refs.append((layer, weakref.ref(k.untyped_storage())))

    monkeypatch.setattr(KVCache, "write_prompts", spy)
    r = generate(model, prompts(100, 100), 3, 9, evict="snapkv", **SMALL)
    assert alive == [0] * 3 and all(ref() is None for _, ref in refs)
    L, nkv, hs, bytes_ = 3, 2, 16, 4
    assert r.kv["kept"] == 2 * L * nkv * hs * bytes_ * (2 * 24 + 2 * 3 * 8)
    assert r.kv["dense_shared"] == 2 * L * nkv * hs * bytes_ * (2 * 100 + 2 * 3 * 8)
    assert r.kv["dense"] == 2 * L * nkv * hs * bytes_ * (2 * 3 * 100 + 2 * 3 * 8)
    # the control: a cache that kept views would be found out
    monkeypatch.setattr(kvcache.KVCache, "write_prompts", lambda cache, which, layer, q, k, v: (
        write(cache, which, layer, q, k, v), cache.prompt.__setitem__(layer, (k[:24], v[:24]))))
    cache = KVCache(model.config, [100], 1, 9, device="cpu", **SMALL)
    k = torch.randn(100, 2, 16)
    cache.write_prompts(slice(0, 1), 0, torch.randn(100, 4, 16), k, k.clone())
    assert cache.nbytes() > 2 * L * nkv * hs * bytes_ * (24 + 8)


def test_nothing_of_size_rows_squared(model):
    """Neither rollout nor learner allocates rows x rows elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.n = max(self.n, x.untyped_storage().nbytes() // x.element_size())
            return out

    net = toy(max_position_embeddings=4096)
    with Largest() as seen:
        r = generate(net, prompts(3000), 2, 6, **SMALL)
        replay(net, r)["shadow"].sum().backward()
    assert seen.n < 3000 * 3000 / 4, seen.n  # 4 heads x 3000 rows x a chunk of queries is what the reference may hold


def test_sampling(model):
    """Log-probs at the sampling temperature; draws follow them; the first token of a group is drawn per row; seeds repeat."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(200_000, 3)
    token, logp = sample(logits, 0.5, torch.Generator().manual_seed(0), 0, None)
    want = torch.tensor([4.0, 2.0, 0.0]).log_softmax(0)
    assert torch.allclose(logp, want[token]) and abs(want[0].item() + 0.1429) < 1e-4
    assert torch.allclose(token.bincount() / 200_000, want.exp(), atol=3e-3)
    token, logp = sample(logits[:2], 0.0, None, 0, None)
    assert token.tolist() == [0, 0] and torch.allclose(logp, torch.tensor([2.0, 1.0, 0.0]).log_softmax(0)[[0, 0]])
    ask = dict(group=16, max_new_tokens=3, temperature=2.0, **SMALL)
    a, b, c = (generate(model, prompts(40), seed=s, **ask) for s in (0, 0, 1))
    assert torch.equal(a.tokens, b.tokens) and not torch.equal(a.tokens, c.tokens)
    assert len(a.tokens[0, :, 0].unique()) > 3


def test_stops(model):
    """A response ends with its first stop token, which counts; nothing is recorded after it; no stop token: cut at R."""
    r = generate(model, prompts(40, 50), 8, 16, stop_ids=STOP, seed=0, **SMALL)
    stop = torch.isin(r.tokens, torch.tensor(STOP))
    for b in range(2):
        for g in range(8):
            n = r.lengths[b, g].item()
            assert not stop[b, g, :n - 1].any() and (stop[b, g, n - 1] if r.stopped[b, g] else n == 16)
            assert (r.tokens[b, g, n:] == 0).all() and (r.logp_roll[b, g, n:] == 0).all()
    assert r.stopped.any() and not r.stopped.all()
    assert (generate(model, prompts(40), 2, 16, seed=0, **SMALL).lengths == 16).all()


def test_padded_vocabulary(model):
    """An id that the tokenizer does not have is never sampled, however likely, and is outside the learner's support too."""
    net = toy()
    net.embed_tokens.weight.data[48:] *= 30
    free = generate(net, prompts(40), 16, 8, seed=0, **SMALL)
    net.vocab_used = 48
    r = generate(net, prompts(40), 16, 8, seed=0, **SMALL)
    assert (free.tokens >= 48).any() and r.tokens.max() < 48
    assert gap(net, r) <= 1e-4


def test_weights_are_read_afresh(model):
    """One model object: a changed weight changes the next rollout (no stale copy)."""
    net = toy()
    a = generate(net, prompts(40), 2, 4, **SMALL)
    net.norm.weight.data *= 1.5
    assert not torch.equal(a.logp_roll, generate(net, prompts(40), 2, 4, **SMALL).logp_roll)


@pytest.mark.parametrize("say, change", [
    ("budget 10 must be above window \\+ sinks", dict(budget=10)),
    ("unknown eviction method 'h2o2'", dict(evict="h2o2")),
    ("pool 4 odd", dict(pool=4)),
    ("exceeds the context of 512", dict(max_new_tokens=500)),
    ("prompt 1 is empty", dict(prompts=[[1], []])),
    ("token id 50", dict(prompts=[[1, 50]])),
    ("temperature must be finite and not negative, got -1", dict(temperature=-1)),
    ("prefill_rows must be at least 1", dict(prefill_rows=0)),
    ("response_budget 8 must be above the window of 8", dict(response_budget=8)),
    ("period 0 at least 1", dict(response_budget=16, period=0)),
    ("evict a method, not 'none'", dict(response_budget=16, evict="none")),
])
def test_bad_requests(model, say, change):
    with pytest.raises(ValueError, match=say):
        generate(model, **{**dict(prompts=prompts(40), group=2, max_new_tokens=4, **SMALL), **change})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bf16_gap_is_no_larger_than_dense():
    """On a GPU in bf16 a sparse rollout replays as well as a dense one: mean gap at most 1.5 times as large."""
    net = toy(hidden_size=256, head_dim=64, vocab_size=50).to("cuda", torch.bfloat16)
    for p in net.parameters():
        p.data.mul_(0.5) if p.dim() > 1 else None

    def mean_gap(evict):
        r = generate(net, prompts(400, 300, 390, 200), 8, 64, evict=evict, budget=64, window=16, sinks=4, seed=0)
        with torch.no_grad():
            return (replay(net, r, ("shadow",))["shadow"] - r.logp_roll).abs()[r.mask].mean().item()

    assert mean_gap("snapkv") <= 1.5 * mean_gap("none")


def test_scoring_in_slices_is_the_same(monkeypatch):
    """SnapKV holds the attention of a few KV heads at a time; how many changes nothing but rounding."""
    q, k = torch.randn(8, 6, 16), torch.randn(40, 3, 16)
    whole = score_snapkv(q, k, 7, None)
    z = torch.randn(6, 8)
    others = [f(q, k, 7, None, z) for f in (score_snapkv, score_rkv, score_h2o)]
    monkeypatch.setattr(kvcache, "SCORE_BYTES", 1)
    torch.testing.assert_close(score_snapkv(q, k, 7, None), whole, atol=1e-6, rtol=1e-5)
    for f, want in zip((score_snapkv, score_rkv, score_h2o), others):
        torch.testing.assert_close(f(q, k, 7, None, z), want, atol=1e-6, rtol=1e-5)
        assert (f(q, k.flip(1), 7, None, z) - want).abs().max() > 1e-3
    assert (score_snapkv(q, k.flip(1), 7, None) - whole).abs().max() > 1e-2


def test_prompts_of_one_length_are_compressed_together(model):
    """Neighbours of equal length go to the cache in one call; alone or in company each keeps the same keys."""
    ids = prompts(60, 60, 47, 60)
    r = generate(model, ids, 1, 4, temperature=0.0, **SMALL)
    for b, p in enumerate(ids):
        alone = generate(model, [p], 1, 4, temperature=0.0, **SMALL)
        assert torch.equal(alone.kept[0], r.kept[b]) and torch.equal(alone.tokens[0], r.tokens[b])
    assert not torch.equal(r.kept[0], r.kept[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_decoding_is_eager_decoding(monkeypatch):
    """Replaying one recorded step gives the tokens and log-probs of launching every step, also with many stop tokens."""
    net = toy(vocab_size=5000).to("cuda", torch.bfloat16)
    ask = dict(group=4, max_new_tokens=24, stop_ids=tuple(range(40)), **SMALL)
    a = generate(net, prompts(40, 61), seed=3, **ask)
    monkeypatch.setattr(rollout_file, "record", lambda step, device: step)
    b = generate(net, prompts(40, 61), seed=3, **ask)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logp_roll, b.logp_roll)
    assert not torch.equal(generate(net, prompts(40, 61), seed=4, **ask).tokens, b.tokens)
