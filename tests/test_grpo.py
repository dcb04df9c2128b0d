"""grpo.py: hand-computed values, then the real path rollout -> pack -> replay -> loss in fp64 against separate forwards."""
import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from fast import head
from fast.head import HeadRows, kl_rows, score
from grpo import (pack, advantages, best_and_worst, correction, distill_kl, dpo_loss, gae, policy_loss, reference_kl, replay,
                  token_scale, value_loss, whiten)
from model import Config, Transformer
from rollout import Rollout, generate

NAN = float("nan")
P3, Q3 = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])


def ragged(*lengths, R):
    return torch.arange(R) < torch.tensor(lengths)[None, :, None]  # (1, G, R)


def rel(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# advantages

def test_advantages_by_hand():
    r = torch.tensor([[1.0, 0, 0, 0], [0, 0, 2, 2]])
    std = torch.tensor([[0.5], [math.sqrt(4 / 3)]])  # over G - 1
    centred = torch.tensor([[0.75, -0.25, -0.25, -0.25], [-1, -1, 1, 1]])
    for norm in ("sequence", "token"):
        torch.testing.assert_close(advantages(r, norm), centred / (std + 1e-4))
    torch.testing.assert_close(advantages(r, "constant"), centred)
    assert advantages(torch.tensor([[0, 1]])).dtype == torch.float32  # counts of points are rewards too
    # each prompt is its own baseline: the mean over the batch would not give 0 in each row
    assert advantages(r).sum(1).abs().max() < 1e-6 < (r - r.mean()).sum(1).abs().max()


def test_equal_rewards_give_zero():
    r = torch.full((1, 8), 0.35)
    assert (advantages(r) == 0).all() and (advantages(r, "constant") == 0).all()
    assert ((r - r.mean()) / r.std()).abs().max() > 0.9  # fp32 without the constant: a residue of 3e-8 becomes 0.935


@pytest.mark.parametrize("rewards, norm, message", [
    (torch.ones(3, 1), "sequence", "at least 2"), (torch.ones(4), "token", "at least 2"),
    (torch.tensor([[1, NAN]]), "sequence", "1 of 2 rewards"), (torch.ones(1, 2), "mean", "unknown norm 'mean'")])
def test_advantages_refuse(rewards, norm, message):
    with pytest.raises(ValueError, match=message):
        advantages(rewards, norm)


# the surrogate

@pytest.mark.parametrize("norm, value", [("sequence", 0.0), ("token", 0.5), ("constant", 0.25)])
def test_reductions(norm, value):
    mask, adv = ragged(1, 3, R=4), torch.tensor([[1.0, -1.0]])
    loss, _ = policy_loss(torch.randn(1, 2, 4), None, adv, mask, norm=norm)
    assert loss.item() == pytest.approx(value, abs=1e-7)


def test_token_scale():
    mask = ragged(1, 3, R=4)
    torch.testing.assert_close(token_scale(mask, "sequence"), torch.tensor([[[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]]]))
    torch.testing.assert_close(token_scale(mask, "token"), mask / 4)
    torch.testing.assert_close(token_scale(mask, "constant"), mask / 8)
    for norm in grpo.NORMS:  # nothing to learn from is 0, not 0 / 0
        assert (token_scale(torch.zeros(1, 2, 3, dtype=torch.bool), norm) == 0).all()
    wide = ragged(1, 3, R=54)  # fifty columns of padding change nothing but the reduction defined by the column count
    assert torch.equal(token_scale(wide, "sequence")[..., :4], token_scale(mask, "sequence"))
    assert torch.equal(token_scale(wide, "token")[..., :4], token_scale(mask, "token"))
    assert not torch.equal(token_scale(wide, "constant")[..., :4], token_scale(mask, "constant"))


def surrogate(ratio, adv, **kw):
    """loss, gradient wrt log-prob, stats of a single token"""
    logp = torch.tensor([[[math.log(ratio)]]], requires_grad=True)
    loss, stats = policy_loss(logp, torch.zeros(1, 1, 1), torch.tensor([[adv]]), torch.ones(1, 1, 1, dtype=torch.bool), **kw)
    loss.backward()
    return loss.item(), logp.grad.item(), stats


@pytest.mark.parametrize("ratio, adv, loss, grad, clipped", [
    (1.5, 1.0, -1.2, 0, 1), (1.5, -1.0, 1.5, 1.5, 0), (0.5, 1.0, -0.5, -0.5, 0), (0.5, -1.0, 0.8, 0, 1),
    (1.1, 2.0, -2.2, -2.2, 0), (1.5, 0.0, 0, 0, 0)])
def test_clip(ratio, adv, loss, grad, clipped):
    got = surrogate(ratio, adv)
    assert got[:2] == pytest.approx((loss, grad), abs=1e-6) and got[2]["clipped"] == clipped


def test_clip_high():
    assert surrogate(1.25, 1.0)[2]["clipped"] == 1 and surrogate(1.25, 1.0, clip_high=0.28)[2]["clipped"] == 0
    assert surrogate(1.5, 1.0, clip_high=0.28)[0] == pytest.approx(-1.28)
    assert surrogate(0.5, -1.0, clip_high=0.28)[0] == pytest.approx(0.8)  # the lower side is clip's


def test_stats_are_means_over_the_mask():
    mask = ragged(1, 2, R=3)
    logp = torch.tensor([[[math.log(1.5), 9, 9], [math.log(0.5), 0, 9]]])
    stats = policy_loss(logp, torch.zeros(1, 2, 3), torch.tensor([[1.0, 1.0]]), mask)[1]
    assert stats["clipped"].item() == pytest.approx(1 / 3) and stats["ratio"].item() == pytest.approx(1)
    assert stats["kl_old"].item() == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3)


