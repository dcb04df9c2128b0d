"""rollout.py: sampling, stops, batches, refusals; on a GPU the recorded step and bf16."""
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rollout as rollout_file
from conftest import EVICTION, SMALL, STOP, gap, largest_tensor, prompts, toy
from fast import record
from grpo import replay
from kvcache import Eviction, KVCache
from rollout import draw_token, generate
from support.memory import release

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OWN = Eviction(**SMALL, response_budget=10, period=5)


# sampler and learner, beside what test_method.py holds

def test_replay_without_eviction(model):
    """Then both policies are the sampler, and the log says that everything was kept."""
    r = generate(model, prompts(61, 40, 97, 20), 3, 12, temperature=0.8, eviction=Eviction("none"),
                 stop_ids=STOP, seed=1)
    assert r.lengths.min() < 12 == r.lengths.max()
    assert [k.shape[2] for k in r.kept] == [61, 40, 97, 20] and (r.until == 12).all()
    assert gap(model, r) <= 1e-4 and gap(model, r, "dense") <= 1e-4
    other = replace(r, tokens=r.tokens.roll(1, -1))
    assert gap(model, other) > 1


@pytest.mark.parametrize("spread", ["uniform", "pyramid", "adaptive"])
def test_what_settings_evict_is_what_is_logged(model, spread):
    """Eviction.evicts says beforehand whether the log of full responses names a key that went;
    pyramid's last layers keep fewer than the budget."""
    seen = set()
    for P, R, K, period in ((24, 12, None, 5), (25, 12, None, 5), (10, 12, 10, 5), (10, 12, 9, 5),
                            (10, 17, 9, 5), (10, 12, 9, 11), (10, 1, 9, 5), (14, 12, 9, 20)):
        e = Eviction(**SMALL, response_budget=K, period=period, spread=spread)
        r = generate(model, prompts(P), 2, R, eviction=e, seed=1)
        kept_all = all(len(head) == P for layer in r.kept[0] for head in layer)
        says = e.evicts(P, R, n_layer=3)
        assert says == (not kept_all or bool((r.until < R).any())), (P, R, K, period)
        seen.add(says)
    assert seen == {True, False}


def test_layers_and_heads_have_logs_of_their_own(model, method):
    """The log of one KV head or layer used for all breaks the replay wherever it is another log;
    methods that score all heads alike log the same for all."""
    r = generate(model, prompts(61, 40, 97, 20), 3, 33, temperature=0.8, seed=2,
                 eviction=replace(OWN, method=method))
    assert gap(model, r) <= 1e-4 and gap(model, r, "dense") > 1
    by_head = replace(r, kept=[k[:, :1].expand_as(k) for k in r.kept])
    by_layer = replace(r, kept=[k[:1].expand_as(k) for k in r.kept])
    for wrong in (by_head, by_layer, replace(r, until=r.until[:, :1].expand_as(r.until)),
                  replace(r, until=r.until[:1].expand_as(r.until))):
        same = torch.equal(wrong.until, r.until) and torch.equal(wrong.kept[0], r.kept[0])
        assert (gap(model, wrong) <= 1e-4) if same else (gap(model, wrong) > 1e-2)
    if method in ("snapkv", "rkv", "h2o", "random"):
        assert not torch.equal(by_head.kept[0], r.kept[0])
        assert not torch.equal(by_layer.kept[0], r.kept[0])


def test_select(model):
    """Some prompts, and some samples of each, are the rollout they are part of; a slice of prompts
    takes no copy."""
    r = generate(model, prompts(61, 40, 20), 3, 24, stop_ids=STOP, seed=1, eviction=OWN)
    some = r.select([2, 0])
    assert some.prompts == [r.prompts[2], r.prompts[0]] and gap(model, some) <= 1e-4
    last, same = r.select(slice(1, 3)), r.select([1, 2])
    assert last.prompts == r.prompts[1:] and torch.equal(last.until, same.until)
    for name in ("tokens", "lengths", "logp_roll", "stopped", "mask"):
        assert torch.equal(getattr(last, name), getattr(same, name))
    assert gap(model, last) <= 1e-4 and last.tokens.data_ptr() == r.tokens[1].data_ptr()
    pairs = r.select([2, 0], torch.tensor([[1, 0], [2, 2]]))
    assert pairs.tokens.shape == (2, 2, 24) and gap(model, pairs) <= 1e-4
    assert torch.equal(pairs.tokens[1, 0], r.tokens[0, 2])
    assert torch.equal(pairs.mask[0, 0], r.mask[2, 1])
    turned = r.select(slice(2, None, -2), torch.tensor([[1, 0], [2, 2]]))
    assert turned.prompts == pairs.prompts and torch.equal(turned.until, pairs.until)
    assert torch.equal(r.select(slice(None, None, -1)).tokens, r.tokens.flip(0))
    with pytest.raises(ValueError, match="the rollout holds no prompts"):
        r.select(slice(0, 0)).check()
    assert gap(model, replace(pairs, until=some.until[:, :, :, :2])) > 1e-3  # other samples' log


