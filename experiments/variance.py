"""
What an importance weight costs and what replaying the mask costs, as the response grows: variances at a fixed checkpoint.

    python variance.py                                              # the embedded checkpoint: table, variance.json, variance.png
    python variance.py config/smollm2.py --layers=last --lengths=2,8,32,128,512
    python variance.py --figure --out=out-variance                  # draw again from the numbers that are there

The idea. Responses are drawn by a sampler mu that evicts. A dense learner pi can mend that with the sequence weight

    W_L = prod_{t<L} w_t,  w_t = pi(token_t) / mu(token_t),     E_mu W_L = 1 for every L,

a product of L ratios, so log(1 + Var W_L) grows like L. A learner that replays the mask is mu: its weight is 1, its variance 0.
For every length L of `lengths`: variance of W_L, of log W_L, effective sample size (sum W)^2 / (n sum W^2), mean of W_L, and of

    g = A sum_{t<L} weight_t grad log p(token_t)     a sum over tokens, not a mean; per token: variance / L^2

the variance mean |g - mean g|^2 (n / (n - 1)) under five arms: naive (weight 1, p = pi), tis (min(w_t, 2), pi), seq (W_L, pi), sparse_rl
(grpo.correction, whose normalisation runs over all samples of length L, pi) and shadow (weight 1, p the replayed mu). A is +-1, drawn
apart from the text, so that no reward's design matters: E g = 0 for every arm and Var g = E |g|^2. Shadow's terms have mean 0 whatever
came before (a score under its own policy), so its variance should grow like L; those of naive need not, so its should grow faster. Bias
is not measured: an arm that drops its samples has a small variance and no signal, so the mean token weight stands beside it.

Sampled variances of W lie. Once W_L has a heavy tail, n samples miss the few that carry its mean and its variance: the sampled mean
of W falls below 1, the sampled variance with it, and it may even shrink as L grows. Two remedies, both from samples of pi scored by
both policies (what SnapKV keeps depends on the prompt alone, so mu scores any text):

    E_mu W^2 = E_pi W >= exp(E_pi log W) = exp(KL(pi || mu))              by Jensen: a floor, estimated by a mean of logs, no heavy tail
    E_mu W^2 |G|^2 = E_pi W |G|^2 >= exp(E_pi [log W + log |G|^2])        the same for seq, G = sum_t grad log pi(token_t)

One set of samples of the longest length serves all: a prefix of a sample is a sample of that length. The lengths are therefore not
independent, and the bootstrap (prompts with replacement, 95 % intervals) draws the same prompts for all. In it |mean g|^2 keeps its
share of the mean |g|^2: of order 1 / n, as E g = 0. No stop tokens: past its answer the model goes on as it may.
Slopes: least squares of log variance against L (nats per token; straight if exponential) and against log L (power; straight if polynomial).

Left out on purpose: rewards, training, methods that evict response keys. On a card in bfloat16 gradients are rounded to it.
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
from support.configurator import configure
from grpo import correction, replay
from model import Transformer, find_checkpoint
from rollout import generate
from data.tokenizer import Tokenizer

DEFAULTS = dict(train.DEFAULTS, prompts=8,            # train.py's keys, so that its config files serve; its learner's do nothing here
                lengths="2,4,8,16,32,64,128,256,512",  # tokens; what does not fit the model's context is left out
                layers="all",                         # all: gradient with respect to all parameters; last: to those of the last block
                resamples=1000,                       # of the bootstrap; 100 and more
                out="out-variance",                   # folder for variance.json and variance.png
                figure=False)                         # print and draw again from variance.json
CHOICES = dict(train.CHOICES, layers=["all", "last"])
ARMS = dict(naive="dense", tis="dense", seq="dense", sparse_rl="dense", shadow="shadow")  # whose gradient each arm takes


def cut(rollout, n):
    """The first n tokens of every response."""
    return replace(rollout, tokens=rollout.tokens[..., :n], lengths=rollout.lengths.clamp(max=n), logp_roll=rollout.logp_roll[..., :n],
                   until=rollout.until[..., :n].clamp(max=n), stopped=rollout.stopped & (rollout.lengths <= n))


def one_sample(rollout, b, g):
    """Sample g of prompt b as a rollout of its own."""
    r = rollout.select([b])
    return replace(r, tokens=r.tokens[:, g:g + 1], lengths=r.lengths[:, g:g + 1], logp_roll=r.logp_roll[:, g:g + 1],
                   until=r.until[:, :, :, g:g + 1], stopped=r.stopped[:, g:g + 1])


@torch.no_grad()
def score(model, rollout):
    """-> log-probs of both policies (B, G, R), one prompt at a time."""
    parts = [replay(model, rollout.select([b])) for b in range(len(rollout.prompts))]
    return {p: torch.cat([x[p] for x in parts]) for p in ("dense", "shadow")}


def token_weights(dense, rollout):
    """Per-token weights (B, G, R) of every arm but seq, whose weight is one number per sample."""
    ones = torch.ones_like(dense)
    return dict(naive=ones, **{k: correction(k, dense, rollout.logp_roll, rollout.mask) for k in ("tis", "sparse_rl")}, shadow=ones)


def gradients(model, rollout, weights, log_w, sign, params):
    """Squared norms of one-sample gradients. weights: {arm: (B, G, R)}; log_w (B, G) scales naive's gradient to that of seq.
    -> {arm: log |g|^2 (B, G)}, {arm: log |mean g|^2}, both fp64; logs, since W leaves the range of floats.

    One forward pass per sample and policy, one backward pass per arm; seq is naive times a number and costs none."""
    B, G = rollout.lengths.shape
    log_w, names = log_w.cpu(), [*weights, *(["seq"] if "naive" in weights else [])]
    sq = {a: torch.full((B, G), -math.inf, dtype=torch.float64) for a in names}
    total = {a: torch.zeros(sum(p.numel() for p in params), device=model.device) for a in names}
    for b, g in product(range(B), range(G)):
        train.say(f"{rollout.tokens.shape[2]} tokens: gradient of sample {b * G + g + 1}/{B * G}")
        one = one_sample(rollout, b, g)
        for policy in ("dense", "shadow"):
            arms = [a for a in weights if ARMS[a] == policy and weights[a][b, g].any()]  # sparse_rl drops whole responses: g = 0
            logp = replay(model, one, (policy,))[policy] if arms else None  # (1, 1, R)
            for a in arms:
                d = torch.autograd.grad(logp, params, weights[a][b, g].view(logp.shape), retain_graph=a != arms[-1])
                flat = torch.cat([x.reshape(-1).float() for x in d])
                norm = torch.linalg.vector_norm(flat, dtype=torch.float64).log().item()
                for name, lw, top in [(a, 0.0, 0.0)] + ([("seq", log_w[b, g].item(), log_w.max().item())] if a == "naive" else []):
                    sq[name][b, g] = 2 * (norm + lw)
                    total[name].add_(flat, alpha=sign[b, g].item() * math.exp(lw - top))  # over the largest weight
    shift = lambda a: log_w.max().item() if a == "seq" else 0.0
    mean = {a: 2 * (torch.linalg.vector_norm(t, dtype=torch.float64).log().item() - math.log(B * G) + shift(a)) for a, t in total.items()}
    return sq, mean


def measure(model, ids, c, lengths):
    """Roll out once, score, differentiate. -> per-sample numbers by length, fp64: see summarise"""
    keep = (c.budget, c.window, c.sinks)
    train.say(f"sampling {c.prompts} x {c.group} responses of {lengths[-1]} tokens twice, from mu and from pi")
    mu = generate(model, ids, c.group, lengths[-1], c.temperature, c.evict, *keep, seed=c.seed, pool=c.pool)
    pi = generate(model, ids, c.group, lengths[-1], c.temperature, "none", *keep, seed=c.seed + 1, pool=c.pool)
    pi.kept = mu.kept  # mu scores what pi drew
    at_mu, at_pi = score(model, mu), score(model, pi)
    sums = lambda a, b: (a.double() - b.double()).cumsum(-1).cpu()  # (B, G, R) log W of every prefix; 1e-300 and less is usual
    log_w, log_w_shadow, log_w_pi = sums(at_mu["dense"], mu.logp_roll), sums(at_mu["shadow"], mu.logp_roll), sums(*at_pi.values())
    sign = torch.randint(0, 2, mu.lengths.shape, generator=torch.Generator().manual_seed(c.seed)) * 2.0 - 1  # (B, G) advantages
    params = list((model if c.layers == "all" else model.layers[-1]).parameters())
    raw = dict(log_w=[], log_w_shadow=[], log_w_pi=[], log_g_pi=[])
    raw |= {k: {a: [] for a in ARMS} for k in ("log_g", "log_mean", "mean_weight")}
    for n in lengths:
        r, dense = cut(mu, n), at_mu["dense"][..., :n]
        weights = token_weights(dense, r)
        sq, mean = gradients(model, r, weights, log_w[..., n - 1], sign, params)
        sq_pi, _ = gradients(model, cut(pi, n), dict(naive=torch.ones_like(dense)), log_w_pi[..., n - 1], sign, params)
        for name, x in (("log_w", log_w), ("log_w_shadow", log_w_shadow), ("log_w_pi", log_w_pi)):
            raw[name].append(x[..., n - 1])
        raw["log_g_pi"].append(sq_pi["naive"])
        for a in ARMS:
            raw["log_g"][a].append(sq[a])
            raw["log_mean"][a].append(mean[a])
            raw["mean_weight"][a].append(weights[a].mean().item() if a in weights else None)
    train.say("")
    return raw


# ---- statistics, all of logs: x (..., n) are n samples of log W

def log_mean(x):
    return x.logsumexp(-1) - math.log(x.shape[-1])


def log_var(x):
    """Log of the sample variance of exp(x)."""
    top = x.amax(-1, keepdim=True)
    return (x - top).exp().var(-1).log() + 2 * top[..., 0]


def log_ess(x):
    """Log of (sum W)^2 / (n sum W^2), between -log n and 0."""
    return 2 * log_mean(x) - log_mean(2 * x)


def slope(y, x):
    """Least squares of y (..., lengths) on x (lengths,). -> slope (...), share of the variance of y that the line explains (...)"""
    x, d = x - x.mean(), y - y.mean(-1, keepdim=True)
    k = (d * x).sum(-1) / (x * x).sum()
    return k, 1 - (d - k[..., None] * x).pow(2).sum(-1) / d.pow(2).sum(-1)


def resample(prompts, times, seed=0):
    return torch.randint(0, prompts, (times, prompts), generator=torch.Generator().manual_seed(seed))


def bootstrap(f, index, *xs):
    """f, which maps (..., n) to (...), of samples (B, G) and of samples whose prompts are drawn by index (times, B). -> (), (times,)"""
    return f(*(x.reshape(-1) for x in xs)), f(*(x[index].flatten(1) for x in xs))


def summarise(raw, lengths, times):
    """raw: log_w, log_w_shadow (samples of mu), log_w_pi (of pi), log_g_pi, log_g[arm]: lists over lengths of (B, G); log_mean[arm],
    mean_weight[arm]: lists over lengths of numbers.
    -> {quantity: {"value", "low", "high": lists over lengths, "slope": {...}}}, natural logs; None where there is no finite number"""
    index, n = resample(len(raw["log_w"][0]), times), raw["log_w"][0].numel()
    number = lambda x: round(float(x), 10) if math.isfinite(x) else None
    x = torch.tensor(lengths, dtype=torch.float64)

    def over_lengths(f, *series):
        value, many = map(torch.stack, zip(*(bootstrap(f, index, *xs) for xs in zip(*series))))  # (lengths,), (lengths, times)

        def band(y):  # resamples without a finite value (all dropped) are left out
            y = y[y.isfinite()]
            return [number(q) for q in y.quantile(torch.tensor([0.025, 0.975], dtype=y.dtype))] if len(y) else [None, None]
        low, high = zip(*map(band, many))
        out = dict(value=list(map(number, value)), low=low, high=high, slope={})
        ok = value.isfinite()
        for name, axis in (("per_token", x), ("power", x.log())):
            if ok.sum() > 2:
                k, r2 = slope(value[ok], axis[ok])
                ends = band(slope(many[ok].T, axis[ok])[0])
                out["slope"][name] = dict(value=number(k), r2=number(r2), low=ends[0], high=ends[1])
        return out

    def shrink(q, m):  # from mean |g|^2 to the variance of the whole sample, as a log; the bootstrap takes it as given
        return math.log(n / (n - 1)) + math.log1p(-math.exp(m - log_mean(q.reshape(-1)).item())) if q.isfinite().any() else 0.0

    floor = lambda x: x.mean(-1).expm1().log()  # log of a lower bound of Var W = E W^2 - 1; none where the mean of logs is not positive
    at_mu = dict(log_var=log_var, var_log=lambda x: x.var(-1), log_ess=log_ess, log_mean=log_mean)
    at_pi = dict(log_var_floor=floor, kl_pi_mu=lambda x: x.mean(-1), log_second_moment_pi=log_mean)  # the last: sampled, E_pi W
    weight = {k: over_lengths(f, raw["log_w"]) for k, f in at_mu.items()} | {k: over_lengths(f, raw["log_w_pi"]) for k, f in at_pi.items()}
    weight["log_var_shadow"] = over_lengths(log_var, raw["log_w_shadow"])
    gradient = {}
    for a in ARMS:
        log_g, shadow = raw["log_g"][a], raw["log_g"]["shadow"]
        shrunk = [q + shrink(q, m) for q, m in zip(log_g, raw["log_mean"][a])]
        gradient[a] = dict(log_var=over_lengths(log_mean, shrunk), mean_weight=raw["mean_weight"][a],
                           log_ratio=over_lengths(lambda x, y: log_mean(x) - log_mean(y), log_g, shadow),
                           alive=[number(q.isfinite().double().mean()) for q in log_g])  # share of samples with a gradient
        gradient[a]["log_var_per_token"] = [None if v is None else number(v - 2 * math.log(length))
                                            for v, length in zip(gradient[a]["log_var"]["value"], lengths)]
    gradient["seq"]["log_var_floor"] = over_lengths(lambda x: x.mean(-1), [w + g for w, g in zip(raw["log_w_pi"], raw["log_g_pi"])])
    return dict(weight=weight, gradient=gradient)


# ---- what a reader sees

def table(res):
    """Lines to print: everything as log10, as numbers of this size are not written otherwise."""
    w, g, lengths = res["weight"], res["gradient"], res["lengths"]
    n = res["settings"]["prompts"] * res["settings"]["group"]
    ten = lambda v, digits=1: "-" if v is None else f"{v / math.log(10):.{digits}f}"
    span = lambda q, i: f"{ten(q['value'][i])} [{ten(q['low'][i])}, {ten(q['high'][i])}]"
    yield (f"sequence weight W of {n} samples, as log10 (but std and ESS), with 95 % bootstrap intervals over prompts; the floor, a lower "
           "bound of the true variance, comes from samples of the learner")
    yield (f"{'tokens':>6} {'Var W, sampled':>24} {'Var W, floor':>24} {'mean W (truth 0)':>24} {'std of ln W':>12} {'ESS / n':>8} "
           f"{'Var W, shadow':>14}")
    for i, length in enumerate(lengths):
        yield (f"{length:6d} " + " ".join(f"{span(w[q], i):>24}" for q in ("log_var", "log_var_floor", "log_mean"))
               + f" {math.sqrt(w['var_log']['value'][i]):12.2f} {math.exp(w['log_ess']['value'][i]):8.3f} "
               f"{ten(w['log_var_shadow']['value'][i]):>14}")
    yield (f"\nvariance of the gradient estimate ({res['parameters']:,} parameters, sum over tokens), as log10; in brackets, times "
           "shadow's; mean token weight")
    yield (f"{'tokens':>6} " + " ".join(f"{a:>18}" for a in ARMS) + f" {'seq, floor':>11} {'weight: tis':>12} {'sparse_rl':>10} "
           f"{'sparse_rl keeps':>16}")
    factor = lambda v: "0" if v is None else f"{math.exp(v):.3g}" if abs(v) < 500 else f"1e{v / math.log(10):.0f}"
    cell = lambda a, i: f"{ten(g[a]['log_var']['value'][i], 2)} ({factor(g[a]['log_ratio']['value'][i])})"
    for i, length in enumerate(lengths):
        yield (f"{length:6d} " + " ".join(f"{cell(a, i):>18}" for a in ARMS) + f" {ten(g['seq']['log_var_floor']['value'][i]):>11} "
               f"{g['tis']['mean_weight'][i]:12.3f} {g['sparse_rl']['mean_weight'][i]:10.3f} {g['sparse_rl']['alive'][i]:16.2f}")
    yield ("\nslope of ln variance: nats per token (straight against L) | power of L (straight against ln L; per token: 2 less); "
           "r2 of each line")
    rows = [("W, sampled", w["log_var"]), ("W, floor", w["log_var_floor"]), ("W, shadow", w["log_var_shadow"])]
    rows += [(f"gradient, {a}", g[a]["log_var"]) for a in ARMS] + [("gradient, seq, floor", g["seq"]["log_var_floor"])]
    show = lambda s: f"{s['value']:.4f} [{s['low']:.4f}, {s['high']:.4f}] r2 {s['r2']:.2f}" if s and None not in s.values() else "-"
    for name, q in rows:
        yield f"{name:>20}: {show(q['slope'].get('per_token')):>42} | {show(q['slope'].get('power')):>42}"


STYLE = dict(naive=("#D55E00", "--"), tis=("#E69F00", "-."), seq=("#CC79A7", ":"), sparse_rl=("#56B4E9", (0, (5, 1, 1, 1, 1, 1))),
             shadow=("#009E73", "-"), floor=("#0072B2", (0, (4, 1))))  # Okabe and Ito's colours


def figure(res, path):
    """Left: variance of the sequence weight against L. Right: variance of the gradient estimate, both axes logarithmic."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return print("no figure: it needs matplotlib (pip install matplotlib); --figure then draws it from the numbers saved", file=sys.stderr)
    ten, lengths = math.log(10), res["lengths"]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.3), dpi=200)

    def draw(ax, lines):
        """lines: (quantity, colour key, label). Labels stand where a line ends or leaves the frame, pushed apart at the right edge."""
        edge = []
        for q, key, text in lines:
            rows = [(x, *(z / ten for z in v)) for x, *v in zip(lengths, q["value"], q["low"], q["high"]) if None not in v]
            if not rows:
                continue
            x, y, low, high = zip(*rows)
            ax.plot(x, y, color=STYLE[key][0], linestyle=STYLE[key][1], linewidth=1.8)
            ax.fill_between(x, low, high, color=STYLE[key][0], alpha=0.16, linewidth=0)
            at = (ax.transData + ax.transAxes.inverted()).transform(list(zip(x, y)))  # in the frame's coordinates
            out = next((i for i in range(1, len(at)) if not 0 <= at[i][1] <= 1), None)
            if out is None and at[-1][0] > 0.9:
                edge.append([at[-1][1], text, key])
                continue
            (u, v), put = at[-1], "center"
            if out is not None:
                (u0, v0), (u1, v1) = at[out - 1:out + 1]
                v, put = (1.0, "top") if v1 > 1 else (0.0, "bottom")
                u = u0 + (u1 - u0) * (v - v0) / (v1 - v0)
            ax.text(u + 0.03, v + (0.01 if put == "bottom" else 0), text, color=STYLE[key][0], transform=ax.transAxes, va=put, fontsize=8.5)
        edge.sort()
        for i in range(1, len(edge)):
            edge[i][0] = max(edge[i][0], edge[i - 1][0] + (0.1 if "\n" in edge[i][1] + edge[i - 1][1] else 0.055))
        for v, text, key in edge:
            ax.text(0.975, v, text, color=STYLE[key][0], transform=ax.transAxes, va="center", fontsize=8.5)

    w, g = res["weight"], res["gradient"]
    values = lambda *qs: [v / ten for q in qs for k in ("value", "low", "high") for v in q[k] if v is not None]
    every = values(w["log_var"], w["log_var_floor"], w["log_var_shadow"])
    left.set_ylim(min(every), max(every))
    left.set_xlim(0, lengths[-1] * 1.06)
    left.set_xlabel("response length L (tokens)")
    left.set_title("Variance of the sequence weight $W_L$", fontsize=10)
    plain = values(*(g[a]["log_var"] for a in ("naive", "tis", "shadow")))
    right.set_ylim(min(plain) - 2.5, max(plain) + 2.5)  # seq leaves the frame: it would press all others flat
    right.set_xscale("log", base=2)
    right.set_xlim(lengths[0], lengths[-1] * (lengths[-1] / lengths[0]) ** 0.06)
    right.set_xticks(lengths, lengths)
    right.set_xlabel("response length L (tokens, logarithmic)")
    right.set_title("Variance of the gradient estimate (nats$^2$)", fontsize=10)
    fig.tight_layout(rect=(0, 0, 0.93, 1), w_pad=8)  # before the labels, which lie outside the frames
    draw(left, [(w["log_var_floor"], "floor", "dense learner,\nlower bound"), (w["log_var"], "seq", "dense learner,\nas sampled"),
                (w["log_var_shadow"], "shadow", "shadow: 0 but\nfor rounding")])
    name = {a: a for a in ARMS} | dict(seq="seq, as sampled")
    if None in g["sparse_rl"]["log_var"]["value"]:
        name["sparse_rl"] = "sparse_rl (then it\ndrops every sample)"
    draw(right, [(g["seq"]["log_var_floor"], "floor", "seq, lower bound"), *((g[a]["log_var"], a, name[a]) for a in ARMS)])
    for ax in (left, right):
        ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(7, integer=True))
        ax.yaxis.set_major_formatter(lambda y, _: f"$10^{{{y:.0f}}}$")
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path)
    plt.close(fig)


