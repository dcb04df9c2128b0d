"""
Long-prompt tasks with answers that can be checked exactly, in the style of RULER (arXiv
2404.06654), and the problems of a run, from these or from files (data/files.py).

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

An answer is judged literally by default: one number by its value, anything else word for word.
"The answer is B" earns nothing for B, "12" nothing for "12 km", "0.5" nothing for "1/2": letters
and units need another rule, or one of your own (data/rewards.py). A thought (<think> ...
</think>) is never the answer.

kv, kv4 and kv16 ask for 1, 4 or 16 codes at once, answers of 4, 16 and 64 tokens, and earn the
fraction of codes that are right. Their form is fixed, "coin 4768 lamp 1203", because a policy
finds every loophole: where the number alone was right, the first token, which is predicted before
any key is evicted, soon said three of its four digits.

list is for real models: six codes in any wording, which `listed` judges. In front of each of its
problems stands the same short one with its answer, as turns of a chat where the model has a chat
template, so that no run waits for luck to earn its first reward.

Left out on purpose: RULER's essays (a download), its multi-value variants, word counting.
"""
import bisect
import functools
import itertools
import json
import math
import random
import re
from dataclasses import replace
from statistics import median_high

from data.answers import RULES, after_thought, in_form, is_number, last_number, only_number
from data.files import (
    HOLD_OUT,
    Problem,
    content_of,
    file_problem,
    files_of,
    is_file,
    read_splits,
)
from data.rewards import RewardError, earns, explain, named_numbers, number, rule_of
from support.jsonfile import shown
from support.run import failures

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

# of `listed`: a word and its code; words, and numbers of four digits that are no part of another
FACT = re.compile(r"for ([a-z]+) is (\d{4})\.", re.ASCII)
SAID = re.compile(r"(?<![\w.,])\d{4}(?!\w|[.,]\d)|[A-Za-z]+", re.ASCII)

NUMBER_ONLY = "Answer with the number only."


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


def coded_keys(rng, things=THINGS):
    """(key, code) pairs without repetition: 122 keys of one word first, then 1,386 of two;
    enough for about 14,000 tokens."""
    seen = set()
    for keys in (things, [f"{kind} {place}" for kind in KINDS for place in PLACES]):
        for key in rng.sample(keys, len(keys)):
            code = rng.randrange(1000, 10000)
            while code in seen:
                code = rng.randrange(1000, 10000)
            seen.add(code)
            yield key, str(code)


# the tasks: rng -> facts to hide (their order is drawn later), supply of other sentences, question,
# answer. The order in which a task draws is part of it: another order gives other problems.

def needle(rng):
    thing = rng.choice(THINGS)
    code, = codes(rng, 1)
    facts = [f"The special number for {thing} is {code}."]
    question = f"What is the special number for {thing}? {NUMBER_ONLY}"
    return facts, filler(rng), question, code


def kv(rng, asked=1):
    # the first token of a response, for which no key was evicted, is a word of the question
    pairs = coded_keys(rng)
    wanted = list(itertools.islice(pairs, asked))
    lines = (f"The code for {key} is {code}." for key, code in itertools.chain(wanted, pairs))
    facts = list(itertools.islice(lines, 4 * asked))  # at most a quarter of them is asked for
    question = f"Repeat each word with its code: {', '.join(key for key, _ in wanted)}."
    return facts, lines, question, " ".join(f"{key} {code}" for key, code in wanted)


def list_(rng, things=THINGS):
    pairs = coded_keys(rng, things)
    wanted = list(itertools.islice(pairs, 6))
    facts = [f"The code for {key} is {code}." for key, code in wanted]
    lines = (f"The code for {key} is {code}." for key, code in pairs)
    question = f"Repeat each word with its code: {', '.join(key for key, _ in wanted)}."
    # as answer the facts once more: what an example shows need only be copied
    return facts, lines, question, " ".join(facts)


