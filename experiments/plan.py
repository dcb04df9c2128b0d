"""
The runs behind docs/results.md, in parts. Arms, seeds, rates, the rule that chooses among rates and
the named comparisons stood here before the first of these runs.

    python -m experiments.plan tune --jobs=16        # OUT/tune, logs in results/tune
    python -m experiments.plan rates                 # what the rule chooses, from results/tune
    python -m experiments.plan main budgets long     # at these rates
    python -m experiments.plan bases OUT/m1200 ...   # the four arms on other checkpoints
    python -m experiments.plan list-pilot list-budgets --model=smollm2   # a real model, long lists
    python -m experiments.plan list/middle list/mild list/strong --model=smollm2 --jobs=4
    python -m experiments.plan gsm8k --model=qwen --task=gsm8k/train.jsonl

Each part is one or two commands of experiments/ablate.py: what was finished is not run again. Other
options go to every run. A part's first word stands for all that begin with it and a slash.

The rule. An arm's rate is the one with the largest sum of both held-out rewards, each the mean of a
run's last two evaluations, averaged over the seeds of `tune`. Seeds and held-out problems of `tune`
(the numbers from 10,000 on) are in no other part. If the choice is the lowest or the highest rate
tried, one rate more is tried beyond it (`tune` again), and the choice is made among all. Arms that
are no arm of the main five have three rates and one seed.

On the real model (config/smollm2.py) the rule is the same, but `list-pilot` has two rates, one seed
and 512 keys, and no rate is tried beyond. There 512 keys turned out to be mild: naive ended highest
served compressed. So `list-budgets` tries fewer keys, in 100 steps of one seed. The middle budget
of `list` is the smallest at which smd ends at 0.3 or more served compressed; mild and strong are
the next larger and the next smaller one. Then `list-dtype` repeats smd in float16, `list-lora`
trains the adapters that are published, and `list-alone` times each arm with no other run on its
card. In `gsm8k/harm` all arms have the rate of shadow and smd, at which naive and tis had not been
run on five seeds. In `gsm8k/short` answers have at most 128 tokens and each arm its own rate: the
aim was that length explains less of what the arms differ in. Ending in time became the task.
"""
import os
import subprocess
import sys
from statistics import fmean

from experiments.logs import CACHES, load, results
from support.configurator import help_if_asked
from support.screen import one_line_errors, tell

MAIN = ["dense", "naive", "tis", "shadow", "smd"]
OTHERS = ["mis", "sparse_rl", "bypass", "anchor", "smd_reverse", "released",
          "one_sided", "ppo", "ppo_naive", "dpo", "dpo_naive"]
GRID = [1e-5, 3e-5, 1e-4, 3e-4, 6e-4, 1e-3, 3e-3]  # the first and the last only beyond an end
LONG = ["--steps=150", "--eval_every=10", "--eval_problems=256", "--eval_final=1024",
        "--eval_batch=1024", "--save_every=1000"]
TUNE = ["--steps=150", "--eval_every=10", "--eval_problems=256", "--eval_final=512",
        "--eval_batch=512", "--save_every=1000", "--lean=True", "--eval_first=10000",
        "--first=100"]
# Holm's four, and one margin outside: smd is no worse than the dense arm where that is at home
COMPARE = ("smd/naive/compressed,smd/naive/dense,smd/shadow/dense,smd/tis/compressed,"
           "smd/dense/dense>-0.02")
# the real model: after LONG, whose options these replace
KEYS = [640, 512, 384, 256, 192, 128]  # of 1,150 prompt keys; the second is list-pilot's
ENOUGH = 0.3  # of smd's reward served compressed
LIST = ["--steps=200", "--eval_every=40", "--eval_problems=128", "--eval_final=256",
        "--eval_batch=128", "--lean=True"]
PILOT = ["--seeds=1", "--first=100", "--eval_first=10000"]
ALONE = ["--steps=12", "--eval_every=1000", "--eval_problems=16", "--eval_final=16",
         "--eval_batch=16", "--seeds=1", "--jobs=1"]
LIST_COMPARE = ("smd/naive/compressed,smd/shadow/compressed,smd/shadow/dense,"
                "smd/tis/compressed")
GSM8K = ["--steps=80", "--eval_every=20", "--eval_problems=128", "--eval_final=512",
         "--eval_batch=512", "--lean=True"]
GSM8K_SHORT = "shadow/naive/compressed,shadow/dense/compressed"
GSM8K_COMPARE = ("shadow/naive/compressed,smd/naive/compressed,smd/naive/dense,"
                 "smd/tis/compressed")
# the default command with more samples a step: the first of these, in this order, whose worst of
# eight seeds ends at 0.5 and 0.9 or more becomes the default; none: the default stays
DEFAULTS = ["", "--group=10", "--prompts=20", "--group=12"]
OUT, KEEP = "out-plan", "results"


