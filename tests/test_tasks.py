"""data/tasks.py: rewards on adversarial strings, lengths, determinism, splits, files; data/tiny."""
import json
import os
import re

import pytest

from data.tasks import (
    TASKS,
    Problem,
    exact,
    file_problem,
    numbers,
    problem,
    prompt_encoder,
    read_problems,
    reward,
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, "data", "tiny")
words = re.compile(r"\w+|[^\w\s]").findall  # a stand-in tokenizer: words and punctuation marks


def made(task, split, seed, index, tokens):
    return problem(task, split, seed, index, tokens=tokens, encode=words)


def score(task, gold, text):
    return reward(Problem(task, "", gold), text)


# rewards

@pytest.mark.parametrize("text", [
    "4817", " 4817", "4817.\n", "**4817**", "The code for apple is 4,817.", "The code\nis\n\n4817",
    "4817<|end|>", "4817<|im_end|>\n", "4817.0", "4817 (4817)", "X7 is 4817", "$4817"])
def test_a_right_answer_earns_one(text):
    assert score("kv", "4817", text) == 1.0


@pytest.mark.parametrize("text", [
    "", "   \n", "<|end|>", "4817 or 9999", "9999 or 4817", "4817, 9999", "1234/4817", "48170",
    "14817", "-4817", "4 817", "481", "4817.5", "X4817", "a4817", "4817 and also 1000 1001 1002",
    "٤٨١٧", "4817e1 9", "four eight one seven"])
def test_a_hack_earns_nothing(text):
    assert score("kv", "4817", text) == 0.0


@pytest.mark.parametrize("text, want", [
    ("37 + 25 = 62", 1), ("First 37, then 25 more.\nTogether that makes 62 coins.", 1),
    ("62", 1), ("62 62", 1), ("$62.00", 1),
    ("61 or 62", 0), ("61, 62", 0), ("61/62", 0), ("61; 62", 0), ("41-62", 0), ("61 and 62", 0),
    ("either 61 or maybe 62", 0), ("5 or 6, so 61 or 62", 0), ("62 or 61", 0), ("62, no, 61", 0),
    ("-62", 0), ("= -62", 0), ("162", 0), ("62.5", 0), ("", 0)])
def test_last_number(text, want):
    assert score("sum", "62", text) == want


@pytest.mark.parametrize("text, want", [
    ("1,234", [1234]), ("1,234,567.5", [1234567.5]), ("1,23", [1, 23]), ("1,2345", [1, 2345]),
    ("5-3", [5, 3]), ("5 - 3", [5, 3]), ("x = -3", [-3]), ("-$7", [-7]), ("$-7", [-7]),
    ("(-7)", [-7]), ("−7", [-7]), ("3.14", [3.14]), ("end 7.", [7]), ("X7 = X12", []),
    ("18km", [18]), ("50%", [50]), ("1.2.3", [1.2]), ("no", [])])
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
    assert exact("the  Red\nhouse", "The red house.")
    assert not exact("", "") and not exact("...", "!")
    assert score("file", "-1,234", "It is -1234") == 1.0
    assert score("file", "-1,234", "It is 1234") == 0.0


# problems

@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [90, 300, 1000])
def test_length_is_at_most_tokens_and_close(task, tokens):
    def encode(text):
        return words("user: " + text)

    problems = [problem(task, "train", 1, i, tokens=tokens, encode=encode) for i in range(12)]
    lengths = [len(encode(p.text)) for p in problems]
    assert max(lengths) <= tokens
    assert min(lengths) > tokens - 20 and sum(lengths) / len(lengths) > tokens - 11


def test_too_few_tokens_is_an_error_and_kv_stops_where_its_keys_do():
    with pytest.raises(ValueError, match=r"task kv needs at least \d+ tokens, got tokens=10"):
        made("kv", "train", 0, 0, tokens=10)
    text = made("kv", "train", 0, 0, tokens=40000).text
    assert len(set(re.findall(r"for ([^.]+) is \d{4}\.", text))) == text.count(". ") + 1 > 1400


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_is_a_function_of_its_name(task):
    name = dict(task=task, split="train", seed=3, index=17, tokens=200)
    assert made(**name) == made(**name)
    for other in (dict(split="eval"), dict(seed=4), dict(index=18)):
        assert made(**name | other).text != made(**name).text


def test_this_text_on_every_machine():
    p = made("kv", "train", 0, 0, tokens=40)
    assert p.text == ("The code for barrel is 6861. The code for shoe is 8496. The code for orange "
                      "is 5510.\nWhat is the code for barrel? Answer with the number only.")
    assert p.answer == "6861"


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_prompt(task):
    def texts(split, seed):
        return {made(task, split, seed, i, tokens=60).text for i in range(150)}

    train, held_out = texts("train", 0), texts("eval", 0)
    assert len(train) == len(held_out) == 150 and not train & held_out
    assert not held_out & texts("train", 1)
    assert train == texts("train", 0)  # control: the comparison can find what is shared


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown task 'nedle': one of needle, kv"):
        made("nedle", "train", 0, 0, tokens=100)
    with pytest.raises(ValueError, match="split"):
        made("kv", "test", 0, 0, tokens=100)


