"""
Several arms, several seeds each, then one table and one figure.

    python ablate.py config/dense.py config/naive.py config/shadow.py config/smd.py --seeds=5 --jobs=2 --steps=60
    python ablate.py config/smollm2.py+config/naive.py             # several config files make one arm, named after the last
    python ablate.py "config/smd.py --budget=32" config/smd.py     # options of one arm: "smd budget=32"; all other --key=value
                                                                   # are for every arm and go to train.py
    python ablate.py --table --out=out-ablate smd "smd budget=32"  # only table and figure, from what is there
    python ablate.py --variance ...                                # variance.py

    --seeds=3           seeds 0, 1, 2           --out=out-ablate    a run is OUT/ARM/SEED, its print OUT/ARM/SEED/train.log
    --jobs=1            runs at a time          --keep=FOLDER       also copy the logs there, small, as ARM-SEED.jsonl
    --threads=1         of each run

The idea. One process of train.py per run, so that a run that fails takes no other with it and its command can be repeated by hand.
What was finished is never run again and what was begun goes on: after Ctrl-C, or with more seeds, say the same command. On GPUs each
of the `jobs` workers has a card; with more jobs than cards they share, and the minutes are then no measure of speed. A finished run
needs only log.jsonl and config.json: ckpt.pt and model/ may be deleted.

Table and figure see a log only after `compact`, which keeps what they need at 6 significant digits; that is also what --keep
writes, so kept logs give the same table. Runs that did not end count nowhere and are named under the table; where runs are missing,
exit code 1. Left out: several machines, tests of significance (with few seeds: look at the worst one).
"""
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TRAIN = os.path.join(HERE, "train.py")
LAST = 10  # steps over which noisy numbers are averaged
START = ("model", "task", "prompt_tokens", "max_new_tokens", "eval_problems", "evict",  # what decides a reward before training; from
         "budget", "window", "sinks", "pool", "response_budget", "period")              # budget on only where keys are evicted


# ---- the command line ----

def parse(argv):
    """-> own options, arms as they were written, what goes to train.py. Raises ValueError."""
    o, arms, common = dict(seeds=3, jobs=1, threads=1, out="out-ablate", keep="", table=False), [], []
    for arg in argv:
        key, eq, value = arg[2:].partition("=")
        if not arg.startswith("--"):
            arms.append(arg)
        elif arg == "--table":
            o["table"] = True
        elif key in ("seeds", "jobs", "threads"):
            if not value.isdecimal() or not int(value):
                raise ValueError(f"{arg}: {key} expects a whole number from 1")
            o[key] = int(value)
        elif key in ("out", "keep"):
            if not value:
                raise ValueError(f"{arg}: write --{key}=FOLDER")
            o[key] = value
        else:
            common.append(arg)
        if o["table"] and (common or any(a.startswith(("--seeds", "--jobs", "--threads")) for a in argv)):
            raise ValueError("--table runs nothing: it takes --out, --keep and names of arms")
    if not (arms or o["table"]):
        raise ValueError("no arm: name a config file, or --table for what is there (--help says more)")
    return o, arms, common


def parse_arm(text):
    """'a.py+b.py --key=value' -> name, config files, options"""
    words = shlex.split(text)
    files = [f for w in words if not w.startswith("--") for f in w.split("+")]
    options = [w for w in words if w.startswith("--")]
    if not all(f.endswith(".py") for f in files) or not files:
        raise ValueError(f"arm {text!r}: write config/NAME.py, several joined by +, then --key=value")
    short = [key + "=" + os.path.basename(value) for key, _, value in (w[2:].partition("=") for w in options)]
    return " ".join([os.path.basename(files[-1])[:-3], *short]), files, options


def folder(name):
    return name.replace(" ", ",")  # a shell reads it without quotes


