"""
Several arms, several seeds each, then one table and one figure.

    python ablate.py config/dense.py config/naive.py config/shadow.py --seeds=5 --jobs=2 --steps=60
    python ablate.py config/smollm2.py+config/naive.py                # several config files make one arm, named after the last
    python ablate.py "config/shadow.py --budget=32" config/shadow.py  # options of one arm, which is named "shadow budget=32"; all
                                                                      # other --key=value are for every arm and go to train.py
    python ablate.py --table --out=out-ablate shadow naive            # only table and figure, from what is there
    python ablate.py --variance ...                                   # variance.py

    --seeds=3           seeds 0, 1, 2           --out=out-ablate    a run is OUT/ARM/SEED, its print OUT/ARM/SEED/train.log
    --jobs=1            runs at a time          --keep=FOLDER       also copy the logs there, small, as ARM-SEED.jsonl
    --threads=1         of each run

The idea. One process of train.py per run, so that a run that fails takes no other with it and can be repeated by hand. What was
finished is never run again and what was begun goes on: after Ctrl-C, or with more seeds, say the same command. On GPUs each of the
`jobs` workers has a card; with more jobs than cards they share, and minutes are then no measure of speed. A finished run needs only
log.jsonl and config.json: ckpt.pt and model/ may be deleted.

Table and figure see a log only after `compact`, which keeps what they need at 6 significant digits; that is also what --keep
writes, so kept logs give the same table. Runs that did not end count nowhere and are named under the table. Left out: several
machines, tests of significance (with few seeds look at the worst one).
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
from statistics import fmean

TRAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
LAST = 10  # steps over which noisy numbers are averaged
START = ("model", "task", "prompt_tokens", "max_new_tokens", "eval_problems", "evict",  # what decides the rewards before training;
         "budget", "window", "sinks", "pool", "response_budget", "period")              # from budget on only where keys are evicted

# ---- the command line ----


def parse(argv):
    """-> own options, arms as they were written, --key=value for train.py. Raises ValueError."""
    o, arms, common, mine = dict(seeds=3, jobs=1, threads=1, out="out-ablate", keep="", table=False), [], [], set()
    for arg in argv:
        key, _, value = arg[2:].partition("=")
        if not arg.startswith("--"):
            arms.append(arg)
        elif arg == "--table":
            o["table"] = True
        elif key not in o:
            common.append(arg)
        elif not value or key == "table" or type(o[key]) is int and not (value.isdecimal() and int(value)):
            raise ValueError(f"{arg}: write --{key}" + {int: "=N, a whole number from 1", str: "=FOLDER", bool: ""}[type(o[key])])
        else:
            mine.add(key)
            o[key] = type(o[key])(value)
    if o["table"] and (common or mine - {"out", "keep"}):
        raise ValueError("--table runs nothing: it takes --out, --keep and names of arms")
    if not (arms or o["table"]):
        raise ValueError("no arm: name a config file, or say --table for what is there (--help says more)")
    return o, arms, common


def parse_arm(text):
    """'a.py+b.py --key=value' -> name, config files, options. Raises ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ValueError(f"arm {text!r}: {e}") from None
    files = [f for w in words if not w.startswith("--") for f in w.split("+")]
    options = [w for w in words if w.startswith("--")]
    if not files or not all(f.endswith(".py") for f in files):
        raise ValueError(f"arm {text!r}: write config/NAME.py, several joined by +, then --key=value")
    pairs = [w[2:].partition("=") for w in options]
    return " ".join([os.path.basename(files[-1])[:-3]] + [f"{key}={os.path.basename(value)}" for key, _, value in pairs]), files, options


def folder(name):
    return name.replace(" ", ",")  # needs no quotes in a shell


