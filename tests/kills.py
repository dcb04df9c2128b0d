"""
Cut runs at random moments, let them go on, and compare them with one that nobody disturbed.

    python tests/kills.py --runs=40        # a line per run, a summary, exit code 1 if one differs
    python tests/kills.py --runs=8 --seed=3 --ablate=0 --cuts=1

The idea. Real processes of `python train.py`, and of `python -m experiments.ablate` in every fourth
run (--ablate=4; 0: never), get SIGINT, SIGTERM, SIGHUP and SIGKILL in turn, at moments drawn from
--seed, up to --cuts=3 times a run; then they may end. Weights, models, log (but for the clock) and
samples must be those of the undisturbed run, bit for bit, and no process may be left.

The runs evaluate and save so often that most signals meet an evaluation or a write.
"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SETTINGS = ["--prompts=2", "--group=4", "--prompt_tokens=64", "--eval_problems=4", "--eval_batch=1",
            "--steps=5", "--eval_every=1", "--save_every=2", "--device=cpu"]
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
CLOCK = ("rollout_s", "learn_s", "tokens_per_s", "peak_gb")
OWN = ("out_dir", "resume", "overwrite")  # settings that runs may differ in
MARK = "CUT_BY_KILLS"  # in the environment of all processes of a run


# what a run left

def state_of(x):
    """Lists and dicts of a checkpoint, tensors as bytes."""
    if isinstance(x, torch.Tensor):
        return str(x.dtype), tuple(x.shape), x.numpy().tobytes()
    if isinstance(x, dict):
        return {k: state_of(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [state_of(v) for v in x]
    return x


def left_by(out):
    """{name: contents} of a run's folder, without what depends on clock and command."""
    found = {}
    for base, _, files in os.walk(out):
        for name in files:
            path = os.path.join(base, name)
            with open(path, "rb") as f:
                found[os.path.relpath(path, out)] = f.read()
    found.pop("train.log", None)
    found.pop("ckpt-previous.pt", None)  # which step it holds depends on where the run was cut
    state = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)
    state["sizes"].pop("log.jsonl")  # the clock's digits are in it
    rows = [json.loads(line) for line in found.get("log.jsonl", b"").splitlines()]
    for d in (state["config"], *rows):
        for key in (*OWN, *CLOCK):
            d.pop(key, None)
    del found["config.json"]  # is in the checkpoint
    return {**found, "ckpt.pt": state_of(state), "log.jsonl": rows}


def differences(a, b):
    """Names of files in which two runs differ."""
    a, b = left_by(a), left_by(b)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# processes

def go_on(out):
    """What a command needs so that it goes on with what is in out."""
    for name, option in (("ckpt.pt", "--resume=True"), ("config.json", "--overwrite=True")):
        if os.path.exists(os.path.join(out, name)):
            return [option]
    return []


def start(out, ablate, log):
    """The command as a user would repeat it. -> Popen"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", MARK: out}
    command = [sys.executable, "train.py", *SETTINGS, f"--out_dir={out}"]
    if ablate:
        command = [sys.executable, "-m", "experiments.ablate", "config/smd.py", *SETTINGS,
                   "--seeds=1", f"--out={ablate}"]
    else:
        command += go_on(out)
    with open(log, "ab") as f:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=f,
                                stderr=f, start_new_session=True)


def left_over(out):
    """Processes of a run that are still there (Linux; elsewhere none is found)."""
    found = []
    if not os.path.isdir("/proc"):
        return found
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if f"{MARK}={out}".encode() in f.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:  # it has ended, or belongs to somebody else
            pass
    return found


def wait_for_begin(process, path, size):
    """Until the run has said something: before that it imports and loads."""
    while process.poll() is None and (not os.path.exists(path) or os.path.getsize(path) <= size):
        time.sleep(0.01)


def disturb(process, name, said, rng=random, length=0.0):
    """Send a signal some time after the run began. -> seconds waited"""
    if rng.random() < 0.85:
        size = 0
        if os.path.exists(said):
            size = os.path.getsize(said)
        wait_for_begin(process, said, size)
    delay = rng.uniform(0, length)
    time.sleep(delay)
    if process.poll() is None:
        process.send_signal(getattr(signal, name))
    return delay


def run(folder, name, rng, length, cuts, ablate=False):
    """One run, cut by so many signals of this name. -> what happened, as text; out_dir"""
    out, under = os.path.join(folder, "out"), None
    said = log = os.path.join(folder, "print.log")
    if ablate:
        under = os.path.join(folder, "arms")
        out = os.path.join(under, "smd", "0")
        said = os.path.join(out, "train.log")
    events = []
    for attempt in range(cuts + 1):
        process = start(out, under, log)
        if attempt < cuts:
            events.append(f"{disturb(process, name, said, rng=rng, length=length):.2f} s")
        code = process.wait(timeout=120)
        if code == -signal.SIGKILL and ablate:  # as a machine that goes down
            for pid in left_over(out):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        left = left_over(out)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if left:
            raise AssertionError(f"{len(left)} processes are left")
        events.append(f"exit {code}")
        allowed = {0}
        if attempt < cuts:
            number = getattr(signal, name)
            allowed |= {128 + number, -number, 130}  # -number: before the run began
        if code not in allowed:
            with open(log, errors="replace") as f:
                raise AssertionError(f"exit code {code}: {f.read().strip()[-500:]}")
        if code == 0:
            break
    return ", ".join(events), out


def main(argv):
    options = dict(runs=40, seed=0, ablate=4, cuts=3)
    for arg in argv:
        key, _, value = arg.removeprefix("--").partition("=")
        options[key] = int(value)
    rng, bad = random.Random(options["seed"]), 0
    with tempfile.TemporaryDirectory() as top:
        os.mkdir(os.path.join(top, "whole"))
        _, whole = run(os.path.join(top, "whole"), None, rng, length=0, cuts=0)
        rows = left_by(whole)["log.jsonl"]
        began = os.path.getmtime(os.path.join(whole, "config.json"))
        length = os.path.getmtime(os.path.join(whole, "model", "config.json")) - began
        print(f"undisturbed: {len(rows)} lines of log in {length:.1f} s", flush=True)
        for i in range(options["runs"]):
            name = SIGNALS[i % len(SIGNALS)]
            ablate = bool(options["ablate"]) and i // len(SIGNALS) % options["ablate"] == 1
            folder = os.path.join(top, str(i))
            os.mkdir(folder)
            how = "under ablate" if ablate else "alone"
            try:
                text, out = run(folder, name, rng, length=1.1 * length, ablate=ablate,
                                cuts=rng.randint(1, options["cuts"]))
                wrong = differences(whole, out)
                text += ": equal" if not wrong else f": differs in {', '.join(wrong)}"
            except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as e:
                wrong, text = True, f"FAILED: {e}"
            bad += bool(wrong)
            print(f"{i:3d} {name:7s} {how}: {text}", flush=True)
    print(f"{options['runs'] - bad} of {options['runs']} runs ended as if nobody had cut them")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
