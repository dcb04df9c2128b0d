"""
Inputs that are nearly right: what is read from outside works or is refused in one line.

    python tests/fuzz.py --seconds=600 --seed=0
    python tests/fuzz.py --seed=0 --kind=index --case=17      # one input again

The idea. Valid inputs are made once: a small model with a tokenizer, its shards, a run of two steps
with log and checkpoint. A case is a copy of one of them in which up to three values, keys, bytes or
whole files are changed, as (seed, kind, case) says, and which is then read as the program reads it.
A find is an exception other than ValueError and OSError; a message that is empty, long, of several
lines or names no culprit; a hang; much memory; a file that was written; and an input that was
accepted and does not work.

Left out: coverage guidance, shrinking (a case says what was changed).
"""
import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback

import torch
from safetensors.torch import load_file, save, save_file

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import train  # noqa: E402
from data.tasks import Problems, reward  # noqa: E402
from data.tokenizer import Tokenizer  # noqa: E402
from experiments import ablate, logs  # noqa: E402
from model import Config, Transformer  # noqa: E402
from run.settings import MAY_CHANGE  # noqa: E402
from support.checkpoint import write_checkpoint  # noqa: E402
from support.optimizer import Masters  # noqa: E402
from support.run import HELD, Run  # noqa: E402

SECONDS, MEMORY, LENGTH = 10, 2**30, 1000  # most that a case may take, and characters it may say
DEEP, LONG = "@deep@", "@long@"  # stand for what the writer of JSON cannot write
NASTY = [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-300, 1e300,
         math.nan, math.inf, -math.inf, "", "x", "0", "NaN", "false", "a b", "é\n", "\0", "\ud800",
         "../x", "/etc/passwd", "~", "{", "x" * 5000, [], {}, [[]], [None], {"": 0}, DEEP, LONG]
TEXT = "The code for pen is 4817.\n\n\tWhat is it? 🙂 e\u0301"
with open(os.path.join(ROOT, "data", "tiny", "config.json")) as config:
    TINY = json.load(config)  # of its tokenizer
