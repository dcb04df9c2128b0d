"""
The files of a run: out_dir with its lock, log.jsonl, samples.txt, config.json, ckpt.pt, model/,
best/, adapter/, adapter-best/ and tensorboard/; what a signal does; what others' code may do.

The idea. A folder belongs to one run and one process; of several ranks (support/parallel.py) only
rank 0 writes. A checkpoint knows how long log and samples were when it was written, and
a resumed run cuts them back to that: wherever a run was cut, its files end as if it had not been. A
model's folder holds a list of what a run wrote there, for which step: only that is ever removed.
No link in it is followed where something is written (support/checkpoint.py has how).
Nothing here knows what is trained.
"""
import errno
import functools
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

import torch

from support import parallel
from support.checkpoint import (
    HELD,
    UNFINISHED,
    open_to_append,
    read_checkpoint,
    remove,
    sync,
    write_bytes,
    write_checkpoint,
    write_text,
)
from support.jsonfile import check_shape, read_json, shown
from support.screen import LAST, is_terminal, tell

try:
    import fcntl
except ImportError:  # Windows: two processes with one out_dir go unnoticed
    fcntl = None

GROWING = ("log.jsonl", "samples.txt")
FILES = ("ckpt.pt", "ckpt-previous.pt", *GROWING, "config.json")
MODELS = ("model", "best")
ADAPTERS = ("adapter", "adapter-best")  # of LoRA: what was added to make model/ and best/
FOLDERS = (*MODELS, *ADAPTERS, "tensorboard")
# what is saved with a model, as it stood beside the weights where it came from
BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
          "chat_template.jinja", "chat_template.json")
LIST = "run.json"  # in FOLDERS: the step of the model, its reward, the names of the run's files
LAYOUT = dict(step=int, memory=dict, learner=dict, config=dict, identity=dict,
              sizes=dict)
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]


# others' code, such as a reward

def failures():
    """What to catch where it is called and its failure is none of this program: all that it may
    raise, but for a Ctrl-C. Where a Run handles signals, none raises KeyboardInterrupt."""
    raised = sys.exc_info()[0]  # what is to be caught
    real = signal.getsignal(signal.SIGINT) in (
        signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL, None)
    if raised and issubclass(raised, KeyboardInterrupt) and real:
        return ()
    return BaseException


def matmul_precision():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # older and newer names for it were both used
        return "mixed"


def timer(on=None):
    """Is one on that will send SIGALRM? on=False: stop it."""
    if on is False:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def current_folder(path=None):
    """-> it, "" where it is gone. path: go there."""
    with suppress(FileNotFoundError):
        if path:
            os.chdir(path)
        return os.getcwd()
    return ""


# what others' code may set for all of the process: how to ask for it, how to set it back
SHARED = [
    (current_folder, current_folder),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None)),
    (matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)]
for kind in ("cpu", "cuda"):
    SHARED.append((functools.partial(torch.is_autocast_enabled, kind),
                   functools.partial(torch.set_autocast_enabled, kind)))
for number in (*SIGNALS, *filter(None, [getattr(signal, "SIGALRM", None)])):
    SHARED.append((functools.partial(signal.getsignal, number),
                   functools.partial(signal.signal, number)))
if hasattr(signal, "setitimer"):
    SHARED.append((timer, timer))


@contextmanager
def settings_kept():
    """What somebody's own code sets for all of the process is set back: the run is not to learn
    without gradients, in another precision, or deaf to signals. A child that such code forks and
    lets come back here ends, as there would be two runs."""
    before = [get() for get, _ in SHARED]
    pid = os.getpid()
    grad = torch.is_grad_enabled()
    try:
        # when this one ends, others that were begun in it are over too
        with torch.inference_mode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(grad)
            yield
    finally:
        if os.getpid() != pid:
            e = sys.exc_info()[1]
            code = e.code if isinstance(e, SystemExit) else int(e is not None)
            os._exit(code if isinstance(code, int) else bool(code))
        for (get, set_back), value in zip(SHARED, before):
            if get() != value:
                set_back(value)


