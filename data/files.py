"""
Problems from files: one JSON object on each line, or the two files of GSM8K as they come.

    {"prompt": "What is 2 + 3?", "answer": 5}                              # or "question"
    {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}   # or as "prompt"

The idea. A line is a problem, and its whole object stays with it (`Problem.row`), for rewards of
your own. A prompt counts once in all files together, or a held-out problem would be trained on.
A tenth of the problems is held out, unless they stand in a file of their own. Which, and which of
the held-out ones are judged, a hash of what they ask decides, so that a file may be sorted.
Whatever is wrong with a line is found at the start and named.

Left out: formats other than JSON lines, files larger than a gigabyte.
"""
import functools
import hashlib
import json
import math
import os
import random
import re
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from data.rewards import earns
from support.jsonfile import KINDS, once, shown

HOLD_OUT = 10              # one of so many problems of a file is held out
LONGEST_LINE = 2 ** 24     # bytes
LARGEST_FILE = 2 ** 30
ROLES = ("system", "user", "assistant", "tool")
FIELDS = dict(role=str, content=str, name=str, reasoning_content=str, thinking=str,
              reasoning=str, tool_calls=list, tool_call_id=str)  # of a message
GSM8K = "gsm8k:"           # before a folder


@dataclass(frozen=True)
class Problem:
    task: str    # a key of TASKS, or "file"
    text: str    # what the user asks: facts and filler, then the question on the last line
    answer: str  # "" where a line has none
    # does the prompt open a thought? Then a response that does not close it is a thought
    thinks: bool = False
    messages: list = field(default=None, compare=False)  # the whole chat, if there is one
    row: dict = field(default=None, compare=False)       # the line's object
    rule: object = field(default="auto", compare=False)  # a rule's name, or a function of one's own
    where: str = field(default="", compare=False)        # file:line

    @property
    def prompt(self):
        """Text, or messages."""
        return self.messages or self.text

    @property
    def worked(self):
        """The answer as it stands in the file, with the steps that lead to it."""
        full = self.row["answer"]
        return full.strip() if isinstance(full, str) else self.answer


# which files

def is_file(task):
    return task.endswith(".jsonl") or task.startswith(GSM8K)


def files_of(task, eval_task=""):
    """-> {setting: paths of its files}: of a task one, or GSM8K's two, of which the second is held
    out unless eval_task is; none of a task that is generated."""
    if not is_file(task):
        return {}
    if not task.startswith(GSM8K):
        found = dict(task=[task])
    else:
        folder = os.path.expanduser(task.removeprefix(GSM8K))
        names = ["train.jsonl"] if eval_task else ["train.jsonl", "test.jsonl"]
        found = dict(task=[os.path.join(folder, name) for name in names])
    if eval_task:
        found["eval_task"] = [eval_task]
    return found


def check_files(c):
    """Raise ValueError for settings of problems that do not go together."""
    if c.eval_task and not c.eval_task.endswith(".jsonl"):
        raise ValueError(f"eval_task {shown(c.eval_task)} must be a .jsonl file")
    for key in ("eval_task", "shots", "skip_long"):
        if getattr(c, key) and not is_file(c.task):
            raise ValueError(f"{key}={getattr(c, key)} needs a task that is a file, "
                             f"got task={c.task}, which is generated")


def read_splits(paths, shots, notes, **how):
    """-> {"train": Problems, "eval": Problems}; the first `shots` to train on, which are examples
    and left out of "train". paths: of a file, or of one to train on and one that is held out.
    notes: lines that a user should read. how: see read_problems."""
    train, *held_out = paths
    if not held_out:
        repeats = []
        problems = read_problems(train, repeats, **how)
        splits = split_file(problems, name=train,
                            also="".join(f" ({note})" for note in repeats))
        notes += repeats
    else:
        every, held = (read_problems(path, notes, **how) for path in paths)
        known = {key(p) for p in held}
        splits = {"train": [p for p in every if key(p) not in known],
                  "eval": sorted(held, key=key)}
        if both := len(every) - len(splits["train"]):
            notes.append(f"{train}: {both} of {len(every)} problems are also in "
                         f"{held_out[0]} and are not trained on")
    examples, splits["train"] = splits["train"][:shots], splits["train"][shots:]
    if not splits["train"]:
        raise ValueError(f"{train}: no problem is left to train on")
    for p in examples:
        if not p.answer:
            raise ValueError(f"{p.where} is an example (shots={shots}) and needs an "
                             "\"answer\"")
    return splits, examples


