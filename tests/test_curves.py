"""experiments/curves.py: the looks of arms and the pictures that it draws of kept logs, for
ablate.py and plot.py too."""
import json
import sys
from itertools import combinations

import pytest

from experiments import curves


def put(folder, name, seed, before, after):
    """A kept log of two steps; before and after: (compressed, dense)"""
    rows = [dict(step=0, eval_compressed=before[0], eval_dense=before[1], eval_accept_p05=0.5)]
    rows += [dict(step=s, reward=0.5, gap=0.1, kv_kept=1, kv_dense=9, kv_dense_shared=3,
                  seconds=1.0) for s in (0, 1)]
    rows.append(dict(step=2, eval_compressed=after[0], eval_dense=after[1]))
    with open(folder / f"{name.replace(' ', ',')}-{seed}.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


SMD = "smd task=kv16 budget=40"


@pytest.fixture
def axes():
    """-> a function that makes axes of a figure"""
    figure = pytest.importorskip("matplotlib.figure")
    return lambda: figure.Figure().subplots()


def filled(folder):
    folder.mkdir()
    for seed in (0, 1):
        put(folder, "dense", seed, before=(0.5, 0.75), after=(0.25, 1.0))
        put(folder, SMD, seed, before=(0.5, 0.75), after=(0.75 + seed / 8, 0.875))
    put(folder, "smd budget=30", 0, before=(0.5, 0.75), after=(0.625, 0.75))
    return folder


# looks, the same in every figure

MAIN = ["dense lr=1e-4", "naive lr=1e-4", "tis lr=1e-4", "shadow lr=3e-4", "smd lr=1e-3"]


def test_a_method_has_one_look():
    looks = curves.looks(MAIN)
    assert len({look["color"] for look in looks.values()}) == len(MAIN)
    assert max(looks, key=lambda name: looks[name]["lw"]) == "smd lr=1e-3"
    for name in MAIN:  # whatever else is in the figure, and in whatever order
        assert curves.looks([*MAIN[::-1], "own"])[name] == looks[name]
        assert curves.looks([name.split()[0]]) == {name.split()[0]: looks[name]}
    assert len({*curves.LOOKS.values()}) == len(curves.LOOKS)


def test_arms_of_one_method_differ():
    alone = curves.looks(["smd lr=1e-3"])["smd lr=1e-3"]
    both = curves.looks(["smd lr=1e-3", "smd lr=1e-4", "naive"])
    shown = [(look["color"], look["ls"]) for look in both.values()]
    assert len({*shown}) == 3 and alone not in both.values()
    assert both["naive"] == curves.looks(["naive"])["naive"]
    bare = curves.looks(["smd", "smd lr=1e-4"])  # that without options is the method itself
    assert bare["smd"] == alone != bare["smd lr=1e-4"]
    assert curves.looks(["anchor", "a", "b"])["b"]["color"] == curves.BLUE  # green is taken
    many = curves.looks([*curves.LOOKS, *(f"own{i}" for i in range(13))])
    assert len({(look["color"], look["ls"]) for look in many.values()}) == 32


def test_names_without_options_where_they_do():
    arms = {name: dict(logs={0: []}) for name in MAIN} | {"smd lr=1": dict(logs={})}
    assert [*curves.by_method(arms)] == ["dense", "naive", "tis", "shadow", "smd"]
    arms["smd lr=1"]["logs"] = {0: []}
    assert [*curves.by_method(arms)] == [*MAIN, "smd lr=1"]


# the command of curves.py

def points_of(line):
    return [tuple(map(float, point)) for point in zip(*line.get_data())]


@pytest.mark.parametrize("options, size", [
    ([], (620, 1400)), (["--dots=True"], (1000, 1000)), (["--bases=True"], (620, 1400))])
def test_pictures_are_drawn(options, size, tmp_path, capsys):
    """In the place of a link that somebody planted."""
    image = pytest.importorskip("matplotlib.image")
    names = [] if "--bases=True" in options else [SMD, "dense"]
    folder, path = filled(tmp_path / "arms"), tmp_path / "new" / "curves.png"
    (folder / "smd,budget=30-0.jsonl").unlink()  # no run of it has ended: it is left out
    path.parent.mkdir()
    (tmp_path / "theirs").write_text("theirs")
    path.symlink_to(tmp_path / "theirs")
    curves.main([str(folder), *names, *options, f"--out={path}"])
    assert (tmp_path / "theirs").read_text() == "theirs" and not path.is_symlink()
    pixels = image.imread(path)
    assert pixels.shape[:2] == size and pixels.std() > 0.02
    assert capsys.readouterr().out == f"picture written to {path}\n"
    assert [p.name for p in path.parent.iterdir()] == ["curves.png"]


def at_rewards(*rewards, **numbers):
    """Arms of one seed each, by number, that end at these rewards, compressed."""
    return {f"arm{i}": dict(logs={0: [
        dict(step=0, eval_compressed=0.0, eval_dense=0.0, reward=0.0, **numbers),
        dict(step=1, eval_compressed=x, eval_dense=x / 2, reward=x, **numbers)]})
        for i, x in enumerate(rewards)}


def test_the_figure_of_ablate_is_written(tmp_path, monkeypatch, capsys):
    """All lines end at one height, the hardest case for labels; one gap is 0, which has no
    logarithm. Without matplotlib, or a run that ended, a line says so."""
    image = pytest.importorskip("matplotlib.image")
    arms = at_rewards(*[0.5] * 9, gap=1e-6, accept_p05=0.5)
    arms["arm1"]["logs"][0][1]["gap"] = 0.0
    path = tmp_path / "ablate.png"
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        curves.figure(arms, str(path))
    curves.figure(dict(cut=dict(logs={})), str(path))
    said = "no figure: the picture needs matplotlib: pip install matplotlib\n"
    assert capsys.readouterr().err == said + "no figure: no run has ended\n" and not path.exists()
    curves.figure(arms, str(path))
    pixels = image.imread(path)
    assert pixels.shape[:2] == (1200, 1800) and pixels.std() > 0.02


@pytest.mark.parametrize("seeds, many, says, lines, bands", [
    (1, 8, "", 1, 0), (7, 8, " (thin: single seeds)", 7, 0), (9, 10, " (thin: single seeds)", 9, 0),
    (8, 8, " (band: 95 % interval of the mean)", 0, 1)])
def test_seeds_in_the_figure(axes, seeds, many, says, lines, bands):
    """Each of few, the interval of many."""
    ax = axes()
    arms = at_rewards(*(0.5 + seed / 32 for seed in range(seeds)))
    arms = dict(smd=dict(logs={seed: arms[f"arm{seed}"]["logs"][0] for seed in range(seeds)}))
    ends = curves.draw_reward(ax, arms, cache="compressed", many=many)
    assert ends == [("smd", curves.BLUE, (1, pytest.approx(0.5 + (seeds - 1) / 64)))]
    assert ax.get_title(loc="center").partition("compressed")[2] == says
    assert [points_of(line)[-1] for line in ax.lines[1:]] == [
        (1, 0.5 + seed / 32) for seed in range(lines)]
    assert len(ax.collections) == bands
    if bands:  # at the end 0.5 + i / 32, i from 0 to 7: mean 0.609, 2.3646 x 0.0765 / sqrt(8)
        top = max(y for _, y in ax.collections[0].get_paths()[0].vertices)
        assert top == pytest.approx(0.609375 + 2.364624 * 0.0765466 / 8 ** 0.5, abs=1e-5)


@pytest.mark.parametrize("rewards, top", [
    ((0.0, 0.0), 0.1), ((0.2, 0.31), 0.4), ((0.5, 0.99), 1)])
def test_the_axis_shows_all_rewards(axes, rewards, top):
    ax = axes()
    for cache in ("compressed", "dense"):  # both panels alike
        curves.draw_reward(ax, at_rewards(*rewards), cache)
        assert ax.get_ylim() == (0, pytest.approx(top)) and max(rewards) <= top
    assert curves.reward_limits(at_rewards(-2.0, 0.5), ["reward"]) == (pytest.approx(-2.2), 0.6)
    assert curves.reward_limits(at_rewards(0.5), ["another"]) == (0, 1)


@pytest.mark.parametrize("gaps, powers", [([1e-6, 2e-6], 2), ([1e-7, 1e-1], 6.6)])
def test_the_axis_of_gaps_has_a_power_of_ten(axes, gaps, powers):
    """With margins."""
    ax = axes()
    log = [dict(step=step, gap=gap) for step, gap in enumerate(gaps)]
    curves.draw_gap(ax, dict(a=dict(logs={0: log})), last=1)
    low, high = ax.get_ylim()
    assert low < gaps[0] < gaps[1] < high
    assert high / low == pytest.approx(10 ** powers, rel=0.01)


def test_places():
    def places(wanted, gap=1):
        return curves.places(wanted, gap, low=0, high=10)

    assert places([]) == [] and places([5.0, 2.0]) == [5, 2]
    assert places([5.0, 5.0, 5.0]) == [4, 5, 6] and places([0.2, 0.1, 9.0]) == [1, 0, 9]
    assert places([9.9, 9.8, 9.7]) == [10, 9, 8]
    assert places([(7 * i % 10) / 5 for i in range(10)], 0.5) == pytest.approx(
        [(7 * i % 10) / 2 for i in range(10)])


def test_dots_stand_at_the_rewards(axes, tmp_path):
    ax = axes()
    arms = curves.ended_arms(str(filled(tmp_path / "arms")), [SMD, "dense"])
    ends = curves.draw_both(ax, arms)
    assert ends == [("before training", curves.GREY, (0.5, 0.75)),
                    ("smd", curves.BLUE, (0.8125, 0.875)), ("dense", curves.BLACK, (0.25, 1.0))]
    square, seeds, middle, across, up = ax.lines[:5]
    assert (square.get_marker(), points_of(square)) == ("s", [(0.5, 0.75)])
    assert points_of(seeds) == [(0.75, 0.875), (0.875, 0.875)]
    assert points_of(middle) == [(0.8125, 0.875)]
    assert middle.get_markersize() > 2 * seeds.get_markersize()
    half = 12.7062 * 0.0625  # Student's t of 1 degree, times deviation / sqrt(2)
    assert across.get_xdata() == pytest.approx([0.8125 - half, 0.8125 + half], abs=1e-4)
    assert points_of(up) == [(0.8125, 0.875)] * 2  # both seeds are alike
    assert ax.get_ylim() == curves.WHOLE and ax.get_aspect() == 1


def test_names_of_dots_do_not_overlap():
    """Seven dots in one place, in a corner."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox
    figure, ax = pyplot.subplots(figsize=(5, 5))
    names = ["before training", "dense", "naive", "tis", "shadow", "smd", "smd_reverse"]
    ax.plot(1.0, 1.0, marker="o")
    ax.set(xlim=curves.WHOLE, ylim=curves.WHOLE)
    curves.beside(ax, [(name, curves.BLUE, (1.0, 1.0)) for name in names])
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    inside = ax.get_window_extent()
    assert [text.get_text() for text in ax.texts] == names
    assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in boxes)
    assert not any(Bbox.intersection(a, b) for a, b in combinations(boxes, 2))
    for text in ax.texts:  # the control: all to the left of the dot
        text.set_position((-30, 0))
    boxes = [Text.get_window_extent(text) for text in ax.texts]
    assert all(Bbox.intersection(a, b) for a, b in combinations(boxes, 2))
    pyplot.close(figure)


def test_bases_are_sorted_and_drawn_where_they_are(axes, tmp_path):
    for folder, start, ends in (("a", 0.75, {"smd lr=1e-3": [0.5, 1.0], "shadow": [0.25]}),
                                ("b", 0.25, {"shadow": [0.125], "smd": [0.5, 0.75]})):
        (tmp_path / folder).mkdir()
        for name, rewards in ends.items():
            for seed, reward in enumerate(rewards):
                put(tmp_path / folder, name, seed, before=(start / 2, start), after=[reward] * 2)
    bases = curves.read_bases([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [(x, {*arms}) for x, arms in bases] == [(x, {"smd", "shadow"}) for x in (0.25, 0.75)]
    ax = axes()
    ends = curves.draw_ends(ax, bases, cache="compressed")
    before, shadow, _, smd, of_smd = map(points_of, ax.lines)
    assert before == [(0.25, 0.125), (0.75, 0.375)] and shadow == [(0.25, 0.125), (0.75, 0.25)]
    assert smd == [(0.25, 0.625), (0.75, 0.75)]
    assert of_smd == [(0.25, 0.5), (0.25, 0.75), (0.75, 0.5), (0.75, 1.0)]
    assert {name: end for name, _, end in ends} == {
        "before training": (0.75, 0.375), "shadow": (0.75, 0.25), "smd": (0.75, 0.75)}


@pytest.mark.parametrize("argv, says", [
    (["none", "arms", "--bases=True"], "no log in 'none'"),
    (["arms", "mis"], "no arm 'mis' in 'arms'"), (["cut"], "no run has ended in 'cut'"),
    (["arms", "--bases=True"], "arms: two arms of one method"), ([], "folder"),
    (["arms", "--dots=True", "--bases=True"], "two figures"),
    (["arms", "--dots=maybe"], "invalid bool value: 'maybe'"),
    (["arms", "--out=x.pdf"], "name a .png")])
def test_curves_refuse_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(tmp_path / "arms")
    (tmp_path / "cut").mkdir()
    log = (tmp_path / "arms" / "dense-0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "smd-0.jsonl").write_text("".join(log[:-1]))
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{says}[^\n]*$"):
        curves.main(argv)
    assert not (tmp_path / "curves.png").exists()