def test_first_update_is_exactly_on_policy():
    torch.manual_seed(0)
    mask, adv = ragged(5, 7, 2, R=8), advantages(torch.tensor([[1.0, 0, 0]]))
    logp = torch.randn(1, 3, 8, requires_grad=True)
    loss, stats = policy_loss(logp, None, adv, mask)
    loss.backward()
    assert abs(loss.item()) < 1e-6 and stats["ratio"] == 1 and stats["clipped"] == 0  # "loss is 0" is no bug
    torch.testing.assert_close(logp.grad, -token_scale(mask) * adv[..., None])  # ... the gradient is not
    assert logp.grad.abs().sum() > 0.1


def test_log_ratio_is_bounded():
    for delta, adv, want in ((100, 1.0, -1.2), (100, -1.0, math.exp(20)), (-100, 1.0, -math.exp(-20))):
        logp = torch.full((1, 1, 1), float(delta))
        loss, _ = policy_loss(logp, torch.zeros(1, 1, 1), torch.tensor([[adv]]), torch.ones(1, 1, 1, dtype=torch.bool))
        assert loss.item() == pytest.approx(want, rel=1e-6)
    assert math.isinf(torch.tensor(100.0).exp().item())  # what the bound prevents


@pytest.mark.parametrize("where", ["logp", "logp_old", "weight"])
def test_nan_past_the_mask_does_not_leak(where):
    torch.manual_seed(0)
    mask, adv = ragged(1, 3, R=4), torch.tensor([[1.0, -1.0]])
    x = {k: torch.randn(1, 2, 4) for k in ("logp", "logp_old", "weight")}

    def run():
        logp = x["logp"].clone().requires_grad_()
        loss, stats = policy_loss(logp, x["logp_old"], adv, mask, weight=x["weight"])
        loss.backward()
        return loss, logp.grad, *stats.values()

    clean = run()
    x[where] = x[where].masked_fill(~mask, NAN)
    assert all(torch.equal(a, b) for a, b in zip(run(), clean))
    x[where] = x[where].masked_fill(mask, NAN)  # control: inside the mask it must not be hidden
    assert run()[0].isnan()


def test_shapes_that_would_broadcast_are_refused():
    logp, mask, adv = torch.zeros(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool), torch.zeros(2, 3)
    policy_loss(logp, logp, adv, mask)
    for args, name in (((logp, logp[..., :3], adv, mask), "logp_old has"), ((logp, logp, adv[:1], mask), "adv has"),
                       ((logp, logp, adv, mask[:, :1]), "mask has"), ((logp, logp, adv, mask.float()), "mask must be bool")):
        with pytest.raises(ValueError, match=name):
            policy_loss(*args)
    with pytest.raises(ValueError, match="scale has"):
        policy_loss(logp, logp, adv, mask, scale=torch.ones(1, 3, 4))
    with pytest.raises(ValueError, match="unknown norm"):
        policy_loss(logp, logp, adv, mask, norm="mean")


def test_advantages_per_token():
    """(B, G, R) beside (B, G): the same where every token has its response's, and each token's own otherwise"""
    torch.manual_seed(0)
    mask, adv, old = ragged(4, 2, R=4), torch.tensor([[1.0, -0.5]]), torch.randn(1, 2, 4)

    def run(adv):
        logp = (old + 0.3 * torch.tensor([1.0, -1, 0.1, 2])).requires_grad_()
        loss, stats = policy_loss(logp, old, adv, mask)
        loss.backward()
        return loss, logp.grad, *stats.values()

    wide = adv[..., None].repeat(1, 1, 4)
    want = run(adv)
    assert all(torch.equal(a, b) for a, b in zip(run(wide), want)) and want[2] > 0  # something is clipped
    assert all(torch.equal(a, b) for a, b in zip(run(wide.masked_fill(~mask, NAN)), want))
    wide[0, 1, 1] = 2.0  # control: one token's
    got = run(wide)
    assert (got[1] != want[1]).nonzero().tolist() == [[0, 1, 1]] and got[0] != want[0]


# PPO

