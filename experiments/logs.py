"""
The logs of runs, read, kept small and compared: what the tables and figures of ablate.py see.

The idea. A folder of runs holds OUT/ARM/SEED/log.jsonl or, kept, OUT/ARM-SEED.jsonl, and
settings.json, which says what each arm is and which comparisons were named. `load` reads either;
`compact` keeps what tables and figures need at 6 significant digits, and they see a log only after
it, so kept logs give the same table.
"""
import glob
import json
import os
import re
from statistics import fmean

from support.jsonfile import check_shape, entry, read_json, shown
from support.run import write_text

LAST = 10  # steps over which noisy numbers are averaged
COMPARE = "--compare"  # in settings.json, beside the names of arms
CACHES = {"compressed": "eval_compressed", "dense": "eval_dense"}
MANY_SEEDS = 8  # from here on single seeds are not shown
MOST = dict(tested=4, margins=2)  # comparisons that may be named
SETTINGS = {"args": str, "seeds": [int], "steps?": int, "start?": str}  # of an arm


def folder(name):
    return name.replace(" ", ",")  # needs no quotes in a shell


def parse_compare(text):
    """'smd/naive/compressed,smd/dense/dense>-0.02' -> [(arm, other arm, cache, None or the margin
    -0.02)]; no name of an arm has a slash. Raises ValueError."""
    found, rest = [], text + ","
    while rest:
        match = re.match(
            r"([^/]+)/([^/]+)/(compressed|dense)(?:>(-?\d*\.?\d+))?,", rest)
        if not match or match[1] == match[2]:
            raise ValueError(f"compare {shown(rest[:-1])}: write ARM/OTHER/compressed "
                             "or ARM/OTHER/dense, for a margin with >NUMBER behind it, "
                             "several joined by commas")
        one, other, cache, margin = match.groups()
        found.append((one, other, cache, float(margin) if margin else None))
        rest = rest[match.end():]
    margins = sum(margin is not None for *_, margin in found)
    if len(found) - margins > MOST["tested"]:
        raise ValueError(f"compare names {len(found) - margins} comparisons, at most "
                         f"{MOST['tested']}: each one more makes all of them weaker")
    if margins > MOST["margins"]:
        raise ValueError(f"compare names {margins} margins, at most {MOST['margins']}")
    return found


def read(path):
    """A log -> its rows, of whole lines: a kill may leave half a one. Raises ValueError, naming
    the line, for what train.py does not write: anything but JSON objects of finite numbers in
    the order of steps, an evaluation before the step of its number."""
    if not os.path.isfile(path):  # a FIFO would be waited for
        raise FileNotFoundError(f"{path} is missing, or is not a regular file")
    rows, place = [], (-1, False)
    with open(path, "rb") as f:
        lines = [line for line in f if line.endswith(b"\n")]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            check_row(row)
            before, place = place, (row["step"], "reward" in row)
            if place <= before:
                raise ValueError(f"step {row['step']} is out of order")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append(row)
    steps = [row for row in rows if "reward" in row]
    if steps and not all(steps[-1].get(key, 0) > 0 for key in KV):
        raise ValueError(f"{path}: the last step has no {', '.join(KV)} above 0")
    return rows


def check_row(row):
    """Raise ValueError if the row of a log, old or new, full or compact, cannot be counted."""
    if not isinstance(row, dict):
        raise ValueError("not an object of train.py's log")
    named = [key for key in row if key.startswith(NAMED)]
    for key in (*KEPT[1:], *KV, "peak_gb", "rollout_s", "learn_s", *named):
        value = row.get(key, 0)
        if type(value) not in (int, float) or not abs(value) < 1e300:  # nor NaN
            raise ValueError(f"{key} must be a finite number, got {value!r:.40}")
    step = row.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a whole number from 0, got {step!r:.40}")
    kind, need = "eval", ("eval_compressed", "eval_dense")
    if "reward" in row:
        kind = "step"
        need = ("seconds",) if "seconds" in row else ("rollout_s", "learn_s")
    if row.get("kind", kind) != kind:  # old logs do not name it
        raise ValueError("kind must be step with a reward, eval without, got "
                         f"{row['kind']!r:.40}")
    if not row.keys() >= {*need}:
        raise ValueError(f"a row of kind {kind} needs {', '.join(need)}")