def request(texts, common, seeds):
    """Check every arm as train.py would, before anything runs. -> {name: dict(args, seeds, steps, start)}, settings by name. Raises
    ValueError."""
    import train  # here, because it brings torch, which the table does not need
    arms, configs = {}, {}
    for text in texts:
        name, files, options = parse_arm(text)
        if name in arms:
            raise ValueError(f"two arms are named {name!r}: give one a config file of its own")
        for arg in common + options:
            if arg[2:].partition("=")[0] in ("seed", "out_dir", "resume", "overwrite"):
                raise ValueError(f"{arg}: set here for every run, from --seeds and --out")
        args = files + common + options
        c = configs[name] = train.settings(args)
        start = {k: getattr(c, k) for k in START[:6 if c.evict == "none" else None] if hasattr(c, k)}
        start["model"] = os.path.basename(c.model)
        arms[name] = dict(args=args, seeds=list(range(seeds)), steps=c.steps, start=" ".join(f"{k}={v}" for k, v in start.items()))
    return arms, configs


# ---- running ----

def read(path):
    """Lines of a log; a kill may leave half a line."""
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def ended(log, steps=None):
    """Does the log end with the evaluation after the last step?"""
    return len(log) > 1 and "eval_dense" in log[-1] and log[-1]["step"] == (steps or log[-1]["step"]) and log[-2]["step"] == log[-1]["step"] - 1


def decide(path, c):
    """What is to be done for the run at path -> "skip", "--resume=True" or "--overwrite=True". Raises ValueError if a run that is worth
    something has other settings; train.py would say so too, but is not asked about a finished one."""
    import train
    has = lambda name: os.path.exists(os.path.join(path, name))
    log = read(os.path.join(path, "log.jsonl")) if has("log.jsonl") else []
    if not has("ckpt.pt") and not ended(log, c.steps):
        return "--overwrite=True"
    if has("config.json"):
        with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
            was = json.load(f)
        for k in [k for k in train.DEFAULTS if k not in train.MAY_CHANGE - {"eval_problems"} and k != "seed"]:
            if k in was and was[k] != getattr(c, k) and getattr(c, k) != "auto":
                raise ValueError(f"{k} was {was[k]!r} in the run in {path!r}, now it is {getattr(c, k)!r}: choose another --out")
    if log and log[-1]["step"] > c.steps:
        raise ValueError(f"the run in {path!r} has done {log[-1]['step']} steps already, steps={c.steps}: choose another --out")
    return "skip" if ended(log, c.steps) else "--resume=True"


def cards():
    """Names of the cards, as CUDA_VISIBLE_DEVICES takes them."""
    import torch
    n = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:n] if given else [str(i) for i in range(n)]


