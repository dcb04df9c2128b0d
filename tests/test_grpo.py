"""grpo.py: losses by hand, then pack and replay in fp64 against forward passes of their own."""
import math
from dataclasses import replace
from itertools import product

import pytest
import torch

import grpo
from conftest import (
    EVICTION,
    SMALL,
    STOP,
    gap,
    learner,
    logged,
    prompts,
    ragged,
    rel,
    separate,
    toy,
)
from fast import head
from fast.head import kl_rows
from grpo import (
    advantages,
    correction,
    pack,
    pack_by_hand,
    policy_loss,
    reference_kl,
    replay,
    token_scale,
)
from kvcache import SPREAD, Eviction
from objectives.dpo import dpo_loss
from objectives.ppo import gae, value_loss, whiten
from rollout import generate

NAN = math.nan


# advantages

def test_advantages_by_hand():
    r = torch.tensor([[1.0, 0, 0, 0], [0, 0, 2, 2]])
    std = torch.tensor([[0.5], [math.sqrt(4 / 3)]])  # over G - 1
    centred = torch.tensor([[0.75, -0.25, -0.25, -0.25], [-1, -1, 1, 1]])
    for norm in ("sequence", "token"):
        torch.testing.assert_close(advantages(r, norm), centred / (std + 1e-4))
    torch.testing.assert_close(advantages(r, "constant"), centred)
    assert advantages(torch.tensor([[0, 1]])).dtype == torch.float32  # counts are rewards too
    # each prompt is its own baseline: the mean over the batch would not give 0 in each row
    assert advantages(r).sum(1).abs().max() < 1e-6 < (r - r.mean()).sum(1).abs().max()


def test_equal_rewards_give_zero():
    r = torch.full((1, 8), 0.35)
    assert (advantages(r) == 0).all() and (advantages(r, "constant") == 0).all()
    # fp32 without the constant: a residue of 3e-8 becomes 0.935
    assert ((r - r.mean()) / r.std()).abs().max() > 0.9


@pytest.mark.parametrize("objective", ["grpo", "ppo", "dpo"])
def test_every_objective_takes_a_number_for_each_response(model, objective):
    r = logged()
    _, objective, _ = learner(toy(), initial=model, objective=objective)

    def score(rollout, model=model):
        with torch.no_grad():
            return replay(model, rollout, ("shadow",), value=objective.value)

    for rewards, message in (
            (torch.zeros(2, 2), r"rewards has shape \(2, 2\), it must be \(2, 3\)"),
            (torch.zeros(1, 3), "rewards has shape"),
            (torch.tensor([[1, 0, math.inf], [NAN, 0, 1]]), "2 of 6 rewards are not finite")):
        with pytest.raises(ValueError, match=message):
            objective.prepare(r, rewards, score)
    objective.prepare(r, torch.tensor([[1, 0, 0.5], [0, 0, 1]]), score)


