"""
What an importance weight costs and what replaying the mask costs, as the response grows: variances
at a fixed checkpoint.

    python -m experiments.variance              # the embedded checkpoint: table, json and figure
    python -m experiments.variance config/smollm2.py --layers=last --lengths=2,8,32,128,512
    python -m experiments.variance --figure --out=out-variance    # draw the numbers that are there

The idea. Responses are drawn by a sampler mu that evicts. A dense learner pi can mend that with the
sequence weight

    W_L = prod_{t<L} w_t,  w_t = pi(token_t) / mu(token_t),     E_mu W_L = 1 for every L,

a product of L ratios, so log(1 + Var W_L) grows like L. A learner that replays the mask is mu: its
weight is 1, its variance 0. For every length L of `lengths`: variance of W_L, of log W_L, effective
sample size (sum W)^2 / (n sum W^2), mean of W_L, and of

    g = A sum_{t<L} weight_t grad log p(token_t)     a sum over tokens, not a mean

the variance mean |g - mean g|^2 (n / (n - 1)), per token that over L^2, under five arms:

    naive      weight 1, p = pi
    tis        min(w_t, 2), pi
    seq        W_L, pi
    sparse_rl  grpo.correction, whose normalisation runs over all samples of length L, pi
    shadow     weight 1, p = the replayed mu

A is +-1, drawn apart from the text, so that no reward's design matters: E g = 0 for every arm and
Var g = E |g|^2. Shadow's terms have mean 0 whatever came before (a score under its own policy), so
its variance should grow like L; those of naive need not, so its should grow faster. Bias is not
measured: an arm that drops its samples has a small variance and no signal, so the mean token weight
stands beside it.

Sampled variances of W lie. Once W_L has a heavy tail, n samples miss the few that carry its mean
and its variance: the sampled mean of W falls below 1, the sampled variance with it, and it may even
shrink as L grows. Two remedies, both from samples of pi replayed by both policies (what SnapKV
keeps depends on the prompt alone, so mu replays any text):

    E_mu W^2 = E_pi W >= exp(E_pi log W) = exp(KL(pi || mu))
    E_mu W^2 |G|^2 = E_pi W |G|^2 >= exp(E_pi [log W + log |G|^2]),   G = sum_t grad log pi(token_t)

By Jensen the first is a floor of the variance of W, estimated by a mean of logs, without a heavy
tail; the second the same for seq.

One set of samples of the longest length serves all: a prefix of a sample is a sample of that
length. The lengths are therefore not independent, and the bootstrap (prompts with replacement, 95 %
intervals) draws the same prompts for all. In it |mean g|^2 keeps its share of the mean |g|^2: of
order 1 / n, as E g = 0. No stop tokens: past its answer the model goes on as it may. Slopes: least
squares of log variance against L (nats per token; straight if exponential) and against log L
(power; straight if polynomial).

Left out on purpose: rewards, training, methods that evict response keys. On a card in bfloat16
gradients are rounded to it.
"""
import json
import math
import os
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import torch

import train
from data.rewards import find_reward
from data.tokenizer import Tokenizer
from experiments import curves
from grpo import correction, replay
from kvcache import Eviction
from model import Transformer, find_checkpoint
from rollout import generate
from run.settings import CHOICES as TRAINS
from run.settings import REFUSED, eviction_of
from run.start import choose_dtype, problems_of
from support.configurator import configure, help_if_asked, make_folder, parse
from support.jsonfile import read_json
from support.run import choose_device, write_text
from support.screen import one_line_errors, say, tell

OWN = dict(
    prompts=8,              # sampled once and resampled by the bootstrap; 2 and more
    lengths="2,4,8,16,32,64,128,256,512",  # tokens, as far as the context reaches
    layers="all",           # whose gradient; last: by those of the last block
    resamples=1000,         # of the bootstrap; 100 and more
    out="out-variance",     # folder for variance.json and variance.png
    figure=False,           # print and draw again from variance.json
)
# train.py's keys are among them so that its config files serve; its learner's do nothing here
DEFAULTS = {**train.DEFAULTS, **OWN}
CHOICES = {**TRAINS, "layers": ["all", "last"]}
# whose gradient each arm takes
ARMS = dict(naive="dense", tis="dense", seq="dense", sparse_rl="dense", shadow="shadow")


# measuring