def run_all(todo, jobs, threads):
    """todo: list of (what to call it, out_dir, arguments). `jobs` at a time, one line as each ends. -> how many failed; exits with 130
    after Ctrl-C, when every child has saved its step"""
    stop, working, failed, done, devices = [], {}, 0, 0, cards()
    old = {s: signal.signal(s, lambda *_: stop.append(True)) for s in (signal.SIGINT, signal.SIGTERM)}
    waiting, told = list(reversed(todo)), 0
    while working or (waiting and not stop):
        for slot in [s for s in range(jobs) if s not in working and waiting and not stop]:
            name, path, args = waiting.pop()
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            if devices:
                env["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
            with open(os.path.join(path, "train.log"), "ab" if "--resume=True" in args else "wb") as log:
                # a session of its own: Ctrl-C reaches only us, and we pass it on once (twice would make a child quit unsaved)
                process = subprocess.Popen([sys.executable, TRAIN, *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
                                           start_new_session=True)
            working[slot] = name, path, process, time.time()
        time.sleep(0.05)
        if len(stop) > told:
            print("interrupt: every run finishes its step and saves; once more kills them" if not told else "killed", file=sys.stderr)
            for *_, process, _ in working.values():
                process.send_signal(signal.SIGKILL if told else signal.SIGINT)
            told = len(stop)
        for slot, (name, path, process, start) in list(working.items()):
            if process.poll() is None:
                continue
            del working[slot]
            done += 1
            says = f"{name}: {'failed' if process.returncode else 'ended'} after {(time.time() - start) / 60:.1f} min"
            if process.returncode:
                failed += 1
                with open(os.path.join(path, "train.log"), encoding="utf-8", errors="replace") as f:
                    last = ([line for line in f.read().splitlines() if line.strip()] or ["it said nothing"])[-1]
                says = says.replace("failed", "stopped") if stop else says
                says += f": {last} (exit code {process.returncode}, {path}/train.log)"
            else:
                e = read(os.path.join(path, "log.jsonl"))[-1]
                says += f", held-out reward: compressed cache {e['eval_compressed']:.3f}, dense cache {e['eval_dense']:.3f}"
            print(f"{says} [{done} of {len(todo)}]", flush=True)
    for s, handler in old.items():
        signal.signal(s, handler)
    if stop:
        raise SystemExit(130)
    return failed


# ---- logs ----

def compact(log):
    """What table and figure need of a log, at 6 significant digits. A compact log stays as it is."""
    steps, out = [r for r in log if "reward" in r], []
    for r in log:
        if "reward" in r:
            row = {k: r[k] for k in ("step", "reward", "gap", "accept", "accept_p05") if k in r}
            row["seconds"] = r["seconds"] if "seconds" in r else r["rollout_s"] + r["learn_s"]
            if r is steps[-1]:
                row.update({k: r[k] for k in ("kv_kept", "kv_dense", "kv_dense_shared")})
                peak = [s["peak_gb"] for s in steps if "peak_gb" in s]  # a resumed run counts its peak anew
                row.update(dict(peak_gb=max(peak)) if peak else {})
        else:
            row = {k: r[k] for k in ("step", "eval_compressed", "eval_dense", "eval_accept", "eval_accept_p05") if k in r}
        out.append({k: float(f"{x:.6g}") if isinstance(x, float) else x for k, x in row.items()})
    return out


def write(path, text):
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".tmp", path)


def remember(where, arms):
    """Add arms to where/settings.json; their seeds to those that are there."""
    path = os.path.join(where, "settings.json")
    known = json.load(open(path, encoding="utf-8")) if os.path.exists(path) else {}
    for name, a in arms.items():
        known[name] = {**a, "seeds": sorted({*a["seeds"], *known.get(name, a)["seeds"]})}
    write(path, json.dumps(known, indent=1) + "\n")


def load(where, names=()):
    """Read OUT/ARM/SEED/log.jsonl and ARM-SEED.jsonl. -> {name: dict(seeds: asked for, steps, logs: {seed: compact log of a run that
    ended}, ...)} in the order of names, or of settings.json"""
    path, found = os.path.join(where, "settings.json"), {}
    arms = json.load(open(path, encoding="utf-8")) if os.path.exists(path) else {}
    for name in sorted(os.listdir(where)):
        kept = re.fullmatch(r"(.+)-(\d+)\.jsonl", name)
        here = os.path.join(where, name)
        if kept:
            found.setdefault(kept[1].replace(",", " "), {})[int(kept[2])] = here
        for seed in os.listdir(here) if os.path.isdir(here) else []:
            if seed.isdecimal() and os.path.exists(os.path.join(here, seed, "log.jsonl")):
                found.setdefault(name.replace(",", " "), {})[int(seed)] = os.path.join(here, seed, "log.jsonl")
    for name in sorted(found.keys() - arms.keys()):
        arms[name] = dict(args=[], seeds=sorted(found[name]), steps=None)
    unknown = [name for name in names if name not in arms]
    if unknown or not arms:
        raise ValueError(f"no arm {unknown[0]!r} in {where!r}, which holds: {', '.join(arms)}" if unknown else f"no log in {where!r}")
    arms = {name: arms[name] for name in names or arms}
    for name, a in arms.items():
        logs = {seed: read(path) for seed, path in sorted(found.get(name, {}).items())}
        a["logs"] = {seed: compact(log) for seed, log in logs.items() if ended(log, a["steps"])}
        a["seeds"] = sorted({*a["seeds"], *logs})
    return arms


def keep(where, arms):
    os.makedirs(where, exist_ok=True)
    for name, a in arms.items():
        for seed, log in a["logs"].items():
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in log)
            write(os.path.join(where, f"{folder(name)}-{seed}.jsonl"), "".join(lines))
    remember(where, {name: {k: x for k, x in a.items() if k != "logs"} for name, a in arms.items()})