def request(texts, common, seeds):
    """Check every arm as train.py would, before anything runs. -> {name: what settings.json holds}, {name: settings}. Raises ValueError."""
    import train  # not at the head: it brings torch, which a table does not need
    arms, configs = {}, {}
    for name, files, options in map(parse_arm, texts):
        if name in arms:
            raise ValueError(f"two arms are named {name!r}: give one a config file of its own")
        for arg in common + options:
            if arg[2:].partition("=")[0] in ("seed", "out_dir", "resume", "overwrite"):
                raise ValueError(f"{arg}: every run gets its own, from --seeds and --out")
        args = files + common + options
        c = configs[name] = train.settings(args)
        start = [f"{k}={os.path.basename(str(getattr(c, k)))}" for k in START[:6 if c.evict == "none" else None] if hasattr(c, k)]
        arms[name] = dict(args=shlex.join(args), seeds=list(range(seeds)), steps=c.steps, start=" ".join(start))
    return arms, configs

# ---- running ----


def read(path):
    with open(path, encoding="utf-8") as f:
        lines = [line for line in f if line.endswith("\n")]  # a kill may leave half a line
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    if not all(isinstance(r, dict) and "step" in r for r in rows):
        raise ValueError(f"{path} is not a log of train.py")
    return rows


def read_json(*path):
    """{} if there is no such file"""
    if not os.path.exists(os.path.join(*path)):
        return {}
    with open(os.path.join(*path), encoding="utf-8") as f:
        try:
            found = json.load(f)
        except ValueError as e:
            raise ValueError(f"{os.path.join(*path)}: {e}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{os.path.join(*path)} holds no settings")
    return found


def recorded(where):
    """What settings.json says: {name of an arm: its arguments, seeds, steps}."""
    arms = read_json(where, "settings.json")
    if not all(isinstance(a, dict) and {"args", "seeds", "steps"} <= a.keys() for a in arms.values()):
        raise ValueError(f"{os.path.join(where, 'settings.json')} holds no settings")
    return arms


def ended(log, steps=None):
    """Does the log hold every step once, in order, and end with the evaluation after the last one?"""
    done = [r["step"] for r in log if "reward" in r]
    return len(done) > 0 and "eval_dense" in log[-1] and done == list(range(log[-1]["step"])) and len(done) == (steps or len(done))


def decide(path, c):
    """What the run at path needs: None, "--resume=True" or "--overwrite=True". Raises ValueError if what it holds is another run;
    train.py would say so too, but is not asked about a finished one."""
    import train
    has = lambda name: os.path.exists(os.path.join(path, name))
    log = read(os.path.join(path, "log.jsonl")) if has("log.jsonl") else []
    if not has("ckpt.pt") and not ended(log):
        return "--overwrite=True"
    was = read_json(path, "config.json")
    for k in sorted(vars(c).keys() - train.MAY_CHANGE - {"seed"} | {"eval_problems"}):
        if was.get(k) != getattr(c, k) != "auto":  # auto: whatever it was
            raise ValueError(f"{k} was {was.get(k)!r} in the run in {path!r}, now it is {getattr(c, k)!r}: choose another --out")
    if log and log[-1]["step"] > c.steps:
        raise ValueError(f"the run in {path!r} has done {log[-1]['step']} steps already, steps={c.steps}: choose another --out")
    return None if ended(log, c.steps) else "--resume=True" if has("ckpt.pt") else "--overwrite=True"


def cards():
    """The cards as CUDA_VISIBLE_DEVICES names them."""
    import torch
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (given.split(",") if given else [str(i) for i in range(99)])[:torch.cuda.device_count()]


