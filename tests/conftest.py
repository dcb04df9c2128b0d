"""What several test files share: toy models, prompts, logs, runs, and ways to compare them."""
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode

import run.dry_run
import run.evaluate
import run.learn
import train
from data.tasks import TASKS
from fast.launch import triton
from grpo import replay
from kvcache import EVICT, Eviction, attention
from model import Config, Transformer
from rollout import Rollout
from run.learn import replay_all
from support import parallel
from support.checkpoint import read_checkpoint as read_whole
from support.lora import LoRA
from support.optimizer import Masters
from support.own import find_own
from support.run import HELD, SIGNALS

# one thread is faster for models this small, here and in the processes that tests start
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RAW = dict(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=50,
    max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True)
SMALL = dict(budget=24, window=8, sinks=2)
EVICTION = Eviction(**SMALL)
STOP = (3, 7, 9)
TINY = os.path.join(ROOT, "data", "tiny")
# a run of half a second, which learns whatever its responses earn
FAST = ["--task=kv", "--prompt_tokens=64", "--max_new_tokens=5", "--budget=24", "--window=16",
        "--prompts=2", "--group=4", "--distill_on=all", "--eval_problems=4", "--eval_final=4",
        "--steps=4", "--eval_every=2", "--save_every=2", "--device=cpu", "--lr=3e-4"]

# kernels run on a GPU if there is one, else in Triton's interpreter, in a process of their own, as
# TRITON_INTERPRET must be set before anything imports triton (see `interpreters` below)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
kernel = pytest.mark.skipif(triton is None or not (CUDA or INTERPRET),
                            reason="needs a GPU or TRITON_INTERPRET=1")
beside_interpreter = pytest.mark.skipif(CUDA or INTERPRET or triton is None,
                                        reason="runs the kernels where there is no GPU")


# models and prompts

def toy(seed=0, dtype=torch.float32, **changes):
    """A random model whose attention is sharp: with weights of the usual 0.02, sparse and dense
    would agree and every control would pass."""
    torch.manual_seed(seed)
    model = Transformer(Config.from_dict({**RAW, **changes})).to(dtype)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.35)
        else:  # the norms
            p.data.normal_(1, 0.2)
    return model


@pytest.fixture(scope="module")
def model():
    return toy()


def prompts(*lengths, seed=0):
    """One prompt of random ids for each length."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (n,), generator=g).tolist() for n in lengths]


# eviction methods

def tova(q, k, e, elsewhere=None):
    """Attention of the last query alone, averaged over all heads (TOVA, 2401.06104)."""
    if elsewhere is not None:
        elsewhere = elsewhere[:, -1:]                           # (nh, 1)
    votes = attention(q[-1:], k, elsewhere).mean((0, 1, 2))     # (n,)
    return votes.expand(k.shape[1], -1)                         # (nkv, n)


for own in os.environ.get("SMD_METHODS", "").split():  # module:name, to test yours like these
    EVICT[own] = find_own(own, "SMD_METHODS")[0]


@pytest.fixture(params=[*(name for name in EVICT if name != "none"), "one that is added"])
def method(request, monkeypatch):
    """The name of every method in EVICT, and of one that somebody might add: TOVA."""
    monkeypatch.setitem(EVICT, "one that is added", tova)
    return request.param


# comparisons

def rel(a, b):
    """Largest difference, relative to the largest value of b."""
    return ((a - b).abs().max() / b.abs().max()).item()


def gap(model, rollout, policy="shadow"):
    """Largest |learner - sampler| over the sampled tokens."""
    with torch.no_grad():
        logp = replay(model, rollout, (policy,))[policy]
    return (logp - rollout.logp_roll).abs().max().item()


def ragged(*lengths, R):
    """The mask of one group's responses: (1, G, R) bool."""
    return torch.arange(R) < torch.tensor(lengths)[None, :, None]


