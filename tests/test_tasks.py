"""tasks.py: rewards on adversarial strings, prompt lengths, determinism, disjoint splits, gold answers, files; data/tiny."""
import json
import os
import re
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data.tasks import TASKS, Problem, exact, file_problem, numbers, problem, prompt_encoder, read_problems, reward  # noqa: E402

MODEL = os.path.join(ROOT, "data", "tiny")
LETTERS = re.compile(r"\w+|[^\w\s]").findall  # a stand-in tokenizer: words and punctuation marks


def score(task, gold, text, **kw):
    return reward(Problem(task, "", gold), text, **kw)


# ---- rewards

@pytest.mark.parametrize("text", ["4817", " 4817", "4817.\n", "**4817**", "The code for apple is 4,817.", "The code\nis\n\n4817",
                                  "4817<|end|>", "4817<|im_end|>\n", "4817.0", "4817 (4817)", "X7 is 4817", "$4817"])
def test_a_right_answer_earns_one(text):
    assert score("kv", "4817", text) == 1.0


@pytest.mark.parametrize("text", ["", "   \n", "<|end|>", "4817 or 9999", "9999 or 4817", "4817, 9999", "1234/4817", "48170",
                                  "14817", "-4817", "4 817", "481", "4817.5", "X4817", "a4817", "4817 and also 1000 1001 1002",
                                  "٤٨١٧", "4817e1 9", "four eight one seven"])
def test_a_hack_earns_nothing(text):
    assert score("kv", "4817", text) == 0.0


@pytest.mark.parametrize("text, want", [
    ("37 + 25 = 62", 1), ("First 37, then 25 more.\nTogether that makes 62 coins.", 1), ("62", 1), ("62 62", 1), ("$62.00", 1),
    ("61 or 62", 0), ("61, 62", 0), ("61/62", 0), ("61; 62", 0), ("41-62", 0), ("61 and 62", 0),
    ("either 61 or maybe 62", 0), ("5 or 6, so 61 or 62", 0),
    ("62 or 61", 0), ("62, no, 61", 0), ("-62", 0), ("= -62", 0), ("162", 0), ("62.5", 0), ("", 0)])
def test_last_number(text, want):
    assert score("sum", "62", text) == want


@pytest.mark.parametrize("text, want", [
    ("1,234", [1234]), ("1,234,567.5", [1234567.5]), ("1,23", [1, 23]), ("1,2345", [1, 2345]), ("5-3", [5, 3]), ("5 - 3", [5, 3]),
    ("x = -3", [-3]), ("-$7", [-7]), ("$-7", [-7]), ("(-7)", [-7]), ("−7", [-7]), ("3.14", [3.14]), ("end 7.", [7]),
    ("X7 = X12", []), ("18km", [18]), ("50%", [50]), ("1.2.3", [1.2]), ("no", [])])
def test_numbers(text, want):
    assert [float(n) for n, _, _ in numbers(text)] == want


@pytest.mark.parametrize("gold", ["", "garbage", "?", "4817 or 9999", "4817 9999"])
def test_unparseable_gold_earns_nothing(gold):
    for task in TASKS:
        for text in (gold, "4817", "9999", ""):
            assert score(task, gold, text) == 0.0


def test_words_are_compared_exactly():
    for text in ("Paris", " paris. ", '"PARIS"', "paris\n"):
        assert score("file", "Paris", text) == 1.0
    for text in ("", "Paris or Rome", "in Paris", "Pari", "."):
        assert score("file", "Paris", text) == 0.0
    assert exact("the  Red\nhouse", "The red house.") and not exact("", "") and not exact("...", "!")
    assert score("file", "-1,234", "It is -1234") == 1.0 and score("file", "-1,234", "It is 1234") == 0.0


def test_format_bonus_is_small_and_only_on_request():
    assert score("kv", "4817", "The code is 4817", format_bonus=0.1) == 1.0
    assert score("kv", "4817", "4817", format_bonus=0.1) == 1.1
    assert score("kv", "4817", "9999", format_bonus=0.1) == pytest.approx(0.1)
    assert score("kv", "4817", "", format_bonus=0.1) == 0.0
    assert score("kv", "4817", "9999") == 0.0
    for bad in (0.2, -0.1):
        with pytest.raises(ValueError, match="format_bonus"):
            score("kv", "4817", "4817", format_bonus=bad)


