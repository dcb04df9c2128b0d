"""data/tasks.py: rewards on adversarial strings, lengths, determinism, splits, files; data/tiny."""
import json
import math
import os
import re

import numpy as np
import pytest

from conftest import ROOT, TINY
from data import files, pretrain, tasks
from data.answers import in_form, last_number, numbers, only_number
from data.files import file_problem, read_problems, split_file
from data.tasks import TASKS, Problem, Problems, problem, prompt_encoder, reward
from data.tokenizer import Tokenizer
from kvcache import Eviction
from model import Transformer
from rollout import generate

words = re.compile(r"\w+|[^\w\s]").findall  # a stand-in tokenizer: words and punctuation marks


def made(task, split, seed, index, tokens):
    return problem(task, split, seed, index, tokens=tokens, encode=words)


def least(task):
    """Tokens, as `made` counts them, that are enough for a prompt of a task."""
    return {"kv4": 140, "kv16": 500, "list": 80}.get(task, 60)


@pytest.fixture(scope="module")
def tok():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def model():
    return Transformer.from_pretrained(TINY)


def score(task, gold, text):
    return reward(Problem(task, "", gold), text)


# rewards

@pytest.mark.parametrize("text, want", [
    *((text, 1) for text in ("4817", " 4817\n", "**4817**", "The code for apple is 4,817.",
                             "4817<|end|>", "4817.0", "4817 (4817)", "X7 is 4817", "$4817")),
    *((text, 0) for text in ("", "   \n", "<|end|>", "4817 or 9999", "9999 or 4817", "1234/4817",
                             "48170", "-4817", "4 817", "481", "4817.5", "X4817", "٤٨١٧",
                             "4817e1 9", "4817 and also 1000 1001 1002"))])
def test_one_number_and_no_other(text, want):
    assert score("needle", "4817", text) == want


@pytest.mark.parametrize("text, want", [
    ("coin 4768 lamp 1203", 1), (" coin 4768 lamp 1203\n", 1), ("coin 4768 lamp 1204", 0.5),
    ("coin 1203 lamp 4768", 0), ("coin 0000 lamp 1203", 0.5), ("coin 4768 lamp 0000", 0.5),
    # any other form
    ("lamp 1203 coin 4768", 0), ("4768 1203", 0), ("coin 4768", 0), ("coin 4768 lamp", 0),
    ("coin 4768 lamp 120", 0), ("coin 4768 lamp 12030", 0), ("coin 4768, lamp 1203", 0),
    ("coin 4768  lamp 1203", 0), ("coin 4768\nlamp 1203", 0), ("Coin 4768 lamp 1203", 0),
    ("coin 4768 lamp 1203 coin 4768", 0), ("coin 4768 lamp 1203.", 0), ("coin ٤٧٦٨ lamp 1203", 0),
    ("coin 4768 lamp 1203 or 1204", 0), ("", 0)])
def test_codes_are_graded_in_their_form_alone(text, want):
    assert score("kv4", "coin 4768 lamp 1203", text) == want


GOLD = "The code for coin is 4768. The code for lamp is 1203."


@pytest.mark.parametrize("text, want", [
    # any wording, any order, and what a chat model dresses a list with
    (GOLD, 1), ("coin 4768 lamp 1203", 1), ("Lamp: 1203\nCOIN: 4768", 1),
    ("Here are the codes:\n\n1. **coin** - `4768`\n2. **lamp** - `1203`", 1),
    ("The 2 words coin and lamp have codes: coin's code is (4768), the lamp's 1203!", 1),
    ("coin = 47680, no, 4768. lamp = 1203", 1), ('{"coin": 4768, "lamp": "1203"}', 1),
    # a part
    ("coin 4768", 0.5), ("coin 4768 lamp 1204", 0.5), ("coin 4768, lamp and box 1204", 0.5),
    ("coin, lamp: 1203", 0.5), ("coin 4768 lamp", 0.5), ("box 9999 coin 4768", 0.5),
    # codes without words, words without codes, swapped, in front of their words
    ("4768 1203", 0), ("coin lamp", 0), ("coin, lamp: 4768, 1203", 0), ("coin 1203 lamp 4768", 0),
    ("4768 coin, 1203 lamp", 0), ("", 0),
    # one code for all words, also if it is one of theirs
    ("coin 4768 lamp 4768", 0), ("coin lamp 4768", 0), ("coin 1203 lamp 1203", 0),
    # a second guess, in whatever place, and a word that is said again
    ("coin 1000 4768", 0), ("coin 1000 or 4768, lamp 1203", 1 / 3), ("coin 1000, coin 4768", 0),
    ("coin 4768 1000 1001 1002 lamp 1203", 2 / 5), ("coin 4768 lamp 1203 coin 4769", 2 / 3),
    ("coin 4768 lamp 1203 " * 3, 2 / 6),
    # everything listed
    (GOLD + " ".join(f"{thing} {i}" for i, thing in enumerate(tasks.THINGS, 5000)), 2 / 124),
    (" ".join(f"{thing} {i}" for i, thing in enumerate(tasks.THINGS, 5000)) + GOLD, 0),
    # what only looks like a code or a word
    ("coin 47681203 lamp 1203", 0.5), ("coin 4,768", 0), ("coin 4768.5", 0), ("coin X4768", 0),
    ("coin 4768x", 0), ("coin ٤٧٦٨", 0), ("coin 476 8", 0), ("coins 4768", 0), ("coincoin 4768", 0),
    ("co in 4768", 0)])
