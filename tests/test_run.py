"""support/run.py: the folder of a run, whatever happens to the process that it belongs to."""
import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import kills
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import run.evaluate
import run.start
import support.checkpoint
import support.run as run_file
import train
from conftest import (
    FAST,
    HELD,
    TINY,
    Forked,
    at_call,
    contents,
    copy_of,
    read_checkpoint,
    read_log,
    same_weights,
    share_of_digits,
    train_here,
    write_problems,
)
from model import Transformer
from support.checkpoint import UNFINISHED, write_checkpoint, write_whole
from support.run import LIST, choose_device, hold, read_list, remove_listed, settings_kept
from support.screen import tell

# resuming

@pytest.mark.parametrize("ask", [
    ["--objective=ppo", "--ref_kl=0.5"], ["--objective=dpo", "--temperature=3"],
    ["--teacher=initial", "--warmup=0"]])
def test_objectives_resume_bitwise(ask, tmp_path, monkeypatch):
    """4 steps equal 2 and, resumed, 2 more. The model as it was before training is read again: in
    the controls it is another one then, or PPO's value head is lost."""
    monkeypatch.setattr("data.tasks.reward", share_of_digits)
    ask = [*ask, "--eval_every=99", "--eval_problems=1", "--eval_final=1"]
    whole, halves, wrong = (str(tmp_path / x) for x in ("whole", "halves", "wrong"))
    train_here(*ask, f"--out_dir={whole}")
    train_here(*ask, "--steps=2", f"--out_dir={halves}")
    shutil.copytree(halves, wrong)
    train_here(*ask, "--resume=True", f"--out_dir={halves}")
    assert same_weights(whole, halves) and read_checkpoint(whole)["step"] == 4
    assert read_log(whole)[1] == read_log(halves)[1]
    state, load, loaded = read_checkpoint(wrong), Transformer.from_pretrained, []
    if "ppo" in ask[0]:
        head = state["learner"]["masters"][-2:]
        assert [x.shape for x in head] == [(1, 128), (1,)] and head[1].abs() > 0
        state["learner"]["masters"][-2:] = [torch.zeros_like(x) for x in head]
        write_checkpoint(os.path.join(wrong, "ckpt.pt"), state)
        # the head stays out of the model
        with safe_open(os.path.join(whole, "model", "model.safetensors"), "pt") as f:
            assert all(f.get_tensor(k).shape != (1, 128) for k in f.keys())  # noqa: SIM118

    def other_the_second_time(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        if len(loaded) == 2:
            for p in loaded[1].parameters():
                p.data.mul_(0.9)
        return loaded[-1]

    if "ppo" not in ask[0]:
        monkeypatch.setattr(Transformer, "from_pretrained", other_the_second_time)
    train_here(*ask, "--resume=True", f"--out_dir={wrong}")
    assert not same_weights(whole, wrong)


# whose folder it is

def times(folder):
    return {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}


@pytest.mark.parametrize("say, args", [
    ("holds another run", ["--seed=0"]),
    ("lr was 0.0", ["--resume=True", "--lr=1e-5"]),
    ("has done 4 steps already", ["--resume=True", "--steps=2"]),
    ("choose one of them", ["--resume=True", "--overwrite=True"]),
    # found too late, the old run would be gone
    ("needs at least", ["--overwrite=True", "--prompt_tokens=20"]),
    ("where this run would save its own", ["--overwrite=True", "--model={out}/model"]),
    ("where this run would save its own", ["--overwrite=True", "--model={out}/best"]),
    ("out is a run's folder: use --model=", ["--overwrite=True", "--model={out}"]),
    ("where this run would save its own", ["--overwrite=True", "--task={out}/log.jsonl"]),
    ("where this run would save its own", ["--model={link}", "--out_dir={link}"]),
    ("error: .*log.jsonl/out", ["--out_dir={out}/log.jsonl/out"]),  # that cannot be made
])
def test_out_dir_is_guarded(finished, tmp_path, say, args):
    """A folder that holds a run is not touched unless resume or overwrite is said, nor resumed as
    another run; nor is a model's, also through a link."""
    out, link = finished[0], tmp_path / "link"
    link.symlink_to(f"{out}/model")
    before = times(out), times(link)
    with pytest.raises(SystemExit, match=say):
        train_here(f"--out_dir={out}", *(arg.format(out=out, link=link) for arg in args))
    assert (times(out), times(link)) == before


def test_a_start_that_saved_nothing_counts_as_none(tmp_path, monkeypatch):
    """As a kill in the first evaluation leaves it: the same command begins. Not so where a row was
    logged, a checkpoint or a model is there, or config.json is no run's."""
    out = tmp_path / "out"
    ask = ["--steps=1", f"--out_dir={out}"]
    with monkeypatch.context() as patched:
        at_call(1, stop, patched.setattr)
        with pytest.raises(SystemExit):
            train_here(*ask)
    for name in ("log.jsonl", "ckpt.pt", "ckpt-previous.pt", "best/model.safetensors"):
        (out / name).write_text("{}\n")
        with pytest.raises(SystemExit, match="holds"):
            train_here(*ask)
        with pytest.raises(SystemExit, match="--overwrite=True"):
            train_here(*ask, "--resume=True")
        (out / name).unlink()
    settings = (out / "config.json").read_text()
    (out / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds config.json, which no run"):
        train_here(*ask)
    (out / "config.json").write_text(settings)
    (out / "log.jsonl").write_text("")
    (out / "samples.txt").write_text("old\n")
    with pytest.raises(SystemExit, match="nothing was saved, so start again without --resume"):
        train_here(*ask, "--resume=True")
    train_here(*ask)
    assert len(read_log(out)[1]) == 1 and "old" not in (out / "samples.txt").read_text()


def test_one_process_a_folder(finished, tmp_path):
    """While another one works in out_dir, a run there is refused and leaves it alone; afterwards it
    may begin."""
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(os.path.join(finished[0], "config.json"), out)
    (out / "log.jsonl").write_text("theirs\n")
    ask, theirs = ["--steps=1", "--overwrite=True", f"--out_dir={out}"], os.open(out, os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    with pytest.raises(SystemExit) as e:
        train_here(*ask)
    assert str(e.value) == f"error: out_dir {str(out)!r} is in use by another process"
    assert (out / "log.jsonl").read_text() == "theirs\n"
    os.close(theirs)
    train_here(*ask)


def test_a_child_holds_no_lock(tmp_path):
    """A run that was killed may begin again, though what its reward has forked still works."""
    hold(tmp_path)
    where, ours = HELD.popitem()
    with pytest.raises(ValueError, match="in use by another process"):  # the control
        hold(tmp_path)
    HELD[where] = ours
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"x")
        time.sleep(100)
        os._exit(0)
    os.read(read, 1)
    os.close(HELD.popitem()[1])  # as the end of a process does
    try:
        hold(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(HELD.popitem()[1])


@pytest.mark.parametrize("name", ["config.json", "ckpt.pt", "best/notes.txt"])
def test_foreign_files_stay(name, tmp_path):
    """What no run made is refused by name and left alone, whatever is said."""
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text('{"model_type": "qwen3"}')
    for say in ("--overwrite=True", "--overwrite=False"):
        with pytest.raises(SystemExit, match=f"holds {name}, which no run of this program"):
            train_here("--steps=1", say, f"--out_dir={out}")
    assert (out / name).read_text() == '{"model_type": "qwen3"}'
    assert [n for _, _, names in os.walk(out) for n in names] == [(out / name).name]


def test_a_list_that_names_no_file(tmp_path):
    """It is not removed, and is no reason to stop half-way. A list of other things is none."""
    names = ["..", ".", "", "sub", "a/b", "nul\0", "file", LIST]
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").touch()

    def listed(*files):
        (tmp_path / LIST).write_text(json.dumps(dict(step=1, files=files)))
        return read_list(tmp_path)

    for wrong in ("\ud800", 5):
        assert listed(*names, wrong) == (None, [])
    assert listed(*names) == (1, ["file", LIST])
    assert listed("gone", *names) == (None, ["gone", "file", LIST])  # the control: not whole
    remove_listed(tmp_path)
    assert os.listdir(tmp_path) == ["sub"]


def test_overwrite_removes_what_a_run_lists(finished, tmp_path):
    """Nothing of the old run is left. What somebody put beside it stays, also what looks
    unfinished; what the old model had and the new one has not goes; a model that no list names is
    refused."""
    out, gone = copy_of(finished[0], tmp_path), "chat_template.jinja"
    for name in ("model", "best"):
        folder, path = out / name, out / name / "run.json"
        found = json.loads(path.read_text())
        found["files"].insert(0, gone)  # as of a model with a template
        path.write_text(json.dumps(found))
        for file in ("mine.json", "mine.safetensors", "mine.jinja", gone):
            (folder / file).write_text("old")
        (folder / "link.json").symlink_to(folder / "mine.json")
    mine = [out / f"{name}.tmp" for name in ("ckpt.pt", "ckpt-previous.pt", "config.json")]
    for path in mine:
        path.write_text("mine")
    left = out / f"ckpt.pt{UNFINISHED}"  # by a run that was killed
    left.write_text("half")
    before = contents(out / "model")
    train_here("--overwrite=True", "--steps=1", "--eval_every=9", "--seed=1", f"--out_dir={out}")
    for name in ("model", "best"):
        after = contents(out / name)
        assert before.keys() - after.keys() == {gone}
        assert all(after[x] == b"old" for x in after if x.startswith(("mine", "link")))
    assert all(path.read_text() == "mine" for path in mine) and not left.exists()
    assert contents(out / "model")["model.safetensors"] != before["model.safetensors"]  # control
    assert json.loads((out / "model" / "run.json").read_text())["step"] == 1
    assert [r["step"] for r in read_log(out)[1]] == [0] and read_checkpoint(out)["step"] == 1
    assert (out / "samples.txt").read_text().count("--- step 0") == 2
    assert not same_weights(out, finished[0])
    (out / "model" / "run.json").unlink()
    with pytest.raises(SystemExit, match="holds model/config.json, which no run of this program"):
        train_here("--overwrite=True", "--steps=1", f"--out_dir={out}")
    assert read_checkpoint(out)["step"] == 1


def test_modes_and_home(tmp_path, monkeypatch):
    """Files have the mode that the umask says; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        train_here("--steps=1", "--eval_every=9", "--out_dir=~/x")
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == ["x"]
    modes = {name: stat.S_IMODE(os.stat(os.path.join(base, name)).st_mode)
             for base, _, names in os.walk(tmp_path) for name in names}
    assert len(modes) == 10 and set(modes.values()) == {0o640}
    with pytest.raises(SystemExit, match=f"{tmp_path}/x/model' is where this run"):
        train_here("--model=~/x/model", f"--out_dir={tmp_path}/x", "--overwrite=True")


def test_a_folder_that_goes_away(tmp_path, monkeypatch):
    """A run whose folder is removed, or is another one now, stops at its next write."""
    out = tmp_path / "out"

    def remove():
        shutil.rmtree(out)
        if again:
            out.mkdir()
            (out / "log.jsonl").write_text("theirs")

    for again in (False, True):
        with monkeypatch.context() as patched:  # in the first step, after two of evaluation
            at_call(3, remove, patched.setattr)
            with pytest.raises(SystemExit) as e:
                train_here(f"--out_dir={out}")
        assert str(e.value) == (f"error: out_dir {str(out)!r} was removed or replaced while this "
                                "run used it: nothing more is written")
        assert os.path.exists(out) == again
    assert os.listdir(out) == ["log.jsonl"] and (out / "log.jsonl").read_text() == "theirs"
    hold(out)  # nobody has it


# ends that were not planned

RARELY = ["--group=2", "--eval_problems=2", "--eval_final=2", "--eval_batch=1",
          "--save_every=100"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("undisturbed") / "out")
    train_here(*RARELY, f"--out_dir={out}")
    return out


# calls of generate: 4 batches of evaluation, 2 rollouts, 4 batches, 2 rollouts, 4 batches
@pytest.mark.parametrize("name, call, step", [
    ("SIGINT", 1, 0), ("SIGHUP", 5, 1), ("SIGTERM", 8, 2), ("SIGHUP", 15, 4)])
def test_a_signal_saves_what_is_done(undisturbed, tmp_path, monkeypatch, capsys, name, call, step):
    """An evaluation is left between two batches, a step is finished, and only what was saved is
    said to be; resumed, the run ends as if nobody had cut it."""
    number, out = getattr(signal, name), str(tmp_path / "out")
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    with monkeypatch.context() as patched:
        calls = at_call(call, lambda: signal.raise_signal(number), patched.setattr)
        with pytest.raises(SystemExit) as e:
            train_here(*RARELY, f"--out_dir={out}")
    assert e.value.code == 128 + number and len(calls) == call
    assert f"saved in {out} at step {step}; go on with" in capsys.readouterr().out
    assert read_checkpoint(out)["step"] == step
    assert "ckpt.pt" in kills.differences(undisturbed, out)  # the control
    train_here(*RARELY, "--resume=True", f"--out_dir={out}")
    assert kills.differences(undisturbed, out) == []


def stop():
    raise KeyboardInterrupt  # stands for a kill: nothing is saved


@pytest.mark.parametrize("call", [6, 14])
def test_what_was_not_saved_is_done_again(undisturbed, tmp_path, monkeypatch, call):
    """Log and samples are cut back to the last checkpoint, whatever was written after it."""
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        at_call(call, stop, patched.setattr)
        with pytest.raises(SystemExit):
            train_here(*RARELY, f"--out_dir={out}")
    for name in ("log.jsonl", "samples.txt"):
        with open(out / name, "a") as f:
            f.write('{"step": 3')  # half a line
        assert (out / name).stat().st_size > read_checkpoint(out)["sizes"][name]
    train_here(*RARELY, "--resume=True", f"--out_dir={out}")
    assert kills.differences(undisturbed, str(out)) == []


def test_real_signals(tmp_path):
    """Processes that are cut at random moments, and what a resumed run makes of them (kills.py does
    more of it)."""
    rng, whole, cuts = random.Random(1), str(tmp_path / "whole"), {}
    often = [*kills.SETTINGS, "--eval_batch=4"]
    for name, phase in (("SIGTERM", "evaluation"), ("SIGHUP", "step"), ("SIGKILL", "checkpoint")):
        out = str(tmp_path / name)
        began = time.time()
        child = Forked(out + ".log", train.main, [*often, f"--out_dir={out}"])
        kills.Cut(child, out, out + ".log", began=began).send(name, phase, rng)
        cuts[name] = out, child
    train_here(*often, f"--out_dir={whole}")
    first, *rewards = [row["eval_compressed"] for row in read_log(whole)[0]]
    assert first < rewards[0] == max(rewards)  # two evaluations save best/, as kills.py says
    for name, (out, child) in cuts.items():
        assert child.wait() in kills.codes(name, "none"), open(out + ".log").read()
        train_here(*often, *kills.go_on(out), f"--out_dir={out}")
        assert kills.differences(whole, out) == []


def raising(*numbers):
    return lambda: [signal.raise_signal(number) for number in numbers]


def test_a_closed_terminal_hangs_up_twice(tmp_path, monkeypatch):
    """The kernel and the shell each send SIGHUP; what is ignored (nohup) stays so."""
    out = str(tmp_path / "out")
    at_call(None, raising(signal.SIGHUP, signal.SIGHUP), monkeypatch.setattr)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(SystemExit) as e:
        train_here(f"--out_dir={out}")
    assert e.value.code == 129 and read_checkpoint(out)["step"] == 0
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train_here("--steps=1", "--overwrite=True", f"--out_dir={out}")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert read_checkpoint(out)["step"] == 1


def without_streams(*args):
    """train.main in a process that has none, as `>&- 2>&-` starts it."""
    sys.stdin = sys.stdout = sys.stderr = None
    os.closerange(0, 3)
    train.main(args)


def test_what_cannot_be_printed(tmp_path):
    """A reader that leaves, an encoding without the letter, closed streams: the run ends well, its
    files are there. The control is a plain print."""
    ask = [*FAST, "--steps=1", "--eval_every=1", "--eval_final=1"]
    reader, closed, said = tmp_path / "\u00fc", tmp_path / "closed", tmp_path / "said"
    command = [sys.executable, train.__file__, *ask, f"--out_dir={reader}"]
    way = 'PYTHONIOENCODING=ascii "$@" 2>&1 | head -1; exit ${PIPESTATUS[0]}'
    process = subprocess.Popen(["bash", "-c", way, "run", *command], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert Forked(said, without_streams, *ask, f"--out_dir={closed}").wait() == 0
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and errors == "" and len(printed.splitlines()) == 1
    assert said.read_text() == ""
    for out in (reader, closed):
        assert len(read_log(out)[1]) == 1 and (out / "model" / "model.safetensors").exists()
    plain = 'python -c "for i in range(100000): print(i)" 2>/dev/null | head -1; ' \
            "exit ${PIPESTATUS[0]}"
    assert subprocess.run(["bash", "-c", plain], stdout=subprocess.PIPE).returncode != 0


def test_tell(tmp_path):
    """The line that fails and those after it are dropped, of this stream alone."""
    full, ascii_only = open("/dev/full", "w"), open(tmp_path / "x", "w", encoding="ascii")
    tell("a", full)
    tell("b", full)
    full.close()  # has nothing left to write
    tell("\u00fc", ascii_only)
    tell("c", ascii_only)
    ascii_only.close()
    tell("d", ascii_only)
    assert open(tmp_path / "x").read() == "\\xfc\nc\n"
    with pytest.raises(OSError), open("/dev/full", "w") as f:  # the control
        f.write("a")


def on_a_full_disk(*args):
    """train.main that can write no file of more than 200 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    train.main([*FAST, *args])


def test_full_disk(tmp_path):
    """A write that fails half-way says so in one line and leaves the checkpoint before it whole."""
    out, said = str(tmp_path / "out"), tmp_path / "said"
    often = ["--save_every=1", "--eval_every=99", "--eval_final=1", f"--out_dir={out}"]
    train_here("--steps=1", *often)
    assert Forked(said, on_a_full_disk, *often, "--resume=True").wait() == 1
    before, *errors = said.read_text().split("error: ")
    assert len(errors) == 1 and errors[0].startswith("could not write")
    assert errors[0].endswith(f"{out}/ckpt.pt holds step 1\n") and errors[0].count("\n") == 1
    assert "ckpt.pt: File too large; what was there is untouched" in errors[0]
    assert before.splitlines()[-1].startswith("step ")
    assert read_checkpoint(out)["step"] == 1
    assert not os.path.exists(os.path.join(out, "ckpt.pt" + UNFINISHED))


def test_damaged_checkpoint(finished, tmp_path):
    """It is refused, the generation before it is named, and that one goes on."""
    out = copy_of(finished[0], tmp_path)
    whole = (out / "ckpt.pt").read_bytes()
    before = (out / "log.jsonl").read_bytes()
    for wrong in (whole[:len(whole) // 2], b"", b"text", None):
        (out / "ckpt.pt").write_bytes(wrong) if wrong is not None else (out / "ckpt.pt").unlink()
        with pytest.raises(SystemExit, match="^error: resume: .*ckpt.pt (is damaged|does not).*; "
                           f"{out}/ckpt-previous.pt is whole and holds step 2: rename it to "
                           "ckpt.pt and resume from it$"):
            train_here("--resume=True", f"--out_dir={out}")
        assert (out / "log.jsonl").read_bytes() == before
    os.replace(out / "ckpt-previous.pt", out / "ckpt.pt")
    train_here("--resume=True", f"--out_dir={out}")
    assert kills.differences(finished[0], out) == []


def test_every_flipped_bit_is_found(tmp_path):
    """60 flips anywhere in the file; torch alone loads most of them as other weights."""
    path, flipped = str(tmp_path / "ckpt.pt"), str(tmp_path / "flipped")
    state = dict(step=3, learner=[torch.randn(60, 20)], name="x")
    write_checkpoint(path, state)
    again = support.checkpoint.read_checkpoint(path)
    assert torch.equal(again["learner"][0], state["learner"][0]) and again["name"] == "x"
    whole, rng, unnoticed = open(path, "rb").read(), random.Random(0), 0
    for _ in range(60):
        wrong = bytearray(whole)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        with open(flipped, "wb") as f:
            f.write(wrong)
        with pytest.raises(ValueError, match="checksum"):
            support.checkpoint.read_checkpoint(flipped)
        try:
            loaded = torch.load(flipped, weights_only=True)["learner"][0]
            unnoticed += not torch.equal(loaded, state["learner"][0])
        except Exception:  # whatever the wrong bit leads to
            pass
    assert unnoticed > 15  # the control


def first_master(state):
    return state["learner"]["optimizer"]["state"][0]


def test_checkpoints_of_another_kind(finished, tmp_path):
    """A file that is whole but does not hold what it should is refused in one line."""
    out = copy_of(finished[0], tmp_path)
    for say, change in (
            ("step -1 and sizes", lambda s: s.update(step=-1)),
            ("seed was false in", lambda s: s["config"].update(seed=False)),
            ("learner must be of type dict, got NoneType", lambda s: s.pop("learner")),
            ("sizes .None, ", lambda s: s["sizes"].pop("log.jsonl")),
            ("no list of tensors named masters", lambda s: s["learner"].pop("masters")),
            ("other shapes than the model", lambda s: s["learner"]["masters"].pop()),
            ("not finite numbers", lambda s: s["learner"]["masters"][0].fill_(float("nan"))),
            ("optimizer state does not fit", lambda s: s["learner"].pop("optimizer")),
            ("optimizer state does not fit", lambda s: first_master(s).pop("exp_avg")),
            ("optimizer state does not fit",
             lambda s: first_master(s).update(exp_avg=torch.zeros(3)))):
        state = read_checkpoint(finished[0])
        change(state)
        write_checkpoint(str(out / "ckpt.pt"), state)
        before = times(out)
        with pytest.raises(SystemExit, match=say) as e:
            train_here("--resume=True", f"--out_dir={out}")
        assert "\n" not in str(e.value) and times(out) == before


def test_a_log_that_was_lost(finished, tmp_path, capsys):
    """Said, and no reason to lose the rest."""
    out = copy_of(finished[0], tmp_path)
    whole = (out / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(whole[:3]) + '{"half')
    (out / "samples.txt").unlink()
    train_here("--resume=True", "--steps=5", f"--out_dir={out}")
    printed = capsys.readouterr().out
    assert printed.count("lacks some of what was written before step 4") == 2
    assert [r["step"] for r in read_log(out)[1]] == [0, 1, 4]


# others' code in this process

ASK = ["--reward=mine:reward", "--steps=2", "--eval_every=9", "--save_every=9", "--out_dir=out"]
FORKS = """
import multiprocessing, os, sys, time
os.chdir("/")
codes = []
def ended_by_sigterm():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    child.terminate()
    child.join(20)
    codes.append(child.exitcode)
def reward(row, text, tokens):
    os.chdir("/")
    {}
    return sum(map(str.isdigit, text)) / max(1, len(text))
"""
COMES_BACK = """pid = os.fork()
    if not pid: {}
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"""


@pytest.mark.parametrize("called, code", [
    (COMES_BACK.format("sys.exit(3)"), 3), (COMES_BACK.format("raise ValueError"), 1),
    (COMES_BACK.format("return 0"), 0), ("codes or ended_by_sigterm()", -signal.SIGTERM)])
def test_what_a_reward_does_to_its_process(called, code, mine):
    """A child ends where the reward does: else two processes would go on with one run. SIGTERM ends
    one, which the run would answer only after its step. All goes on in the folder where it began,
    whose model and problems have relative names."""
    mine(FORKS.format(called))
    here = os.getcwd()
    shutil.copytree(TINY, "M")
    write_problems("p.jsonl", range(20))
    train_here(*ASK, "--steps=1", "--model=./M", "--task=p.jsonl")
    assert set(sys.modules["mine"].codes) == {code}
    assert os.getcwd() == here and len(read_log("out")[1]) == 1


def test_a_folder_that_a_thread_leaves(tmp_path, monkeypatch):
    """Where nobody can put it back in time: out_dir is where it was when the run began."""
    monkeypatch.chdir(tmp_path)
    at_call(3, lambda: os.chdir("/"), monkeypatch.setattr)
    train_here("--steps=2", "--eval_every=9", "--save_every=1", "--out_dir=out")
    assert os.getcwd() == "/" and len(read_log(tmp_path / "out")[1]) == 2
    assert read_checkpoint(tmp_path / "out")["step"] == 2


HANDLER = "signal.signal(signal.{}, lambda *_: None)"


@pytest.mark.parametrize("sets", [
    "kept.append(torch.inference_mode()); kept[-1].__enter__()", "torch.no_grad().__enter__()",
    "torch.set_grad_enabled(False)", "os.chdir('/')",
    "torch.set_default_dtype(torch.float64)", "torch.set_default_device('meta')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "torch.set_num_threads(2)",
    "torch.use_deterministic_algorithms(True, warn_only=True)",
    "torch.autocast('cpu', torch.bfloat16).__enter__()", "signal.alarm(1000)",
    *(HANDLER.format(name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM"))])
def test_what_others_code_sets_is_set_back(sets):
    """Each changes something, as the control shows."""
    def now():
        x, y = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i), dtype=torch.float32,
                            device="cpu") for i in (0, 1))
        return ([get() for get, _ in run_file.SHARED], torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(), (x @ y).dtype, (x @ y).double().sum().item())

    before, kept = now(), []
    for _ in range(2):
        with settings_kept():
            exec(sets, dict(os=os, torch=torch, signal=signal, kept=kept))
            assert now() != before
        assert now() == before
    kept.clear()  # what ends when it is collected
    assert now() == before
    with pytest.raises(ValueError), settings_kept():
        exec(sets, dict(os=os, torch=torch, signal=signal, kept=kept))
        raise ValueError
    assert now() == before


# where a run stands

def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    """It is said once, and the run goes on; where a lock is refused somebody else has it."""
    def refused(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))
        return flock

    with monkeypatch.context() as m:
        m.setattr("fcntl.flock", refused(errno.ENOLCK))
        train_here("--steps=1", "--eval_every=9", f"--out_dir={tmp_path / 'out'}")
    said = capsys.readouterr().out
    assert said.count("on a file system that cannot lock a folder (No locks available): make") == 1
    monkeypatch.setattr("fcntl.flock", refused(errno.EWOULDBLOCK))
    with pytest.raises(SystemExit, match="is in use by another process"):
        train_here("--steps=2", "--resume=True", f"--out_dir={tmp_path / 'out'}")


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    """No negative seconds, and no rate of 2e10 tokens."""
    moment = time.time() + 10**6
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: moment - 100 * next(clock))
    train_here("--steps=1", f"--out_dir={tmp_path / 'out'}")
    _, row, _ = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    assert 0 < row["rollout_s"] < 60 and 0 < row["learn_s"] < 60 and row["tokens_per_s"] < 10**6
    assert time.time() > time.time()  # the control


# what a run leaves beside its last model

def test_the_best_model_is_kept(tmp_path, capsys, monkeypatch):
    """A run that collapses leaves the model of its best evaluation too."""
    said = []

    def as_at_first(problem, text):
        if len(said) < 16:  # the first evaluation, under two caches
            said.append((problem.text, text))
        return float((problem.text, text) in said)

    monkeypatch.setattr("data.tasks.reward", as_at_first)
    out = tmp_path / "out"
    train_here("--lr=1", "--warmup=0", "--eval_final=8", f"--out_dir={out}")
    evals = read_log(out)[0]
    assert evals[0]["eval_compressed"] == 1 and evals[-1]["eval_compressed"] == 0
    best, last, began = (load_file(os.path.join(folder, "model.safetensors"))
                         for folder in (out / "best", out / "model", TINY))
    assert all(torch.equal(best[name], began[name]) for name in began)
    assert not any(torch.equal(last[name], began[name]) for name in began)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-10] == (f"model saved to {out}/model: step 4, held-out reward 0.000 with the "
                         "compressed cache")
    assert lines[-9] == f"best of 3 evaluations saved to {out}/best: step 0, 1.000"
    assert (out / "best" / "tokenizer.json").exists()
    assert lines[-1].endswith("0.000)")  # the last counts


# the pieces

def test_write_whole(tmp_path, monkeypatch):
    """A file is replaced at once, or not at all."""
    path = str(tmp_path / "file")

    def write(file):
        file.write(b"new")

    def fail(file, *_, **__):
        if file != "file.smd-tmp":
            write(file)
        raise OSError("no space left\non device")

    with open(path, "w") as f:
        f.write("old")
    with pytest.raises(OSError, match="could not write .*file: no space left on device; what was"):
        write_whole(path, fail)
    assert open(path).read() == "old" and os.listdir(tmp_path) == ["file"]
    with monkeypatch.context() as broken:  # what was there must not go before it is replaced
        broken.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="could not write"):
            write_whole(path, write)
    assert open(path).read() == "old" and os.listdir(tmp_path) == ["file"]
    write_whole(path, write)
    assert open(path).read() == "new" and os.listdir(tmp_path) == ["file"]


def test_devices():
    c = SimpleNamespace(device="auto")
    choose_device(c)
    assert c.device == ("cuda" if torch.cuda.is_available() else "cpu")
    for device in ("gpu", "cpu:0", "cuda:x", "cuda:99"):
        with pytest.raises(ValueError, match=f"device must be auto|{device} was asked for"):
            choose_device(SimpleNamespace(device=device))


# the model has 1.1 million parameters
@pytest.mark.parametrize("new, limit, device, asked, want", [
    (True, 1_000_000, "cuda", "auto", "bfloat16"), (True, 1_000_000, "cpu", "auto", "float32"),
    (True, 1_000_000, "cuda:1", "auto", "bfloat16"), (True, 2_000_000, "cuda:1", "auto", "float32"),
    (True, 2_000_000, "cuda", "bfloat16", "bfloat16"),
    (False, 2_000_000, "cpu", "bfloat16", "bfloat16"),
    (False, 1_000_000, "cuda", "auto", "float32"), (False, 1_000_000, "cuda", "float16", "float16"),
    (False, 1_000_000, "cuda", "bfloat16", None)])  # emulated: refused
def test_what_auto_means(new, limit, device, asked, want, monkeypatch):
    """A card is new if it computes in bfloat16 and does not emulate it."""
    monkeypatch.setattr(run.start, "BFLOAT16_FROM", limit)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation: new or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    c = SimpleNamespace(device=device, dtype=asked)
    if want is None:
        with pytest.raises(ValueError, match="does not support it, use --dtype=float16 or"):
            run.start.choose_dtype(c, TINY)
    else:
        run.start.choose_dtype(c, TINY)
        assert c.dtype == want