LOGP, ADV, ON = torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.ones(2, 3, 4, dtype=torch.bool)
PAIRS = torch.zeros(2, 2, 4)
# what refuses, beside what it takes; then the argument that is wrong, and what the message says
REFUSALS = [
    (advantages, dict(rewards=ADV, norm="token"), [
        ("rewards", torch.ones(3, 1), "at least 2"), ("rewards", torch.ones(4), "at least 2"),
        ("rewards", torch.tensor([[1, NAN]]), "1 of 2 rewards"),
        ("norm", "mean", "unknown norm 'mean'")]),
    (policy_loss, dict(logp=LOGP, logp_old=LOGP, adv=ADV, mask=ON, weight=LOGP, scale=LOGP), [
        ("logp_old", LOGP[..., :3], "logp_old has"), ("adv", ADV[:1], "adv has"),
        ("mask", ON[:, :1], "mask has"), ("mask", ON.float(), "mask must be bool"),
        ("weight", LOGP[:1], "weight has"), ("scale", LOGP[:1], "scale has"),
        ("norm", "mean", "unknown norm")]),
    (correction, dict(name="tis", logp_old=LOGP, logp_roll=LOGP, mask=ON), [
        ("logp_roll", LOGP[:, :1], r"logp_roll has shape \(2, 1, 4\), it must"),
        ("logp_old", LOGP[:1], "logp_old has"),
        ("mask", ON.long(), "mask must be bool, got torch.int64"),
        ("name", "vtrace", "unknown correction 'vtrace'")]),
    (reference_kl, dict(logp=LOGP, logp_ref=LOGP, mask=ON), [
        ("logp_ref", LOGP[:1], "logp_ref has"), ("mask", ON.long(), "mask must be bool"),
        ("logp_old", LOGP[:1], "logp_old has")]),
    (token_scale, dict(mask=ON), [("mask", ON.float(), "mask must be bool")]),
    (gae, dict(rewards=LOGP, values=LOGP, mask=ON), [
        ("rewards", LOGP[:1], "rewards has"), ("values", LOGP[..., :1], "values has"),
        ("mask", ON.long(), "mask must be bool")]),
    (whiten, dict(adv=LOGP, mask=ON), [
        ("mask", ON[:1], "mask has"), ("mask", ON.long(), "mask must be bool")]),
    (value_loss, dict(values=LOGP, values_old=LOGP, returns=LOGP, mask=ON, scale=LOGP), [
        ("values_old", LOGP[:, :1], "values_old has"), ("returns", ADV, "returns has"),
        ("mask", ON[:1], "mask has"), ("mask", ON.float(), "mask must be bool"),
        ("scale", LOGP[:1], "scale has")]),
    (dpo_loss, dict(logp=PAIRS, logp_ref=PAIRS, mask=ON[:, :2]), [
        ("logp_ref", PAIRS[:1], "logp_ref has"), ("mask", ON[:, :2, :1], "mask has"),
        ("mask", ON[:, :2].long(), "mask must be bool")]),
    (dpo_loss, dict(logp=PAIRS, logp_ref=PAIRS, mask=ON[:, :2]), [
        ("pairs", LOGP, "2 responses, got 3"), ("pairs", ADV, r"must be \(pairs, 2, R\)")])]


@pytest.mark.parametrize("function, takes, refuses", REFUSALS)
def test_what_losses_refuse(function, takes, refuses):
    """Most of it would broadcast."""
    function(**takes)
    for name, value, message in refuses:
        wrong = dict(takes, **{name: value})
        if name == "pairs":
            wrong = dict(logp=value, logp_ref=value, mask=value == 0)
        with pytest.raises(ValueError, match=message):
            function(**wrong)


# the surrogate

@pytest.mark.parametrize("norm, value", [("sequence", 0.0), ("token", 0.5), ("constant", 0.25)])
def test_reductions(norm, value):
    mask, adv = ragged(1, 3, R=4), torch.tensor([[1.0, -1.0]])
    loss, _ = policy_loss(torch.randn(1, 2, 4), None, adv, mask, norm=norm)
    assert loss.item() == pytest.approx(value, abs=1e-7)


def test_token_scale():
    mask = ragged(1, 3, R=4)
    want = torch.tensor([[[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]]])
    torch.testing.assert_close(token_scale(mask, "sequence"), want)
    torch.testing.assert_close(token_scale(mask, "token"), mask / 4)
    torch.testing.assert_close(token_scale(mask, "constant"), mask / 8)
    for norm in grpo.NORMS:  # nothing to learn from is 0, not 0 / 0
        assert (token_scale(torch.zeros(1, 2, 3, dtype=torch.bool), norm) == 0).all()
    # fifty columns of padding change nothing but the reduction that counts columns
    wide = ragged(1, 3, R=54)
    assert torch.equal(token_scale(wide, "sequence")[..., :4], token_scale(mask, "sequence"))
    assert torch.equal(token_scale(wide, "token")[..., :4], token_scale(mask, "token"))
    assert not torch.equal(token_scale(wide, "constant")[..., :4], token_scale(mask, "constant"))


