"""objectives/ppo.py: GAE, whitening and the value's loss by hand; what the loop gives the head."""
import math
from dataclasses import replace

import pytest
import torch

from conftest import STOP, gap, learn, learner, logged, prompts, ragged, rel, some_rewards, toy
from grpo import replay
from kvcache import Eviction
from objectives.ppo import gae, value_loss, whiten
from rollout import generate
from run.report import facts

NAN = math.nan
KEEPS = Eviction(budget=24, window=8)


def test_gae_by_hand():
    """Three tokens, and a response that stops after two; gamma 0.9, lam 0.5."""
    mask = ragged(3, 2, R=3)
    values = torch.tensor([[[0.2, 0.4, 0.6], [0.2, 0.4, NAN]]])
    rewards = torch.tensor([[[0, 0, 1.0], [0, 1.0, NAN]]])
    adv, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    # delta: 0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 1 - 0.6 = 0.16, 0.14, 0.4
    # and where it stops: 0.16, 1 - 0.4 = 0.6
    want = torch.tensor([[[0.16 + 0.45 * 0.32, 0.14 + 0.45 * 0.4, 0.4],
                          [0.16 + 0.45 * 0.6, 0.6, 0]]])
    torch.testing.assert_close(adv, want)
    torch.testing.assert_close(returns, torch.tensor([[[0.504, 0.72, 1.0], [0.63, 1.0, 0]]]))
    # control: read on past the stop, the value of a prefix that never was would count
    on, _ = gae(rewards.nan_to_num(), values.nan_to_num(0.6), torch.ones_like(mask),
                gamma=0.9, lam=0.5)
    assert torch.equal(on[0, 0], adv[0, 0]) and (on[0, 1, :2] - adv[0, 1, :2]).abs().min() > 0.01
    # gamma = lam = 1: what was earned minus what was expected; lam = 0: one step ahead
    far = gae(rewards, values, mask, gamma=1.0, lam=1.0)[0]
    torch.testing.assert_close(far, torch.tensor([[[0.8, 0.6, 0.4], [0.8, 0.6, 0]]]))
    near = gae(rewards, values, mask, gamma=1.0, lam=0.0)[0]
    torch.testing.assert_close(near, torch.tensor([[[0.2, 0.2, 0.4], [0.2, 0.6, 0]]]))
    assert not gae(rewards, values.requires_grad_(), mask)[0].requires_grad


def test_whiten():
    got = whiten(torch.tensor([[[1.0, 2], [3, NAN]]]), ragged(2, 1, R=2))
    torch.testing.assert_close(got, torch.tensor([[[-1.0, 0], [1, 0]]]) / 1.0001)
    # nothing to compare, and one token: 0, not NaN
    assert (whiten(torch.full((1, 2, 2), 0.35), ragged(2, 1, R=2)) == 0).all()
    assert (whiten(torch.full((1, 1, 1), 0.35), ragged(1, R=1)) == 0).all()


@pytest.mark.parametrize("value, old, loss, grad", [
    (0.6, 0.5, 0.98, -1.4),    # within the clip: 0.5 (0.6 - 2)^2
    (1.0, 0.5, 0.845, 0.0),    # moved by more than 0.2 towards the return: 0.5 (0.7 - 2)^2
    (0.0, 0.5, 2.0, -2.0),     # moved away: the larger error counts, 0.5 (0 - 2)^2
    (0.5, 0.5, 1.125, -1.5)])  # first update
def test_value_loss(value, old, loss, grad):
    mask, values = ragged(1, R=2), torch.tensor([[[value, NAN]]], requires_grad=True)
    old, returns = torch.full((1, 1, 2), old), torch.full((1, 1, 2), 2.0)
    got = value_loss(values, old, returns, mask)
    got.backward()
    assert got.item() == pytest.approx(loss)
    assert values.grad.tolist() == [[[pytest.approx(grad), 0.0]]]
    scaled = value_loss(values, old, returns, mask, scale=0.25 * mask)
    assert scaled.item() == pytest.approx(loss / 4)
    if grad == 0:  # control: without the clip there is a gradient
        free = value_loss(values, old, returns, mask, clip=9.0)
        assert torch.autograd.grad(free, values)[0][0, 0, 0].item() == pytest.approx(-1)