def own(rng):
    # the second pair is a distractor: without it the only number in the text would be the answer
    a, b = rng.sample(NAMES, 2)
    x, y = rng.sample(THINGS, 2)
    code, wrong = codes(rng, 2)
    facts = [f"{a} owns the {x}.", f"{b} owns the {y}.",
             f"The code of the {x} is {code}.", f"The code of the {y} is {wrong}."]
    question = f"What is the code of the thing that {a} owns? {NUMBER_ONLY}"
    return facts, filler(rng), question, code


def hop(rng):
    a, b, c, d = rng.sample(range(1, 100), 4)
    code, wrong = codes(rng, 2)
    facts = [f"X{b} = {code}.", f"X{a} = X{b}.", f"X{d} = {wrong}.", f"X{c} = X{d}."]
    return facts, filler(rng), f"What is the value of X{a}? {NUMBER_ONLY}", code


def sum_(rng):
    things = rng.sample(THINGS, 3)
    prices = rng.sample(range(10, 100), 3)
    facts = [f"The {thing} costs {price} coins." for thing, price in zip(things, prices)]
    question = f"How many coins do the {things[0]} and the {things[1]} cost together?"
    question = f"{question} {NUMBER_ONLY}"
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
    build, answer = draw(task, f"{split}/{seed}/{index}", TASKS[task][0])

    def size(n):
        return len(encode(build(n)))

    return generated(task, build(fit(size, tokens, f"task {task}")), answer)


def example(task):
    """The worked example in front of a task's problems: its facts and the question alone."""
    build, answer = draw(task, "example", EXAMPLES[task])
    return generated(task, build(0), answer)


def generated(task, text, answer):
    return Problem(task, text, answer, row=dict(prompt=text, answer=answer))


def draw(task, name, make):
    """-> build: number of other sentences -> text; the answer. name: of the problem; make: rng ->
    what it is made of."""
    # a string is hashed with sha512: the same on every machine
    rng = random.Random(f"{task}/{name}")
    facts, supply, question, answer = make(rng)
    if not isinstance(answer, str):
        raise ValueError(f"task {task} draws the answer {answer!r}, must be text")
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
        return " ".join(parts + body[done:n]) + f"\n{question}"

    return build, answer


def fit(size, tokens, what):
    """The largest n with size(n) <= tokens, for a size that grows about linearly: a handful
    of calls. StopIteration out of `size` means that n is more than there is."""
    low, used = 0, size(0)
    if used > tokens:
        raise ValueError(f"{what} needs at least {used} tokens, got prompt_tokens={tokens}")
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


def prompt_encoder(tok, template=None, examples=(), raw=False, control=False):
    """-> encode(prompt): ids of the whole prompt. With a chat template one user message, or the
    messages that `prompt` is a list of; without, the tokenizer's BOS and text + "\\nAnswer:",
    which the model goes on with " coin 4817" and its stop token; raw: BOS and text alone,
    whatever there is; control: text that spells a control token is that token, and a BOS of its own
    is enough. template: {argument of the chat template: value}. examples: Problems that come first,
    answered."""
    template = template or {}
    if not isinstance(template, dict):
        raise ValueError(f"template is {template!r}, must be an object")
    if template and not tok.has_chat:
        raise ValueError(f"template {min(template)!r}: this checkpoint has no chat template")
    if template and raw:
        raise ValueError(f"template {min(template)!r}: raw_text=True uses no chat template")
    if control and not raw:
        raise ValueError("control_tokens=True needs raw_text=True: in a chat template, or before "
                         "\"Answer:\", what a prompt says is text")

    def chat(prompt):
        """-> the system's messages, the others"""
        turns = prompt
        if isinstance(prompt, str):
            turns = [dict(role="user", content=prompt)]
        n = int(turns[0]["role"] == "system")
        return turns[:n], turns[n:]

    def as_messages(prompt):
        system, turns = chat(prompt)
        return tok.chat([*system, *answered, *turns], **template)

    def as_text(text):
        ids, bos = tok.encode(f"{before}{text}{end}", special=control), list(tok.bos_ids)
        return ids if control and ids[:len(bos)] == bos else bos + ids

    if tok.has_chat and not raw:
        answered = []
        for p in examples:
            answered += [*chat(p.prompt)[1], dict(role="assistant", content=p.worked)]
        return as_messages
    end = "" if raw else "\nAnswer:"
    before = ""
    for p in examples:
        gap = "" if f"{p.text}{end}"[-1].isspace() else " "
        before += f"{p.text}{end}{gap}{p.worked}\n\n"
    return as_text


