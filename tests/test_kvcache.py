"""
kvcache.py: scores by hand, the properties that every method must have and broken methods that they
find, spreads of the budget, response keys, storage.
"""
import json
import os
import random
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from conftest import EVICTION, RAW, SMALL, gap, prompts
from fast import scores
from kvcache import (
    EVICT,
    SPREAD,
    Eviction,
    KVCache,
    Method,
    adaptive,
    h2o,
    keep,
    received,
    rkv,
    similarity,
    snapkv,
)
from kvcache import pooled as pooled_by
from model import Config
from rollout import generate

CONFIG = Config.from_dict(RAW)
OWN = Eviction(**SMALL, response_budget=10, period=5)
NH, NKV, HS, P, W = 4, 2, 16, 40, 8


# properties of a method: a function from its name to nothing, or an AssertionError or ValueError

def score(name, q, k, elsewhere=None, seed=0, **settings):
    """A method's scores as the cache asks for them. q (B, P, nh, hs), k (B, P, nkv, hs), elsewhere
    None or (B, nh, P) -> (B, nkv, P)"""
    settings = {"budget": 12, "window": W, "sinks": 2, "pool": 1, **settings}
    cache = KVCache(CONFIG, [k.shape[1]] * len(k), group=1, max_new_tokens=2,
                    eviction=Eviction(name, **settings), seed=seed)
    n = len(q[0]) if cache.method.all_queries else W
    if elsewhere is not None:
        elsewhere = elsewhere[..., -n:]
    out = cache.scores(0, 0, q[:, -n:], k, elsewhere=elsewhere)
    assert cache.finite
    return out


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prompts_qk(B=3, seed=0):
    """Queries and keys of B prompts of P tokens."""
    return 2 * rows(B, P, NH, HS, seed=seed), rows(B, P, NKV, HS, seed=seed + 100)


def change(a, b):
    """How far scores moved, relative to the spread of their values."""
    return ((a - b).abs().max() / (b.max() - b.min())).item()


def reads_queries(name):
    """Whether a method's scores depend on the queries at all."""
    q, k = prompts_qk()
    return not torch.equal(score(name, q, k), score(name, q.flip(1), k))


def finite_scores_of_the_right_shape(name):
    q, k = prompts_qk()
    assert score(name, q, k).shape == (3, NKV, P)
    # three query heads a KV head: whoever averages over the wrong axis has another shape
    assert score(name, rows(3, P, 6, HS), k).shape == (3, NKV, P)


def twice_the_same(name):
    """Same seed, same scores, wherever torch's generator stands, and there it stays."""
    q, k = prompts_qk()
    first = score(name, q, k)
    torch.rand(3)
    before = torch.get_rng_state()
    assert torch.equal(score(name, q, k), first)
    assert torch.equal(torch.get_rng_state(), before)


def alone_as_in_a_batch(name):
    """A prompt keeps the same keys whoever its neighbours are."""
    q, k = prompts_qk()
    together = score(name, q, k)
    for b in range(3):
        alone = score(name, q[b:b + 1], k[b:b + 1])[0]
        assert change(alone, together[b]) < 1e-5
        assert torch.equal(keep(alone, 12, W, 2), keep(together[b], 12, W, 2))


def sinks_and_window_stay(name):
    q, k = prompts_qk()
    kept = keep(score(name, q, k), 12, W, 2)
    must = [0, 1, *range(P - W, P)]
    assert kept.shape == (3, NKV, 12) and (kept[..., 1:] > kept[..., :-1]).all()
    assert all((kept == j).any(-1).all() for j in must)