# ---- the table ----

def series(a, key, rows="reward"):
    """One list per seed: `key` of the steps (or of the evaluations, rows="eval_dense") that have it."""
    return [[r[key] for r in log if rows in r and key in r] for log in a["logs"].values()]


def last(a, key):
    """Per seed the mean over the last steps; of seeds that have it."""
    return [statistics.fmean(s[-LAST:]) for s in series(a, key) if s]


def spread(values, worst=False):
    """mean ± sample standard deviation (worst seed)"""
    if not values:
        return ""
    text = f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")
    return text + (f" ({min(values):.3f})" if worst and len(values) > 1 else "")


def small(x):
    return f"{x:.2g}" if x >= 1e-3 else re.sub("e-0*", "e-", f"{x:.0e}")


def before(arms):
    """Held-out rewards before training: arms with the same start are one row, since only their learners differ. Arms that evict nothing
    add nothing if there are others. -> [(names, rewards with the compressed cache, with the dense cache)]"""
    groups = {}
    for name, a in arms.items():
        if a["logs"]:
            r = next(r for log in a["logs"].values() for r in log if "kv_kept" in r)
            start = a.get("start") or f"{r['kv_kept']} of {r['kv_dense']}"
            group = groups.setdefault(start, ([], {}, r["kv_kept"] < r["kv_dense_shared"]))
            group[0].append(name)
            for seed, log in a["logs"].items():
                group[1].setdefault(seed, []).append((log[0]["eval_compressed"], log[0]["eval_dense"]))
    rows = [g for g in groups.values() if g[2]] or list(groups.values())
    means = [[[statistics.fmean(pair[i] for pair in pairs) for pairs in by_seed.values()] for i in (0, 1)] for _, by_seed, _ in rows]
    return [(names, *m) for (names, _, _), m in zip(rows, means)]


def table(arms):
    """-> Markdown"""
    columns = ["arm", "seeds", "held-out reward, compressed cache", "held-out reward, dense cache", f"sampled reward, last {LAST} steps",
               f"gap learner - sampler, first, last {LAST} steps", f"acceptance, mean, p05, last {LAST} steps",
               "held-out acceptance, mean, p05", "KV kept", "minutes", "peak GB"]
    starts = before(arms)
    rows = [["before training" + f" ({', '.join(names)})" * (len(starts) > 1), "", spread(compressed), spread(dense)] + [""] * 7
            for names, compressed, dense in starts]
    missing = []
    for name, a in arms.items():
        n, lost = len(a["logs"]), [s for s in a["seeds"] if s not in a["logs"]]
        missing += [f"{name} seed {s}" for s in lost]
        if not n:
            rows.append([name, f"0 of {len(lost)}"] + [""] * 9)
            continue
        ends = [[log[-1].get(k) for log in a["logs"].values()] for k in ("eval_compressed", "eval_dense", "eval_accept", "eval_accept_p05")]
        held = [[x for x in e if x is not None] for e in ends]
        pair = lambda x, y: ", ".join(f"{statistics.fmean(v):.3f}" for v in (x, y)) if x and y else ""
        kv = [next(r for r in log if "kv_kept" in r) for log in a["logs"].values()]
        kept, dense, shared = (sum(r[k] for r in kv) for k in ("kv_kept", "kv_dense", "kv_dense_shared"))
        gaps = series(a, "gap")
        peaks = [x for s in series(a, "peak_gb") for x in s]
        rows.append([name, f"{n} of {n + len(lost)}" if lost else str(n), spread(held[0], True), spread(held[1], True),
                     spread(last(a, "reward")),
                     small(statistics.fmean(statistics.fmean(s[:LAST]) for s in gaps)) + ", " + small(statistics.fmean(last(a, "gap"))),
                     pair(last(a, "accept"), last(a, "accept_p05")), pair(held[2], held[3]),
                     f"1/{dense / kept:.1f} (1/{shared / kept:.1f})", f"{statistics.fmean(sum(s) for s in series(a, 'seconds')) / 60:.1f}",
                     f"{max(peaks):.1f}" if peaks else ""])
    used = [i for i, c in enumerate(columns) if any(row[i] for row in rows)]
    lines = ["| " + " | ".join(row[i] for i in used) + " |" for row in [columns, *rows]]
    lines.insert(1, "|---" * len(used) + "|")
    note = ("Mean ± sample standard deviation over seeds, worst seed in brackets; held-out rewards are greedy, at the end. Gap: mean |log-prob of the "
            "learner - of the sampler|. Acceptance: overlap of dense and sparse policy, mean and 5th percentile. KV kept: of a dense cache, "
            "in brackets of one that stores each prompt once per group. Minutes: sampling and learning, evaluation not counted.")
    return "\n".join(lines + ["", note] + ([f"\n**Not finished, and counted nowhere: {', '.join(missing)}.**"] if missing else [])) + "\n"


