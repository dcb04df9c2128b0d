"""
What the method promises, each promise with a control that must fail. Read this file first.

The sampler decodes from a compressed KV cache and logs which keys it dropped. The learner replays
the log, so that the policy that is updated is the policy that sampled. `method` is every eviction
method in turn; gap is the largest difference between the two in the log-prob of a sampled token.
"""
from dataclasses import replace

import pytest
import torch

from conftest import (
    EVICTION,
    SMALL,
    STOP,
    gap,
    learn,
    learner,
    prompts,
    some_rewards,
    toy,
)
from kvcache import SPREAD, Eviction
from rollout import generate

# only keys of the prompt die, or from step 15 on keys of the response too
EVICTED = {"prompt": {}, "response": dict(response_budget=10, period=5)}


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("evicted", EVICTED)
def test_learner_scores_what_the_sampler_sampled(model, method, spread, evicted):
    """Ragged prompts, one of them below the budget; several samples; some stop early."""
    e = Eviction(method, spread=spread, **SMALL, **EVICTED[evicted])
    r = generate(model, prompts(61, 40, 20), group=4, max_new_tokens=24, temperature=0.8,
                 eviction=e, stop_ids=STOP, seed=1)
    assert r.lengths.min() < 15 < r.lengths.max() == 24
    assert (r.until.min() < 24) == (evicted == "response")
    assert gap(model, r) <= 1e-4
    for mistake, wrong in wrong_logs(r):
        assert gap(model, wrong) > 1e-3, mistake


def wrong_logs(r):
    """The rollout with one mistake at a time in its log."""
    everything = [torch.arange(len(p)).expand(3, 2, -1) for p in r.prompts]
    yield "all prompt keys are there", replace(r, kept=everything)
    shifted = [[[((k + 1) % len(p)).sort().values for k in heads] for heads in layers]
               for layers, p in zip(r.kept, r.prompts)]
    yield "the neighbours of the kept prompt keys are there", replace(r, kept=shifted)
    first = [[k.clone() for k in heads] for heads in r.kept[0]]
    first[0][0][-1] = min(set(range(61)) - set(first[0][0].tolist()))
    first[0][0] = first[0][0].sort().values
    yield "one prompt key of one KV head is another", replace(r, kept=[first, *r.kept[1:]])
    dead = r.until < 24
    if dead.any():
        yield "all response keys live", replace(r, until=torch.full_like(r.until, 24))
        yield "they die a step late", replace(r, until=r.until + dead.int())
        yield "their neighbours die", replace(r, until=r.until.roll(1, -1))
        b, g = (r.lengths == 24).nonzero()[0].tolist()
        until = r.until.clone()
        until[0, 0, b, g, dead[0, 0, b, g].nonzero()[0]] = 24
        yield "one response key of one KV head lives", replace(r, until=until)


def test_first_response_token_is_dense(model, method):
    """The last prompt token saw every key; the next token sees what was kept."""
    dense = generate(model, prompts(61, 40), 2, 4, eviction=Eviction("none"), seed=5)
    r = generate(model, prompts(61, 40), 2, 4, eviction=Eviction(method, **SMALL), seed=5)
    assert torch.equal(r.logp_roll[..., 0], dense.logp_roll[..., 0])
    assert (r.logp_roll[..., 1] - dense.logp_roll[..., 1]).abs().max() > 0.1


def test_budget_of_the_prompt_is_dense(model, method):
    e = Eviction(method, budget=40, window=8, sinks=2)
    ask = dict(prompts=prompts(40, 33), group=2, max_new_tokens=8, seed=2)
    dense = generate(model, eviction=Eviction("none"), **ask)
    whole = generate(model, eviction=e, **ask)
    assert torch.equal(dense.tokens, whole.tokens)
    assert torch.equal(dense.logp_roll, whole.logp_roll)
    less = generate(model, eviction=replace(e, budget=39), **ask)
    assert not torch.equal(dense.logp_roll, less.logp_roll)


def test_storage_is_what_is_kept(model, method):
    """2 (keys and values) x 3 layers x 2 KV heads x 16 numbers x 4 bytes for each key; prompts are
    held once for their group, and the last token of a response is never fed."""
    r = generate(model, prompts(61, 40), 3, 9, eviction=Eviction(method, **SMALL))
    assert r.kv["kept"] == 768 * (2 * 24 + 2 * 3 * 8)
    assert r.kv["dense_shared"] == 768 * (61 + 40 + 2 * 3 * 8)


def test_sampler_and_learner_agree_again_after_an_update():
    net = toy()
    c, objective, opt = learner(net)
    ask = dict(prompts=prompts(61, 40), group=4, max_new_tokens=8, eviction=EVICTION)
    before = generate(net, **ask)
    log = learn(net, opt, objective, before, rewards=some_rewards(2, 4), c=c, lr=1e-3)
    assert log["gap_max"] <= 1e-4
    assert gap(net, before) > 1e-2  # it was sampled by another policy now
    assert gap(net, generate(net, **ask)) <= 1e-4