def test_values_are_of_the_rows_that_predict():
    """A "value head" that computes the log-prob of the token that it stands before must return
    replay's own, of the last policy."""
    model, r = toy(dtype=torch.double), logged()

    def own(hidden):
        logp = (hidden @ model.head.t() / r.temperature).log_softmax(-1)
        return logp.gather(1, r.tokens[r.mask][:, None])

    def gradients(x):
        return torch.autograd.grad(x.sum(), list(model.parameters()))

    for policies in (("dense", "shadow"), ("shadow", "dense"), ("shadow",)):
        out = replay(model, r, policies, value=own)
        value, logp = out["value"].detach(), out[policies[-1]].detach()
        assert rel(value, logp) < 1e-12 and (value[~r.mask] == 0).all()
        others = replay(model, r)
        for p in {"dense", "shadow"} - {policies[-1]}:
            assert rel(value, others[p].detach()) > 1e-2  # control
    value = gradients(replay(model, r, value=own)["value"])
    shadow, dense = (gradients(replay(model, r)[p]) for p in ("shadow", "dense"))
    assert max(map(rel, value, shadow)) < 1e-10 < max(map(rel, dense, shadow))


def test_returns_and_values_of_the_loop():
    """The reward is that of the last token, so undiscounted every prefix is worth it; the values
    that are trained are the learner's policy's."""
    net = toy()
    r = generate(net, prompts(61, 40), 4, 12, stop_ids=STOP, eviction=KEEPS, seed=1)
    rewards = some_rewards(2, 4)
    c, objective, opt = learner(net, objective="ppo", value_coef=0.25, distill=0.0)
    torch.nn.init.normal_(objective.value.weight, 0, 0.1)

    def score(rollout, model=net, policy="shadow"):
        with torch.no_grad():
            return replay(model, rollout, (policy,), value=objective.value)

    _, batch, _ = objective.prepare(r, rewards, score)
    torch.testing.assert_close(batch["returns"], rewards[..., None] * r.mask)
    c.gamma = 0.5
    half = objective.prepare(r, rewards, score)[1]["returns"]
    b, g = torch.arange(2)[:, None], torch.arange(4)
    torch.testing.assert_close(half[b, g, r.lengths - 1], rewards)
    torch.testing.assert_close(half[..., 0], rewards * 0.5 ** (r.lengths - 1))
    c.gamma = 1.0

    def error(values):
        return ((values - batch["returns"]) ** 2 * batch["scale"] / 2).sum().item()

    log = learn(net, opt, objective, r, rewards=rewards, c=c, lr=0.0)
    assert log["value_loss"] == pytest.approx(error(score(r)["value"]), rel=1e-4)
    assert log["value_loss"] != pytest.approx(error(score(r, policy="dense")["value"]), rel=1e-2)
    policy = -(batch["adv"] * batch["scale"]).sum().item()  # the ratio is 1
    assert log["loss"] == pytest.approx(policy + 0.25 * log["value_loss"], rel=1e-4)
    mean = score(r)["value"].sum() / r.mask.sum()
    assert log["value"] == pytest.approx(mean.item(), rel=1e-4)


def test_a_group_of_one():
    """A learned value takes the place of the group's mean: one sample has an advantage, too."""
    net = toy()
    r = generate(net, prompts(61, 40), 1, 12, eviction=KEEPS, seed=1)
    c, objective, opt = learner(net, objective="ppo", group=1)
    rewards = some_rewards(2, 1)
    log = learn(net, opt, objective, r, rewards=rewards, c=c, lr=1e-3)
    assert log["grad_norm"] > 0 and log["gap_max"] <= 1e-4
    assert facts(replace(r, rewards=rewards), {})["equal"] == 1
    assert gap(net, r) > 1e-4  # the weights moved