def ended(log, steps=None):
    """Does the log hold every step once, in order, begin with the evaluation before the first
    and end with the one after the last?"""
    done = [row["step"] for row in log if "reward" in row]
    if not done or "reward" in log[0] or "reward" in log[-1]:
        return False
    if done != list(range(log[-1]["step"])):
        return False
    return not steps or len(done) == steps


KEPT = ("kind", "step", "reward", "loss", "kl", "gap", "gap_max", "weight", "rejected",
        "accept", "accept_p05", "entropy", "equal", "truncated", "tokens", "length",
        "grad_norm", "lr", "problems", "eval_compressed", "eval_dense", "eval_accept",
        "eval_accept_p05", "eval_length", "eval_length_dense", "seconds")
KV = ("kv_kept", "kv_dense", "kv_dense_shared")  # of the last step only
# what a reward function of one's own named
NAMED = ("reward_", "eval_compressed_", "eval_dense_")


def compact(log):
    """What table and figure need of a log, at 6 significant digits. A compact log stays as
    it is."""
    steps, out = [full for full in log if "reward" in full], []
    for full in log:
        row = {key: full[key] for key in KEPT if key in full}
        row |= {key: value for key, value in full.items() if key.startswith(NAMED)}
        if "learn_s" in full:
            row["seconds"] = full["rollout_s"] + full["learn_s"]
        if full is steps[-1]:
            row |= {key: value for key, value in full.items() if key.startswith("kv_")}
            if "peak_gb" in full:  # a resumed run counts its peak anew
                row["peak_gb"] = max(step.get("peak_gb", 0) for step in steps)
        out.append({key: float(f"{value:.6g}") if isinstance(value, float) else value
                    for key, value in row.items()})
    return out


def recorded(where):
    """What settings.json says: {name of an arm: its arguments, seeds, steps}."""
    file = os.path.join(where, "settings.json")
    arms = read_json(file, {})
    arms.pop(COMPARE, None)
    for name, arm in arms.items():
        try:
            check_shape(arm, SETTINGS, "arm")
        except ValueError as error:
            raise ValueError(f"{file}: {shown(name)}: {error}") from None
        arm.setdefault("steps", None)
    return arms


def compared(where):
    """The comparisons that settings.json names and how many runs had begun then, or None."""
    file = os.path.join(where, "settings.json")
    named = read_json(file, {}).get(COMPARE)
    if named is None:
        return None
    try:
        parse_compare(entry(named, "compare", str))
        entry(named, "begun", int)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file}: {COMPARE}: {error}") from None
    return named


def remember(where, arms, named=None):
    """Add arms to where/settings.json, and their seeds to those that it has, and the comparisons
    unless it has some."""
    all_arms, named = recorded(where), compared(where) or named
    for name, arm in arms.items():
        before = all_arms.get(name, arm)["seeds"]
        all_arms[name] = {**arm, "seeds": sorted({*arm["seeds"], *before})}
    if named:
        all_arms[COMPARE] = named
    lines = (f"{json.dumps(name)}: {json.dumps(arm)}" for name, arm in all_arms.items())
    write_text(os.path.join(where, "settings.json"), "{" + ",\n ".join(lines) + "}\n")