def test_gae_by_hand():
    """three tokens, and a response that stops after two; gamma 0.9, lam 0.5"""
    mask = ragged(3, 2, R=3)
    values, rewards = torch.tensor([[[0.2, 0.4, 0.6], [0.2, 0.4, NAN]]]), torch.tensor([[[0, 0, 1.0], [0, 1.0, NAN]]])
    adv, returns = gae(rewards, values, mask, 0.9, 0.5)
    # delta: 0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 1 - 0.6 = 0.16, 0.14, 0.4;   and 0.16, 1 - 0.4 = 0.6 where it stops
    torch.testing.assert_close(adv, torch.tensor([[[0.16 + 0.45 * 0.32, 0.14 + 0.45 * 0.4, 0.4], [0.16 + 0.45 * 0.6, 0.6, 0]]]))
    torch.testing.assert_close(returns, torch.tensor([[[0.504, 0.72, 1.0], [0.63, 1.0, 0]]]))
    # control: read on past the stop, the value of a prefix that never was would count
    on = gae(rewards.nan_to_num(), values.nan_to_num(0.6), torch.ones_like(mask), 0.9, 0.5)[0]
    assert torch.equal(on[0, 0], adv[0, 0]) and (on[0, 1, :2] - adv[0, 1, :2]).abs().min() > 0.01
    # gamma = lam = 1: what was earned minus what was expected; lam = 0: one step ahead
    torch.testing.assert_close(gae(rewards, values, mask, 1.0, 1.0)[0], torch.tensor([[[0.8, 0.6, 0.4], [0.8, 0.6, 0]]]))
    torch.testing.assert_close(gae(rewards, values, mask, 1.0, 0.0)[0], torch.tensor([[[0.2, 0.2, 0.4], [0.2, 0.6, 0]]]))
    assert not gae(rewards, values.requires_grad_(), mask)[0].requires_grad


def test_whiten():
    mask = ragged(2, 1, R=2)
    torch.testing.assert_close(whiten(torch.tensor([[[1.0, 2], [3, NAN]]]), mask), torch.tensor([[[-1.0, 0], [1, 0]]]) / 1.0001)
    assert (whiten(torch.full((1, 2, 2), 0.35), mask) == 0).all()  # nothing to compare
    assert (whiten(torch.full((1, 1, 1), 0.35), torch.ones(1, 1, 1, dtype=torch.bool)) == 0).all()  # one token: 0, not NaN


@pytest.mark.parametrize("value, old, loss, grad", [
    (0.6, 0.5, 0.98, -1.4),    # within the clip: 0.5 (0.6 - 2)^2
    (1.0, 0.5, 0.845, 0.0),    # moved by more than 0.2 towards the return: 0.5 (0.7 - 2)^2, constant
    (0.0, 0.5, 2.0, -2.0),     # moved away: the larger error counts, 0.5 (0 - 2)^2
    (0.5, 0.5, 1.125, -1.5)])  # first update
def test_value_loss(value, old, loss, grad):
    cube = lambda x: torch.full((1, 1, 2), x)
    mask, values = ragged(1, R=2), torch.tensor([[[value, NAN]]], requires_grad=True)
    got = value_loss(values, cube(old), cube(2.0), mask)
    got.backward()
    assert got.item() == pytest.approx(loss) and values.grad.tolist() == [[[pytest.approx(grad), 0.0]]]
    scaled = value_loss(values, cube(old), cube(2.0), mask, scale=0.25 * mask)
    assert scaled.item() == pytest.approx(loss / 4)
    if grad == 0:  # control: without the clip there is a gradient
        assert torch.autograd.grad(value_loss(values, cube(old), cube(2.0), mask, clip=9.0), values)[0][0, 0, 0].item() == pytest.approx(-1)


def test_values_are_of_the_rows_that_predict():
    """a "value head" that computes the log-prob of the token it stands before must return replay's own, of the last policy"""
    model, r = toy(), logged()
    own = lambda h: (h @ model.head.t() / r.temperature).log_softmax(-1).gather(1, r.tokens[r.mask][:, None])
    for policies in (("dense", "shadow"), ("shadow", "dense"), ("shadow",)):
        out = replay(model, r, policies, value=own)
        other = out[policies[0]] if len(policies) == 2 else replay(model, r, ("dense",))["dense"]
        assert rel(out["value"].detach(), out[policies[-1]].detach()) < 1e-12 and (out["value"][~r.mask] == 0).all()
        assert rel(out["value"].detach(), other.detach()) > 1e-2  # control
    a, b = (gradients(model, replay(model, r, value=own)[k].sum()) for k in ("value", "shadow"))
    assert gap(a, b) < 1e-10 < gap(gradients(model, replay(model, r)["dense"].sum()), b)


# online DPO

def test_dpo_loss_by_hand():
    """gains 0.5 + 0.5 and -0.5, so the margin is 1.5; beta 0.2"""
    mask = ragged(2, 1, R=2)
    logp, ref = torch.tensor([[[-1.0, -2.0], [-1.0, NAN]]], requires_grad=True), torch.tensor([[[-1.5, -2.5], [-0.5, NAN]]])
    loss, margin = dpo_loss(logp, ref, mask, 0.2)
    assert margin.tolist() == [1.5] and loss.item() == pytest.approx(math.log(1 + math.exp(-0.3)))
    loss.sum().backward()
    slope = 0.2 / (1 + math.exp(0.3))  # beta sigmoid(-beta margin): up for the better response, down for the other
    torch.testing.assert_close(logp.grad, torch.tensor([[[-slope, -slope], [slope, 0]]]))
    # the initial weights against themselves: log 2 and a gradient; controls: the order of the pair, and its size
    assert dpo_loss(ref, ref, mask)[0].item() == pytest.approx(math.log(2))
    assert dpo_loss(logp.flip(1), ref.flip(1), mask.flip(1), 0.2)[0].item() == pytest.approx(math.log(1 + math.exp(0.3)))
    with pytest.raises(ValueError, match="2 responses, got 3"):
        dpo_loss(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), torch.ones(1, 3, 2, dtype=torch.bool))