MODEL = dict(
    model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    vocab_size=TINY["vocab_size"], eos_token_id=TINY["eos_token_id"], max_position_embeddings=512,
    rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=True, rope_theta=1e4,
    hidden_act="silu", layer_types=["full_attention"] * 2,
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=64))
SHARDS = [f"model-{i}.safetensors" for i in range(3)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
RUN = ["--task=kv", "--prompt_tokens=128", "--max_new_tokens=2", "--budget=24", "--window=16",
       "--prompts=2", "--group=2", "--steps=2", "--eval_problems=2", "--eval_final=2",
       "--eval_every=2", "--save_every=2", "--device=cpu", "--dtype=float32"]


# ---- valid inputs ----

class Valid:
    """Folders own (a task, a config file), model (in shards) and arms in `folder`. tok: the model's
    tokenizer; weights: what the checkpoint of the run in arms holds; run: its arguments."""

    def __init__(self, folder):
        self.folder, out = folder, os.path.join(folder, "arms", "shadow", "0")
        os.mkdir(self.path("own"))
        rows = [dict(prompt=f"{i} pens and {i} cups?", answer=str(2 * i)) for i in range(20)]
        rows += [dict(question="Colour?", answer="dark red"), dict(prompt="?", answer="a #### 7"),
                 dict(messages=[dict(role="system", content="Be."), dict(role="user", content="2?"),
                                dict(role="assistant", content="2"),
                                dict(role="user", content="3?")], answer="3", n=[1, {"a": 2.5}])]
        with open(self.path("own", "task.jsonl"), "w") as f:
            f.write("".join(json.dumps(row) + "\n" for row in rows))
        with open(self.path("own", "mine.py"), "w") as f:
            f.write("evict = 'rkv'\nlr = 1e-3\n")
        shutil.copytree(os.path.join(ROOT, "data", "tiny"), self.path("model"))
        with open(self.path("model", "tokenizer_config.json"), "r+") as f:
            keys = dict(json.load(f), chat_template=TEMPLATE)
            f.seek(0)
            json.dump(keys, f)
        torch.manual_seed(0)
        net = Transformer(Config.from_dict(MODEL))
        for p in net.parameters():
            torch.nn.init.normal_(p, 0.5, 0.3)
        net.save_pretrained(self.path("model"))
        tensors, index = load_file(self.path("model", "model.safetensors")), {}
        os.remove(self.path("model", "model.safetensors"))
        for i, name in enumerate(SHARDS):
            part = {key: tensors[key] for key in sorted(tensors)[i::len(SHARDS)]}
            save_file(part, self.path("model", name))
            index.update(dict.fromkeys(part, name))
        with open(self.path("model", "model.safetensors.index.json"), "w") as f:
            json.dump(dict(metadata={}, weight_map=index), f)
        self.tok = Tokenizer(self.path("model"))
        self.run = [*RUN, f"--model={self.path('model')}"]
        with contextlib.redirect_stdout(io.StringIO()), as_before():
            train.main([*self.run, f"--out_dir={out}"])
        logs.remember(self.path("arms"), {"shadow": dict(args="", seeds=[0], steps=2, start="")})
        self.weights = [*Transformer.from_pretrained(os.path.join(out, "model")).parameters()]

    def path(self, *names):
        return os.path.join(self.folder, *names)


@contextlib.contextmanager
def as_before():
    """A run answers signals in its own way and holds its folder; not afterwards."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
        while HELD:
            os.close(HELD.popitem()[1])


# ---- changes; each is returned with words that say what was done ----

def change(rng, tree, nasty):
    """A value or a key of a tree of dicts and lists becomes another one, or goes."""
    box = tree
    while True:
        key = rng.choice(list(box) if isinstance(box, dict) else range(len(box)))
        value = box[key]
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.3:
            break
        box = value
    how, keys = rng.choice(("value", "value", "value", "delete", "rename")), list(tree)
    if how == "delete":
        del box[key]
    elif how == "value":
        box[key] = copy.deepcopy(rng.choice([*nasty, [value], {"x": value}, str(value)]))
        how = f"{box[key]!r:.60}"
    elif isinstance(box, dict):
        box[rng.choice((f"{key}x", "", rng.choice(keys)))] = box.pop(key)
    else:
        box.insert(key, value)  # twice
    return f"{key!r:.50}: {how}"


def changes(rng, tree, nasty=NASTY):
    return [change(rng, tree, nasty) for _ in range(rng.choice((1, 1, 1, 2, 3))) if tree]


def spoil(rng, data):
    """-> other bytes, what was done"""
    at = rng.randrange(rng.choice((200, len(data))) + 1)  # heads matter most
    end = at + rng.choice((1, 2, 10, 100, 1000))
    some = rng.choice((rng.randbytes(8), b'"', b",", b"\0", b"\n", b"9" * 400, b"NaN"))
    whole = rng.choice((b"", b"null", b"[]", b"{}", b"0", b"\n", b"[" * 10**5, b"\xff\xfe\0"))
    flipped = bytes(b ^ 1 << rng.randrange(8) for b in data[at:at + 1])
    how, new = rng.choice((
        (f"a bit of byte {at} flipped", data[:at] + flipped + data[at + 1:]),
        (f"cut at byte {at}", data[:at]), (f"without bytes {at} to {end}", data[:at] + data[end:]),
        (f"bytes {at} to {end} twice", data[:end] + data[at:]),
        (f"all replaced by {whole[:10]}", whole), ("a byte-order mark", b"\xef\xbb\xbf" + data),
        (f"{some[:10]} at byte {at}", data[:at] + some + data[at:])))
    return new, [how]


def written(tree):
    """JSON as bytes"""
    text = json.dumps(tree).replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)
    return text.replace(f'"{LONG}"', "1" * 5000).encode()


class Case:
    """A folder, a copy of a valid one, in which files are changed. did: what was done; names: one
    of which a message must contain; spoiled: bytes were changed on their way, so that what is read
    must be what was saved."""

    def __init__(self, rng, valid, base):
        self.rng, self.valid, self.folder, self.did = rng, valid, valid.path("case"), []
        self.names, self.spoiled = [self.folder], True
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(valid.path(base), self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def read(self, *names):
        with open(self.path(*names), "rb") as f:
            return f.read()

    def json(self, *names):
        """Change a file's JSON, or that of one of its lines; or its bytes; or both."""
        rows, done, how = [self.read(*names)], [], self.rng.random()
        lines = names[-1].endswith("l")
        if lines:
            rows = rows[0].splitlines()
        if how > 0.25:
            i, to = self.rng.randrange(len(rows)), self.rng.randrange(len(rows))
            tree = json.loads(rows[i])
            done = changes(self.rng, tree)
            rows[self.rng.choice((i, i, to))] = written(tree)
        data = b"\n".join(rows) + b"\n" * lines
        if how < 0.4:
            data, what = spoil(self.rng, data)
            done += what
            keys = [*re.findall(rb'"\w+":', data), b"x"]
            if self.rng.random() < 0.2:  # a key that stands twice
                data = data.replace(self.rng.choice(keys), self.rng.choice(keys), 1)
        self.put(data, done, *names)

    def put(self, data, done, *names):
        """Write the bytes or, rarely, something else that is no file."""
        path, how = self.path(*names), "a file"
        if self.rng.random() < 0.04:
            how = self.rng.choice(("nothing", "a folder", "a FIFO", "a link to itself"))
            done = [how]
        if os.path.exists(path):
            os.remove(path)
        if how == "a folder":
            os.mkdir(path)
        elif how == "a FIFO":
            os.mkfifo(path)
        elif how == "a link to itself":
            os.symlink(path, path)
        elif how == "a file":
            with open(path, "wb") as f:
                f.write(data)
        self.names.append(names[-1])
        self.did += [f"{os.path.join(*names)}: {what}" for what in done]


# ---- what is changed ----

def change_json(*paths):
    def change(case):
        case.json(*case.rng.choice(paths).split("/"))
    return change


def change_weights(case):
    rng, name = case.rng, case.rng.choice(SHARDS)
    data, part = case.read(name), rng.choice(("tensor", "header", "bytes"))
    if part == "tensor":
        tensors = load_file(case.path(name))
        key, what = rng.choice(list(tensors)), rng.choice(list(TENSORS))
        tensors[key] = TENSORS[what](tensors[key])
        data, done = save(tensors), [f"{key}: {what}"]
    elif part == "header":
        size = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8:8 + size])
        done = changes(rng, tree, [*NASTY, "F64", "F8_E4M3", "BF16", [0], [2**62, 4]])
        head = written(tree)
        data = len(head).to_bytes(8, "little") + head + data[8 + size:]
    else:
        data, done = spoil(rng, data)
    case.put(data, done, name)