def opens_thought(tok, encode):
    """Does the chat template end a prompt inside a thought?"""
    if not tok.has_chat:
        return False
    question = "Is it 7?"
    return ends_in_thought(tok.decode(encode(question)).rpartition(question)[2])


def ends_in_thought(text):
    return text.rfind("<think>") > text.rfind("</think>")


def stop_strings(setting):
    """The setting `stop`, a text or a JSON list of texts -> tuple. Raises ValueError for an empty
    one."""
    found = (setting,) if setting else ()
    if setting.startswith("["):
        try:
            found = tuple(json.loads(setting))
        except ValueError:
            found = (None,)
    if not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"stop {shown(setting)}: a text, or a JSON list of texts, none empty")
    return found


def before_stop(text, stops):
    """The text up to the first of the stop strings in it."""
    return text[:min((text.index(stop) for stop in stops if stop in text), default=None)]


def stop_end(decode, ids, stops):
    """How many tokens it takes until their text holds a stop string; 0 if it never does."""
    def holds(n):
        return any(stop in decode(ids[:n]) for stop in stops)

    if not holds(len(ids)):
        return 0
    return bisect.bisect_left(range(len(ids)), True, key=holds)


def check_split(split):
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")


# rewards

def listed(text, gold):
    """The number of words whose code is right, divided by the number of words, or of codes said,
    if they are more; gold: "The code for coin is 4768. The code for lamp is 1203."

    A word's code is the first number of four digits behind it, before another of gold's words,
    where it is first said with one. Wording and other numbers count for nothing. So a code without
    its word and a second guess earn nothing, a code given to two words is wrong for both, and a
    list of all codes earns the less, the longer it is."""
    want = dict(FACT.findall(gold))
    said, word, codes = {}, None, 0
    for found in SAID.findall(text):
        if found.lower() in want:
            word = found.lower()
        elif found.isdigit():
            codes += 1
            if word:
                said.setdefault(word, found)
            word = None
    given = [*said.values()]
    right = sum(said.get(word) == code and given.count(code) == 1 for word, code in want.items())
    return right / max(len(want), codes, 1)


def reward(problem, text):
    """What the response text earns: 1.0 if it answers the problem, else 0.0, or whatever number the
    rule of a task of your own returns. text: without stop tokens, which would be words of it. Empty
    text, a thought, or a gold answer that its rule cannot read earns 0. Where the problem names no
    rule it is the task's; problems from a file are then judged by their last number if the gold
    answer is one number, else by their words. RewardError where a rule returns no finite number."""
    text = after_thought(text, problem.thinks)
    if problem.rule == "auto" and problem.task in TASKS:
        rule = TASKS[problem.task][1]
    else:
        rule = rule_of(problem.rule, problem.answer)
    if not text:
        return 0.0
    return number(rule(text, problem.answer))


def judge(batch, texts, split, first, tokens=None):
    """Rewards of the responses to each problem -> B lists of G, {name: a list of one number per
    response} of what else a function of one's own returns. split, first: how the problems are
    called. tokens: B lists of G lists of ids, for such a function. Raises RewardError, naming the
    problem, for one that is no finite number."""
    rewards, parts, many = [], {}, None
    if getattr(batch[0].rule, "batch", False):
        many = iter(judge_together(batch, texts, f"{split} problems from {first} on", tokens))
    for b, (problem, group) in enumerate(zip(batch, texts)):
        rewards.append([])
        for g, text in enumerate(group):
            try:
                if many:
                    found = next(many)
                elif callable(problem.rule):
                    found = problem.rule(problem.row, text, tokens[b][g])
                else:
                    found = named_numbers(reward(problem, text))
            except failures() as e:  # whatever somebody's own rule may raise
                has = ""
                if callable(problem.rule) and isinstance(e, KeyError):
                    has = f"; the row has {', '.join(problem.row):.300}"
                question = shown(problem.text.splitlines()[-1])
                where = f"{split} problem {first + b} {problem.where}".strip()
                raise RewardError(f"the reward of {where} ({question}, response {shown(text)}) "
                                  f"{explain(e)}{has}") from None
            rewards[b].append(found.pop("reward"))
            for name, x in found.items():
                parts.setdefault(name, []).append(x)
    return rewards, parts