def test_best_and_worst():
    """each half of a pair is scored under the log of its own sample"""
    model, r = toy(), logged()
    for rewards, prompts, pair in (([[0.0, 1, 1], [0.5, 0.5, 0.5]], [0], [[1, 0]]), ([[1.0, 1, 0], [0, 2, 1]], [0, 1], [[0, 2], [1, 0]])):
        got = best_and_worst(r, torch.tensor(rewards))
        b, g = torch.tensor(prompts)[:, None], torch.tensor(pair)
        assert got.prompts == [r.prompts[i] for i in prompts] and torch.equal(got.lengths, r.lengths[b, g])
        assert torch.equal(got.mask, r.mask[b, g]) and torch.equal(got.stopped, r.stopped[b, g])
        want = replay(model, r)["shadow"][b, g]
        assert rel(replay(model, got)["shadow"].detach(), want.detach()) < 1e-10
        wrong = dataclasses.replace(got, until=got.until.flip(3))  # control: the lifetimes of the other half
        assert rel(replay(model, wrong)["shadow"].detach(), want.detach()) > 1e-2
    assert best_and_worst(r, torch.ones(2, 3)).prompts == []


# corrections

def test_corrections_by_hand():
    w = torch.tensor([[[0.4, 0.8, 1.2, 1.8, 3.0], [1.0, 5e-5, 1.0, 9, 9]]])
    mask, roll = ragged(5, 3, R=5), torch.randn(1, 2, 5)
    got = {name: correction(name, roll + w.log(), roll, mask) for name in ("tis", "mis", "sparse_rl")}
    torch.testing.assert_close(got["tis"], torch.tensor([[[0.4, 0.8, 1.2, 1.8, 2.0], [1.0, 5e-5, 1.0, 0, 0]]]))
    torch.testing.assert_close(got["mis"], torch.tensor([[[0.0, 0.8, 1.2, 1.8, 0.0], [1.0, 0, 1.0, 0, 0]]]))
    mean = (0.4 + 0.8 + 1.2 + 1.5 + 1.5 + 1 + 5e-5 + 1) / 8
    torch.testing.assert_close(got["sparse_rl"], torch.tensor([[[0.0, 0.8, 1.2, 0, 0], [0.0, 0, 0, 0, 0]]]) / mean)
    for name in got:  # replay makes learner and sampler one policy: every correction is then exactly nothing
        assert torch.equal(correction(name, roll, roll, mask), mask.float())
        assert correction(name, roll.masked_fill(~mask, NAN), roll, mask).isfinite().all()
    with pytest.raises(ValueError, match="unknown correction 'vtrace'"):
        correction("vtrace", roll, roll, mask)


