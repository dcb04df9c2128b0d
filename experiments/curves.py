"""
Pictures of arms: held-out rewards under both caches, by step, as dots, or over several bases.

    python -m experiments.curves results/main-cpu                  # or some of its arms, by name
    python -m experiments.curves results/tune --dots=True --out=dots.png
    python -m experiments.curves out-small out-large --bases=True

The idea. A method has one colour, one dash and one width in every figure of the project (LOOKS), so
that who has seen one figure can read the others. Colours are those of Okabe and Ito. Names stand at
the ends of lines or beside dots, pushed apart where they would overlap. Every figure of the project
is laid out and written here. Folders are those that ablate.py writes or keeps; its own figure,
`figure`, shows gap and acceptance too.

--dots: across the reward served compressed, up that served dense, both at the end of training.
--bases: a folder for each base model, with one arm of a method at most; across what the base earns
served dense before training, up what arms earn after it. Needs matplotlib; without it `figure` says
so.
"""
import io
import math
import os
import sys
from functools import partial
from itertools import cycle
from statistics import fmean

import numpy as np

from experiments import logs
from experiments.logs import CACHES, LAST, MANY_SEEDS, over_seeds, results, series
from experiments.ttest import interval
from support.checkpoint import write_whole
from support.configurator import Arguments, make_folder
from support.screen import one_line_errors, tell

COLOURS = ["#D55E00", "#009E73", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
           "#888888"]  # Okabe and Ito's, grey for their yellow
