"""experiments/ablate.py: what it runs, counts and refuses; mostly with made logs and a made
train.py, once with the real one."""
import fcntl
import glob
import inspect
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import train
from conftest import FAST, ROOT, alive
from experiments import ablate, logs
from run.settings import identity_of
from support.checkpoint import read_checkpoint, write_checkpoint
from support.jsonfile import read_json


def made(steps, seed=0, gap=1e-6, peak=None, accept=True, kept=100, start=0.25, **end):
    """Lines as train.py writes them: reward is 0 in all steps but the last 10, where it is
    0.5 + seed / 8."""
    rows = [dict(kind="eval", step=0, problems=8, eval_compressed=start, eval_dense=0.75)]
    for s in range(steps):
        late = s >= steps - 10
        row = dict(kind="step", step=s, reward=0.5 + seed / 8 if late else 0.0, loss=0.1,
                   gap=gap * (1 + late), entropy=1 / 3, kl=0.5, equal=0.25, truncated=0.0,
                   tokens=40, length=2.5, grad_norm=1.5, lr=1e-4, kv_kept=kept, kv_dense=1000,
                   kv_dense_shared=200, rollout_s=2.0, learn_s=1.0)
        if accept:
            row.update(accept=0.9, accept_p05=0.1 * seed + 1 / 3)
        if peak:
            row.update(peak_gb=peak + s)
        rows.append(row)
    last = dict(kind="eval", step=steps, problems=8, eval_compressed=0.5 + seed / 4, eval_dense=1.0)
    return rows + [last | end]


FAKE = inspect.getsource(made) + """
import json, os, shutil, signal, sys, time
o = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
run, name = o["out_dir"], os.path.basename(sys.argv[1])
out = os.path.dirname(os.path.dirname(run))
inside = lambda name: os.path.join(run, name)
told = lambda name: os.path.exists(os.path.join(out, name))

def stop(number, frame):
    if told("deaf"):
        return open(inside("heard"), "w").close()
    open(inside("ckpt.pt"), "w").close()
    print("saved on", signal.Signals(number).name)
    sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if not told("early"):
        signal.signal(number, stop)
shutil.copy(os.path.join(out, name + ".json"), inside("config.json"))
threads, card = os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")
with open(os.path.join(out, "calls.txt"), "a") as f:
    f.write(json.dumps([sys.argv[1:], threads, card]) + "\\n")
if told("slow"):
    with open(inside("pid"), "w") as f:
        f.write(str(os.getpid()))
    os.rename(inside("pid"), inside("ready"))
    until = time.time() + 20
    while time.time() < until:
        time.sleep(0.05)
if name == "naive.py" and o["seed"] == "1" and not told("mended"):
    print("step 0")
    sys.exit("error: the update is not finite")
with open(inside("log.jsonl"), "w") as f:
    f.writelines(json.dumps(r) + "\\n" for r in made(int(o["steps"]), int(o["seed"])))
for name in ("model", "best", "adapter"):
    os.makedirs(inside(name), exist_ok=True)
    with open(os.path.join(inside(name), "run.json"), "w") as f:
        json.dump(dict(step=int(o["steps"]), files=["run.json"]), f)
for name in ("ckpt.pt", "ckpt-previous.pt"):
    open(inside(name), "w").close()
"""