# reading one

def read_problems(path, notes=None, rule="auto", no_chat=""):
    """A .jsonl file with {"prompt" or "question", "answer"} or {"messages", "answer"} on each line
    -> tuple of Problems, each once: where a prompt comes again with the same answer, only the first
    counts, which a line in the list `notes` says. Of a GSM8K answer ("... #### 42") only what
    follows the last #### counts. rule: its name, by which each answer must be possible, or a
    function of one's own, which may do without answers. no_chat: why there can be no messages.
    ValueError names the line that is wrong."""
    first = {}  # key -> line, Problem
    repeats = 0
    for i, line in lines_of(path):
        try:
            p = read_line(line, rule, where=f"{path}:{i}")
            if p.messages and no_chat:
                raise ValueError(f'has "messages", but {no_chat}')
        except ValueError as e:
            raise ValueError(f"{path}:{i} {e}") from None
        at, known = first.setdefault(key(p), (i, p))
        if isinstance(rule, str) and not earns(rule, known.answer, p.answer):
            raise ValueError(f"{path}:{i} asks the same as line {at}, with the answer "
                             f"{p.answer[:80]!r} instead of {known.answer[:80]!r}")
        repeats += at != i
    if not first:
        raise ValueError(f"{path} holds no problem")
    if repeats and notes is not None:
        notes.append(f"{path}: {repeats} of {len(first) + repeats} problems are "
                     "repeats and are left out")
    return tuple(p for _, p in first.values())


def key(problem):
    """What makes it another problem: who says which words, whatever the white space between. A
    hash, by whose order problems are held out and judged."""
    turns = problem.messages or [dict(role="user", content=problem.text)]
    words = [{**turn, "content": " ".join(content_of(turn).split())} for turn in turns]
    words = [{name: x for name, x in turn.items() if x is not None} for turn in words]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).digest()


def content_of(turn):
    """A message's text; that of an assistant which calls a tool may be absent."""
    return turn.get("content") or ""


