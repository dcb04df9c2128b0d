"""support/tracker.py: what trackers are handed, over resumes and failures. Neither package is
needed: modules that stand for them write down what they are told."""
import os
import shutil
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

from conftest import at_call, read_checkpoint, read_log, train_here
from support.run import LIST
from support.tracker import Tracker


class Writer:
    """Stands for SummaryWriter: an event file, whose events stand in a list."""

    def __init__(self, folder, purge_step=None):
        files = [name for name in os.listdir(folder) if "tfevents" in name]
        open(os.path.join(folder, f"events.out.tfevents.{len(files)}"), "w").close()
        self.events.append(("purge", purge_step, None))

    def add_scalar(self, name, x, step):
        if step == self.fails_at:
            raise ConnectionError("no network\nat all")
        self.events.append((name, step, x))

    def flush(self):
        pass


def shown(events):
    """What TensorBoard makes of events: {name: [(step, number)]}, what was purged gone."""
    found = {}
    for name, step, x in events:
        if name != "purge":
            found.setdefault(name, []).append((step, x))
        elif step is not None:
            found = {name: [e for e in seen if e[0] < step] for name, seen in found.items()}
    return found


@pytest.fixture
def tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = type("Writer", (Writer,), dict(events=[], fails_at=None))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module.SummaryWriter


@pytest.fixture
def wandb(monkeypatch):
    """Stands for wandb: its server keeps runs by id, and takes no step before the last; what is
    drawn over what is said beforehand."""
    module = ModuleType("wandb")
    module.runs, module.asked, module.ignored = {}, [], 0

    class Run:
        def __init__(self, id):
            self.id, self.rows = id, module.runs.setdefault(id, {})
            self.step = max(self.rows) + 1 if self.rows else 0
            self.axes = []

        def define_metric(self, name, step_metric=None):
            self.axes.append((name, step_metric))

        def log(self, numbers, step):
            if step < self.step:
                module.ignored += 1
                return
            self.step = step
            self.rows.setdefault(step, {}).update(numbers)

    def init(id, **options):
        module.asked.append(dict(options, id=id))
        module.run = Run(id or f"run{len(module.runs)}")
        return module.run

    module.init, module.Settings = init, lambda **options: options
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def logged(out, name):
    """[(step, number)] of a column of log.jsonl."""
    evals, steps = read_log(out)
    return [(r["step"], r[name]) for r in (evals if name.startswith("eval") else steps)]


def cut_run(out, tracker, monkeypatch):
    """A run that dies in its fourth step, after a checkpoint of step 2, and then goes on to 6."""
    often = [f"--tracker={tracker}", f"--out_dir={out}", "--steps=6", "--eval_every=2"]
    def dies():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_call(8, dies, patch.setattr)  # evaluation, 2 rollouts, evaluation, a rollout, this one
        with pytest.raises(SystemExit):
            train_here(*often)
    assert read_checkpoint(out)["step"] == 2 and logged(out, "reward")[-1][0] == 2
    train_here(*often, "--resume=True")


def test_tensorboard_shows_the_log(tensorboard, tmp_path, monkeypatch):
    """Each number of the log once, though a step was done twice."""
    out = str(tmp_path / "out")
    cut_run(out, "tensorboard", monkeypatch)
    found = shown(tensorboard.events)
    evals, steps = read_log(out)
    names = {name for row in evals + steps for name in row} - {"kind", "step", "texts"}
    assert names | {"rollout_s", "learn_s", "tokens_per_s"} == found.keys()
    for name in names - {"problems"}:
        assert found[name] == logged(out, name)
    assert found["eval_compressed"][1][0] == 2  # the evaluation that was not made again

    # the controls: no purge shows step 2 twice, a purge alone loses that evaluation
    purged = tensorboard.events.index(("purge", 2, None))
    assert ("eval_compressed", 2) in [event[:2] for event in tensorboard.events[purged:]]
    del tensorboard.events[purged]
    assert [step for step, _ in shown(tensorboard.events)["reward"]] == [0, 1, 2, 2, 3, 4, 5]


def test_wandb_shows_the_log(wandb, tmp_path, monkeypatch):
    """One run of W&B over both processes: the id is in the checkpoint."""
    out = str(tmp_path / "out")
    cut_run(out, "wandb", monkeypatch)
    assert list(wandb.runs) == ["run0"] and [a["id"] for a in wandb.asked] == [None, "run0"]
    assert read_checkpoint(out)["memory"]["wandb"] == "run0" and wandb.ignored == 0
    assert wandb.asked[0]["resume"] == "allow" and wandb.asked[0]["dir"] == out
    assert wandb.asked[0]["config"]["budget"] == 24
    assert wandb.run.axes == [("step", None), ("*", "step")]
    rows = wandb.runs["run0"].values()
    for name in ("reward", "gap", "eval_compressed", "eval_dense", "lr"):
        assert [(r["step"], r[name]) for r in rows if name in r] == logged(out, name)
    assert not any("texts" in r for r in rows)
    train_here("--tracker=wandb", "--steps=1", "--overwrite=True", f"--out_dir={out}")
    assert list(wandb.runs) == ["run0", "run1"]  # the control: another run is another one


