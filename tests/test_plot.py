"""experiments/plot.py: which runs it reads, at work or ended, and that it draws them."""
import json
import os
import sys

import pytest

from conftest import train_here
from experiments import curves, plot
from experiments.logs import smooth


def rows(steps, every=2, reward=0.5, evals=True, own=False):
    """The log of a run that is at work: it ends with a step. own: its reward has another number."""
    log = []
    for step in range(steps):
        if evals and step % every == 0:
            log.append(dict(kind="eval", step=step, eval_compressed=reward, eval_dense=0.75,
                            eval_accept=0.9, eval_accept_p05=0.5, texts=[dict(question="?")]))
            if own:
                log[-1] |= dict(eval_compressed_form=0.5, eval_dense_form=0.75)
        log.append(dict(kind="step", step=step, reward=reward, length=4 + step % 2, gap=1e-6,
                        accept=0.9, accept_p05=0.5, rollout_s=1.0, learn_s=1.0, kv_kept=1,
                        kv_dense=3, kv_dense_shared=2))
        if own:
            log[-1] |= dict(reward_form=0.25)
    return log


def put(folder, log, more=""):
    """A folder of a run, as train.py leaves it."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(dict(out_dir="out", resume=False, overwrite=False, steps=9), f)
    if log is not None:
        with open(os.path.join(folder, "log.jsonl"), "w") as f:
            f.write("".join(json.dumps(row) + "\n" for row in log) + more)
    return str(folder)


def test_runs_at_work_are_read(tmp_path, capsys):
    """Half a last line, no evaluation yet, nothing yet, one that ended: each as far as it is."""
    log = rows(5)
    whole, half = put(tmp_path / "whole", log), put(tmp_path / "half", log[:4], '{"kind": "st')
    first, began = put(tmp_path / "first", log[:1]), put(tmp_path / "began", None)
    no_eval = put(tmp_path / "no_eval", rows(3, evals=False))
    runs = plot.read_runs([whole, half, first, began, no_eval])
    assert list(runs) == ["whole", "half", "first", "no_eval"]
    assert runs["whole"]["logs"][0] == log and runs["half"]["logs"][0] == log[:4]
    assert capsys.readouterr().out == f"{began}: nothing logged yet\n"
    with open(os.path.join(half, "log.jsonl"), "a") as f:  # the control: the line is finished
        f.write('ep"}\n')
    with pytest.raises(ValueError, match="half/log.jsonl, line 5: step must be a whole number"):
        plot.read_runs([half])


def test_a_resumed_run_is_read(tmp_path):
    """A line for each step and evaluation, though the first process ended with an evaluation that
    the second does not make again."""
    out = str(tmp_path / "out")
    train_here("--steps=1", "--eval_every=1", f"--out_dir={out}")
    first, = plot.read_runs([out]).values()
    train_here("--steps=2", "--eval_every=1", "--resume=True", f"--out_dir={out}")
    both, = plot.read_runs([out]).values()
    assert [r["step"] for r in first["logs"][0]] == [0, 0, 1]
    assert [r["step"] for r in both["logs"][0]] == [0, 0, 1, 1, 2]


def test_names_are_those_of_folders(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert plot.names_of(["out/", "out", "."]) == {"out": "out", ".": "here"}
    assert plot.names_of(["a/out", "b/out"]) == {"a/out": "a/out", "b/out": "b/out"}
    long = ["x" * 10 + f"-{i}-" + "y" * 20 for i in range(2)]
    assert plot.names_of(long[:1])[long[0]] == "x" * 10 + "..." + "y" * 11
    assert plot.names_of(long) == dict(zip(long, long))  # cut they would be one


@pytest.mark.parametrize("argv, says", [
    (["run", "--out=x.pdf"], "--out must name a .png, got 'x.pdf'"), ([], "out_dir"),
    (["none"], "none/log.jsonl is missing"), (["empty"], "empty/log.jsonl is missing"),
    (["began"], "nothing to draw yet"), (["twice"], "twice/log.jsonl, line 3: step 0 is out of"),
    (["run", "--out=new/x.png"], "the picture needs matplotlib: pip install")])
def test_refused_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    put("run", rows(2))
    put("began", None)
    put("twice", [*rows(1), *rows(1)])
    os.mkdir("empty")
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{says}[^\n]*$"):
        plot.main(argv)
    assert not os.path.exists("plot.png") and not os.path.exists("new")


def test_the_curves_are_drawn(tmp_path, capsys):
    """Runs of different lengths, one with an evaluation alone, rewards outside of 0 to 1, a reward
    with numbers of its own, which get a row."""
    image = pytest.importorskip("matplotlib.image")
    logs = [rows(12, own=True), rows(3), rows(1)[:1], rows(4, reward=-3.0)]
    folders = [put(tmp_path / f"run{i}", log) for i, log in enumerate(logs)]
    plot.main(folders)
    path = tmp_path / "run0" / "plot.png"
    pixels = image.imread(path)
    assert pixels.shape[:2] == (2000, 1800) and pixels.std() > 0.02
    assert capsys.readouterr().out == f"4 runs drawn to {path}\n"


def test_numbers_of_a_reward_of_ones_own(tmp_path, capsys, monkeypatch):
    """A row of panels for each name that any run logged; a name that no run writes is left out, and
    so is what comes after the first eight."""
    shown = []
    monkeypatch.setattr(curves, "write_panels",
                        lambda path, panels, x, **layout: shown.append((panels, layout)))
    runs = dict(a=dict(logs={0: rows(6, own=True)}), b=dict(logs={0: rows(4)}))
    assert plot.own_numbers(runs) == ["form"] and plot.own_numbers(dict(b=runs["b"])) == []
    plot.draw(runs, "x.png")
    (panels, layout), = shown
    keys = ["reward_form", "eval_compressed_form", "eval_dense_form"]
    assert [*panels] == [*"ABCDEF", *keys]
    assert layout["mosaic"][-1] == [key for key in keys for _ in range(2)]
    figure = pytest.importorskip("matplotlib.figure")
    for key, last in zip(keys, ((5, 0.25), (4, 0.5), (4, 0.75))):
        ax = figure.Figure().subplots()
        (name, colour, end), = panels[key](ax)
        assert (name, colour, end) == ("a", curves.COLOURS[0], last)
        assert ax.get_title().startswith("form, ")
    many = {f"reward_{x}": 1.0 for x in [*"abcdefghi", "$\\bad$", "\x1b[2J"]}
    assert plot.own_numbers(dict(a=dict(logs={0: [many]}))) == [*"abcdefgh"]
    assert capsys.readouterr().out.startswith("9 further numbers of rewards: the first 8 ")


def test_what_the_panels_show():
    """Lines of a run's own values and of their means, evaluations with marks, limits that hold
    all of them; a folder that is called as a method looks as that does."""
    figure = pytest.importorskip("matplotlib.figure")
    log = [dict(row, reward=float(row["step"] % 2)) if "reward" in row else row for row in rows(6)]
    runs = dict(out=dict(logs={0: log}), smd=dict(logs={0: rows(3, reward=2.0)}))
    ax = figure.Figure().subplots()
    ends = plot.draw_steps(ax, runs, key="reward", last=2,
                           ylim=curves.reward_limits(runs, ["reward"]))
    lines = [list(map(list, zip(*line.get_data()))) for line in ax.lines]
    assert lines[0] == [[step, step % 2] for step in range(6)]
    assert lines[1] == [[step, 2] for step in range(3)]
    assert lines[2] == [[0, 0]] + [[step, 0.5] for step in range(1, 6)]
    colours = [curves.COLOURS[0], curves.LOOKS["smd"][0]]
    assert ends == [("out", colours[0], (5, 0.5)), ("smd", colours[1], (2, 2.0))]
    assert [line.get_color() for line in ax.lines] == colours * 2
    assert ax.get_ylim() == (0, pytest.approx(2.2))

    ax = figure.Figure().subplots()
    ends = plot.draw_evaluations(ax, curves.draw_reward, arms=runs, cache="dense")
    assert [line.get_marker() for line in ax.lines] == ["o"] * len(ax.lines)
    assert [end[2] for end in ends] == [(4, 0.75), (2, 0.75)]
    assert plot.draw_steps(ax, dict(a=dict(logs={0: rows(1)[:1]})), key="reward", last=2) == []
    assert smooth([1, 2, 3, 6], last=2) == [1, 1.5, 2.5, 4.5] != smooth([1, 2, 3, 6])