TENSORS = dict(
    double=torch.Tensor.double, half=torch.Tensor.half, int=torch.Tensor.int, flat=torch.ravel,
    sum=torch.sum, empty=lambda t: t[:0], longer=lambda t: torch.cat([t, t]),
    nan=lambda t: t * math.nan, huge=lambda t: t * 1e38, eight=lambda t: t.to(torch.float8_e5m2))


def change_arguments(case):
    rng, case.names = case.rng, [""]  # there is no file
    for _ in range(rng.choice((1, 2, 4))):
        key = rng.choice(list(train.DEFAULTS))
        word = f"--{key}={rng.choice([*NASTY, train.DEFAULTS[key], '1e400', '9' * 5000])}"
        if rng.random() < 0.2:
            word = spoil(rng, word.encode(errors="replace"))[0].decode(errors="replace")
        if rng.random() < 0.1:
            word = rng.choice(("", "--", "--x", "=", "--=1", "x.py", case.folder, "--evict"))
        case.did.append(word)


def change_config_file(case):
    rng, lines = case.rng, case.read("mine.py").decode().splitlines()
    for _ in range(rng.choice((1, 2))):
        key, value = rng.choice(list(train.DEFAULTS)), rng.choice(NASTY)
        lines.append(rng.choice((
            f"{key} = {value!r}", f"{key}: {value!r}", f"{key}x = {value!r}", f"import {key}",
            f"def {key}(): pass", f" {key} = 1", f"{key} = " + "(" * 5000, f"del {key}", "return",
            f"{key} += 1", "raise SystemExit", "assert 0, 'a\\nb'")))
    data, done = "\n".join(lines).encode(), lines[2:]
    if rng.random() < 0.3:
        data, done = spoil(rng, data)
    case.put(data, done, "mine.py")
    case.names.append("")  # settings that do not go together may stand anywhere