def test_what_a_list_earns(text, want):
    assert score("list", GOLD, text) == pytest.approx(want)


def test_nothing_graded_can_be_the_first_token(tok):
    """No key was evicted when the first token was predicted. So no token with a digit may begin a
    response that earns something, where the gold answer follows without as many of its first
    characters as you like. The old form, the number alone, is the control: its first token may be
    three of the four digits."""
    def graded(texts, rule, gold):
        rest = [gold[at:] for at in range(20)]  # the first code ends before
        return {text for text in texts for end in rest if rule(text.strip() + end, gold)}

    begins = {text for i in range(len(tok)) if re.search(r"\d", text := tok.decode([i]))}
    for task, (_, rule) in TASKS.items():
        if task.startswith("kv"):
            gold = made(task, "eval", 0, 0, tokens=700).answer
            assert graded(begins, rule, gold) == set() and rule(gold, gold) == 1.0
    assert "481" in begins and graded(["481"], only_number, "4817") == {"481"}


@pytest.mark.parametrize("task, asked", [("kv", 1), ("kv4", 4), ("kv16", 16)])
def test_at_most_a_quarter_is_asked_for(tok, task, asked):
    encode = prompt_encoder(tok)
    with pytest.raises(ValueError, match=f"task {task} needs at least"):
        problem(task, "train", 0, 0, tokens=9 * 4 * asked, encode=encode)
    p = problem(task, "train", 0, 0, tokens=9 * 4 * asked + 50, encode=encode)
    facts, question = p.text.split("\n")
    found = dict(re.findall(r"The code for (.+?) is (\d{4})\.", facts))
    keys = question.removeprefix("Repeat each word with its code: ").rstrip(".").split(", ")
    assert len(keys) == asked and len(found) >= 4 * asked
    assert p.answer == " ".join(f"{key} {found[key]}" for key in keys)
    assert len(tok.encode(" " + p.answer)) == 4 * asked  # answers of 4, 16, 64 tokens
    # the default windows cover the question
    assert len(tok.encode(f"\n{question}\nAnswer:")) <= {1: 16, 4: 20, 16: 44}[asked]


@pytest.mark.parametrize("text, want", [
    ("1,234,567.5", [1234567.5]), ("1,23", [1, 23]), ("5-3", [5, 3]), ("5 - 3", [5, 3]),
    ("x = -3", [-3]), ("$-7", [-7]), ("(-7)", [-7]), ("X7 = X12", []), ("18km", [18]), ("no", []),
    ("1.2.3", [math.nan]), ("-.5", [-0.5]), ("$.50", [0.5]), ("is .25.", [0.25]), ("v.5", [5]),
    ("(a).5", [5]), ("1..5", [1, 5]), (r"\$9{,}500.25", [9500.25]), (r"3.5\,km", [3.5]),
    ("9\u2009500\u2009000", [9500000]), ("1{,}23", [1, 23]), ("\u20107", [-7]), ("\uff0d7", [-7]),
    ("5 \u2013 7", [5, 7]), ("\u20147", [7]), ("3+5", [3, 5]),
    # exponents
    ("-1e+2", [-100]), (r"-2.5\cdot10^{-2}", [-0.025]), ("3 · 10⁻²", [0.03]), ("3*10**4", [30000]),
    ("-2^10", [-1024]), ("10**-3", [0.001]), ("x^{-2}", []), ("x² + 1", [math.nan]),
    ("2^3-5", [8, 5]), ("1’000", [1000]), ("2 x 10 = 20", [2, 10, 20]), ("7e", [7]), ("a5e3", []),
    ("4e3km", [4000])])
def test_numbers(text, want):
    """Values in a text; what a rule makes of them: tests/test_answers.py."""
    got = [float(n) for n, _, _ in numbers(text)]
    assert got == pytest.approx(want, rel=0, abs=0, nan_ok=True)