def test_weight_is_constant_and_ratio_is_not():
    """weight = exp(old learner - sampler), detached; ratio = exp(new - old): two different quotients."""
    mask, adv = torch.ones(1, 2, 1, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
    roll, old = torch.tensor([[[-1.0], [-2.0]]]), torch.tensor([[[-1.2], [-1.7]]], requires_grad=True)
    new = (old.detach() + 0.1).requires_grad_()
    weight = (old - roll).exp()
    loss, stats = policy_loss(new, old, adv, mask, weight=weight)
    loss.backward()
    want = -(weight.detach() * math.exp(0.1) * adv[..., None]) / 2  # gradient of ratio is ratio
    torch.testing.assert_close(new.grad, want)
    assert loss.item() == pytest.approx(want.sum().item()) and old.grad is None
    assert stats["ratio"].item() == pytest.approx(math.exp(0.1))  # second inner epoch: no longer 1


# KL

def test_kl_direction_and_reduction():
    p, q, on = P3.log()[None], Q3.log()[None], torch.tensor([True])
    assert distill_kl(p, q, on).item() == pytest.approx(0.08512, abs=1e-5)
    assert distill_kl(q, p, on).item() == pytest.approx(0.09203, abs=1e-5)
    assert kl_rows(p, q).item() / 3 == pytest.approx(0.02837, abs=1e-5)  # control: the mean over the vocabulary
    assert distill_kl(p + 5, q - 3, on).item() == pytest.approx(0.08512, abs=1e-5)  # logits, not log-probs


def test_distill_kl_mask():
    torch.manual_seed(0)
    s, t = torch.randn(4, 7, requires_grad=True), torch.randn(4, 7, requires_grad=True)
    on = torch.tensor([True, False, True, False])
    kl = distill_kl(s, t, on)
    torch.testing.assert_close(kl, kl_rows(s.log_softmax(-1), t.log_softmax(-1))[on].mean())
    kl.backward()
    assert t.grad is None and (s.grad[~on] == 0).all() and (s.grad[on] != 0).all()
    pad, off = torch.full((50, 7), NAN), torch.zeros(50, dtype=torch.bool)
    assert torch.equal(distill_kl(torch.cat([s, pad]), torch.cat([t, pad]), torch.cat([on, off])), kl)
    none = distill_kl(s, t, torch.zeros(4, dtype=torch.bool))
    s.grad = None
    none.backward()
    assert none == 0 and (s.grad == 0).all()
    assert distill_kl(s.bfloat16(), t.bfloat16(), on).dtype == torch.float32


def test_kl_gradient_against_finite_differences():
    torch.manual_seed(0)
    s, t, on = torch.randn(3, 5, dtype=torch.double), torch.randn(3, 5, dtype=torch.double), torch.tensor([True, False, True])
    leaf = s.clone().requires_grad_()
    distill_kl(leaf, t, on).backward()
    numeric = torch.zeros_like(s)
    for i in range(s.numel()):
        step = torch.zeros(s.numel(), dtype=torch.double)
        step[i] = 1e-6
        step = step.view_as(s)
        numeric.view(-1)[i] = (distill_kl(s + step, t, on) - distill_kl(s - step, t, on)) / 2e-6
    assert rel(leaf.grad, numeric) < 1e-8
    other = s.clone().requires_grad_()
    kl_rows(t.log_softmax(-1), other.log_softmax(-1))[on].mean().backward()
    assert rel(other.grad, numeric) > 0.1  # control: the other direction


def test_reference_kl():
    """k3 by hand; its expected gradient is that of KL(policy || reference) thanks to the ratio."""
    logits = Q3.double().log().requires_grad_()
    pol, ref, on = logits.log_softmax(0), P3.double().log(), torch.ones(3, dtype=torch.bool)
    k3 = reference_kl(pol, ref, on)
    weight = pol.detach().exp()
    assert (weight * k3).sum().item() == pytest.approx(0.09203, abs=1e-5)
    flipped = (pol - ref).exp() - (pol - ref) - 1
    assert (weight * flipped).sum().item() == pytest.approx(0.11511, abs=1e-5)  # control: the sign of d
    grad = torch.autograd.grad((weight * k3).sum(), logits, retain_graph=True)[0]
    true = torch.autograd.grad(kl_rows(pol, ref), logits, retain_graph=True)[0]
    assert rel(grad, true) < 1e-7  # P3 and Q3 are rounded to fp32
    d = ref - pol
    assert rel(torch.autograd.grad((weight * (d.exp() - d - 1)).sum(), logits)[0], true) > 0.05  # control: without the ratio
    padded = torch.tensor([0.0, NAN])
    assert torch.equal(reference_kl(padded, padded, torch.tensor([True, False])), torch.zeros(2))


# the head in chunks

def test_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    at = lambda T: score([logits], torch.tensor([0]), T, None, False).item()
    assert at(0.5) == pytest.approx(-0.1429, abs=1e-4) and at(1.0) == pytest.approx(-0.4076, abs=1e-4)


def test_acceptance_and_entropy():
    with torch.no_grad():
        out = score([P3.log()[None], Q3.log()[None]], torch.tensor([1]), 1.0, 0, True)
    want = [math.log(0.2), math.log(0.3), 0.08512, -(Q3 * Q3.log()).sum().item(), 0.5 + 0.2 + 0.1]
    assert out[:, 0].tolist() == pytest.approx(want, abs=1e-5)


def head_case(n=203, V=97, C=12, dtype=torch.double):
    torch.manual_seed(0)
    weight, dense, shadow = (torch.randn(*s, dtype=dtype).requires_grad_() for s in ((V, C), (n, C), (n, C)))
    return weight, [dense, shadow], torch.randint(V, (n,)), torch.randn(3, n, dtype=dtype)


def head_rows(weight, hidden, targets, coefs):
    """rows (3, n) through HeadRows, and gradients of sum(coefs * rows) wrt weight and both hidden"""
    rows = HeadRows.apply(lambda x, y: score(x, y, 0.7, 1, False), targets, weight, *hidden)
    return rows, torch.autograd.grad((coefs * rows).sum(), [weight, *hidden])


def test_chunks_change_nothing(monkeypatch):
    weight, hidden, targets, coefs = head_case()
    want = score([h @ weight.t() for h in hidden], targets, 0.7, 1, False)
    grads = torch.autograd.grad((coefs * want).sum(), [weight, *hidden])
    for rows in (1, 7, 203, 1000):
        monkeypatch.setattr(head, "LOGIT_BYTES", rows * 2 * 97 * 8)
        assert len(HeadRows.chunks(weight, hidden)) == -(-203 // rows)
        got, got_grads = head_rows(weight, hidden, targets, coefs)
        assert rel(got, want) < 1e-14 and all(rel(a, b) < 1e-12 for a, b in zip(got_grads, grads))
    # control: the backward pass forgets one row
    monkeypatch.setattr(head, "LOGIT_BYTES", 2 * 97 * 8)
    rows, whole = HeadRows.apply(lambda x, y: score(x, y, 0.7, 1, False), targets, weight, *hidden), HeadRows.chunks
    monkeypatch.setattr(HeadRows, "chunks", lambda *args: whole(*args)[:-1])
    assert rel(torch.autograd.grad((coefs * rows).sum(), weight)[0], grads[0]) > 1e-4


def test_rows_past_the_gradient_are_constants(monkeypatch):
    """statistics ride along in the forward pass only, and gradients are those without them"""
    weight, hidden, targets, coefs = head_case()
    monkeypatch.setattr(head, "LOGIT_BYTES", 7 * 2 * 97 * 8)
    rows = HeadRows.apply(lambda x, y: score(x, y, 0.7, 1, True), targets, weight, *hidden)
    assert rows.shape == (5, 203)
    got = torch.autograd.grad((coefs * rows[:3]).sum() + rows[3:].sum(), [weight, *hidden])
    assert all(torch.equal(a, b) for a, b in zip(got, head_rows(weight, hidden, targets, coefs)[1]))


class Largest(TorchDispatchMode):
    """elements of the largest tensor that any operation returns, forward and backward"""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_rows_times_vocabulary_never_exists(monkeypatch):
    case = head_case(n=600, V=503, C=8, dtype=torch.float32)
    largest = {}
    for budget in (16 * 2 * 503 * 4, 2**40):
        monkeypatch.setattr(head, "LOGIT_BYTES", budget)
        with Largest() as seen:
            head_rows(*case)
        largest[budget] = seen.numel
    assert list(largest.values()) == [16 * 503, 600 * 503]  # control: with no budget the big one is seen


def test_head_gradient_is_summed_in_fp32(monkeypatch):
    """bf16 weights, one row a chunk: 2048 equal contributions. A bf16 sum stops growing at 256 of them."""
    V, C, n = 5, 4, 2048
    torch.manual_seed(0)
    weight = torch.randn(V, C).bfloat16().requires_grad_()
    hidden = torch.randn(1, C).bfloat16().expand(n, C).contiguous().requires_grad_()
    monkeypatch.setattr(head, "LOGIT_BYTES", 1)
    fn = lambda x, y: score(x, y, 1.0, None, False)
    rows = HeadRows.apply(fn, torch.zeros(n, dtype=torch.int64), weight, hidden)
    assert rows.dtype == torch.float32
    got, got_hidden = torch.autograd.grad(rows.sum(), [weight, hidden])
    row = fn([hidden[:1].float() @ weight.float().t()], torch.zeros(1, dtype=torch.int64))
    one = torch.autograd.grad(row.sum(), weight)[0].double()
    assert got.dtype == got_hidden.dtype == torch.bfloat16 and rel(got.double(), n * one) < 2**-6
    total = torch.zeros_like(weight)
    for _ in range(n):
        total += one.bfloat16()
    assert rel(total.double(), n * one) > 0.5  # control


# replay

def toy(dtype=torch.double, tied=True, seed=0):
    """A random Qwen3-shaped model whose attention is sharp enough that an evicted key is missed."""
    torch.manual_seed(seed)
    config = Config(arch="qwen3", n_layer=3, n_head=4, n_kv_head=2, head_size=8, width=32, mlp_width=48, vocab_size=61,
                    max_pos=256, eps=1e-6, rope=dict(rope_type="default", rope_theta=1e4), tied=tied, qk_norm=True)
    model = Transformer(config).to(dtype)
    for p in model.parameters():
        p.data.normal_(0, 0.35)
        if p.dim() == 1:  # norms
            p.data.add_(1)
    model.vocab_used = 59  # two rows of the embedding are padding
    return model


def logged(seed=0, B=2, G=3, R=7, L=3, nkv=2):
    """A rollout whose log evicts prompt and response keys, differently in every layer, head and response."""
    rng = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(59, (P,), generator=rng).tolist() for P in (11, 16)][:B]
    lengths = torch.tensor([[7, 1, 2], [3, 7, 5]])[:B]
    kept = [torch.rand(L, nkv, len(p), generator=rng).argsort(-1)[..., :6].sort(-1)[0] for p in prompts]
    born = torch.arange(R)
    until = born + 1 + (torch.rand(L, nkv, B, G, R, generator=rng) * (R - born)).long()  # in born + 1 ... R
    return Rollout(prompts, torch.randint(59, (B, G, R), generator=rng), lengths, torch.zeros(B, G, R), 0.8, kept, until.int(),
                   torch.ones(B, G, dtype=torch.bool))


def attention(q, k, v, visible):
    """the formula: visible (nkv, T, T) bool"""
    T, nh, hs = q.shape
    share = nh // k.shape[1]
    k, v, visible = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), visible.repeat_interleave(share, 0)
    att = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(hs)
    return torch.einsum("hij,jhd->ihd", att.masked_fill(~visible, -math.inf).softmax(-1), v)


