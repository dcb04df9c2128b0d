"""
Cut runs at random moments, let them go on, and compare them with one that nobody disturbed.

    python tests/kills.py --runs=40     # a line per signal, a summary, exit code 1 if a run differs
    python tests/kills.py --runs=8 --seed=3 --cuts=2        # what was cut once is cut once more
    python tests/kills.py --runs=8 --ranks=2                # torchrun in place of python
    python tests/kills.py --runs=8 -- --lora_rank=2 --tracker=tensorboard   # more settings

The idea. Real processes of `python train.py` and of `python -m experiments.ablate`, turn about, get
SIGINT, SIGTERM, SIGHUP or SIGKILL; then the same command goes on. Weights, models, log (but for the
clock) and samples must be those of the undisturbed run, bit for bit, and no process may be left.

The moments are random, but all PHASES are met about equally often: by the clock alone few signals
would meet a save. Where a run stands is read off its files.
"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from support.checkpoint import UNFINISHED  # noqa: E402

STEPS = 4
SETTINGS = ["--task=kv", "--prompt_tokens=64", "--max_new_tokens=5", "--budget=36", "--window=16",
            "--prompts=2", "--group=4", "--distill_on=all", "--eval_problems=4", "--eval_batch=1",
            "--eval_final=4", f"--steps={STEPS}", "--eval_every=1", "--save_every=2", "--lr=1e-3",
            "--warmup=0", "--device=cpu"]  # the second evaluation is the best one
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
PHASES = {  # about how many seconds; the end are the last saves
    "start-up": 4.0, "evaluation": 0.1, "step": 0.1, "checkpoint": 0.02, "best": 0.02, "end": 0.2}
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
    for base, folders, files in os.walk(out):
        if "tensorboard" in folders:
            folders.remove("tensorboard")  # the clock is in its files
        for name in files:
            path = os.path.join(base, name)
            with open(path, "rb") as f:
                found[os.path.relpath(path, out)] = f.read()
    found.pop("train.log", None)
    found.pop("ckpt-previous.pt", None)  # which step it holds depends on where the run was cut
    state = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)
    state["sizes"].pop("log.jsonl")  # the clock's digits are in it
    rows = rows_of(out)
    for d in (state["config"], *rows):
        for key in (*OWN, *CLOCK):
            d.pop(key, None)
    del found["config.json"]  # is in the checkpoint
    return {**found, "ckpt.pt": state_of(state), "log.jsonl": rows}


def rows_of(out):
    """The whole lines of log.jsonl."""
    path = os.path.join(out, "log.jsonl")
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


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


def start(out, log, ablate=None, ranks=1):
    """The command as a user would repeat it. out: folder of the run. log: file for what is printed.
    ablate: folder of experiments.ablate, if that is to start the run. -> Cut"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", MARK: out}
    command, said = [sys.executable], log
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["train.py", *SETTINGS, f"--out_dir={out}", *go_on(out)]
    if ablate:
        command = [sys.executable, "-m", "experiments.ablate", "config/smd.py", *SETTINGS,
                   "--seeds=1", f"--out={ablate}"]
        said = os.path.join(out, "train.log")
    began = time.time()
    with open(log, "ab") as f:
        popen = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=f,
                                 stderr=f, start_new_session=True)
    return Cut(popen, out, said, began=began)


class Cut:
    """A process that is to get a signal. out: folder of its run. said: the file that train.py
    prints to. began: time of its start."""

    def __init__(self, popen, out, said, began):
        self.popen, self.out, self.said, self.began = popen, out, said, began
        self.best = os.path.join(out, "best", "run.json")

    def has_spoken(self):
        """Before that it imports and loads."""
        if not os.path.exists(self.said):
            return False
        about = os.stat(self.said)  # what was said before is older
        return about.st_size > 0 and about.st_mtime >= self.began

    def holds_step(self):
        """Is best/ whole? Its list says the step after its last file."""
        with open(self.best) as f:
            return json.load(f)["step"] is not None

    def stands(self):
        """-> phase of the run, its step"""
        rows = rows_of(self.out)
        kind, step = "none", 0
        if rows:
            kind, step = rows[-1]["kind"], rows[-1]["step"]
        if not self.has_spoken():
            return "start-up", step
        if (kind, step) == ("eval", STEPS):
            return "end", step
        if any(name.endswith(UNFINISHED) for name in os.listdir(self.out)):
            return "checkpoint", step
        if os.path.exists(self.best) and not self.holds_step():
            return "best", step
        if kind == "step":
            return "evaluation", step + 1
        if kind == "none":
            return "evaluation", 0
        return "step", step

    def send(self, name, phase, rng):
        """Send a signal at a random moment in a phase. -> moment and phase as text, phase, step"""
        if phase != "start-up":
            first = rng.randrange(2)  # later evaluations are not the best
            while self.popen.poll() is None:
                now, step = self.stands()
                if now == phase and step >= first:
                    break
                time.sleep(0.001)
        time.sleep(rng.uniform(0, PHASES[phase]))
        phase, step = self.stands()
        moment = time.time() - self.began
        if self.popen.poll() is not None:
            return f"{moment:5.2f} s  ended before", "none", step
        self.popen.send_signal(getattr(signal, name))
        if self.stands()[0] == "end":  # on busy cores it came there meanwhile
            phase = "end"
        return f"{moment:5.2f} s  {phase:10s} {step}", phase, step

    def wait(self):
        """Until it and all that it started have ended. -> exit code. Raises AssertionError if some
        do not."""
        code = self.popen.wait(timeout=120)
        until = time.time() + 60  # runs under ablate that was killed finish a step and save
        while left := left_over(self.out):
            if code != -signal.SIGKILL or time.time() > until:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"{len(left)} processes are left")
            time.sleep(0.05)
        return code


