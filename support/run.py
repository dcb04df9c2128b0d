"""
The files of a run: out_dir with its lock, log.jsonl, samples.txt, config.json, ckpt.pt; what an
interrupt does; and what a run prints when it cannot go on.

The idea. A folder belongs to one run and one process. A checkpoint is written whole or not at all;
the log is a list of JSON lines that a resumed run cuts back to the step it goes on from. Nothing
here knows what is trained.
"""
import json
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress

import torch

try:
    import fcntl
except ImportError:  # Windows: two processes with one out_dir go unnoticed
    fcntl = None

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]
HELD = {}  # out_dir -> its file descriptor, open until this process ends


def hold(out_dir):
    """Lock out_dir for this process until it ends, however it ends. Raises ValueError if another
    one has it."""
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
    """write(temporary path), then rename: a crash, a kill or a full disk in the middle leaves what
    was there before."""
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


def tell(text, stream=None):
    """Print a line. What cannot be printed (a closed pipe, a full device, a terminal of other
    characters) is no reason to stop."""
    out = stream or sys.stdout
    try:
        try:
            out.write(text + "\n")
        except UnicodeEncodeError:
            out.write(text.encode("ascii", "backslashreplace").decode() + "\n")
        out.flush()
    except (OSError, ValueError, AttributeError):  # AttributeError: closed at the start, so None
        with suppress(OSError, ValueError, AttributeError):  # nor at the end, when Python flushes
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def say(text, width=70):
    """What is going on now, on a terminal only; the next line replaces it."""
    if sys.stderr.isatty():
        sys.stderr.write("\r" + text[:width].ljust(width) + ("" if text else "\r"))
        sys.stderr.flush()


@contextmanager
def one_line_errors(*kinds):
    """Exceptions of these kinds end the program with one line, an interrupt with 130."""
    try:
        yield
    except kinds as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)


def choose_device(c):
    """Replace "auto" in c.device and c.dtype by what it means here. Raises ValueError for a device
    that is not there."""
    if c.device == "auto":
        c.device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = c.device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal() or (kind == "cpu" and index):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {c.device!r}")
    if kind == "cuda":
        cards = torch.cuda.device_count()
        if int(index or 0) >= cards:
            raise ValueError(f"device={c.device} was asked for, but torch finds no CUDA or no such "
                             f"card ({cards} found)")
        torch.cuda.set_device(int(index or 0))  # the peak is asked of the current card
    if c.dtype == "auto":
        c.dtype = "bfloat16" if kind == "cuda" else "float32"