def change_checkpoint(case):
    """Other bytes, or a whole file of other contents."""
    path, case.spoiled = ("shadow", "0", "ckpt.pt"), case.rng.random() < 0.6
    if case.spoiled:
        data, done = spoil(case.rng, case.read(*path))
    else:
        state = torch.load(case.path(*path), weights_only=True)
        done = changes(case.rng, state, [*NASTY, torch.zeros(3), torch.tensor([[math.nan]])])
        write_checkpoint(case.path(*path), state)
        data = case.read(*path)
    case.put(data, done, *path)


# ---- how it is read and used ----

def attend(layer, q, k, v):
    return q  # attention is the caller's; here the rest of the model is tried


def use_model(case):
    net = Transformer.from_pretrained(case.folder)
    ids = torch.arange(5) % net.config.vocab_size
    with torch.no_grad():
        logits = net.logits(net(ids, ids, attend))
    large = max(p.abs().max() for p in net.parameters()) > 1e3  # such may overflow
    assert large or logits.isfinite().all(), "logits are not finite"


def use_tokenizer(case):
    tok = Tokenizer(case.folder)
    ids = [*tok.encode(TEXT), *tok.stop_ids]
    assert all(0 <= i < len(tok) < 10**9 for i in ids), "ids beyond len(tok), or an absurd len(tok)"
    assert isinstance(tok.decode(ids), str)
    if tok.has_chat:
        tok.chat([{"role": "user", "content": TEXT}])


def use_arguments(case):
    use_settings(case.did)


def use_config_file(case):
    use_settings([case.path("mine.py")])


def use_settings(args):
    c = train.settings(args)
    assert all(type(getattr(c, key)) is type(x) for key, x in train.DEFAULTS.items()), "types"
    json.dumps(vars(c), allow_nan=False)


def use_task(case):
    problems = Problems(case.path("task.jsonl"), case.valid.tok, seed=0, tokens=200, n_eval=4,
                        shots=3)
    for split in ("train", "eval"):
        for p in problems.get(split, range(4))[0]:
            assert reward(p, p.answer) == 1, f"no text earns the answer {p.answer!r:.60}"


def use_arms(case):
    ablate.decide(case.path("shadow", "0"), train.settings(case.valid.run))
    assert "held-out" in ablate.table(logs.load(case.folder))


def use_checkpoint(case):
    """Resume."""
    c = train.settings([*case.valid.run, f"--out_dir={case.path('shadow', '0')}", "--resume=True"])
    run, net = Run(c, MAY_CHANGE), Transformer.from_pretrained(case.valid.path("model"))
    Masters(net, c).load(run.learner)
    same = all(map(torch.equal, net.parameters(), case.valid.weights))
    assert same or not case.spoiled, "other weights than were saved"


LOG, TOKENIZER = "shadow/0/log.jsonl", "tokenizer.json"
KINDS = {  # the valid input, how it is changed, how it is used
    "arguments": ("own", change_arguments, use_arguments),
    "config file": ("own", change_config_file, use_config_file),
    "config.json": ("model", change_json("config.json"), use_model),
    "index": ("model", change_json("model.safetensors.index.json"), use_model),
    "safetensors": ("model", change_weights, use_model),
    "tokenizer": ("model", change_json(TOKENIZER, TOKENIZER, "tokenizer_config.json",
                                       "generation_config.json", "config.json"), use_tokenizer),
    "task": ("own", change_json("task.jsonl"), use_task),
    "run": ("arms", change_json(LOG, LOG, "shadow/0/config.json"), use_arms),
    "arms": ("arms", change_json("settings.json"), use_arms),
    "checkpoint": ("arms", change_checkpoint, use_checkpoint)}


