"""
SnapKV's kernels against the formula that they replace, KVCache.write_prompts; on a GPU if there is
one, else in Triton's interpreter, in a process of its own.
"""
from dataclasses import replace

import pytest
import torch

import kvcache
from conftest import CUDA, DEVICE, EVICTION, RAW, beside_interpreter, kernel, prompts, toy
from fast import snapkv
from kvcache import Eviction, KVCache
from model import Config
from rollout import generate

KERNELS = "not interpreter and not real_blocks"  # tests that run in the interpreter


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs and steps at sizes that the interpreter can compute."""
    for name, size in dict(BLOCK=16, SPLIT=16, SPLITS=3, CHOICE=64).items():
        monkeypatch.setattr(snapkv, name, size)


def config(**changes):
    return Config.from_dict({**RAW, "num_hidden_layers": 1, **changes})


def rows(config, lengths, scale=2.0):
    """q, k, v of prompts that follow each other: parts of one tensor, as in the model."""
    nh, nkv = config.n_head, config.n_kv_head
    qkv = torch.randn(sum(lengths), nh + 2 * nkv, config.head_size, device=DEVICE)
    return (scale * qkv).split([nh, nkv, nkv], dim=1)


def written(config, lengths, eviction, inputs, packs=None, formula=False):
    """A cache into which packs of so many prompts were written, all layers alike."""
    cache = KVCache(config, lengths, group=1, max_new_tokens=2, eviction=eviction, device=DEVICE)
    with pytest.MonkeyPatch.context() as m:
        if formula:
            m.setattr(kvcache, "knows", lambda *_: False)
        for layer in range(config.n_layer):
            first = row = 0
            for n in packs or [len(lengths)]:
                end = row + sum(lengths[first:first + n])
                cache.write_pack(slice(first, first + n), layer,
                                 *(x[row:end] for x in inputs))
                first, row = first + n, end
    return cache


def same(a, b):
    """Do two caches hold the same, bit for bit, and say so?"""
    stores = zip([*a.prompt_k, *a.prompt_v], [*b.prompt_k, *b.prompt_v], strict=True)
    logs = zip(a.kept_positions(), b.kept_positions(), strict=True)
    return all(map(torch.equal, *zip(*stores))) and all(
        type(x) is type(y) and len(x) == len(y) and all(map(torch.equal, x, y)) for x, y in logs)


SHAPES = [  # lengths, model, settings
    ((33, 90, 12, 24), {}, {}),  # ragged; two keep all
    ((70, 41), {}, dict(pool_by="mean")),
    ((40, 61), dict(num_attention_heads=3, num_key_value_heads=1),
     dict(window=19, budget=26, spread="pyramid")),
    ((50, 9), dict(num_attention_heads=6, head_dim=24), dict(window=5, pool=3, sinks=0)),
    ((44,), {}, dict(pool=1, window=1, budget=4)),
    ((10, 24), {}, {})]  # all keep all


@kernel
@pytest.mark.parametrize("lengths, shape, changes", SHAPES, ids=str)
def test_as_the_formula(lengths, shape, changes):
    torch.manual_seed(0)
    eviction = replace(EVICTION, **changes)
    net = config(num_hidden_layers=2 if eviction.spread == "pyramid" else 1, **shape)
    inputs = rows(net, lengths)
    want = written(net, lengths, eviction, inputs, formula=True)
    got = written(net, lengths, eviction, inputs)
    assert same(got, want) and got.finite
    if len(lengths) > 2:  # a pack does not matter
        assert same(written(net, lengths, eviction, inputs, packs=[1, len(lengths) - 1]), want)
    # the control: other queries vote otherwise
    other = written(net, lengths, eviction, (-inputs[0], *inputs[1:]), formula=True)
    assert same(got, other) == (max(lengths) <= 24)


@kernel
def test_other_settings_are_other_choices():
    """What `compress` is told matters: each of these changes what is kept."""
    torch.manual_seed(0)
    net, lengths = config(), (64,)
    inputs = rows(net, lengths)
    want = written(net, lengths, EVICTION, inputs)
    for changes in (dict(pool=1), dict(pool_by="mean"), dict(window=9), dict(sinks=0),
                    dict(budget=23)):
        other = written(net, lengths, replace(EVICTION, **changes), inputs, formula=True)
        assert not same(other, want), changes


@kernel
def test_ties_go_to_the_earlier_key():
    """Equal keys get equal votes; of those that tie at the edge the first stay."""
    torch.manual_seed(0)
    net, lengths = config(), (64,)
    q, k, v = rows(net, lengths)
    few = torch.randn(3, net.n_kv_head, net.head_size, device=DEVICE)
    for equal in (few[torch.arange(64, device=DEVICE) % 3], few[:1].expand(64, -1, -1)):
        equal = equal.contiguous()
        eviction = replace(EVICTION, pool=1)
        got = written(net, lengths, eviction, (q, equal, v))
        assert same(got, written(net, lengths, eviction, (q, equal, v), formula=True))
    first = [*range(16), *range(56, 64)]  # 24 of 64: sinks, what follows them, the window
    assert got.kept_positions()[0].tolist() == [[first] * 2]
    assert not same(got, written(net, lengths, eviction, (q, k, v), formula=True))  # control


@kernel
@pytest.mark.parametrize("wrong", (float("nan"), float("inf")))
def test_scores_that_are_not_finite(wrong):
    """They are noted, of a prompt that is scored; sinks and window stay."""
    torch.manual_seed(0)
    net, lengths = config(), (60, 20)
    for at, finite in ((5, False), (70, True), (59, False)):
        q, k, v = (x.clone() for x in rows(net, lengths))
        k[at, 1, 3] = wrong
        got = written(net, lengths, EVICTION, (q, k, v))
        assert bool(got.finite) == finite
        assert bool(written(net, lengths, EVICTION, (q, k, v), formula=True).finite) == finite
        for positions, P in zip(got.kept_positions(), lengths):
            assert (positions.diff(dim=-1) > 0).all() and (positions < P).all()
            assert (positions[..., :2] == torch.arange(2, device=DEVICE)).all()
            window = torch.arange(P - 8, P, device=DEVICE)
            assert (positions[..., -8:] == window).all()


@kernel
def test_a_rollout_under_the_kernels(monkeypatch):
    """generate takes them, once a layer; where they do not apply the formula runs."""
    net, calls = toy(num_hidden_layers=1).to(DEVICE), []
    compress = kvcache.compress
    monkeypatch.setattr(kvcache, "compress", lambda *a, **k: calls.append(1) or compress(*a, **k))
    texts = prompts(30, 12)
    quick = generate(net, texts, 1, 3, eviction=EVICTION, temperature=0.0)
    assert len(calls) == 1
    monkeypatch.setattr(kvcache, "knows", lambda *_: False)
    slow = generate(net, texts, 1, 3, eviction=EVICTION, temperature=0.0)
    assert len(calls) == 1 and torch.equal(quick.tokens, slow.tokens)
    assert all(map(torch.equal, quick.kept, slow.kept))
    monkeypatch.undo()
    for eviction in (replace(EVICTION, spread="adaptive"), replace(EVICTION, method="h2o")):
        assert snapkv.knows(eviction, torch.ones(1, device=DEVICE)) == (eviction.method == "h2o")
    assert not snapkv.knows(EVICTION, torch.ones(1, device=DEVICE, dtype=torch.float64))


@kernel
def test_heads_must_follow_each_other():
    net, lengths = config(), (40,)
    q, k, v = rows(net, lengths)
    apart = k.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="must follow each other"):
        written(net, lengths, EVICTION, (q, apart, v))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("heads, size", [((9, 3), 64), ((14, 2), 64), ((12, 2), 128)])
@pytest.mark.parametrize("lengths", [(1024,) * 4, (2048, 300, 5000), (16384,)], ids=str)
def test_real_blocks_in_bf16(monkeypatch, heads, size, lengths):
    """At most a few keys of a thousand differ from the formula's, whose votes round otherwise."""
    monkeypatch.undo()
    torch.manual_seed(0)
    net = config(num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=size)
    eviction = Eviction(budget=256)
    inputs = [x.bfloat16() for x in rows(net, lengths, scale=1.0)]
    want, got = (written(net, lengths, eviction, inputs, formula=f) for f in (True, False))
    for a, b in zip(got.kept_positions(), want.kept_positions()):
        differ = [len(set(x) - set(y)) / len(x)
                  for x, y in zip(a.flatten(0, 1).tolist(), b.flatten(0, 1).tolist())]
        assert max(differ) < 0.01
    other = written(net, lengths, eviction, [inputs[0].flip(0), *inputs[1:]])  # control
    kept = other.kept_positions()[0][0, 0].tolist(), want.kept_positions()[0][0, 0].tolist()
    assert len(set(kept[0]) - set(kept[1])) > 25


@beside_interpreter
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()