STYLES = ["-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2))]
RED, GREEN, BLUE, PINK, ORANGE, SKY, BLACK, GREY = COLOURS
SOLID, DASHED, DASH_DOT, DOTTED = STYLES
# of each method; what learns alike has one colour, PPO and DPO a dash of their own
LOOKS = dict(
    dense=(BLACK, DASHED), naive=(RED, SOLID), shadow=(GREEN, DASHED),
    smd=(BLUE, SOLID), tis=(PINK, DASH_DOT), mis=(ORANGE, SOLID),
    sparse_rl=(GREY, DASHED), bypass=(SKY, DASHED), anchor=(GREEN, DOTTED),
    smd_reverse=(BLUE, DASHED), ppo=(BLUE, DASH_DOT), ppo_naive=(RED, DASH_DOT),
    ppo_dense=(BLACK, DASH_DOT), dpo=(BLUE, DOTTED), dpo_naive=(RED, DOTTED),
    dpo_dense=(BLACK, DOTTED), released=(GREY, SOLID), seq=(SKY, DOTTED),
    floor=(SKY, SOLID))
BEFORE = "before training"
WHOLE = (-0.02, 1.02)  # an axis of rewards from 0 to 1, with room for a line at its end
PAGE = {"font.size": 8, "axes.titlesize": 8.5, "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e4e4e4", "grid.linewidth": 0.6}


# writing

def plotter():
    """matplotlib's pyplot, without a screen. Raises ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        why = "the picture needs matplotlib: pip install matplotlib"
        raise ValueError(why) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def check_out(path):
    """Raise ValueError if no picture can be written there."""
    if not path.endswith(".png") or os.path.isdir(path):
        raise ValueError(f"--out must name a .png, got {path!r}")
    plotter()
    make_folder(os.path.dirname(path) or ".")


def can_draw():
    """Is there a matplotlib? Else a line says so."""
    try:
        return bool(plotter())
    except ValueError as e:
        tell(f"no figure: {e}", sys.stderr)
        return False


def save(figure, path):
    """Write a PNG of 256 colours, 200 dots an inch: nine inches make twice the pixels of a page.
    It takes the place of whatever has the name, through no link."""
    from PIL import Image
    whole = io.BytesIO()
    figure.savefig(whole, dpi=200)
    plotter().close(figure)
    small = Image.open(whole).convert("RGB").quantize(256, dither=0)
    write_whole(path, lambda f: small.save(f, "PNG", optimize=True))


def write_panels(path, panels, x, put_names=None, **layout):
    """Write a PNG. panels: {name in the mosaic: function that draws on axes and returns ends for
    put_names}; x: what all horizontal axes are."""
    pyplot = plotter()
    with pyplot.rc_context(PAGE):
        fig, axes = pyplot.subplot_mosaic(layout="constrained", **layout)
        ends = {name: draw(axes[name]) for name, draw in panels.items()}
        for ax in axes.values():
            ax.set(**x)
        # names decide how much room is left for a panel, its size where they must stand
        for _ in range(2):
            for name, ax in axes.items():
                (put_names or label)(ax, ends[name])
            fig.draw_without_rendering()
        save(fig, path)


# how arms look

def line(colour, style, thick=False):
    width, layer = (2.6, 2.5) if thick else (1.5, 2)
    return dict(color=colour, ls=style, lw=width, zorder=layer)


def method(name):
    """That of an arm: the first word of its name."""
    return name.partition(" ")[0]


def looks(names):
    """{name: how its line is drawn} of the arms of a figure. An arm has the look of its method if
    it is the only one of it or has nothing but its name, else one that is left over, as far as
    there are any in a colour that no method has here. smd is thick."""
    methods = [*map(method, names)]
    own = {name: LOOKS[m] for name, m in zip(names, methods)
           if m in LOOKS and (name == m or methods.count(m) == 1)}
    used = {colour for colour, _ in own.values()}
    # all colours in one style each, then in the next
    left = [(colour, STYLES[(i + turn) % len(STYLES)])
            for turn in range(len(STYLES)) for i, colour in enumerate(COLOURS)]
    left = [look for look in left if look not in own.values()]
    left = cycle(sorted(left, key=lambda look: look[0] in used))
    return {name: line(*(own.get(name) or next(left)),
                       thick=name in own and method(name) == "smd") for name in names}


def by_method(arms):
    """The arms that have a run that ended, named by their methods alone if these tell them
    apart."""
    arms = {name: arm for name, arm in arms.items() if arm["logs"]}
    methods = [*map(method, arms)]
    return arms if len({*methods}) < len(methods) else dict(zip(methods, arms.values()))


# names at the ends of lines

def places(wanted, gap, low, high):
    """Heights near the wanted ones, at least gap apart, in [low, high] if they fit: the
    nearest in least squares."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks = []
    # less their n gaps, heights must only not fall: pool neighbours that do (isotonic regression)
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
    gap = 8.5 * pt / box.height
    heights = places([y for _, y in points], gap, low=0.01, high=0.97)
    for (name, colour, _), point, y in zip(ends, points, heights):
        arrow = dict(arrowstyle="-", color=colour, lw=0.5, shrinkA=0, shrinkB=2,
                     relpos=(0, 0.5))
        if point[0] < 0.9:  # far from the end of the axis it would look like a curve
            arrow["ls"] = (0, (1, 3))
        ax.annotate(name, xy=point, xytext=(1 + 16 * pt / box.width, y), fontsize=7.5,
                    xycoords="axes fraction", textcoords="axes fraction", color=colour,
                    va="center", annotation_clip=False, arrowprops=arrow,
                    parse_math=False)


def beside(ax, ends):
    """Write names beside dots, in the nearest place inside of the axes where no other name is and
    as little as possible is drawn. ends: as for `label`"""
    for old in list(ax.texts):
        old.remove()
    frame, pt = ax.get_window_extent(), ax.figure.dpi / 72
    # the whole of a line, not its ends alone
    paths = [ax.transData.transform_path(each.get_path().interpolated(20))
             for each in ax.lines]
    drawn = np.concatenate([path.vertices for path in paths])
    around = [np.array([math.cos(x), math.sin(x)]) for x in np.arange(16) * math.pi / 8]
    taken = []
    for name, colour, end in ends:
        arrow = dict(arrowstyle="-", color=colour, lw=0.7, ls=(0, (1, 1.5)), shrinkA=0,
                     shrinkB=4)
        text = ax.annotate(name, end, xytext=(0, 0), textcoords="offset points",
                           color=colour, ha="center", va="center", parse_math=False,
                           arrowprops=arrow)
        here = text.get_window_extent().padded(2 * pt)

        def way(move):
            """Pixels of the line from the dot to the middle of the name."""
            along = np.linspace(0, 1, 21)[:, None]
            return (here.min + here.max) / 2 + along * move * pt

        def cost(move):
            box = here.translated(*(move * pt))
            inside = frame.contains(*box.min) and frame.contains(*box.max)
            crossed = sum(other.count_contains(way(move)) for other in taken)
            return (not inside, box.count_overlaps(taken), crossed,
                    box.padded(5 * pt).count_contains(drawn))

        # in points; the first of those that are equally good
        move = min((x * (far + here.size / pt / 2) for far in range(6, 100, 6)
                    for x in around), key=cost)
        text.set_position(move)
        taken.append(here.translated(*(move * pt)))
        drawn = np.concatenate([drawn, way(move)])


# panels, by step

def curve(ax, arms, key, change=list, positive=False, middle=fmean):
    """A line for each arm: key, changed by f, the middle of seeds. -> ends for `label`"""
    ends = []
    for name, style in looks(arms).items():
        steps, values = over_seeds(arms[name], key, change)
        points = [(step, y) for step, y in zip(steps, map(middle, values))
                  if y > 0 or not positive]
        if points:
            ax.plot(*zip(*points), **style)
            ends.append((name, style["color"], points[-1]))
    return ends


def spread_of(ax, arms, key, many=MANY_SEEDS):
    """Around the lines of `curve` each seed, or of many seeds the interval of their mean. -> what
    was drawn"""
    seeds = max(len(arm["logs"]) for arm in arms.values())
    faint = 0.5 if len(arms) < 6 else 0.25
    for name, style in looks(arms).items():
        arm, colour = arms[name], style["color"]
        steps, values = over_seeds(arm, key)
        if seeds < many:
            ax.plot(steps, values, color=colour, lw=0.6, alpha=faint, zorder=1.5)
        elif len(arm["logs"]) > 1:
            low, high = zip(*[(mean - half, mean + half)
                              for mean, half in map(interval, values)])
            ax.fill_between(steps, low, high, color=colour, lw=0, alpha=0.12)
    if seeds >= many:
        return " (band: 95 % interval of the mean)"
    return " (thin: single seeds)" if seeds > 1 else ""


def reward_limits(arms, keys):
    """Lowest and highest of an axis that shows all rewards; they may lie outside of 0 .. 1."""
    rewards = [reward for key in keys for arm in arms.values()
               for values in series(arm, key) for reward in values] or [1]
    lowest, highest = min(rewards), max(rewards)
    top = 1.1 * highest
    if highest <= 1:
        top = min(1, max(1, math.ceil(11 * highest)) / 10)
    return min(0, 1.1 * lowest), top


def draw_reward(ax, arms, cache, many=MANY_SEEDS):
    ends = curve(ax, arms, CACHES[cache])
    more = spread_of(ax, arms, CACHES[cache], many)
    # of both panels, which are to be compared
    limits = reward_limits(arms, CACHES.values())
    ax.set(ylabel="held-out reward", ylim=limits, title=f"Served {cache}{more}")
    return ends


def draw_gap(ax, arms, last=LAST):
    averaged = partial(logs.smooth, last=last)
    ends = curve(ax, arms, "gap", averaged, positive=True)  # 0 has no logarithm
    ax.set(ylabel=f"nats, mean of {last} steps", yscale="log",
           title="Gap: mean |log-prob of learner - sampler|")
    ax.minorticks_off()
    low, high = ax.get_ylim()
    # two powers of ten at least, so that one is named
    wider = max(1, 10 * (low / high) ** 0.5)
    ax.set_ylim(low / wider, high * wider)
    return ends


def draw_acceptance(ax, arms, key):
    """key: accept, logged in every step, or eval_accept"""
    change, where = list, "of held-out tokens"
    if key == "accept":
        change, where = logs.smooth, f"mean of {LAST} steps"
    ends = curve(ax, arms, f"{key}_p05", change)
    ax.set(ylabel="overlap of the policies", ylim=(0, 1),
           title=f"Acceptance: 5th percentile {where}")
    return ends


def figure(arms, path):
    """Rewards under both caches, gap and acceptance by step, as a PNG for a page 900 px wide."""
    arms = {name: arm for name, arm in arms.items() if arm["logs"]}
    if not arms:
        tell("no figure: no run has ended", sys.stderr)
        return
    if not can_draw():
        return
    panels = dict(A=partial(draw_reward, arms=arms, cache="compressed"),
                  B=partial(draw_reward, arms=arms, cache="dense"),
                  C=partial(draw_gap, arms=arms))
    # held-out acceptance, where logged, covers arms that replay one policy only
    logged = [key for key in ("eval_accept", "accept")
              if any(any(series(arm, key)) for arm in arms.values())]
    if logged:
        panels["D"] = partial(draw_acceptance, arms=arms, key=logged[0])
    height = max(6, 0.36 * len(arms))  # inches; labels need room
    write_panels(path, panels, by_step(last_step(arms)),
                 mosaic="AB;CD" if logged else "AB;CC", figsize=(9, height),
                 height_ratios=(1.25, 1))


def by_step(steps):
    """An axis for write_panels."""
    return dict(xlabel="step", xlim=(0, steps))


def last_step(arms):
    return max(log[-1]["step"] for arm in arms.values() for log in arm["logs"].values())


# curves, dots and bases: for a page 800 px wide

def two_panels(path, draw, x, **options):
    """Served compressed beside served dense, on one axis of rewards."""
    def panel(ax, cache):
        ends = draw(ax, cache=cache, **options)
        ax.set(ylim=WHOLE)
        return ends
    panels = dict(A=partial(panel, cache="compressed"), B=partial(panel, cache="dense"))
    write_panels(path, panels, x, mosaic="AB", figsize=(7, 3.1))


def draw_curves(arms, path):
    two_panels(path, draw_reward, by_step(last_step(arms)), arms=arms, many=math.inf)


def at_start(arms, cache):
    """Mean reward before training."""
    return fmean(log[0][CACHES[cache]]
                 for arm in arms.values() for log in arm["logs"].values())


def draw_both(ax, arms):
    """Each arm as a dot at its rewards under both caches. -> ends for `beside`"""
    ends = [(BEFORE, GREY, tuple(at_start(arms, cache) for cache in CACHES))]
    ax.plot(*ends[0][2], color=GREY, marker="s", ms=8)
    for name, style in looks(arms).items():
        seeds = [[*results(arms[name], key).values()] for key in CACHES.values()]
        middle = tuple(map(fmean, seeds))
        dots = dict(color=style["color"], marker="o", ls="", mew=0,
                    zorder=style["zorder"])
        ax.plot(*seeds, ms=3.5, alpha=0.5, **dots)
        ax.plot(*middle, ms=6 + 1.5 * style["lw"], **dots)
        if len(seeds[0]) > 1:
            (x, wide), (y, high) = map(interval, seeds)
            for cross in ([x - wide, x + wide], [y, y]), ([x, x], [y - high, y + high]):
                ax.plot(*cross, color=style["color"], lw=0.8)
        ends.append((name, style["color"], middle))
    ax.set(ylabel="held-out reward, served dense", ylim=WHOLE, aspect="equal",
           title="After training (small: single seeds; cross: 95 % intervals of the "
                 "mean)")
    return ends


def draw_dots(arms, path):
    x = dict(xlabel="held-out reward, served compressed", xlim=WHOLE)
    write_panels(path, dict(A=partial(draw_both, arms=arms)), x, put_names=beside,
                 mosaic="A", figsize=(5, 5))


def read_bases(folders):
    """-> [(dense reward before training, {method: arm})], the lowest first. Raises ValueError for
    two arms of one method."""
    bases = []
    for folder in folders:
        arms = ended_arms(folder)
        if [*arms] != [*map(method, arms)]:
            raise ValueError(f"{folder}: two arms of one method, of {', '.join(arms)}")
        bases.append((at_start(arms, "dense"), arms))
    return sorted(bases, key=lambda base: base[0])


def draw_ends(ax, bases, cache):
    """Rewards after training of each method by that of the base. -> ends for `label`"""
    points = [(x, at_start(arms, cache)) for x, arms in bases]
    ax.plot(*zip(*points), color=GREY, ls=DOTTED, marker="s", ms=4)
    ends = [(BEFORE, GREY, points[-1])]
    names = dict.fromkeys(name for _, arms in bases for name in arms)
    for name, style in looks(names).items():
        seeds = [(x, results(arms[name], CACHES[cache]).values())
                 for x, arms in bases if name in arms]
        points = [(x, fmean(values)) for x, values in seeds]
        ax.plot(*zip(*points), marker="o", ms=3 + style["lw"], **style)
        ax.plot(*zip(*[(x, y) for x, values in seeds for y in values]),
                color=style["color"], ls="", marker="o", ms=3, mew=0, alpha=0.5)
        ends.append((name, style["color"], points[-1]))
    ax.set(ylabel="held-out reward after training",
           title=f"Served {cache} (small: single seeds)")
    return ends


def draw_bases(bases, path):
    xs = [x for x, _ in bases]
    margin = max(0.02, 0.05 * (xs[-1] - xs[0]))
    x = dict(xlabel="dense reward of the base, before training",
             xlim=(xs[0] - margin, xs[-1] + margin))
    two_panels(path, draw_ends, x, bases=bases)


def ended_arms(folder, names=()):
    arms = by_method(logs.load(folder, names))
    if not arms:
        raise ValueError(f"no run has ended in {folder!r}")
    return arms


def main(argv=None):
    args = Arguments("curves", "draw rewards of arms under both caches")
    args.add_argument("folder", help="logs, as ablate writes or keeps them")
    args.add_argument("names", nargs="*",
                      help="arms, else all of them; with --bases=True: more folders")
    args.add_argument("--out", default="curves.png", help="the picture, a .png")
    args.add_argument("--dots", default=False, type=bool,
                      help="draw one reward against the other")
    args.add_argument("--bases", default=False, type=bool,
                      help="draw rewards against those of the base")
    args = args.parse_args(argv)
    with one_line_errors(ValueError, OSError):
        if args.dots and args.bases:
            raise ValueError("--dots and --bases are two figures: ask for one")
        draw = draw_dots if args.dots else draw_curves
        if args.bases:
            draw, what = draw_bases, read_bases([args.folder, *args.names])
        else:
            what = ended_arms(args.folder, args.names)
        check_out(args.out)
        draw(what, args.out)
        tell(f"picture written to {args.out}")


if __name__ == "__main__":
    main()