# ---- problems

@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [90, 300, 1000])
def test_length_is_at_most_tokens_and_close(task, tokens):
    encode = lambda text: LETTERS("user: " + text)
    lengths = [len(encode(problem(task, "train", 1, i, tokens, encode).text)) for i in range(12)]
    assert max(lengths) <= tokens
    assert min(lengths) > tokens - 20 and sum(lengths) / len(lengths) > tokens - 11


def test_too_few_tokens_is_an_error_and_kv_stops_where_its_keys_do():
    with pytest.raises(ValueError, match=r"task kv needs at least \d+ tokens, got tokens=10"):
        problem("kv", "train", 0, 0, 10, LETTERS)
    text = problem("kv", "train", 0, 0, 40000, LETTERS).text
    assert len(set(re.findall(r"for ([^.]+) is \d{4}\.", text))) == text.count(". ") + 1 > 1400


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_is_a_function_of_its_name(task):
    args = (task, "train", 3, 17, 200, LETTERS)
    assert problem(*args) == problem(*args)
    for i, other in ((1, "eval"), (2, 4), (3, 18)):
        assert problem(*args[:i], other, *args[i + 1:]).text != problem(*args).text


def test_this_text_on_every_machine():
    p = problem("kv", "train", 0, 0, 40, LETTERS)
    assert p.text == ('The code for barrel is 6861. The code for shoe is 8496. The code for orange is 5510.'
                      '\nWhat is the code for barrel? Answer with the number only.')
    assert p.answer == '6861'



@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_prompt(task):
    texts = lambda split, seed: {problem(task, split, seed, i, 60, LETTERS).text for i in range(150)}
    train, held_out = texts("train", 0), texts("eval", 0)
    assert len(train) == len(held_out) == 150 and not train & held_out
    assert not held_out & texts("train", 1)
    assert train == texts("train", 0)  # control: the comparison can find what is shared


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown task 'nedle': one of needle, kv"):
        problem("nedle", "train", 0, 0, 100, LETTERS)
    with pytest.raises(ValueError, match="split"):
        problem("kv", "test", 0, 0, 100, LETTERS)


def solve(task, text):
    """The answer read off the text, knowing nothing of how it was made."""
    body, question = text.rsplit("\n", 1)
    sentences = [s.rstrip(".").split() for s in body.split(". ")]
    q = question.split("?")[0].split()
    if task in ("needle", "kv"):
        key = q[q.index("for") + 1:]
        found = [s[-1] for s in sentences if s[-1].isdigit() and s[s.index("for") + 1:s.index("is")] == key]
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
    for i in range(60):
        p = problem(task, "eval", 5, i, 150, LETTERS)
        assert solve(task, p.text) == p.answer
        assert reward(p, p.answer) == 1.0
        assert p.text.endswith("Answer with the number only.") and p.text.count("\n") == 1
        assert reward(p, str(int(p.answer) + 1)) == 0.0


def test_facts_stand_anywhere():
    depth = [p.text.index("special") / len(p.text) for p in (problem("needle", "train", 0, i, 300, LETTERS) for i in range(200))]
    assert min(depth) < 0.05 and max(depth) > 0.85 and 0.4 < sum(depth) / 200 < 0.55


# ---- files