def put(path, rows, **config):
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "log.jsonl"), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    if config:
        with open(os.path.join(path, "config.json"), "w") as f:
            json.dump(config, f)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A figure takes most of a second; test_curves.py draws it."""
    monkeypatch.setattr(ablate, "figure", lambda arms, path: None)


def main(*argv):
    """-> exit code, or the error"""
    with pytest.raises(SystemExit) as e:
        ablate.main([str(a) for a in argv])
    return e.value.code


def tabled(where, *argv):
    """The table of what is there, which is written too."""
    assert main("--table", f"--out={where}", *argv) == 0
    return (where / "table.md").read_text()


def asked(*arms, options=()):
    """-> settings of each arm, by name; what settings.json would hold of it"""
    found, configs = ablate.request([*arms], [*options], range(1))
    return configs, found


GAP = "gap, first and last 10 steps"


def cells(text, title="Training"):
    """Markdown -> {first cell of a row: {column: cell}} of the table under **title**"""
    lines = text.split(f"**{title}**")[1].split("**")[0].splitlines()
    rows = [[c.strip() for c in line[1:-1].split("|")] for line in lines if line.startswith("| ")]
    return {r[0]: dict(zip(rows[0], r)) for r in rows[1:]}


def served(text):
    """-> cells of the tables of rewards, compressed and dense"""
    return cells(text, "Served compressed"), cells(text, "Served dense")


def evaluated(log, step, **numbers):
    """A log with one evaluation more."""
    at = next(i for i, r in enumerate(log) if r["step"] == step)
    return log[:at] + [dict(kind="eval", step=step, problems=8, **numbers)] + log[at:]


# the command line

def test_arms_are_parsed():
    """Options of an arm come after those of all."""
    assert ablate.parse_arm("a/smollm2.py+b/naive.py") == (
        "naive", ["a/smollm2.py", "b/naive.py"], [])
    assert ablate.parse_arm("c/x.py --budget=32 '--task=my data/p.jsonl'") == (
        "x budget=32 task=p.jsonl", ["c/x.py"], ["--budget=32", "--task=my data/p.jsonl"])
    o, arms, common = ablate.parse(
        ["a.py", "--seeds=5", "--lr=1e-4", "b.py --budget=8", "--out=x", "--jobs=2"])
    assert (o.seeds, o.jobs, o.threads, o.out, o.table) == (5, 2, 1, "x", False)
    assert arms == ["a.py", "b.py --budget=8"] and common == ["--lr=1e-4"]
    arms, configs = ablate.request([f"{NAIVE} --budget=30"], ["--budget=40", "--steps=7"], range(2))
    arm = arms["naive budget=30"]
    assert configs["naive budget=30"].budget == 30 and arm["steps"] == 7 and arm["seeds"] == [0, 1]
    assert arm["args"] == f"{NAIVE} --budget=40 --steps=7 --budget=30"


NAIVE = "config/naive.py"


@pytest.mark.parametrize("argv, says", [
    ([], "no arm"), ([""], "config/NAME.py"), (["config/naive.py+naive"], "config/NAME.py"),
    ([NAIVE, "--seeds=00"], "seeds must be between 1"), ([NAIVE, "--jobs=two"], "expects int"),
    ([NAIVE, "--first=-1"], "first must be between 0"), ([NAIVE, "--seeds"], "--key=value"),
    ([NAIVE, "--out="], "--out=FOLDER"), ([NAIVE, "--table=1"], "table expects True or False"),
    (["x/...py"], "cannot name a folder"), (["config/naive.py 'x"], "quotation"),
    ([NAIVE, "--keep=/proc/x"], "cannot write to folder '/proc/x'"),
    ([NAIVE, "--out=/proc/x"], "cannot write to folder '/proc/x'"),
    ([NAIVE, "--bugdet=3"], "nearest is 'budget'"), ([NAIVE, NAIVE], "two arms"),
    (["config/naive.py --out_dir=x"], "--seeds and --out"), ([NAIVE, "--seed=3"], "--seeds"),
    ([NAIVE, "--resume=True"], "leave out resume"), (["--table", "--lr=1"], "runs nothing"),
    (["--table", "--seeds=3"], "runs nothing"),
    (["--table"], "looked for log.jsonl, ARM/SEED/log.jsonl and ARM-SEED.jsonl"),
    (["config/dpo.py --correction=tis --learner=dense"], "does not use it"),
    ([NAIVE, "--dry_run=True"], "dry_run=True trains nothing"),
    ([NAIVE, "--compare=naive/smd/dense"], "compare: no arm 'smd', only naive"),
    ([NAIVE, "config/naive.py --lr=1e-5", "config/smd.py --lr=1e-5", "config/smd.py --lr=1e-4",
      "--compare=naive/smd/dense"], "'smd' may mean any of smd lr=1e-5, smd lr=1e-4"),
    (["config/smd.py --lr=1e-5", NAIVE, "--compare=naive/smd lr/dense"], "no arm 'smd lr', only"),
    (["config/smd.py --lr=1e-5", "--compare=smd/smd lr=1e-5/dense"],
     "'smd' and 'smd lr=1e-5' are the same arm"),
    (["--table", "--compare=a/b/sense"], "compare 'a/b/sense': write"),
])
def test_refused_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "run_all", None)  # nothing may be started
    out = [] if any(a.startswith("--out=") for a in argv) else [f"--out={tmp_path / 'out'}"]
    code = main(*argv, *out)
    assert code.startswith("error: ") and "\n" not in code and says in code
    assert not any(files for _, _, files in os.walk(tmp_path))


def test_a_config_file_does_not_throw_runs_away(tmp_path):
    for key in ("overwrite", "resume"):
        (tmp_path / "x.py").write_text(f"{key} = True")
        code = main(tmp_path / "x.py", f"--out={tmp_path / 'out'}")
        assert code.endswith(f"leave out {key}, every run gets its own from --seeds and --out")


# what is run

def test_what_a_run_needs(tmp_path):
    run, c = tmp_path / "run", asked(NAIVE, options=["--steps=4", "--device=cpu"])[0]["naive"]
    was = vars(c) | dict(seed=5, out_dir=str(run), dtype="float32")

    def need(rows=None, step=None, model="model", **config):
        """What it needs with these rows in its log, this step in the list of its model."""
        if rows:
            put(run, rows, **was | config)
        if step is not None:
            (run / model).mkdir(exist_ok=True)
            (run / model / "run.json").write_text(json.dumps(dict(step=step, files=["run.json"])))
        return ablate.decide(run, c)

    assert need() == "--overwrite=True"
    assert need(made(4)[:-1]) == "--overwrite=True"  # nothing saved yet
    (run / "ckpt.pt").touch()
    assert need() == "--resume=True"
    assert need(made(4)) == "--resume=True"  # it was cut before the model was whole
    assert need(step=2) == "--resume=True" and need(step=4) is None  # dtype auto accepts any
    c.lora_rank = 4  # both models of a run with LoRA count
    assert need(made(4), lora_rank=4) == "--resume=True"
    assert need(step=4, model="adapter") is None and need(step=2) == "--resume=True"
    c.lora_rank, c.steps = 0, 6
    assert need(made(4)) == "--resume=True"
    (run / "ckpt.pt").unlink()
    assert need() == "--overwrite=True"  # cannot go on
    c.steps = 3
    with pytest.raises(ValueError, match="4 steps already"):
        need()
    c.steps = 4
    shutil.rmtree(run / "model")
    assert need() is None  # deleted on purpose, like ckpt.pt
    for key, value in dict(lr=1e-5, eval_final=8, eval_evict="rkv").items():
        with pytest.raises(ValueError, match=f"^{key} was .* now it is '?{value}"):
            ablate.decide(run, type(c)(**vars(c) | {key: value}))
    assert ablate.decide(run, type(c)(**vars(c) | dict(save_every=1))) is None
    with open(run / "log.jsonl", "a") as f:
        f.write('{"step": 4, "rew')  # half a line
    assert need() is None


def test_a_run_whose_last_checkpoint_is_gone(tmp_path, monkeypatch):
    """It goes on from the one before, where that is whole; the control begins anew."""
    run, c = tmp_path / "run", asked(NAIVE, options=["--steps=4"])[0]["naive"]
    put(run, made(4)[:-2], **vars(c) | dict(seed=5, out_dir=str(run)))
    (run / "ckpt-previous.pt").write_text("damaged")
    assert ablate.decide(run, c) == "--overwrite=True"
    write_checkpoint(str(run / "ckpt-previous.pt"), dict(step=2))
    assert ablate.decide(run, c) == "--resume=True"
    (tmp_path / "fake.py").write_text("")
    monkeypatch.setattr(ablate, "TRAIN", str(tmp_path / "fake.py"))
    ablate.launch(str(run), ["--overwrite=True"], 1, None).wait()
    assert not (run / "ckpt.pt").exists()
    ablate.launch(str(run), ["--resume=True"], 1, None).wait()
    assert read_checkpoint(str(run / "ckpt.pt")) == dict(step=2)
    assert not (run / "ckpt-previous.pt").exists()


def test_contents_of_finished_runs_are_compared(tmp_path):
    """A task file or a tokenizer that changed since is another run; a task file that moved is not.
    The control did not note what it read."""
    task, moved, M, run = (tmp_path / x for x in ("t.jsonl", "moved.jsonl", "M", "run"))
    task.write_text("a")
    moved.write_text("a")
    shutil.copytree(train.TINY, M)

    def wanted(**changes):
        c = asked(NAIVE, options=["--steps=4", f"--task={task}", f"--model={M}"])[0]["naive"]
        return type(c)(**vars(c) | changes)

    was = vars(wanted())
    put(run, made(4), **was, identity=identity_of(wanted(), str(M)))
    put(tmp_path / "old", made(4), **was)
    for c in (wanted(), wanted(task=str(moved))):
        assert ablate.decide(run, c) is None
    with pytest.raises(ValueError, match="^model was .*/M' in the run"):  # weights may differ
        ablate.decide(run, wanted(model=train.TINY))
    for file, key in ((task, "task"), (M / "tokenizer.json", "model")):
        before = file.read_bytes()
        file.write_bytes(before + b" ")
        with pytest.raises(ValueError, match=f"^{key} .* has other contents now than when"):
            ablate.decide(run, wanted())
        assert ablate.decide(tmp_path / "old", wanted()) is None
        file.write_bytes(before)
    put(run, made(4), **was, identity=[])
    with pytest.raises(ValueError, match="config.json: identity must be an object, got a"):
        ablate.decide(run, wanted())


def test_starts_of_arms(tmp_path):
    """Arms that evict nothing are judged with a compressed cache too: its settings decide how they
    begin. Later settings are named only where they are not what older runs had."""
    _, found = asked("config/dense.py", "config/dense.py --budget=90",
                     "config/dense.py --eval_evict=rkv")
    assert len({arm["start"] for arm in found.values()}) == 3
    _, found = asked("config/smd.py", "config/smd.py --lr=1e-4", "config/smd.py --pool_by=mean",
                     "config/smd.py --eval_first=8", "config/smd.py --eval_first=0")
    old, same, mean, first, none = (arm["start"] for arm in found.values())
    assert old == same == none and old.endswith(" period=128")  # control
    assert (mean, first) == (f"{old} pool_by=mean", f"{old} eval_first=8")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """ablate on a made train.py and two cards.
    -> folder for files that tell it what to do; f(arguments) -> exit code, its calls"""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(ablate, "TRAIN", str(tmp_path / "fake.py"))
    monkeypatch.setattr(ablate, "cards", lambda: ["3", "5"])
    out = tmp_path / "out"
    out.mkdir()
    for name, c in asked(NAIVE, "config/shadow.py", options=["--steps=12"])[0].items():
        (out / f"{name}.py.json").write_text(json.dumps(vars(c)))

    def run(*argv):
        said = out / "calls.txt"
        said.write_text("")
        code = main(NAIVE, "config/shadow.py", "--steps=12", f"--out={out}", *argv)
        return code, [json.loads(line) for line in said.read_text().splitlines()]
    return out, run


def test_a_failing_run_stops_no_other(fake, capsys):
    out, run = fake

    def done(*argv):
        """-> exit code, which runs were done"""
        code, calls = run(*argv)
        return code, [args[0][7:-3] + args[2] for args, *_ in calls]

    code, calls = run("--seeds=2", "--jobs=4", "--threads=2")
    said = capsys.readouterr().out
    assert code == 1 and len(calls) == 4 and {threads for _, threads, _ in calls} == {"2"}
    assert sorted(card for *_, card in calls) == ["3", "3", "5", "5"]  # four workers, two cards
    failure = "naive seed 1: failed after 0.0 min: error: the update is not finite (exit code 1"
    assert failure in said and said.count(" ended after ") == 3
    args = next(args for args, *_ in calls if "--seed=1" in args and NAIVE in args)
    assert args == [NAIVE, "--steps=12", "--seed=1", f"--out_dir={out / 'naive' / '1'}",
                    "--overwrite=True"]
    text = (out / "table.md").read_text()
    assert "**Not finished, and counted nowhere: naive seed 1.**" in text and text in said
    assert cells(text)["naive"]["seeds"] == "1 of 2" and cells(text)["shadow"]["seeds"] == "2"
    (out / "mended").touch()
    assert done("--seeds=3", "--jobs=1") == (0, [  # the failed one again, a third seed
        "naive--seed=1", "naive--seed=2", "shadow--seed=2"])
    assert "Not finished" not in (out / "table.md").read_text()
    assert run("--seeds=3") == (0, [])
    # seeds 2, 3, of which one is there
    assert done("--seeds=2", "--first=2") == (0, ["naive--seed=3", "shadow--seed=3"])
    assert cells((out / "table.md").read_text())["naive"]["seeds"] == "4"
    code, calls = run("--seeds=3", "--lr=1e-5")
    assert code.startswith("error: lr was 0.0006 in the run") and not calls
    # longer: what cannot go on starts again
    assert done("--seeds=1", "--steps=13") == (0, ["naive--steps=13", "shadow--steps=13"])
    assert ("counted nowhere: naive seed 1, naive seed 2, naive seed 3, shadow seed 1"
            in tabled(out))


def test_lean_runs_keep_their_logs_alone(fake):
    """The weights of a run that ended go, not what no run wrote in its folders and beside them, nor
    what a link leads to; a run that failed keeps what it has."""
    out, run = fake
    assert run("--seeds=1")[0] == 0
    whole = {"ckpt.pt", "ckpt-previous.pt", "model", "best", "adapter"}
    small = {"config.json", "log.jsonl", "train.log"}
    assert set(os.listdir(out / "shadow" / "0")) == whole | small  # control
    path, elsewhere = out / "naive" / "0", out / "elsewhere"
    mine = ["model/notes.txt", "ckpt-kept-by-me.pt", "adapter/adapter_model.safetensors"]
    for name in mine:
        (path / name).write_text("mine")
    shutil.move(path / "best", elsewhere)
    (elsewhere / "run.json").write_text('{"step": 12, "files": ["theirs", "run.json"]}')
    (elsewhere / "theirs").write_text("theirs")
    (path / "best").symlink_to(elsewhere)
    code, calls = run("--seeds=2", "--lean=True")
    assert code == 1 and len(calls) == 2  # naive with seed 1 fails
    assert set(os.listdir(out / "shadow" / "1")) == small
    assert set(os.listdir(out / "shadow" / "0")) == small  # of runs that ended before, too
    assert all((path / name).read_text() == "mine" for name in mine)
    assert set(os.listdir(path / "model")) == {"notes.txt"}  # the run's own list is gone
    assert not {"ckpt.pt", "ckpt-previous.pt"} & set(os.listdir(path))
    assert set(os.listdir(elsewhere)) == {"run.json", "theirs"}
    (out / "naive" / "1" / "ckpt.pt").touch()
    assert run("--seeds=2", "--lean=True")[0] == 1 and (out / "naive" / "1" / "ckpt.pt").exists()
    (out / "mended").touch()
    assert run("--seeds=2", "--lean=True")[0] == 0
    assert set(os.listdir(out / "naive" / "1")) == small
    assert run("--seeds=2") == (0, [])  # nothing is run again for want of weights


def test_weights_that_cannot_be_deleted_stop_nothing(tmp_path, monkeypatch, capsys):
    def busy(path):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(ablate, "remove", busy)
    ablate.strip("a seed 0", str(tmp_path))
    assert capsys.readouterr().err.startswith(f"a seed 0: could not delete weights in {tmp_path}: ")


def when_ready(out, *numbers):
    """Once all runs are going: send these signals to this process, the second once all heard the
    first."""
    def wait(name):
        while len(glob.glob(f"{out}/*/0/{name}")) < 2:
            time.sleep(0.02)

    def send():
        for number, name in zip(numbers, ("ready", "heard")):
            wait(name)
            os.kill(os.getpid(), number)
    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_lets_every_run_save(fake, capsys, name):
    out, run = fake
    (out / "slow").touch()
    number = getattr(signal, name)
    if signal.getsignal(number) == signal.SIG_IGN:  # these tests run under nohup
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    when_ready(out, number)
    code, calls = run("--seeds=2", "--jobs=2")
    assert code == 128 + number and len(calls) == 2  # seed 1 was not begun
    assert signal.getsignal(number) is before
    assert all((out / arm / "0" / "ckpt.pt").exists() for arm in ("naive", "shadow"))
    printed = capsys.readouterr()
    assert " at work: " not in printed.out  # of that it tells after half a minute
    assert printed.out.count(f"stopped after 0.0 min: saved on {name} (") == 2
    assert printed.err == f"{name}: every run finishes its step and saves; a second signal kills\n"
    if name == "SIGTERM":
        (out / "slow").unlink()
        (out / "mended").touch()
        code, calls = run("--seeds=2", "--jobs=2")
        last = sorted(args[-1] for args, *_ in calls)
        assert code == 0 and last == ["--overwrite=True"] * 2 + ["--resume=True"] * 2


def test_a_run_that_was_just_starting_is_stopped(fake, capsys):
    """train.py does not handle signals until it has loaded what it needs."""
    out, run = fake
    for file in ("slow", "early"):
        (out / file).touch()
    when_ready(out, signal.SIGTERM)
    code, _ = run("--seeds=1", "--jobs=2")
    printed = capsys.readouterr().out
    assert code == 128 + signal.SIGTERM and "exit code" not in printed and "failed" not in printed
    for arm in ("naive", "shadow"):
        assert f"{arm} seed 0: stopped after 0.0 min, while starting ({out}/{arm}/0/" in printed
    path = str(out / "naive" / "0")
    line, _ = ablate.report("naive seed 0", path, -signal.SIGTERM, 6, stopped=False)
    assert "failed after 0.1 min: " in line and "(exit code -15, " in line  # control


def test_three_of_the_runs_at_work_are_named(tmp_path):
    rows = made(20)
    for name, log in dict(a=evaluated(rows, 5, eval_compressed=0.5, eval_dense=0.5)[:7],
                          b=rows[:1], c=rows, d=rows).items():
        put(tmp_path / name, log)
    with open(tmp_path / "b" / "log.jsonl", "a") as f:
        f.write(json.dumps(rows[1])[:-9])  # half a line
    runs = [SimpleNamespace(name=name, path=str(tmp_path / name), steps=20) for name in "abcd"]
    steps = "a step 5 of 20, b step 0 of 20, c step 20 of 20"
    assert ablate.at_work(runs, 7, of=12) == f"7 of 12 ended, 4 at work: {steps}, ..."
    assert ablate.at_work(runs[:3], 0, of=3) == f"0 of 3 ended, 3 at work: {steps}"


def test_a_second_signal_kills(fake, capsys, monkeypatch):
    """What is at work is told between the ends of runs; naive has no log yet, shadow did steps 0 to
    3."""
    out, run = fake
    for file in ("slow", "deaf"):
        (out / file).touch()
    put(out / "shadow" / "0", made(12)[:5])
    monkeypatch.setattr(ablate, "EVERY", 0)
    when_ready(out, signal.SIGINT, signal.SIGTERM)
    code, _ = run("--seeds=2", "--jobs=2")
    printed = capsys.readouterr()
    assert code == 128 + signal.SIGTERM and printed.err.endswith("SIGTERM: killed\n")
    assert printed.out.count("(exit code -9, ") == 2
    assert ("0 of 4 ended, 2 at work: naive seed 0 step 0 of 12, shadow seed 0 step 4 of 12\n"
            ) in printed.out


def test_what_goes_wrong_here_ends_the_runs_too(fake, monkeypatch):
    out, run = fake
    (out / "slow").touch()
    launch, made_it = ablate.launch, []

    def once(*args):
        if made_it:
            while not glob.glob(f"{out}/*/0/ready"):
                time.sleep(0.02)
            raise OSError("no space left")
        made_it.append(launch(*args))
        return made_it[0]
    monkeypatch.setattr(ablate, "launch", once)
    assert run("--seeds=1", "--jobs=2")[0] == "error: no space left"
    assert made_it[0].returncode == 128 + signal.SIGTERM


def outlives(path, tmp_path):
    """Does a run outlive the process that launched it, killed as soon as the run goes?"""
    path.mkdir(parents=True)
    (tmp_path / "slow").touch()
    (tmp_path / "naive.py.json").write_text("{}")
    args = [NAIVE, "--seed=0", "--steps=2", f"--out_dir={path}", "--overwrite=True"]
    launcher = os.fork()
    if not launcher:
        ablate.launch(str(path), args, 1, None)
        while not (path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(launcher, 0)
    pid = int((path / "ready").read_text())
    for _ in range(20):
        if not alive(pid):
            return False
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="left out elsewhere")
def test_no_run_outlives_a_kill(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(ablate, "TRAIN", str(tmp_path / "fake.py"))
    assert not outlives(tmp_path / "naive" / "0", tmp_path)
    assert (tmp_path / "naive" / "0" / "ckpt.pt").exists()  # it saved
    monkeypatch.setattr(ablate, "bound_to", lambda parent: None)
    assert outlives(tmp_path / "naive" / "1", tmp_path)     # control


@pytest.mark.parametrize("place", ["naive", "naive/0", "naive/0/train.log"])
def test_no_run_is_written_through_a_link(place, fake, tmp_path):
    out, run = fake
    (out / place).parent.mkdir(parents=True, exist_ok=True)
    (out / place).symlink_to(tmp_path / "victim")
    code, calls = run("--seeds=1")
    assert code.startswith(f"error: {out / place} is a link, and nothing is written") and not calls
    assert not (tmp_path / "victim").exists()


def test_names_and_lines_that_a_terminal_would_obey(tmp_path, capsys):
    """Those of folders and settings, which anybody may have made, are escaped in the table, also
    what would be a row of its own; so is what a run said last."""
    put(tmp_path / "a\x1b[2J\x07b" / "0", made(4))
    put(tmp_path / "x" / "0", made(4)[:-1])
    forged = "x\u202e\n| smd | 9 | 1.000 |"
    logs.remember(str(tmp_path), {forged: dict(args="", seeds=[0], steps=4)})
    text = tabled(tmp_path)
    assert "| a\\x1b[2J\\x07b | 1 |" in text and text in capsys.readouterr().out
    assert "\n| smd" not in text and text.count("| x\\u202e | smd | 9 | 1.000 | |") == 3
    assert not [x for x in text if not x.isprintable() and x != "\n"]
    (tmp_path / "train.log").write_text("gone\nerror: \x1b]0;\x07 \u202e\x9b2J\n")
    line, _ = ablate.report("x", str(tmp_path), 1, 0, stopped=False)
    assert "error: \\x1b]0;\\x07 \\u202e\\x9b2J (exit code 1" in line


def test_a_run_that_ends_without_a_log_has_failed(fake, capsys, monkeypatch):
    """And a clock that goes back gives no negative minutes."""
    out, run = fake
    clock = iter(range(10**6, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    (out / "fake.py").write_text("print('I did nothing')")
    monkeypatch.setattr(ablate, "TRAIN", str(out / "fake.py"))
    assert run("--seeds=1")[0] == 1
    said = capsys.readouterr().out
    assert said.count("log.jsonl is missing, or is not a regular file") == 2
    assert said.count(" failed after 0.") == 2


def test_one_folder_belongs_to_one_process(fake):
    out, run = fake
    (out / "naive" / "0").mkdir(parents=True)
    for folder in (out, out / "naive" / "0"):  # another ablate.py; a run, still saving
        other = os.open(folder, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
        code, calls = run("--seeds=1")
        assert code == f"error: out_dir {str(folder)!r} is in use by another process" and not calls
        os.close(other)
    assert run("--seeds=1")[0] == 0


def test_what_cannot_be_printed_stops_nothing(fake, monkeypatch):
    out, run = fake
    (out / "mended").touch()
    read_end, write_end = os.pipe()
    os.close(read_end)
    text = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with open(write_end, "w") as broken:
        for stdout, argv in ((broken, []), (text, [f"{NAIVE} --task=\u00fc.jsonl"]), (None, [])):
            with monkeypatch.context() as m:  # None: closed before the start
                m.setattr(sys, "stdout", stdout)
                assert run("--seeds=1", *argv)[0] == 0
    assert "| naive task=\\xfc.jsonl | 1 |" in text.buffer.getvalue().decode()


def test_runs_of_an_arm_are_spread_over_the_cards():
    working = []
    for name in ("dense seed 0", "smd seed 0", "dense seed 1", "smd seed 1"):
        working.append((name, ablate.freest(["3", "5"], name, working)))
    assert [card for _, card in working] == ["3", "5", "5", "3"]
    full = [("a seed 0", "3"), ("b seed 0", "5"), ("c seed 0", "5")]
    assert ablate.freest(["3", "5"], "a seed 1", full) == "3"  # fewer runs, though of its own arm
    assert ablate.freest([], "smd seed 0", []) is None


def test_cards(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ablate.cards() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc")
    assert ablate.cards() == ["4", "GPU-abc"]


def test_a_real_run(tmp_path):
    out = tmp_path / "out"
    argv = ["config/naive.py --budget=30", *FAST, f"--out={out}", "--seeds=1"]
    assert main(*argv) == 0
    row = cells((out / "table.md").read_text())["naive budget=30"]
    assert float(row[GAP].split(",")[0]) > 0.01 and row["KV kept"].startswith("1/")
    log = out / "naive,budget=30" / "0" / "log.jsonl"
    time_before = os.stat(log).st_mtime_ns
    assert main(*argv) == 0 and os.stat(log).st_mtime_ns == time_before
    assert main(*argv, "--lr=1e-5").startswith("error: lr was 0.0003")


# what is counted

def test_table_by_hand(tmp_path):
    for seed in (0, 1):
        naive = made(20, seed, gap=0.5, peak=3.0, accept=False, start=0.25 + seed / 2)
        put(tmp_path / "naive" / str(seed), naive)
        smd = made(20, seed, eval_accept=0.75, eval_accept_p05=0.5)
        smd[0] |= dict(eval_accept=0.25, eval_accept_p05=0.125)
        for step in (5, 15):  # that of step 5 counts no more
            smd = evaluated(smd, step, eval_compressed=step / 20, eval_dense=0.0,
                            eval_accept=0.25, eval_accept_p05=step / 60)
        put(tmp_path / "smd,budget=8" / str(seed), smd)
        put(tmp_path / "dense" / str(seed), made(20, seed, kept=200, start=0.75))
        replays_nothing = [{k: x for k, x in r.items() if k != "gap"} for r in made(20)]
        put(tmp_path / "dpo" / str(seed), replays_nothing)
    put(tmp_path / "naive" / "2", made(20)[:-1])  # did not end
    text = tabled(tmp_path, "naive", "config/smd.py --budget=8", "dense", "dpo")
    names = ["naive", "smd budget=8", "dense", "dpo"]
    compressed, dense = served(text)
    assert list(compressed) == list(dense) == ["before training", *names]
    # seed 0: naive, smd and dpo 0.25; seed 1: 0.75, 0.25, 0.25, mean 5/12. dense evicts nothing
    # and is left out. Half an interval: 12.706 x 0.1667 / 2
    assert compressed["before training"]["mean"] == "0.333 [-0.726, 1.392]"
    assert dense["before training"]["mean"] == "0.750"  # equal for all
    assert compressed["naive"] == {
        "arm": "naive", "seeds": "2 of 3", "mean": "0.625 [-0.963, 2.213]",
        "each seed": "0.500 0.750", "worst": "0.500", "best evaluation": "0.625"}
    assert compressed["smd budget=8"]["each seed"] == "0.625 0.750"  # 0.75, 0.5; 0.75
    assert dense["naive"]["mean"] == "1.000 [1.000, 1.000]"
    assert dense["smd budget=8"]["each seed"] == "0.500 0.500"  # 0 and 1
    t = cells(text)
    assert list(t) == names
    assert [row[GAP] for row in t.values()] == ["0.5, 1", "1e-6, 2e-6", "1e-6, 2e-6", ""]
    smd = t["smd budget=8"]
    assert smd["acceptance, mean and p05"] == "0.900, 0.383"  # 1/3, 1/3 + 0.1
    assert smd["held-out acceptance, mean and p05"] == "0.500, 0.375"  # 0.25, 0.75; 0.25, 0.5
    assert t["dense"]["KV kept"] == "1/5.0 (1/1.0)" and smd["peak GB"] == ""
    naive = [x for x in t["naive"].values() if x]
    assert naive == ["naive", "2 of 3", "0.562", "0.5, 1",  # sampled reward: 0.5, 0.625
                     "0.5", "0.33", "2.5", "0.0001",        # KL, entropy, length, largest lr
                     "1/10.0 (1/2.0)", "1.0", "22.0"]       # 20 x (2 + 1) s, 3 + 19 GB
    numbers = {3.49: "3.5", 0.026: "0.026", 0.0012: "0.0012", 5.4e-7: "5e-7", 0: "0"}
    assert all(ablate.small(x) == shown for x, shown in numbers.items())


def test_the_best_evaluation_is_each_runs_own(tmp_path):
    """One rises and falls at step 5, one at step 8; before training it was better still."""
    for seed, step in ((0, 5), (1, 8)):
        log = made(20, start=1.0, eval_compressed=0.25, eval_dense=0.125)
        log[0] |= dict(eval_dense=1.0)
        for at in (5, 8, 15):
            high = at == step
            log = evaluated(log, at, eval_compressed=0.75 if high else 0.25,
                            eval_dense=0.5 - seed / 4 if high else 0.125)
        put(tmp_path / "smd" / str(seed), log)
    compressed, dense = served(tabled(tmp_path))
    found = [rows["smd"]["best evaluation"] for rows in (compressed, dense)]
    assert found == ["0.750", "0.375"]
    assert compressed["smd"]["mean"].startswith("0.250 [")
    assert dense["smd"]["mean"].startswith("0.125 [")
    assert compressed["before training"]["best evaluation"] == ""


def test_of_many_seeds_the_worst_is_shown(tmp_path):
    """Single seeds of seven, not of eight; a KL that is not computed is no number; different starts
    are different rows, but the one with all keys."""
    for name, seeds in (("a", 7), ("b", 8), ("c", 1)):
        for seed in range(seeds):
            log = made(12, seed / 8, kept=50 if name == "c" else 100, start=0.25 * (name != "c"))
            if name == "b":
                log = [r | dict(kl=0.0) if "kl" in r else r for r in log]
            put(tmp_path / name / str(seed), log)
    text = tabled(tmp_path)
    compressed, dense = served(text)
    a, b = (compressed[name] for name in "ab")
    assert len(a["each seed"].split()) == 7 and b["each seed"] == ""
    assert a["worst"] == b["worst"] == "0.500" and a["mean"].startswith("0.594 [")
    assert (cells(text)["a"]["KL"], cells(text)["b"]["KL"]) == ("0.5", "")
    starts = [compressed[f"before training{of}"]["mean"] for of in ("", " (c)")]
    assert starts == ["0.250", "0.000"] and list(dense) == ["before training", "a", "b", "c"]


def test_one_run_of_train_is_an_arm(tmp_path):
    one, half = tmp_path / "one run", tmp_path / "half"
    put(one, made(20, 1), seed=5)
    put(half, made(20, 1)[:-1], seed=0)
    assert cells(tabled(half))["half"]["seeds"] == "0 of 1"
    text = tabled(one, f"--keep={one / 'kept'}")
    assert served(text)[0]["one run"] == {"arm": "one run", "seeds": "1", "mean": "0.750",
                                          "best evaluation": "0.750"}
    assert sorted(os.listdir(one / "kept")) == ["one,run-5.jsonl", "settings.json"]
    assert tabled(one / "kept") == text
    (one / "config.json").write_text('{"seed": "five"}')
    code = main("--table", f"--out={one}")
    assert code == f"error: {one}/config.json: seed must be an int, got 'five'"


def test_kept_logs_give_the_table_beside_them():
    """But tables of one part, written when the last evaluation counted alone."""
    tables = glob.glob(os.path.join(ROOT, "results", "**", "table.md"), recursive=True)
    for path in tables:
        where = os.path.dirname(path)
        arms = logs.load(where)
        text = ablate.table(arms, logs.compared(where), every=arms)
        with open(path, encoding="utf-8") as f:
            there = f.read()
        assert there == text or there.startswith("| arm")
    assert len(tables) > 3


def test_compact_keeps_what_a_reader_asks_for():
    log = made(20)
    small = logs.compact(log)
    step = {k: x for k, x in log[3].items() if not k.startswith("kv_")}
    step["seconds"] = step.pop("rollout_s") + step.pop("learn_s")
    assert small[3] == step | dict(entropy=0.333333, accept_p05=0.333333)
    assert list(small[3])[0] == list(small[0])[0] == "kind" and small[0] == log[0]
    assert small[20]["kv_kept"] == 100 and "kv_kept" not in small[19]
    assert logs.compact(small) == small


@pytest.mark.parametrize("row, change, says", [
    (4, dict(reward="0.5"), "line 5: reward must be a finite number, got '0.5'"),
    (4, dict(reward=float("nan")), "reward must be a finite number, got nan"),
    (4, dict(gap=float("inf")), "gap must be"), (4, dict(lr=None), "lr must be"),
    (4, dict(kl=True), "kl must be"), (4, dict(tokens=10**400), "tokens must be"),
    (4, dict(reward_own="\x1b[2J"), r"reward_own must be a finite number, got '\x1b[2J'"),
    (4, dict(step=-1), "step must be a whole number from 0, got -1"),
    (4, dict(step=3.0), "step must be"), (4, dict(step=True), "step must be"),
    (4, dict(step=2), "step 2 is out of order"), (4, dict(step=1), "step 1 is out of order"),
    (4, dict(kind="eval"), "kind must be step with a reward"), (4, dict(kind=[]), "kind must be"),
    (0, "eval_dense", "line 1: a row of kind eval needs eval_compressed, eval_dense"),
    (4, "learn_s", "line 5: a row of kind step needs rollout_s, learn_s"),
    (6, "kv_kept", "the last step has no kv_kept"), (6, dict(kv_kept=0), "dense_shared above 0"),
])
def test_rows_that_train_does_not_write_are_named(row, change, says, tmp_path):
    log = made(6)
    put(tmp_path, log)
    assert logs.read(tmp_path / "log.jsonl") == log  # control
    if isinstance(change, str):
        del log[row][change]
    else:
        log[row] |= change
    put(tmp_path, log)
    with pytest.raises(ValueError) as e:
        logs.read(tmp_path / "log.jsonl")
    assert str(e.value).startswith(f"{tmp_path}/log.jsonl") and says in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("line", [b"\xff", b"[" * 100_000])
def test_lines_that_are_no_rows_are_named(line, tmp_path):
    (tmp_path / "log.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match="log.jsonl, line 1: [^\n]*$"):
        logs.read(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").write_bytes(line)  # without its end it is what a kill leaves
    assert logs.read(tmp_path / "log.jsonl") == []


def test_kept_logs_are_small_and_give_the_same_table(fake, tmp_path):
    out, run = fake
    kept, again, name = tmp_path / "kept", tmp_path / "again", 'x template={"a":1,"b":2}'
    assert run("--seeds=3", f"--keep={kept}")[0] == 1  # naive seed 1 fails
    assert sorted(os.listdir(kept)) == [
        "naive-0.jsonl", "naive-2.jsonl", "settings.json", "shadow-0.jsonl",
        "shadow-1.jsonl", "shadow-2.jsonl"]
    table = (out / "table.md").read_text()
    assert tabled(kept, f"--keep={again}") == table and "naive seed 1" in table
    for file in os.listdir(again):
        assert (kept / file).read_text() == (again / file).read_text()
    arm = logs.recorded(str(kept))["naive"]
    assert (arm["args"], arm["seeds"]) == ("config/naive.py --steps=12", [0, 1, 2])
    digits = dict(gap=1.2345678e-7, accept=1 / 7, rollout_s=0.123456789)
    log = logs.compact([r | digits if "gap" in r else r for r in made(120)])
    logs.keep(kept, {name: dict(args="", seeds=[0], steps=120, logs={0: log})})
    assert os.stat(kept / f"{logs.folder(name)}-0.jsonl").st_size < 30_000
    assert logs.load(str(kept), [name])[name]["logs"] == {0: log}  # a comma is found again
    assert {*logs.recorded(str(kept))} == {"naive", "shadow", name}


# comparisons

def test_comparisons_are_parsed():
    name = 'x,y lr=1e-4 template={"a":1,"b":2}'
    assert logs.parse_compare(f"{name}/smd budget=32/dense,a-b/c:d/compressed") == [
        (name, "smd budget=32", "dense", None), ("a-b", "c:d", "compressed", None)]
    assert logs.parse_compare("a/b>1/dense>-0.02,a/b/dense>.5,a/b/compressed") == [
        ("a", "b>1", "dense", -0.02), ("a", "b", "dense", 0.5), ("a", "b", "compressed", None)]
    assert len(logs.parse_compare(",".join(["a/b/dense"] * 4 + ["a/b/dense>0"] * 2))) == 6
    for text, says in (
            ("a/b/dense,", "write ARM/OTHER"), ("a/b/dense,c", "write ARM/OTHER"),
            ("a/b/dense a/b/dense", "write ARM/OTHER"), ("a/b/Dense", "write ARM/OTHER"),
            ("a/b/dense>-", "for a margin with >NUMBER"), ("a/b/dense>nan", "write ARM/OTHER"),
            ("a/b/dense<0.1", "write ARM/OTHER"), ("a/b>0.1", "write ARM/OTHER"),
            ("a/a/dense", "compare 'a/a/dense': write ARM/OTHER"),
            (",".join(["a/b/dense"] * 5), "names 5 comparisons, at most 4"),
            (",".join(["a/b/dense>0"] * 3), "names 3 margins, at most 2")):
        with pytest.raises(ValueError, match=says):
            logs.parse_compare(text)


RANKS = "p, ranks (no Holm)"


@pytest.fixture
def eighths(tmp_path):
    """Seeds of a and b that differ by 0, 1, 2, 3, 4 eighths, of which the test of t knows
    p = 0.0474 and an interval from 0.005; c has one seed in common with them.
    -> f(arguments): text of the table, its comparisons"""
    for seed in range(5):
        put(tmp_path / "a" / str(seed), made(12, eval_compressed=(2 + seed) / 8))
        put(tmp_path / "b" / str(seed), made(12, eval_compressed=0.25))
    for seed in ("4", "9"):
        put(tmp_path / "c" / seed, made(12, eval_dense=0.5))

    def compared(*argv):
        text = tabled(tmp_path, *argv)
        return text, cells(text, "Comparisons")
    return compared


def test_a_comparison_by_hand(eighths, tmp_path):
    """The second is without spread, the third has one seed."""
    text, t = eighths("a", "--compare=a/b/compressed,b/a/dense,a/c/dense")
    assert "**Comparisons**, named after 12 runs had begun: " in text
    first, second, third = t.values()
    assert list(t) == ["a - b, compressed", "b - a, dense", "a - c, dense"]
    assert first["seeds"] == "5" and first["mean"] == "+0.250 [+0.005, +0.495]"  # 1.9633 / 8
    assert first["each seed"] == "0: +0.000 1: +0.125 2: +0.250 3: +0.375 4: +0.500"
    assert (first["p"], first["p, Holm"]) == ("0.047", "0.14")
    assert first[RANKS] == "0.12" and second[RANKS] == "1"  # 2 of the 16 signs of four
    assert (second["mean"], second["p"]) == ("+0.000 [+0.000, +0.000]", "1")
    assert (third["seeds"], third["mean"], third["each seed"]) == ("1", "", "4: +0.500")
    assert third["p"] == third["p, Holm"] == third[RANKS] == ""
    assert list(cells(text)) == ["a"]  # the arm that was asked for
    _, t = eighths("--compare=a/b/compressed")
    assert t["a - b, compressed"]["p, Holm"] == "0.047"  # control: alone
    code = main("--table", f"--out={tmp_path}", "--compare=a/d/compressed")
    assert code == "error: compare: no arm 'd', only a, b, c"


def test_margins_by_hand(eighths):
    """Margins do not count for Holm."""
    _, t = eighths("--compare=a/b/compressed>0.001,a/b/compressed,b/a/compressed>-0.25,"
                   "a/c/dense")
    above, tested, below, _ = t.values()
    assert list(t)[:3] == ["a - b, compressed > 0.001", "a - b, compressed",
                           "b - a, compressed > -0.25"]
    assert above["margin"] == "lower bound 0.005 is above 0.001: holds"
    assert below["margin"] == "lower bound -0.495 is not above -0.25: not shown"
    assert above["p"] == above["p, Holm"] == above[RANKS] == tested["margin"] == ""
    assert all(above[key] == tested[key] for key in ("seeds", "mean", "each seed"))
    assert (tested["p"], tested["p, Holm"]) == ("0.047", "0.095")  # two are tested
    _, t = eighths("--compare=a/c/compressed>0.1")
    assert list(*t.values()) == ["comparison", "seeds", "mean", "each seed"]


def test_arms_are_compared_by_their_first_words(fake):
    """Named before rates are chosen; refused once the word may be another arm too."""
    out, run = fake
    shutil.copy(out / "shadow.py.json", out / "smd.py.json")
    smd, both = "config/smd.py --steps=12 --budget=30", "smd/shadow/dense,smd/shadow/dense>-1"
    assert run(smd, "--seeds=1", f"--compare={both}")[0] == 0
    t = cells((out / "table.md").read_text(), "Comparisons")
    assert list(t) == ["smd steps=12 budget=30 - shadow, dense",
                       "smd steps=12 budget=30 - shadow, dense > -1"]
    assert logs.compared(str(out)) == dict(compare=both, begun=0)
    code, calls = run("config/smd.py --budget=31", "--seeds=1")
    assert code.endswith("'smd' may mean any of smd steps=12 budget=30, smd budget=31")
    arms = ["smd lr=1", "smd", "tis lr=1"]
    found = [ablate.full_name(name, arms) for name in ("smd", "smd lr=1", "tis", "tis lr=1")]
    assert not calls and found == ["smd", "smd lr=1", "tis lr=1", "tis lr=1"]


def test_comparisons_are_written_down_before_the_runs(fake, tmp_path, monkeypatch):
    out, run = fake
    (out / "mended").touch()
    both, kept = "naive/shadow/compressed,naive/shadow/dense", tmp_path / "kept"
    launch, seen = ablate.launch, []

    def look(*args):
        seen.append(logs.compared(str(out)))
        return launch(*args)
    monkeypatch.setattr(ablate, "launch", look)
    assert run("--seeds=1", f"--compare={both}", f"--keep={kept}")[0] == 0
    assert seen == [dict(compare=both, begun=0)] * 2
    assert list(logs.recorded(str(out))) == ["naive", "shadow"]
    table = (out / "table.md").read_text()
    assert "**Comparisons**, named before the first run: " in table
    other, new = "--compare=naive/shadow/dense", tmp_path / "new"
    for folder in (out, kept):  # named once, they stay
        assert tabled(folder) == table
        for argv in (["--table", f"--out={folder}"],
                     [NAIVE, "config/shadow.py", f"--out={new}", f"--keep={folder}"]):
            code = main(*argv, other)
            assert code.startswith(f"error: compare was {both!r} in {str(folder)!r}, now it is")
    assert run("--seeds=3", other)[0].startswith("error: compare was") and not new.exists()


def test_comparisons_named_late_say_so(fake):
    out, run = fake
    assert run("--seeds=1")[0] == 0 and logs.compared(str(out)) is None
    assert "Comparisons" not in (out / "table.md").read_text()
    for _ in range(2):  # of seed 1 naive fails, both times
        assert run("--seeds=2", "--compare=naive/shadow/dense")[0] == 1
        table = (out / "table.md").read_text()
        assert "**Comparisons**, named after 2 runs had begun: " in table


# files of others

def test_a_log_with_a_step_twice_has_not_ended():
    log = made(20)
    assert logs.ended(log) and logs.ended(log, 20) and not logs.ended(log, 21)
    assert not logs.ended(log[:-1]) and not logs.ended(log[1:]) and not logs.ended([])
    assert not logs.ended(log[:5] + log[4:]) and not logs.ended(log[:4] + log[5:])


@pytest.mark.parametrize("name, text", [
    ("settings.json", "[1]"), ("settings.json", '{"ppo": {}}'), ("settings.json", "{"),
    ("settings.json", '{"a": {"args": "", "seeds": ["0"], "steps": 1}}'),
    ("settings.json", '{"a": {"args": "", "seeds": [0], "steps": 1, "start": 3}}'),
    ("settings.json", '{"--compare": {"compare": "a/b/c"}}'), ("x-0.jsonl", "[]\n"),
    ("settings.json", '{"--compare": {"compare": "a/b/dense"}}'),
    ("settings.json", '{"--compare": []}')])
def test_damaged_files_are_named(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    code = main("--table", f"--out={tmp_path}")
    assert code.startswith(f"error: {tmp_path / name}") and "\n" not in code


def test_pipes_are_refused(tmp_path):
    """Reading one would wait for ever."""
    for name, read in (("log.jsonl", logs.read), ("settings.json", read_json)):
        os.mkfifo(tmp_path / name)
        with pytest.raises(FileNotFoundError, match=f"{name} .*is not a regular file"):
            read(str(tmp_path / name))