def test_a_file_is_judged_by_what_its_answer_is():
    """By the last number if it is one, of any size; else word for word."""
    huge = "9" * 100_000
    for gold, right, wrong in (
            ("9{,}500", "It is 9,500", "9 500"), ("-1,234", "It is -1234", "It is 1234"),
            ("50%", r"50\%", "0.5"), ("1e-05", "0.00001", "1e-06"), ("5", "$5", "1e999999999"),
            (huge, f"It is {huge}.", huge + "0"), ("12 km", "12 KM.", "It is 12 km"),
            ("1/2", "1/2", "0.5"), ("Paris", "“Paris”", "It is Paris"), ("B", "(b).", "A or B")):
        assert score("file", gold, gold) == score("file", gold, right) == 1
        assert score("file", gold, wrong) == score("file", gold, "") == 0


# thoughts

@pytest.mark.parametrize("text, want", [
    ("4817", 1), ("<think>9999</think>4817", 1), ("<think>a</think>\n\n<think>b</think> 4817", 1),
    ("<think></think>4817", 1), ("x</think>4817", 1), ("<think>4817", 0),
    ("<think>4817</think>", 0), ("<think>4817</think>9999", 0), ("4817<think>", 0),
    ("4817<think>9999</think>", 0), ("<think>a</think>4817<think>b", 0)])
def test_a_thought_is_not_the_answer(text, want):
    for task in ("needle", "kv", "file"):
        assert score(task, "4817", text) == want
        thinks = Problem(task, "", "4817", thinks=True)
        assert reward(thinks, text) == want * ("</think>" in text)


def test_stop_tokens_are_left_out_by_id(tmp_path):
    """What looks like a token is text, and a stop token is none, however it is spelt."""
    for stop in ("</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>"):
        pretrain.write_json(str(tmp_path))
        for name in os.listdir(tmp_path):
            text = (tmp_path / name).read_text(encoding="utf-8").replace(pretrain.STOP, stop)
            (tmp_path / name).write_text(text, encoding="utf-8")
        tok = Tokenizer(str(tmp_path))
        ids = [*tok.encode("Paris"), *tok.stop_ids]
        assert score("file", "Paris", tok.decode(ids, special=False)) == 1.0
        assert score("file", "Paris", tok.decode(ids)) == 0.0
        spelt = tok.encode(f"Paris{stop}")
        assert score("file", "Paris", tok.decode(spelt, special=False)) == 0.0
    assert score("file", "<|x|>", "<|x|>") == 1.0 and score("file", "a", "a<|x|>") == 0.0


def test_a_task_of_your_own(monkeypatch):
    """What its rule may return, and what it draws."""
    monkeypatch.setitem(TASKS, "mine", (tasks.kv, lambda text, gold: np.float32(text)))
    assert score("mine", "1", "0.25") == 0.25 and type(score("mine", "1", "1")) is float
    assert score("mine", "1", "") == 0.0  # which asks no rule
    with pytest.raises(ValueError, match="must be a finite number, got nan"):
        score("mine", "1", "nan")

    def number(rng):
        facts, supply, question, answer = tasks.needle(rng)
        return facts, supply, question, int(answer)

    monkeypatch.setitem(TASKS, "mine", (number, only_number))
    with pytest.raises(ValueError, match="task mine draws the answer [0-9]+, must be text"):
        made("mine", "train", 0, 0, tokens=60)


# tasks whose rule reads numbers; one that is added may take any text
PARSED = [task for task, (_, rule) in TASKS.items()
          if rule in (in_form, last_number, only_number, tasks.listed)]


# what no rule reads, what is more than one number, what holds no code of four digits
@pytest.mark.parametrize("golds, tasks_of", [
    (["", "garbage"], PARSED), (["4817 or 9999"], ["needle", "own", "hop", "sum"]),
    (["coin", "coin 481", "coin ٤٨١٧"], ["kv", "kv4", "kv16"])])
def test_unparseable_gold_earns_nothing(golds, tasks_of):
    for task in tasks_of:
        for gold in golds:
            assert not any(score(task, gold, text)
                           for text in (gold, "4817", "9999", "coin 4817", ""))


# problems

@pytest.mark.parametrize("task", TASKS)
def test_length_is_at_most_tokens_and_close(task):
    def encode(text):
        return words("user: " + text)

    for more in (30, 240, 940):
        tokens = least(task) + more
        problems = [problem(task, "train", 1, i, tokens=tokens, encode=encode) for i in range(12)]
        lengths = [len(encode(p.text)) for p in problems]
        assert max(lengths) <= tokens
        assert min(lengths) > tokens - 20 and sum(lengths) / len(lengths) > tokens - 11


def test_too_few_tokens_is_an_error_and_kv_stops_where_its_keys_do():
    with pytest.raises(ValueError, match=r"task kv needs at least \d+ .*, got prompt_tokens=10"):
        made("kv", "train", 0, 0, tokens=10)
    text = made("kv", "train", 0, 0, tokens=40000).text
    assert len(set(re.findall(r"for ([^.]+) is \d{4}\.", text))) == text.count(". ") + 1 > 1400


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_is_a_function_of_its_name(task):
    name = dict(task=task, split="train", seed=3, index=17, tokens=least(task) + 100)
    assert made(**name) == made(**name)
    for other in (dict(split="eval"), dict(seed=4), dict(index=18)):
        assert made(**name | other).text != made(**name).text


