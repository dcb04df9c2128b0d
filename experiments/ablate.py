"""
Several arms, several seeds each, then tables and one figure.

    python -m experiments.ablate config/dense.py config/naive.py --seeds=5 --jobs=2 --steps=60
    python -m experiments.ablate config/smollm2.py+config/naive.py
    python -m experiments.ablate "config/shadow.py --budget=32" config/shadow.py
    python -m experiments.ablate --table --out=out-ablate shadow naive
    python -m experiments.ablate --table --out=out      # one run of train.py
    python -m experiments.ablate config/smd.py config/naive.py --compare=smd/naive/compressed
    python -m experiments.ablate config/smd.py config/dense.py "--compare=smd/dense/dense>-0.02"

An arm is a config file, or several joined by +, named after the last; options in the same
quotes are its own and part of its name ("shadow budget=32"). All other --key=value are for
every arm and go to train.py; --help lists them.

The idea. One process of train.py per run, so that a run that fails takes no other with it and can
be repeated by hand. What was finished is never run again and what was begun goes on: after an
interrupt, or with more seeds, run the same command. Ctrl-C, SIGTERM and SIGHUP go on to every run,
which saves; on Linux they also do when this program is killed. On GPUs each run gets the card with
the fewest others; with more jobs than cards they share, and minutes are then no measure of speed. A
finished run needs only log.jsonl and config.json: ckpt.pt, model/ and best/ may be deleted, which
--lean=True does at its end (model/ alone would be written again).

--keep writes the logs in small, from which --table gives the same table (logs.py). Runs that did
not end count nowhere and are named under the table.

Whoever looks at all differences finds one. So --compare names up to four before the first run
starts, each two arms and the cache that they are served with; they are written down at once, and
the table says if that was later. Seeds pair the arms: the same training problems, and the same
held-out problems for all. They are tested with Student's t, whose p Holm's method corrects, and
also by ranks. Up to two more may be margins, which are not tested and need no correction: for
smd/dense/dense>-0.02 (in quotes: a shell reads > otherwise) the table says if the interval of smd
minus dense lies above -0.02. For "smd lr=1e-3" it is enough to say smd while no other arm begins
so: what is compared can be written down before learning rates are chosen.

Left out on purpose: several machines; where there is no Linux, runs outlive this program if it
is killed.
"""
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from statistics import fmean
from types import SimpleNamespace

import train
from experiments import logs
from experiments.curves import figure
from experiments.logs import CACHES, KV, LAST, at_end, ended, read, results, series
from experiments.ttest import RANKED, holm, interval, p_value, signed_rank_p
from run.settings import BEFORE, MAY_CHANGE, identity_of
from support import configurator
from support import run as runs
from support.checkpoint import HELD, check_whole, open_to_append, remove, write_text
from support.configurator import check_ranges, configure, help_if_asked, joined
from support.hub import find_checkpoint
from support.jsonfile import entry, printable, read_json, shown
from support.run import ADAPTERS, MODELS, SIGNALS, difference, hold, step_of
from support.screen import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(ROOT, "train.py")
OPTIONS = dict(
    seeds=3,           # seeds 0, 1, 2, or as many from `first` on
    first=0,           # the first seed
    jobs=1,            # runs at a time
    threads=1,         # of each run
    out="out-ablate",  # a run is OUT/ARM/SEED, what it prints OUT/ARM/SEED/train.log
    compare="",        # A/B/dense,A/C/compressed: arms and cache, at most 4 and 2 >X
    keep="",           # a folder; logs are also copied there, small, as ARM-SEED.jsonl
    lean=False,        # True: of a run that ended only logs stay; more steps begin anew
    table=False,       # --table: no runs, only table and figure of what is there
)
RANGES = dict(seeds=(1, 1000), first=(0, 10**6), jobs=(1, 1000), threads=(1, 1000))
PREVIOUS = "ckpt-previous.pt"
EVERY = 30  # seconds between two lines about the runs at work
# what decides the rewards before training, beside the method that evaluates
START = ("model", "task", "prompt_tokens", "max_new_tokens", "eval_final", "evict",
         "budget", "spread", "window", "sinks", "pool", "response_budget", "period")