def solve(task, text):
    """The answer read off the text, knowing nothing of how it was made."""
    body, question = text.rsplit("\n", 1)
    sentences = [s.rstrip(".").split() for s in body.split(". ")]
    q = question.split("?")[0].split()
    if task in ("needle", "kv"):
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
    for i in range(60):
        p = made(task, "eval", 5, i, tokens=150)
        assert solve(task, p.text) == p.answer
        assert reward(p, p.answer) == 1.0
        assert p.text.endswith("Answer with the number only.") and p.text.count("\n") == 1
        assert reward(p, str(int(p.answer) + 1)) == 0.0


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


@pytest.mark.parametrize("line", [
    "{", "[1]", '{"prompt": "x"}', '{"answer": "x"}', '{"prompt": "", "answer": "1"}',
    '{"prompt": "x", "answer": "#### "}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = write_lines(tmp_path / "b.jsonl", [{"prompt": "x", "answer": "1"}, line])
    with pytest.raises(ValueError, match=r"b\.jsonl:2 "):
        read_problems(path)


def test_held_out_lines_of_a_file():
    problems = tuple(Problem("file", str(i), str(i)) for i in range(95))
    held_out = {file_problem(problems, "eval", 0, i).text for i in range(10)}
    lap = [file_problem(problems, "train", 0, i).text for i in range(85)]
    assert held_out == {str(i) for i in range(0, 95, 10)}
    assert len(set(lap)) == 85 and not held_out & set(lap)
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


# the embedded checkpoint, made by data/pretrain.py

@pytest.fixture(scope="module")
def checkpoint():
    from data.tokenizer import Tokenizer
    from model import Transformer
    return Transformer.from_pretrained(MODEL), Tokenizer(MODEL)


def answers(checkpoint, n, **kw):
    """Responses of the embedded checkpoint to the first n held-out default problems
    -> [(problem, [texts])]"""
    from rollout import generate
    model, tok = checkpoint
    encode = prompt_encoder(tok)
    problems = [problem("kv", "eval", 0, i, tokens=192, encode=encode) for i in range(n)]
    ids = [encode(p.text) for p in problems]
    r = generate(model, ids, max_new_tokens=6, stop_ids=tok.stop_ids, **kw)
    pairs = []
    for p, tokens, lengths in zip(problems, r.tokens.tolist(), r.lengths.tolist()):
        pairs.append((p, [tok.decode(t[:length]) for t, length in zip(tokens, lengths)]))
    return pairs


def accuracy(pairs):
    rewards = [reward(p, text) for p, texts in pairs for text in texts]
    return sum(rewards) / len(rewards)


def test_checkpoint_is_small_and_its_tokenizer_is_reproducible(checkpoint, tmp_path):
    from data.pretrain import write_json
    model, tok = checkpoint
    assert sum(e.stat().st_size for e in os.scandir(MODEL)) < 8e6
    assert model.config.vocab_size == len(tok) and not tok.has_chat
    write_json(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == open(os.path.join(MODEL, name), "rb").read()


def test_checkpoint_tokenizer(checkpoint):
    transformers = pytest.importorskip("transformers")
    _, tok = checkpoint
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL)
    problems = [made(t, "eval", 0, i, tokens=150) for t in TASKS for i in range(20)]
    texts = [p.text + "\nAnswer:" for p in problems]
    texts += [f"{n}" for n in range(1000)] + [f"{n:03d}" for n in range(100)]
    texts += ["The Then apple Apple apples 12345678", "Thé  ü\n\n x'll"]
    for text in texts:
        assert tok.encode(text) == theirs.encode(text) and tok.decode(tok.encode(text)) == text
    assert [tok.decode([i]) for i in tok.encode(" 4817")] == [" ", "481", "7"]
    assert len(tok.encode(" apple is")) == 2
    assert theirs.eos_token_id == tok.stop_ids[0] == len(tok) - 1


def test_checkpoint_has_something_to_learn(checkpoint):
    """Greedy answers are mostly right with the dense cache, and RL under the compressed one has
    room above and ground below."""
    def measured(**kw):
        return accuracy(answers(checkpoint, 64, **kw))

    greedy, snapkv = dict(group=1, temperature=0.0), dict(evict="snapkv", sinks=2)
    assert 0.75 <= measured(evict="none", **greedy) <= 0.87                       # was 0.812
    assert 0.3 <= measured(budget=24, window=16, **snapkv, **greedy) <= 0.6       # was 0.453
    assert 0.25 <= measured(evict="none", group=4) <= 0.45                        # was 0.352
    # control: a window of 8 ends behind the key in the question, so the votes miss its code
    assert measured(budget=40, window=8, **snapkv, group=4) < 0.15                # was 0.066


def test_checkpoint_speaks(checkpoint):
    greedy = answers(checkpoint, 3, group=1, temperature=0.0, evict="none")
    assert [(p.answer, texts) for p, texts in greedy] == [
        ("9253", [" 9253<|end|>"]), ("4768", [" 4768<|end|>"]),
        ("1501", [" 3829<|end|>"])]  # the third is wrong