def finds_the_needle(name):
    """All queries look at one key: no key outside the window has a higher score."""
    for j in (3, P // 2, P - W - 1):
        q, k = prompts_qk()
        k[..., 0] = 0
        k[:, j] = 5 * F.one_hot(torch.tensor(0), HS)
        q = 0.1 * q + 12 * F.one_hot(torch.tensor(0), HS)
        if reads_queries(name):
            assert (score(name, q, k)[..., :P - W].argmax(-1) == j).all()


def sees_no_future(name):
    """The query before the last looks for the last key, which it cannot see. Whatever that key is,
    the query looks at key 20, as all of the window do."""
    q, k = prompts_qk()
    q, k = 0.1 * q, 0.1 * k
    for x in (q, k):
        x[..., :3] = 0
    q[:, -W:-1, :, 0] = k[:, 20, :, 0] = 6                      # logit 9 before the softmax
    q[:, -2, :, 1] = 20
    k[:, -1, :, 1] = 20                                         # logit 100
    other = k.clone()
    other[:, -1] = k[:, -1].roll(1, -1)                         # points where nobody looks
    got, want = score(name, q, k), score(name, q, other)
    assert change(got[..., :P - W], want[..., :P - W]) < 0.05


def counts_attention_elsewhere(name):
    """Queries that look outside the scored keys do not vote: what they ask for cannot matter. Who
    weighs the scored keys against each other alone must say so, and is never told."""
    q, k = prompts_qk()
    other = q.flip(1)
    if isinstance(EVICT[name], Method) and not EVICT[name].needs_elsewhere:
        away = torch.full((3, NH, P), 100.0)
        assert torch.equal(score(name, q, k, away), score(name, q, k))
        return
    free = (score(name, q, k) - score(name, other, k)).abs().max()
    away = torch.full((3, NH, P), 100.0)
    held = (score(name, q, k, away) - score(name, other, k, away)).abs().max()
    assert held <= 1e-3 * free


PROPERTIES = [finite_scores_of_the_right_shape, twice_the_same, alone_as_in_a_batch,
              sinks_and_window_stay, finds_the_needle, sees_no_future, counts_attention_elsewhere]


def violated(name):
    """Names of the properties that a method does not have."""
    found = set()
    for holds in PROPERTIES:
        try:
            holds(name)
        except (AssertionError, ValueError):
            found.add(holds.__name__)
    return found


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda f: f.__name__)
def test_every_method(method, holds):
    holds(method)


# broken methods

def votes(q, k, e, elsewhere=None, ahead=0):
    """Attention of the window, summed over it and averaged over heads, as one may write it down.
    ahead: how many keys that come later a query sees; right is 0."""
    W, n = len(q), len(k)
    q = q.unflatten(1, (k.shape[1], -1))                        # (W, nkv, group, hs)
    s = torch.einsum("whgc,nhc->hgwn", q, k) * HS ** -0.5
    born = torch.arange(n)
    s = s.masked_fill(born > born[n - W:, None] + ahead, -torch.inf)
    if elsewhere is not None:
        s = torch.cat((s, elsewhere.view(*s.shape[:2], W, 1)), dim=-1)
    return s.softmax(-1)[..., :n].sum(2).mean(1)                # (nkv, n)


def at_five(value):
    return lambda *x: votes(*x).index_fill(-1, torch.tensor(5), value)


def compares_with_all(q, k, e, elsewhere=None):
    x = votes(q, k, e, elsewhere)
    return x - x.mean(0) / 2


BROKEN = {  # name: method, the property that it lacks
    "sign flipped": (lambda *x: -votes(*x), finds_the_needle),
    "one key off": (lambda *x: votes(*x).roll(1, -1), finds_the_needle),
    "sees the future": (partial(votes, ahead=W), sees_no_future),
    "sees one key ahead": (partial(votes, ahead=1), sees_no_future),
    "ignores elsewhere": (lambda q, k, e, z=None: votes(q, k, e), counts_attention_elsewhere),
    "throws dice": (lambda q, k, *x: votes(q, k, *x) + torch.tensor([random.random() for _ in k]),
                    twice_the_same),
    "NaN": (at_five(torch.nan), finite_scores_of_the_right_shape),
    "infinite": (at_five(-torch.inf), finite_scores_of_the_right_shape),
    "one key short": (lambda *x: votes(*x)[:, :-1], finite_scores_of_the_right_shape),
    "of query heads": (lambda *x: votes(*x).repeat_interleave(2, 0),
                       finite_scores_of_the_right_shape)}