FORKING = threading.local()  # mask: of signals, before a fork


def before_fork():
    """A signal that is sent to the child at once waits until the child answers for itself."""
    FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def after_fork():
    signal.pthread_sigmask(signal.SIG_SETMASK, FORKING.mask)


def in_child():
    """What a process does not share that others' code forks: a run's lock and what it does on a
    signal. A child could not be ended, or would hold out_dir longer than the run."""
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__func__", None) is Run.on_signal:
            signal.signal(number, signal.SIG_DFL)
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
    while HELD:
        os.close(HELD.popitem()[1])
    after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork, after_in_child=in_child)


# the machine

def choose_device(config):
    """Replace "auto" in config.device by what it means here; of several ranks each gets a card of
    its own. Raises ValueError for a device that is not there."""
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = config.device.partition(":")
    if config.device != "cpu" and (kind != "cuda" or not (index or "0").isdecimal()):
        raise ValueError("device must be auto, cpu, cuda or cuda:N, got "
                         f"{config.device!r}")
    if kind == "cuda":
        cards = torch.cuda.device_count()
        if parallel.launched():
            if index:
                raise ValueError(f"device={config.device} is one card, torchrun gives "
                                 "each rank its own: use --device=cuda")
            if parallel.card() >= cards > 0:
                raise ValueError(f"torchrun started more ranks than the {cards} cards "
                                 f"here: use --nproc_per_node={cards}, or --device=cpu")
            index = str(parallel.card())
            config.device = f"cuda:{index}"
        if int(index or 0) >= cards:
            raise ValueError(f"device={config.device} was asked for, but torch finds "
                             f"no CUDA or no such card ({cards} found)")
        torch.cuda.set_device(int(index or 0))  # the peak is asked of the current card


# the folder

def hold(out_dir):
    """Lock out_dir for this process until it ends, however it ends. -> its descriptor. Raises
    ValueError if another one has it; that a file system has no locks is said."""
    where = os.path.realpath(out_dir)
    if fcntl is None:
        return None
    folder = os.open(where, os.O_RDONLY)
    if where in HELD and os.path.samestat(os.fstat(folder), os.fstat(HELD[where])):
        os.close(folder)
        return HELD[where]
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(folder)
            raise ValueError(f"out_dir {out_dir!r} is in use by another "
                             "process") from None
        tell(f"out_dir is on a file system that cannot lock a folder ({e.strerror}): "
             "make sure that no other process uses it")
    HELD[where] = folder
    return folder


def is_of_a_run(path):
    """Is this a config.json that a run wrote, and not, say, a model's?"""
    try:
        return {"out_dir", "resume", "overwrite", "steps"} <= read_json(path).keys()
    except (OSError, ValueError):
        return False


def read_beside(folder):
    """{name: bytes} of BESIDE in a model's folder. Read once, as the folder may go while a run
    lasts. Raises ValueError for a link out of it, but for those of the hub's own store, as what is
    copied may be shown to others."""
    found, inside = {}, [os.path.realpath(folder)]
    above = os.path.dirname(inside[0])
    if os.path.basename(above) == "snapshots":
        inside.append(os.path.join(os.path.dirname(above), "blobs"))
    for name in BESIDE:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        if os.path.dirname(os.path.realpath(path)) not in inside:
            raise ValueError(f"{path} is a link out of the model's folder, and would "
                             "be copied to where the model is saved: put the file "
                             "itself there")
        with open(path, "rb") as f:
            found[name] = f.read()
    return found


def is_name(folder, name):
    """Can this be a file's name in a folder? Not what leads out of it, nor a folder there."""
    return (b"\0" not in os.fsencode(name) and os.path.basename(name) == name
            and not os.path.isdir(os.path.join(folder, name)))