def cut(rollout, n):
    """The first n tokens of every response."""
    return replace(rollout, tokens=rollout.tokens[..., :n],
                   lengths=rollout.lengths.clamp(max=n),
                   logp_roll=rollout.logp_roll[..., :n],
                   until=rollout.until[..., :n].clamp(max=n),
                   stopped=rollout.stopped & (rollout.lengths <= n))


@torch.no_grad()
def log_probs(model, rollout):
    """-> log-probs of both policies (B, G, R), one prompt at a time."""
    prompts = range(len(rollout.prompts))
    parts = [replay(model, rollout.select([row])) for row in prompts]
    return {policy: torch.cat([part[policy] for part in parts])
            for policy in ("dense", "shadow")}


def token_weights(dense, rollout):
    """Per-token weights (B, G, R) of every arm but seq, whose weight is one number per sample."""
    ones = torch.ones_like(dense)
    tis, sparse_rl = (correction(name, dense, rollout.logp_roll, rollout.mask)
                      for name in ("tis", "sparse_rl"))
    return dict(naive=ones, tis=tis, sparse_rl=sparse_rl, shadow=ones)


def log_norm(x):
    return torch.linalg.vector_norm(x, dtype=torch.float64).log().item()


def gradients(model, rollout, weights, log_w, sign, params):
    """Squared norms of one-sample gradients. -> {arm: log |g|^2 (B, G)}, {arm: log |mean
    g|^2}, fp64; logs, as W leaves the range of floats.

    weights: {arm: (B, G, R)}; log_w (B, G) scales naive's gradient to that of seq, which is
    measured wherever naive is. One forward pass per sample and policy, one backward pass
    per arm; seq costs none."""
    B, G = rollout.lengths.shape
    log_w, names = log_w.cpu(), list(weights)
    if "naive" in weights:
        names.append("seq")
    size = sum(each.numel() for each in params)
    sq = {arm: torch.full((B, G), -math.inf, dtype=torch.float64) for arm in names}
    total = {arm: torch.zeros(size, device=model.device) for arm in names}
    largest = log_w.max().item()  # seq's weights are summed over it
    for b, g in product(range(B), range(G)):
        n = rollout.tokens.shape[2]
        say(f"{n} tokens: gradient of sample {b * G + g + 1}/{B * G}")
        one = rollout.select([b], torch.tensor([[g]], device=rollout.tokens.device))
        for policy in ("dense", "shadow"):
            # sparse_rl drops whole responses: their gradient is 0
            arms = [arm for arm, weight in weights.items()
                    if ARMS[arm] == policy and weight[b, g].any()]
            logp = replay(model, one, (policy,))[policy] if arms else None  # (1, 1, R)
            for arm in arms:
                weight = weights[arm][b, g].view(logp.shape)                  # (1, 1, R)
                grads = torch.autograd.grad(logp, params, weight,
                                            retain_graph=arm != arms[-1])
                flat = torch.cat([grad.reshape(-1).float() for grad in grads])
                norm, side = log_norm(flat), sign[b, g].item()
                sq[arm][b, g] = 2 * norm
                total[arm].add_(flat, alpha=side)
                if arm == "naive":
                    lw = log_w[b, g].item()
                    sq["seq"][b, g] = 2 * (norm + lw)
                    total["seq"].add_(flat, alpha=side * math.exp(lw - largest))
    mean = {arm: log_norm(t) - math.log(B * G) for arm, t in total.items()}
    if "seq" in mean:
        mean["seq"] += largest
    return sq, {arm: 2 * norm for arm, norm in mean.items()}


def log_weights(logp, other):
    """-> log of the weight of every prefix, (B, G, R) fp64; 1e-300 and less is usual."""
    return (logp.double() - other.double()).cumsum(-1).cpu()


