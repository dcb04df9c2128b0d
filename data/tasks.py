"""
Long-prompt tasks with answers that can be checked exactly, in the style of RULER (arXiv
2404.06654), and problems from a file.

    python -m data.tasks      # one problem of each task

The idea. A task is one small function of a random generator that says what the prompt is
made of: the facts that matter, an endless or finite supply of sentences to bury them in,
the question, and the answer. `problem` lays these out: it draws one depth per fact, adds as
many sentences as fit into `tokens`, and puts the question on the last line. Everything
follows from (task, split, seed, index), so the position in the data is one integer and
training never sees a held-out problem.

A prompt has at most `tokens` tokens as `encode` counts them (chat template included) and
one sentence more would not fit, so it falls short by 4 or 5 tokens on average, seldom by
more than 10. kv stops where its keys run out.

Left out on purpose: RULER's essays (a download), its multi-answer variants (no partial
credit in the reward), word counting.
"""
import json
import math
import random
import re
from dataclasses import dataclass
from decimal import Decimal

THINGS = """anchor apple arrow badge ball banner barrel basket bell blanket boat bottle bowl box
bridge broom brush bucket button cabin camera candle carpet castle chain chair clock coat coin
comb compass cup curtain desk diamond dish doll door drum engine fan feather fence flag flute
fork fountain garden gate glove guitar hammer hat helmet hook horn jar jewel kettle key kite
knife ladder lamp lantern leaf lemon letter lock magnet map mask mirror mug nail necklace needle
net onion orange oven paddle paint pearl pencil piano pillow pin pipe plate pump quilt radio
ribbon ring robe rope ruler saddle scarf shell shield shoe shovel spoon statue stone stool table
tent tower towel train trumpet umbrella vase violin wagon watch wheel whistle window""".split()
KINDS = """amber ancient black blue bright bronze brown broken copper crystal dusty empty fancy
frozen golden green heavy hidden hollow iron ivory little noisy painted pale purple quiet red
rusty silver tiny wooden yellow""".split()
PLACES = """attic bakery barn beach cafe canal cave cellar chapel church factory farm field
forest harbor hill hotel house island kitchen lake library market meadow mill museum orchard
palace park pond port river school shop square stable station street temple valley village
workshop""".split()
NAMES = """Adam Alice Anna Ben Carla David Emma Eric Fiona Frank Grace Helen Henry Iris Jack
Julia Karl Laura Leo Maria Martin Nina Oscar Paul Rosa Sara Simon Tom Victor Wendy""".split()
FILLER = """The road to the {place} was quiet this morning.
A {kind} cloud passed slowly over the {place}.
{name} walked past the {place} and said nothing.
Nobody at the {place} remembered the storm.
It rained on the {place} until the evening.
{name} told {other} a long story about the {place}.
The dogs near the {place} slept in the sun.
Some people say the {place} is older than the town.
{name} likes warm bread and cold milk.
The wind carried leaves across the {place}.
Two birds sat on the roof of the {place}.
In the spring the {place} is full of flowers.
{name} and {other} met at the {place} after lunch.
The {kind} wall behind the {place} needs paint.
Every child in the {place} knew the old song.
Snow fell early that year and the {place} was closed.
{name} read the news and went back to sleep.
The light in the {place} stayed on all night.
A letter for {name} arrived at the {place} too late.
The grass around the {place} has grown tall.
{name} wanted to leave, but {other} wanted to stay.
The path from the {place} leads down to the water.
There was music in the {place} on most days.
Fresh fish was sold in front of the {place}.
{name} never found out who had painted the {place}.
The {kind} horse stood still beside the {place}.
On Sunday the {place} was busy and loud.
{other} asked {name} for the way to the {place}.
The bus stops near the {place} twice each day.
From the {place} you can see the {kind} mountains.
{name} counted the stars above the {place}.
The winter was mild and the {place} stayed open.""".split("\n")