def read_list(folder):
    """What write_model noted in a folder -> the step of the model there, None unless all of it is
    there; names of the files that a run wrote, the note's own last."""
    try:
        found = read_json(os.path.join(folder, LIST))
        step = found["step"]
        names = [name for name in found["files"] if is_name(folder, name)]
    except (OSError, ValueError, KeyError, TypeError):
        return None, []
    if not all(os.path.isfile(os.path.join(folder, name)) for name in names):
        step = None
    return step, names


def remove_listed(folder):
    """Remove what a run wrote to a folder; what else is there may be somebody's own."""
    for name in read_list(folder)[1]:
        remove(os.path.join(folder, name))


def step_of(path, names):
    """The step of the models in these folders of a run; None unless all are whole and of one."""
    steps = {read_list(os.path.join(path, name))[0] for name in names}
    return steps.pop() if len(steps) == 1 else None


def difference(was, config, identity, equal, where):
    """The first difference to a run that began before in `where`, "" if there is none. was: its
    config.json. identity: fingerprints of what settings name now. equal: settings that must be."""
    before = was.get("identity") or {}  # null, of an older run, is none
    for key in sorted(identity.keys() & before.keys()):
        if identity[key] != before[key]:
            return (f"{key} {shown(getattr(config, key))} has other contents now than "
                    f"when the run in {where!r} began")
    for key in sorted(equal):
        old, new = was.get(key), getattr(config, key)
        if type(old) is not type(new) or old != new:
            return (f"{key} was {shown(old)} in the run in {where!r}, now it is "
                    f"{shown(new)}")
    return ""


