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
import os
import random
import re
from dataclasses import replace
from statistics import median_high

from data import answers, files
from data.answers import RULES, after_thought, in_form
from data.files import Problem, content_of, is_file, read_splits
from data.rewards import RewardError, earns, explain, named_numbers, number, rule_of
from support.jsonfile import shown
from support.run import failures

# what prompts are made of: four lists of words, then sentences, a blank line between
with open(os.path.join(os.path.dirname(__file__), "tasks.txt"), encoding="utf-8") as f:
    *words, sentences = f.read().strip().split("\n\n")
THINGS, KINDS, PLACES, NAMES = map(str.split, words)
FILLER = sentences.split("\n")

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
    return [str(code) for code in rng.sample(range(1000, 10000), n)]


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


def facts_of(pairs):
    return (f"The code for {key} is {code}." for key, code in pairs)


def asks_for(pairs):
    return f"Repeat each word with its code: {', '.join(key for key, _ in pairs)}."


def kv(rng, asked=1):
    # the first token of a response, for which no key was evicted, is a word of the question
    pairs = coded_keys(rng)
    wanted = list(itertools.islice(pairs, asked))
    lines = facts_of(itertools.chain(wanted, pairs))
    facts = list(itertools.islice(lines, 4 * asked))  # at most a quarter is asked for
    return facts, lines, asks_for(wanted), " ".join(map(" ".join, wanted))


def list_(rng, things=THINGS):
    pairs = coded_keys(rng, things)
    wanted = list(itertools.islice(pairs, 6))
    facts = list(facts_of(wanted))
    # as answer the facts once more: what an example shows need only be copied
    return facts, facts_of(pairs), asks_for(wanted), " ".join(facts)


def own(rng):
    # the second pair distracts: without it the text's only number would be the answer
    owner, other = rng.sample(NAMES, 2)
    one, two = rng.sample(THINGS, 2)
    code, wrong = codes(rng, 2)
    facts = [f"{owner} owns the {one}.", f"{other} owns the {two}.",
             f"The code of the {one} is {code}.", f"The code of the {two} is {wrong}."]
    question = f"What is the code of the thing that {owner} owns? {NUMBER_ONLY}"
    return facts, filler(rng), question, code


def hop(rng):
    a, b, c, d = rng.sample(range(1, 100), 4)
    code, wrong = codes(rng, 2)
    facts = [f"X{b} = {code}.", f"X{a} = X{b}.", f"X{d} = {wrong}.", f"X{c} = X{d}."]
    return facts, filler(rng), f"What is the value of X{a}? {NUMBER_ONLY}", code


def sum_(rng):
    things = rng.sample(THINGS, 3)
    prices = rng.sample(range(10, 100), 3)
    facts = [f"The {thing} costs {price} coins."
             for thing, price in zip(things, prices)]
    question = f"How many coins do the {things[0]} and the {things[1]} cost together?"
    return facts, filler(rng), f"{question} {NUMBER_ONLY}", str(sum(prices[:2]))


def problem(task, split, seed, index, tokens, encode):
    """Problem number `index` of a task: a pure function of its arguments.

    split: "train" or "eval", two streams with nothing in common; tokens: longest prompt in
    tokens; encode: text -> ids of the whole prompt (see `prompt_encoder`). ValueError if a
    name is unknown or `tokens` too few."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: one of {', '.join(TASKS)}, "
                         "or a .jsonl file read by read_problems")
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
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
    made = make(rng)
    if not isinstance(made, (tuple, list)) or len(made) != 4:
        got = f"{len(made)} of them" if isinstance(made, (tuple, list)) else repr(made)
        raise ValueError(f"task {task} draws {got:.80}, must be four: facts, supply of "
                         "other sentences, question, answer")
    facts, supply, question, answer = made
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
        raise ValueError(f"{what} needs at least {used} tokens, got "
                         f"prompt_tokens={tokens}")
    high, slope = math.inf, 10.0  # high: the smallest n known not to fit
    while high - low > 1:
        n = min(low + max(1, int((tokens - used) / slope)), high - 1)
        try:
            now = size(n)
        except StopIteration:
            now = math.inf
        if now <= tokens:
            slope = max(1.0, (now - used) / (n - low))
            low, used = n, now
        else:
            high = n
            slope *= 1.5  # shorter steps: else it could come down to high one by one
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
        raise ValueError(f"template must be a JSON object, got {template!r}")
    if template and (raw or not tok.has_chat):
        why = "raw_text=True uses" if tok.has_chat else "this checkpoint has"
        raise ValueError(f"template {min(template)!r}: {why} no chat template")
    if control and not raw:
        raise ValueError("control_tokens=True needs raw_text=True: elsewhere, text in "
                         "a prompt never becomes a control token")

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
        ids = tok.encode(f"{before}{text}{end}", special=control)
        bos = list(tok.bos_ids)
        return ids if control and ids[:len(bos)] == bos else bos + ids

    if tok.has_chat and not raw:
        answered = []
        for each in examples:
            answered += [*chat(each.prompt)[1],
                         dict(role="assistant", content=each.worked)]
        return as_messages
    end = "" if raw else "\nAnswer:"
    before = ""
    for each in examples:
        gap = "" if f"{each.text}{end}"[-1].isspace() else " "
        before += f"{each.text}{end}{gap}{each.worked}\n\n"
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
    found = [setting] if setting else []
    if setting.startswith("["):
        try:
            found = json.loads(setting)
        except ValueError:
            found = [None]
    if not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"stop {shown(setting)}: must be a text, or a JSON list of "
                         "texts, none empty")
    return tuple(found)


def before_stop(text, stops):
    """The text up to the first of the stop strings in it."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[:min(found, default=None)]