def settings(argv):
    """-> namespace, list of lengths. Raises ValueError."""
    c = SimpleNamespace(**configure(DEFAULTS, [a + "=True" if a == "--figure" else a for a in argv], CHOICES, train.REFUSED))
    train.settings([f"--{k}={getattr(c, k)}" for k in train.DEFAULTS])  # its checks
    try:
        lengths = sorted({int(x) for x in c.lengths.split(",")})
    except ValueError:
        raise ValueError(f"lengths must be whole numbers with commas between, got {c.lengths!r}") from None
    if lengths[0] < 2 or c.resamples < 100 or c.prompts < 2 or not c.out:
        raise ValueError("lengths must be at least 2 (the first token is dense), resamples at least 100, prompts at least 2 (they are "
                         "resampled), out a folder")
    if c.response_budget:
        raise ValueError("response_budget: variances are measured without eviction of response keys")
    train.choose_device(c)
    return c, lengths


def run(c, lengths):
    """-> everything that goes to variance.json"""
    folder = find_checkpoint(c.model)
    tok = Tokenizer(folder)
    net = Transformer.from_pretrained(folder, device=c.device, dtype=getattr(torch, c.dtype))
    net.vocab_used = min(len(tok), net.config.vocab_size)
    ids = train.Problems(c, tok).get("train", range(c.prompts))[1]
    room = net.config.max_pos - max(map(len, ids))
    if lengths[-1] > room:
        print(f"left out: {', '.join(str(n) for n in lengths if n > room)} tokens, which with the prompt exceed the model's context of "
              f"{net.config.max_pos}")
        lengths = [n for n in lengths if n <= room]
        if not lengths:
            raise ValueError("no length fits the model's context")
    print(f"{folder}, {c.device}, {c.dtype}; {c.task}: {c.prompts} prompts of up to {max(map(len, ids))} tokens x {c.group} samples of "
          f"{lengths[-1]} tokens, temperature {c.temperature}; evict {c.evict}, budget {c.budget}; gradients of {c.layers}", flush=True)
    raw = measure(net, ids, c, lengths)
    parameters = sum(p.numel() for p in (net if c.layers == "all" else net.layers[-1]).parameters())
    plain = {k: [x.tolist() for x in v] if torch.is_tensor(v[0]) else v for k, v in raw.items() if isinstance(v, list)}
    finite = lambda row: [y if math.isfinite(y) else None for y in row]
    plain["log_g"] = {a: [[finite(row) for row in x.tolist()] for x in v] for a, v in raw["log_g"].items()}
    return dict(settings=vars(c), lengths=lengths, parameters=parameters, **summarise(raw, lengths, c.resamples), samples=plain)


def main(argv):
    try:
        c, lengths = settings(argv)
        file, picture = (os.path.join(c.out, "variance" + end) for end in (".json", ".png"))
        if c.figure:
            with open(file, encoding="utf-8") as f:
                try:
                    res = json.load(f)
                except ValueError as e:
                    raise ValueError(f"{file}: {e}") from None
            if not isinstance(res, dict) or not {"weight", "gradient", "lengths"} <= res.keys():
                raise ValueError(f"{file} holds no measurement of this program")
        else:
            os.makedirs(c.out, exist_ok=True)
            res = run(c, lengths)
            train.write_text(file, json.dumps(res))
        print("\n".join(table(res)))
        figure(res, picture)
        print(f"\nnumbers in {file}")
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])