class Run:
    """One run in c.out_dir.

    c: namespace with out_dir, resume, overwrite, steps and whatever else the run is made of.
    may_change: keys that a resumed run may have set differently. step: steps done. memory: what
    later steps must know beside the learner; JSON. learner: what `save` was given, after a resume.
    Raises, before anything is written, ValueError if the folder holds another run, is in use, or
    holds a checkpoint that is damaged or of other settings; FileNotFoundError if there is none."""

    def __init__(self, c, may_change):
        self.c, self.may_change = c, may_change
        self.step, self.memory, self.learner = 0, {}, None
        self.interrupted = False
        names = ("config.json", "ckpt.pt", "log.jsonl")
        taken = any(os.path.exists(self.path(name)) for name in names)
        if taken and not (c.resume or c.overwrite):
            raise ValueError(f"out_dir {c.out_dir!r} holds another run: say --resume=True, "
                             "--overwrite=True, or another --out_dir")
        if os.path.isdir(c.out_dir):
            hold(c.out_dir)
        if c.resume:
            self.read_checkpoint()
        self.first = self.step  # at which this process began

    @property
    def finished(self):
        return self.step >= self.c.steps

    def path(self, name):
        return os.path.join(self.c.out_dir, name)

    def read_checkpoint(self):
        c, path = self.c, self.path("ckpt.pt")
        if not os.path.exists(path):
            raise FileNotFoundError(f"resume: {path} does not exist; a run that has not saved yet "
                                    "starts again with --overwrite=True")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            was, self.step = state["config"], state["step"]
            self.memory, self.learner = state["memory"], state["learner"]
        except Exception as e:  # a damaged file raises whatever its first wrong byte leads to
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"resume: {path} cannot be read: {type(e).__name__}: "
                             f"{reason}") from None
        for key, value in vars(c).items():
            if key not in self.may_change and was.get(key) != value:
                raise ValueError(f"resume: {key} was {was.get(key)!r} in the run in {c.out_dir!r}, "
                                 f"now it is {value!r}")
        if self.step > c.steps:
            raise ValueError(f"resume: the run in {c.out_dir!r} has done {self.step} steps "
                             f"already, steps={c.steps}")

    def open(self):
        """Make out_dir, clear it of an old run if that was asked for, cut the log back to the step
        that is resumed; from here on an interrupt ends the run after its step."""
        os.makedirs(self.path("model"), exist_ok=True)
        hold(self.c.out_dir)
        if self.learner is None:
            for name in ("ckpt.pt", "log.jsonl", "samples.txt", "model/model.safetensors"):
                if os.path.lexists(self.path(name)):
                    os.remove(self.path(name))
        elif os.path.exists(self.path("log.jsonl")):
            with open(self.path("log.jsonl"), "rb") as f:
                lines = [line.decode() for line in f if line.endswith(b"\n")]  # not half a line
            lines = [line for line in lines if json.loads(line)["step"] < self.step]
            write_text(self.path("log.jsonl"), "".join(lines))
        write_text(self.path("config.json"), json.dumps(vars(self.c), indent=2))
        self.began = time.time()
        signal.signal(signal.SIGINT, self.on_interrupt)

    def on_interrupt(self, signum, frame):
        if self.interrupted:
            sys.exit(130)
        self.interrupted = True
        print("\ninterrupt: finishing this step, then saving; once more quits at once",
              file=sys.stderr)

    def append(self, name, text):
        """Add text to a file in out_dir."""
        with open(self.path(name), "a", encoding="utf-8", errors="backslashreplace") as f:
            f.write(text)

    def log(self, numbers):
        """Add a line to log.jsonl."""
        self.append("log.jsonl", json.dumps(numbers) + "\n")

    def minutes_left(self):
        """After the step in progress, at the pace of this process so far."""
        done, left = self.step + 1 - self.first, self.c.steps - self.step - 1
        return (time.time() - self.began) / done * left / 60

    def save(self, learner):
        """Write the checkpoint. learner: dict of tensors and numbers."""
        state = dict(learner=learner, step=self.step, memory=self.memory, config=vars(self.c))

        def write(tmp):
            torch.save(state, tmp)
        write_whole(self.path("ckpt.pt"), write)

    def copy_beside(self, folder):
        """Copy what stands beside the weights in a model's folder (tokenizer, chat template,
        generation_config.json) into out_dir/model."""
        for name in os.listdir(folder):
            beside = name.endswith((".json", ".jinja")) and not name.endswith(".index.json")
            if beside and name != "config.json":
                shutil.copy(os.path.join(folder, name), self.path("model"))

    def leave(self):
        """After the loop: an interrupted run says how to go on, and ends with 130."""
        if self.finished:
            return
        if self.step > self.first:
            print(f"saved in {self.c.out_dir}; go on with the same command and --resume=True")
        else:
            print("no step was finished: nothing saved")
        sys.exit(130)


class Metrics:
    """Numbers of one optimizer step: sums over micro-batches, and numbers of single tokens."""

    def __init__(self, **sums):
        self.sums, self.parts = sums, {}

    def add(self, **numbers):
        for name, x in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + x

    def collect(self, mask, **tensors):
        """Keep the entries of each tensor where mask is True."""
        for name, x in tensors.items():
            self.parts.setdefault(name, []).append(x[mask])

    def has(self, name):
        return name in self.parts

    def tokens(self, name):
        """All that was collected under this name, (n,) fp32."""
        return torch.cat(self.parts[name]).float()
