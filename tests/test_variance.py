"""
experiments/variance.py: gradients and weights against computations by hand, the statistics
against known values, the command line.
"""
import json
import math
from dataclasses import replace

import pytest
import torch

from conftest import EVICTION, SMALL, prompts, toy
from experiments import curves, variance
from grpo import replay
from kvcache import Eviction
from rollout import generate
from shadow_attn import shadow_attention

R = 10


def sampled(model, evict):
    r = generate(model, prompts(61, 40), 2, R, eviction=Eviction(evict, **SMALL), seed=1)
    return r, variance.log_probs(model, r)


@pytest.fixture(scope="module")
def evicted(model):
    """Rollout under a compressed cache, log-probs of both policies."""
    return sampled(model, "snapkv")


SIGN = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])


def measured(model, r, logp, n, layer=None):
    """-> {arm: log |g|^2 (B, G)}, {arm: log |mean g|^2}, log W (B, G), for the first n tokens"""
    log_w = (logp["dense"].double() - r.logp_roll.double()).cumsum(-1)[..., n - 1]
    part = variance.cut(r, n)
    weights = variance.token_weights(logp["dense"][..., :n], part)
    params = list((model if layer is None else model.layers[layer]).parameters())
    sq, mean = variance.gradients(model, part, weights, log_w=log_w, sign=SIGN, params=params)
    return sq, mean, log_w


def dense_log_prob(model, ids):
    """Log-probs of ids 1.. given those before, from a plain causal forward pass of one
    sequence, no packing. -> (len(ids) - 1,)"""
    n = len(ids)
    until = torch.full((model.config.n_kv_head, n), n, dtype=torch.int32)

    def attend(layer, q, k, v):
        return shadow_attention(q, k, v, until)

    hidden = model(torch.tensor(ids), torch.arange(n), attend)                  # (n, C)
    logp = model.logits(hidden).log_softmax(-1)[:-1]                            # (n - 1, V)
    return logp.gather(1, torch.tensor(ids)[1:, None])[:, 0]


def close(log_square, grad, tolerance=1e-3):
    return math.isclose(log_square, grad.double().pow(2).sum().log(), rel_tol=tolerance,
                        abs_tol=tolerance)


def test_gradients_and_weights_by_hand(model, evicted, n=4):
    """Every dense arm from separate plain forward passes; weights written out; seq as a product of
    ratios; |mean g|^2 too."""
    r, logp = evicted
    params = list(model.parameters())

    def gradient(loss):
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads])

    sq, mean, log_w = measured(model, r, logp, n)
    ids = {(b, g): r.prompts[b] + r.tokens[b, g, :n].tolist() for b in range(2) for g in range(2)}
    dense = {at: dense_log_prob(model, ids[at])[-n:] for at in ids}
    ratios = {at: (dense[at].detach() - r.logp_roll[at][:n]).exp() for at in ids}
    every = torch.cat([*ratios.values()])
    assert every.min() < 0.5 and every.max() > 1.5  # clips have something to do
    norm = every.clamp(max=1.5).mean()  # over the batch
    total = dict.fromkeys(("naive", "tis", "sparse_rl", "seq"), 0.0)
    for at, w in ratios.items():
        assert math.isclose(w.double().log().sum(), log_w[at], rel_tol=1e-4, abs_tol=1e-4)
        kept = (w >= 0.5) & (w <= 1.5) & (w.min() >= 1e-4)
        weights = dict(naive=torch.ones_like(w), tis=w.clamp(max=2),
                       sparse_rl=w.clamp(max=1.5) / norm * kept,
                       seq=w.double().prod().float().expand(len(w)))
        for arm, weight in weights.items():
            grad = gradient((weight * dense[at]).sum())
            total[arm] = total[arm] + SIGN[at] * grad / 4
            assert close(sq[arm][at], grad), arm
    part = variance.cut(r, n)
    shadow = replay(model, part, ("shadow",))["shadow"]  # a packed group, one sample at a time
    for at in ids:
        assert close(sq["shadow"][at], gradient(shadow[at].sum()))
    for arm, g in total.items():
        assert close(mean[arm], g), arm
        assert (sq[arm] - sq["shadow"]).abs().max() > 0.1  # each another gradient than that
    last, first = (measured(model, r, logp, n, layer=layer)[0]["naive"] for layer in (-1, 0))
    assert (last < sq["naive"]).all() and (last != first).all()  # of a part of the parameters
    for policy, whole in variance.log_probs(model, part).items():  # a prefix scores as in the whole
        assert torch.allclose(whole, logp[policy][..., :n], atol=1e-4)