@pytest.mark.parametrize("ratio, adv, clip_high, loss, grad, clipped", [
    (1.5, 1.0, None, -1.2, 0, 1), (1.5, -1.0, None, 1.5, 1.5, 0), (0.5, 1.0, None, -0.5, -0.5, 0),
    (0.5, -1.0, None, 0.8, 0, 1), (1.1, 2.0, None, -2.2, -2.2, 0), (1.5, 0.0, None, 0, 0, 0),
    (1.25, 1.0, None, -1.2, 0, 1), (1.25, 1.0, 0.28, -1.25, -1.25, 0),
    (1.5, 1.0, 0.28, -1.28, 0, 1), (0.5, -1.0, 0.28, 0.8, 0, 1),  # the lower side is clip's
    # the log of the ratio is bounded by 20, else fp32 would overflow
    (math.exp(100), 1.0, None, -1.2, 0, 1), (math.exp(100), -1.0, None, math.exp(20), 0, 0),
    (math.exp(-100), 1.0, None, -math.exp(-20), 0, 0)])
def test_clip(ratio, adv, clip_high, loss, grad, clipped):
    """Of a single token: loss, gradient wrt its log-prob, stats."""
    logp = torch.tensor([[[math.log(ratio)]]], requires_grad=True)
    got, stats = policy_loss(logp, torch.zeros(1, 1, 1), torch.tensor([[adv]]), ragged(1, R=1),
                             clip_high=clip_high)
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-6, abs=1e-9)
    assert logp.grad.item() == pytest.approx(grad, rel=1e-6, abs=1e-9)
    assert stats["clip_frac"] == clipped