def separate(model, r, policy):
    """log-softmax (n, V) of every response by a forward pass of its own, under masks written out from the log"""
    out = {}
    for b, prompt in enumerate(r.prompts):
        for g in range(r.tokens.shape[1]):
            P, n = len(prompt), int(r.lengths[b, g])
            T = P + n - 1
            i, j = torch.arange(T)[:, None], torch.arange(T)[None]
            visible = (j <= i).repeat(3, 2, 1, 1)  # (L, nkv, T, T)
            if policy == "shadow":
                for layer in range(3):
                    for head in range(2):
                        dies = torch.full((T,), P)
                        dies[r.kept[b][layer, head]] = T
                        dies[P:] = P + r.until[layer, head, b, g, :n - 1]
                        visible[layer, head] &= i < dies
            ids = torch.tensor(prompt + r.tokens[b, g, :n - 1].tolist())
            hidden = model(ids, torch.arange(T), lambda layer, q, k, v: attention(q, k, v, visible[layer]))
            out[b, g] = (hidden[P - 1:] @ model.head.t() / r.temperature).log_softmax(-1)  # (n, V)
    return out


def coefficients(r):
    return {k: torch.randn(r.tokens.shape, dtype=torch.double, generator=torch.Generator().manual_seed(i))
            for i, k in enumerate(("dense", "shadow", "kl"))}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def gap(a, b):
    return max(rel(x, y) for x, y in zip(a, b))