# what older runs did not have
LATER = ("eval_evict", "eval_task", "reward", "shots", "raw_text", "pool_by",
         "eval_first", "control_tokens", "template_file", "stop")


# the command line

def parse(argv):
    """-> namespace of own options, arms as they were written, --key=value for train.py.
    Raises ValueError."""
    own, arms, common = [], [], []
    for arg in joined(argv, {**train.DEFAULTS, **OPTIONS}):
        if not arg.startswith("--"):
            arms.append(arg)
        elif arg[2:].partition("=")[0] in OPTIONS:
            own.append("--table=True" if arg == "--table" else arg)
        else:
            common.append(arg)
    options = SimpleNamespace(**configure(OPTIONS, own))
    check_ranges(options, RANGES)
    if not options.out:
        raise ValueError("write --out=FOLDER")
    of_table = all(re.match("--(table|out|keep|compare)=", arg) for arg in own)
    if options.table and (common or not of_table):
        raise ValueError("--table runs nothing: only arms, --out, --keep, --compare")
    if not (arms or options.table):
        raise ValueError("no arm: name a config file, or --table (--help says more)")
    return options, arms, common


def parse_arm(text):
    """'a.py+b.py --key=value' -> name, config files, options. Raises ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"arm {text!r}: {error}") from None
    options = [word for word in words if word.startswith("--")]
    files = "+".join(word for word in words if word not in options).split("+")
    if not all(file.endswith(".py") for file in files):
        raise ValueError(f"arm {text!r}: write config/NAME.py+config/B.py --key=value")
    name = [os.path.basename(files[-1])[:-3]]
    for option in options:
        key, _, value = option[2:].partition("=")
        name.append(f"{key}={os.path.basename(value)}")
    if not name[0].strip("."):
        raise ValueError(f"arm {text!r}: {files[-1]} cannot name a folder")
    return " ".join(name), files, options


def request(texts, common, seeds):
    """Check every arm as train.py would, before anything runs. seeds: a range.
    -> {name: what settings.json holds}, {name: settings}. Raises ValueError."""
    arms, configs = {}, {}
    for name, files, options in map(parse_arm, texts):
        if name in arms:
            raise ValueError(f"two arms are named {name!r}: rename one's config file")
        args = files + common + options
        config = configs[name] = train.settings(args)
        # the last two in a config file too
        for key in ("seed", "out_dir", "resume", "overwrite"):
            given = any(arg.startswith(f"--{key}=") for arg in args)
            if given or getattr(config, key) is True:
                raise ValueError(f"arm {name!r}: leave out {key}, every run gets "
                                 "its own from --seeds and --out")
        if config.dry_run:
            raise ValueError(f"arm {name!r}: dry_run=True trains nothing")
        arms[name] = dict(args=shlex.join(args), seeds=list(seeds), steps=config.steps,
                          start=start_of(config))
    return arms, configs


def start_of(config):
    """What arms that begin with the same rewards have in common."""
    set_later = [key for key in LATER if getattr(config, key) != train.DEFAULTS[key]]
    return " ".join(f"{key}={os.path.basename(str(getattr(config, key)))}"
                    for key in (*START, *set_later))


# running

def name_comparisons(where, text):
    """Those of the folder, else those of text as of now, or None; nothing is written. Raises
    ValueError if others are named there."""
    before = logs.compared(where)
    if text and before and text != before["compare"]:
        raise ValueError(f"compare was {shown(before['compare'])} in {where!r}, now "
                         f"it is {shown(text)}: choose another --out and --keep")
    if before or not text:
        return before
    return dict(compare=text, begun=sum(map(len, logs.find_logs(where).values())))


def comparisons(named, arms):
    """-> [(arm, other arm, cache, margin or None)], names in full. Raises ValueError if an arm is
    not there."""
    found = []
    for one, other, *rest in logs.parse_compare(named["compare"]):
        pair = [full_name(name, arms) for name in (one, other)]
        if pair[0] == pair[1]:
            raise ValueError(f"compare: {one!r} and {other!r} are the same arm")
        found.append((*pair, *rest))
    return found


def full_name(name, arms):
    """The arm of this name, else the only one of which it is the first word."""
    found = [arm for arm in arms if arm.partition(" ")[0] == name]
    if name in arms:
        found = [name]
    if not found:
        raise ValueError(f"compare: no arm {name!r}, only {', '.join(arms)}")
    if len(found) > 1:
        raise ValueError(f"compare: {name!r} may mean any of {', '.join(found)}")
    return found[0]


def decide(path, config):
    """What the run at path needs: None, "--resume=True" or "--overwrite=True". Raises
    ValueError if what it holds is another run; train.py would say so too, but is not asked
    about a finished one."""
    def has(name):
        return os.path.exists(os.path.join(path, name))

    log = read(os.path.join(path, "log.jsonl")) if has("log.jsonl") else []
    resumes = has("ckpt.pt") or is_whole(os.path.join(path, PREVIOUS))
    if not resumes and not ended(log):
        return "--overwrite=True"
    check_same(path, config)
    steps = config.steps
    done = log[-1]["step"] if log else 0
    if done > steps:
        raise ValueError(f"the run in {path!r} has done {done} steps already, "
                         f"steps={steps}: choose another --out")
    last = ("model", "adapter") if config.lora_rank else ("model",)
    if ended(log, steps) and (not has("ckpt.pt") or step_of(path, last) == steps):
        return None
    return "--resume=True" if resumes else "--overwrite=True"


def is_whole(path):
    try:
        check_whole(path)
    except (OSError, ValueError):
        return False
    return True


def check_same(path, config):
    """Raise ValueError if the run at path is another one than c asks for. A task file may have
    moved; a model not, as its weights are compared by their place alone."""
    file = os.path.join(path, "config.json")
    was, identity = {**BEFORE, **read_json(file, {})}, {}
    try:
        before = entry(was, "identity", dict, {})  # older runs did not note it
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    if before:
        identity = identity_of(config, find_checkpoint(config.model))
    # whatever it was
    auto = {key for key in ("device", "dtype") if getattr(config, key) == "auto"}
    moved = {"task", "eval_task"} & identity.keys() & before.keys()
    equal = vars(config).keys() - MAY_CHANGE - {"seed"} - auto - moved
    other = difference(was, config, identity=identity, where=path, equal=equal)
    if other:
        raise ValueError(f"{other}: choose another --out")


def check_unused(path):
    """Raise ValueError while a run is at path: it may be saving what would then be thrown away.
    Also where a link leads there, as a run would write behind it."""
    for place in (os.path.dirname(path), path, os.path.join(path, "train.log")):
        if os.path.islink(place):
            raise ValueError(f"{place} is a link, and nothing is written through one: "
                             "choose another --out")
    if os.path.isdir(path):
        hold(path)
        lock = HELD.pop(os.path.realpath(path), None)  # the run that comes needs it
        if lock is not None:
            os.close(lock)


def cards():
    """The cards as CUDA_VISIBLE_DEVICES names them."""
    import torch
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(99)]
    return names[:torch.cuda.device_count()]


def launch(path, args, threads, card):
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if card:
        env["CUDA_VISIBLE_DEVICES"] = card
    last, previous = os.path.join(path, "ckpt.pt"), os.path.join(path, PREVIOUS)
    if "--resume=True" in args and not os.path.exists(last):  # see decide
        os.replace(previous, last)
    with open_to_append(os.path.join(path, "train.log")) as log:
        if "--resume=True" not in args:
            log.truncate(0)
        # a process group of its own: Ctrl-C in a terminal reaches only us and is passed on
        # once; twice would make a child quit unsaved
        return subprocess.Popen(
            [sys.executable, TRAIN, *args], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env=env, start_new_session=True,
            preexec_fn=bound_to(os.getpid()))


def bound_to(parent):
    """What a new process calls to get SIGTERM, on which train.py saves, when its parent is gone,
    be it by SIGKILL. None where there is no Linux."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # here: after the fork nothing should be loaded

    def ask():
        prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:     # it went before it could be asked
            os._exit(1)
    return ask