# batches

def test_ragged_prompt_equals_alone(model, method):
    """A prompt's cache and greedy answer do not depend on its neighbours, nor on how prefill is
    cut. Neighbours of one length go to the cache in one call."""
    ps = prompts(61, 50, 50, 20, seed=4)
    ask = dict(group=2, max_new_tokens=14, temperature=0.0, stop_ids=STOP,
               eviction=Eviction(method, **SMALL, response_budget=9, period=4))
    together = generate(model, ps, **ask)
    cut = generate(model, ps, prefill_rows=64, **ask)
    for b, p in enumerate(ps):
        alone = generate(model, [p], **ask)
        for other, i in ((alone, 0), (cut, b)):
            assert torch.equal(other.kept[i], together.kept[b])
            assert torch.equal(other.tokens[i], together.tokens[b])
            assert (other.logp_roll[i] - together.logp_roll[b]).abs().max() < 1e-4
    assert not torch.equal(together.tokens[1], together.tokens[2])
    # prompts of one length keep different keys
    if method != "recent" and method != "random":
        assert not torch.equal(together.kept[1], together.kept[2])
    again = generate(model, ps, **ask)  # the second run compresses like the first
    assert all(torch.equal(a, b) for a, b in zip(again.kept, together.kept))


def test_nothing_of_size_rows_squared():
    """Neither rollout nor learner allocates rows x rows elements."""
    net = toy(num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=2048)

    def rollout_and_learner():
        r = generate(net, prompts(1200), 2, 6, eviction=EVICTION)
        replay(net, r)["shadow"].sum().backward()

    # the mask of a chunk of queries is what the reference may hold
    assert largest_tensor(rollout_and_learner) < 1200 * 1200 / 4
    assert largest_tensor(lambda: torch.ones(1200, 1) + torch.ones(1200)) == 1200 * 1200


# drawing tokens