def expected(model, r, student):
    """what replay must return, and the gradient of a random sum of it, from separate forwards"""
    logp = {p: separate(model, r, p) for p in ("dense", "shadow")}
    want = {k: torch.zeros(r.tokens.shape, dtype=torch.double) for k in ("dense", "shadow", "kl", "entropy", "accept")}
    teacher = {"dense": "shadow", "shadow": "dense"}[student]
    for (b, g), dense in logp["dense"].items():
        n, shadow = len(dense), logp["shadow"][b, g]
        for policy in ("dense", "shadow"):
            want[policy][b, g, :n] = logp[policy][b, g][torch.arange(n), r.tokens[b, g, :n]]
        s, t = logp[student][b, g], logp[teacher][b, g].detach()
        want["kl"][b, g, :n] = (s.exp() * (s - t)).sum(-1)
        want["entropy"][b, g, :n] = -(shadow.exp() * shadow).sum(-1).detach()
        want["accept"][b, g, :n] = torch.minimum(dense.exp(), shadow.exp()).sum(-1).detach()
    return want, gradients(model, sum((c * want[k]).sum() for k, c in coefficients(r).items()))


def replayed(model, r, student, **kw):
    got = replay(model, r, distill_to=student, **kw)
    return got, gradients(model, sum((c * got[k]).sum() for k, c in coefficients(r).items()))


@pytest.mark.parametrize("student, tied", [("dense", True), ("shadow", False)])
def test_replay_equals_separate_forwards(student, tied, monkeypatch):
    model, r = toy(tied=tied), logged()
    monkeypatch.setattr(head, "LOGIT_BYTES", 5 * 2 * 59 * 8)  # several chunks, the last one ragged
    want, grads = expected(model, r, student)
    got, got_grads = replayed(model, r, student, stats=True)
    assert set(got) == set(want) and all(x.dtype == torch.double for x in got.values())
    for k in want:
        assert rel(got[k].detach(), want[k].detach()) < 1e-10, k
        assert (got[k][~r.mask] == 0).all()
    assert not got["accept"].requires_grad and not got["entropy"].requires_grad
    print(f"packed against separate, fp64: values {max(rel(got[k].detach(), want[k].detach()) for k in want):.0e}, "
          f"gradients {gap(got_grads, grads):.0e}")
    assert gap(got_grads, grads) < 1e-10
    assert got["kl"].max() > 0.1 and got["accept"][r.mask].min() < 0.9  # the policies do differ here
    assert got["kl"][:, :, 0].abs().max() < 1e-12  # response token 0 is predicted by one shared, dense row

    # controls: each of these is one small mistake in the log
    def wrong(**change):
        bad, bad_grads = replayed(model, dataclasses.replace(r, **change), student)
        assert torch.equal(bad["dense"], got["dense"])  # the log is about the shadow copies only
        return rel(bad["shadow"].detach(), want["shadow"].detach()), gap(bad_grads, grads)

    shared_heads = [k[:, :1].expand_as(k).contiguous() for k in r.kept]
    shifted = [((k + 1) % len(p)).sort(-1)[0] for k, p in zip(r.kept, r.prompts)]
    everything = [torch.arange(len(p)).repeat(3, 2, 1) for p in r.prompts]
    for change in (dict(until=r.until + 1), dict(until=torch.full_like(r.until, 7)), dict(kept=shared_heads), dict(kept=shifted),
                   dict(kept=everything)):
        values, gradient = wrong(**change)
        assert values > 1e-2 and gradient > 1e-2, change.keys()


@pytest.mark.parametrize("policies", [("dense",), ("shadow",), ("shadow", "dense")])
def test_replay_of_some_policies(policies):
    model, r = toy(), logged()
    both = replay(model, r, stats=True)
    got = replay(model, r, policies, stats=True)
    assert set(got) == {*policies, "entropy"} | ({"accept"} if len(policies) == 2 else set())
    for p in policies:
        assert rel(got[p], both[p]) < 1e-10
    assert (rel(got["entropy"], both["entropy"]) < 1e-10) == (policies[-1] == "shadow")  # of the last policy