def report(name, path, code, seconds, stopped):
    """-> one line about a run that is over, what it reached or the last thing it said; is it
    finished?"""
    how = "stopped" if code and stopped else "failed"
    after = f"after {seconds / 60:.1f} min"
    file = os.path.join(path, "train.log")
    if stopped and -code in SIGNALS:  # train.py does not handle them yet
        return f"{name}: stopped {after}, while starting ({file})", False
    try:
        log = [] if code else read(os.path.join(path, "log.jsonl"))
        if ended(log):
            rewards = ", ".join(f"{cache} cache {log[-1][key]:.3f}"
                                for cache, key in CACHES.items())
            return f"{name}: ended {after}, held-out reward: {rewards}", True
        with open(file, encoding="utf-8", errors="replace") as f:
            said = [line for line in f if line.strip()] or ["no output"]
        why = printable(said[-1])
    except (OSError, ValueError) as e:
        why = printable(str(e))
    return f"{name}: {how} {after}: {why} (exit code {code}, {file})", False


def freest(devices, name, working):
    """The card with the fewest runs and of those with the fewest of this one's arm, as arms take
    different times. name: ARM seed N; working: (name, card) of each run -> card, or None"""
    def crowd(card):
        arms = [each.rpartition(" seed ")[0] for each, its in working if its == card]
        return len(arms), arms.count(name.rpartition(" seed ")[0])

    return min(devices, key=crowd, default=None)