def test_draw_token(model):
    """Log-probs at the sampling temperature; draws follow them."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(200_000, 3)
    token, logp = draw_token(logits, 0.5, torch.Generator().manual_seed(0))
    want = torch.tensor([4.0, 2.0, 0.0]).log_softmax(0)
    assert torch.allclose(logp, want[token]) and abs(want[0].item() + 0.1429) < 1e-4
    assert torch.allclose(token.bincount() / 200_000, want.exp(), atol=3e-3)
    token, logp = draw_token(logits[:2], 0.0, None)
    greedy = torch.tensor([2.0, 1.0, 0.0]).log_softmax(0)[[0, 0]]
    assert token.tolist() == [0, 0] and torch.allclose(logp, greedy)


def test_seeds(model):
    """Seeds repeat; the samples of a group draw their first token each on its own."""
    ask = dict(group=16, max_new_tokens=3, temperature=2.0, eviction=EVICTION)
    a, b, c = (generate(model, prompts(40), seed=s, **ask) for s in (0, 0, 1))
    assert torch.equal(a.tokens, b.tokens) and not torch.equal(a.tokens, c.tokens)
    assert len(a.tokens[0, :, 0].unique()) > 3


def test_stops(model):
    """A response ends with its first stop token, which counts; nothing is recorded after it; no
    stop token: cut at R."""
    r = generate(model, prompts(40, 50), 8, 16, stop_ids=STOP, seed=0, eviction=EVICTION)
    t = torch.arange(16)
    stop = torch.isin(r.tokens, torch.tensor(STOP)) & r.mask
    assert torch.equal(r.mask, t < r.lengths[..., None])
    assert (r.tokens[~r.mask] == 0).all() and (r.logp_roll[~r.mask] == 0).all()
    # the only stop token of a response is its last
    assert torch.equal(stop, (t == r.lengths[..., None] - 1) & r.stopped[..., None])
    assert (r.stopped | (r.lengths == 16)).all()
    assert r.stopped.any() and not r.stopped.all()
    assert (generate(model, prompts(40), 2, 16, seed=0, eviction=EVICTION).lengths == 16).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_absent_tokens(temperature, device):
    """Ids without a token, however likely: never sampled, outside the learner's support, and no
    number that is made of them is NaN. The row of the embedding is not trained."""
    net = toy(tie_word_embeddings=False).to(device)
    net.lm_head.weight.data[[7, 20, 48]] *= 40
    ask = dict(prompts=prompts(40, 61), group=8, max_new_tokens=8, temperature=temperature,
               eviction=EVICTION)
    r = generate(net, **ask)
    assert (r.tokens == 48).any()
    assert torch.isin(r.tokens, torch.tensor([7, 20, 48], device=device)).float().mean() > 0.5
    net.use_tokens(48, absent=[20, 7])
    r = generate(net, **ask)
    assert not torch.isin(r.tokens, torch.tensor([7, 20, 48, 49], device=device)).any()
    out = replay(net, r, distill_to="dense", stats=True)
    assert all(x.isfinite().all() for x in out.values())
    assert (out["shadow"] - r.logp_roll).abs().max() <= 1e-5 + 1e-3 * (device == "cuda")
    assert 0 < out["entropy"].max() < 48 and 0 < out["accept"][r.mask].min() <= 1.0001
    (out["shadow"].sum() + out["kl"].sum()).backward()
    grad = net.lm_head.weight.grad.abs().sum(1)                 # (V,)
    assert grad.isfinite().all() and (grad == 0).nonzero()[:, 0].tolist() == [7, 20, 48, 49]
    # the same as a model whose head never had these rows, whatever they hold
    net.lm_head.weight.data[[7, 20]] = 100.0
    assert torch.equal(replay(net, r)["shadow"], out["shadow"])
    net.use_tokens(48)  # the control: in the support they take all of the probability
    assert gap(net, r) > 1


def test_use_tokens(model):
    """Ids that the model has; what is left out moves with the model."""
    net = toy()
    for n, absent, say in ((51, (), "51 ids, the model takes 50"), (0, (), "0 ids"),
                           (48, (3, 48), "all, of 0 to 47"), (48, (-1,), "all, of 0 to 47"),
                           (3, (0, 1, 2), "some, not all, of 0 to 2")):
        with pytest.raises(ValueError, match=say):
            net.use_tokens(n, absent)
    assert net.vocab_used == 50 and len(net.absent) == 0
    net.use_tokens(48, (5, 3, 5))
    assert net.absent.tolist() == [3, 5] and net.to(torch.double).absent.dtype == torch.int64
    logits = net.logits(torch.ones(2, 64, dtype=torch.double))
    assert logits.shape == (2, 48) and (logits[:, [3, 5]] == -1e30).all()
    assert (logits.softmax(-1) == 0).nonzero()[:, 1].tolist() == [3, 5, 3, 5]


def test_a_model_in_fp64():
    """Samples as it is scored, to the last digits."""
    net = toy(dtype=torch.double)
    r = generate(net, prompts(61, 40), 3, 20, stop_ids=STOP, seed=1, eviction=OWN)
    assert r.logp_roll.dtype == torch.double and r.until.min() == 15
    assert gap(net, r) <= 1e-10
    assert gap(net, replace(r, until=torch.full_like(r.until, 20))) > 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite(wrong, device):
    """No token is drawn from such logits: the rollout ends as a run that diverged."""
    net = toy().to(device)
    ask = dict(prompts=prompts(40, 61), group=2, max_new_tokens=8, eviction=EVICTION)
    generate(net, **ask)
    net.norm.weight.data[3] = wrong
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="logits hold NaN or inf"):
            generate(net, temperature=temperature, **ask)


def test_logits_after_the_end_do_not_count():
    """NaN from the third step on, in the one sample of two that has ended by then or in the one
    that has not."""
    net = toy()
    ask = dict(prompts=prompts(40), group=2, max_new_tokens=8, seed=3, eviction=EVICTION)
    free = generate(net, **ask)
    ended, other = free.tokens[0, :, 0].tolist()
    assert ended not in free.tokens[0, 1]
    logits = net.logits

    def broken_in(sample):
        calls = []

        def broken(hidden):
            calls.append(hidden)
            out = logits(hidden)
            if len(calls) > 3:
                out[sample] = torch.nan
            return out
        return broken

    net.logits = broken_in(0)
    r = generate(net, stop_ids=[ended], **ask)
    assert r.lengths.tolist() == [[1, 8]] and torch.equal(r.tokens[0, 1], free.tokens[0, 1])
    net.logits = broken_in(1)
    with pytest.raises(ValueError, match="logits hold NaN or inf"):
        generate(net, stop_ids=[ended], **ask)


# refusals

REQUESTS = {
    "need at least one prompt, sample and new token: got 0, 2, 4": dict(prompts=[]),
    "got 1, 0, 4": dict(group=0),
    "got 1, 2, 0": dict(max_new_tokens=0),
    "exceeds the context of 512": dict(max_new_tokens=500),
    "prompt 1 is empty": dict(prompts=[[1], []]),
    "token id 50": dict(prompts=[[1, 50]]),
    "token id -1": dict(prompts=[[1, -1]]),
    "temperature must be finite and not negative, got -1": dict(temperature=-1),
    "temperature must be finite and not negative, got nan": dict(temperature=torch.nan),
    "prefill_rows must be at least 1": dict(prefill_rows=0),
    r"part must be \(number .*, of all\), with 1 prompts here, got \(-1, 5\)": dict(part=(-1, 5)),
    r"part must be .*, got \(5, 5\)": dict(part=(5, 5)),
    "prompts must be a list of lists of token ids, got 5": dict(prompts=5),
    "prompt 0 must be a list of token ids, got 5": dict(prompts=[5, 6]),
    "prompt 1 must be a list of token ids": dict(prompts=[[1], [2.0, 3.0]]),
    "stop_ids holds token id 50": dict(stop_ids=[3, 50]),
    "stop_ids must be a list of token ids, got 3": dict(stop_ids=3),
    "seed must be from 0 to 2\\^63 - 1, got -1": dict(seed=-1),
    "seed must be from 0": dict(seed=2**63),
}


@pytest.mark.parametrize("say", REQUESTS)
def test_bad_requests(model, say):
    ask = dict(prompts=prompts(40), group=2, max_new_tokens=4, eviction=EVICTION)
    with pytest.raises(ValueError, match=say):
        generate(model, **{**ask, **REQUESTS[say]})


def test_unusual_requests_that_are_fine(model):
    """Ids as tensors, the largest seed, stop ids of any order and type."""
    (prompt,) = prompts(40)
    ask = dict(group=2, max_new_tokens=8, seed=2**63 - 1, eviction=EVICTION)
    want = generate(model, [prompt], stop_ids=[9, 3], **ask)
    got = generate(model, (torch.tensor(prompt),), stop_ids={3, torch.tensor(9)}, **ask)
    assert torch.equal(got.tokens, want.tokens) and got.prompts == want.prompts
    assert not torch.equal(generate(model, [prompt], **{**ask, "seed": 0}).tokens, want.tokens)


# on a GPU

@needs_gpu
def test_response_eviction_on_a_gpu(method):
    """fp32, the kernels and the recorded step: between replays keys are evicted, and the learner
    follows."""
    net = toy().to("cuda")
    r = generate(net, prompts(61, 40, 97, 20), 3, 60, seed=2, eviction=replace(OWN, method=method))
    assert gap(net, r) <= 1e-3 and r.until.min() == 15
    assert gap(net, replace(r, until=torch.full_like(r.until, 60))) > 1e-2


@needs_gpu
def test_bf16_gap_is_no_larger_than_dense():
    """A sparse rollout replays as well as a dense one: mean gap at most 1.5 times as large."""
    net = toy(hidden_size=256, head_dim=64).to("cuda", torch.bfloat16)
    for p in net.parameters():
        if p.dim() > 1:
            p.data.mul_(0.5)

    def mean_gap(evict):
        r = generate(net, prompts(400, 300, 390, 200), 8, 64,
                     eviction=Eviction(evict, budget=64, window=16))
        with torch.no_grad():
            logp = replay(net, r, ("shadow",))["shadow"]
        return (logp - r.logp_roll).abs()[r.mask].mean().item()

    assert mean_gap("snapkv") <= 1.5 * mean_gap("none")


@needs_gpu
def test_recorded_decoding_is_eager_decoding(monkeypatch):
    """Replaying one recorded step gives the tokens and log-probs of launching every step, also with
    many stop tokens."""
    net = toy(vocab_size=5000).to("cuda", torch.bfloat16)
    ask = dict(group=4, max_new_tokens=24, stop_ids=tuple(range(40)), eviction=EVICTION)
    a = generate(net, prompts(40, 61), seed=3, **ask)
    monkeypatch.setattr(rollout_file, "record", lambda step, device, kind: step)
    b = generate(net, prompts(40, 61), seed=3, **ask)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logp_roll, b.logp_roll)
    assert not torch.equal(generate(net, prompts(40, 61), seed=4, **ask).tokens, b.tokens)


@pytest.mark.parametrize("free, whole, part, held, enough", [
    (26, 100, 1.0, 70, True), (24, 100, 1.0, 10, False),   # others hold the rest
    (90, 100, 0.5, 37, True), (90, 100, 0.5, 38, False)])  # it may take half
def test_a_quarter_is_free(monkeypatch, free, whole, part, held, enough):
    for name, value in dict(mem_get_info=(free, whole), get_per_process_memory_fraction=part,
                            memory_reserved=held).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert record.a_quarter_is_free() == enough


def runs_out():
    raise torch.OutOfMemoryError("out of memory")


def hides_that():
    try:
        runs_out()
    finally:
        raise RuntimeError("the recording could not be ended")


def goes_wrong():
    raise RuntimeError("a mistake of the step's own")


@pytest.mark.parametrize("free, failures, want", [
    (True, [], ["capture after last"]), (False, [], ["give back", "capture"]),
    (True, [runs_out], ["capture after last", "give back", "capture"]),
    (True, [hides_that], ["capture after last", "give back", "capture"]),
    (True, [runs_out] * 2, ["capture after last", "give back", "capture", "raise"]),
    (True, [goes_wrong], ["capture after last", "raise"]),
    (False, [runs_out], ["give back", "capture", "raise"])])
def test_when_a_recording_gives_memory_back(monkeypatch, free, failures, want):
    """Only where it must, and for no other failure; what then was recorded goes with its
    rollout."""
    done, last, left = [], SimpleNamespace(), [*failures]
    made = SimpleNamespace(replay=lambda: None)

    def capture(step, last=None):
        done.append("capture after last" if last else "capture")
        if left:
            left.pop()()
        return made

    for owner, name, value in (
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "current_device", lambda: 1), (record, "capture", capture),
            (torch.cuda, "empty_cache", lambda: done.append("give back")),
            (record, "a_quarter_is_free", lambda: free), (record, "RECORDED", {0: last, 1: last})):
        monkeypatch.setattr(owner, name, value)
    try:
        assert record.record(None, "cuda:1") is made.replay
    except RuntimeError:
        done.append("raise")
    assert done == want and not left
    kept = {0: last}
    if "give back" not in want:
        kept[1] = last if failures else made
    assert record.RECORDED == kept


@pytest.fixture
def grant():
    """function: from now on this process may have no more memory than it holds, but for so many
    bytes; what a test frees it still holds."""
    record.RECORDED.clear()
    release()
    if not record.a_quarter_is_free():
        pytest.skip("others use this card")
    whole = torch.cuda.get_device_properties(0).total_memory

    def at_most(more=0):
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / whole)

    yield at_most
    torch.cuda.set_per_process_memory_fraction(1.0)
    record.RECORDED.clear()


@needs_gpu
def test_no_room_to_record(grant):
    """Where memory has just run out a recording says so; torch 2.11 by itself ends the process."""
    x = torch.zeros(8, device="cuda")
    grant()
    with pytest.raises(torch.OutOfMemoryError):
        record.record(lambda: x.add_(1), x.device)
    torch.cuda.set_per_process_memory_fraction(1.0)
    record.record(lambda: x.add_(1), x.device)()
    assert x.tolist() == [1] * 8


def counter():
    return torch.zeros((), device="cuda", dtype=torch.float64)


def adds(x, mb):
    """A step that takes so many MB and adds to x how many."""
    def step():
        x.add_(torch.ones(mb * 2**17, device="cuda", dtype=torch.float64).sum() / 2**17)
    return step


@needs_gpu
@pytest.mark.parametrize("more", (0, 400 * 2**20))
def test_a_recording_gets_what_is_unused(grant, monkeypatch, more):
    """It cannot work in memory that torch holds without use: where there is little or too little
    beside it, that is given back, and it records in that."""
    x = counter()
    with torch.cuda.stream(record.stream_of(x.device.index)):
        beside = counter()  # with room for what a recording allocates before it begins
    torch.empty(544 * 2**20, dtype=torch.uint8, device="cuda")
    step = adds(x, 512)
    step()  # in the same memory, which is then unused
    grant(more)
    assert record.a_quarter_is_free() == (more > 0)
    with monkeypatch.context() as m:  # control
        m.setattr(torch.cuda, "empty_cache", lambda: None)
        with pytest.raises(torch.OutOfMemoryError):
            record.record(step, x.device)
    record.record(step, x.device)()
    assert x.item() == 2 * 512 and not record.RECORDED and beside.item() == 0


@needs_gpu
def test_a_recording_gets_the_memory_of_the_last(grant):
    """Also where it needs more than that, and there is no other."""
    x = counter()
    record.record(adds(x, 64), x.device)()
    held = torch.cuda.memory_reserved()
    record.record(adds(x, 64), x.device)()
    assert torch.cuda.memory_reserved() == held and x.item() == 128
    grant(16 * 2**20)
    record.record(adds(x, 72), x.device)()
    assert x.item() == 200
    with pytest.raises(torch.OutOfMemoryError):  # control
        record.record(adds(x, 256), x.device)


@needs_gpu
def test_recordings_leave_memory_where_it_is(grant):
    """They give nothing back while a quarter of it is free, and the next one takes the memory of
    the last; else they give back what they can."""
    net = toy().to("cuda")

    def given_back():
        before = torch.cuda.memory_stats()["num_device_free"]
        generate(net, prompts(40, 61), 4, 24, eviction=EVICTION)
        return torch.cuda.memory_stats()["num_device_free"] - before

    given_back()
    torch.empty(2**26, dtype=torch.uint8, device="cuda")  # as a learner leaves it
    given_back()
    held = torch.cuda.memory_reserved()
    assert [given_back() for _ in range(3)] == [0] * 3 and torch.cuda.memory_reserved() == held
    grant(2**24)
    assert given_back() > 0 and torch.cuda.memory_reserved() < held


def test_the_kind_of_a_step():
    """Whatever decides which kernels a step takes makes another kind; what does not, does not."""
    net, eviction = toy(), EVICTION

    def kind(*lengths, net=net, group=2, R=9, temperature=1.0, seed=0, eviction=eviction):
        cache = KVCache(net.config, lengths, group, max_new_tokens=R, eviction=eviction)
        return record.kind_of(net, cache, temperature, seed)

    one = kind(40, 61)
    assert one == kind(80, 90, seed=7, temperature=0.5) and len({one, kind(40, 61)}) == 1
    other_net = toy()
    fewer = toy()
    fewer.use_tokens(40)
    half = toy(dtype=torch.bfloat16)
    others = [kind(40, 20), kind(20, 20), kind(40, 61, 61), kind(40, 61, group=3),
              kind(40, 61, R=8), kind(40, 61, temperature=0.0), kind(40, 61, seed=2**40),
              kind(40, 61, eviction=replace(eviction, response_budget=10)),
              kind(40, 61, net=other_net), kind(40, 61, net=fewer), kind(40, 61, net=half)]
    assert one not in others[1:] and len(set(others[1:])) == len(others) - 1
    assert others[0] == one  # of 40 and 20 tokens the longer decides


@needs_gpu
def test_a_later_rollout_records_its_first_step(monkeypatch):
    """It draws the same, and its step is launched one time less; another kind begins anew."""
    net, calls = toy().to("cuda"), []
    forward = type(net).forward
    monkeypatch.setattr(type(net), "forward",
                        lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))

    def sample(*lengths):
        calls.clear()
        r = generate(net, prompts(*lengths), 2, 9, eviction=EVICTION, seed=5)
        return r.tokens.tolist(), len(calls)

    first, n = sample(40, 61)
    assert n == 3 and sample(40, 61) == (first, 2)  # prefill, step 1, its recording
    assert sample(40, 61, 20)[1] == 3 and sample(61, 40)[1] == 2
    assert sample(61, 40)[0] != first  # control