class Largest(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.n = max(self.n, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest_tensor(run):
    """Elements of the largest storage that any operation of run() returns, forward or backward."""
    with Largest() as seen:
        run()
    return seen.n


# learning

def learner(net, initial=None, **changes):
    """What `learn` needs: settings, objective, optimizer. initial: the model that DPO starts
    from."""
    c = train.settings([f"--{key}={value}" for key, value in changes.items()])
    objective = train.OBJECTIVES[c.objective](net, c, lambda: initial)
    if objective.value:  # fp32, but beside a toy model in fp64
        objective.value.to(torch.promote_types(net.dtype, torch.float32))
    made = LoRA if c.lora_rank else Masters
    return c, objective, made(net, c, objective.value)


def learn(net, opt, objective, rollout, rewards, c, lr, teacher=None):
    """What main does with a rollout and its rewards. -> numbers for the log"""
    again = partial(replay_all, net, objective, c)
    chosen, batch, log = objective.prepare(replace(rollout, rewards=rewards), rewards, again)
    return dict(log, **train.update(net, opt, objective, chosen, batch=batch, config=c, lr=lr,
                                    teacher=teacher))


def some_rewards(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def tables_stay():
    """What a test enters into these tables is gone after it."""
    before = [(table, dict(table)) for table in (EVICT, TASKS, train.OBJECTIVES)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


def share_of_digits(problem, text):
    """A reward, in place of data.tasks.reward, of which every checkpoint earns some."""
    return sum(map(str.isdigit, text)) / max(1, len(text))


# a log without a sampler

def logged(seed=0, B=2, G=3, R=7, L=3, nkv=2):
    """A rollout whose log evicts prompt and response keys at random, differently in every layer,
    KV head and response."""
    rng = torch.Generator().manual_seed(seed)
    sizes = (11, 16)[:B]
    kept = [torch.rand(L, nkv, P, generator=rng).argsort(-1)[..., :6].sort(-1)[0] for P in sizes]
    born = torch.arange(R)
    life = 1 + (torch.rand(L, nkv, B, G, R, generator=rng) * (R - born)).int()  # 1 .. R - born
    return Rollout(
        prompts=[torch.randint(48, (P,), generator=rng).tolist() for P in sizes],
        tokens=torch.randint(48, (B, G, R), generator=rng),
        lengths=torch.tensor([[7, 1, 2], [3, 7, 5]])[:B],
        logp_roll=torch.zeros(B, G, R), temperature=0.8, kept=kept, until=(born + life).int(),
        stopped=torch.ones(B, G, dtype=torch.bool))


def separate(model, r, bg, policy):
    """Log-softmax (n, V) of one response by a forward pass of its own: plain attention under a mask
    that is written out from the log. bg: number of prompt and sample."""
    b, g = bg
    P, n = len(r.prompts[b]), int(r.lengths[b, g])
    T = P + n - 1                                               # the last token is never fed
    i, j = torch.arange(T)[:, None], torch.arange(T)

    def attend(layer, q, k, v):
        dies = torch.full((k.shape[1], T), T)                   # (nkv, T)
        if policy == "shadow":
            dies[:, :P] = P
            for h, kept in enumerate(r.kept[b][layer]):
                dies[h, kept] = T
            dies[:, P:] = P + r.until[layer, :, b, g, :n - 1]
        visible = (j <= i) & (i < dies[:, None])                # (nkv, T, T)
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        s = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
        s = s.masked_fill(~visible.repeat_interleave(share, 0), -torch.inf)
        return torch.einsum("hij,jhd->ihd", s.softmax(-1), v)

    ids = torch.tensor(r.prompts[b] + r.tokens[b, g, :n - 1].tolist())
    hidden = model(ids, torch.arange(T), attend)
    return (hidden[P - 1:] @ model.head.t() / r.temperature).log_softmax(-1)


# runs of train.py

def in_all_rooms(name, function, set=setattr):
    """Put a function in place of generate or replay wherever a run calls it; monkeypatch.setattr
    puts it back. -> what was there"""
    was = getattr(train, name)
    for room in (train, run.evaluate, run.learn, run.dry_run):
        if hasattr(room, name):
            set(room, name, function)
    return was


def at_call(number, act, set=setattr):
    """In the call of generate of this number (None: in each), of evaluations too, act() comes
    first. -> list that grows by each call"""
    calls = []

    def acting(*args, **kwargs):
        calls.append(1)
        if number in (None, len(calls)):
            act()
        return generate(*args, **kwargs)

    generate = in_all_rooms("generate", acting, set)
    return calls


def train_here(*args):
    """train.main in this process, which then answers signals as before and lets go of out_dir."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        train.main([*FAST, *args])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        while HELD:
            os.close(HELD.popitem()[1])


server = multiprocessing.get_context("forkserver")
# imported once for all Forked; the last is what an optimizer imports
server.set_forkserver_preload(["train", "pytest", "torch._dynamo"])


def printing_to(path, target, *args):
    """target(*args), what it prints to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    target(*args)


class Forked(server.Process):
    """A process of its own that calls target(*args) and prints to a file, with what Popen offers.
    Spares the seconds that torch takes to import."""

    def __init__(self, printed, target, *args):
        super().__init__(target=printing_to, args=(printed, target, *args), daemon=True)
        self.start()

    def poll(self):
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self, timeout=100):
        self.join(timeout)
        return self.exitcode


def alive(pid):
    """Is there a process of this number that has not ended (Linux)?"""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def as_rank(number, env, target, *args):
    os.environ.update(env, RANK=str(number), LOCAL_RANK=str(number))
    parallel.GRACE = 0.5  # no launcher looks
    with parallel.ranks():
        target(*args)


class Ranks:
    """n processes that call target(*args), each as a rank that torchrun has started; rank r prints
    to folder/printed-r. port: of a launcher, if not this process is to be theirs."""

    def __init__(self, n, folder, target, args=(), port=None):
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # the launcher's
        env = dict(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port or self.store.port), TORCHELASTIC_RUN_ID="test",
                   TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        self.printed = [os.path.join(folder, f"printed-{r}") for r in range(n)]
        self.processes = [Forked(self.printed[r], partial(as_rank, r, env, target), *args)
                          for r in range(n)]

    def wait(self):
        """-> exit codes, what each printed since the folder was made"""
        codes = [process.wait() for process in self.processes]
        return codes, [open(path).read() for path in self.printed]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A whole short run, not to be changed. -> out_dir, what it printed"""
    forkserver.ensure_running()  # it imports while this one runs
    out = str(tmp_path_factory.mktemp("run") / "out")
    with redirect_stdout(io.StringIO()) as printed:
        train_here(f"--out_dir={out}")
    return out, printed.getvalue()


def read_log(out_dir):
    """log.jsonl without what depends on the clock: rows of evaluations, rows of steps."""
    with open(os.path.join(out_dir, "log.jsonl")) as f:
        log = [json.loads(line) for line in f]
    clock = ("rollout_s", "learn_s", "tokens_per_s")
    log = [{k: v for k, v in row.items() if k not in clock} for row in log]
    return [r for r in log if r["kind"] == "eval"], [r for r in log if r["kind"] == "step"]


def read_checkpoint(out_dir):
    return read_whole(os.path.join(out_dir, "ckpt.pt"))


def same_weights(a, b):
    """Of the checkpoints of two runs, bit by bit."""
    ours, theirs = (read_checkpoint(x)["learner"]["masters"] for x in (a, b))
    return all(map(torch.equal, ours, theirs))


def copy_of(out_dir, folder):
    """-> folder/out, a copy of a run"""
    shutil.copytree(out_dir, folder / "out")
    return folder / "out"


def contents(folder):
    """{name: bytes} of the files in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def write_problems(path, numbers):
    """A task file of one short problem for each number. -> path"""
    with open(path, "w") as f:
        for i in numbers:
            row = dict(prompt=f"The code is {i}. What is it?", answer=str(i))
            f.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """-> write(source), which makes mine.py in a current folder of its own and forgets what was
    imported of it before; --reward=mine:NAME asks its function NAME. -> its path"""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source):
        sys.modules.pop("mine", None)
        (folder / "mine.py").write_text(source)
        return str(folder / "mine.py")

    yield write
    sys.modules.pop("mine", None)


@pytest.fixture
def ctrl_c():
    """SIGINT as at a terminal, whatever started the tests: a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


# what works beside the tests, and tests beside each other

def asks_beside(item):
    """Does a test need what a process of BESIDE finds? -> of Triton's interpreter, of another"""
    return (item.name == "test_kernels_in_interpreter",
            hasattr(getattr(item, "module", None), "BESIDE"))


def pytest_collection_modifyitems(items):
    items.sort(key=asks_beside)  # they come last


class Beside(dict):
    """Processes that work beside all tests: of each test file with a BESIDE that program, and under
    the name "kernels" one that runs the KERNELS of all files in Triton's CPU interpreter, for which
    TRITON_INTERPRET must be set before the import."""

    def start(self, items):
        kernels = {}
        for item in items:
            module = getattr(item, "module", None)
            if hasattr(module, "BESIDE") and item.path not in self:
                self[item.path] = self.process("-c", module.BESIDE)
            if item.name == "test_kernels_in_interpreter":
                kernels[str(item.path)] = f"({item.path.stem} and ({module.KERNELS}))"
        if kernels:
            self["kernels"] = self.process(
                "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *kernels,
                "-k", " or ".join(kernels.values()), TRITON_INTERPRET="1")

    def process(self, *words, **env):
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, **env}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def printed(self, name):
        """What a process printed; it must end well."""
        if isinstance(self[name], subprocess.Popen):
            process = self[name]
            self[name], errors = process.communicate()
            assert process.returncode == 0, self[name] + errors
        return self[name]

    def end(self):
        for process in self.values():
            if isinstance(process, subprocess.Popen):
                with process:  # closes its pipe and waits for its end
                    process.kill()


BESIDE = Beside()


@pytest.fixture
def pass_in_interpreter():
    """The kernels of all files pass in the interpreter: no test of them fails or is skipped."""
    def wait():
        printed = BESIDE.printed("kernels")
        assert "passed" in printed and "skipped" not in printed, printed
    return wait


@pytest.fixture(scope="module")
def beside(request):
    """What the file's BESIDE printed."""
    return BESIDE.printed(request.path)


class Team:
    """As many processes as there are cores, forked from this one, which take one test file after
    the other; what the others report is reported here, and what needs BESIDE is done here."""

    def __init__(self, session):
        self.session, self.config = session, session.config
        self.files, self.last, self.workers = {}, [], {}
        for item in session.items:
            if any(asks_beside(item)):
                self.last.append(item)
            else:
                self.files.setdefault(item.path, []).append(item)
        self.queue, numbers = os.pipe()  # of bytes, each of which one process reads
        os.write(numbers, bytes(range(len(self.files))))
        os.close(numbers)

    def size(self):
        option = self.config.option
        alone = torch.cuda.is_available() or not hasattr(os, "fork")  # no fork could use the card
        if alone or option.usepdb or option.capture == "no":
            return 1
        return min(os.cpu_count(), len(self.files), 8)

    def start(self):
        folder = self.config._tmp_path_factory.getbasetemp()  # of all
        for n in range(1, self.size()):
            path = folder / f"reports-{n}"
            path.touch()
            pid = os.fork()
            if not pid:
                self.work(path)
            self.workers[pid] = path

    def take(self):
        """The tests of files that nobody else has taken."""
        # the largest first, so that all processes end at about the same time
        files = [self.files[path] for path in sorted(
            self.files, key=os.path.getsize, reverse=True)]
        while number := os.read(self.queue, 1):
            yield from files[number[0]]

    def run(self, items):
        """Run tests, of which each needs to know the next: only what that needs stays set up."""
        item = next(items, None)
        while item:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.stop_if_asked()
            item = following

    def stop_if_asked(self):
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def work(self, path):
        """What a forked process does: it writes lines of JSON in place of the terminal's."""
        code = 1
        try:
            reports = open(path, "wb", buffering=0)
            capture = self.config.pluginmanager.getplugin("capturemanager")
            capture.stop_global_capturing()  # its file is the other process's too
            capture.start_global_capturing()
            capture.suspend_global_capture()
            terminal = self.config.pluginmanager.getplugin("terminalreporter")
            terminal._tw._file = open(os.devnull, "w")
            self.config.option.maxfail = 0  # the other process counts
            self.config.pluginmanager.register(Reports(self.config, reports))
            self.run(self.take())
            code = 0
        except BaseException:  # nothing may go on from here as if it were the other process
            traceback.print_exc()
        finally:
            for process in multiprocessing.active_children():
                process.kill()
            os._exit(code)

    def report(self, path):
        """Hand on what another process has reported."""
        hook = self.config.hook
        for line in path.read_bytes().splitlines():
            report = hook.pytest_report_from_serializable(
                config=self.config, data=json.loads(line))
            where = dict(nodeid=report.nodeid, location=report.location)
            if report.when == "setup":
                hook.pytest_runtest_logstart(**where)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                hook.pytest_runtest_logfinish(**where)
            self.stop_if_asked()

    def wait(self):
        for pid in [*self.workers]:
            _, status = os.waitpid(pid, 0)
            self.report(self.workers.pop(pid))
            assert status == 0, f"a process that ran tests ended with {status}"

    def end(self):
        for pid in self.workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Reports:
    """Writes the reports of a forked process to a file."""

    def __init__(self, config, file):
        self.config, self.file = config, file

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.file.write(json.dumps(data).encode() + b"\n")


def pytest_runtestloop(session):
    if session.config.option.collectonly or session.testsfailed:
        return None
    BESIDE.start(session.items)
    team = Team(session)
    try:
        team.start()
        team.run(chain(team.take(), team.last))
        team.wait()
    finally:
        team.end()
        BESIDE.end()
    return True