def strip(name, path):
    """Delete the weights of a run that ended, or say why not: other runs go on. What no run wrote
    stays."""
    try:
        for file in ("ckpt.pt", PREVIOUS):
            remove(os.path.join(path, file))
        for part in (*MODELS, *ADAPTERS):
            runs.remove_listed(os.path.join(path, part))
            with suppress(OSError):  # it is not there, or holds somebody's own
                os.rmdir(os.path.join(path, part))
    except OSError as e:
        tell(f"{name}: could not delete weights in {path}: {e}", sys.stderr)


def at_work(runs, done, of):
    """-> one line about the runs between two ends: how many ended, what the first three do."""
    doing = []
    for run in runs[:3]:
        step = 0
        with suppress(OSError, ValueError, IndexError):  # no log yet
            last = read(os.path.join(run.path, "log.jsonl"))[-1]
            step = last["step"] + ("reward" in last)  # an evaluation stands before its step
        doing.append(f"{run.name} step {step} of {run.steps}")
    if len(runs) > 3:
        doing.append("...")
    return f"{done} of {of} ended, {len(runs)} at work: {', '.join(doing)}"


def run_all(todo, jobs, threads, lean=False):
    """Run todo (name, path, args, steps), `jobs` at a time. -> how many did not finish. A signal
    goes on to every run; when all have saved: exit code 128 + signal."""
    waiting, working, devices = todo[::-1], {}, cards()
    done, failed, told = 0, 0, time.monotonic()
    signals, heard = [], 0

    def hear(signum, frame):
        if not signals or signum != getattr(signal, "SIGHUP", None):
            signals.append(signum)  # a terminal that is closed sends SIGHUP twice

    # nohup ignores SIGHUP
    old = {number: signal.signal(number, hear) for number in SIGNALS
           if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN}
    try:
        while working or (waiting and not signals):
            for worker in range(jobs):
                if waiting and not signals and worker not in working:
                    run = waiting.pop()
                    there = [(each.name, each.card) for each in working.values()]
                    run.card = freest(devices, run.name, there)
                    run.process = launch(run.path, run.args, threads, run.card)
                    run.start = time.monotonic()
                    working[worker] = run
            time.sleep(0.05)
            if time.monotonic() - told > EVERY:
                tell(at_work([*working.values()], done, of=len(todo)))
                told = time.monotonic()
            if len(signals) > heard:
                signum = signals[-1]
                what = "every run finishes its step and saves; a second signal kills"
                if heard:
                    signum, what = signal.SIGKILL, "killed"
                tell(f"{signal.Signals(signals[-1]).name}: {what}", sys.stderr)
                for run in working.values():
                    run.process.send_signal(signum)
                heard = len(signals)
            for worker, run in list(working.items()):
                if run.process.poll() is not None:
                    del working[worker]
                    line, finished = report(run.name, run.path, run.process.returncode,
                                            seconds=time.monotonic() - run.start,
                                            stopped=bool(signals))
                    done += 1
                    failed += not finished
                    if finished and lean:
                        strip(run.name, run.path)
                    tell(f"{line} [{done} of {len(todo)}]")
    finally:  # whatever went wrong here, no run outlives it
        for run in working.values():
            run.process.terminate()
        for run in working.values():
            run.process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)
    if signals:
        raise SystemExit(128 + signals[-1])
    return failed


