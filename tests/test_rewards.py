"""data/rewards.py: rules by name and functions of one's own, in what they return, raise and log; a
run that such a function ends goes on after it is mended."""
import importlib.util
import json
import os
import re
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import (
    TINY,
    read_checkpoint,
    read_log,
    share_of_digits,
    train_here,
    write_problems,
)
from data.answers import RULES
from data.files import read_problems
from data.rewards import LARGEST, Own, RewardError, earns, named_numbers, place
from data.tasks import Problem, Problems, judge, problem, reward
from data.tokenizer import Tokenizer
from experiments import logs
from support.jsonfile import shown


def refused(says):
    return pytest.raises(ValueError, match=says)


def ends(says):
    return pytest.raises(SystemExit, match=says)


# rules by name

def test_rules_by_name():
    """Each tells what it pays from what another one does."""
    def pays(rule, gold, text):
        return reward(Problem("file", "?", gold, rule=rule), text)

    for rule, gold, right, wrong in (
            ("exact", "12", "12.", "It is 12"), ("number", "12", "It is 12 km", "12 or 13"),
            ("boxed", "12", r"So \boxed{12}, not 13.", "12"), ("choice", "B", "(B)", "(C)"),
            ("contains", "Paris", "I think it is Paris.", "It is Rome")):
        assert (pays(rule, gold, right), pays(rule, gold, wrong)) == (1, 0), rule
        assert pays(rule, gold, f"<think>{right}") == 0  # a thought is no answer
    assert pays("auto", "12", "It is 12 km") == 1 == pays("auto", "km", "km")
    assert pays("auto", "km", "It is km") == 0
    # a generated task's own rule, unless another one is named
    made = problem("needle", "eval", seed=0, index=0, tokens=60, encode=str.split)
    assert reward(made, f"{made.answer}, {made.answer}") == 1
    exact = Problem(made.task, made.text, made.answer, rule="exact")
    assert reward(exact, f"{made.answer}, {made.answer}") == 0 and reward(exact, made.answer) == 1


def test_answers_that_a_rule_cannot_pay_are_refused(tmp_path):
    path = str(tmp_path / "a.jsonl")
    with open(path, "w") as f:
        f.write('{"prompt": "a", "answer": "12"}\n{"prompt": "b", "answer": "Rome"}\n')
    assert len(read_problems(path)) == 2 == len(read_problems(path, rule="exact"))
    with refused("a.jsonl:2 has the answer 'Rome', which no text can match "
                 "by reward=number"):
        read_problems(path, rule="number")
    for rule in set(RULES) - {"math"}:
        gold = "B" if rule == "choice" else "12"
        assert earns(rule, gold, gold), rule
        assert not earns(rule, gold, "C" if rule == "choice" else "13"), rule
    make = dict(task="kv4", tok=Tokenizer(TINY), seed=0, tokens=200, n_eval=2)
    Problems(**make, rule="exact")
    with refused("task kv4 has answers like '.*', which no text can match "
                 "by reward=number"):
        Problems(**make, rule="number")