def stop_end(decode, ids, stops):
    """How many tokens it takes until their text holds a stop string; 0 if it never does."""
    def holds(n):
        return any(stop in decode(ids[:n]) for stop in stops)

    if not holds(len(ids)):
        return 0
    return bisect.bisect_left(range(len(ids)), True, key=holds)


# rewards

def listed(text, gold):
    """The number of words whose code is right, divided by the number of words, or of codes said,
    if they are more; gold: "The code for coin is 4768. The code for lamp is 1203."

    A word's code is the first number of four digits behind it, before another of gold's words,
    where it is first said with one. Wording and other numbers count for nothing. So a code without
    its word and a second guess earn nothing, a code given to two words is wrong for both, and a
    list of all codes earns the less, the longer it is."""
    want = dict(FACT.findall(gold))
    said = {}
    word, codes = None, 0
    for found in SAID.findall(text):
        if found.lower() in want:
            word = found.lower()
        elif found.isdigit():
            codes += 1
            if word:
                said.setdefault(word, found)
            word = None
    given = [*said.values()]
    right = sum(given.count(code) == 1 and code == want[word]
                for word, code in said.items())
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
        what = f"{split} problems from {first} on"
        many = iter(judge_together(batch, texts, what, tokens))
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
            except failures() as error:  # whatever somebody's own rule may raise
                has = ""
                if callable(problem.rule) and isinstance(error, KeyError):
                    has = f"; the row has {', '.join(problem.row):.300}"
                question = shown(problem.text.splitlines()[-1])
                where = f"{split} problem {first + b} {problem.where}".strip()
                raise RewardError(f"the reward of {where} ({question}, response "
                                  f"{shown(text)}) {explain(error)}{has}") from None
            rewards[b].append(found.pop("reward"))
            for name, part in found.items():
                parts.setdefault(name, []).append(part)
    return rewards, parts


def judge_together(batch, texts, what, tokens):
    """What a function of one's own for a whole batch returns: a dict for each response, problem by
    problem. Raises RewardError."""
    rows = [problem.row for problem, group in zip(batch, texts) for _ in group]
    try:
        return batch[0].rule.many(rows, sum(texts, []), sum(tokens, []))
    except failures() as error:
        raise RewardError(f"the reward of {what}: {explain(error)}") from None