# ---- trying them ----

class Hang(BaseException):
    """Not caught by whoever catches Exception."""


def on_alarm(signum, frame):
    raise Hang(f"not done after {SECONDS} s")


def state_of(folder):
    """{what stands in a folder: when it was written, its size}"""
    found = [os.path.join(base, f) for base, dirs, files in os.walk(folder) for f in dirs + files]
    return {path: (os.lstat(path).st_mtime_ns, os.lstat(path).st_size) for path in found}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes; KiB on Linux


def look(use, case):
    """-> "refused" or "accepted". Raises AssertionError, or what `use` should not have raised."""
    before, memory, result = state_of(case.folder), peak(), "accepted"
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with as_before():
            use(case)
    except (ValueError, OSError) as e:
        result, text = "refused", str(e)
        line = len(text.splitlines()) == 1 and "\x1b" not in text and len(text) < LENGTH
        if not line or not any(name in text for name in case.names):
            raise AssertionError(f"message of {len(text)} characters: {text!r:.300}") from e
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert state_of(case.folder) == before, "something was written"
    assert peak() - memory < MEMORY, "too much memory"
    return result


def attempt(valid, seed, kind, number):
    """-> what came out: refused, accepted, or a find, by exception and place; and of a find, what
    it says and how to repeat it"""
    base, prepare, use = KINDS[kind]
    case = Case(random.Random(f"{seed}/{kind}/{number}"), valid, base)
    try:
        prepare(case)
        return look(use, case), ""
    except (Exception, SystemExit, Hang) as e:
        trace = traceback.extract_tb((e.__cause__ or e).__traceback__)
        f = [f for f in trace if f.filename.startswith(ROOT) and f.name != "on_alarm"][-1]
        what = f"{kind}: {type(e).__name__} at {os.path.relpath(f.filename, ROOT)}:{f.lineno}"
        return what, (f"{' '.join(str(e).split()):.300}\n    {case.did!r:.300}\n    python "
                      f"tests/fuzz.py --seed={seed} --kind={kind!r} --case={number}")


def fuzz(valid, seed, kinds=tuple(KINDS), seconds=math.inf, cases=math.inf):
    """Cases of the kinds in turn, so many of each or for so long. -> {kind: {refused, accepted,
    finds: how many}}, {find: what the first of its sort says}"""
    counts = {kind: dict(refused=0, accepted=0, finds=0) for kind in kinds}
    finds, end, number = {}, time.time() + seconds, 0
    before = signal.signal(signal.SIGALRM, on_alarm)
    while time.time() < end and number < cases:
        for kind in kinds:
            result, text = attempt(valid, seed, kind, number)
            if text:
                finds.setdefault(result, text)
                result = "finds"
            counts[kind][result] += 1
        number += 1
    signal.signal(signal.SIGALRM, before)
    return counts, finds


def main(argv):
    options = dict(arg[2:].split("=", 1) for arg in argv)
    seed, seconds = int(options.get("seed", 0)), float(options.get("seconds", 60))
    kinds = [options["kind"]] if "kind" in options else list(KINDS)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        valid = Valid(folder)
        if "case" in options:
            signal.signal(signal.SIGALRM, on_alarm)
            print(*attempt(valid, seed, kinds[0], int(options["case"])))
            return
        counts, finds = fuzz(valid, seed, kinds, seconds)
    print(f"seed {seed}, {seconds:.0f} s, torch {torch.__version__}")
    print("kind           inputs  refused accepted    finds")
    for kind, n in counts.items():
        print(f"{kind:12} {sum(n.values()):8} {n['refused']:8} {n['accepted']:8} {n['finds']:8}")
    print(f"{sum(sum(n.values()) for n in counts.values())} inputs, {len(finds)} different finds")
    for find, text in finds.items():
        print(f"FIND {find}: {text}")
    sys.exit(bool(finds))


if __name__ == "__main__":
    main(sys.argv[1:])
