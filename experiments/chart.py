"""
The map: how far eviction moves the policy before training, and what each way to train makes of it.

    python -m experiments.chart     # draws docs/map.png of results/map; needs matplotlib

The idea. A budget is a number of keys, which says little of another model or task. What budgets and
answer lengths have in common is the policy: across the map stands the 5th percentile of the
held-out acceptance before training, up the held-out reward after it, as in the tables of ablate.py.
A column for each task, and so for each length of answers, a row for each cache that serves.

Reads folders of logs as ablate.py keeps them; an arm is drawn as the method that its name begins
with, at the task and the budget of its settings. Sparrow (arXiv 2606.08446) reports that sparse
rollouts train stably while that percentile is 0.86 or more: a line.
"""
import os
import re
from statistics import fmean

import train
from experiments.curves import BEFORE, PAGE, check_out, looks, method, places
from experiments.logs import CACHES, load, results
from support.checkpoint import UNFINISHED
from support.configurator import Arguments
from support.run import one_line_errors, tell

STABLE = 0.86  # Sparrow's threshold
MAP = ["results/map/kv", "results/map/kv4", "results/map/kv16"]
TOKENS = {"kv": 4, "kv4": 16, "kv16": 64}  # of an answer
MARKERS = "osD^vP"
GREY = "#777777"


def read_points(folder):
    """-> a dict for each arm that has a run that ended: method, task, budget, x (acceptance before
    training, mean over seeds), and of each cache before and after: {seed: reward}. Raises
    ValueError for logs without acceptance."""
    points = []
    for name, a in load(folder).items():
        if not a["logs"]:
            continue
        first = {seed: log[0] for seed, log in a["logs"].items()}
        if not all("eval_accept_p05" in row for row in first.values()):
            raise ValueError(f"{folder}: {name}: its logs say nothing of acceptance")
        point = dict(method=method(name), x=fmean(r["eval_accept_p05"] for r in first.values()),
                     task=setting("task", name, a), budget=setting("budget", name, a))
        for cache, key in CACHES.items():
            point[cache] = dict(before={seed: row[key] for seed, row in first.items()},
                                after=results(a, key))
        points.append(point)
    return points


def setting(key, name, a):
    """What an arm's name, else its arguments, else its start say of a setting."""
    said = re.findall(rf"\b{key}=(\S+)", f"{a.get('start', '')} {a['args']} {name}")
    return said[-1].strip("'\"") if said else str(train.DEFAULTS[key])


def by_length(task):
    return TOKENS.get(task, 10**9), task


def title(task):
    return f"{task}: answers of {TOKENS[task]} tokens" if task in TOKENS else task


def draw_panel(ax, points, methods, cache):
    """One task under one cache. methods: {name: its look}"""
    for i, (name, line) in enumerate(methods.items()):
        shift = 0.008 * (i - (len(methods) - 1) / 2)  # budgets have one x for all methods
        mine = sorted((p for p in points if p["method"] == name), key=lambda p: p["x"])
        style = dict(line, marker=MARKERS[i % len(MARKERS)])
        style["mfc"] = style["color"] if cache == "compressed" else "white"
        for p in mine:
            seeds = [*p[cache]["after"].values()]
            ax.plot([p["x"] + shift] * len(seeds), seeds, mew=0.5, alpha=0.6,
                    **style | dict(ls="", ms=2.5))
        ax.plot([p["x"] + shift for p in mine],
                [fmean(p[cache]["after"].values()) for p in mine], ms=5.5, label=name, **style)
    began = sorted((p["x"], fmean(p[cache]["before"].values())) for p in points)
    ax.plot(*zip(*began), color=GREY, lw=1, ls=":", label=BEFORE)
    best = [x for p in points if p["method"] == "dense" for x in p["dense"]["after"].values()]
    if best:
        ax.axhline(fmean(best), color=methods["dense"]["color"], lw=0.8,
                   label="dense, served dense")
    ax.axvline(STABLE, color=GREY, lw=0.8)
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.02, 1.02), ylabel=f"served {cache}")


def write_budgets(ax, points):
    """Above a panel, the number of keys that belongs to each place."""
    at = {p["budget"]: p["x"] for p in points if p["method"] != "dense"}
    if at:
        for budget, x in zip(at, places([*at.values()], gap=0.075, low=0, high=1)):
            ax.text(x, 1.05, budget, ha="center", fontsize=7, color=GREY)


def draw(points, path):
    """Write the map to path, for a page 900 px wide."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    tasks = sorted({p["task"] for p in points}, key=by_length)
    methods = looks(dict.fromkeys(p["method"] for p in points))
    with pyplot.rc_context(PAGE):
        figure, panels = pyplot.subplots(len(CACHES), len(tasks), figsize=(9, 5.6), squeeze=False,
                                         sharex=True, sharey=True, layout="constrained")
        for column, task in zip(panels.T, tasks):
            there = [p for p in points if p["task"] == task]
            for ax, cache in zip(column, CACHES):
                draw_panel(ax, there, methods, cache=cache)
                ax.label_outer()
            column[0].set_title(title(task), pad=16)
            write_budgets(column[0], there)
        panels[0, 0].text(STABLE - 0.01, 0.02, "0.86 (Sparrow)", rotation=90, ha="right",
                          fontsize=7, color=GREY)
        named = {}
        for ax in panels.flat:
            for handle, label in zip(*ax.get_legend_handles_labels()):
                named.setdefault(label, handle)
        order = [name for name in [*methods, BEFORE, "dense, served dense"]
                 if name in named]
        figure.legend([named[name] for name in order], order, loc="outside upper center",
                      ncols=len(order), frameon=False)
        figure.supxlabel("held-out acceptance before training, 5th percentile; above: keys kept",
                         fontsize=8)
        figure.supylabel("held-out reward after training; small: single seeds", fontsize=8)
        figure.savefig(path + UNFINISHED, dpi=200, format="png")
        pyplot.close(figure)
    os.replace(path + UNFINISHED, path)


def main(argv=None):
    a = Arguments(prog="chart", description="draw reward against acceptance before training")
    a.add_argument("folders", nargs="*", default=MAP, help="logs, as ablate keeps them")
    a.add_argument("--out", default="docs/map.png", help="a .png")
    a = a.parse_args(argv)
    with one_line_errors(ValueError, OSError):
        points = [p for folder in a.folders for p in read_points(folder)]
        if not points:
            raise ValueError(f"no run has ended in {', '.join(a.folders)}")
        check_out(a.out)
        draw(points, a.out)
        tell(f"map written to {a.out}")


if __name__ == "__main__":
    main()
