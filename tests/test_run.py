"""support/run.py: the folder of a run, whatever happens to the process that it belongs to."""
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import train
from conftest import FAST, ROOT, read_checkpoint, read_log, run_train, start_train, train_here
from objectives.dpo import DPO
from support.run import Metrics, choose_device, write_whole


def masters(out_dir):
    return read_checkpoint(out_dir)["learner"]["masters"]


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(masters(a), masters(b)))


# resuming

def test_resume_is_bitwise(finished, tmp_path):
    """4 steps equal 2 steps, a new process, and 2 more; another seed does not."""
    out, other = str(tmp_path / "out"), str(tmp_path / "other")
    train_here("--steps=2", f"--out_dir={out}")
    train_here("--steps=2", "--seed=1", "--eval_every=99", f"--out_dir={other}")
    assert not same_weights(out, other)
    code, _, errors = run_train("--resume=True", f"--out_dir={out}")
    assert code == 0, errors
    whole, halves = read_checkpoint(finished[0]), read_checkpoint(out)
    assert whole["step"] == halves["step"] == 4 and same_weights(out, finished[0])
    states = [x["learner"]["optimizer"]["state"].values() for x in (whole, halves)]
    for a, b in zip(*states):
        assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
    assert read_log(out)[1] == read_log(finished[0])[1]


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_objectives_resume_bitwise(name, tmp_path, monkeypatch):
    """As above. The controls resume without PPO's value head, or with DPO's trained weights as the
    reference."""
    ask = [os.path.join(ROOT, "config", f"{name}.py"), "--eval_every=99", "--eval_problems=1"]
    whole, halves, wrong = (str(tmp_path / x) for x in ("whole", "halves", "wrong"))
    train_here(*ask, f"--out_dir={whole}")
    train_here(*ask, "--steps=2", f"--out_dir={halves}")
    shutil.copytree(halves, wrong)
    train_here(*ask, "--resume=True", f"--out_dir={halves}")
    assert same_weights(whole, halves) and read_checkpoint(whole)["step"] == 4
    if name == "ppo":
        state = read_checkpoint(wrong)
        head = state["learner"]["masters"][-2:]
        assert [x.shape for x in head] == [(1, 128), (1,)] and head[1].abs() > 0
        state["learner"]["masters"][-2:] = [torch.zeros_like(x) for x in head]
        torch.save(state, os.path.join(wrong, "ckpt.pt"))
        # the head stays out of the model
        with safe_open(os.path.join(whole, "model", "model.safetensors"), "pt") as f:
            assert all(f.get_tensor(k).shape != (1, 128) for k in f.keys())  # noqa: SIM118  it is no dict
    else:
        def against_itself(net, c, initial):
            return DPO(net, c, lambda: net)
        monkeypatch.setitem(train.OBJECTIVES, "dpo", against_itself)
    train_here(*ask, "--resume=True", f"--out_dir={wrong}")
    assert not same_weights(whole, wrong)


# whose folder it is

def times(folder):
    return {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}


@pytest.mark.parametrize("say, args", [
    ("holds another run", ["--seed=0"]),
    ("lr was 0.0", ["--resume=True", "--lr=1e-5"]),
    ("has done 4 steps already", ["--resume=True", "--steps=2"]),
    # found too late, the old run would be gone
    ("needs at least", ["--overwrite=True", "--prompt_tokens=20"]),
    ("where this run would save its own", ["--overwrite=True", "--model={out}/model"]),
])
def test_out_dir_is_guarded(finished, say, args):
    """A folder that holds a run is not touched unless resume or overwrite is said, nor resumed as
    another run."""
    out = finished[0]
    before = times(out)
    with pytest.raises(SystemExit, match=say):
        train_here(*(arg.format(out=out) for arg in args), f"--out_dir={out}")
    assert times(out) == before


def test_out_dir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="error: .*file"):
        train_here(f"--out_dir={tmp_path / 'file' / 'out'}")


def test_overwrite_begins_again(finished, tmp_path):
    """Nothing of the old run is left: log, samples, checkpoint, model."""
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    train_here("--overwrite=True", "--steps=1", "--eval_every=9", f"--out_dir={out}")
    assert [r["step"] for r in read_log(out)[1]] == [0] and read_checkpoint(out)["step"] == 1
    assert (out / "samples.txt").read_text().count("--- step 0") == 2
    assert not same_weights(out, finished[0])


