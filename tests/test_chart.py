"""experiments/chart.py: what it reads of kept logs, and that it draws it."""
import json
import sys

import pytest

from conftest import ROOT
from experiments import chart


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


def test_what_is_read(tmp_path):
    dense, long, short = chart.read_points(str(filled(tmp_path / "map")))
    assert (dense["method"], dense["task"], dense["budget"]) == ("dense", "kv", "30")
    assert (long["method"], long["task"], long["budget"]) == ("smd", "kv16", "40")
    assert (short["task"], short["budget"]) == ("kv4", "30")  # the task of train.py
    assert (dense["x"], long["x"]) == (0.25, 0.5)
    assert long["compressed"] == dict(before={0: 0.5, 1: 0.5}, after={0: 0.75, 1: 0.875})
    assert long["dense"] == dict(before={0: 0.75, 1: 0.75}, after={0: 0.875, 1: 0.875})
    assert sorted(["kv16", "own", "kv", "kv4"], key=chart.by_length) == ["kv", "kv4", "kv16", "own"]


@pytest.mark.parametrize("argv, says", [
    (["whole", "--out=x.pdf"], "--out must name a .png"), ([], "no log in"),
    (["old"], "old: smd: its logs say nothing of acceptance"), (["cut"], "no run has ended in")])
def test_refused_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("old", "cut"):
        (tmp_path / name).mkdir()
        put(tmp_path / name, "smd", 0, p05=None, before=(0.5, 0.5), after=(0.5, 0.5))
    filled(tmp_path / "whole")
    log = tmp_path / "cut" / "smd-0.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(SystemExit) as e:
        chart.main(argv)
    assert str(e.value).startswith("error: ") and says in str(e.value)
    assert "\n" not in str(e.value) and not (tmp_path / "docs").exists()


def test_the_map_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import matplotlib.image
    path = tmp_path / "new" / "map.png"
    chart.main([str(filled(tmp_path / "map")), f"--out={path}"])
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (1120, 1800) and image.std() > 0.02
    assert capsys.readouterr().out == f"map written to {path}\n"
    assert [p.name for p in path.parent.iterdir()] == ["map.png"]


def test_more_methods_than_colours(tmp_path):
    """Colours come round again, that of the line of the dense arm too."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "map"
    folder.mkdir()
    names = [f"arm{i}" for i in range(len(chart.COLOURS))] + ["dense"]
    for name in names:
        put(folder, name, 0, p05=0.5, before=(0.5, 0.75), after=(0.25, 1.0))
    settings(folder, **dict.fromkeys(names, "config/any.py --task=kv"))
    chart.main([str(folder), f"--out={tmp_path / 'map.png'}"])
    assert (tmp_path / "map.png").exists()
    assert chart.colour(8) == chart.colour(0) != chart.colour(1)  # control: another one


def test_the_folders_of_the_map_hold_logs(monkeypatch):
    monkeypatch.chdir(ROOT)
    tasks = [{p["task"] for p in chart.read_points(folder)} for folder in chart.MAP]
    assert tasks == [{"kv"}, {"kv4"}, {"kv16"}]
    with pytest.raises(ValueError, match="no log in"):  # control: the folder that holds them
        chart.read_points("results/map")


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="^error: the picture needs matplotlib: pip install"):
        chart.main([str(filled(tmp_path / "map")), f"--out={tmp_path / 'map.png'}"])
    assert not (tmp_path / "map.png").exists()
