"""
The files of a run: out_dir with its lock, log.jsonl, samples.txt, config.json, ckpt.pt, and what an interrupt does.

The idea. A folder belongs to one run and one process. What a checkpoint holds is written whole or not at all; the log is a
list of JSON lines that a resumed run cuts back to the step it goes on from. Nothing here knows what is trained.
"""
import json
import os
import signal
import sys
import time

import torch

try:
    import fcntl
except ImportError:  # Windows: two processes with one out_dir go unnoticed
    fcntl = None

HELD = {}  # out_dir -> its file descriptor, open until this process ends


def hold(out_dir):
    """Lock out_dir for this process until it ends, however it ends. Raises ValueError if another one has it."""
    where = os.path.realpath(out_dir)
    if fcntl is None or where in HELD:
        return
    folder = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise ValueError(f"out_dir {out_dir!r} is in use by another process") from None
    HELD[where] = folder


def write_whole(path, write):
    """write(temporary path), then rename: a crash, a kill or a full disk in the middle leaves what was there before."""
    try:
        write(path + ".tmp")
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        if os.path.isfile(path + ".tmp"):
            os.remove(path + ".tmp")
        reason = " ".join(str(e).split())
        raise OSError(f"could not write {path}: {reason}; what was there is untouched") from None


def write_text(path, text):
    def write(tmp):
        with open(tmp, "w", encoding="utf-8") as f:
            f.write(text)
    write_whole(path, write)


def say(text, width=70):
    """What is going on now, on a terminal only; the next line replaces it."""
    if sys.stderr.isatty():
        sys.stderr.write("\r" + text[:width].ljust(width) + ("" if text else "\r"))
        sys.stderr.flush()


def choose_device(c):
    """Replace "auto" in c.device and c.dtype by what it means here. Raises ValueError for a device that is not there."""
    if c.device == "auto":
        c.device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = c.device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal() or (kind == "cpu" and index):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {c.device!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={c.device} was asked for, but torch finds no CUDA or no such card ({torch.cuda.device_count()} found)")
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))  # what is asked below, such as the peak, is asked of the current card
    if c.dtype == "auto":
        c.dtype = "bfloat16" if kind == "cuda" else "float32"


class Run:
    """One run in c.out_dir. c: namespace with out_dir, resume, overwrite, steps and whatever else the run is made of.

    may_change: keys that a resumed run may have set differently. step: steps done; memory: what else the next step must
    know, in the checkpoint too. Raises ValueError, before anything is written, if the folder holds another run, is in use,
    or holds a checkpoint that is damaged or of other settings; FileNotFoundError where there is nothing to resume."""

    def __init__(self, c, may_change):
        self.c, self.may_change = c, may_change
        self.step, self.memory, self.learner = 0, {}, None  # learner: state of the optimizer, from the checkpoint
        self.interrupted = False
        taken = [name for name in ("config.json", "ckpt.pt", "log.jsonl") if os.path.exists(self.path(name))]
        if taken and not (c.resume or c.overwrite):
            raise ValueError(f"out_dir {c.out_dir!r} holds another run: say --resume=True, --overwrite=True, "
                             "or another --out_dir")
        if os.path.isdir(c.out_dir):
            hold(c.out_dir)
        if c.resume:
            self.read_checkpoint()
        self.first = self.step  # at which this process began

    def path(self, name):
        return os.path.join(self.c.out_dir, name)

    def read_checkpoint(self):
        c, path = self.c, self.path("ckpt.pt")
        if not os.path.exists(path):
            raise FileNotFoundError(f"resume: {path} does not exist; a run that has not saved yet starts again with "
                                    "--overwrite=True")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            was, self.step, self.memory = state["config"], state["step"], state["memory"]
            self.learner = state["learner"]
        except Exception as e:  # a damaged file raises whatever its first wrong byte leads to
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"resume: {path} cannot be read: {type(e).__name__}: {reason}") from None
        for key, value in vars(c).items():
            if key not in self.may_change and was.get(key) != value:
                raise ValueError(f"resume: {key} was {was.get(key)!r} in the run in {c.out_dir!r}, now it is {value!r}")
        if self.step > c.steps:
            raise ValueError(f"resume: the run in {c.out_dir!r} has done {self.step} steps already, steps={c.steps}")

    def open(self):
        """Make out_dir, clear it of an old run if that was asked for, cut the log back to the step that is resumed."""
        os.makedirs(self.path("model"), exist_ok=True)
        hold(self.c.out_dir)
        if self.learner is None:
            for name in ("ckpt.pt", "log.jsonl", "samples.txt", "model/model.safetensors"):
                if os.path.lexists(self.path(name)):
                    os.remove(self.path(name))
        elif os.path.exists(self.path("log.jsonl")):
            with open(self.path("log.jsonl"), "rb") as f:
                lines = [line.decode() for line in f if line.endswith(b"\n")]  # a kill may leave half a line
            lines = [line for line in lines if json.loads(line)["step"] < self.step]
            write_text(self.path("log.jsonl"), "".join(lines))
        write_text(self.path("config.json"), json.dumps(vars(self.c), indent=2))
        self.began = time.time()
        signal.signal(signal.SIGINT, self.on_interrupt)

    def on_interrupt(self, signum, frame):
        if self.interrupted:
            sys.exit(130)
        self.interrupted = True
        print("\ninterrupt: finishing this step, then saving; once more quits at once", file=sys.stderr)

    def append(self, name, text):
        """Add text to a file in out_dir."""
        with open(self.path(name), "a", encoding="utf-8", errors="backslashreplace") as f:
            f.write(text)

    def log(self, numbers):
        """Add a line to log.jsonl."""
        self.append("log.jsonl", json.dumps(numbers) + "\n")

    def minutes_left(self):
        """At the pace of this process so far, after the step in progress."""
        done = self.step + 1 - self.first
        return (time.time() - self.began) / done * (self.c.steps - self.step - 1) / 60

    def save(self, learner):
        """Write the checkpoint. learner: dict of tensors and numbers."""
        state = dict(learner=learner, step=self.step, memory=self.memory, config=vars(self.c))
        write_whole(self.path("ckpt.pt"), lambda tmp: torch.save(state, tmp))

    def finished(self):
        return self.step >= self.c.steps


class Metrics:
    """Numbers of one optimizer step: sums over micro-batches, and per-token numbers of which the log wants mean, largest or tail."""

    def __init__(self):
        self.sums, self.tokens = {}, {}

    def add(self, **numbers):
        for name, x in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + x

    def collect(self, mask, **tensors):
        """Keep the entries of each tensor where mask is True."""
        for name, x in tensors.items():
            self.tokens.setdefault(name, []).append(x[mask])

    def all(self, name):
        return torch.cat(self.tokens[name]).float()