def codes(name, phase):
    """Exit codes that may follow a signal."""
    number = getattr(signal, name)
    allowed = {128 + number, -number}  # -number: before the run listens
    if phase == "start-up":
        allowed.add(1)  # an interrupted import may fail in a way of its own
    return allowed | {0} if phase in ("end", "none") else allowed


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


def run(folder, cuts, rng, ablate=False, ranks=1):
    """One run, cut by these (signal, phase) in turn. -> its folder, what happened as text, phases
    that were met"""
    out, under = os.path.join(folder, "out"), None
    log = os.path.join(folder, "print.log")
    if ablate:
        under = os.path.join(folder, "arms")
        out = os.path.join(under, "smd", "0")
    events, met = [], []
    for name, phase in [*cuts, (None, None)]:
        process, allowed = start(out, log, ablate=under, ranks=ranks), {0}
        if name:
            text, phase, step = process.send(name, phase, rng)
            met.append(phase)
            allowed = codes(name, phase)
            if ranks > 1:  # torchrun has codes of its own
                allowed |= {0, 1}
        code = process.wait()
        if code not in allowed:
            with open(log, errors="replace") as f:
                raise AssertionError(f"exit code {code}: {f.read().strip()[-500:]}")
        if name:
            events.append(f"{text}  exit {code:3d}")
            reached = max((row["step"] for row in rows_of(out)), default=0)
            if reached > step + 1:
                raise AssertionError(f"a signal in step {step}, and the run went on to {reached}")
    return out, "  ".join(events), met


def main(argv):
    options = dict(runs=40, seed=0, cuts=1, ranks=1)
    if "--" in argv:
        SETTINGS.extend(argv[argv.index("--") + 1:])
        argv = argv[:argv.index("--")]
    for arg in argv:
        key, _, value = arg.removeprefix("--").partition("=")
        options[key] = int(value)
    # a shell starts commands in the background with SIGINT ignored, and they hand that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, bad, met = random.Random(options["seed"]), 0, Counter()
    with tempfile.TemporaryDirectory() as top:
        os.mkdir(os.path.join(top, "whole"))
        whole, _, _ = run(os.path.join(top, "whole"), [], rng, ranks=options["ranks"])
        rows = left_by(whole)["log.jsonl"]
        rewards = [f"{r['eval_compressed']:.2f}" for r in rows if r["kind"] == "eval"]
        print(f"undisturbed: {len(rows)} lines of log, held-out reward {' '.join(rewards)}",
              flush=True)
        for i in range(options["runs"]):
            # every signal, alone and under ablate, meets one phase after the other
            name, ablate = SIGNALS[i % 4], bool(i // 4 % 2) and options["ranks"] == 1
            phase = [*PHASES][(i // 8 + i % 8) % len(PHASES)]
            folder = os.path.join(top, str(i))
            os.mkdir(folder)
            cuts = [(name, phase)] + [(name, p) for p in rng.choices([*PHASES],
                                                                    k=options["cuts"] - 1)]
            try:
                out, text, phases = run(folder, cuts, rng, ablate=ablate, ranks=options["ranks"])
                met.update(phases)
                wrong = differences(whole, out)
                text += "  equal" if not wrong else f"  DIFFERS in {', '.join(wrong)}"
            except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as e:
                wrong, text = True, f"FAILED: {e}"
            bad += bool(wrong)
            how = "under ablate" if ablate else "alone"
            print(f"{i + 1:3d}  {name:7s}  {how:12s}  {text}", flush=True)
    print("signals met: " + ", ".join(f"{phase} {n}" for phase, n in met.items()))
    print(f"{options['runs'] - bad} of {options['runs']} runs ended as if nobody had cut them "
          "and left no process")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