def measure(model, ids, c, lengths):
    """Roll out once, replay, differentiate. -> per-sample numbers by length, fp64: see summarise"""
    say(f"sampling {c.prompts} x {c.group} responses of {lengths[-1]} tokens twice, "
        "from mu and from pi")
    mu = generate(model, ids, c.group, lengths[-1], temperature=c.temperature,
                  eviction=eviction_of(c), seed=c.seed)
    pi = generate(model, ids, c.group, lengths[-1], temperature=c.temperature,
                  eviction=Eviction("none"), seed=c.seed + 1)
    pi.kept = mu.kept  # mu replays what pi drew
    at_mu, at_pi = log_probs(model, mu), log_probs(model, pi)
    prefixes = dict(log_w=log_weights(at_mu["dense"], mu.logp_roll),
                    log_w_shadow=log_weights(at_mu["shadow"], mu.logp_roll),
                    log_w_pi=log_weights(at_pi["dense"], at_pi["shadow"]))
    coin = torch.Generator().manual_seed(c.seed)  # advantages
    sign = torch.randint(0, 2, mu.lengths.shape, generator=coin) * 2.0 - 1  # (B, G)
    params = list((model if c.layers == "all" else model.layers[-1]).parameters())
    raw = {name: [x[..., n - 1] for n in lengths] for name, x in prefixes.items()}
    raw["log_g_pi"] = []
    raw |= {key: {arm: [] for arm in ARMS}
            for key in ("log_g", "log_mean", "mean_weight")}
    for n, log_w, log_w_pi in zip(lengths, raw["log_w"], raw["log_w_pi"]):
        rollout, dense = cut(mu, n), at_mu["dense"][..., :n]
        weights = token_weights(dense, rollout)
        sq, mean = gradients(model, rollout, weights, log_w=log_w, sign=sign,
                             params=params)
        naive = dict(naive=torch.ones_like(dense))
        sq_pi, _ = gradients(model, cut(pi, n), naive, log_w=log_w_pi, sign=sign,
                             params=params)
        raw["log_g_pi"].append(sq_pi["naive"])
        for arm in ARMS:
            raw["log_g"][arm].append(sq[arm])
            raw["log_mean"][arm].append(mean[arm])
            mean_weight = weights[arm].mean().item() if arm in weights else None
            raw["mean_weight"][arm].append(mean_weight)
    say("")
    return raw


# statistics, all of logs: x (..., n) are n samples of log W

def log_mean(x):
    return x.logsumexp(-1) - math.log(x.shape[-1])


def log_var(x):
    """Log of the sample variance of exp(x)."""
    top = x.amax(-1, keepdim=True)
    return (x - top).exp().var(-1).log() + 2 * top[..., 0]


def log_ess(x):
    """Log of (sum W)^2 / (n sum W^2), between -log n and 0."""
    return 2 * log_mean(x) - log_mean(2 * x)


def log_floor(x):
    """Log of a lower bound of Var W = E W^2 - 1; none where the mean of logs is not positive."""
    return x.mean(-1).expm1().log()


def log_ratio(x, y):
    """Log of mean |g|^2 over another arm's."""
    return log_mean(x) - log_mean(y)


def plain_mean(x):
    return x.mean(-1)


def plain_var(x):
    return x.var(-1)


def slope(y, x):
    """Least squares of y (..., lengths) on x (lengths,).
    -> slope (...), share of the variance of y that the line explains (...)"""
    x, d = x - x.mean(), y - y.mean(-1, keepdim=True)
    k = (d * x).sum(-1) / (x * x).sum()
    return k, 1 - (d - k[..., None] * x).pow(2).sum(-1) / d.pow(2).sum(-1)


def resample(prompts, times, seed=0):
    """-> (times, prompts) int64: prompts drawn with replacement"""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, prompts, (times, prompts), generator=rng)


def bootstrap(f, index, *xs):
    """f, which maps (..., n) to (...), of samples (B, G) and of samples whose prompts are
    drawn by index (times, B). -> (), (times,)"""
    return f(*(x.reshape(-1) for x in xs)), f(*(x[index].flatten(1) for x in xs))


def number(x):
    """For JSON: None where there is no finite number."""
    return round(float(x), 10) if math.isfinite(x) else None


def band(many):
    """95 % interval of resamples; those without a finite value (all samples dropped) are
    left out."""
    many = many[many.isfinite()]
    if not len(many):
        return None, None
    low, high = many.quantile(torch.tensor([0.025, 0.975], dtype=many.dtype))
    return number(low), number(high)


def over_lengths(f, index, lengths, *series):
    """f of each length's samples. series: lists over lengths of (B, G). index: see bootstrap.
    -> {"value", "low", "high": lists over lengths, "slope": {axis: value, r2, low, high}}"""
    pairs = [bootstrap(f, index, *xs) for xs in zip(*series)]
    value, many = map(torch.stack, zip(*pairs))           # (lengths,), (lengths, times)
    low, high = zip(*map(band, many))
    out = dict(value=list(map(number, value)), low=low, high=high, slope={})
    ok = value.isfinite()
    x = torch.tensor(lengths, dtype=torch.float64)
    for name, axis in (("per_token", x), ("power", x.log())):
        if ok.sum() > 2:
            found, r2 = map(number, slope(value[ok], axis[ok]))
            least, most = band(slope(many[ok].T, axis[ok])[0])
            out["slope"][name] = dict(value=found, r2=r2, low=least, high=most)
    return out


