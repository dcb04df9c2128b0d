"""
Curves of runs of train.py, also while they run.

    python -m experiments.plot out                       # draws out/plot.png; needs matplotlib
    python -m experiments.plot out out-naive --out=both.png

The idea. What one watches: the sampled reward and the length of responses, the held-out reward
under both caches, gap and acceptance, and below them a row for each further number of a reward of
one's own: sampled, and held-out under both caches. A run is named by its folder. It may be at its
beginning, at work, cut or resumed: whatever whole lines its log has are drawn, and a name stands
where its line ends. A thin line is a step's own value. Groups of runs with seeds and intervals:
ablate.py.
"""
import os
from functools import partial

from experiments import curves
from experiments.logs import CACHES, LAST, NAMED, read, smooth
from support.configurator import Arguments
from support.run import is_of_a_run
from support.screen import one_line_errors, tell

LONGEST = 24  # characters of a name beside a line
MOST = 8      # numbers of a reward of one's own that are drawn


def read_runs(folders):
    """-> {name: dict(logs={0: rows})} of the folders' runs that have logged something. Raises
    FileNotFoundError for a folder without a log that is no run's either, ValueError for a log that
    train.py did not write."""
    runs = {}
    for folder, name in names_of(folders).items():
        path = os.path.join(folder, "log.jsonl")
        rows = []
        if os.path.exists(path) or not is_of_a_run(os.path.join(folder, "config.json")):
            rows = read(path)
        if rows:
            runs[name] = dict(logs={0: rows})
        else:
            tell(f"{folder}: nothing logged yet")
    return runs


def names_of(folders):
    """{folder: its own name, its path where two are called the same}; long ones without their
    middle, unless that makes two of them one."""
    paths = list(dict.fromkeys(map(os.path.normpath, folders)))
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    names = [path if names.count(name) > 1 else name
             for path, name in zip(paths, names)]
    short = [name if len(name) <= LONGEST else f"{name[:10]}...{name[-11:]}"
             for name in names]
    return dict(zip(paths, short if len({*short}) == len({*names}) else names))


def own_numbers(runs):
    """The names of what a reward of one's own returned beside the reward, sorted."""
    keys = {key for run in runs.values() for row in run["logs"][0] for key in row}
    names = sorted({key.removeprefix(start) for key in keys for start in NAMED
                    if key.startswith(start)})
    names = [name for name in names if name.isidentifier()]  # others no run has written
    if len(names) > MOST:
        tell(f"{len(names)} further numbers of rewards: the first {MOST} are drawn")
    return names[:MOST]


def draw_steps(ax, runs, key, last, **labels):
    """What each step logged under key, and the mean of the last ones."""
    for name, style in curves.looks(runs).items():
        rows = [row for row in runs[name]["logs"][0] if key in row]
        ax.plot([row["step"] for row in rows], [row[key] for row in rows], lw=0.5,
                color=style["color"], alpha=0.25)
    ax.set(**labels)
    return curves.curve(ax, runs, key, partial(smooth, last=last))


def draw_evaluations(ax, panel, title=None, **options):
    """What `panel` draws, each evaluation with a mark: there may be one only."""
    ends = panel(ax, **options)
    if title:
        ax.set_title(title)
    for line in ax.lines:
        line.set(marker="o", markersize=2.5)
    return ends


def draw(runs, path):
    """Write the curves to path, for a page 900 px wide."""
    steps = max(run["logs"][0][-1]["step"] for run in runs.values())
    last = max(LAST, steps // 50)  # steps over which noisy numbers are averaged
    sampled = partial(draw_steps, runs=runs, last=last)

    def evaluated(panel, **options):
        return partial(draw_evaluations, panel=panel, **options)

    panels = dict(
        A=partial(sampled, key="reward", ylabel="sampled reward",
                  ylim=curves.reward_limits(runs, ["reward"]),
                  title=f"Reward, mean of {last} steps"),
        B=partial(sampled, key="length", ylabel="tokens", ylim=(0, None),
                  title=f"Length of responses, mean of {last} steps"),
        C=evaluated(curves.draw_reward, arms=runs, cache="compressed"),
        D=evaluated(curves.draw_reward, arms=runs, cache="dense"),
        E=partial(curves.draw_gap, arms=runs, last=last),
        F=evaluated(curves.draw_acceptance, arms=runs, key="eval_accept"))
    mosaic = [[name] * 3 + [other] * 3 for name, other in ("AB", "CD", "EF")]
    for name in own_numbers(runs):
        keys = [start + name for start in NAMED]
        mosaic.append([key for key in keys for _ in range(2)])
        title = f"{name:.{LONGEST}}, "
        panels[keys[0]] = partial(sampled, key=keys[0],
                                  title=f"{title}mean of {last} steps")
        for key, cache in zip(keys[1:], CACHES):
            panels[key] = evaluated(curves.curve, arms=runs, key=key,
                                    title=f"{title}served {cache}")
    height = max(2.5, 0.18 * len(runs))  # inches; labels need room
    curves.write_panels(path, panels, curves.by_step(max(1, steps)), mosaic=mosaic,
                        figsize=(9, height * len(mosaic)))


def main(argv=None):
    args = Arguments("plot", "draw the curves of runs of train.py")
    args.add_argument("folders", nargs="+", metavar="out_dir", help="folders of runs")
    args.add_argument("--out", default="",
                      help="the picture, a .png; else plot.png in the first folder")
    args = args.parse_args(argv)
    with one_line_errors(ValueError, OSError):
        runs = read_runs(args.folders)
        if not runs:
            raise ValueError("nothing to draw yet: no step and no evaluation")
        path = args.out or os.path.join(args.folders[0], "plot.png")
        curves.check_out(path)
        draw(runs, path)
        tell(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} drawn to {path}")


if __name__ == "__main__":
    main()