HARMLESS = {  # and why
    "votes": votes,
    # torch's generator is seeded by (seed, layer, step), and left as it was
    "throws torch's dice": lambda q, k, *x: votes(q, k, *x) + torch.rand(len(k)),
    # it is handed one prompt, and cannot average over others (but see below)
    "compares with all": compares_with_all,
    # `keep` does not ask for the scores of sinks and window
    "drops the window": lambda q, k, *x: votes(q, k, *x).masked_fill(
        torch.arange(len(k)) >= len(k) - len(q), -1e30)}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_methods_are_found(name, monkeypatch):
    method, lacks = BROKEN[name]
    monkeypatch.setitem(EVICT, "broken", method)
    assert lacks.__name__ in violated("broken")


@pytest.mark.parametrize("name", HARMLESS)
def test_mistakes_that_the_cache_makes_harmless(model, name, monkeypatch):
    monkeypatch.setitem(EVICT, "harmless", HARMLESS[name])
    assert violated("harmless") == set()
    r = generate(model, prompts(61, 40), 3, 20, eviction=replace(OWN, method="harmless"))
    assert r.until.min() < 20 and gap(model, r) <= 1e-4


def test_methods_that_say_what_they_are_not(monkeypatch):
    """Who reads `elsewhere` and says that it does not is found. So is one that compares its KV
    heads and says that it scores each by itself: other prompts pass as further heads."""
    for method, lacks in (
            (Method(votes, needs_elsewhere=False), {"counts_attention_elsewhere"}),
            (Method(votes, by_head=True), set()),
            (Method(compares_with_all, by_head=True), {"alone_as_in_a_batch"})):
        monkeypatch.setitem(EVICT, "says so", method)
        assert lacks <= violated("says so") and (lacks or not violated("says so"))


@pytest.mark.parametrize("name", ["snapkv", "rkv", "h2o"])
def test_scores_at_once_are_each_by_itself(name, monkeypatch):
    """As further KV heads, under vmap, and with few heads, queries and prompts at a time: what the
    method gives for one prompt after the other."""
    q, k = prompts_qk()
    away = rows(3, NH, P)
    e = Eviction(name, budget=12, window=W, sinks=2, pool=1)
    n = P if EVICT[name].all_queries else W
    for z in (None, away):
        inputs = [[q[i, P - n:], k[i], e, *([] if z is None else [z[i, :, -n:]])] for i in range(3)]
        want = torch.stack([EVICT[name](*one) for one in inputs])
        for by_head, size in ((True, 2**25), (False, 2**25), (True, 1), (False, 1)):
            with monkeypatch.context() as m:
                m.setitem(EVICT, name, replace(EVICT[name], by_head=by_head))
                m.setattr(scores, "SCORE_BYTES", size)
                got = score(name, q, k, z)
            assert change(got, want) < 1e-5 < change(got.roll(1, 0), want)
            assert change(got.flip(1), want) > 1e-3


@pytest.mark.parametrize("name, say", [
    ("NaN", "not finite"), ("infinite", "not finite"),
    ("one key short", r"scored \(2, 39\), not \(KV heads, keys\) = \(2, 40\)"),
    ("of query heads", r"scored \(4, 40\)")])
def test_generate_refuses_such_scores(model, name, say, monkeypatch):
    def later(q, k, e, elsewhere=None):
        if elsewhere is None:  # the prompt
            return votes(q, k, e)
        return BROKEN["NaN"][0](q, k, e, elsewhere)

    ask = dict(model=model, prompts=prompts(40), group=2, max_new_tokens=20)
    monkeypatch.setitem(EVICT, "broken", BROKEN[name][0])
    e = Eviction("broken", **SMALL)
    with pytest.raises(ValueError, match=say):
        generate(**ask, eviction=e)
    monkeypatch.setitem(EVICT, "broken", later)
    with pytest.raises(ValueError, match="gave scores that are not finite"):
        generate(**ask, eviction=replace(e, response_budget=10, period=5))
    generate(**ask, eviction=e)  # no response key is scored


# scores by hand

E = Eviction(budget=6, window=2, sinks=1, pool=1)