def test_replay_scores_what_was_sampled():
    """rollout -> pack -> replay: the shadow policy is the sampler, the dense one is not"""
    model = toy(torch.float32)
    prompts = [[(7 * i + s) % 59 for i in range(P)] for s, P in enumerate((40, 23, 31))]
    evict = dict(evict="snapkv", budget=12, window=4, sinks=2)
    r = generate(model, prompts, group=4, max_new_tokens=12, temperature=0.8, stop_ids=(3, 4, 5, 6, 7, 8), **evict)
    assert r.lengths.min() < 12 and r.lengths.max() > 3  # ragged
    got = replay(model, r)
    gap = (got["shadow"] - r.logp_roll)[r.mask].abs().max().item()
    print(f"max |logp_shadow - logp_roll| = {gap:.1e}")
    assert got["shadow"].dtype == torch.float32 and gap < 1e-4
    assert (got["dense"] - r.logp_roll)[r.mask].abs().max() > 1e-2
    assert torch.equal(got["dense"][:, :, 0], got["shadow"][:, :, 0])
    greedy = generate(model, prompts, group=2, max_new_tokens=4, temperature=0.0, **evict)
    assert (replay(model, greedy)["shadow"] - greedy.logp_roll)[greedy.mask].abs().max() < 1e-4


def loss_gradients(model, r, prompts, scale):
    """gradients of policy loss + 0.1 KL over some prompts, as train.py forms them; scale (2, G, R) is the whole batch's"""
    adv = advantages(torch.tensor([[1.0, 0, 0.5], [0, 0, 1.0]]))
    part = r.select(prompts)
    out = replay(model, part, distill_to="dense")
    loss, _ = policy_loss(out["shadow"], None, adv[prompts], part.mask, scale=scale[prompts])
    return gradients(model, loss + 0.1 * (scale[prompts] * out["kl"]).sum())


@pytest.mark.parametrize("norm", grpo.NORMS)
def test_gradients_do_not_depend_on_micro_batches(norm):
    model, r = toy(), logged()
    scale = token_scale(r.mask, norm)
    whole = loss_gradients(model, r, [0, 1], scale)
    parts = [sum(x) for x in zip(*(loss_gradients(model, r, [b], scale) for b in (0, 1)))]
    assert gap(parts, whole) < 1e-10
    if norm == "token":  # control: a mean of each micro-batch's own token mean is another objective
        own = torch.cat([token_scale(r.mask[b:b + 1], norm) / 2 for b in (0, 1)])
        assert gap([sum(x) for x in zip(*(loss_gradients(model, r, [b], own) for b in (0, 1)))], whole) > 1e-2


def test_gradients_do_not_depend_on_what_follows_the_stop_token():
    model, r = toy(), logged()
    scale = token_scale(r.mask, "sequence")
    clean = loss_gradients(model, r, [0, 1], scale)
    junk = dataclasses.replace(r, tokens=torch.where(r.mask, r.tokens, 58), logp_roll=torch.where(r.mask, r.logp_roll, NAN),
                               until=torch.where(r.mask, r.until, -5))
    assert not torch.equal(junk.tokens, r.tokens)
    assert all(torch.equal(a, b) for a, b in zip(loss_gradients(model, junk, [0, 1], scale), clean))
    stop = r.tokens.scatter(2, r.lengths[:, :, None] - 1, 58)  # control: the stop token itself is trained
    assert gap(loss_gradients(model, dataclasses.replace(r, tokens=stop), [0, 1], scale), clean) > 1e-2


def test_a_token_touches_the_row_that_predicts_it():
    model, r = toy(), logged()
    seen = []
    model.register_forward_hook(lambda module, args, hidden: seen.append(hidden) or hidden.retain_grad())
    rows = pack(r).rows
    for policy in ("dense", "shadow"):
        for b, g, t in ((0, 0, 0), (1, 2, 0), (0, 0, 1), (1, 1, 6)):
            replay(model, r)[policy][b, g, t].backward()
            touched = seen.pop().grad.abs().sum(1).nonzero()[:, 0].tolist()
            assert touched == [rows[policy][b, g, t].item()]
            if t == 0:  # the first response token is predicted by the prompt's last row
                assert touched == [(10, 11 + 2 * (6 + 0 + 1) + 15)[b]]


def test_head_sees_only_response_rows(monkeypatch):
    """a long prompt costs the head nothing: no logits of prompt rows are made"""
    model, seen = toy(), []
    monkeypatch.setattr(head, "matmul32", lambda a, b: seen.append(len(a)) or a @ b)
    r = logged()
    replay(model, r)
    assert sum(seen) == 2 * int(r.mask.sum())


def test_replay_refuses():
    model, r = toy(), logged()
    for kw, message in ((dict(policies=()), "got"), (dict(policies=("sparse",)), "sparse"),
                        (dict(policies=("dense", "dense")), "at most once"), (dict(distill_to="teacher"), "teacher"),
                        (dict(policies=("dense",), distill_to="dense"), "needs both")):
        with pytest.raises(ValueError, match=message):
            replay(model, r, **kw)
    with pytest.raises(ValueError, match="the model needs"):
        replay(model, logged(L=2))
    with pytest.raises(ValueError, match="the model needs"):
        replay(model, logged(nkv=1))


def test_no_grad_replay_is_the_same():
    model, r = toy(), logged()
    with torch.no_grad():
        quiet = replay(model, r, distill_to="dense", stats=True)
    loud = replay(model, r, distill_to="dense", stats=True)
    assert all(torch.equal(quiet[k], loud[k]) and not quiet[k].requires_grad for k in loud)