def test_stats_are_means_over_the_mask():
    mask = ragged(1, 2, R=3)
    logp = torch.tensor([[[math.log(1.5), 9, 9], [math.log(0.5), 0, 9]]])
    stats = policy_loss(logp, torch.zeros(1, 2, 3), torch.tensor([[1.0, 1.0]]), mask)[1]
    assert stats["clip_frac"].item() == pytest.approx(1 / 3)
    assert stats["ratio"].item() == pytest.approx(1)
    kl = (0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3
    assert stats["kl_old"].item() == pytest.approx(kl)


def test_first_update_is_exactly_on_policy():
    torch.manual_seed(0)
    mask, adv = ragged(5, 7, 2, R=8), advantages(torch.tensor([[1.0, 0, 0]]))
    logp = torch.randn(1, 3, 8, requires_grad=True)
    loss, stats = policy_loss(logp, None, adv, mask)
    loss.backward()
    # "loss is 0" is no bug ...
    assert abs(loss.item()) < 1e-6 and stats["ratio"] == 1 and stats["clip_frac"] == 0
    # ... the gradient is not
    torch.testing.assert_close(logp.grad, -token_scale(mask) * adv[..., None])
    assert logp.grad.abs().sum() > 0.1


@pytest.mark.parametrize("where", ["logp", "logp_old", "weight", "adv"])
def test_nan_past_the_mask_does_not_leak(where):
    """With an advantage for each token, which is the response's here."""
    torch.manual_seed(0)
    mask, adv = ragged(1, 3, R=4), torch.tensor([[1.0, -1.0]])
    x = {k: torch.randn(1, 2, 4) for k in ("logp", "logp_old", "weight")}

    def run(adv):
        logp = x["logp"].clone().requires_grad_()
        loss, stats = policy_loss(logp, x["logp_old"], adv, mask, weight=x["weight"])
        loss.backward()
        return [loss, logp.grad, *stats.values()]

    clean = run(adv)
    x["adv"] = adv[..., None].repeat(1, 1, 4)
    x[where] = x[where].masked_fill(~mask, NAN)
    assert all(torch.equal(a, b) for a, b in zip(run(x["adv"]), clean))
    x["adv"][0, 1, 1] = 2.0  # control: one token's own
    assert (run(x["adv"])[1] != clean[1]).nonzero().tolist() == [[0, 1, 1]]
    x[where] = x[where].masked_fill(mask, NAN)  # control: inside the mask it must not be hidden
    assert run(x["adv"])[0].isnan()


# corrections

def test_corrections_by_hand():
    w = torch.tensor([[[0.4, 0.8, 1.2, 1.8, 3.0], [1.0, 5e-5, 1.0, 9, 9]]])
    mask, roll = ragged(5, 3, R=5), torch.randn(1, 2, 5)
    got = {name: correction(name, roll + w.log(), roll, mask)
           for name in ("tis", "mis", "sparse_rl")}
    want = torch.tensor([[[0.4, 0.8, 1.2, 1.8, 2.0], [1.0, 5e-5, 1.0, 0, 0]]])
    torch.testing.assert_close(got["tis"], want)
    want = torch.tensor([[[0.0, 0.8, 1.2, 1.8, 0.0], [1.0, 0, 1.0, 0, 0]]])
    torch.testing.assert_close(got["mis"], want)
    mean = (0.4 + 0.8 + 1.2 + 1.5 + 1.5 + 1 + 5e-5 + 1) / 8
    want = torch.tensor([[[0.0, 0.8, 1.2, 0, 0], [0.0, 0, 0, 0, 0]]]) / mean
    torch.testing.assert_close(got["sparse_rl"], want)
    # replay makes learner and sampler one policy: every correction is then exactly nothing
    for name in got:
        assert torch.equal(correction(name, roll, roll, mask), mask.float())
        assert correction(name, roll.masked_fill(~mask, NAN), roll, mask).isfinite().all()


def test_weight_is_constant_and_ratio_is_not():
    """weight = exp(old learner - sampler), detached; ratio = exp(new - old): two quotients."""
    mask, adv = torch.ones(1, 2, 1, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
    roll = torch.tensor([[[-1.0], [-2.0]]])
    old = torch.tensor([[[-1.2], [-1.7]]], requires_grad=True)
    new = (old.detach() + 0.1).requires_grad_()
    weight = (old - roll).exp()
    loss, stats = policy_loss(new, old, adv, mask, weight=weight)
    loss.backward()
    want = -(weight.detach() * math.exp(0.1) * adv[..., None]) / 2  # gradient of ratio is ratio
    torch.testing.assert_close(new.grad, want)
    assert loss.item() == pytest.approx(want.sum().item()) and old.grad is None
    # second inner epoch: no longer 1
    assert stats["ratio"].item() == pytest.approx(math.exp(0.1))


# KL to a reference

def test_reference_kl():
    """k3 by hand; its expected gradient is that of KL(policy || reference) thanks to the ratio."""
    logits = torch.tensor([0.5, 0.3, 0.2]).double().log().requires_grad_()
    ref = torch.tensor([0.7, 0.2, 0.1]).double().log()
    pol, on = logits.log_softmax(0), torch.ones(3, dtype=torch.bool)
    k3 = reference_kl(pol, ref, on)
    weight = pol.detach().exp()
    assert (weight * k3).sum().item() == pytest.approx(0.09203, abs=1e-5)
    flipped = (pol - ref).exp() - (pol - ref) - 1
    assert (weight * flipped).sum().item() == pytest.approx(0.11511, abs=1e-5)  # the sign of d

    def gradient(x):
        return torch.autograd.grad(x.sum(), logits, retain_graph=True)[0]

    true = gradient(kl_rows(pol, ref))
    assert rel(gradient(weight * k3), true) < 1e-7  # the inputs are rounded to fp32
    d = ref - pol
    assert rel(gradient(weight * (d.exp() - d - 1)), true) > 0.05  # control: without the ratio
    padded = torch.tensor([0.0, NAN])
    got = reference_kl(padded, padded, torch.tensor([True, False]))
    assert torch.equal(got, torch.zeros(2))


# pack

def test_pack_is_its_definition(model):
    """In tensors as in plain loops, also where layers or KV heads keep different numbers."""
    rollouts = [logged()]
    for spread in SPREAD:
        e = Eviction(**SMALL, spread=spread, response_budget=10, period=5)
        rollouts.append(generate(model, prompts(61, 20), 2, 24, eviction=e, stop_ids=STOP))
        assert rollouts[-1].until.min() == 15
    assert {type(r.kept[0]) for r in rollouts} == {torch.Tensor, list}
    for r, policies in product(rollouts, (("dense", "shadow"), ("dense",), ("shadow",))):
        got, want = pack(r, policies), pack_by_hand(r, policies)
        narrow = pack(replace(r, tokens=r.tokens.int()), policies)
        assert torch.equal(narrow.ids, got.ids) and narrow.ids.dtype == torch.int64
        assert torch.equal(got.ids, want.ids) and torch.equal(got.pos, want.pos)
        assert got.until.dtype == torch.int32 and torch.equal(got.until, want.until)
        assert got.rows.keys() == want.rows.keys() == set(policies)
        assert all(torch.equal(got.rows[p], want.rows[p]) for p in policies)
        other = pack_by_hand(r.select([1, 0]), policies)  # controls
        assert not torch.equal(got.ids, other.ids)
        if "shadow" in policies:
            late = pack(replace(r, until=r.until + 1), policies)
            assert not torch.equal(late.until, want.until)
        assert torch.equal(pack(r, policies[::-1]).until, want.until)


def with_kept(r, head, change):
    """The rollout with the kept positions of prompt 0, layer 2 and one KV head changed, as lists of
    different lengths."""
    kept = [list(heads) for heads in r.kept[0]]
    kept[2][head] = change(kept[2][head].clone())
    return replace(r, kept=[kept, *r.kept[1:]])


def test_pack_refuses(model):
    r = generate(model, prompts(40, 33), 2, 4, seed=3, eviction=EVICTION)
    first, second = r.kept
    p, other = r.prompts
    inside = "kept of prompt 0: positions must be ascending and within its 40 tokens"
    integers = "must be a tensor of integers, got"
    many = r.lengths.clamp(max=3) + 1 + torch.eye(2, dtype=torch.int64)
    wrong = [(say, replace(r, **{name: value})) for say, name, value in (
        ("does not fit", "kept", r.kept * 2), ("does not fit", "until", r.until[..., :3]),
        ("does not fit", "lengths", r.lengths[:, :1]),
        ("lengths must be 1 to 4, got 4 to 5", "lengths", many),
        ("lengths must be 1 to 4, got 0", "lengths", r.lengths - 4),
        ("prompt 0 has 41 tokens, at sampling it had 40", "prompts", [[*p, 1], other]),
        ("prompt 1 has 32 tokens, at sampling", "prompts", [p, other[1:]]),
        ("not given for 3 layers and 2 KV heads", "kept", [list(first[:2]), second]),
        (f"kept {integers} torch.float32", "kept", [first.float(), second]),
        (f"kept {integers} list", "kept", [first.tolist(), second]),
        ("until of response token t must be above t", "until", r.until * 0 + 3),
        *((f"{name} {integers} torch.float32", name, getattr(r, name).float())
          for name in ("lengths", "tokens", "until")),
        *((f"temperature must be finite and not negative, got {value!r}", "temperature", value)
          for value in (NAN, -1, math.inf, "1")),
        *((inside, "kept", [kept, second]) for kept in (
            first + 1, first - 1, first.flip(-1), first[..., [0, *range(24)]])))]
    wrong += [("prompt 0 has 0 tokens", replace(r, prompts=[[], other], sizes=None))]
    wrong += [(inside, with_kept(r, head, change)) for head, change in (
        (1, lambda k: k[[0, 0, 1, 2]]), (0, lambda k: k.flip(0)), (1, lambda k: k + 1))]
    for say, log in wrong:
        with pytest.raises(ValueError, match=say):
            pack(log)
    assert (pack(replace(r, until=r.until * 0 + 4)).until == pack(r).until).all()  # the last one
    for policies in ((), ("sparse",), ("dense", "dense")):
        with pytest.raises(ValueError, match="policies must be 'dense', 'shadow' or both"):
            pack(r, policies)
    # what is unusual, and right: other numbers by head, none at all, a log without sizes
    for log in (with_kept(r, 1, lambda k: k[3:]), with_kept(r, 0, lambda k: k[:0]),
                replace(r, sizes=None)):
        assert torch.equal(pack(log).until, pack_by_hand(log).until)


# replay

def toy64(**changes):
    """In fp64, two rows of the embedding being padding."""
    model = toy(dtype=torch.double, **changes)
    model.vocab_used = 48
    return model


def coefficients(r):
    return {k: torch.randn(r.tokens.shape, dtype=torch.double,
                           generator=torch.Generator().manual_seed(i))
            for i, k in enumerate(("dense", "shadow", "kl"))}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def apart(a, b):
    """Largest relative difference of two lists of gradients."""
    return max(rel(x, y) for x, y in zip(a, b))


def expected(model, r, student):
    """What replay must return, and the gradient of a random sum of it, by separate forwards."""
    names = ("dense", "shadow", "kl", "entropy", "accept")
    want = {k: torch.zeros(r.tokens.shape, dtype=torch.double) for k in names}
    for b, g in r.mask.any(-1).nonzero().tolist():
        n = int(r.lengths[b, g])
        logp = {p: separate(model, r, (b, g), p) for p in ("dense", "shadow")}
        for policy in logp:
            want[policy][b, g, :n] = logp[policy][torch.arange(n), r.tokens[b, g, :n]]
        teacher = {"dense": "shadow", "shadow": "dense"}[student]
        s, t = logp[student], logp[teacher].detach()
        want["kl"][b, g, :n] = (s.exp() * (s - t)).sum(-1)
        dense, shadow = logp["dense"].detach(), logp["shadow"].detach()
        want["entropy"][b, g, :n] = -(shadow.exp() * shadow).sum(-1)
        want["accept"][b, g, :n] = torch.minimum(dense.exp(), shadow.exp()).sum(-1)
    total = sum((c * want[k]).sum() for k, c in coefficients(r).items())
    grads = gradients(model, total)
    return {k: x.detach() for k, x in want.items()}, grads


def replayed(model, r, student, **kw):
    got = replay(model, r, distill_to=student, **kw)
    grads = gradients(model, sum((c * got[k]).sum() for k, c in coefficients(r).items()))
    return got, grads


@pytest.mark.parametrize("student, tied", [("dense", True), ("shadow", False)])
def test_replay_equals_separate_forwards(student, tied, monkeypatch):
    model, r = toy64(tie_word_embeddings=tied), logged()
    monkeypatch.setattr(head, "LOGIT_BYTES", 5 * 2 * 48 * 8)  # several chunks, the last one ragged
    want, grads = expected(model, r, student)
    got, got_grads = replayed(model, r, student, stats=True)
    assert set(got) == set(want) and all(x.dtype == torch.double for x in got.values())
    for k in want:
        assert rel(got[k].detach(), want[k]) < 1e-10, k
        assert (got[k][~r.mask] == 0).all()
    assert not got["accept"].requires_grad and not got["entropy"].requires_grad
    assert apart(got_grads, grads) < 1e-10
    # the policies do differ here, but for response token 0, which one shared, dense row predicts
    assert got["kl"].max() > 0.1 and got["accept"][r.mask].min() < 0.9
    assert got["kl"][:, :, 0].abs().max() < 1e-12

    # controls: each of these is one small mistake in the log
    shared_heads = [k[:, :1].expand_as(k).contiguous() for k in r.kept]
    shifted = [((k + 1) % len(p)).sort(-1)[0] for k, p in zip(r.kept, r.prompts)]
    everything = [torch.arange(len(p)).repeat(3, 2, 1) for p in r.prompts]
    for mistake in (dict(until=r.until + 1), dict(until=torch.full_like(r.until, 7)),
                    dict(kept=shared_heads), dict(kept=shifted), dict(kept=everything)):
        bad, bad_grads = replayed(model, replace(r, **mistake), student)
        assert torch.equal(bad["dense"], got["dense"])  # the log is about the shadow copies only
        assert rel(bad["shadow"].detach(), want["shadow"]) > 1e-2, mistake.keys()
        assert apart(bad_grads, grads) > 1e-2, mistake.keys()


@pytest.mark.parametrize("policies", [("dense",), ("shadow",), ("shadow", "dense")])
def test_replay_of_some_policies(policies):
    """With gradients and without."""
    model, r = toy64(), logged()
    both = replay(model, r, stats=True)
    got = replay(model, r, policies, stats=True)
    with torch.no_grad():
        quiet = replay(model, r, policies, stats=True)
    assert set(got) == {*policies, "entropy", *(["accept"] if len(policies) == 2 else [])}
    for p in policies:
        assert rel(got[p].detach(), both[p].detach()) < 1e-10 and got[p].requires_grad
    assert all(torch.equal(quiet[k], got[k]) and not quiet[k].requires_grad for k in got)
    # of the last policy
    assert (rel(got["entropy"], both["entropy"]) < 1e-10) == (policies[-1] == "shadow")


def test_greedy_is_scored_at_temperature_1(model):
    e = Eviction(budget=12, window=4, sinks=2)
    greedy = generate(model, prompts(40, 23, 31), 2, 4, temperature=0.0, eviction=e)
    assert gap(model, greedy) < 1e-4 and gap(model, greedy, "dense") > 1e-2
    assert gap(model, replace(greedy, temperature=0.5)) > 1e-2


def loss_gradients(model, r, some, scale):
    """Gradients of policy loss + 0.1 KL over some prompts, as train.py forms them; scale (2, G, R)
    is the whole batch's."""
    adv = advantages(torch.tensor([[1.0, 0, 0.5], [0, 0, 1.0]]))
    part = r.select(some)
    out = replay(model, part, distill_to="dense")
    loss, _ = policy_loss(out["shadow"], None, adv[some], part.mask, scale=scale[some])
    return gradients(model, loss + 0.1 * (scale[some] * out["kl"]).sum())


@pytest.mark.parametrize("norm", grpo.NORMS)
def test_gradients_do_not_depend_on_micro_batches(norm):
    model, r = toy64(), logged()

    def in_parts(scale):
        parts = [loss_gradients(model, r, [b], scale) for b in (0, 1)]
        return [sum(x) for x in zip(*parts)]

    scale = token_scale(r.mask, norm)
    whole = loss_gradients(model, r, [0, 1], scale)
    assert apart(in_parts(scale), whole) < 1e-10
    if norm == "token":  # control: a mean of each micro-batch's own token mean is another objective
        own = torch.cat([token_scale(r.mask[b:b + 1], norm) / 2 for b in (0, 1)])
        assert apart(in_parts(own), whole) > 1e-2


def test_gradients_do_not_depend_on_what_follows_the_stop_token():
    model, r = toy64(), logged()
    scale = token_scale(r.mask, "sequence")
    clean = loss_gradients(model, r, [0, 1], scale)
    junk = replace(
        r, tokens=torch.where(r.mask, r.tokens, 47), until=torch.where(r.mask, r.until, -5),
        logp_roll=torch.where(r.mask, r.logp_roll, NAN))
    assert not torch.equal(junk.tokens, r.tokens)
    got = loss_gradients(model, junk, [0, 1], scale)
    assert all(torch.equal(a, b) for a, b in zip(got, clean))
    # control: the stop token itself is trained
    stop = r.tokens.scatter(2, r.lengths[:, :, None] - 1, 47)
    assert apart(loss_gradients(model, replace(r, tokens=stop), [0, 1], scale), clean) > 1e-2


def test_head_sees_only_response_rows(monkeypatch):
    """A long prompt costs the head nothing: no logits of prompt rows are made."""
    model, r, seen = toy64(), logged(), []

    def product(a, b):
        seen.append(len(a))
        return a @ b

    monkeypatch.setattr(head, "matmul32", product)
    replay(model, r)
    assert sum(seen) == 2 * int(r.mask.sum())


def test_replay_refuses():
    model, r = toy64(), logged()
    tokens = r.tokens.clone()
    tokens[0, 0, 6] = 48  # the last of its response: never fed, but scored; a row of padding
    tokens[0, 0, 5] = tokens[1, 2, 4] = 0
    long = replace(logged(B=1), prompts=[[1] * 505])
    for log, ask, message in (
            (r, dict(policies=("sparse",)), "sparse"),
            (r, dict(distill_to="teacher"), "teacher"),
            (r, dict(policies=("dense",), distill_to="dense"), "with a second one or a teacher"),
            (r, dict(policies=("dense",), distill_to="shadow", teacher=model), "must be one of"),
            (r, dict(teacher=model), "distill_to=None must be one of"),
            (logged(L=2), {}, "the model needs"), (logged(nkv=1), {}, "the model needs"),
            (replace(r, tokens=tokens), {},
             "responses hold token ids 0 to 48, the model samples ids below 48"),
            (replace(r, tokens=tokens - 1), {}, "token ids -1 to"),
            (replace(r, prompts=[[50, *p[1:]] for p in r.prompts]), {}, "to 50, the"),
            (replace(r, prompts=[[-1, *p[1:]] for p in r.prompts]), {}, "token ids -1"),
            (replace(long, prompts=[[1] * 506]), {}, "513 tokens, the model's context is 512")):
        with pytest.raises(ValueError, match=message):
            replay(model, log, **ask)
    replay(model, long)
    replay(model, replace(r, tokens=torch.where(r.mask, r.tokens, 99)))  # past the end


@pytest.mark.parametrize("policies", [("dense", "shadow"), ("shadow",)])
def test_replay_with_a_teacher(policies):
    """KL(student || the same policy of another model), by forward passes of their own."""
    model, other, r = toy64(), toy64(seed=5), logged()
    c = coefficients(r)["kl"]
    for student in policies:
        want = torch.zeros(r.tokens.shape, dtype=torch.double)
        for b, g in r.mask.any(-1).nonzero().tolist():
            p = separate(model, r, (b, g), student)
            q = separate(other, r, (b, g), student).detach()
            want[b, g, :len(p)] = (p.exp() * (p - q)).sum(-1)
        grads = gradients(model, (c * want).sum())
        got = replay(model, r, policies, distill_to=student, teacher=other)
        assert rel(got["kl"], want) < 1e-10
        assert apart(gradients(model, (c * got["kl"]).sum()), grads) < 1e-10
        assert all(p.grad is None for p in other.parameters())
        # controls: itself, and the mask forgotten
        assert replay(model, r, policies, distill_to=student, teacher=model)["kl"].max() < 1e-12
        whole = replace(r, until=torch.full_like(r.until, 7))
        wrong = replay(model, whole, policies, distill_to=student, teacher=other)["kl"]
        assert (rel(wrong, want) > 1e-2) == (student == "shadow")


def test_checkpointing_is_the_same():
    """Activations computed again in the backward pass: the same values, the same gradients."""
    model, r = toy64(), logged()
    want, grads = replayed(model, r, "dense")
    got, got_grads = replayed(model, r, "dense", checkpointing=True)
    assert all(torch.equal(got[k], want[k]) for k in want)
    assert apart(got_grads, grads) < 1e-12
    assert apart(replayed(model, r, "shadow")[1], grads) > 1e-2  # control