def test_snapkv_by_hand():
    """One KV head, two query heads, keys one-hot: votes are weights that can be written down."""
    P, W, hs = 8, 2, 8
    k = torch.eye(P, hs)[:, None] * 10.0                        # (8, 1, 8) key j is channel j
    q = torch.zeros(W, 2, hs)
    q[0, 0, 3] = q[1, 0, 3] = 50.0                              # head 0 looks at key 3,
    q[0, 1, 5] = q[1, 1, 4] = 50.0                              # head 1 at keys 5 and 4
    # sum over the window, mean over heads
    want = torch.tensor([[0, 0, 0, 1.0, 0.5, 0.5, 0, 0]])
    assert torch.allclose(snapkv(q, k, E), want, atol=1e-6)
    pooled = snapkv(q, k, replace(E, pool=3))
    want = torch.tensor([[0, 0, 1.0, 1.0, 1.0, 0.5, 0, 0]])
    assert torch.allclose(pooled, want, atol=1e-6)
    assert keep(pooled, 6, 2, 1).tolist() == [[0, 2, 3, 4, 6, 7]]
    # by the mean: what is beyond the ends counts as 0 and is divided by too
    want = torch.tensor([[0, 0, 1 / 3, 0.5, 2 / 3, 1 / 3, 0, 0]])
    assert torch.allclose(snapkv(q, k, replace(E, pool=3, pool_by="mean")), want, atol=1e-6)
    ends = pooled_by(torch.tensor([[3.0, 0, 0, 6]]), replace(E, pool=3, pool_by="mean"))
    assert torch.allclose(ends, torch.tensor([[1.0, 1, 2, 2]]))
    # with fewer queries than the window is long, nothing of the window is pooled out of it either
    q = torch.zeros(1, 1, hs)
    q[0, 0, 5] = 50.0
    e = replace(E, window=4, budget=7, pool=3)
    assert snapkv(q, k, e).abs().max() < 1e-6 < snapkv(q, k, replace(e, window=2))[0, 4]
    # causal inside the window: query 6 looks for key 7, sees nothing of it, is even over 0..6
    q = torch.zeros(W, 1, hs)
    q[0, 0, 7] = 50.0
    want = torch.tensor([[1 / 7 + 1 / 8] * 6 + [0, 0]])
    assert torch.allclose(snapkv(q, k, E), want, atol=1e-6)


def test_rkv_by_hand():
    """Of many alike the latest stays; attention decides among the rest. The last key is the
    window."""
    k = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    k = k[:, None]                                              # (5, 1, 4)
    # keys 1 and 2 are alike: each is the latest that is like the other, so neither is counted
    assert torch.allclose(similarity(k), torch.zeros(1, 5), atol=1e-6)
    # three alike: rows 1 and 2 spare key 3, row 3 spares key 2; (1,2), (2,1), (3,1) are left
    k[3] = k[2]
    mean = torch.tensor([[0.0, 2, 1, 0, 0]]) / 5
    assert torch.allclose(similarity(k), mean, atol=1e-6)
    q, e = torch.zeros(1, 2, 4), replace(E, window=1)
    q[0, 0, 0] = q[0, 1, 1] = 2 * 4.0                           # head 0 looks at key 0,
    q[0, 1, 1] = 2 * 3.0                                        # head 1 at 1, 2, 3: 3 in logits
    q[0, :, 3] = 2 * 9.0                                        # both at the window
    attention = torch.tensor([4.0, 3, 3, 3]).softmax(-1)        # of the larger logit, window apart
    redundancy = 0.9 * mean.softmax(-1)[:, :4]
    want = F.pad(0.1 * attention - redundancy, (0, 1))
    assert torch.allclose(rkv(q, k, e), want, atol=1e-6)
    pooled = F.max_pool1d(attention[None], 3, stride=1, padding=1)
    want = F.pad(0.1 * pooled - redundancy, (0, 1))
    assert torch.allclose(rkv(q, k, replace(e, pool=3)), want, atol=1e-6)


def rkv_of_softmaxes(q, k, e):
    """Nearly R-KV: softmax over all keys, then the largest of the query heads."""
    importance = pooled_by(received(q, k).amax(1) / len(q), e)
    return 0.1 * importance - 0.9 * similarity(k).softmax(-1)


