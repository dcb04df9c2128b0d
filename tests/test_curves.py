"""experiments/curves.py: the looks of arms and the pictures that it draws of kept logs, for
ablate.py and plot.py too."""
import json
import sys
from itertools import combinations

import pytest

from experiments import curves
from experiments.logs import load


def put(folder, name, seed, p05, before, after):
    """A kept log of two steps; before and after: (compressed, dense)"""
    rows = [dict(step=0, eval_compressed=before[0], eval_dense=before[1], eval_accept=0.9,
                 eval_accept_p05=p05)]
    rows += [dict(step=s, reward=0.5, gap=0.1, kv_kept=1, kv_dense=9, kv_dense_shared=3,
                  seconds=1.0) for s in (0, 1)]
    rows.append(dict(step=2, eval_compressed=after[0], eval_dense=after[1]))
    with open(folder / f"{name.replace(' ', ',')}-{seed}.jsonl", "w") as f:
        f.writelines(json.dumps({k: x for k, x in r.items() if x is not None}) + "\n" for r in rows)


def settings(folder, **arms):
    arms = {name: dict(args=args, seeds=[0, 1], steps=2) for name, args in arms.items()}
    (folder / "settings.json").write_text(json.dumps(arms))


def filled(folder):
    folder.mkdir()
    for seed in (0, 1):
        put(folder, "dense", seed, p05=0.25, before=(0.5, 0.75), after=(0.25, 1.0))
        put(folder, "smd task=kv16 budget=40", seed, p05=0.5, before=(0.5, 0.75),
            after=(0.75 + seed / 8, 0.875))
    put(folder, "smd budget=30", 0, p05=0.25, before=(0.5, 0.75), after=(0.625, 0.75))
    settings(folder, **{"dense": "config/dense.py --task=kv '--budget=30'",
                        "smd task=kv16 budget=40": "config/smd.py --budget=24 --budget=40",
                        "smd budget=30": "config/smd.py --budget=30"})
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
    many = curves.looks([*curves.LOOKS, *(f"own{i}" for i in range(13))])
    assert len({(look["color"], look["ls"]) for look in many.values()}) == 32


def test_names_without_options_where_they_do():
    arms = {name: dict(logs={0: []}) for name in MAIN} | {"smd lr=1": dict(logs={})}
    assert [*curves.by_method(arms)] == ["dense", "naive", "tis", "shadow", "smd"]
    arms["smd lr=1"]["logs"] = {0: []}
    assert [*curves.by_method(arms)] == [*MAIN, "smd lr=1"]


# the command of curves.py

SMD = "smd task=kv16 budget=40"


def points_of(line):
    return [tuple(map(float, point)) for point in zip(*line.get_data())]


@pytest.mark.parametrize("options, size", [
    ([], (620, 1400)), (["--dots=True"], (1000, 1000)), (["--bases=True"], (620, 1400))])