def test_this_text_on_every_machine():
    p = made("kv", "train", 0, 0, tokens=40)
    assert p.text == ("The code for shoe is 1979. The code for engine is 5510. The code for orange "
                      "is 8496. The code for barrel is 6861.\nRepeat each word with its code: "
                      "barrel.")
    assert p.answer == "barrel 6861"


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_prompt(task):
    def texts(split, seed):
        return {made(task, split, seed, i, tokens=least(task)).text for i in range(150)}

    train, held_out = texts("train", 0), texts("eval", 0)
    assert len(train) == len(held_out) == 150 and not train & held_out
    assert not held_out & texts("train", 1)
    assert train == texts("train", 0)  # control: the comparison can find what is shared


def test_one_of_each_is_shown(capsys):
    tasks.show()
    out = capsys.readouterr().out
    assert re.findall(r"^\[(\w+)\]", out, re.M) == list(TASKS)
    assert len(re.findall(r"^-> (\w+ \d{4} ?){16}$", out, re.M)) == 1


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown task 'nedle': one of needle, kv"):
        made("nedle", "train", 0, 0, tokens=100)
    with pytest.raises(ValueError, match="split"):
        made("kv", "test", 0, 0, tokens=100)


SOLVED = ("needle", "kv", "kv4", "kv16", "list", "own", "hop", "sum")


def solve(task, text):
    """The answer read off the text, knowing nothing of how it was made."""
    body, question = text.rsplit("\n", 1)
    sentences = [s.rstrip(".").split() for s in body.split(". ")]
    q = question.split("?")[0].split()
    if task.startswith("kv") or task == "list":
        codes = dict(re.findall(r"The code for ([^.]+) is (\d+)", body))
        form = "The code for {} is {}." if task == "list" else "{} {}"
        return " ".join(form.format(key, codes[key])
                        for key in question[:-1].split(": ")[1].split(", "))
    if task == "needle":
        key = q[q.index("for") + 1:]
        found = [s[-1] for s in sentences
                 if s[-1].isdigit() and s[s.index("for") + 1:s.index("is")] == key]
    elif task == "own":
        thing = next(s[-1] for s in sentences if s[0] == q[-2] and s[1] == "owns")
        found = [s[-1] for s in sentences if s[:2] == ["The", "code"] and s[4] == thing]
    elif task == "hop":
        value, links = q[-1], {s[0]: s[2] for s in sentences if len(s) == 3 and s[1] == "="}
        while value in links:
            value = links[value]
        found = [value]
    else:
        prices = {s[1]: int(s[3]) for s in sentences if s[2] == "costs"}
        found = [str(prices[q[5]] + prices[q[8]])]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("task", TASKS)
def test_gold_answers_follow_from_the_text(task):
    if task not in SOLVED:
        pytest.skip("`solve` cannot read it")

    def plus_one(number):
        return str(int(number[0]) + 1)

    asked = dict(kv4=4, kv16=16, list=6).get(task, 1)
    for i in range(60):
        p = made(task, "eval", 5, i, tokens=700)
        assert solve(task, p.text) == p.answer
        assert reward(p, p.answer) == 1.0
        assert p.text.count("\n") == 1
        assert p.text.endswith("Answer with the number only.") == (
            not task.startswith("kv") and task != "list")
        assert reward(p, re.sub(r"\d+", plus_one, p.answer)) == 0.0
        assert reward(p, re.sub(r"\d+", plus_one, p.answer, count=1)) == (asked - 1) / asked


def test_a_worked_example(tok, monkeypatch):
    """The same in front of every problem of list; no problem knows its words."""
    shown = Problems("list", tok, seed=0, tokens=900, n_eval=4)
    p = tasks.example("list")
    assert reward(p, p.worked) == 1 and solve("list", p.text) == p.worked
    head = f"{p.text}\nAnswer: {p.worked}\n\n"
    for split in ("train", "eval"):
        (p,), (ids,) = shown.get(split, [3])
        assert tok.decode(ids) == f"{head}{p.text}\nAnswer:" and 880 < len(ids) <= 900
        own, asked = (set(re.findall(r"for (\w+) is", text)) for text in (head, p.text))
        assert len(own) == 6 and len(asked) > 60 and not own & asked
        monkeypatch.setitem(tasks.EXAMPLES, "list", tasks.list_)  # control
        assert set(re.findall(r"for (\w+) is", tasks.example("list").text)) & asked
    none = Problems("kv4", tok, seed=0, tokens=256, n_eval=4)
    (p,), (ids,) = none.get("eval", [3])
    assert tok.decode(ids) == f"{p.text}\nAnswer:"