def write_lines(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return str(path)


def test_reading_a_file(tmp_path):
    rows = [{"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}, "", {"prompt": "Capital?", "answer": "Paris"},
            {"prompt": "How much?", "answer": 1234}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    problems = read_problems(path)
    assert problems == (Problem("file", "2 + 3?", "5"), Problem("file", "Capital?", "Paris"),
                        Problem("file", "How much?", "1234"))
    assert reward(problems[0], "3 and 2 make 5.") == 1.0 and reward(problems[0], "5 is not 6") == 0.0
    assert reward(problems[1], "paris") == 1.0 and reward(problems[2], "$1,234.00") == 1.0


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": "x"}', '{"answer": "x"}', '{"prompt": "", "answer": "1"}',
                                  '{"prompt": "x", "answer": "#### "}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = write_lines(tmp_path / "b.jsonl", [{"prompt": "x", "answer": "1"}, line])
    with pytest.raises(ValueError, match=r"b\.jsonl:2 "):
        read_problems(path)


def test_held_out_lines_of_a_file():
    problems = tuple(Problem("file", str(i), str(i)) for i in range(95))
    held_out = {file_problem(problems, "eval", 0, i).text for i in range(10)}
    lap = [file_problem(problems, "train", 0, i).text for i in range(85)]
    assert held_out == {str(i) for i in range(0, 95, 10)} and len(set(lap)) == 85 and not held_out & set(lap)
    assert lap != [file_problem(problems, "train", 1, i).text for i in range(85)]
    second = [file_problem(problems, "train", 0, 85 + i).text for i in range(85)]
    assert set(second) == set(lap) and second != lap
    assert file_problem(problems, "eval", 0, 10) == file_problem(problems, "eval", 0, 0)
    with pytest.raises(ValueError, match="too few"):
        file_problem(problems[:5], "train", 0, 0)


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


# ---- the embedded checkpoint, made by data/pretrain.py

@pytest.fixture(scope="module")
def checkpoint():
    from model import Transformer
    from data.tokenizer import Tokenizer
    return Transformer.from_pretrained(MODEL), Tokenizer(MODEL)


def answers(checkpoint, n, **kw):
    """Responses of the embedded checkpoint to the first n held-out default problems -> [(problem, [texts])]"""
    from rollout import generate
    model, tok = checkpoint
    encode = prompt_encoder(tok)
    problems = [problem("kv", "eval", 0, i, 192, encode) for i in range(n)]
    r = generate(model, [encode(p.text) for p in problems], max_new_tokens=6, stop_ids=tok.stop_ids, **kw)
    texts = [[tok.decode(ids[:n]) for ids, n in zip(t.tolist(), m.tolist())] for t, m in zip(r.tokens, r.lengths)]
    return list(zip(problems, texts))


def accuracy(pairs):
    return sum(reward(p, text) for p, texts in pairs for text in texts) / sum(len(texts) for _, texts in pairs)


def test_checkpoint_is_small_and_its_tokenizer_is_reproducible(checkpoint, tmp_path):
    from data.pretrain import write_json
    model, tok = checkpoint
    assert sum(e.stat().st_size for e in os.scandir(MODEL)) < 8e6 and model.config.vocab_size == len(tok) and not tok.has_chat
    write_json(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == open(os.path.join(MODEL, name), "rb").read()


def test_checkpoint_tokenizer(checkpoint):
    transformers = pytest.importorskip("transformers")
    _, tok = checkpoint
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL)
    texts = [problem(t, "eval", 0, i, 150, LETTERS).text + "\nAnswer:" for t in TASKS for i in range(20)]
    texts += [f"{n}" for n in range(1000)] + [f"{n:03d}" for n in range(100)]
    texts += ["The Then apple Apple apples 12345678", "Thé  ü\n\n x'll"]
    for text in texts:
        assert tok.encode(text) == theirs.encode(text) and tok.decode(tok.encode(text)) == text
    assert [tok.decode([i]) for i in tok.encode(" 4817")] == [" ", "481", "7"] and len(tok.encode(" apple is")) == 2
    assert theirs.eos_token_id == tok.stop_ids[0] == len(tok) - 1


def test_checkpoint_has_something_to_learn(checkpoint):
    """Greedy answers are mostly right with the dense cache, and RL under the compressed one has room above and ground below."""
    greedy = dict(n=64, group=1, temperature=0.0)
    assert 0.75 <= accuracy(answers(checkpoint, evict="none", **greedy)) <= 0.87                                # measured 0.812
    assert 0.3 <= accuracy(answers(checkpoint, evict="snapkv", budget=24, window=16, sinks=2, **greedy)) <= 0.6  # measured 0.453
    assert 0.25 <= accuracy(answers(checkpoint, 64, group=4, evict="none")) <= 0.45                             # measured 0.352
    # control: a window of 8 ends behind the key in the question, so the votes miss its code; measured 0.066
    assert accuracy(answers(checkpoint, 64, group=4, evict="snapkv", budget=40, window=8, sinks=2)) < 0.15


def test_checkpoint_speaks(checkpoint):
    greedy = answers(checkpoint, 3, group=1, temperature=0.0, evict="none")
    assert [(p.answer, texts) for p, texts in greedy] == [
        ("9253", [" 9253<|end|>"]), ("4768", [" 4768<|end|>"]), ("1501", [" 3829<|end|>"])]  # the third is wrong