def launch(path, args, threads, card):
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)} | ({"CUDA_VISIBLE_DEVICES": card} if card else {})
    with open(os.path.join(path, "train.log"), "ab" if "--resume=True" in args else "wb") as log:
        # a process group of its own: Ctrl-C in a terminal reaches only us and is passed on once; twice would make a child quit unsaved
        return subprocess.Popen([sys.executable, TRAIN, *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
                                start_new_session=True)


def report(name, path, code, minutes, stopped):
    """One line about a run that is over: what it reached, or the last thing it said."""
    text = f"{name}: {'stopped' if stopped and code else 'failed' if code else 'ended'} after {minutes:.1f} min"
    if code:
        with open(os.path.join(path, "train.log"), encoding="utf-8", errors="replace") as f:
            said = [line for line in f.read().splitlines() if line.strip()] or ["it said nothing"]
        return f"{text}: {said[-1]} (exit code {code}, {path}/train.log)"
    e = read(os.path.join(path, "log.jsonl"))[-1]
    return f"{text}, held-out reward: compressed cache {e['eval_compressed']:.3f}, dense cache {e['eval_dense']:.3f}"


def run_all(todo, jobs, threads):
    """Run (name, out_dir, arguments) of todo, `jobs` at a time. -> how many failed. After Ctrl-C: exit code 130 when all have saved."""
    waiting, working, failed, done, stop, told, devices = todo[::-1], {}, 0, 0, [], 0, cards()
    old = {s: signal.signal(s, lambda *_: stop.append(True)) for s in (signal.SIGINT, signal.SIGTERM)}
    while working or waiting and not stop:
        for slot in range(jobs):
            if waiting and not stop and slot not in working:
                name, path, args = waiting.pop()
                working[slot] = name, path, launch(path, args, threads, devices and devices[slot % len(devices)]), time.time()
        time.sleep(0.05)
        if len(stop) > told:
            print("killed" if told else "interrupt: every run finishes its step and saves; once more kills them", file=sys.stderr)
            for _, _, process, _ in working.values():
                process.send_signal(signal.SIGKILL if told else signal.SIGINT)
            told = len(stop)
        for slot, (name, path, process, start) in list(working.items()):
            if process.poll() is not None:
                del working[slot]
                done, failed = done + 1, failed + bool(process.returncode)
                print(report(name, path, process.returncode, (time.time() - start) / 60, stop), f"[{done} of {len(todo)}]", flush=True)
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
        row = {k: r[k] for k in ("step", "reward", "gap", "gap_max", "weight", "rejected", "accept", "accept_p05", "eval_compressed",
                                 "eval_dense", "eval_accept", "eval_accept_p05", "seconds") if k in r}
        if "learn_s" in r:
            row["seconds"] = r["rollout_s"] + r["learn_s"]
        if r is steps[-1]:  # a resumed run counts its peak anew
            row |= {k: x for k, x in r.items() if k.startswith("kv_")} | {k: max(s.get(k, 0) for s in steps) for k in ("peak_gb",) if k in r}
        out.append({k: float(f"{x:.6g}") if isinstance(x, float) else x for k, x in row.items()})
    return out


def write(path, text):
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".tmp", path)


def remember(where, arms):
    """Add arms to where/settings.json, and their seeds to those that it has."""
    old = recorded(where)
    new = {name: {**a, "seeds": sorted({*a["seeds"], *old.get(name, a)["seeds"]})} for name, a in arms.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(a)}" for name, a in (old | new).items())
    write(os.path.join(where, "settings.json"), "{" + ",\n ".join(lines) + "}\n")


def load(where, names=()):
    """Read OUT/ARM/SEED/log.jsonl and ARM-SEED.jsonl. -> {name: what settings.json holds, with logs: {seed: compact log of a run that
    ended}} in the order of names or of settings.json. Raises ValueError."""
    arms, found = recorded(where), {}
    for path in sorted(os.path.relpath(os.path.join(base, f), where) for base, _, files in os.walk(where) for f in files):
        match = re.fullmatch(r"([^/]+)(?:/(\d+)/log|-(\d+))\.jsonl", path.replace(os.sep, "/"))
        if match:
            found.setdefault(match[1].replace(",", " "), {})[int(match[2] or match[3])] = os.path.join(where, path)
    arms |= {name: dict(args="", seeds=list(found[name]), steps=None) for name in found if name not in arms}
    for name in names or [None] * (not arms):
        if name not in arms:
            raise ValueError(f"no {name or 'log'} in {where!r}" + f": it holds {', '.join(arms)}" * bool(arms))
    arms = {name: arms[name] for name in names or arms}
    for name, a in arms.items():
        logs = {seed: read(path) for seed, path in sorted(found.get(name, {}).items())}
        a.update(seeds=sorted({*a["seeds"], *logs}), logs={seed: compact(log) for seed, log in logs.items() if ended(log, a["steps"])})
    return arms