def judge_together(batch, texts, what, tokens):
    """What a function of one's own for a whole batch returns: a dict for each response, problem by
    problem. Raises RewardError."""
    rows = [problem.row for problem, group in zip(batch, texts) for _ in group]
    try:
        return batch[0].rule.many(rows, sum(texts, []), sum(tokens, []))
    except failures() as e:
        raise RewardError(f"the reward of {what} {explain(e)}") from None


TASKS = {"needle": (needle, only_number), "kv": (kv, in_form),
    "kv4": (functools.partial(kv, asked=4), in_form),
    "kv16": (functools.partial(kv, asked=16), in_form), "list": (list_, listed),
    "own": (own, only_number), "hop": (hop, only_number), "sum": (sum_, last_number),}
# tasks with a worked example: what makes it, of words that no problem names
EXAMPLES = {"list": functools.partial(list_, things=PLACES)}


class Problems:
    """Problems of a task and their prompts as token ids, by index. A file is checked at the start.

    task: a name in TASKS, a .jsonl file or gsm8k:FOLDER. tok: Tokenizer. tokens: longest prompt.
    n_eval: held-out problems wanted; a file may have fewer. eval_first: the number, in the task or
    among what the file holds out, of the first of them. template: arguments of the chat template.
    skip_long: leave out what is longer than `tokens`. eval_task: a .jsonl file of the held-out
    problems. shots: how many problems come first as examples, in every prompt. raw_text: no chat
    template. control_tokens: text of such a prompt that spells a control token is one. rule: a
    name, auto or in RULES, or a function of one's own. notes: lines that a user should read.
    longest: tokens of the longest prompt, of a generated task at most. Raises ValueError, naming
    the problem, for a prompt that is empty or too long, or an answer that no text can match."""

    def __init__(self, task, tok, seed, tokens, n_eval, template=None, skip_long=False,
                 eval_task="", shots=0, raw_text=False, rule="auto", eval_first=0,
                 control_tokens=False):
        self.task, self.seed, self.tokens, self.n_eval = task, seed, tokens, n_eval
        self.eval_first, self.control_tokens = eval_first, control_tokens
        self.rule, self.notes, self.longest = rule, list(tok.notes), tokens
        self.file, examples = None, []
        if is_file(task):
            no_chat = ""
            if raw_text or not tok.has_chat:
                no_chat = "raw_text=True" if raw_text else "this checkpoint has no chat template"
            paths = sum(files_of(task, eval_task).values(), [])
            self.file, examples = read_splits(paths, shots, self.notes, rule=rule, no_chat=no_chat)
        elif task in EXAMPLES:
            examples = [example(task)]
        self.encode = prompt_encoder(tok, template, examples, raw=raw_text, control=control_tokens)
        self.thinks = opens_thought(tok, self.encode)
        if self.file:
            lengths = self._check_lengths(skip_long)
            self.longest = max(lengths)
            there = len(self.file["eval"])
            if eval_first >= there:
                raise ValueError(f"eval_first {eval_first}: {eval_task or task} holds out {there} "
                                 "problems")
            self.n_eval = min(n_eval, there - eval_first)
            self._describe(paths, examples, wanted=n_eval, median=median_high(lengths))
            self._note_spelled(tok)
        for split in ("eval", "train"):
            (p,), _ = self.get(split, [0])
            if rule in RULES and not earns(rule, p.answer, p.answer):
                raise ValueError(f"task {task} has answers like {p.answer!r:.80}, which no text "
                                 f"can match by reward={rule}")

    def _describe(self, paths, examples, wanted, median):
        """Notes on what the files hold."""
        train, n = len(self.file["train"]), len(self.file["eval"])
        lengths = f"median prompt {median} tokens, longest {self.longest}"
        if len(paths) == 1:
            self.notes.append(f"{self.task}: {train} problems to train on, {n} held out (one in "
                              f"{HOLD_OUT}, by a hash), {wanted} wanted; {lengths}")
        else:
            self.notes.append(f"{self.task}: {train} problems to train on; {paths[1]}: {n} held "
                              f"out, {wanted} wanted; {lengths}")
        for p in examples:
            if isinstance(self.rule, str) and (x := reward(p, p.worked)) < 1:
                self.notes.append(f"shots: the answer of {p.where} earns {x:.3g} by "
                                  f"reward={self.rule}, which the model will copy")
        if examples:
            self.notes.append(f"shots={len(examples)}: in front of each problem "
                              f"{', '.join(p.where for p in examples)}")
        words = sum(not is_number(p.answer) for pool in self.file.values() for p in pool)
        if words and self.rule == "auto":
            self.notes.append(f"{self.task}: {words} answers are no numbers and have to be given "
                              "word for word")

    def _note_spelled(self, tok):
        """A note on prompts through which a chat template seems to have gone already."""
        prompts = [p.prompt for pool in self.file.values() for p in pool]
        texts = ["\n".join(map(content_of, x)) if isinstance(x, list) else x for x in prompts]
        found = list(filter(None, map(tok.spelled, texts)))
        if found and not self.control_tokens:
            self.notes.append(
                f"{self.task}: {len(found)} of {len(texts)} prompts spell control tokens "
                f"({found[0]}), which stay text; if a chat template has written them, say "
                "--raw_text=True --control_tokens=True")

    def _check_lengths(self, skip_long):
        """Sorts out prompts that are too long, split by split, so that the others stay where
        they are -> lengths of these, in tokens. One that is empty is an error."""
        fitting, lengths = {}, []
        for split, pool in self.file.items():
            sizes = [len(self._ids(p, p.where)) for p in pool]
            fitting[split] = [p for p, size in zip(pool, sizes) if size <= self.tokens]
            lengths += sizes
        left = [size for size in lengths if size <= self.tokens]
        if len(left) == len(lengths):
            return lengths
        what = (f"{self.task}: {len(lengths) - len(left)} of {len(lengths)} prompts are longer "
                f"than prompt_tokens={self.tokens}, the longest has {max(lengths)} tokens")
        if not skip_long:
            raise ValueError(f"{what}: raise prompt_tokens, or leave them out with "
                             "--skip_long=True")
        if not all(fitting.values()):
            raise ValueError(f"{what}: too few are left, raise prompt_tokens")
        self.file = fitting
        self.notes.append(f"{what}: they are left out")
        return left

    def _ids(self, p, name):
        """-> the prompt of a problem as ids. ValueError names the one that is empty or that the
        chat template refuses."""
        try:
            ids = self.encode(p.prompt)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from None
        if not ids:
            raise ValueError(f"{name}: the prompt has no tokens")
        return ids

    def get(self, split, indices):
        """-> problems number `indices` of a split, "train" or "eval"; their prompts. ValueError
        names the one that the chat template refuses."""
        out = [self.one(split, i) for i in indices]
        return out, [self._ids(p, f"{split} problem {i} of {self.task}")
                     for i, p in zip(indices, out)]

    def one(self, split, i):
        seed = self.seed
        if split == "eval":
            seed, i = 0, self.eval_first + i  # every seed is measured on the same problems
        if self.file is None:
            p = problem(self.task, split, seed, i, tokens=self.tokens, encode=self.encode)
        else:
            p = file_problem(self.file, split, seed, i)
        thinks = self.thinks or (self.control_tokens and ends_in_thought(p.text))
        return replace(p, thinks=thinks, rule=self.rule)


def show():
    """Print a problem of each task. A stand-in for a tokenizer: one token per word."""
    for name in TASKS:
        tokens = {"kv4": 110, "kv16": 440}.get(name, 100)
        p = problem(name, "train", 0, 0, tokens=tokens, encode=str.split)
        print(f"[{name}] {len(p.text.split())} words\n{p.text}\n-> {p.answer}\n")


if __name__ == "__main__":
    show()