def shrink(log_g, log_mean_g):
    """From mean |g|^2 to the variance of the whole sample, as a log; the bootstrap takes it
    as given."""
    if not log_g.isfinite().any():
        return 0.0
    n, share = log_g.numel(), log_mean_g - log_mean(log_g.reshape(-1)).item()
    return math.log(n / (n - 1)) + math.log1p(-math.exp(share))


def summarise(raw, lengths, times):
    """-> {quantity: see over_lengths}, natural logs; None where there is no finite number.

    raw: log_w, log_w_shadow (samples of mu), log_w_pi (of pi), log_g_pi, log_g[arm]: lists over
    lengths of (B, G); log_mean[arm], mean_weight[arm]: lists over lengths of numbers."""
    index = resample(len(raw["log_w"][0]), times)

    def each(f, *series):
        return over_lengths(f, index, lengths, *series)

    weight = dict(log_var=each(log_var, raw["log_w"]),
                  var_log=each(plain_var, raw["log_w"]),
                  log_ess=each(log_ess, raw["log_w"]),
                  log_mean=each(log_mean, raw["log_w"]),
                  log_var_floor=each(log_floor, raw["log_w_pi"]),
                  kl_pi_mu=each(plain_mean, raw["log_w_pi"]),
                  # sampled, E_pi W
                  log_second_moment_pi=each(log_mean, raw["log_w_pi"]),
                  log_var_shadow=each(log_var, raw["log_w_shadow"]))
    gradient = {}
    for arm in ARMS:
        log_g = raw["log_g"][arm]
        shrunk = [x + shrink(x, m) for x, m in zip(log_g, raw["log_mean"][arm])]
        log_variance = each(log_mean, shrunk)
        per_token = [None if v is None else number(v - 2 * math.log(length))
                     for v, length in zip(log_variance["value"], lengths)]
        gradient[arm] = dict(log_var=log_variance, mean_weight=raw["mean_weight"][arm],
                           log_ratio=each(log_ratio, log_g, raw["log_g"]["shadow"]),
                           # share of samples with a gradient
                           alive=[number(x.isfinite().double().mean()) for x in log_g],
                           log_var_per_token=per_token)
    floor = [w + g for w, g in zip(raw["log_w_pi"], raw["log_g_pi"])]
    gradient["seq"]["log_var_floor"] = each(plain_mean, floor)
    return dict(weight=weight, gradient=gradient)


# what a reader sees: everything as log10, as numbers of this size are not written otherwise

def ten(v, digits=1):
    return "-" if v is None else f"{v / math.log(10):.{digits}f}"


def weight_table(res):
    w, asked = res["weight"], res["settings"]

    def span(q, i):
        return f"{ten(q['value'][i])} [{ten(q['low'][i])}, {ten(q['high'][i])}]"

    samples = asked["prompts"] * asked["group"]
    yield (f"sequence weight W of {samples} samples, as log10 (but std and ESS), with "
           "95 % bootstrap intervals over prompts; the floor, a lower bound of the "
           "true variance, comes from samples of the learner")
    yield (f"{'tokens':>6} {'Var W, sampled':>24} {'Var W, floor':>24} "
           f"{'mean W (truth 0)':>24} {'std of ln W':>12} {'ESS / n':>8} "
           f"{'Var W, shadow':>14}")
    for i, length in enumerate(res["lengths"]):
        spans = " ".join(f"{span(w[q], i):>24}"
                         for q in ("log_var", "log_var_floor", "log_mean"))
        std = math.sqrt(w["var_log"]["value"][i])
        ess = math.exp(w["log_ess"]["value"][i])
        shadow = ten(w["log_var_shadow"]["value"][i])
        yield f"{length:6d} {spans} {std:12.2f} {ess:8.3f} {shadow:>14}"


def factor(v):
    """exp(v), short."""
    if v is None:
        return "0"
    return f"{math.exp(v):.3g}" if abs(v) < 500 else f"1e{v / math.log(10):.0f}"