def official_tensors(n, nh, nkv, seed):
    """Queries (n, nh, 16) and keys (n, nkv, 16) in six clusters, from integers: the same bits
    everywhere."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-2**10, 2**10 + 1, (4, *shape), generator=g).sum(0) / 2**10

    centre = draw(6, nkv, 16)
    k = centre[torch.randint(6, (n,), generator=g)] + draw(n, nkv, 16) * 3 / 4
    return draw(n, nh, 16) * 2, k


def test_same_keys_as_the_official_code():
    """What R-KV's and SnapKV's own code keeps of seeded tensors, with and without several query
    heads per KV head."""
    with open(os.path.join(os.path.dirname(__file__), "official_kept.json")) as f:
        cases = json.load(f)["cases"]
    assert {c["nh"] // c["nkv"] for c in cases} == {1, 2, 3, 4}
    assert {c["pool"] for c in cases} == {1, 7}
    other, control = 0, 0
    for c in cases:
        q, k = official_tensors(c["n"], c["nh"], c["nkv"], c["seed"])
        e = Eviction(budget=c["budget"], window=c["window"], sinks=0, pool=c["pool"])
        kept = {f.__name__: keep(f(q[-e.window:], k, e), e.budget, e.window, 0).tolist()
                for f in (rkv, snapkv, rkv_of_softmaxes)}
        assert kept["rkv"] == c["rkv"] and kept["snapkv"] == c.get("snapkv", kept["snapkv"])
        other += kept["snapkv"] != c["rkv"]
        control += kept["rkv_of_softmaxes"] != c["rkv"]
    assert sum("snapkv" in c for c in cases) == 4 and other == 8 and control == 7


def test_h2o_by_hand():
    """Every query counts, each over the keys that it saw; heads of a KV head add up."""
    k = torch.eye(3)[:, None].repeat(1, 2, 1) * 20              # (3, 2, 3)
    q = torch.zeros(3, 4, 3)
    q[2, 0, 0] = 20                                             # the last query, head 0: key 0
    even = torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])  # all else
    first = even + torch.tensor([1 + 1 / 2 + 1, 1 / 2, 0])
    assert torch.allclose(h2o(q, k, E), torch.stack((first, 2 * even)), atol=1e-6)


def test_recent_and_random(model):
    """Sinks and the latest keys; any keys, others for each seed, KV head and layer."""
    (kept,) = generate(model, prompts(60), 1, 2, eviction=Eviction("recent", **SMALL)).kept
    assert (kept == torch.tensor([0, 1, *range(38, 60)])).all()
    e = Eviction("random", **SMALL)
    a, b, c = (generate(model, prompts(60), 1, 2, eviction=e, seed=s).kept[0] for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert len({tuple(x) for x in a.flatten(0, 1).tolist()}) == 6


def test_random_scores_and_token_noise_have_nothing_in_common():
    """Both draw from a generator that the seed starts. With equal starts, the score of key 2k and
    the noise of token k correlate."""
    q, k = torch.zeros(1, 512, 1, 1), torch.zeros(1, 512, 2, 1)
    scores, same_start, noise = [], [], []
    for seed in range(200):
        scores.append(score("random", q, k, seed=seed)[0, 0, ::2])
        rng = torch.Generator().manual_seed(seed)
        noise.append(torch.empty(256).exponential_(generator=rng))
        same_start.append(torch.rand(512, generator=rng.manual_seed(seed))[::2])

    def correlation(x):
        return torch.corrcoef(torch.stack((torch.cat(x), torch.cat(noise))))[0, 1].abs()

    assert correlation(scores) < 0.02 < 0.08 < correlation(same_start)


# what is kept

def test_keep():
    """Sinks and window whatever their scores, then the best; of equals the earlier."""
    nan, inf = torch.nan, torch.inf
    score = torch.tensor([[-9.0, 1, 3, 2, 3, -9], [nan, inf, -inf, 0, 0, nan], [0.0] * 6])
    assert keep(score, 4, 1, 1).tolist() == [[0, 2, 4, 5], [0, 1, 3, 5], [0, 1, 2, 5]]
    assert keep(score, 3, 1, 0).tolist() == [[2, 4, 5], [0, 1, 5], [0, 1, 5]]
    many = rows(2, 3, 4, 20)  # leading dimensions
    for i in range(2):
        assert torch.equal(keep(many, 9, 3, 2)[i], keep(many[i], 9, 3, 2))
    # different numbers: what follows the kept positions is n, which is no position
    score, count = torch.tensor([[1.0, 4, 3, 2, 0]] * 3), torch.tensor([4, 3, 2])
    assert keep(score, 4, 1, 1, count=count).tolist() == [[0, 1, 2, 4], [0, 1, 4, 5], [0, 4, 5, 5]]


@pytest.mark.parametrize("n", [1, 11, 24, 25])
def test_kept_per_prompt(model, method, n):
    """min(n, budget) keys, ascending, sinks and window among them, around the budget."""
    (kept,) = generate(model, prompts(n), 2, 3, eviction=Eviction(method, **SMALL)).kept
    assert kept.shape == (3, 2, min(n, 24)) and (kept[..., 1:] > kept[..., :-1]).all()
    if n > 24:
        for must in (0, 1, *range(n - 8, n)):
            assert (kept == must).any(-1).all()


def test_settings_check_themselves():
    for say, wrong in (("unknown spread 'flat': choose from uniform", dict(spread="flat")),
                       ("unknown pool_by 'median': choose from max, mean", dict(pool_by="median")),
                       ("unknown eviction method 'h2o2'", dict(method="h2o2")),
                       ("budget 36 must be above window \\+ sinks", dict(budget=36)),
                       ("window 0 must be at least 1", dict(window=0)),
                       ("sinks -1 at least 0", dict(sinks=-1)), ("pool 4 odd", dict(pool=4)),
                       ("must be above the window of 32", dict(response_budget=32)),
                       ("period 0 at least 1", dict(response_budget=33, period=0)),
                       ("must name a method", dict(response_budget=33, method="none"))):
        with pytest.raises(ValueError, match=say):
            Eviction(**wrong)
    Eviction(budget=37, response_budget=33, period=1)
    Eviction("none", budget=0)


# spreads of the budget

def test_pyramid_keeps_what_uniform_keeps():
    """In all layers together, exactly; from 1.95 to 0.05 times what is free after window and sinks,
    in even steps."""
    for n_layer in (1, 2, 3, 16, 28, 61):
        for budget in (11, 24, 25, 63, 1024):
            e = Eviction(budget=budget, window=8, sinks=2, spread="pyramid")
            counts = [SPREAD["pyramid"](e, layer, n_layer) for layer in range(n_layer)]
            line = torch.linspace(1.95, 0.05, n_layer)
            if n_layer == 1:
                line = torch.ones(1)
            line = 10 + (budget - 10) * line                    # (L,)
            assert sum(counts) == n_layer * budget
            assert (torch.tensor(counts) - line).abs().max() <= 1
            if n_layer > 1 and budget > 11:  # the controls: uniform, and each layer rounded down
                assert (budget - line).abs().max() > 1
                assert line.floor().sum() < n_layer * budget


def test_pyramid_in_the_cache(model):
    """Layers keep 37, 24 and 11 keys; storage and log say so, to the byte."""
    per_key = 2 * 2 * 16 * 4                                    # keys and values, heads, hs, bytes
    e = Eviction(**SMALL, spread="pyramid", response_budget=10, period=5)
    for lengths, counts in (((61, 40, 20), [[37, 24, 11], [37, 24, 11], [20, 20, 11]]),
                            ((20,), [[20, 20, 11]])):  # here the layers do not add up
        r = generate(model, prompts(*lengths), 2, 21, eviction=e)
        assert [[k.shape[1] for k in kept] for kept in r.kept] == counts
        slots = len(lengths) * sum(max(layer) for layer in zip(*counts))
        assert r.kv["kept"] == per_key * (slots + len(lengths) * 6 * 15)
    uniform = generate(model, prompts(61, 40, 20), 2, 21, eviction=replace(e, spread="uniform"))
    assert uniform.kept[0].shape == (3, 2, 24)


def test_adaptive_by_hand():
    """Eight keys per head, five of them free: the best ten candidates of both heads together, but
    at least one and at most ten of each head."""
    e = Eviction(budget=8, window=2, sinks=1, spread="adaptive")
    high, low = torch.arange(100.0, 120), torch.arange(20.0)
    assert adaptive(torch.stack((high, low)), e).tolist() == [3 + 9, 3 + 1]
    mixed = torch.stack((2 * low, 2 * low + 1))  # candidates 1 .. 17: 35, 34, 33 ...
    assert adaptive(mixed, e).tolist() == [8, 8]
    mixed[0, 10:] += 4  # three more in front
    assert adaptive(mixed, e).tolist() == [9, 7]
    # sinks and window stay anyway, and do not compete
    mixed[1, 0] = mixed[1, 18:] = 1e9
    assert adaptive(mixed, e).tolist() == [9, 7]
    # with 15 free no head gets more than its 17 candidates
    wide = replace(e, budget=18)
    assert adaptive(torch.stack((high, low)), wide).tolist() == [3 + 17, 3 + 13]
    batch = torch.stack((torch.stack((high, low)), torch.stack((low, high)), mixed))
    assert adaptive(batch, e).tolist() == [[12, 4], [4, 12], [9, 7]]
    # of fifteen, three heads: ten at most, one at least
    assert adaptive(torch.stack((high, low, low + 10)), e).tolist() == [3 + 10, 3 + 1, 3 + 4]
    # of forty, twenty a head on average: a fifth of that is four
    long = torch.stack((torch.arange(100.0, 150), torch.arange(50.0)))
    assert adaptive(long, replace(e, budget=23)).tolist() == [3 + 36, 3 + 4]


def test_adaptive_in_the_cache(model, method):
    """The KV heads of a layer together keep what they do uniformly; of each the best stay. Room is
    made for the most that a head may keep."""
    e = Eviction(method, **SMALL, spread="adaptive")
    r = generate(model, prompts(61, 40, 20), 2, 9, eviction=e)
    for kept, n in zip(r.kept, (61, 40, 20)):
        for heads in kept:
            counts = [len(positions) for positions in heads]
            assert sum(counts) == 2 * min(24, n) and min(counts) >= min(10 + 14 // 5, n)
            for positions in heads:
                found = positions.tolist()
                assert found == sorted(set(found)) and {0, 1, *range(n - 8, n)} <= set(found)
    assert r.kv["kept"] == 2 * 2 * 16 * 4 * 3 * (3 * (24 + 14) + 6 * 8)
    # control: methods whose KV heads score alike keep equally many, SnapKV's do not
    differ = any(len(heads[0]) != len(heads[1]) for kept in r.kept for heads in kept)
    assert differ or method != "snapkv"


# response keys

def test_response_keys_that_live(model, method):
    """How many live at each step, and that the window is among them: counted from the log."""
    r = generate(model, prompts(61, 40), 2, 33, eviction=replace(OWN, method=method), seed=2)
    for step in range(32):  # the query of a step sees the keys born until then and not yet dead
        alive = r.until[..., :step + 1] > step                  # (L, nkv, B, G, step + 1)
        held = step
        if step >= 15:  # the first eviction is after step 14, when 15 are there
            held = 10 + step % 5
        assert (alive.sum(-1) == held + 1).all()  # and the step's own key
        assert alive[..., -min(8 + step % 5, step) - 1:].all()
    assert r.until.max() == 33 and set(r.until.unique().tolist()) == {15, 20, 25, 30, 33}
    if method == "recent":
        want = [next((t for t in range(15, 33, 5) if u < t - 10), 33) for u in range(33)]
        assert (r.until == torch.tensor(want)).all()


def test_response_storage(model):
    """Room for response_budget + period keys however long the response, to the byte."""
    for R in (9, 16, 17, 60):
        r = generate(model, prompts(100, 100), 3, R, eviction=OWN)
        assert r.kv["kept"] == 2 * 3 * 2 * 16 * 4 * (2 * 24 + 2 * 3 * min(R - 1, 15))
    for evict in ("h2o", "snapkv"):  # what is held beside the cache is no longer than the response
        e = Eviction(evict, **SMALL, response_budget=9, period=10**12)
        r = generate(model, prompts(40), 2, 6, eviction=e)
        assert (r.until == 6).all() and gap(model, r) <= 1e-4


@pytest.mark.parametrize("period", [2, 5, 9])
@pytest.mark.parametrize("name, voters", [("snapkv", 3), ("h2o", 100)])
def test_what_response_keys_are_scored_by(name, voters, period, monkeypatch):
    """The latest queries in order, at most one for each step of a period; the keys held, oldest
    first; and what the queries see of a prompt, padding left out. Scores of H2O add up. The best
    stay, with the window; the log says which and since when."""
    e = Eviction(name, budget=8, window=3, sinks=1, response_budget=4, period=period)
    cache = KVCache(CONFIG, [12, 5], group=2, max_new_tokens=20, eviction=e)
    seen = []

    def spy(cache, layer, t, q, k, elsewhere=None, scores=KVCache.scores):
        out = scores(cache, layer, t, q, k=k, elsewhere=elsewhere)
        seen.append((t, q.clone(), k.clone(), elsewhere, out))  # eviction moves the keys
        return out

    for b, n in enumerate(cache.lengths):
        cache.write_prompts(slice(b, b + 1), 0, q=rows(n, NH, HS), k=rows(n, NKV, HS, seed=b),
                            v=rows(n, NKV, HS))
    monkeypatch.setattr(KVCache, "scores", spy)
    monkeypatch.setattr(cache, "config", replace(CONFIG, n_layer=1))
    steps = [rows(3, 4, NH, HS, seed=10 + t) for t in range(19)]
    total = torch.zeros(4, NKV, 20)  # score of each token
    for t, (q, k, v) in enumerate(steps, start=1):
        cache.attend(0, q, k[:, :NKV].contiguous(), v[:, :NKV].contiguous())
        cache.advance()
        held, known = cache.born[0], len(seen)
        cache.evict_responses(t)
        if len(seen) == known:
            continue
        at, q, k, elsewhere, found = seen[-1]
        W = min(voters, period)
        assert at == t and torch.equal(q, torch.stack([x[0] for x in steps[t - W:t]], 1))
        for s in range(4):
            for h in range(NKV):
                born = [*held[s, h].tolist(), *range(t - period, t)]
                want = torch.stack([steps[u][1][s, h] for u in born])
                assert torch.equal(k[s, :, h], want)
                before = total[s, h, born] if name == "h2o" else 0
                total[s, h, born] = before + found[s, h]
                best = sorted(born[:-3], key=lambda u: -total[s, h, u])
                stay = sorted(best[:1] + born[-3:]) if len(born) > 4 else born
                assert cache.born[0][s, h].tolist() == stay
                assert [u for u in born if cache.until[0, s, h, u] == 20] == stay
                assert all(cache.until[0, s, h, u] == t for u in set(born) - set(stay))
            for h in range(NH):
                prompt = cache.prompt_k[0][s // 2, h // 2, :min(8, cache.lengths[s // 2])]
                mass = (q[s, :, h] @ prompt.t() * HS ** -0.5).logsumexp(-1)
                assert torch.allclose(elsewhere[s, h], mass, atol=1e-5)
    assert len(seen) >= 2


# storage

def test_storage_is_freed(model, monkeypatch):
    """When a layer is written, nothing of the layers before it is left."""
    refs, alive = [], []
    write = KVCache.write_prompts

    def spy(cache, which, layer, q, k, v):
        alive.append(sum(ref() is not None for written, ref in refs if written < layer))
        write(cache, which, layer, q=q, k=k, v=v)
        refs.append((layer, weakref.ref(k.untyped_storage())))

    monkeypatch.setattr(KVCache, "write_prompts", spy)
    r = generate(model, prompts(100, 100), 3, 9, eviction=EVICTION)
    assert alive == [0] * 3 and all(ref() is None for _, ref in refs)
    per_key = 2 * 3 * 2 * 16 * 4                                # k and v, layers, heads, hs, bytes
    assert r.kv["dense"] == per_key * (2 * 3 * 100 + 2 * 3 * 8)  # the rest is in test_method.py


def test_views_would_be_counted(model):
    """The control: a cache that keeps a view holds all keys, and says so; its own layers are one
    storage, which stays."""
    cache = KVCache(CONFIG, [100], group=1, max_new_tokens=9, eviction=Eviction(**SMALL))
    k = torch.randn(100, 2, 16)
    cache.write_prompts(slice(0, 1), 0, q=torch.randn(100, 4, 16), k=k, v=k.clone())
    want = 2 * 3 * 2 * 16 * 4 * (24 + 8)
    assert cache.nbytes() == want
    cache.prompt_k[0] = k[:24].transpose(0, 1)[None]            # (1, nkv, 24, hs)
    assert cache.nbytes() == want + 2 * 16 * 4 * 100