def test_pictures_are_drawn(options, size, tmp_path, capsys):
    """In the place of a link that somebody planted."""
    pytest.importorskip("matplotlib")
    import matplotlib.image
    names = [] if "--bases=True" in options else [SMD, "dense"]
    folder, path = filled(tmp_path / "arms"), tmp_path / "new" / "curves.png"
    (folder / "smd,budget=30-0.jsonl").unlink()  # no run of it has ended: it is left out
    path.parent.mkdir()
    (tmp_path / "theirs").write_text("theirs")
    path.symlink_to(tmp_path / "theirs")
    curves.main([str(folder), *names, *options, f"--out={path}"])
    assert (tmp_path / "theirs").read_text() == "theirs" and not path.is_symlink()
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == size and image.std() > 0.02
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
    logarithm. Without matplotlib a line says so."""
    pytest.importorskip("matplotlib")
    import matplotlib.image
    arms = at_rewards(*[0.5] * 9, gap=1e-6, accept_p05=0.5)
    arms["arm1"]["logs"][0][1]["gap"] = 0.0
    path = tmp_path / "ablate.png"
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        curves.figure(arms, str(path))
    said = "no figure: the picture needs matplotlib: pip install matplotlib\n"
    assert capsys.readouterr().err == said and not path.exists()
    curves.figure(arms, str(path))
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (1200, 1800) and image.std() > 0.02
    assert [p.name for p in tmp_path.iterdir()] == ["ablate.png"]


@pytest.mark.parametrize("seeds, says, lines, bands", [
    (1, "", 1, 0), (7, "thin: single seeds", 7, 0),
    (8, "band: 95 % interval of the mean", 0, 1)])
def test_seeds_in_the_figure(seeds, says, lines, bands):
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().subplots()
    ends = at_rewards(*(0.5 + seed / 32 for seed in range(seeds)))
    arms = dict(a=dict(logs={seed: ends[f"arm{seed}"]["logs"][0] for seed in range(seeds)}))
    assert curves.spread_of(ax, arms, "eval_compressed").strip(" ()") == says
    assert (len(ax.lines), len(ax.collections)) == (lines, bands)
    if bands:  # at the end 0.5 + i / 32, i from 0 to 7: mean 0.609, 2.3646 x 0.0765 / sqrt(8)
        top = max(y for _, y in ax.collections[0].get_paths()[0].vertices)
        assert top == pytest.approx(0.609375 + 2.364624 * 0.0765466 / 8 ** 0.5, abs=1e-5)


@pytest.mark.parametrize("rewards, top", [
    ((0.0, 0.0), 0.1), ((0.2, 0.31), 0.4), ((0.5, 0.99), 1)])
def test_the_axis_shows_all_rewards(rewards, top):
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().subplots()
    for cache in ("compressed", "dense"):  # both panels alike
        curves.draw_reward(ax, at_rewards(*rewards), cache)
        assert ax.get_ylim() == (0, pytest.approx(top)) and max(rewards) <= top
    assert curves.reward_limits(at_rewards(-2.0, 0.5), ["reward"]) == (
        pytest.approx(-2.2), 0.6)
    assert curves.reward_limits(at_rewards(0.5), ["another"]) == (0, 1)


@pytest.mark.parametrize("gaps, powers", [([1e-6, 2e-6], 2), ([1e-7, 1e-1], 6.6)])
def test_the_axis_of_gaps_has_a_power_of_ten(gaps, powers):
    """With margins."""
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().subplots()
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
    wanted = [(7 * i % 10) / 5 for i in range(10)]
    at = places(wanted, 0.5)
    assert all(abs(x - y) >= 0.5 - 1e-9 for i, x in enumerate(at) for y in at[:i])
    assert 0 <= min(at) <= max(at) <= 10
    assert sorted(range(10), key=at.__getitem__) == sorted(range(10), key=wanted.__getitem__)


def test_each_seed_is_drawn(tmp_path):
    """However many there are, and both panels have one axis."""
    figure = pytest.importorskip("matplotlib.figure")
    for seed in range(9):
        put(tmp_path, "smd", seed, p05=0.5, before=(0.5, 0.75), after=(seed / 10, 1.0))
    ax = figure.Figure().subplots()
    ends = curves.draw_reward(ax, load(str(tmp_path)), cache="compressed", many=10)
    assert ends == [("smd", curves.BLUE, (2, pytest.approx(0.4)))]
    assert [points_of(line)[-1] for line in ax.lines[1:]] == [(2, i / 10) for i in range(9)]
    assert not ax.collections and "single seeds" in ax.get_title()
    ax = figure.Figure().subplots()  # control: as many as elsewhere are a band
    curves.draw_reward(ax, load(str(tmp_path)), cache="compressed")
    assert len(ax.lines) == 1 and len(ax.collections) == 1


def test_dots_stand_at_the_rewards(tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().subplots()
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


def test_names_of_dots_do_not_overlap(tmp_path, monkeypatch):
    """Seven dots in one place, in a corner."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox
    folder, found, beside = tmp_path / "arms", [], curves.beside
    folder.mkdir()
    for name in ["dense", "naive", "tis", "shadow", "smd", "smd_reverse"]:
        put(folder, name, 0, p05=0.5, before=(1.0, 1.0), after=(1.0, 1.0))

    def spy(ax, ends):
        beside(ax, ends)
        boxes = [Text.get_window_extent(text) for text in ax.texts]
        inside = ax.get_window_extent()
        assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in boxes)
        found[:] = [text.get_text() for text in ax.texts], boxes
        for text in ax.texts:  # the control: all to the left of the dot
            text.set_position((-30, 0))
        found.append([Text.get_window_extent(text) for text in ax.texts])

    monkeypatch.setattr(curves, "beside", spy)
    curves.main([str(folder), "--dots=True", f"--out={tmp_path / 'dots.png'}"])
    names, boxes, control = found
    assert len(names) == 7 and {"smd", "before training"} < {*names}
    assert not any(Bbox.intersection(a, b) for a, b in combinations(boxes, 2))
    assert all(Bbox.intersection(a, b) for a, b in combinations(control, 2))