def lines_of(path):
    """(number, text) of the lines that are not blank. ValueError unless path is a file of
    such lines, of bounded size."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file")
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file")
    if os.path.getsize(path) > LARGEST_FILE:
        raise ValueError(f"{path} has {os.path.getsize(path):,} bytes, at most "
                         f"{LARGEST_FILE:,} are read")
    with open(path, "rb") as f:
        i = 0
        while line := f.readline(LONGEST_LINE + 1):
            i += 1
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{path}:{i} has more than {LONGEST_LINE:,} bytes")
            try:
                text = line.decode("utf-8-sig" if i == 1 else "utf-8")
            except UnicodeDecodeError as e:
                raise ValueError(f"{path}:{i} is not text in UTF-8: {e.reason}, byte "
                                 f"{e.start + 1}") from None
            if text.strip():
                yield i, text


def read_line(line, rule="auto", where=""):
    """One line of a file -> Problem"""
    def refuse(constant):
        raise ValueError(f"{constant} is not a number")

    try:
        # a number stays what is written: 0.00001 does not become 1e-05
        row = json.loads(line.rstrip(), parse_float=Decimal, parse_int=Decimal,
                         parse_constant=refuse, object_pairs_hook=once)
        answer = row.get("answer") if isinstance(row, dict) else None
        if isinstance(answer, Decimal):
            answer = f"{answer:f}" if abs(answer.adjusted()) < 100 else str(answer)
        row = plain(row)
    except json.JSONDecodeError as e:
        raise ValueError(f"is not JSON: {e.msg}, column {e.colno}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"is not JSON: {e!s:.100}") from None
    except InvalidOperation:
        raise ValueError("is not JSON: a number is out of range") from None
    text, messages = asked(row)
    own = not isinstance(rule, str)
    if isinstance(answer, str):
        answer = answer.split("####")[-1].strip()
    elif own:  # whatever the function makes of it
        answer = "" if answer is None else json.dumps(row["answer"])
    if text is None or not isinstance(answer, str) or not (answer or own):
        raise ValueError(missing(row, own))
    if re.search("[\ud800-\udfff]",
                 json.dumps([text, answer, messages], ensure_ascii=False)):
        raise ValueError("has half a surrogate pair, which is no character")
    if not own and not earns(rule, answer, answer):
        by = "" if rule == "auto" else f" by reward={rule}"
        raise ValueError(f"has the answer {answer[:80]!r}, which no text can match{by}")
    return Problem("file", text, answer, messages=messages, row=row, rule=rule,
                   where=where)


def asked(row):
    """-> the text that a line's object asks, None if there is none; the chat that it ends, or None.
    ValueError for more than one."""
    names = ("prompt", "question", "messages")
    found = [name for name in names
             if isinstance(row, dict) and row.get(name) is not None]
    if len(found) > 1:
        raise ValueError(f'has both "{found[0]}" and "{found[1]}": which one counts?')
    value = row[found[0]] if found else None
    if found == ["messages"] or isinstance(value, list):
        check_messages(value, found[0])
        return content_of(value[-1]), value
    return value if isinstance(value, str) and value.strip() else None, None


def missing(row, own):
    """What a line's object needs, answers aside for a function of one's own, and what it has."""
    needs = ('needs a non-empty "prompt" (or "question"), text or messages, or '
             '"messages"')
    if not own:
        needs += ', and "answer", text or a number'
    if not isinstance(row, dict):
        return f"{needs}: must be an object"
    if isinstance(row.get("answer"), list) and not own:
        needs += " (for several, bring a reward of your own)"
    return f"{needs}; it has {', '.join(map(shown, row)) or 'nothing':.300}"


def check_messages(messages, name="messages"):
    """Raise ValueError for what is no chat that a user ends, or what a tool answers."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'has "{name}" {shown(messages)}, must be a list of '
                         '{"role", "content"}')
    for i, turn in enumerate(messages, 1):
        if not isinstance(turn, dict) or "role" not in turn:
            raise ValueError(f'has a message {i} that is no {{"role", "content"}}')
        for key, value in turn.items():
            if value is not None and not isinstance(value, FIELDS.get(key, ())):
                must = f"absent: a message has {', '.join(FIELDS)}"
                if key in FIELDS:
                    must = KINDS[FIELDS[key]]
                raise ValueError(f"has the {shown(key)} {shown(value)} in message {i}, "
                                 f"must be {must}")
        role = turn["role"]
        if role not in ROLES or (role == "system" and i > 1):
            raise ValueError(f"has the role {shown(role)} in message {i}, must be "
                             "user, assistant or tool, or system in the first")
        calls = role == "assistant" and turn.get("tool_calls")
        if not content_of(turn).strip() and role in ("user", "assistant") and not calls:
            raise ValueError(f"has the content {shown(turn.get('content'))} in message "
                             f"{i}, must be non-empty text")
    if role not in ("user", "tool"):
        raise ValueError("has messages that do not end with the user's")


def plain(value):
    """A JSON value whose numbers are Decimals, with Python's own numbers. Raises ValueError for one
    that would be infinite."""
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list):
        return [plain(x) for x in value]
    if isinstance(value, Decimal):
        if not value.as_tuple().exponent:
            return int(value)
        if math.isinf(float(value)):
            raise ValueError(f"{value!s:.20} is out of range")
        return float(value)
    return value


# splits

def split_file(problems, hold_out=HOLD_OUT, name="problems", also=""):
    """{"train": ..., "eval": ...}: of file `name` one in `hold_out` is held out, whose hashes are
    smallest. also: what else to say where they are too few."""
    if len(problems) < hold_out:
        raise ValueError(f"{name}: {len(problems)} problems are too few: one in "
                         f"{hold_out} is held out; add some, up to {hold_out}, or use "
                         f"--eval_task=FILE{also}")
    held = sorted(problems, key=key)[:-(-len(problems) // hold_out)]
    last = key(held[-1])
    return {"train": [p for p in problems if key(p) > last], "eval": held}


def file_problem(splits, split, seed, index):
    """Problem `index` of a split of a file: "eval" in the order of hashes, so that the first are
    drawn from the whole file, "train" reshuffled for every pass. Wraps around at the end."""
    pool = splits[split]
    lap, at = divmod(index, len(pool))
    if split == "train":
        at = shuffled(len(pool), seed, lap)[at]
    return pool[at]


@functools.lru_cache(2)  # a step may hold the end of one pass and the beginning of the next
def shuffled(n, seed, lap):
    """The order of n problems in a pass over them."""
    return random.Random(f"file/{seed}/{lap}").sample(range(n), n)