def test_shadow_weight_is_one_and_dense_is_not(evicted):
    r, logp = evicted
    dense, shadow = ((logp[p].double() - r.logp_roll.double()).sum(-1)
                     for p in ("dense", "shadow"))
    assert shadow.abs().max() <= 1e-3 * R
    assert dense.abs().min() > 0.1
    assert variance.log_var(shadow.flatten()) < math.log(1e-6)
    assert variance.log_ess(shadow.flatten()).exp() > 0.9999


def test_without_eviction_all_arms_agree(model):
    """With eviction they differ: test_gradients_and_weights_by_hand."""
    r, logp = sampled(model, "none")
    sq, mean, log_w = measured(model, r, logp, 4)
    assert log_w.abs().max() < 1e-3
    for arm in variance.ARMS:
        assert torch.allclose(sq[arm], sq["shadow"], atol=1e-2)
        assert abs(mean[arm] - mean["shadow"]) < 1e-2


def test_floor_against_all_responses():
    """Vocabulary 12, 2 tokens: all 144 responses, so E W = 1 and Var W are exact. Samples
    of pi, scored by mu through mu's log, give the floor; the floor is below the variance,
    and here, where the tail is light, samples of mu find the variance too."""
    model = toy(vocab_size=12)
    p = [[t % 12 for t in prompts(60)[0]]]
    mu = generate(model, p, 1000, 2, eviction=EVICTION, seed=1)
    pi = generate(model, p, 1000, 2, eviction=Eviction("none"), seed=2)
    pi.kept = mu.kept
    tokens = torch.cartesian_prod(torch.arange(12), torch.arange(12))[None]     # (1, 144, 2)
    every = replace(mu, tokens=tokens, lengths=mu.lengths[:, :144],
                    until=mu.until[:, :, :, :144], logp_roll=mu.logp_roll[:, :144])
    s = {k: x.double().sum(-1)[0] for k, x in variance.log_probs(model, every).items()}
    log_w, p_mu, p_pi = s["dense"] - s["shadow"], s["shadow"].exp(), s["dense"].exp()
    assert math.isclose(p_mu.sum(), 1, abs_tol=1e-5)
    assert math.isclose((p_mu * log_w.exp()).sum(), 1, abs_tol=1e-5)
    exact, kl = (p_mu * log_w.exp() ** 2).sum() - 1, (p_pi * log_w).sum()
    assert 0.05 < kl.expm1() < exact
    of_pi, of_mu = (variance.log_probs(model, x) for x in (pi, mu))
    drawn = (of_pi["dense"] - of_pi["shadow"]).double().sum(-1)
    assert abs(drawn.mean() - kl) < 0.1 * kl + 0.02
    assert abs((of_mu["dense"] - mu.logp_roll).double().sum(-1).exp().mean() - 1) < 0.2


def test_log_statistics():
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(variance.log_var(x), x.exp().var(-1).log())
    assert torch.allclose(variance.log_mean(x), x.exp().mean(-1).log())
    ess = x.exp().sum(-1) ** 2 / x.exp().pow(2).sum(-1) / 40
    assert torch.allclose(variance.log_ess(x).exp(), ess)
    far = x - 5000  # exp gives 0 there
    assert torch.allclose(variance.log_var(far), variance.log_var(x) - 10000)
    assert not far.exp().any()
    assert variance.log_var(torch.zeros(4, dtype=torch.float64)) == -math.inf


def test_slope():
    x = torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0], dtype=torch.float64)
    k, r2 = variance.slope(torch.stack([3 * x + 1, x.log() * -2]), x)
    assert math.isclose(k[0], 3) and math.isclose(r2[0], 1) and r2[1] < 0.95
    k, r2 = variance.slope(x.log() * -2 + 5, x.log())
    assert math.isclose(k, -2) and math.isclose(r2, 1)


def test_bootstrap_covers():
    """Of 100 data sets with prompts that differ, the 95 % interval of a mean holds the
    truth about as often as it should."""
    g, hits = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        x = 3 + torch.randn(40, 1, generator=g) + torch.randn(40, 4, generator=g)
        _, many = variance.bootstrap(variance.plain_mean, variance.resample(40, 400), x)
        low, high = many.quantile(torch.tensor([0.025, 0.975]))
        hits += low <= 3 <= high
    assert 88 <= hits <= 99