# the tables

NOTE = " ".join("""
Reward: on held-out problems, greedy, mean of a run's last two evaluations; beside the
mean over seeds its 95 % interval (Student's t, which knows no bounds). Best evaluation:
of each run after step 0, mean over seeds; it is chosen on the problems that judge it
and so reads too high. Gap: mean |log-prob of the learner - of the sampler|. Acceptance:
overlap of the dense and the sparse policy, mean and 5th percentile. KL and entropy in
nats, response length in tokens. KV kept: of a dense cache, in brackets of one that
stores each prompt once per group. Minutes: sampling and learning, without
evaluation.""".split())


def across(values):
    """mean [95 % interval]"""
    if len(values) < 2:
        return "".join(f"{x:.3f}" for x in values)
    mean, half = interval(values)
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def small(x):
    if x >= 1e-3 or x == 0:
        return f"{x:.2g}"
    return re.sub("e-0*", "e-", f"{x:.0e}")


def means(*lists, show="{:.3f}".format):
    """The mean of each as text, nothing of those that are empty."""
    return ", ".join(show(fmean(values)) for values in lists if values)


def before(arms, cache):
    """Rewards before training, of each seed, which differ only in old logs. Arms with the same
    start share a row, as only their learners differ; arms that evict nothing are left out beside
    others, as theirs is the others' dense reward. -> [(names, rewards)], the start that most arms
    share first"""
    groups = {}  # (evicts, start) -> names, {seed: rewards}
    for name, arm in arms.items():
        for seed, log in arm["logs"].items():
            row = next(row for row in log if "kv_kept" in row)
            start = arm.get("start") or f"{row['kv_kept']} of {row['kv_dense']}"
            key = row["kv_kept"] < row["kv_dense_shared"], start
            names, rewards = groups.setdefault(key, ({}, {}))
            names[name] = True
            rewards.setdefault(seed, []).append(log[0][CACHES[cache]])
    some_evict = any(evicts for evicts, _ in groups)
    rows = [(list(names), [*map(fmean, rewards.values())])
            for (evicts, _), (names, rewards) in groups.items() if evicts == some_evict]
    return sorted(rows, key=lambda row: -len(row[0]))


def markdown(title, columns, rows):
    """A table without the columns that are empty. Rows may be short; what a terminal would obey in
    them, as they hold names of folders, is escaped."""
    rows = [[*map(printable, row)] + [""] * (len(columns) - len(row)) for row in rows]
    used = [i for i in range(len(columns)) if i < 3 or any(row[i] for row in rows)]
    lines = ["| " + " | ".join(row[i] for i in used) + " |" for row in [columns, *rows]]
    lines.insert(1, "|---" * len(used) + "|")
    return "\n".join([title, "", *lines, ""])


def counted(arm):
    """How many seeds ended, of how many."""
    done, asked = len(arm["logs"]), len(arm["seeds"])
    return str(done) if done == asked else f"{done} of {asked}"