TASKS = {
    "needle": (needle, answers.only_number),
    "kv": (kv, in_form),
    "kv4": (functools.partial(kv, asked=4), in_form),
    "kv16": (functools.partial(kv, asked=16), in_form),
    "list": (list_, listed),
    "own": (own, answers.only_number),
    "hop": (hop, answers.only_number),
    "sum": (sum_, answers.last_number)}
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
        self.task = task
        self.seed = seed
        self.tokens = self.longest = tokens
        self.n_eval = n_eval
        self.eval_first = eval_first
        self.control_tokens = control_tokens
        self.rule = rule
        self.notes = list(tok.notes)
        self.file = None  # {split: Problems}
        examples = []
        if is_file(task):
            no_chat = ""
            if not tok.has_chat:
                no_chat = ("this checkpoint has no chat template: give one with "
                           "--template_file=FILE")
            no_chat = "raw_text=True" if raw_text else no_chat
            paths = sum(files.files_of(task, eval_task).values(), [])
            self.file, examples = read_splits(paths, shots, self.notes, rule=rule,
                                              no_chat=no_chat)
        elif task in EXAMPLES:
            examples = [example(task)]
        self.encode = prompt_encoder(tok, template, examples, raw=raw_text,
                                     control=control_tokens)
        self.thinks = opens_thought(tok, self.encode)
        if self.file:
            lengths = self._check_lengths(skip_long)
            self.longest = max(lengths)
            there = len(self.file["eval"])
            if eval_first >= there:
                raise ValueError(f"eval_first {eval_first} must be below the "
                                 f"{there} held-out problems of {eval_task or task}")
            self.n_eval = min(n_eval, there - eval_first)
            self._describe(paths, examples, wanted=n_eval, median=median_high(lengths))
            self._note_spelled(tok)
        for split in ("eval", "train"):
            (first,), _ = self.get(split, [0])
            if rule in RULES and not earns(rule, first.answer, first.answer):
                raise ValueError(f"task {task} has answers like {first.answer!r:.80}, "
                                 f"which no text can match by reward={rule}")

    def _note(self, said):
        self.notes.append(f"{self.task}: {said}")

    def _describe(self, paths, examples, wanted, median):
        """Notes on what the files hold."""
        pools = self.file.values()
        train, held_out = map(len, pools)
        where, how = f"; {paths[-1]}:", ""
        if len(paths) == 1:
            where, how = ",", f" (one in {files.HOLD_OUT}, by a hash)"
        self._note(f"{train} problems to train on{where} {held_out} held out{how}, "
                   f"{wanted} wanted; median prompt {median} tokens, longest "
                   f"{self.longest}")
        for each in examples:
            if isinstance(self.rule, str) and (earned := reward(each, each.worked)) < 1:
                self.notes.append(f"shots: the answer of {each.where}, whose form the "
                                  f"model will copy, earns {earned:.3g} by "
                                  f"reward={self.rule}")
        if examples:
            self.notes.append(f"shots={len(examples)}: in front of each problem "
                              f"{', '.join(each.where for each in examples)}")
        gold = [each.answer for pool in pools for each in pool]
        words = len(gold) - sum(map(answers.is_number, gold))
        if words and self.rule == "auto":
            self._note(f"{words} answers are no numbers: a response must give them "
                       "word for word")

    def _note_spelled(self, tok):
        """A note on prompts through which a chat template seems to have gone already."""
        texts = ["\n".join(map(content_of, each.messages or [dict(content=each.text)]))
                 for pool in self.file.values() for each in pool]
        found = list(filter(None, map(tok.spelled, texts)))
        if found and not self.control_tokens:
            self._note(f"{len(found)} of {len(texts)} prompts spell control tokens "
                       f"({found[0]}), which stay text; if a chat template has written "
                       "them, add --raw_text=True --control_tokens=True")

    def _check_lengths(self, skip_long):
        """Sorts out prompts that are too long, split by split, so that the others stay where
        they are -> lengths of these, in tokens. One that is empty is an error."""
        fitting, lengths = {}, []
        for split, pool in self.file.items():
            sizes = [len(self._ids(each, each.where)) for each in pool]
            fitting[split] = [each for each, size in zip(pool, sizes)
                              if size <= self.tokens]
            lengths += sizes
        left = [size for size in lengths if size <= self.tokens]
        too_long = len(lengths) - len(left)
        if not too_long:
            return lengths
        what = (f"{self.task}: {too_long} of {len(lengths)} prompts are longer than "
                f"prompt_tokens={self.tokens}, the longest has {max(lengths)} tokens")
        if not skip_long:
            raise ValueError(f"{what}: raise prompt_tokens, or leave them out with "
                             "--skip_long=True")
        if not all(fitting.values()):
            raise ValueError(f"{what}: too few are left, raise prompt_tokens")
        self.file = fitting
        self.notes.append(f"{what}: they are left out")
        return left

    def _ids(self, problem, name):
        """-> the prompt of a problem as ids. ValueError names the one that is empty or that the
        chat template refuses."""
        try:
            ids = self.encode(problem.prompt)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from None
        if not ids:
            raise ValueError(f"{name}: the prompt has no tokens")
        return ids

    def get(self, split, indices):
        """-> problems number `indices` of a split, "train" or "eval"; their prompts. ValueError
        names the one that the chat template refuses."""
        found = [self.one(split, i) for i in indices]
        return found, [self._ids(each, f"{split} problem {i} of {self.task}")
                       for i, each in zip(indices, found)]

    def one(self, split, i):
        seed = self.seed
        if split == "eval":
            seed, i = 0, self.eval_first + i  # every seed is measured on the same problems
        if self.file is None:
            found = problem(self.task, split, seed, index=i, tokens=self.tokens,
                            encode=self.encode)
        else:
            found = files.file_problem(self.file, split, seed, i)
        thinks = self.thinks or (self.control_tokens and ends_in_thought(found.text))
        return replace(found, thinks=thinks, rule=self.rule)


def show():
    """Print a problem of each task. A stand-in for a tokenizer: one token per word."""
    for name in TASKS:
        tokens = {"kv4": 110, "kv16": 440}.get(name, 100)
        one = problem(name, "train", 0, 0, tokens=tokens, encode=str.split)
        print(f"[{name}] {len(one.text.split())} words\n{one.text}\n-> {one.answer}\n")


if __name__ == "__main__":
    show()