@dataclass(frozen=True)
class Problem:
    task: str    # a key of TASKS, or "file"
    text: str    # what the user asks: facts and filler, then the question on the last line
    answer: str


def filler(rng):
    """Endless plain sentences without digits. Templates come in shuffled rounds, so a
    sentence never follows itself."""
    while True:
        for line in rng.sample(FILLER, len(FILLER)):
            name, other = rng.sample(NAMES, 2)
            place, kind = rng.choice(PLACES), rng.choice(KINDS)
            yield line.format(place=place, kind=kind, name=name, other=other)


def codes(rng, n):
    """n different four-digit numbers as text."""
    return [str(c) for c in rng.sample(range(1000, 10000), n)]


def coded_keys(rng):
    """(key, code) pairs without repetition: 122 keys of one word first, then 1,386 of two;
    enough for about 14,000 tokens."""
    seen = set()
    for keys in (THINGS, [f"{kind} {place}" for kind in KINDS for place in PLACES]):
        for key in rng.sample(keys, len(keys)):
            code = rng.randrange(1000, 10000)
            while code in seen:
                code = rng.randrange(1000, 10000)
            seen.add(code)
            yield key, str(code)


# the tasks: rng -> facts to hide (their order is drawn later), supply of other sentences,
# question, answer. The order in which a task draws is part of it: another order gives other
# problems.

def needle(rng):
    thing = rng.choice(THINGS)
    code, = codes(rng, 1)
    facts = [f"The special number for {thing} is {code}."]
    return facts, filler(rng), f"What is the special number for {thing}?", code


def kv(rng):
    pairs = coded_keys(rng)
    key, code = next(pairs)
    facts = [f"The code for {key} is {code}."]
    others = (f"The code for {k} is {c}." for k, c in pairs)
    return facts, others, f"What is the code for {key}?", code


def own(rng):
    # the second pair is a distractor: without it the only number in the text would be the
    # answer
    a, b = rng.sample(NAMES, 2)
    x, y = rng.sample(THINGS, 2)
    code, wrong = codes(rng, 2)
    facts = [f"{a} owns the {x}.", f"{b} owns the {y}.",
             f"The code of the {x} is {code}.", f"The code of the {y} is {wrong}."]
    return facts, filler(rng), f"What is the code of the thing that {a} owns?", code


def hop(rng):
    a, b, c, d = rng.sample(range(1, 100), 4)
    code, wrong = codes(rng, 2)
    facts = [f"X{b} = {code}.", f"X{a} = X{b}.", f"X{d} = {wrong}.", f"X{c} = X{d}."]
    return facts, filler(rng), f"What is the value of X{a}?", code


def sum_(rng):
    things = rng.sample(THINGS, 3)
    prices = rng.sample(range(10, 100), 3)
    facts = [f"The {thing} costs {price} coins." for thing, price in zip(things, prices)]
    question = f"How many coins do the {things[0]} and the {things[1]} cost together?"
    return facts, filler(rng), question, str(prices[0] + prices[1])