def keep(where, arms):
    os.makedirs(where, exist_ok=True)
    for name, a in arms.items():
        for seed, log in a["logs"].items():
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in log)
            write(os.path.join(where, f"{folder(name)}-{seed}.jsonl"), "".join(lines))
    remember(where, {name: {k: x for k, x in a.items() if k != "logs"} for name, a in arms.items()})

# ---- the table ----


def series(a, key):
    """One list per seed: `key` of the rows that have it."""
    return [[r[key] for r in log if key in r] for log in a["logs"].values()]


def across(values, worst=False):
    """mean ± sample standard deviation (worst)"""
    if len(values) < 2:
        return "".join(f"{x:.3f}" for x in values)
    return f"{fmean(values):.3f} ± {statistics.stdev(values):.3f}" + f" ({min(values):.3f})" * worst


def small(x):
    return f"{x:.2g}" if x >= 1e-3 or not x else re.sub("e-0*", "e-", f"{x:.0e}")


def before(arms):
    """Rewards before training. Arms with the same start share a row, as only their learners differ; arms that evict nothing are left
    out beside others, as theirs is the others' dense reward. -> [(names, with the compressed cache per seed, with the dense cache)],
    the start that most arms share first"""
    groups = {}
    for name, a in arms.items():
        for seed, log in a["logs"].items():
            r = next(r for r in log if "kv_kept" in r)
            key = r["kv_kept"] < r["kv_dense_shared"], a.get("start") or f"{r['kv_kept']} of {r['kv_dense']}"
            names, rewards = groups.setdefault(key, ({}, {}))
            names[name] = True
            rewards.setdefault(seed, []).append((log[0]["eval_compressed"], log[0]["eval_dense"]))
    evicts = any(evicts for evicts, _ in groups)
    rows = [(list(names), *zip(*[map(fmean, zip(*pairs)) for pairs in rewards.values()]))
            for (e, _), (names, rewards) in groups.items() if e == evicts]
    return sorted(rows, key=lambda row: -len(row[0]))


def table(arms):
    """-> Markdown"""
    columns = ["arm", "seeds", "held-out reward, compressed cache", "held-out reward, dense cache", f"sampled reward, last {LAST} steps",
               f"gap learner - sampler, first and last {LAST} steps", f"acceptance, mean and p05, last {LAST} steps",
               "held-out acceptance, mean and p05", "KV kept", "minutes", "peak GB"]
    starts, missing = before(arms), []
    rows = [["before training" + f" ({', '.join(names)})" * (i > 0), "", across(c), across(d)] for i, (names, c, d) in enumerate(starts)]
    for name, a in arms.items():
        n, lost = len(a["logs"]), [seed for seed in a["seeds"] if seed not in a["logs"]]
        missing += [f"{name} seed {seed}" for seed in lost]
        row = [name, f"{n} of {n + len(lost)}" if lost else str(n)]
        if n:
            end = lambda key, steps: [fmean(s[-steps:]) for s in series(a, key) if s]  # per seed
            pair = lambda x, y: f"{fmean(x):.3f}, {fmean(y):.3f}" if x and y else ""
            kept, dense, shared = (sum(map(sum, series(a, key))) for key in ("kv_kept", "kv_dense", "kv_dense_shared"))
            row += [across(end("eval_compressed", 1), True), across(end("eval_dense", 1), True), across(end("reward", LAST)),
                    f"{small(fmean(fmean(s[:LAST]) for s in series(a, 'gap')))}, {small(fmean(end('gap', LAST)))}",
                    pair(end("accept", LAST), end("accept_p05", LAST)), pair(end("eval_accept", 1), end("eval_accept_p05", 1)),
                    f"1/{dense / kept:.1f} (1/{shared / kept:.1f})", f"{fmean(map(sum, series(a, 'seconds'))) / 60:.1f}",
                    "".join(f"{max(x):.1f}" for x in [end("peak_gb", 1)] if x)]
        rows.append(row)
    rows = [row + [""] * (len(columns) - len(row)) for row in rows]
    used = [i for i in range(len(columns)) if i < 4 or any(row[i] for row in rows)]
    lines = ["| " + " | ".join(row[i] for i in used) + " |" for row in [columns, *rows]]
    note = ("Mean ± sample standard deviation over seeds, worst seed in brackets; held-out: greedy, at the end. Gap: mean |log-prob of the "
            "learner - of the sampler|. Acceptance: overlap of the dense and the sparse policy, mean and 5th percentile. KV kept: of a "
            "dense cache, in brackets of one that stores each prompt once per group. Minutes: sampling and learning, without evaluation.")
    lost = f"\n**Not finished, and counted nowhere: {', '.join(missing)}.**\n" if missing else ""
    return "\n".join([lines[0], "|---" * len(used) + "|", *lines[1:], "", note, lost])