def rewards_table(arms, cache):
    """Held-out reward under one cache, arm by arm."""
    rows, shown = [], set()
    for i, (names, rewards) in enumerate(before(arms, cache)):
        text = across(rewards if min(rewards) < max(rewards) else rewards[:1])
        # starts that differ in what they evict have one dense reward
        if text not in shown:
            of = f" ({', '.join(names)})" if i else ""
            rows.append([f"before training{of}", "", text])
        shown.add(text)
    for name, arm in arms.items():
        of_seeds = results(arm, CACHES[cache]).values()
        best = means(results(arm, CACHES[cache], max).values())
        row = [name, counted(arm), across([*of_seeds]), "", "", best]
        if 1 < len(of_seeds) < logs.MANY_SEEDS:
            row[3] = " ".join(f"{reward:.3f}" for reward in of_seeds)
        if 1 < len(of_seeds):
            row[4] = f"{min(of_seeds):.3f}"
        rows.append(row)
    title = f"**Served {cache}**: held-out reward with the {cache} cache"
    columns = ["arm", "seeds", "mean", "each seed", "worst", "best evaluation"]
    return markdown(title, columns, rows)


def health(arms):
    """What happened on the way, arm by arm."""
    shows = HEALTH.values()
    rows = [[name, counted(arm), *(show(arm) for show in shows if arm["logs"])]
            for name, arm in arms.items()]
    title = ("**Training**: means over seeds, where nothing else is said over the last "
             f"{LAST} steps")
    return markdown(title, ["arm", "seeds", *HEALTH], rows)


def gap_text(arm):
    """Nothing where nothing was replayed, as all samples of each prompt earn the same."""
    first = [fmean(values[:LAST]) for values in series(arm, "gap") if values]
    return means(first, at_end(arm, "gap"), show=small)


def kv_text(arm):
    kept, dense, shared = (sum(map(sum, series(arm, key))) for key in KV)
    return f"1/{dense / kept:.1f} (1/{shared / kept:.1f})"


def largest(arm, key, show):
    """As text, nothing where it was not logged."""
    found = [max(values) for values in series(arm, key) if values]
    return show.format(max(found)) if found else ""


HEALTH = {  # column: text of an arm's cell
    "sampled reward": lambda arm: means(at_end(arm, "reward")),
    f"gap, first and last {LAST} steps": gap_text,
    "acceptance, mean and p05": lambda arm: means(
        at_end(arm, "accept"), at_end(arm, "accept_p05")),
    "held-out acceptance, mean and p05": lambda arm: means(
        results(arm, "eval_accept").values(), results(arm, "eval_accept_p05").values()),
    # 0 where it is not computed
    "KL": lambda arm: means(at_end(arm, "kl"), show=lambda kl: small(kl) if kl else ""),
    "entropy": lambda arm: means(at_end(arm, "entropy"), show="{:.2f}".format),
    "response length": lambda arm: means(at_end(arm, "length"), show="{:.1f}".format),
    "largest lr": lambda arm: re.sub("e-0*", "e-", largest(arm, "lr", "{:g}")),
    "KV kept": kv_text,
    "minutes": lambda arm: f"{fmean(map(sum, series(arm, 'seconds'))) / 60:.1f}",
    "peak GB": lambda arm: largest(arm, "peak_gb", "{:.1f}")}