def test_facts_stand_anywhere():
    texts = [made("needle", "train", 0, i, tokens=300).text for i in range(200)]
    depth = [text.index("special") / len(text) for text in texts]
    assert min(depth) < 0.05 and max(depth) > 0.85 and 0.4 < sum(depth) / 200 < 0.55


# files

def write_lines(path, rows):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_reading_a_file(tmp_path):
    rows = [{"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}, "",
            {"prompt": "Capital?", "answer": "Paris"}, {"prompt": "How much?", "answer": 1234}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    problems = read_problems(path)
    assert problems == (Problem("file", "2 + 3?", "5"), Problem("file", "Capital?", "Paris"),
                        Problem("file", "How much?", "1234"))
    assert reward(problems[0], "3 and 2 make 5.") == 1.0
    assert reward(problems[0], "5 is not 6") == 0.0
    assert reward(problems[1], "paris") == 1.0
    assert reward(problems[2], "$1,234.00") == 1.0


def test_json_numbers_stay_what_is_written(tmp_path):
    lines = ["0.00001", "1e-05", "1E300", "-0.10", "1" * 5000, "9007199254740993", "7"]
    path = write_lines(tmp_path / "a.jsonl", [
        f'{{"prompt": "{i}", "answer": {n}}}' for i, n in enumerate(lines)])
    answers = [p.answer for p in read_problems(path)]
    assert answers == ["0.00001", "0.00001", "1E+300", *lines[3:]]
    assert score("file", answers[5], "9007199254740993") == 1.0
    assert score("file", answers[5], "9007199254740992") == 0.0  # the nearest float


@pytest.mark.parametrize("line, says", [
    ("{", "is not JSON: Expecting property name enclosed in double quotes, column 2$"),
    ("[1]", "needs a non-empty .*: must be an object$"), ("[" * 100_000, "is not JSON"),
    ('{"prompt": "x", "gold": 5}', 'and "answer", text or a number; it has \'prompt\', \'gold\'$'),
    ("{}", "needs .*; it has nothing$"), ('{"prompt": 5, "answer": 1}', "needs"),
    ('{"prompt": "", "answer": "1"}', "needs"), ('{"prompt": "x", "answer": "#### "}', "needs"),
    *((f'{{"prompt": "y", "answer": {answer}}}', "needs") for answer in
      ("true", "null", "[1]", "{}", '""', '" "')),
    *((f'{{"prompt": "y", "answer": {answer}}}', "is not JSON") for answer in
      ("NaN", "-Infinity", "1e9999999999999999999")),
    ('{"prompt": "y", "answer": 1, "deep": [{"x": -1e400}]}', r"1E\+400 is out of range$"),
    ('{"prompt": "x", "answer": 1, "deep": {"a": 1, "a": 1}}', "key 'a' is there twice$"),
    ('{"prompt": "x", "question": "y", "answer": 1}', 'has both "prompt" and "question": which'),
    ('{"prompt": null, "question": null, "answer": 1}', "needs a non-empty"),
    *((f'{{"prompt": "y", "answer": "{answer}"}}', "no text can match") for answer in
      ("...", "( )", "<think>5", "5</think>", "1e99999999999999999999")),
    (r'{"prompt": "\ud83d", "answer": "1"}', "surrogate"),
    ('{"prompt": "x", "answer": "2"}', "the same as line 1, with the answer '2' instead of '1'"),
    ('{"prompt": " x ", "answer": "2"}', "asks the same as line 1")])
def test_a_bad_line_is_named(tmp_path, line, says):
    path = write_lines(tmp_path / "b.jsonl", [{"prompt": "x", "answer": "1"}, line])
    with pytest.raises(ValueError, match=r"b\.jsonl:2 .*" + says):
        read_problems(path)


def test_files_that_are_none(tmp_path, monkeypatch):
    """Not there, a folder, a pipe, a device, other encodings, too large. A byte-order mark, blank
    lines and Windows' ends are harmless."""
    with pytest.raises(FileNotFoundError, match="nedle: no such file"):
        read_problems("nedle")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_problems(str(path))
    file = tmp_path / "c.jsonl"
    rows = '{"prompt": "a", "answer": "1"}\r\n\r\n{"prompt": "b", "answer": "2"}'
    file.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert [p.text for p in read_problems(str(file))] == ["a", "b"]
    for content, says in ((rows.encode("utf-16"), "c.jsonl:1 is not text in UTF-8: .*, byte 1$"),
                          (b"\xef\xbb\xbf\r\n", "holds no problem"), (b"", "holds no problem")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=says):
            read_problems(str(file))
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    file.write_text('{"prompt": "a", "answer": "1"}\n' + "x" * 1001)
    with pytest.raises(ValueError, match="c.jsonl:2 has more than 1,000 bytes"):
        read_problems(str(file))
    with open(file, "wb") as f:
        f.truncate(2 ** 31)  # takes no room on disk
    with pytest.raises(ValueError, match="c.jsonl has 2,147,483,648 bytes"):
        read_problems(str(file))


def test_no_problem_is_in_both_splits(tmp_path):
    """Repeated lines, with other white space, are one problem; without them the split is the
    same."""
    once = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(45)]
    again = [dict(row, prompt=" " + row["prompt"].replace(" ", "  "), answer=row["answer"] + ".0")
             for row in once]
    notes, clean = [], []
    twice = read_problems(write_lines(tmp_path / "a.jsonl", once + again + once[:3]), notes)
    assert twice == read_problems(write_lines(tmp_path / "b.jsonl", once), clean)
    assert notes == [f"{tmp_path}/a.jsonl: 48 of 93 problems are repeats and are left out"]
    assert clean == []
    splits = split_file(twice)
    train, held_out = ({p.text for p in splits[name]} for name in ("train", "eval"))
    assert len(held_out) == 5 and len(train) == 40 and not held_out & train
    assert split_file(twice[::-1])["eval"] == splits["eval"]  # wherever they stand
    # control: by a hash of what is not asked, too
    lines = [Problem("file", f"{row['prompt']} {i}", "") for i, row in enumerate(once + again)]
    lines = split_file(lines)
    train, held_out = ({p.text.split()[1] for p in lines[x]} for x in ("train", "eval"))
    assert train & held_out


def test_prompts_that_are_too_long(tmp_path, tok):
    rows = [{"prompt": "word " * (200 if i in (3, 10, 57) else 5) + str(i), "answer": str(i)}
            for i in range(60)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    make = dict(tok=tok, seed=0, n_eval=99)
    with pytest.raises(ValueError, match="3 of 60 prompts are longer than prompt_tokens=50, the "
                                         "longest has [0-9]+ .*--skip_long=True"):
        Problems(path, tokens=50, **make)
    some = Problems(path, tokens=50, skip_long=True, **make)
    every = Problems(path, tokens=999, **make)
    note, split = some.notes
    sizes = sorted(len(some.encode(row["prompt"])) for row in rows)  # the first 57 fit
    some_lengths, longest = (sizes[28], sizes[56]), sizes[-1]
    assert sizes[30] == sizes[28]
    assert "3 of 60 prompts are longer" in note and "left out" in note
    there = {split: {p.answer for p in every.file[split]} for split in every.file}
    left = {split: {p.answer for p in some.file[split]} for split in some.file}
    assert len(there["eval"]) == every.n_eval == 6 and len(left["eval"]) == some.n_eval
    assert split == (f"{path}: {len(left['train'])} problems to train on, {some.n_eval} held out "
                     "(one in 10, by a hash), 99 wanted; median prompt {} tokens, longest "
                     "{}".format(*some_lengths))
    assert every.notes == [f"{path}: 54 problems to train on, 6 held out (one in 10, by a hash), "
                           f"99 wanted; median prompt {some_lengths[0]} tokens, longest {longest}"]
    assert every.longest == longest > 200 and some.longest == some_lengths[1] < 50
    for split in there:
        assert there[split] - left[split] == there[split] & {"3", "10", "57"}  # none changed sides
    with pytest.raises(ValueError, match="too few are left, raise prompt_tokens"):
        Problems(path, tokens=3, skip_long=True, **make)
    words = [dict(row, answer="word" if i % 2 else row["answer"]) for i, row in enumerate(rows)]
    words = Problems(write_lines(tmp_path / "b.jsonl", words), tokens=999, **make)
    assert words.notes[1:] == [f"{tmp_path}/b.jsonl: 30 answers are no numbers: a response "
                               "must give them word for word"]


def test_a_prompt_that_the_template_refuses_is_named(tmp_path, tok):
    rows = [{"prompt": f"word {i}", "answer": str(i)} for i in range(20)]
    problems = Problems(write_lines(tmp_path / "a.jsonl", rows), tok=tok, seed=0, tokens=99,
                        n_eval=9)
    encode, (first, second) = problems.encode, [p.text for p in problems.file["eval"]]

    def refuse(text):
        if text == second:
            raise ValueError("not this one")
        return encode(text) if text != first else []

    problems.encode = refuse
    with pytest.raises(ValueError, match="^eval problem 1 of .*a.jsonl: not this one"):
        problems.get("eval", [1])
    with pytest.raises(ValueError, match="^eval problem 0 of .*a.jsonl: the prompt has no tokens"):
        problems.get("eval", [0])
    assert len(problems.get("train", [0])[1]) == 1


def with_template(folder, template):
    """The embedded checkpoint's tokenizer with a chat template and the tokens of a thought."""
    pretrain.write_json(str(folder))
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    first = spec["added_tokens"][0]
    spec["added_tokens"] += [first | dict(id=first["id"] + 1 + i, content=text)
                             for i, text in enumerate(("<think>", "</think>"))]
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(str(folder))


def test_a_prompt_that_opens_a_thought(tmp_path):
    """Then a response is a thought until it closes it; a template's argument may turn this off."""
    tok = with_template(tmp_path, (
        "Think in <think> and </think>. {{ messages[0].content }}\n<think>"
        "{% if thinking is defined and not thinking %}</think>{% endif %}"))
    make = dict(tok=tok, seed=0, tokens=99, n_eval=2)
    (on,), (prompt,) = Problems("kv", **make).get("eval", [0])
    key, _ = on.answer.split()
    assert on.thinks and tok.decode(prompt).endswith(f"with its code: {key}.\n<think>")
    think, stop = tok.added["<think>"], tok.added["</think>"]
    thought = tok.decode([*tok.encode(on.answer)], special=False)
    answer = tok.decode([*tok.encode("9999"), stop, *tok.encode(on.answer)], special=False)
    assert (reward(on, thought), reward(on, answer)) == (0.0, 1.0)
    (off,), (prompt,) = Problems("kv", template={"thinking": False}, **make).get("eval", [0])
    assert not off.thinks and prompt[-2:] == [think, stop]
    assert (reward(off, thought), reward(off, answer)) == (1.0, 1.0)
    with pytest.raises(ValueError, match="takes no argument 'thinkin'"):
        Problems("kv", template={"thinkin": False}, **make)
    with pytest.raises(ValueError, match="template must be a JSON object, got "):
        Problems("kv", template=[1], **make)


def test_what_the_tokenizer_noticed_is_passed_on(tmp_path):
    tok = with_template(tmp_path, "{{ messages[-1].content }}<think>")
    assert tok.added["<think>"] in tok.stop_ids
    note, = Problems("kv", tok, seed=0, tokens=99, n_eval=2).notes
    assert "ends turns with '<think>'" in note


def test_held_out_lines_of_a_file():
    problems = split_file(tuple(Problem("file", str(i), str(i)) for i in range(95)))
    held_out = {file_problem(problems, "eval", 0, i).text for i in range(10)}
    lap = [file_problem(problems, "train", 0, i).text for i in range(85)]
    # the same on every machine: the smallest hashes
    first = ["64", "41", "76", "94", "86", "93", "62", "7", "48", "92"]
    assert [p.text for p in problems["eval"]] == first
    assert len(held_out) == 10 and len(set(lap)) == 85 and not held_out & set(lap)
    assert lap != [file_problem(problems, "train", 1, i).text for i in range(85)]
    second = [file_problem(problems, "train", 0, 85 + i).text for i in range(85)]
    assert set(second) == set(lap) and second != lap
    assert file_problem(problems, "eval", 0, 10) == file_problem(problems, "eval", 0, 0)
    with pytest.raises(ValueError, match="too few"):
        split_file([Problem("file", str(i), str(i)) for i in range(9)])


def test_gsm8k():
    path = os.path.join(ROOT, "..", "shared", "data", "gsm8k", "test.jsonl")
    if not os.path.exists(path):
        pytest.skip("no GSM8K file")
    problems = read_problems(path)
    solutions = [json.loads(line)["answer"] for line in open(path, encoding="utf-8")]
    assert len(problems) == 1319 and problems[0].answer == "18"
    assert all(reward(p, s) == 1.0 for p, s in zip(problems, solutions))
    wrong = sum(reward(p, s) for p, s in zip(problems, solutions[1:]))
    assert wrong < 0.05 * len(problems)


# the embedded checkpoint, made by data/pretrain.py

@pytest.fixture(scope="module")
def answers(model, tok):
    """-> answers(n, group, temperature): responses of the embedded checkpoint to the first n
    held-out default problems, [(problem, [texts])]. kept: of the eviction, else all keys are."""
    encode = prompt_encoder(tok)

    def sampled(n, group=1, temperature=0.0, evict="none", **kept):
        problems = [problem("kv4", "eval", 0, i, tokens=256, encode=encode) for i in range(n)]
        r = generate(model, [encode(p.text) for p in problems], group, max_new_tokens=17,
                     temperature=temperature, eviction=Eviction(evict, **kept),
                     stop_ids=tok.stop_ids)
        return [(p, [tok.decode(ids[:n], special=False) for ids, n in zip(tokens, lengths)])
                for p, tokens, lengths in zip(problems, r.tokens.tolist(), r.lengths.tolist())]

    return sampled


SNAPKV = dict(evict="snapkv", budget=56, window=20, sinks=2)


def test_checkpoint_is_small_and_its_tokenizer_is_reproducible(model, tok, tmp_path):
    assert sum(e.stat().st_size for e in os.scandir(TINY)) < 8e6
    assert model.config.vocab_size == len(tok) and not tok.has_chat
    pretrain.write_json(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == open(os.path.join(TINY, name), "rb").read()


def test_a_new_task_changes_no_checkpoint(monkeypatch):
    """The vocabulary is that of a file. Control: another word in the file."""
    before = pretrain.build_tokenizer()
    monkeypatch.setitem(TASKS, "new", (lambda rng: (["Zebras yodel."], iter([]), "Who?", "I"),
                                       str.__eq__))
    monkeypatch.setattr("data.tasks.NAMES", ["Zacharias", "Yolanda"])
    assert pretrain.build_tokenizer() == before
    words = pretrain.words()
    monkeypatch.setattr(pretrain, "words", lambda: [*words, " yodel"])
    assert pretrain.build_tokenizer() != before


def pretrained(folder, monkeypatch, **how):
    """Two steps of data/pretrain.py, as short as they can be."""
    monkeypatch.setattr("torch.use_deterministic_algorithms", bool)  # not for the other tests
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(pretrain, "max_steps", 2)
    monkeypatch.setattr(pretrain, "copy_rows", 2)
    pretrain.main(str(folder), **how)


def test_where_pretraining_ends(model, tmp_path, monkeypatch, capsys):
    """Where answers earn enough; if they never do, it writes nothing."""
    with pytest.raises(ValueError, match="after 2 steps sampled answers to kv4 do not earn 0.1"):
        pretrained(tmp_path / "none", monkeypatch)
    assert not (tmp_path / "none").exists()
    pretrained(tmp_path / "some", monkeypatch, stop=1)  # control: a snapshot of step 1
    assert Transformer.from_pretrained(str(tmp_path / "some")).config == model.config
    at = iter([0.05, 0.1])
    monkeypatch.setattr(pretrain, "evaluate", lambda *args, **how: (next(at), 0.0))
    monkeypatch.setattr(pretrain, "training", lambda *args: ((i, i > 9) for i in range(100)))
    pretrained(tmp_path / "tiny", monkeypatch)
    assert capsys.readouterr().out.endswith(f"step 15: saved to {tmp_path / 'tiny'}\n")


def test_checkpoint_tokenizer(tok):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    problems = [made(t, "eval", 0, i, tokens=least(t) + 90) for t in TASKS for i in range(20)]
    texts = [p.text + "\nAnswer:" for p in problems]
    texts += [f"{n}" for n in range(1000)] + [f"{n:03d}" for n in range(100)]
    texts += ["The Then apple Apple apples 12345678", "Thé  ü\n\n x'll"]
    for text in texts:
        assert tok.encode(text) == theirs.encode(text) and tok.decode(tok.encode(text)) == text
    assert [tok.decode([i]) for i in tok.encode(" coin 4817")] == [" coin", " ", "481", "7"]
    assert len(tok.encode(" apple is")) == 2
    assert theirs.eos_token_id == tok.stop_ids[0] == len(tok) - 1


def accuracy(pairs):
    rewards = [reward(p, text) for p, texts in pairs for text in texts]
    return sum(rewards) / len(rewards)


def test_checkpoint_has_something_to_learn(answers):
    """It earns something from the full cache and next to nothing from the compressed one. The
    question alone carries no code: its rows were computed while all keys were there, and might
    have kept what they saw, but sinks and these rows alone earn nothing before training."""
    def earned(n, group, **kept):
        return accuracy(answers(n, group, temperature=1.0, **kept))

    assert 0.1 <= earned(64, 2) <= 0.2                                            # was 0.160
    assert 0.002 <= earned(32, 4, **SNAPKV) <= 0.04                               # was 0.006
    assert earned(64, 2, evict="recent", budget=22, window=8, sinks=2) < 0.005    # was 0.000
    assert earned(64, 2, **dict(SNAPKV, budget=80)) > 0.02  # chosen keys do: 0.094


def test_what_the_checkpoint_knows(model, tok, answers):
    """It finds codes, and one at a time it answers. Of several it does not know the order: its
    third pair comes twice. With few keys it loses its way."""
    earned, form = pretrain.evaluate(model, tok, "kv", n=32, group=1, temperature=0.0)
    assert earned >= 0.9 and form == 1
    for p, (text,) in answers(3):
        want = p.answer.split()
        assert text.split() == [*want[:6], *want[4:6]]
    assert [texts for _, texts in answers(3)] == [
        [" scarf 4111 comb 3842 radio 1396 radio 1396"],
        [" barrel 7402 helmet 3529 pump 7694 pump 7694"],
        [" quilt 7451 diamond 2893 paint 6533 paint 6533"]]
    assert [texts for _, texts in answers(3, **SNAPKV)] == [
        [" scarf 641 331 5285 radio 139  engine 5285 comb"],
        [" barrel 7402 helmet 3529 pump 7694 pump 7694 doll"],
        [" quilt 7451 diamond 2893 paint  745 paint 6533"]]