class Run:
    """One run in config.out_dir.

    config: namespace with out_dir, resume, overwrite, steps and whatever else the run is made of.
    may_change: keys that a resumed run may have set differently. identity: {key: fingerprint of the
    files that it names}, part of the run where their names and places are not. before: {key: value}
    of a run from before that setting had a name. inputs: {key: path
    of what is read}, of which "model" is the folder that the model is loaded from.
    shapes: what memory holds once a step is done, as check_shape has it. folder: where out_dir is,
    whatever the current folder is later. step: steps done. memory: what later steps must know
    beside the learner; JSON. learner: what `save` was given, after a resume. signal: the number of
    the last one that came, or 0; interrupted: of the one that ends the run after this step. writes:
    is this rank 0? tracker: is told what is logged. replaced: key of a file that is another than
    before, until the log says so.

    Raises, before anything is written, ValueError if the folder holds another run, what the run
    reads or files that no run made, is in use, or holds a checkpoint that is damaged or of other
    settings; FileNotFoundError if there is none."""

    def __init__(self, config, may_change, identity=None, inputs=None, shapes=None,
                 before=None):
        self.config = config
        self.may_change = may_change
        self.before = before or {}
        self.identity = identity or {}
        self.shapes = shapes or {}
        self.folder = os.path.realpath(config.out_dir)
        self.step = 0
        self.memory = {}
        self.learner = None
        self.held = None  # the descriptor that locks out_dir
        self.signal = 0
        self.interrupted = 0
        self.beside = {}
        self.tracker = None
        self.replaced = ""
        self.writes = parallel.rank() == 0
        self.saved = None  # the checkpoint's step
        self.unsaved = not config.resume  # is there more than it holds?
        if config.resume and config.overwrite:
            raise ValueError("resume=True goes on with a run, overwrite=True throws "
                             "it away: choose one of them")
        self.check_inputs(inputs or {})
        if inputs:
            self.beside = read_beside(inputs["model"])
        if self.writes and os.path.isdir(self.folder):
            self.held = hold(config.out_dir)
        if config.resume:
            self.read_checkpoint()
        elif self.writes:
            self.check_free()
        if self.writes:
            self.check_links()
        self.first = self.step  # at which this process began

    @property
    def finished(self):
        return self.step >= self.config.steps

    def path(self, name):
        return os.path.join(self.folder, name)

    def check_inputs(self, inputs):
        """Raise ValueError where a run would write over what it reads."""
        ours = {os.path.realpath(self.path(name)) for name in ("", *FOLDERS, *FILES)}
        for key, path in inputs.items():
            if os.path.realpath(path) in ours:
                raise ValueError(f"{key} {getattr(self.config, key)!r} is where this "
                                 "run would save its own: choose another --out_dir")

    def files_of(self, folder):
        """Names of the files that write_model writes to a folder, the list of them last."""
        if folder in ADAPTERS:
            return ["adapter_config.json", "adapter_model.safetensors", LIST]
        return ["config.json", "model.safetensors", *self.beside, LIST]

    def files(self):
        """Names of what is in out_dir where a run writes."""
        names = list(FILES)
        for folder in FOLDERS:
            path = self.path(folder)
            names.append(folder)
            if os.path.isdir(path) and not os.path.islink(path):
                inside = sorted(os.listdir(path))
                names[-1:] = [os.path.join(folder, name) for name in inside]
        return [name for name in names if os.path.lexists(self.path(name))]

    def check_free(self):
        """Raise ValueError unless a new run may begin in out_dir."""
        there, out_dir = self.files(), self.config.out_dir
        ours = is_of_a_run(self.path("config.json"))
        made = {os.path.join(folder, file) for folder in FOLDERS
                for file in read_list(self.path(folder))[1]}.union(FILES)
        for name in there:
            folder, file = os.path.split(name)
            if ours and folder and file not in self.files_of(folder):
                continue  # an old run's, or somebody's own, which stays
            if not ours or name not in made or os.path.islink(self.path(name)):
                raise ValueError(f"out_dir {out_dir!r} holds {name}, which no run of "
                                 "this program made: choose another --out_dir")
        if there and not self.config.overwrite and not (ours and self.nothing_saved()):
            raise ValueError(f"out_dir {out_dir!r} holds another run: go on with it "
                             "(--resume=True), throw it away (--overwrite=True), or "
                             "choose another --out_dir")

    def check_links(self):
        """Raise ValueError for a link where this run would write: whoever made it may have meant a
        file of somebody else. (A later one is not followed either, see folder_of.)"""
        inside = [os.path.join(folder, name) for folder in FOLDERS
                  for name in self.files_of(folder)]
        for known in (*FILES, *FOLDERS, "wandb", *inside):
            for name in (known, known + UNFINISHED):
                if os.path.islink(self.path(name)):
                    raise ValueError(f"out_dir {self.config.out_dir!r} holds {name}, "
                                     "which is a link, and nothing is written through "
                                     "one: choose another --out_dir")

    def nothing_saved(self):
        """Did the run in out_dir end before its first evaluation was logged? It counts as none."""
        saved = any(name.startswith(("ckpt", *MODELS)) for name in self.files())
        log = self.path("log.jsonl")
        return not saved and not (os.path.exists(log) and os.path.getsize(log))

    # resuming

    def read_checkpoint(self):
        config = self.config
        path = self.path("ckpt.pt")
        try:
            state = read_checkpoint(path)
            self.check_layout(state, path)
        except (FileNotFoundError, ValueError) as e:
            raise type(e)(f"resume: {e}; {self.older()}") from None
        known = self.identity.keys() & state["identity"].keys()  # may have moved
        was = {**self.before, **state["config"], "identity": state["identity"]}
        other = difference(
            was, config, identity=self.identity, where=config.out_dir,
            equal=vars(config).keys() - self.may_change - known)
        if other:
            raise ValueError(f"resume: {other}")
        if state["step"] > config.steps:
            raise ValueError(f"resume: the run in {config.out_dir!r} has done "
                             f"{state['step']} steps already, steps={config.steps}")
        self.step = self.saved = state["step"]
        self.memory = state["memory"]
        self.learner = state["learner"]
        self.sizes = state["sizes"]

    def check_layout(self, state, path):
        """Raise ValueError for what is in a checkpoint of another kind."""
        for key, kind in LAYOUT.items():
            found = state.get(key) if isinstance(state, dict) else None
            if type(found) is not kind:
                raise ValueError(f"{path}: {key} must be of type {kind.__name__}, got "
                                 f"{type(found).__name__}")
        sizes = [state["sizes"].get(name) for name in GROWING]
        if min(state["step"], *(n if type(n) is int else -1 for n in sizes)) < 0:
            raise ValueError(f"{path}: step {state['step']} and sizes {sizes!s:.100} "
                             "must be whole numbers from 0")
        try:
            json.dumps(state["memory"], allow_nan=False)
            maybe = "" if state["step"] else "?"  # before the first step there is less
            shapes = {key + maybe: shape for key, shape in self.shapes.items()}
            check_shape(state["memory"], shapes, "memory")
        except (ValueError, TypeError, RecursionError) as e:
            text = f"{path}: memory is not what a run keeps: {e!s:.300}"
            raise ValueError(text) from None

    def older(self):
        """What to do without ckpt.pt."""
        path = self.path("ckpt-previous.pt")
        if is_of_a_run(self.path("config.json")) and self.nothing_saved():
            return "nothing was saved, so start again without --resume=True"
        try:
            step = read_checkpoint(path)["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return "start again with --overwrite=True"
        return (f"{path} is whole and holds step {step}: rename it to ckpt.pt and "
                "resume from it")

    def cut_back(self, name):
        """Cut a file that grows back to what the checkpoint knows."""
        path, size = self.path(name), self.sizes[name]
        try:
            with open_to_append(path) as f:
                if f.tell() < size:
                    tell(f"{path} lacks some of what was written before step "
                         f"{self.step}")
                    f.seek(0)
                    size = f.read().rfind(b"\n") + 1  # not half a line
                f.truncate(size)
        except OSError as e:
            raise OSError(f"resume: {e}") from None

    def open(self):
        """Make out_dir, clear it of an old run if that was asked for, cut log and samples back to
        the step that is resumed; from here on a signal ends the run after its step."""
        self.began = time.monotonic()
        parallel.gather(None)  # all ranks have read what they need
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:  # nohup
                signal.signal(number, self.on_signal)
        if not self.writes:
            return
        os.makedirs(self.folder, exist_ok=True)
        self.held = hold(self.folder)
        if self.learner is None:
            self.check_free()  # another run may have begun and ended here since
            for name in FILES[:-1]:  # checkpoints first, the settings stay until they change
                remove(self.path(name))
            for folder in FOLDERS:
                remove_listed(self.path(folder))
        else:
            for name in GROWING:
                self.cut_back(name)
            tell(f"resumed at step {self.step}")
        for folder in MODELS:
            os.makedirs(self.path(folder), exist_ok=True)
        settings = dict(vars(self.config), identity=self.identity)
        write_text(self.path("config.json"), json.dumps(settings, indent=2))

    def on_signal(self, number, frame):
        if self.signal and number == getattr(signal, "SIGHUP", None):
            return  # a terminal that is closed sends it twice
        if self.signal:
            with suppress(OSError, ValueError):
                if LAST.stream:
                    os.write(LAST.stream.fileno(), b"\n")
            os._exit(128 + number)
        self.signal = number
        if not self.writes:
            return
        with suppress(OSError):  # print may be what was interrupted
            name = signal.Signals(number).name
            line = f"\n{name}: finishing this step, then saving; "
            line += "a second signal quits at once\n"
            os.write(2, line.encode())
            if is_terminal(sys.stderr):  # where the cursor now is on a line of its own
                LAST.stream = None

    def agree(self):
        """Between two steps: a signal that came to any rank ends the run of all."""
        self.interrupted = max(parallel.gather(self.signal))

    # writing

    def is_own(self):
        """Is out_dir still the folder that this process holds?"""
        if self.held is None:
            return True
        try:
            return os.path.samestat(os.fstat(self.held), os.stat(self.folder))
        except OSError:
            return False

    def check_own(self):
        if not self.is_own():
            raise OSError(f"out_dir {self.config.out_dir!r} was removed or replaced "
                          "while this run used it: nothing more is written")

    def append(self, name, text):
        """Add text to a file in out_dir."""
        self.check_own()
        self.unsaved = True
        if not self.writes:
            return
        try:
            with open_to_append(self.path(name)) as f:
                f.write(text.encode("utf-8", "backslashreplace"))
        except OSError as e:
            raise OSError(f"could not write {self.path(name)}: "
                          f"{e.strerror or e}") from None

    def log(self, kind, numbers):
        """Add a line to log.jsonl and tell the tracker. Raises FloatingPointError for a number that
        is not finite, which JSON has not."""
        for name, x in numbers.items():
            if isinstance(x, float) and not abs(x) < float("inf"):
                raise FloatingPointError(f"{name} is {x} in step {self.step}; lower "
                                         "lr?")
        row = dict(kind=kind, **numbers)
        if self.replaced:
            row["changed"], self.replaced = self.replaced, ""
        self.append("log.jsonl", json.dumps(row, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.log(numbers)

    def watch(self, key, file, fingerprint):
        """Say so, in the next line of the log too, where a file, which may change, is another than
        when the run was saved."""
        if self.memory.get(key, fingerprint) != fingerprint:
            tell(f"{key}: {file} has changed since the checkpoint of step {self.step}")
            self.replaced = key
        self.memory[key] = fingerprint

    def minutes_left(self):
        """After the step in progress, at the pace of this process so far."""
        done, left = self.step + 1 - self.first, self.config.steps - self.step - 1
        return (time.monotonic() - self.began) / done * left / 60

    def save(self, learner):
        """Write the checkpoint; the one before it becomes ckpt-previous.pt. learner: dict of
        tensors and numbers."""
        if self.writes:
            self.write(learner)
        self.saved = self.step
        self.unsaved = False

    def write(self, learner):
        self.check_own()
        sizes = dict.fromkeys(GROWING, 0)
        for name in GROWING:
            if os.path.exists(self.path(name)):
                sync(self.path(name))
                sizes[name] = os.path.getsize(self.path(name))
        state = dict(learner=learner, step=self.step, memory=self.memory,
                     config=vars(self.config), identity=self.identity, sizes=sizes)
        before = self.path("ckpt-previous.pt")
        write_checkpoint(self.path("ckpt.pt"), state, previous=before)

    @contextmanager
    def saving_on(self, kind, opt):
        """An exception of this kind, which comes before the step in progress has changed anything,
        loses nothing: what was learned until then is saved first."""
        try:
            yield
        except kind as e:
            try:
                if self.step > (self.saved or 0):
                    self.save(opt.state())
            except OSError as full:
                raise OSError(f"{e}; {full}") from None
            raise

    def write_model(self, name, net, reward):
        """Write net to the folder out_dir/name in Hugging Face format, a model with what stood
        beside the weights where it came from. The list of the files names them before the first is
        written, and a step, which says that all are there, after the last."""
        if not self.writes:
            return
        self.check_own()
        folder = self.path(name)
        os.makedirs(folder, exist_ok=True)
        files, before = self.files_of(name), read_list(folder)[1]
        stale = [file for file in before if file not in files]
        self.write_list(folder, step=None, reward=None, files=[*stale, *files])
        net.save_pretrained(folder)
        for file, data in self.beside.items():
            if file in files:
                write_bytes(os.path.join(folder, file), data)
        for file in stale:
            remove(os.path.join(folder, file))
        self.write_list(folder, step=self.step, reward=reward, files=files)

    def write_list(self, folder, **numbers):
        write_text(os.path.join(folder, LIST), json.dumps(numbers, indent=2))

    # the end

    def kept(self):
        """Where the last checkpoint is, for a run that cannot go on."""
        if not self.is_own():
            return ""
        if self.saved is None:
            return "; nothing was saved"
        return f"; {self.path('ckpt.pt')} holds step {self.saved}"

    def leave(self):
        """After the loop of an interrupted run: say how to go on, end with 128 + signal."""
        how = "the same command and --resume=True"
        if self.config.overwrite:
            how += " in place of --overwrite=True"
        tell(f"saved in {self.config.out_dir} at step {self.step}; go on with {how}")
        sys.exit(128 + self.interrupted)