def comparisons_table(arms, named):
    """The comparisons that were named, over the seeds that both arms have, p-values of t adjusted
    for the number of those that are tested."""
    rows, tested = [], []  # tested: (a row, its differences)
    for one, other, cache, margin in comparisons(named, arms):
        mine, theirs = (results(arms[name], CACHES[cache]) for name in (one, other))
        both = sorted(mine.keys() & theirs.keys())
        values = [mine[seed] - theirs[seed] for seed in both]
        each = " ".join(f"{seed}: {x:+.3f}" for seed, x in zip(both, values))
        beyond = "" if margin is None else f" > {margin:g}"
        row = [f"{one} - {other}, {cache}{beyond}", str(len(both)), "", each]
        rows.append(row)
        if margin is None:
            tested.append((row, values))
        if len(both) < 2:
            continue
        mean, half = interval(values)
        row[2] = f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
        if margin is not None:
            low = mean - half
            holds = f"above {margin:g}: holds"
            if low <= margin:
                holds = f"not above {margin:g}: not shown"
            row += ["", "", "", f"lower bound {low:.3f} is {holds}"]
    ps = [p_value(values) for _, values in tested]
    for (row, values), p, adjusted in zip(tested, ps, holm(ps)):
        if len(values) > 1:
            ranks = shown_p(signed_rank_p(values)) if len(values) <= RANKED else ""
            row += [shown_p(p), shown_p(adjusted), ranks]
    begun = named["begun"]
    when = f"after {begun} runs had begun" if begun else "before the first run"
    title = (f"**Comparisons**, named {when}: difference of held-out rewards, "
             "paired by seed")
    columns = ["comparison", "seeds", "mean", "each seed", "p", "p, Holm",
               "p, ranks (no Holm)", "margin"]
    return markdown(title, columns, rows)


def shown_p(p):
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def table(arms, named=None, every=None):
    """-> Markdown. named: comparisons, between arms of `every`"""
    parts = [rewards_table(arms, "compressed"), rewards_table(arms, "dense")]
    if named:
        parts.append(comparisons_table(every, named))
    parts += [health(arms), NOTE + "\n"]
    missing = [f"{name} seed {seed}" for name, arm in arms.items()
               for seed in arm["seeds"] if seed not in arm["logs"]]
    if missing:
        parts.append("**Not finished, and counted nowhere: "
                     f"{printable(', '.join(missing))}.**\n")
    return "\n".join(parts)


def run_missing(options, texts, common, named):
    """Run what is not there yet. named: comparisons. -> how many runs did not finish"""
    out, first = options.out, options.first
    arms, configs = request(texts, common, range(first, first + options.seeds))
    if named:
        comparisons(named, logs.recorded(out) | arms)  # raises ValueError
    configurator.make_folder(out)
    hold(out)
    todo = []
    # seed by seed: after a round every arm has one to show
    for seed in range(first, first + options.seeds):
        for name, arm in arms.items():
            path = os.path.join(out, logs.folder(name), str(seed))
            check_unused(path)
            need = decide(path, configs[name])
            args = [*shlex.split(arm["args"]), f"--seed={seed}", f"--out_dir={path}"]
            run = SimpleNamespace(name=f"{name} seed {seed}", path=path,
                                  args=[*args, need], steps=arm["steps"])
            if need:
                todo.append(run)
            elif options.lean:
                strip(run.name, path)
    for path in filter(None, [options.keep, *(run.path for run in todo)]):
        configurator.make_folder(path)
    logs.remember(out, arms, named)
    tell(f"{len(arms)} arms x {options.seeds} seeds: {len(todo)} runs to do, "
         f"{len(arms) * options.seeds - len(todo)} done before")
    return run_all(todo, options.jobs, options.threads, lean=options.lean)


def main(argv):
    help_if_asked(argv, __doc__, ("options", __file__, OPTIONS),
                  ("settings of every run", train.__file__, train.DEFAULTS))
    with one_line_errors(ValueError, OSError):
        options, texts, common = parse(argv)
        failed = 0
        options.out = os.path.normpath(options.out)
        names = [parse_arm(text)[0] if ".py" in text else text for text in texts]
        if options.compare:
            logs.parse_compare(options.compare)
        named = name_comparisons(options.out, options.compare)
        if named and options.keep:
            name_comparisons(options.keep, named["compare"])
        if not options.table:
            failed = run_missing(options, texts, common, named=named)
        every = logs.load(options.out) if named else None
        if named:
            comparisons(named, every)  # raises ValueError
        arms = logs.load(options.out, names)
        text = table(arms, named, every=every)
        tell(text)
        write_text(os.path.join(options.out, "table.md"), text)
        if options.keep:
            logs.keep(options.keep, arms, named)
        figure(arms, os.path.join(options.out, "ablate.png"))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