def find_logs(where):
    """OUT/ARM/SEED/log.jsonl, OUT/ARM-SEED.jsonl and, of a run of train.py, OUT/log.jsonl
    -> {the arm's folder: {seed: path}}, sorted by path"""
    inside, found = glob.escape(where), {}
    paths = [path for pattern in ("*/*/log.jsonl", "*-*.jsonl")
             for path in glob.glob(os.path.join(inside, pattern))
             if os.path.isfile(path)]
    number = "(0|[1-9][0-9]*)"
    for path in sorted(os.path.relpath(path, where) for path in paths):
        path = path.replace(os.sep, "/")
        match = re.fullmatch(rf"([^/]+)(?:/{number}/log|-{number})\.jsonl", path)
        if match:
            seed = int(match[2] or match[3])
            found.setdefault(folder(match[1]), {})[seed] = os.path.join(where, path)
    alone = os.path.join(where, "log.jsonl")
    if os.path.isfile(alone):
        seed = read_json(os.path.join(where, "config.json"), {}).get("seed", 0)
        if type(seed) is not int:
            raise ValueError(f"{where}/config.json: seed must be an int, got "
                             f"{seed!r:.40}")
        name = os.path.basename(os.path.abspath(where))
        found.setdefault(folder(name), {})[seed] = alone
    return found


def load(where, names=()):
    """-> {name: what settings.json holds, with logs: {seed: compact log of a run that
    ended}} in the order of names or of settings.json. Raises ValueError."""
    arms, found = recorded(where), find_logs(where)
    known = {folder(name) for name in arms}
    for each, logs in found.items():
        if each not in known:
            arms[each.replace(",", " ")] = dict(args="", seeds=list(logs), steps=None)
    if not arms:
        raise ValueError(f"no log in {where!r}: looked for log.jsonl, "
                         "ARM/SEED/log.jsonl and ARM-SEED.jsonl there")
    for name in names:
        if name not in arms:
            there = ", ".join(arms)
            raise ValueError(f"no arm {name!r} in {where!r}: it holds {there}")
    arms = {name: arms[name] for name in names or arms}
    for name, arm in arms.items():
        paths = found.get(folder(name), {})
        logs = {seed: read(path) for seed, path in sorted(paths.items())}
        arm["seeds"] = sorted({*arm["seeds"], *logs})
        arm["logs"] = {seed: compact(log) for seed, log in logs.items()
                       if ended(log, arm["steps"])}
    return arms


def keep(where, arms, named=None):
    """Write the logs of arms to a folder, compact, and what settings.json says about them."""
    os.makedirs(where, exist_ok=True)
    for name, arm in arms.items():
        for seed, log in arm["logs"].items():
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in log)
            path = os.path.join(where, f"{folder(name)}-{seed}.jsonl")
            write_text(path, "".join(lines))
    arms = {name: {key: value for key, value in arm.items() if key != "logs"}
            for name, arm in arms.items()}
    remember(where, arms, named)


def series(arm, key):
    """One list per seed: `key` of the rows that have it."""
    return [[row[key] for row in log if key in row] for log in arm["logs"].values()]


def at_end(arm, key):
    """Of each seed that logged key the mean over its last steps."""
    return [fmean(values[-LAST:]) for values in series(arm, key) if values]


def last_two(values):
    return fmean(values[-2:])


def results(arm, key, of=last_two):
    """{seed: mean of key over the last two evaluations, or what else `of` makes of all} where it
    was logged. That before the first step is none of them."""
    found = {}
    for seed, log in arm["logs"].items():
        values = [row[key] for row in log if key in row and row["step"] > 0]
        if values:
            found[seed] = of(values)
    return found


def smooth(values, last=LAST):
    """Mean over the last steps that are there."""
    return [fmean(values[max(0, at + 1 - last):at + 1]) for at in range(len(values))]


def over_seeds(arm, key, change=list):
    """Of f(what each seed logged under key) -> steps that every seed has, and there the values of
    all seeds"""
    curves = []
    for log, values in zip(arm["logs"].values(), series(arm, key)):
        steps = [row["step"] for row in log if key in row]
        curves.append(dict(zip(steps, change(values))))
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return steps, [[curve[step] for curve in curves] for step in steps]
