"""
Curves of arms: held-out rewards under both caches, gap and acceptance by step, as one figure.

Colours are those of Okabe and Ito; arms differ in line style too. Names stand at the ends of their
lines, pushed apart where they would overlap. Needs matplotlib; without it `figure` says so.
"""
import math
import os
import sys
from functools import partial
from statistics import fmean

from experiments.logs import CACHES, LAST, MANY_SEEDS, over_seeds, series, smooth
from experiments.ttest import interval
from support.checkpoint import UNFINISHED
from support.configurator import make_folder
from support.run import tell

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
           "#888888"]  # Okabe and Ito's, grey for their yellow
STYLES = ["-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2))]
PAGE = {"font.size": 8, "axes.titlesize": 8.5, "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e4e4e4", "grid.linewidth": 0.6}


def check_out(path):
    """Raise ValueError if no picture can be written there."""
    if not path.endswith(".png") or os.path.isdir(path):
        raise ValueError(f"--out must name a .png, got {path!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install matplotlib") from None
    make_folder(os.path.dirname(path) or ".")


def look(i):
    """Colour and line style of arm i."""
    style = STYLES[(i + i // len(COLOURS)) % len(STYLES)]
    return dict(color=COLOURS[i % len(COLOURS)], ls=style, lw=1.5)


def places(wanted, gap, low, high):
    """Heights near the wanted ones, at least gap apart, in [low, high] if they fit: the
    nearest in least squares."""
    order, blocks = sorted(range(len(wanted)), key=wanted.__getitem__), []
    # less their n gaps, heights must only not fall: pool neighbours that do (isotonic
    # regression)
    for n, i in enumerate(order):
        blocks.append([wanted[i] - n * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    top = max(low, high - (len(order) - 1) * gap)
    flat = [min(max(fmean(b), low), top) for b in blocks for _ in b]
    return [flat[n] + n * gap for n in map(order.index, range(len(wanted)))]


def label(ax, ends):
    """Write names at the right ends of lines, none over another. ends: (name, colour, last
    point)"""
    for old in list(ax.texts):
        old.remove()
    box, pt = ax.get_window_extent(), ax.figure.dpi / 72
    to_axes = ax.transData + ax.transAxes.inverted()
    points = [to_axes.transform(end) for _, _, end in ends]
    heights = places([y for _, y in points], gap=8.5 * pt / box.height, low=0.01, high=0.97)
    for (name, colour, _), point, y in zip(ends, points, heights):
        line = dict(arrowstyle="-", color=colour, lw=0.5, shrinkA=0, shrinkB=2, relpos=(0, 0.5))
        if point[0] < 0.9:  # far from the end of the axis it would look like a curve
            line["ls"] = (0, (1, 3))
        ax.annotate(name, xy=point, xytext=(1 + 16 * pt / box.width, y),
                    xycoords="axes fraction", textcoords="axes fraction", fontsize=7.5,
                    color=colour, va="center", annotation_clip=False, arrowprops=line,
                    parse_math=False)


def curve(ax, arms, key, f=list, positive=False):
    """A line for each arm: key, changed by f, mean over seeds. -> ends for `label`"""
    ends = []
    for i, (name, a) in enumerate(arms.items()):
        steps, values = over_seeds(a, key, f)
        points = [(s, y) for s, y in zip(steps, map(fmean, values)) if y > 0 or not positive]
        if points:
            ax.plot(*zip(*points), **look(i))
            ends.append((name, look(i)["color"], points[-1]))
    return ends


def spread_of(ax, arms, key):
    """Around the lines of `curve` each seed, or of many seeds the interval of their mean. -> what
    was drawn"""
    seeds = max(len(a["logs"]) for a in arms.values())
    for i, a in enumerate(arms.values()):
        steps, values = over_seeds(a, key)
        colour = look(i)["color"]
        if seeds < MANY_SEEDS:
            ax.plot(steps, values, color=colour, lw=0.6, alpha=0.5 if len(arms) < 6 else 0.25,
                    zorder=1.5)
        elif len(a["logs"]) > 1:
            low, high = zip(*[(m - half, m + half) for m, half in map(interval, values)])
            ax.fill_between(steps, low, high, color=colour, lw=0, alpha=0.12)
    if seeds == 1:
        return ""
    return " (thin: single seeds)" if seeds < MANY_SEEDS else " (band: 95 % interval of the mean)"


def reward_limits(arms, keys):
    """Lowest and highest of an axis that shows all rewards; they may lie outside of 0 .. 1."""
    rewards = [x for key in keys for a in arms.values() for s in series(a, key) for x in s] or [1]
    lowest, highest = min(rewards), max(rewards)
    top = 1.1 * highest
    if highest <= 1:
        top = min(1, max(1, math.ceil(11 * highest)) / 10)
    return min(0, 1.1 * lowest), top


def draw_reward(ax, arms, cache):
    ends = curve(ax, arms, CACHES[cache])
    more = spread_of(ax, arms, CACHES[cache])
    limits = reward_limits(arms, CACHES.values())  # of both panels, which are to be compared
    ax.set(ylabel="held-out reward", ylim=limits, title=f"Served {cache}{more}")
    return ends


def draw_gap(ax, arms, last=LAST):
    ends = curve(ax, arms, "gap", partial(smooth, last=last), positive=True)  # 0 has no logarithm
    ax.set(ylabel=f"nats, mean of {last} steps", yscale="log",
           title="Gap: mean |log-prob of learner - sampler|")
    ax.minorticks_off()
    low, high = ax.get_ylim()
    wider = max(1, 10 * (low / high) ** 0.5)  # two powers of ten at least, so that one is named
    ax.set_ylim(low / wider, high * wider)
    return ends


def draw_acceptance(ax, arms, key):
    """key: accept, logged in every step, or eval_accept"""
    f, where = list, "of held-out tokens"
    if key == "accept":
        f, where = smooth, f"mean of {LAST} steps"
    ends = curve(ax, arms, f"{key}_p05", f)
    ax.set(ylabel="overlap of the policies", ylim=(0, 1),
           title=f"Acceptance: 5th percentile {where}")
    return ends


def figure(arms, path):
    """Rewards under both caches, gap and acceptance by step, as a PNG for a page 900 px wide."""
    arms = {name: a for name, a in arms.items() if a["logs"]}
    if not arms:
        tell("no figure: no run has ended", sys.stderr)
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        tell("no figure: it needs matplotlib (pip install matplotlib)", sys.stderr)
        return
    panels = dict(A=partial(draw_reward, arms=arms, cache="compressed"),
                  B=partial(draw_reward, arms=arms, cache="dense"), C=partial(draw_gap, arms=arms))
    # held-out acceptance, where logged, covers arms that replay one policy only
    logged = [key for key in ("eval_accept", "accept")
              if any(any(series(a, key)) for a in arms.values())]
    if logged:
        panels["D"] = partial(draw_acceptance, arms=arms, key=logged[0])
    steps = max(log[-1]["step"] for a in arms.values() for log in a["logs"].values())
    height = max(6, 0.36 * len(arms))  # inches; labels need room
    write_panels(path, panels, steps, mosaic="AB;CD" if logged else "AB;CC", figsize=(9, height),
                 height_ratios=(1.25, 1))


def write_panels(path, panels, steps, **layout):
    """Write a PNG. panels: {letter of the mosaic: function that draws on axes and returns ends for
    `label`}."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    with plt.rc_context(PAGE):
        fig, axes = plt.subplot_mosaic(layout="constrained", **layout)
        ends = {k: draw(axes[k]) for k, draw in panels.items()}
        for ax in axes.values():
            ax.set(xlabel="step", xlim=(0, steps))
        # labels decide how much room is left for a panel, its height where they must stand
        for _ in range(2):
            for k, ax in axes.items():
                label(ax, ends[k])
            fig.draw_without_rendering()
        fig.savefig(path + UNFINISHED, dpi=200, format="png")
        plt.close(fig)
    os.replace(path + UNFINISHED, path)