def arm(name, *options):
    return " ".join([f"config/{name}.py", *options])


def at(lr):
    return f"--lr={lr:g}".replace("e-0", "e-")


def tuned(part="tune"):
    """{arm: {rate: (sum of both rewards, compressed, dense), means over seeds}} of what is there"""
    kept, found = os.path.join(KEEP, part), {}
    if not os.path.exists(os.path.join(kept, "settings.json")):
        return found
    for name, a in load(kept).items():
        method, _, rate = name.partition(" lr=")
        if a["logs"]:
            both = [fmean(results(a, key).values()) for key in CACHES.values()]
            found.setdefault(method, {})[float(rate)] = (sum(both), *both)
    return found


def choose(rates):
    """{rate: (sum, ...)} -> the rate with the largest sum"""
    return max(rates, key=lambda lr: rates[lr][0])


def tune_arms():
    """[(arms, seeds)]: the grid, and one rate more where the choice is at its end."""
    found = tuned()
    parts = []
    for names, grid, seeds in ((MAIN, GRID[1:6], 2), (OTHERS, GRID[2:5], 1)):
        arms = [arm(name, at(lr)) for name in names for lr in grid]
        for name in names:
            done = sorted(found.get(name, {}))
            if set(done) >= set(grid):
                best = GRID.index(choose(found[name]))
                beyond = {done[0]: best - 1, done[-1]: best + 1}.get(GRID[best], -1)
                if 0 <= beyond < len(GRID):
                    arms.append(arm(name, at(GRID[beyond])))
        parts.append((arms, seeds))
    return parts


def rate(part="tune"):
    """{arm: the option of its chosen rate}"""
    return {name: at(choose(rates)) for name, rates in tuned(part).items()}


def budgets():
    """{mild, middle, strong: keys}, by the rule; empty until list-budgets is complete."""
    kept, found = os.path.join(KEEP, "list-budgets"), {}
    if os.path.exists(os.path.join(kept, "settings.json")):
        for name, arm_of in load(kept).items():
            if name.startswith("smd ") and arm_of["logs"]:
                end = fmean(results(arm_of, CACHES["compressed"]).values())
                found[int(name.partition("budget=")[2])] = end
    if set(found) != {*KEYS[2:-1]}:
        return {}
    middle = max(i for i in range(1, 5) if found.get(KEYS[i], 1) >= ENOUGH)
    return dict(zip(("mild", "middle", "strong"), KEYS[middle - 1:middle + 2]))


def real_parts():
    """Of the real models; `list` only once list-pilot has a rate for each arm and list-budgets an
    end for each budget."""
    def arms(base, names, options):
        return [arm(f"{base}.py+config/{name}", options[name]) for name in names]

    slow, fast, harmful = (dict.fromkeys(MAIN, at(lr)) for lr in (2e-5, 4e-5, 3e-6))
    mild = dict(harmful, naive=at(1e-6))
    three = ["naive", "shadow", "smd"]
    pilot = [*LIST, f"--budget={KEYS[1]}", *PILOT]
    fewer = [f"{each} --budget={keys}" for keys in KEYS[2:-1]
             for each in arms("smollm2", three, fast)]
    found = {
        "list-pilot": [([*arms("smollm2", MAIN, slow), *arms("smollm2", MAIN, fast)],
                        pilot)],
        "list-budgets": [(fewer, [*LIST, *PILOT, "--steps=100", "--eval_every=80"])],
        "gsm8k/harm": [(arms("gsm8k", ["naive", "tis", "shadow", "smd"], harmful),
                        [*GSM8K, "--seeds=5", f"--compare={GSM8K_COMPARE}"])],
        "gsm8k/short": [(arms("gsm8k", ["dense", "naive", "shadow"], mild),
                         [*GSM8K, "--seeds=3", "--max_new_tokens=128",
                          f"--compare={GSM8K_SHORT}"])]}
    lr, tried, keys = rate("list-pilot"), tuned("list-pilot"), budgets()
    if keys and all(len(tried.get(name, ())) == 2 for name in MAIN):
        at_keys = {name: [*LIST, f"--budget={n}"] for name, n in keys.items()}
        found["list/middle"] = [(arms("smollm2", MAIN, lr),
                                 [*at_keys["middle"], "--seeds=5",
                                  f"--compare={LIST_COMPARE}"])]
        for name in ("mild", "strong"):
            found[f"list/{name}"] = [(arms("smollm2", three, lr),
                                      [*at_keys[name], "--seeds=2"])]
        half = [f"{each} --dtype=float16" for each in arms("smollm2", ["smd"], lr)]
        found["list-dtype"] = [(half, [*at_keys["middle"], "--seeds=3"])]
        # ten times the rate, as is usual for LoRA; what is saved stays
        thin = [f"{each} --lora_rank=8" for each in arms(
            "smollm2", ["naive", "smd"], dict.fromkeys(MAIN, at(4e-4)))]
        found["list-lora"] = [(thin, [*LIST[:-1], at_keys["middle"][-1], "--seeds=1"])]
        found["list-alone"] = [(arms("smollm2", MAIN, lr),
                                [at_keys["middle"][-1], *ALONE])]
    return found