def synthetic(lengths, rate, prompts=64, group=8):
    """log W normal with variance rate * L and mean -rate * L / 2, so that E W = 1 and Var W =
    exp(rate L) - 1; g: a random walk."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    noise = [normal(prompts, group) for _ in lengths]
    log_w = [rate ** 0.5 * n ** 0.5 * z - rate * n / 2 for n, z in zip(lengths, noise)]
    log_g = [(n * normal(prompts, group, 50).pow(2).sum(-1)).log() for n in lengths]
    log_w_pi = [x + rate * n for n, x in zip(lengths, log_w)]  # the same normal, tilted by W
    arms = dict.fromkeys(variance.ARMS, log_g)
    arms["sparse_rl"] = [torch.full_like(z, -math.inf) for z in noise]  # all dropped
    return dict(log_w=log_w, log_w_shadow=[0 * z for z in noise], log_w_pi=log_w_pi,
                log_g_pi=log_g, log_g=arms,
                log_mean=dict.fromkeys(variance.ARMS, [-50.0] * len(lengths)),
                mean_weight=dict.fromkeys(variance.ARMS, [1.0] * len(lengths)))


def test_summary_of_known_distributions():
    lengths, rate = [2, 4, 8, 16, 32], 0.05
    s = variance.summarise(synthetic(lengths, rate), lengths, 100)
    w, truth = s["weight"], [math.log(math.expm1(rate * n)) for n in lengths]
    for i, t in enumerate(truth):
        assert abs(w["log_var"]["value"][i] - t) < 0.4
        assert w["log_var"]["low"][i] < w["log_var"]["high"][i]
        assert w["log_var_floor"]["value"][i] < t + 0.05  # a bound from below
        assert abs(w["kl_pi_mu"]["value"][i] - rate * lengths[i] / 2) < 0.1
    # variance 0 has no logarithm
    assert w["log_var_shadow"]["value"] == [None] * 5 and w["log_var_shadow"]["slope"] == {}
    power = s["gradient"]["shadow"]["log_var"]["slope"]["power"]
    assert abs(power["value"] - 1) < 0.05 and power["low"] < 1 < power["high"]
    dropped = s["gradient"]["sparse_rl"]
    assert dropped["log_var"]["value"] == [None] * 5 and dropped["alive"] == [0.0] * 5


def test_command_line(tmp_path, capsys):
    """A small run on the embedded checkpoint, lengths that do not fit, the figure from the numbers
    alone; refusals in one line."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    args = ["--prompts=2", "--group=2", "--lengths=4,6,5000", "--layers=last", "--device=cpu",
            "--task=kv", "--prompt_tokens=64", "--budget=24", "--window=16",
            "--resamples=100", f"--out={out}"]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(variance, "figure", lambda res, path: None)  # it is drawn below
        variance.main(args)
    printed = capsys.readouterr().out
    assert "left out: 5000 tokens" in printed and "gradient, shadow" in printed
    res = json.loads((out / "variance.json").read_text())
    assert res["lengths"] == [4, 6]
    assert all(v < -15 for v in res["weight"]["log_var_shadow"]["value"])
    variance.main(["--figure", f"--out={out}"])
    assert (out / "variance.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="^error: no length fits the model's context$"):
        variance.main([*args, "--lengths=4000"])


def test_arms_look_as_elsewhere():
    """A name stands in the frame, also of a line that leaves it."""
    figure = pytest.importorskip("matplotlib.figure")
    q = dict(value=[1.0, 50.0], low=[0.5, 40.0], high=[2.0, 60.0])
    ax = figure.Figure().subplots()
    ends = variance.draw(ax, [2, 4], [("up", "naive", q), ("none", "tis", dict(
        value=[None], low=[None], high=[None]))], limits=(0, 5), title="")
    assert ends == [("up", curves.RED, (4, 5))]
    assert ax.lines[0].get_color() == curves.LOOKS["naive"][0]
    assert all(curves.LOOKS[arm] for arm in variance.ARMS)


@pytest.mark.parametrize("argv, says", [
    (["--lengths=1,8"], "lengths must be at least 2"), (["--lengths=4.0"], "whole numbers"),
    (["--lengths="], "whole numbers"), (["more"], "no such config file"), (["--out="], "out a"),
    (["--out=/proc/x"], "cannot write to folder '/proc/x'"),
    (["--model=/no/where"], "no such folder"), (["--device=foo"], "device must be auto"),
    (["--response_budget=60"], "without eviction of response keys"),
    (["--resamples=5"], "resamples at least 100"), (["--layers=first"], "layers"),
    (["--figures=1"], "figure"), (["--group=1"], "group")])
def test_refused_in_one_line(argv, says, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{says}[^\n]*$"):
        variance.main([f"--out={tmp_path / 'out'}", *argv])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [
    "[]", "{", '{"weight": 1, "gradient": {}, "lengths": []}',
    '{"settings": {"prompts": 2, "group": 2}, "weight": {}, "gradient": {}, "lengths": [2]}'])
def test_damaged_numbers_are_named(text, tmp_path):
    (tmp_path / "variance.json").write_text(text)
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}/variance.json[^\n]*$"):
        variance.main([f"--out={tmp_path}", "--figure"])