def problem(task, split, seed, index, tokens, encode):
    """Problem number `index` of a task: a pure function of its arguments.

    split: "train" or "eval", two streams with nothing in common; tokens: longest prompt in
    tokens; encode: text -> ids of the whole prompt (see `prompt_encoder`). ValueError if a
    name is unknown or `tokens` too few."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: one of {', '.join(TASKS)}, "
                         "or a .jsonl file read by read_problems")
    check_split(split)
    # a string is hashed with sha512: the same on every machine
    rng = random.Random(f"{task}/{split}/{seed}/{index}")
    facts, supply, question, answer = TASKS[task][0](rng)
    # drawn before any filler, so that depths do not depend on the length
    depths = sorted((rng.random(), fact) for fact in facts)
    body = []  # sentences drawn from the supply so far

    def build(n):
        """The prompt with n sentences around the facts; longer prompts extend shorter ones."""
        while len(body) < n:
            body.append(next(supply))
        parts, done = [], 0
        for depth, fact in depths:
            at = int(depth * (n + 1))
            parts += body[done:at] + [fact]
            done = at
        return " ".join(parts + body[done:n]) + f"\n{question} Answer with the number only."

    def size(n):
        return len(encode(build(n)))

    return Problem(task, build(fit(size, tokens, f"task {task}")), answer)


def fit(size, tokens, what):
    """The largest n with size(n) <= tokens, for a size that grows about linearly: a handful
    of calls. StopIteration out of `size` means that n is more than there is."""
    low, used = 0, size(0)
    if used > tokens:
        raise ValueError(f"{what} needs at least {used} tokens, got tokens={tokens}")
    high, slope = math.inf, 10.0  # high: the smallest n known not to fit
    while high - low > 1:
        n = min(low + max(1, int((tokens - used) / slope)), high - 1)
        try:
            s = size(n)
        except StopIteration:
            s = math.inf
        if s <= tokens:
            slope = max(1.0, (s - used) / (n - low))
            low, used = n, s
        else:
            high = n
            slope *= 1.5  # shorter steps: one that overshoots could repeat down to high one by one
    return low


def prompt_encoder(tok):
    """-> encode(text): ids of the whole prompt. With a chat template one user message;
    without, text + "\\nAnswer:", which the model goes on with " 4817" and its stop
    token."""
    def as_message(text):
        return tok.chat([{"role": "user", "content": text}], add_generation_prompt=True)

    def as_text(text):
        return tok.encode(text + "\nAnswer:")

    return as_message if tok.has_chat else as_text


def check_split(split):
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")


def read_problems(path):
    """A .jsonl file with {"prompt" or "question", "answer"} on each line -> tuple of
    Problems. Of a GSM8K answer ("... #### 42") only what follows the last #### counts.
    ValueError names the line that is wrong."""
    problems = []
    with open(path, "rb") as f:
        for i, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if i == 1 else "utf-8"))
            except (ValueError, RecursionError):
                raise ValueError(f"{path}:{i} is not JSON in UTF-8") from None
            text, answer = None, None
            if isinstance(row, dict):
                text, answer = row.get("prompt", row.get("question")), row.get("answer")
            if isinstance(answer, (str, int, float)):
                answer = str(answer).split("####")[-1].strip()
            else:
                answer = ""
            if not isinstance(text, str) or not text.strip() or not answer:
                raise ValueError(f'{path}:{i} needs a non-empty "prompt" (or "question") '
                                 'and "answer"')
            problems.append(Problem("file", text, answer))
    if not problems:
        raise ValueError(f"{path} holds no problem")
    return tuple(problems)


HOLD_OUT = 10  # every tenth line of a file is held out


def file_problem(problems, split, seed, index, hold_out=HOLD_OUT):
    """Problem `index` of a file: every `hold_out`-th line is held out for "eval" (in file
    order), the others are reshuffled for every pass over them. Wraps around at the end."""
    check_split(split)
    if len(problems) < hold_out:
        raise ValueError(f"{len(problems)} problems are too few: every {hold_out}th is held out")
    if split == "eval":
        pool = range(0, len(problems), hold_out)
        return problems[pool[index % len(pool)]]
    pool = [i for i in range(len(problems)) if i % hold_out]
    lap, at = divmod(index, len(pool))
    return problems[random.Random(f"file/{seed}/{lap}").sample(pool, len(pool))[at]]


# rewards: a rule maps (text, gold answer) to True or False

# no digits of a name (X7); a comma only before groups of three; a minus is a sign unless
# something stands right before it
NUMBER = re.compile(r"(?:(?<![\w)\]])[-−])?[$€£]?(?<![A-Za-z_\d])(?<!\d\.)"
                    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
# what may stand between alternatives: "41, or maybe 42"
HEDGE = re.compile(r"(?:[\s,;/|&*()\-–−]|or|and|maybe|perhaps)*")


def numbers(text):
    """Every number in the text -> list of (value, start, end); "-$1,234.50" is one."""
    found = []
    for m in NUMBER.finditer(text):
        plain = re.sub("[,$€£]", "", m[0]).replace("−", "-")
        found.append((Decimal(plain), *m.span()))
    return found


def exact(text, gold):
    """Same words, whatever the case, spacing and outer punctuation."""
    text, gold = [" ".join(s.casefold().split()).strip(" .,:;!?\"'`*()[]") for s in (text, gold)]
    return text == gold != ""


def only_number(text, gold):
    """The gold number occurs and no other number does: "4817 or 9999" is no answer."""
    want, got = numbers(gold), {value for value, _, _ in numbers(text)}
    return len(want) == 1 and got == {want[0][0]}


def last_number(text, gold):
    """The last number is the gold one, and the number before it is not offered as an
    alternative ("41 or 42")."""
    want, got = numbers(gold), numbers(text)
    if len(want) != 1 or not got or got[-1][0] != want[0][0]:
        return False
    if len(got) == 1 or got[-2][0] == got[-1][0]:
        return True
    between = text[got[-2][2]:got[-1][1]].casefold()
    return not HEDGE.fullmatch(between)


def reward(problem, text):
    """1.0 if the response text answers the problem, else 0.0. Empty text, or a gold answer
    that its rule cannot read, earns 0. Problems from a file are judged by their last number
    if the gold answer is one number, else by their words."""
    # stop and chat tokens that a caller may have decoded too
    text = re.sub(r"<\|[^<>|]*\|>", " ", text).strip()
    if problem.task in TASKS:
        rule = TASKS[problem.task][1]
    elif NUMBER.fullmatch(problem.answer.strip(" $.%")):
        rule = last_number
    else:
        rule = exact
    return float(bool(text) and rule(text, problem.answer))


TASKS = {
    "needle": (needle, only_number),
    "kv": (kv, only_number),
    "own": (own, only_number),
    "hop": (hop, only_number),
    "sum": (sum_, last_number),
}


class Problems:
    """Problems of a task and their prompts as token ids, by index. A file is checked at the start.

    task: a name in TASKS or a .jsonl file. tok: Tokenizer. tokens: longest prompt. n_eval: held-out
    problems wanted; a file may have fewer. Raises ValueError, naming the problem, for a prompt that
    is empty or too long."""

    def __init__(self, task, tok, seed, tokens, n_eval):
        self.task, self.seed, self.tokens, self.encode = task, seed, tokens, prompt_encoder(tok)
        self.file, self.n_eval = None, n_eval
        if task not in TASKS:
            self.file = read_problems(task)
            self.n_eval = min(n_eval, -(-len(self.file) // HOLD_OUT))
        some = [self.one(split, 0) for split in ("eval", "train")]
        for i, p in enumerate(self.file or some):
            n = len(self.encode(p.text))
            if not 0 < n <= tokens:
                raise ValueError(f"problem {i + 1} of {task} has {n} tokens, prompt_tokens is "
                                 f"{tokens}")

    def get(self, split, indices):
        """-> problems number `indices` of a split, "train" or "eval"; their prompts"""
        out = [self.one(split, i) for i in indices]
        return out, [self.encode(p.text) for p in out]

    def one(self, split, i):
        if self.file is None:
            return problem(self.task, split, self.seed, i, tokens=self.tokens, encode=self.encode)
        return file_problem(self.file, split, self.seed, i)


if __name__ == "__main__":
    for name in TASKS:  # a stand-in for a tokenizer: one token per word
        p = problem(name, "train", 0, 0, tokens=100, encode=str.split)
        print(f"[{name}] {len(p.text.split())} words\n{p.text}\n-> {p.answer}\n")