# ---- the figure ----

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito without its yellow
STYLES = ["-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2))]


def smooth(s):
    """Mean over the last steps that are there."""
    return [statistics.fmean(s[max(0, i + 1 - LAST):i + 1]) for i in range(len(s))]


def over_seeds(a, key, f=lambda s: s, rows="reward"):
    """-> steps, lists of mean, least and largest over seeds; steps that every seed has"""
    at = [{r["step"]: None for r in log if rows in r and key in r} for log in a["logs"].values()]
    steps = [s for s in at[0] if all(s in x for x in at)] if at else []
    values = [dict(zip(x, f(s))) for x, s in zip(at, series(a, key, rows))]
    across = [[v[s] for v in values] for s in steps]
    return steps, [statistics.fmean(x) for x in across], [min(x) for x in across], [max(x) for x in across]


def places(wanted, gap, low, high):
    """Heights near the wanted ones, at least gap apart, in [low, high] if they fit: the least squares of all such."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks = []  # without their gaps the heights must not fall: pool neighbours that do (isotonic regression)
    for n, i in enumerate(order):
        blocks.append([wanted[i] - n * gap])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    flat = [statistics.fmean(b) for b in blocks for _ in b]
    top = max(low, high - (len(order) - 1) * gap)
    out = dict(zip(order, (min(max(x, low), top) + n * gap for n, x in enumerate(flat))))
    return [out[i] for i in range(len(wanted))]


def label(fig, ax, lines):
    """Write each line's name at its right end, spread so that none overlap. lines: list of (text, colour, last y)."""
    height = ax.get_window_extent().height
    unit = lambda y: (ax.transData.transform((0, y))[1] - ax.get_window_extent().y0) / height  # data -> share of the height
    wanted = [unit(y) for _, _, y in lines]
    at = places(wanted, 8.2 * fig.dpi / 72 / height, 0.0, 1.0)
    for (text, colour, _), y, end in zip(lines, at, wanted):
        ax.annotate(text, (1.0, end), (1.045, y), xycoords="axes fraction", textcoords="axes fraction", fontsize=7.5, color=colour,
                    va="center", annotation_clip=False, arrowprops=dict(arrowstyle="-", color=colour, lw=0.5, shrinkA=1, shrinkB=1))


def figure(arms, path):
    """Rewards, gap and acceptance against step. Raises ValueError if there is nothing to draw with, or nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("no figure: it needs matplotlib (pip install matplotlib)") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    arms = {name: a for name, a in arms.items() if a["logs"]}
    if not arms:
        raise ValueError("no figure: no run has ended")
    looks = {name: (COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]) for i, name in enumerate(arms)}
    # held-out acceptance, if logged, covers arms that replay one policy only
    accept = next((k for k, rows in (("eval_accept", "eval_dense"), ("accept", "reward")) if any(any(series(a, k, rows)) for a in arms.values())), None)
    seeds = sorted({len(a["logs"]) for a in arms.values()})
    seeds = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    style = {"font.size": 8, "axes.titlesize": 8.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
             "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "axes.titlelocation": "left"}
    with plt.rc_context(style):
        fig, axes = plt.subplot_mosaic("AA;BC" if accept else "AA;BB", figsize=(9, 6), layout="constrained", height_ratios=(1.25, 1))
        ends = {ax: [] for ax in axes.values()}

        def draw(ax, name, steps, y, text=None, **kwargs):
            colour, dashes = looks[name]
            ax.plot(steps, y, color=colour, **{"ls": dashes, "lw": 1.5, **kwargs})
            if text != "":
                ends[ax].append((text or name, colour, y[-1]))

        for name, a in arms.items():
            steps, mean, low, high = over_seeds(a, "reward", smooth)
            axes["A"].fill_between(steps, low, high, color=looks[name][0], alpha=0.10, lw=0)
            draw(axes["A"], name, steps, mean)
            steps, mean, *_ = over_seeds(a, "eval_compressed", rows="eval_dense")
            draw(axes["A"], name, steps, mean, "", ls="", marker="o", ms=4, mec="white", mew=0.6, clip_on=False, zorder=5)
            steps, mean, *_ = over_seeds(a, "gap", smooth)
            draw(axes["B"], name, steps, [y if y > 0 else float("nan") for y in mean])
            for key, text, kwargs in ((accept, name, {}), (f"{accept}_p05", f"{name}, p05", dict(lw=0.8))) if accept else ():
                steps, mean, *_ = over_seeds(a, key, *([] if accept == "eval_accept" else [smooth]), rows="eval_dense" if accept == "eval_accept" else "reward")
                if steps:
                    draw(axes["C"], name, steps, mean, text, **kwargs)
        axes["A"].set(title=f"reward: line = sampled, mean of the last {LAST} steps; band = least to largest of {seeds} seeds; dot = held out, "
                      "greedy, compressed cache", ylabel="mean reward", ylim=(0, 1))
        axes["B"].set(title=f"gap: mean |log-prob of learner - sampler|, {LAST} steps", ylabel="gap (nats)", yscale="log")
        if accept:
            axes["C"].set(title="acceptance: thick = mean, thin = 5th percentile" + ", held out" * (accept == "eval_accept"),
                          ylabel="overlap of dense and sparse policy", ylim=(0, 1))
        for ax in axes.values():
            ax.set_xlabel("step")
            ax.margins(x=0)
        for ax in axes.values():  # the space that labels need depends on their length, their height on the panel's: place, lay out, place again
            label(fig, ax, ends[ax])
        fig.draw_without_rendering()
        for ax in axes.values():
            for text in list(ax.texts):
                text.remove()
            label(fig, ax, ends[ax])
        fig.savefig(path + ".tmp", dpi=200, format="png")
        plt.close(fig)
    os.replace(path + ".tmp", path)


def main(argv):
    if argv[:1] == ["--variance"]:
        from variance import main as variance
        return variance(argv[1:])
    if "--help" in argv or "-h" in argv:
        return print(__doc__.strip())
    failed = 0
    try:
        o, texts, common = parse(argv)
        out = o["out"]
        if o["table"]:
            names = [parse_arm(t)[0] if t.split()[0].endswith(".py") else t for t in texts]
        else:
            arms, configs = request(texts, common, o["seeds"])
            todo = []
            for seed in range(o["seeds"]):  # seed by seed, so that early on every arm has something to show
                for name, a in arms.items():
                    path = os.path.join(out, folder(name), str(seed))
                    what = decide(path, configs[name])
                    if what != "skip":
                        todo.append((f"{name} seed {seed}", path, a["args"] + [f"--seed={seed}", f"--out_dir={path}", what]))
            for _, path, _ in todo:
                os.makedirs(path, exist_ok=True)
            os.makedirs(out, exist_ok=True)
            remember(out, arms)
            print(f"{len(arms)} arms x {o['seeds']} seeds: {len(todo)} runs to do, {len(arms) * o['seeds'] - len(todo)} finished before", flush=True)
            failed, names = run_all(todo, o["jobs"], o["threads"]), list(arms)
        arms = load(out, names)
        text = table(arms)
        print("\n" + text)
        write(os.path.join(out, "table.md"), text)
        if o["keep"]:
            keep(o["keep"], arms)
        try:
            figure(arms, os.path.join(out, "ablate.png"))
        except ValueError as e:
            print(e, file=sys.stderr)
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