def test_wandb_shows_the_step_that_is_resumed_on(wandb, tmp_path, monkeypatch):
    """A run that ends after an evaluation has shown that alone of its step; the training of it
    comes with the resume. An evaluation that is handed over again is ignored before it is sent."""
    out = str(tmp_path / "out")
    often = ["--tracker=wandb", f"--out_dir={out}", "--eval_every=1", "--save_every=1"]
    train_here(*often, "--steps=2")
    train_here(*often, "--steps=3", "--resume=True")
    rows = wandb.runs["run0"].values()
    for name, steps in (("reward", [0, 1, 2]), ("eval_compressed", [0, 1, 2, 3])):
        shown = [(r["step"], r[name]) for r in rows if name in r]
        assert shown == logged(out, name) and [step for step, _ in shown] == steps
    assert wandb.ignored == 0
    # the control: counted by the step, the training of step 2 comes too late
    steps = wandb.init("run9", dir=out)
    steps.log(dict(eval_compressed=0.5), step=2)
    wandb.init("run9", dir=out).log(dict(reward=0.5), step=2)
    assert wandb.ignored == 1


def test_a_tracker_that_fails_ends_nothing(tensorboard, finished, tmp_path, capsys):
    """It is said once, in one line, and the log is whole."""
    tensorboard.fails_at, out = 1, tmp_path / "out"
    train_here("--tracker=tensorboard", f"--out_dir={out}")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "failed" in line] == [
        "tensorboard failed and gets no more numbers, log.jsonl has them all: "
        "ConnectionError: no network at all"]
    assert read_log(out) == read_log(finished[0])
    assert shown(tensorboard.events)["reward"][-1][0] == 0


@pytest.mark.parametrize("e, said", [
    (SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt")])
def test_whatever_a_tracker_raises_at_once_ends_nothing(e, said, wandb, capsys, ctrl_c):
    def fails(**options):
        raise e

    wandb.init = fails
    signal.signal(signal.SIGINT, lambda *args: None)  # as a Run: no Ctrl-C raises anything
    run = SimpleNamespace(config=SimpleNamespace(tracker="wandb", out_dir="out"), folder="out",
                          memory={})
    Tracker(run, already=[dict(step=0)]).log(dict(step=0, reward=1.0))
    assert capsys.readouterr().out == (
        f"wandb failed and gets no more numbers, log.jsonl has them all: {said}\n")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_refused(name, tmp_path, monkeypatch):
    """Before out_dir is touched; so is one that is broken, and another name."""
    monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as e:
        train_here(f"--tracker={name}", f"--out_dir={out}")
    assert str(e.value).startswith(f"error: tracker={name} needs the package {name} (pip install "
                                   f"{name}); --tracker=none does without: ModuleNotFoundError")
    assert "\n" not in str(e.value) and not out.exists()
    monkeypatch.setattr("importlib.import_module", lambda name: sys.exit(3))
    with pytest.raises(SystemExit, match="error: tracker=.*does without: SystemExit: 3$"):
        train_here(f"--tracker={name}", f"--out_dir={out}")
    with pytest.raises(SystemExit, match="tracker must be one of none, tensorboard, wandb, got"):
        train_here("--tracker=mlflow", f"--out_dir={out}")
    assert not out.exists()


def test_no_package_is_imported_unasked(tmp_path, monkeypatch):
    for name in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would fail
    train_here("--steps=1", "--eval_every=9", f"--out_dir={tmp_path / 'out'}")


def test_overwrite_clears_only_event_files_of_a_run(tensorboard, finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    short = ["--steps=1", "--eval_every=9", "--overwrite=True", f"--out_dir={out}"]
    folder = out / "tensorboard"
    folder.mkdir()
    (folder / "events.out.tfevents.theirs").write_text("theirs")
    train_here(*short, "--tracker=tensorboard")
    train_here(*short[:2], "--resume=True", "--steps=2", "--tracker=tensorboard", short[-1])
    names = {"events.out.tfevents.1", "events.out.tfevents.2", "events.out.tfevents.theirs", LIST}
    assert {p.name for p in folder.iterdir()} == names
    train_here(*short)  # without a tracker too
    assert [p.name for p in folder.iterdir()] == ["events.out.tfevents.theirs"]

    # a folder elsewhere is nobody's to clear
    (folder / "events.out.tfevents.theirs").unlink()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="holds tensorboard, which no run of this program made"):
        train_here(*short)


def test_what_cannot_be_listed_is_given_up(tensorboard, tmp_path, capsys):
    """A later run could not remove it."""
    def fails(folder, **numbers):
        raise OSError("could not write")

    run = SimpleNamespace(
        config=SimpleNamespace(tracker="tensorboard", resume=False), step=0, write_list=fails,
        path=lambda name: str(tmp_path / name))
    tracker = Tracker(run, already=[])
    tracker.log(dict(step=0, reward=1.0))
    assert capsys.readouterr().out.startswith("tensorboard failed and gets no more numbers")
    assert shown(tensorboard.events) == {}