def base(folder, start, ends):
    """Kept logs of one base: arms whose seeds end at these rewards in both caches."""
    folder.mkdir()
    for name, rewards in ends.items():
        for seed, reward in enumerate(rewards):
            put(folder, name, seed, p05=0.5, before=(start / 2, start), after=(reward, reward))
    return str(folder)


def test_bases_are_sorted_and_drawn_where_they_are(tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    strong = base(tmp_path / "a", 0.75, {"smd lr=1e-3": [0.5, 1.0], "shadow": [0.25]})
    weak = base(tmp_path / "b", 0.25, {"shadow": [0.125], "smd": [0.5, 0.75]})
    bases = curves.read_bases([strong, weak])
    assert [(x, {*arms}) for x, arms in bases] == [(x, {"smd", "shadow"}) for x in (0.25, 0.75)]
    ax = figure.Figure().subplots()
    ends = curves.draw_ends(ax, bases, cache="compressed")
    lines = dict(zip(["before", "shadow", "of shadow", "smd", "of smd"], ax.lines))
    assert points_of(lines["before"]) == [(0.25, 0.125), (0.75, 0.375)]
    assert points_of(lines["shadow"]) == [(0.25, 0.125), (0.75, 0.25)]
    assert points_of(lines["smd"]) == [(0.25, 0.625), (0.75, 0.75)]
    assert points_of(lines["of smd"]) == [(0.25, 0.5), (0.25, 0.75), (0.75, 0.5), (0.75, 1.0)]
    assert {name: end for name, _, end in ends} == {
        "before training": (0.75, 0.375), "shadow": (0.75, 0.25), "smd": (0.75, 0.75)}


@pytest.mark.parametrize("argv, says", [
    (["none"], "no log in 'none'"), (["none", "arms", "--bases=True"], "no log in 'none'"),
    (["arms", "mis"], "no arm 'mis' in 'arms'"), (["cut"], "no run has ended in 'cut'"),
    (["arms", "--bases=True"], "arms: two arms of one method"), ([], "folder"),
    (["arms", "--dots=True", "--bases=True"], "two figures"),
    (["arms", "--dots=maybe"], "invalid bool value: 'maybe'"),
    (["arms", "--out=x.pdf"], "name a .png")])
def test_curves_refuse_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(tmp_path / "arms")
    (tmp_path / "cut").mkdir()
    put(tmp_path / "cut", "smd", 0, p05=0.5, before=(0.5, 0.5), after=(0.5, 0.5))
    log = tmp_path / "cut" / "smd-0.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(SystemExit) as e:
        curves.main(argv)
    assert str(e.value).startswith("error: ") and says in str(e.value)
    assert "\n" not in str(e.value) and not (tmp_path / "curves.png").exists()