def parts(folders=()):
    """{part: [(arms, options)]}, at the chosen rates; folders: of checkpoints."""
    lr = rate()

    def arms(names, *options):
        return [arm(name, lr[name], *options) for name in names]

    weights = [arm("smd", lr["smd"], "--distill=0")]
    weights += [arm("smd", lr["smd"], f"--distill={x}", f"--distill_on={on}")
                for on in ("reward", "all") for x in (0.03, 0.1, 0.3, 1)]
    # acceptance p05 before training, in the pilot: 0.004 at 56 keys, 0.2 to 0.3, 0.81; Sparrow's is
    # 0.86
    budgets = [each for keys in (84, 120)
               for each in arms(["naive", "tis", "shadow", "smd"], f"--budget={keys}")]
    # budgets at which the untrained model earns as little as under 56 keys and max pooling
    three = ["naive", "shadow", "smd"]
    methods = [*arms(three, "--pool_by=mean", "--budget=50"),
               *arms(three, "--evict=rkv"), *arms(three, "--evict=h2o", "--budget=100")]
    other_bases = {f"bases/{os.path.basename(folder)}":
                   [(arms(["dense", "naive", "shadow", "smd"], f"--model={folder}"),
                     ["--seeds=2"])] for folder in folders}
    return {
        "main": [(arms(MAIN), ["--seeds=8", f"--compare={COMPARE}"]),
                 (arms(OTHERS), ["--seeds=3"])],
        # the same without a GPU, in an hour on two cores: fewer seeds and evaluations
        "main-cpu": [(arms(MAIN), ["--seeds=3", f"--compare={COMPARE}", "--device=cpu",
                                   "--eval_every=25", "--eval_problems=128",
                                   "--eval_final=512"])],
        "weights": [(weights, ["--seeds=3"])],
        "budgets": [(budgets, ["--seeds=3"])],
        "methods": [(methods, ["--seeds=2"])],
        "long": [(arms(["shadow", "smd"]),
                  ["--seeds=3", "--steps=600", "--eval_every=50"])],
        "window": [(arms(["smd"], "--evict=recent", "--window=8", "--budget=22"),
                    ["--seeds=5"])],
        "cold": [(arms(["smd"]), ["--seeds=3", "--task=own", "--steps=60"])],
        "tasks/kv": [([f"config/kv.py+{each}" for each in arms(three)], ["--seeds=2"])],
        "tasks/kv16": [([f"config/kv16.py+{each}" for each in arms(three)],
                        ["--seeds=1", "--steps=40"])],
        "default-pilot": [([arm("smd", *options.split()) for options in DEFAULTS],
                     ["--seeds=8", "--first=200", "--steps=60", "--lr=6e-4",
                      "--eval_every=20", "--eval_first=10000", "--eval_problems=128",
                      "--lean=True"])],
        **other_bases, **real_parts()}


def run(part, settings, todo):
    """-> the number of ablate's commands that failed"""
    failed = 0
    for arms, options in todo:
        out, kept = (os.path.join(folder, part) for folder in (OUT, KEEP))
        command = [sys.executable, "-m", "experiments.ablate", *arms, *settings,
                   *options, f"--out={out}", f"--keep={kept}"]
        failed += subprocess.run(command).returncode != 0
    return failed


def main(argv):
    help_if_asked(argv or ["--help"], __doc__)
    with one_line_errors(ValueError, OSError):
        names = [arg for arg in argv if not arg.startswith("--")]
        more = [arg for arg in argv if arg not in names]  # goes to every run
        failed = 0
        if "rates" in names:
            for name, rates in [*tuned().items(), *tuned("list-pilot").items()]:
                each = "  ".join(f"{lr:g}: {sparse:.3f}/{dense:.3f}"
                                 for lr, (_, sparse, dense) in sorted(rates.items()))
                tell(f"{name:12} {each}  -> {choose(rates):g}")
        elif "tune" in names:
            for arms, seeds in tune_arms():
                failed += run("tune", TUNE, [(arms, [f"--seeds={seeds}", *more])])
        else:
            folders = [name for name in names if os.path.isdir(name)]
            there = parts(folders)
            for name in names:
                chosen = [part for part in there if f"{part}/".startswith(f"{name}/")]
                if not chosen and name not in folders:
                    raise ValueError(f"no part {name!r}, only {', '.join(there)}")
                for part in chosen:
                    todo = [(arms, [*options, *more]) for arms, options in there[part]]
                    failed += run(part, LONG, todo)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