def test_one_process_a_folder(tmp_path):
    """While another process works in out_dir, a run there is refused and leaves it alone;
    afterwards it may begin."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "log.jsonl").write_text("theirs\n")
    code = f"from support.run import hold; hold({str(out)!r}); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    ask = ["--steps=1", "--overwrite=True", f"--out_dir={out}"]
    with pytest.raises(SystemExit) as e:
        train_here(*ask)
    assert str(e.value) == f"error: out_dir {str(out)!r} is in use by another process"
    assert (out / "log.jsonl").read_text() == "theirs\n"
    holder.kill()  # the lock goes with the process, however it ends
    holder.communicate()
    train_here(*ask)


# ends that were not planned

def test_interrupt_saves_and_resumes(tmp_path):
    out = str(tmp_path / "out")
    once = ["--eval_every=500", "--eval_problems=1"]
    process = start_train("--steps=500", *once, f"--out_dir={out}")
    for line in process.stdout:
        if line.startswith("step    0"):
            process.send_signal(signal.SIGINT)
            break
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "go on with the same command and --resume=True" in printed
    step = read_checkpoint(out)["step"]
    assert 1 <= step < 10
    train_here(f"--steps={step + 1}", *once, "--resume=True", f"--out_dir={out}")
    assert [r["step"] for r in read_log(out)[1]] == list(range(step + 1))


def test_kill_leaves_a_whole_checkpoint(tmp_path):
    """kill -9 at any moment: the checkpoint that is there loads, and the log goes on without a step
    twice."""
    out, often = str(tmp_path / "out"), ["--save_every=1", "--eval_every=500", "--eval_problems=1"]
    process = start_train("--steps=500", *often, f"--out_dir={out}")
    for line in process.stdout:
        if line.startswith("step    3"):
            process.kill()
            break
    process.communicate(timeout=60)
    step = read_checkpoint(out)["step"]
    assert step >= 3
    with open(os.path.join(out, "log.jsonl"), "a") as f:
        f.write('{"step": 3')  # half a line
    train_here(f"--steps={step + 2}", *often, "--resume=True", f"--out_dir={out}")
    assert [r["step"] for r in read_log(out)[1]] == list(range(step + 2))


def test_full_disk(tmp_path):
    """A write that fails half-way says so in one line and leaves the checkpoint before it whole."""
    out, often = str(tmp_path / "out"), ["--save_every=1", "--eval_every=99", "--eval_problems=1"]
    train_here("--steps=1", *often, f"--out_dir={out}")
    code = ("import resource, sys, train; "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
            "train.main(sys.argv[1:])")
    ask = [*FAST, *often, "--resume=True", f"--out_dir={out}"]
    p = subprocess.run([sys.executable, "-c", code, *ask], cwd=ROOT, capture_output=True,
                       text=True, timeout=200)
    assert p.returncode == 1 and p.stderr.strip().startswith("error: could not write")
    assert len(p.stderr.strip().splitlines()) == 1
    assert read_checkpoint(out)["step"] == 1
    assert not os.path.exists(os.path.join(out, "ckpt.pt.tmp"))


@pytest.mark.parametrize("damage", ["half", "empty", "text", "start"])
def test_damaged_checkpoint(finished, tmp_path, damage):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    whole = (out / "ckpt.pt").read_bytes()
    wrong = dict(half=whole[:len(whole) // 2], empty=b"", text=b"text", start=whole[:5000])
    (out / "ckpt.pt").write_bytes(wrong[damage])
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="error: resume: .*ckpt.pt cannot be read") as e:
        train_here("--resume=True", f"--out_dir={out}")
    assert "\n" not in str(e.value) and (out / "log.jsonl").read_bytes() == before


# the pieces

def test_write_whole(tmp_path, monkeypatch):
    """A file is replaced at once, or not at all."""
    path = str(tmp_path / "file")

    def write(tmp):
        with open(tmp, "w") as f:
            f.write("new")

    def fail(tmp, target=None):
        write(tmp)
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


def test_metrics():
    """Sums over micro-batches; per-token numbers where a mask is true."""
    m = Metrics()
    m.add(loss=1.0, kl=0.5)
    m.add(loss=2.0)
    mask = torch.tensor([[True, False], [True, True]])
    m.collect(mask, gap=torch.tensor([[1.0, 99], [2, 3]]))
    m.collect(mask[:1], gap=torch.tensor([[4.0, 99]]))
    assert m.sums == dict(loss=3.0, kl=0.5)
    assert m.tokens("gap").tolist() == [1, 2, 3, 4]
    assert m.has("gap") and not m.has("entropy")


@pytest.mark.parametrize("device", ["gpu", "cpu:0", "cuda:x", "cuda:99"])
def test_devices_that_are_not_there(device):
    with pytest.raises(ValueError, match=f"device must be auto|{device} was asked for"):
        choose_device(SimpleNamespace(device=device, dtype="auto"))


def test_what_auto_means():
    kinds = {True: ("cuda", "bfloat16"), False: ("cpu", "float32")}
    c = SimpleNamespace(device="auto", dtype="auto")
    choose_device(c)
    assert (c.device, c.dtype) == kinds[torch.cuda.is_available()]
    c = SimpleNamespace(device="cpu", dtype="bfloat16")  # what was said stays
    choose_device(c)
    assert (c.device, c.dtype) == ("cpu", "bfloat16")


def test_settings_are_kept_with_the_run(finished):
    with open(os.path.join(finished[0], "config.json")) as f:
        c = json.load(f)
    assert c["group"] == 4 and c["budget"] == 24 and c["device"] == "cpu"
    assert c == read_checkpoint(finished[0])["config"]