def test_math_by_a_package(tmp_path, monkeypatch):
    """Where it is not there, one line at the start names it."""
    path = str(tmp_path / "a.jsonl")
    with open(path, "w") as f:
        f.write('{"prompt": "a", "answer": "1/2"}\n{"prompt": "b", "answer": "\\\\text{Rome}"}\n')
    assert len(read_problems(path, rule="math")) == 2
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *at: (
        None if name == "math_verify" else find(name, *at)))
    with ends("^error: reward=math needs the package math-verify: "
              "pip install math-verify$"):
        train_here("--reward=math", f"--task={path}", f"--out_dir={tmp_path}/out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    pytest.importorskip("math_verify")
    assert earns("math", "1/2", "0.5") and not earns("math", "1/2", "0.51")


# functions of one's own

def test_numbers_that_a_function_returns():
    for x, want in ((1, 1.0), (-0.5, -0.5), (np.float32(0.5), 0.5), (np.True_, 1.0),
                    (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (np.array(2), 2.0)):
        assert named_numbers(x) == {"reward": want} and type(named_numbers(x)["reward"]) is float
    assert named_numbers(dict(reward=1, right=False)) == {"reward": 1.0, "right": 0.0}
    for x, say in (
            (None, "must be a finite number, got None"), (torch.ones(1), "got tensor"),
            (np.array(1j), "got 1j"), ("1", "got '1'"), ([1], r"got \[1\]"),
            (float("nan"), "got nan"), (1.1e15, "got 1100000000000000"),
            (dict(right=1), "must hold the name 'reward', got .'right'"),
            ({"reward": 1, "a b": 1}, "identifiers, got 'a b'"), ({"reward": 1, 2: 1}, "got 2"),
            (dict(reward=1, right="x"), "number 'right': must be a finite number, got 'x'"),
            (dict(reward=float("inf")), "number 'reward': must be a finite number, got inf")):
        with refused(say):
            named_numbers(x)


@pytest.mark.parametrize("source, name, say", [
    ("", "mine:score", "mine.py does not define 'score'"),
    ("score = 5", "mine:score", "'score', got 5"),
    ("def score(text): pass", "mine:score", r"score\(text\) must take \(row, text, tokens\)"),
    ("x = (1,\n", "mine:score", "cannot import mine .*SyntaxError.*, line 1"),
    ("x = 1\nx = 1 / 0", "mine:score", r"ZeroDivisionError: division by zero \(.*mine.py:2\)"),
    ("exit(3)", "mine:score", "SystemExit: 3"),
    ("", "nobodys:score", "cannot import nobodys .*PYTHONPATH.*No module named 'nobodys'"),
    ("", "mine:", "unknown reward 'mine:': one of auto, exact"), ("", "boxd", "unknown reward"),
    ("", "mine.py:score", "unknown reward 'mine.py:score': .*; did you mean mine:score[?]$"),
    ("", "mine.score", "did you mean mine:score[?]$"),
    ("", "mine", "did you mean mine:FUNCTION[?]$"),
    ("", "other.score", "or module:function$")])
def test_functions_that_are_none(source, name, say, mine, tmp_path):
    """Refused in one line before out_dir is there."""
    mine(source)
    with ends(say) as e:
        train_here(f"--reward={name}", f"--out_dir={tmp_path}/out")
    assert "\n" not in str(e.value) and str(e.value).startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_name_that_another_module_has(mine):
    """The project's own would be taken in its place."""
    source = "def score(row, text, tokens): return 1"
    for name in ("grpo", "sys"):
        with open(f"{name}.py", "w") as f:
            f.write(source)
        with refused(f"{name} is .*, which hides .*here/{name}.py: choose"):
            Own(f"{name}:score")
    mine(source)
    Own("mine:score")


def test_what_a_function_is_given(mine):
    """A copy of the row, so that it cannot change the problem; what it returns has one set of
    names."""
    mine("def score(row, text, tokens):\n"
         "    row['seen'] = len(row.pop('list'))\n"
         "    tokens.append(0)\n"
         "    found = {'reward': row['seen'], text: 1}\n"
         "    return found\n")
    own = Own("mine:score")
    row, tokens = dict(list=[1, 2]), [5, 6]
    assert own(row, "a", tokens) == {"reward": 2.0, "a": 1.0} == own(row, "a", tokens)
    assert row == dict(list=[1, 2]) and tokens == [5, 6]
    with refused("has the names b, reward, before it had a, reward"):
        own(row, "b", tokens)


def test_where_it_was_raised(mine):
    """The last line of one's own, not that of a library."""
    path = mine("import json\n\ndef score(row, text, tokens):\n    return json.loads(text)\n")
    with pytest.raises(ValueError) as e:
        Own("mine:score")({}, "{", [])
    assert place(e.value) == f"{path}:4"


# runs

SCORE = ("def score(row, text, tokens):\n"
         "    assert isinstance(tokens, list) and all(type(t) is int for t in tokens)\n"
         "    digits = sum(map(str.isdigit, text)) / max(1, len(text))\n"
         "    known = row['answer'] in row['prompt']\n"
         "    return dict(reward=digits, tokens=len(tokens), known=known)\n")


def test_what_is_logged(mine, tmp_path, monkeypatch):
    """The rewards of a function are those of a rule that pays the same, bitwise; its other numbers
    are means over responses, in rows of steps and of evaluations."""
    mine(SCORE)
    train_here("--reward=mine:score", "--steps=2", f"--out_dir={tmp_path}/own")
    evals, steps = read_log(f"{tmp_path}/own")
    small = logs.compact([*evals[:1], *steps])
    assert {"eval_compressed_tokens", "eval_dense_known"} < small[0].keys()
    assert [row["reward_known"] for row in small[1:]] == [0, 0]
    assert "texts" not in small[0]
    for row in steps:
        assert row.pop("reward_tokens") == pytest.approx(row["length"], rel=1e-6)
        assert row.pop("reward_known") == 0
    for row in evals:
        assert row.pop("eval_compressed_tokens") == pytest.approx(row["eval_length"])
        assert row.pop("eval_dense_tokens") == pytest.approx(row["eval_length_dense"])
        assert row.pop("eval_compressed_known") == 0 == row.pop("eval_dense_known")
    monkeypatch.setattr("data.tasks.reward", share_of_digits)
    train_here("--steps=2", f"--out_dir={tmp_path}/rule")
    assert (evals, steps) == read_log(f"{tmp_path}/rule")
    # nothing else of the log has a name that such a number could have
    others = ("reward_", "eval_compressed_", "eval_dense_")
    assert not [name for row in [*evals, *steps] for name in row
                if name.startswith(others)]
    mine(SCORE.replace("digits,", "digits / 2,"))  # control
    train_here("--reward=mine:score", "--steps=2", f"--out_dir={tmp_path}/half")
    assert read_log(f"{tmp_path}/half")[1][0]["reward"] == pytest.approx(steps[0]["reward"] / 2)


def test_a_dry_run_does_not_ask_it(mine, capsys, monkeypatch):
    """As it has no text to judge. With examples and held-out problems from files; nothing is
    written."""
    monkeypatch.setattr("gc.collect", lambda: 0)  # most of its time
    mine(SCORE.replace("row['prompt']", "text.split()[0]"))
    write_problems("some.jsonl", range(12))
    write_problems("others.jsonl", range(50, 62))
    ask = ["--task=some.jsonl", "--eval_task=others.jsonl",
           "--shots=1", "--reward=mine:score"]
    train_here(*ask, "--dry_run=True", "--out_dir=nowhere")
    printed = capsys.readouterr().out
    assert "reward by mine:score" in printed and "\nnothing was written\n" in printed
    assert sorted(os.listdir()) == ["mine.py", "others.jsonl", "some.jsonl"]
    mine(SCORE.replace("row['prompt']", "row['text']"))
    with ends("held-out problem 0 .*KeyError: 'text'"):  # control
        train_here(*ask, "--out_dir=somewhere")


def test_what_it_sets_in_torch_is_set_back(mine, tmp_path):
    """Whether it does so when it is imported or when it is called: the run is the same."""
    mine(SCORE)
    train_here("--reward=mine:score", "--steps=1", f"--out_dir={tmp_path}/plain")
    shared = (torch.is_grad_enabled, torch.get_default_dtype, torch.get_default_device)
    sets = ["torch.set_grad_enabled(False)", "torch.set_default_dtype(torch.float64)",
            "torch.set_default_device('meta')"]
    before = [now() for now in shared]
    source = SCORE.replace("    d", f"    {'; '.join(sets)}\n    d")
    mine("\n".join(["import torch", *sets, source]))
    train_here("--reward=mine:score", "--steps=1", f"--out_dir={tmp_path}/sets")
    assert [now() for now in shared] == before
    assert read_log(tmp_path / "sets") == read_log(tmp_path / "plain")
    exec("\n".join(sets))
    assert not any(now() == was for now, was in zip(shared, before))  # the control
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def test_large_rewards(mine, tmp_path):
    """The largest that counts does not overflow in any sum; its mean is what is logged."""
    mine(f"def score(row, text, tokens): return {LARGEST} * (-1) ** len(text)")
    train_here("--reward=mine:score", "--steps=1", f"--out_dir={tmp_path}/out")
    evals, (step,) = read_log(f"{tmp_path}/out")
    assert abs(step["reward"]) <= LARGEST and step["grad_norm"] < 100
    total = torch.tensor([LARGEST] * 1000).square().sum()
    assert total.isfinite() and not torch.tensor([1e30] * 2).square().sum().isfinite()


def test_the_stop_token_is_given(mine, tmp_path):
    """As an id; the text is without it. A file's whole row arrives, and its line is named."""
    with open(tmp_path / "p.jsonl", "w") as f:
        for i in range(20):
            f.write(json.dumps(dict(prompt=f"The code for apple is {i}.", level=i)) + "\n")
    stop, = Tokenizer(TINY).stop_ids
    mine("def score(row, text, tokens):\n"
         "    assert type(row['level']) is int and 'answer' not in row and '<|' not in text\n"
         f"    return dict(reward=len(row), stop=tokens[-1] == {stop}, "
         f"inside={stop} in tokens[:-1])\n")
    ask = ["--reward=mine:score", f"--task={tmp_path}/p.jsonl", "--steps=1"]
    train_here(*ask, "--max_new_tokens=12", f"--out_dir={tmp_path}/out")
    step, = read_log(f"{tmp_path}/out")[1]
    assert step["reward"] == 2 and step["reward_stop"] == pytest.approx(1 - step["truncated"])
    assert step["reward_inside"] == 0
    mine("def score(row, text, tokens): return 1 / (row['level'] != 10)")
    question = shown("The code for apple is 10.")
    with ends(rf"(held-out|training) problem . .*p.jsonl:11 \({question}, "):
        train_here(*ask, f"--out_dir={tmp_path}/o")


FAILING = ["--reward=mine:score", "--steps=3", "--save_every=9", "--eval_every=2"]
FAILS = ("N = 0\nOdd = type('Odd', (Exception,), dict(__str__=None))\n"
         "def score(row, text, tokens):\n    global N\n    N += 1\n    if N == {}:\n"
         "        {}\n    return sum(map(str.isdigit, text)) / max(1, len(text))\n")


# 8 responses in the evaluations before steps 0 and 2, 8 in a step
@pytest.mark.parametrize("n, bug, where, say", [
    (8 + 8 + 2, "row['level']", "training problem 2", r"raised KeyError: 'level' \(.*mine.py:7\); "
     "the row has prompt, answer"),
    (8 + 16 + 3, "raise SystemExit(2)", "held-out problem 2",
     r"raised SystemExit: 2 \(.*mine.py:7\)")])
def test_a_function_that_fails_loses_nothing(n, bug, where, say, mine, tmp_path,
                                             capsys):
    """What was learned before is saved; the run goes on at that very step and ends as one that
    never failed."""
    out, step = tmp_path / "out", 1 if "training" in where else 2
    path = mine(FAILS.format(n, bug))
    with pytest.raises(SystemExit, match=(
            rf"^error: the reward of {where} \('Repeat .*', response '.*'\) {say}; "
            rf".*ckpt.pt holds step {step}$")):
        train_here(*FAILING, f"--out_dir={out}")
    assert read_checkpoint(out)["step"] == step
    assert [len(rows) for rows in read_log(out)] == [1, step]
    mine(FAILS.format(0, "pass"))
    capsys.readouterr()
    train_here(*FAILING, "--resume=True", f"--out_dir={out}")
    said = (f"resumed at step {step}\nreward: {path} has changed since the checkpoint "
            f"of step {step}\n")
    assert capsys.readouterr().out.startswith(said)
    mine(FAILS.format(0, "pass"))
    whole = tmp_path / "whole"
    train_here(*FAILING, f"--out_dir={whole}")
    assert "is another" not in capsys.readouterr().out
    log = read_log(out)
    after = [row for rows in log for row in rows if "changed" in row]  # the next line says so too
    assert [(row["kind"], row["step"]) for row in after] == [
        ("step" if "training" in where else "eval", step)]
    assert after[0].pop("changed") == "reward"
    assert log == read_log(whole) and len(log[1]) == 3
    files = ("samples.txt", "model/model.safetensors")
    assert all((out / name).read_bytes() == (whole / name).read_bytes()
               for name in files)


def test_how_a_function_fails(mine, monkeypatch):
    def asked(bug):
        mine(FAILS.format(1, bug))
        judge([Problem("file", "?", "1", rule=Own("mine:score"))], [["a"]], "training", first=1,
              tokens=[[[1]]])

    with pytest.raises(KeyboardInterrupt):  # no run handles signals, as while a dry run lasts
        monkeypatch.setattr(signal, "getsignal", lambda n: signal.default_int_handler)
        asked("raise KeyboardInterrupt")
    monkeypatch.setattr(signal, "getsignal", lambda n: print)  # a run does
    for bug, say in (
            ("return None", "must be a finite number, got None"),
            ("raise KeyboardInterrupt", r"raised KeyboardInterrupt \(.*mine.py:7\)"),
            ("raise Odd", r"raised Odd: its message cannot be read \(.*mine.py:7\)"),
            (r"raise ValueError('a\x1b[2J\nb')", r"raised ValueError: a\\x1b\[2J b \(.*")):
        with pytest.raises(RewardError, match=rf"^the reward of training problem 1 .* {say}$"):
            asked(bug)


def test_a_function_that_fails_at_first_saves_nothing(mine, tmp_path, capsys):
    """So the same command may be said again."""
    mine("def score(row, text, tokens): return row['level']")
    with ends(r"held-out problem 0 .*KeyError.*; nothing was saved$"):
        train_here("--reward=mine:score", f"--out_dir={tmp_path}/out")
    out = tmp_path / "out"
    assert not (out / "ckpt.pt").exists() and (out / "config.json").exists()
    with ends("ckpt.pt does not exist.*; nothing was saved, so start "
              "again without --resume=True"):
        train_here("--reward=mine:score", "--resume=True", f"--out_dir={out}")
    # in the first step, behind an evaluation
    mine(FAILS.format(8 + 5, "return None") + "other = score\n")
    with ends(r"^error: the reward of training problem 1 .*, got None; .*ckpt.pt holds step 0$"):
        train_here(*FAILING, f"--out_dir={tmp_path}/first")
    with ends("reward was 'mine:score' .* now it is 'mine:other'"):  # its file may be another
        train_here(*FAILING, "--reward=mine:other", "--resume=True", f"--out_dir={tmp_path}/first")
    mine("def score(row, text, tokens): return dict(reward=0.25, right=0.5)")
    train_here("--reward=mine:score", "--steps=1", f"--out_dir={out}")
    assert len(read_log(out)[1]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"eval +0 \| .* compressed cache 0.250, dense cache 0.250, "
                     r"eval_compressed_right 0.500, eval_dense_right 0.500, accept ",
                     printed)
    with ends("holds another run"):  # control: now there is something
        train_here("--reward=mine:score", "--steps=1", f"--out_dir={out}")


# a function that is asked for a whole batch

BATCH = """
calls = []
def score(rows, texts, tokens):
    calls.append((len(rows), [row["answer"] for row in rows], texts, list(map(len, tokens))))
    return [{"reward": len(text), "right": float(text == row["answer"])}
            for row, text in zip(rows, texts)]
score.batch = True
def short(rows, texts, tokens):
    return [1.0]
short.batch = True
def broken(rows, texts, tokens):
    return 1 / 0
broken.batch = True
def holed(rows, texts, tokens):
    return [{"reward": 1, "side": float("nan") if text == hole else 0} for text in texts]
holed.batch = True
def bare(rows, texts, tokens):
    return [float("inf") if text == hole else 0 for text in texts]
bare.batch = True
hole = "abc"
"""


def test_a_reward_for_a_whole_batch(tmp_path, monkeypatch):
    """One call for all responses, in their order; what it returns is that of each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "at_once.py").write_text(BATCH)
    rule = Own("at_once:score")
    batch = [Problem("x", f"q{i}", str(i), row=dict(answer=str(i)), rule=rule)
             for i in range(2)]
    texts, tokens = [["0", "abc"], ["x", "1"]], [[[1], [1, 2]], [[3], [4, 5, 6]]]
    rewards, parts = judge(batch, texts, "training", first=7, tokens=tokens)
    assert rewards == [[1, 3], [1, 1]] and parts == dict(right=[1, 0, 0, 1])
    calls = sys.modules["at_once"].calls
    assert calls == [(4, ["0", "0", "1", "1"], ["0", "abc", "x", "1"], [1, 2, 1, 3])]
    for name, says in (("short", "training problems from 7 on: must be a list of one number .* for "
                                 "each of 4 responses, got 1 of them"),
                       ("broken", "from 7 on: raised ZeroDivisionError: .*at_once.py:"),
                       ("holed", "from 7 on: response 2 of 4, number 'side': must be a finite "
                                 "number, got nan$"),
                       ("bare", "response 2 of 4, number 'reward': must be .*, got inf$")):
        rule = Own(f"at_once:{name}")
        with pytest.raises(RewardError, match=says):
            judge([replace(p, rule=rule) for p in batch], texts, "training", first=7,
                  tokens=tokens)
    sys.modules["at_once"].hole = "nobody says it"  # control: the same function, no hole
    rule = Own("at_once:holed")
    rewards, parts = judge([replace(p, rule=rule) for p in batch], texts, "training", first=7,
                           tokens=tokens)
    assert rewards == [[1, 1], [1, 1]] and parts == dict(side=[0] * 4)