# ---- the figure ----


COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888"]  # Okabe-Ito, grey for its yellow
STYLES = ["-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2))]


def smooth(s):
    """Mean over the last steps that are there."""
    return [fmean(s[max(0, i + 1 - LAST):i + 1]) for i in range(len(s))]


def over_seeds(a, key, f=list):
    """Of f(what each seed logged under key) -> steps that every seed has, and there mean, least and largest over seeds"""
    curves = [dict(zip((r["step"] for r in log if key in r), f(s))) for log, s in zip(a["logs"].values(), series(a, key))]
    steps = [step for step in curves[0] if all(step in c for c in curves)]
    return steps, *([g([c[step] for c in curves]) for step in steps] for g in (fmean, min, max))


def places(wanted, gap, low, high):
    """Heights near the wanted ones, at least gap apart, in [low, high] if they fit: the nearest in least squares."""
    order, blocks = sorted(range(len(wanted)), key=lambda i: wanted[i]), []
    for n, i in enumerate(order):  # less their n gaps, heights must only not fall: pool neighbours that do (isotonic regression)
        blocks.append([wanted[i] - n * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    top = max(low, high - (len(order) - 1) * gap)
    flat = [min(max(fmean(b), low), top) for b in blocks for _ in b]
    return [flat[n] + n * gap for n in map(order.index, range(len(wanted)))]


def label(ax, ends):
    """Write names at the right ends of lines, none over another. ends: list of (name, colour, last point)"""
    for old in list(ax.texts):
        old.remove()
    box, pt = ax.get_window_extent(), ax.figure.dpi / 72
    points = [ax.transAxes.inverted().transform(ax.transData.transform(xy)) for *_, xy in ends]
    heights = places([y for _, y in points], 8.5 * pt / box.height, 0.01, 0.97)
    for (name, colour, *_), point, y in zip(ends, points, heights):
        ax.annotate(name, point, (1 + 16 * pt / box.width, y), "axes fraction", "axes fraction", fontsize=7.5, color=colour, va="center",
                    annotation_clip=False, arrowprops=dict(arrowstyle="-", color=colour, lw=0.5, shrinkA=0, shrinkB=2, relpos=(0, 0.5)))


def figure(arms, path):
    """Reward, gap and acceptance against step, as a PNG for a page 900 px wide."""
    arms = {name: a for name, a in arms.items() if a["logs"]}
    if not arms:
        return print("no figure: no run has ended", file=sys.stderr)
    try:
        import matplotlib
    except ImportError:
        return print("no figure: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    # held-out acceptance, where logged, covers arms that replay one policy only
    accept = next((key for key in ("eval_accept", "accept") if any(any(series(a, key)) for a in arms.values())), None)
    seeds = " to ".join(map(str, sorted({min(len(a["logs"]) for a in arms.values()), max(len(a["logs"]) for a in arms.values())})))
    steps = max(log[-1]["step"] for a in arms.values() for log in a["logs"].values())
    with plt.rc_context({"font.size": 8, "axes.titlesize": 8.5, "axes.titlelocation": "left", "axes.spines.top": False,
                         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6}):
        fig, panels = plt.subplot_mosaic("AA;BC" if accept else "AA;BB", figsize=(9, 6), layout="constrained", height_ratios=(1.25, 1))
        ends = {k: [] for k in panels}
        for i, (name, a) in enumerate(arms.items()):
            look = dict(color=COLOURS[i % len(COLOURS)], ls=STYLES[(i + i // len(COLOURS)) % len(STYLES)], lw=1.5)
            dodge = 0.004 * steps * (i - (len(arms) - 1) / 2)  # dots of one evaluation stand side by side
            x, y, *_ = over_seeds(a, "eval_compressed")
            panels["A"].plot([s + dodge for s in x], y, "osD^"[i // len(COLOURS) % 4], ms=4, mec="white", mew=0.5, color=look["color"],
                             clip_on=False, zorder=5)
            for k, key, f in (("A", "reward", smooth), ("B", "gap", smooth), ("C", f"{accept}_p05", smooth if accept == "accept" else list)):
                x, y, low, high = over_seeds(a, key, f)
                points = [(s, v) for s, v in zip(x, y) if v > 0 or k != "B"]  # 0 has no logarithm
                if points:
                    panels[k].plot(*zip(*points), **look)
                    ends[k].append((name, look["color"], points[-1]))
                if k == "A":
                    panels[k].fill_between(x, low, high, color=look["color"], alpha=0.10 if len(arms) < 6 else 0.05, lw=0)
                if k == "C" and x:
                    panels[k].plot(*over_seeds(a, accept, f)[:2], **look | dict(lw=0.8))
        panels["A"].set(ylabel="mean reward", ylim=(0, 1), title=f"reward: line = sampled, mean of the last {LAST} steps; "
                        + f"band = least to largest of {seeds} seeds; " * (seeds != "1") + "dot = held out, greedy, compressed cache")
        panels["B"].set(ylabel="gap (nats)", yscale="log", title=f"gap: mean |log-prob of learner - sampler|, last {LAST} steps")
        panels["B"].minorticks_off()
        if accept:
            panels["C"].set(ylabel="overlap of the two policies", ylim=(0, 1),
                            title="acceptance: thick = 5th percentile, thin = mean" + ", held out" * (accept == "eval_accept"))
        for ax in panels.values():
            ax.set(xlabel="step", xlim=(0, steps))
        panels["A"].set_xlim(-0.002 * steps * len(arms), steps * (1 + 0.002 * len(arms)))
        for _ in range(2):  # labels decide how much room is left for a panel, its height where they must stand
            for k, ax in panels.items():
                label(ax, ends[k])
            fig.draw_without_rendering()
        fig.savefig(path + ".tmp", dpi=200, format="png")
        plt.close(fig)
    os.replace(path + ".tmp", path)


def main(argv):
    if argv[:1] == ["--variance"]:
        from variance import main as variance
        return variance(argv[1:])
    if "--help" in argv:
        return print(__doc__.strip())
    failed = 0
    try:
        o, texts, common = parse(argv)
        out = os.path.normpath(o["out"])
        names = [parse_arm(text)[0] if ".py" in text else text for text in texts]
        if not o["table"]:
            arms, configs = request(texts, common, o["seeds"])
            todo = []
            for seed in range(o["seeds"]):  # seed by seed: after the first round every arm has something to show
                for name, a in arms.items():
                    path = os.path.join(out, folder(name), str(seed))
                    need = decide(path, configs[name])
                    todo += [(f"{name} seed {seed}", path, [*shlex.split(a["args"]), f"--seed={seed}", f"--out_dir={path}", need])] * bool(need)
            for path in [out] + [path for _, path, _ in todo]:
                os.makedirs(path, exist_ok=True)
            remember(out, arms)
            print(f"{len(arms)} arms x {o['seeds']} seeds: {len(todo)} runs to do, {len(arms) * o['seeds'] - len(todo)} done before", flush=True)
            failed = run_all(todo, o["jobs"], o["threads"])
        arms = load(out, names)
        text = table(arms)
        write(os.path.join(out, "table.md"), text)
        if o["keep"]:
            keep(o["keep"], arms)
        figure(arms, os.path.join(out, "ablate.png"))
        print("\n" + text)
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