def gradient_table(res):
    g = res["gradient"]

    def cell(arm, at):
        value, ratio = (g[arm][name]["value"][at] for name in ("log_var", "log_ratio"))
        return f"{ten(value, 2)} ({factor(ratio)})"

    yield (f"\nvariance of the gradient estimate ({res['parameters']:,} parameters, "
           "sum over tokens), as log10; in brackets, times shadow's; mean token weight")
    yield (f"{'tokens':>6} " + " ".join(f"{arm:>18}" for arm in ARMS)
           + f" {'seq, floor':>11} {'weight: tis':>12} {'sparse_rl':>10} "
           f"{'sparse_rl keeps':>16}")
    for at, length in enumerate(res["lengths"]):
        arms = " ".join(f"{cell(arm, at):>18}" for arm in ARMS)
        floor = ten(g["seq"]["log_var_floor"]["value"][at])
        tis, sparse_rl = g["tis"]["mean_weight"][at], g["sparse_rl"]["mean_weight"][at]
        alive = g["sparse_rl"]["alive"][at]
        yield (f"{length:6d} {arms} {floor:>11} {tis:12.3f} {sparse_rl:10.3f} "
               f"{alive:16.2f}")


def slope_table(res):
    w, g = res["weight"], res["gradient"]

    def show(line):
        if not line or None in line.values():
            return "-"
        return "{value:.4f} [{low:.4f}, {high:.4f}] r2 {r2:.2f}".format(**line)

    rows = {"W, sampled": w["log_var"], "W, floor": w["log_var_floor"],
            "W, shadow": w["log_var_shadow"]}
    rows |= {f"gradient, {arm}": g[arm]["log_var"] for arm in ARMS}
    rows["gradient, seq, floor"] = g["seq"]["log_var_floor"]
    yield ("\nslope of ln variance: nats per token (straight against L) | power of L "
           "(straight against ln L; per token: 2 less); r2 of each line")
    for name, q in rows.items():
        per_token, power = (show(q["slope"].get(key)) for key in ("per_token", "power"))
        yield f"{name:>20}: {per_token:>42} | {power:>42}"


def finite_log10(*quantities):
    """Least and largest of all values and ends of intervals that there are, as log10."""
    every = [v for q in quantities for k in ("value", "low", "high") for v in q[k]]
    every = [v / math.log(10) for v in every if v is not None]
    return min(every), max(every)


def draw(ax, lengths, lines, limits, title):
    """lines: (name, key of curves.LOOKS, quantity). -> ends for curves.label, in the frame
    also where a line leaves it"""
    ends = []
    for name, key, q in lines:
        rows = [(x, *(v / math.log(10) for v in values))
                for x, *values in zip(lengths, q["value"], q["low"], q["high"])
                if None not in values]
        if rows:
            x, y, low, high = zip(*rows)
            style = curves.looks([key])[key]
            ax.plot(x, y, **style)
            ax.fill_between(x, low, high, color=style["color"], alpha=0.16, lw=0)
            end = x[-1], min(max(y[-1], limits[0]), limits[1])
            ends.append((name, style["color"], end))
    ax.set(ylim=limits, title=title)
    ax.locator_params(axis="y", nbins=7, integer=True)
    ax.yaxis.set_major_formatter(lambda y, _: f"$10^{{{y:.0f}}}$")
    return ends


def figure(res, path):
    """Left: variance of the sequence weight against L. Right: variance of the gradient
    estimate, both axes logarithmic."""
    if not curves.can_draw():
        return
    w, g, lengths = res["weight"], res["gradient"], res["lengths"]
    weights = [("dense learner, lower bound", "floor", w["log_var_floor"]),
               ("dense learner, as sampled", "seq", w["log_var"]),
               ("shadow: 0 but for rounding", "shadow", w["log_var_shadow"])]
    gradients = [("seq, lower bound", "floor", g["seq"]["log_var_floor"])]
    gradients += [(arm, arm, g[arm]["log_var"]) for arm in ARMS]
    # seq leaves the frame: it would press all others flat
    low, high = finite_log10(*(g[arm]["log_var"] for arm in ("naive", "tis", "shadow")))

    def left(ax):
        ax.set(xlim=(0, lengths[-1]), xlabel="response length L (tokens)")
        limits = finite_log10(*(q for *_, q in weights))
        return draw(ax, lengths, weights, limits=limits,
                    title="Variance of the sequence weight $W_L$")

    def right(ax):
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, lengths)
        ax.set(xlim=(lengths[0], lengths[-1]),
               xlabel="response length L (tokens, logarithmic)")
        return draw(ax, lengths, gradients, limits=(low - 2.5, high + 2.5),
                    title="Variance of the gradient estimate (nats$^2$)")

    curves.write_panels(path, dict(A=left, B=right), {}, mosaic="AB", figsize=(9, 4.3))


