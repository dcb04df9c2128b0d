"""objectives/dpo.py: the loss by hand, the choice of pairs, the loop with and without a pair."""
import math
from dataclasses import replace

import pytest
import torch

from conftest import EVICTION, learn, learner, logged, prompts, ragged, rel, toy
from grpo import replay, token_scale
from objectives.dpo import best_and_worst, dpo_loss
from rollout import generate
from run.report import show

NAN = math.nan


def test_dpo_loss_by_hand():
    """Gains 0.5 + 0.5 and -0.5, so the margin is 1.5; beta 0.2."""
    mask = ragged(2, 1, R=2)
    logp = torch.tensor([[[-1.0, -2.0], [-1.0, NAN]]], requires_grad=True)
    ref = torch.tensor([[[-1.5, -2.5], [-0.5, NAN]]])
    loss, margin = dpo_loss(logp, ref, mask, 0.2)
    assert margin.tolist() == [1.5]
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.3)))
    loss.sum().backward()
    # beta sigmoid(-beta margin): up for the better response, down for the other
    slope = 0.2 / (1 + math.exp(0.3))
    torch.testing.assert_close(logp.grad, torch.tensor([[[-slope, -slope], [slope, 0]]]))
    # the initial weights against themselves: log 2
    assert dpo_loss(ref, ref, mask)[0].item() == pytest.approx(math.log(2))
    # control: the order of the pair
    flipped = dpo_loss(logp.flip(1), ref.flip(1), mask.flip(1), 0.2)[0]
    assert flipped.item() == pytest.approx(math.log(1 + math.exp(0.3)))


@pytest.mark.parametrize("rewards, chosen, pair", [
    ([[0.0, 1, 1], [0.5, 0.5, 0.5]], [0], [[1, 0]]),
    ([[1.0, 1, 0], [0, 2, 1]], [0, 1], [[0, 2], [1, 0]])])
def test_best_and_worst(rewards, chosen, pair):
    """Each half of a pair is scored under the log of its own sample."""
    model, r = toy(dtype=torch.double), logged()
    got = best_and_worst(r, torch.tensor(rewards))
    b, g = torch.tensor(chosen)[:, None], torch.tensor(pair)
    assert got.prompts == [r.prompts[i] for i in chosen]
    assert torch.equal(got.lengths, r.lengths[b, g]) and torch.equal(got.mask, r.mask[b, g])
    assert torch.equal(got.stopped, r.stopped[b, g])
    with torch.no_grad():
        want = replay(model, r)["shadow"][b, g]
        assert rel(replay(model, got)["shadow"], want) < 1e-10
        wrong = replace(got, until=got.until.flip(3))  # control: the lifetimes of the other half
        assert rel(replay(model, wrong)["shadow"], want) > 1e-2
    assert best_and_worst(r, torch.ones(2, 3)).prompts == []


def test_without_a_pair():
    """Rewards that are all equal leave the weights alone; one that is not does not."""
    net = toy()
    r = generate(net, prompts(61, 40), 4, 12, seed=1, eviction=EVICTION)
    c, objective, opt = learner(net, initial=toy(seed=5), objective="dpo")
    before, rewards = [p.detach().clone() for p in net.parameters()], torch.ones(2, 4)
    log = learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-3)
    assert log["pairs"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    line = dict(log, step=0, reward=1.0, truncated=0.0, equal=1.0, rollout_s=0.0, learn_s=0.0)
    assert "nothing replayed" in show(line)
    rewards[1, 2] = 0.0
    log = learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-3)
    assert log["pairs"] == 1
    assert not all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    net.layers[1].mlp.down_proj.weight.data[0, 0] = NAN  # which is no reason to skip an update
    with pytest.raises(FloatingPointError, match="norm is nan"):
        learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-3)


def test_the_kl_is_weighted_by_the_rewards_of_the_pair():
    """Not by those of other samples: what an objective selects has its own."""
    net = toy()
    r = generate(net, prompts(61, 40), 4, 12, seed=1, eviction=EVICTION)
    rewards = torch.tensor([[0.25, 0.5, 1, 0.75], [0.5, 0.5, 0.5, 0.5]])
    c, objective, opt = learner(net, initial=toy(seed=5), objective="dpo", distill_on="reward")
    log = learn(net, opt, objective, r, rewards=rewards, c=c, lr=0.0)
    pair = r.select([0], torch.tensor([[2, 0]]))
    with torch.no_grad():
        kl = replay(net, pair, distill_to="dense")["kl"] * token_scale(pair.mask)

    def weighted(best, worst):
        return (kl * torch.tensor([best, worst])[:, None]).sum().item()

    assert log["kl"] == pytest.approx(weighted(1.0, 0.25), rel=1e-4)
    for wrong in ((0.25, 0.5), (0.25, 1.0), (1.0, 1.0)):
        assert log["kl"] != pytest.approx(weighted(*wrong), rel=1e-2)