# the command line

def settings(argv):
    """-> namespace, list of lengths; --help ends the program. Raises ValueError."""
    others = {key: value for key, value in train.DEFAULTS.items() if key not in OWN}
    help_if_asked(argv, __doc__, ("settings", __file__, OWN),
                  ("settings of train.py", train.__file__, others))
    argv = ["--figure=True" if arg == "--figure" else arg for arg in argv]
    c = SimpleNamespace(**configure(DEFAULTS, argv, choices=CHOICES,
                                    refused=REFUSED))
    train.settings([f"--{key}={getattr(c, key)}" for key in train.DEFAULTS])  # its checks
    found = {parse(part) for part in c.lengths.split(",")}
    if not all(type(n) is int for n in found):
        raise ValueError("lengths must be whole numbers with commas between, got "
                         f"{c.lengths!r}")
    lengths = sorted(found)
    if lengths[0] < 2 or c.resamples < 100 or min(c.prompts, c.group) < 2 or not c.out:
        raise ValueError("lengths must be at least 2 (the first token is dense), "
                         "resamples at least 100, prompts (they are resampled) and "
                         "group at least 2, out a folder")
    if c.response_budget:
        raise ValueError("response_budget: variances are measured without eviction of "
                         "response keys")
    choose_device(c)
    if c.dtype == "auto":
        c.dtype = "bfloat16" if c.device.startswith("cuda") else "float32"
    return c, lengths


def run(c, lengths):
    """-> everything that goes to variance.json"""
    folder = find_checkpoint(c.model)
    choose_dtype(c, folder)
    tok = Tokenizer(folder)
    dtype = getattr(torch, c.dtype)
    net = Transformer.from_pretrained(folder, device=c.device, dtype=dtype)
    net.use_tokens(len(tok), tok.absent)
    problems = problems_of(c, tok, find_reward(c.reward), n_eval=c.eval_problems)
    _, ids = problems.get("train", range(c.prompts))
    longest = max(map(len, ids))
    room = net.config.max_pos - longest
    if lengths[-1] > room:
        out = ", ".join(str(n) for n in lengths if n > room)
        tell(f"left out: {out} tokens, which with the prompt exceed the model's "
             f"context of {net.config.max_pos}")
        lengths = [n for n in lengths if n <= room]
        if not lengths:
            raise ValueError("no length fits the model's context")
    tell(f"{folder}, {c.device}, {c.dtype}; {c.task}: {c.prompts} prompts of up to "
         f"{longest} tokens x {c.group} samples of {lengths[-1]} tokens, temperature "
         f"{c.temperature}; evict {c.evict}, budget {c.budget}; gradients of "
         f"{c.layers}")
    make_folder(c.out)
    raw = measure(net, ids, c, lengths)
    measured = net if c.layers == "all" else net.layers[-1]
    return dict(settings=vars(c), lengths=lengths,
                parameters=sum(param.numel() for param in measured.parameters()),
                **summarise(raw, lengths, c.resamples), samples=as_lists(raw))


def as_lists(raw):
    """The samples by themselves, for JSON, which has no infinity."""
    plain = {k: [x.tolist() for x in v] for k, v in raw.items() if isinstance(v, list)}
    plain["log_g"] = {a: [[[y if math.isfinite(y) else None for y in row]
                           for row in x.tolist()] for x in by_length]
                      for a, by_length in raw["log_g"].items()}
    return plain


def read_measurement(file):
    res = read_json(file)
    try:
        tables(res)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ValueError(f"{file} holds no measurement of this program: "
                         f"{type(e).__name__}: {e}") from None
    return res


def tables(res):
    return "\n".join([*weight_table(res), *gradient_table(res), *slope_table(res)])


def main(argv):
    with one_line_errors(ValueError, OSError):
        config, lengths = settings(argv)
        file = os.path.join(config.out, "variance.json")
        if config.figure:
            res = read_measurement(file)
        else:
            res = run(config, lengths)
            write_text(file, json.dumps(res))
        tell(tables(res))
        figure(res, os.path.join(config.out, "variance.png"))
        tell(f"\nnumbers in {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
