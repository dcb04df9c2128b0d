"""docs/exercises.md and docs/answers.md: every answer is right, typical mistakes are told apart."""
import importlib
import os
import re
import sys
import textwrap

import pytest
import torch

import kvcache
from data.tasks import problem
from experiments import check

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def sections(page):
    """The text below each "## 3. ..." of a page, by number."""
    with open(os.path.join(ROOT, "docs", page), encoding="utf-8") as f:
        parts = re.split(r"^## (\d)\. .*$", f.read(), flags=re.M)
    return {int(n): text for n, text in zip(parts[1::2], parts[2::2])}


def block(text):
    """The last block of Python of a section, in which everything is defined."""
    return re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)[-1]


TASKS, ANSWERS = sections("exercises.md"), sections("answers.md")
NUMBERS = list(check.EXERCISES)


@pytest.fixture
def says(tmp_path):
    """-> what the check of an exercise says of a file with this text; None: it is right"""
    def run(number, source):
        path = tmp_path / "mine.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return check.check(number, str(path))
    return run


@pytest.mark.parametrize("number", NUMBERS)
def test_the_answer_is_right(number, says):
    """And task, answer and check ask for the same."""
    assert says(number, block(ANSWERS[number])) is None
    heads = re.compile(r"^def .*:$", re.M)
    asked = heads.findall(block(TASKS[number]))
    assert asked == [h for h in heads.findall(block(ANSWERS[number])) if "call(" not in h]
    assert [re.match(r"def (\w+)", h)[1] for h in asked] == check.EXERCISES[number][1]
    assert f"\n    python -m experiments.check {number} mine.py\n" in TASKS[number]
    assert "*Hint:*" in TASKS[number]


# (number, what replaces what in the answer, what the sentence says)
MISTAKES = {
    "the largest norm stays": (1, ("-k.norm", "k.norm"), "should be kept in the order"),
    "not turned": (1, (".t()", ""), r"must be a tensor of shape \(2, 12\), got \(12, 2\)"),
    "right for 12 keys alone": (
        1, ("    return", "    if len(k) > 12:\n"
            "        return __import__('kvcache').snapkv(q, k, e, elsewhere)\n    return"),
        "it keeps what snapkv keeps"),
    "token 0 is as the others": (2, ("t == 0", "False"), r"sees\(t=0.*: expected \[0, 1, 2"),
    "no positions": (2, ("return kept", "return None"), "must hold positions, got None"),
    "no whole positions": (2, ("return kept", "return kept + 0.9"), r"must hold positions, got \["),
    "far too many": (2, ("range(P)", "range(100_000)"), r"got \[0, 1, 2.* \.\.\. .*99999\]"),
    "the variance adds up": (
        3, ("torch.expm1(L * torch.log1p(chi2))", "L * chi2"), "against the sum over all 9 resp"),
    "a float loses it": (
        3, ("torch.expm1(L * torch.log1p(chi2))", "(p ** 2 / q).sum() ** L - 1"),
        "within about 1e-08 of 1: expected"),
    "a little adds up": (
        3, ("    return", "    if chi2 < 1e-3:\n        return L * chi2\n    return"),
        "1000 tokens, .* within about 0.03 of 1"),
    "nothing by nothing": (
        3, ("log1p(chi2))", "log1p(chi2)) / chi2 * chi2"), "p equal to q: expected 0, got nan"),
    "no variance": (
        3, ("return torch", "torch"), r"variance\(p, q, L\) must be a number, got None"),
    "too large": (
        3, ("torch.expm1(L * torch.log1p(chi2))",
            "__import__('math').expm1(L * torch.log1p(chi2))"),
        "expected inf, got 'an OverflowError'"),
    "mean over the tokens": (4, ("mask.numel()", "mask.sum()"), r"reduce\(loss, mask\) with 0"),
    "NaN passes": (4, ("torch.where(mask, loss, 0.0)", "(loss * mask)"), "nan past the mask"),
    "inf passes": (
        4, ("torch.where(mask, loss, 0.0)", "(torch.where(loss.isnan(), 0.0, loss) * mask)"),
        "inf past the mask"),
    "two numbers": (
        4, ("return 1.0", "return torch.ones(2)"), r"must be a number, got \[1, 1\]"),
    "only a number": (
        4, (".sum() / mask", ".sum().detach() / mask"), "must stay a tensor that depends on loss"),
    "short over long": (
        4, ("long / short", "short / long"), r"short=10.*'sequence'\): expected 10, got 0.1"),
    "a constant": (4, ("return long / short", "return 10.0"), "short=(?!10,).*'sequence'"),
    "useless is of use": (5, ("-snapkv", "snapkv"), "still answers .. of 32"),
    "trusts all": (5, ("    g = ", "    return True\n    g = "), "True, expected False"),
    "asks twice": (5, ("range(10)", "range(1)"), "from its tenth call on"),
    "no seed": (5, ("torch.manual_seed(0)", "pass"), "False, expected True, of random of kvcache"),
    "never looks behind": (5, ("late[-1] = other_k[-1]", "pass"), "True, expected False.*see"),
    "keys may not be compared": (
        5, ("keys_alone[:, :-3]", "0 * keys_alone[:, :-3]"), "False, expected True, of rkv"),
    "the last query may see it": (5, ("q[-1] = 0", "pass"), "False, expected True"),
    "learned by heart": (
        6, ('return " ".join', 'return "coin 4768"\n    " ".join'), "exploit.* earns nothing"),
    "the answer is in it": (6, ("text.strip() == answer", "answer in text"), "all pairs"),
    "any digits": (
        6, ("text.strip() == answer", 're.fullmatch(r"\\s*[a-z]+ \\d+\\s*", text) '
            "and int(text.split()[-1]) == int(answer.split()[-1])"), "a zero in front"),
    "a full stop": (
        6, ("text.strip()", "text.strip().rstrip('.')"), "accepts a trick: a full stop"),
    "nothing around it": (6, ("text.strip()", "text"), "refuses the answer"),
    "the usual direction": (
        7, ("(shadow.exp() * (shadow - dense))", "(dense.exp() * (dense - shadow))"),
        r"reverse\(dense_logits, shadow_logits\) at \(0,\): expected"),
    "the teacher moves": (7, (".detach()", ""), "gradient to dense_logits"),
    "nobody moves": (
        7, ("shadow_logits.log_s", "shadow_logits.detach().log_s"), "has no gradient"),
    "too late": (7, (".log_softmax(-1)", ".softmax(-1).log()"), "NaN"),
    "responses live": (8, ("seen[P + int(until[u]):, P + u] = 0", "pass"), r"matrix\(kept.* at"),
    "a wrong list": (8, ("return seen", "return (1 - seen).tolist()"), "expected 1, got 0"),
    "no matrix": (8, ("return seen", "return [[1], [1, 1]]"), "must be a tensor of .* got list"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(mistake, says, monkeypatch):
    number, (right, wrong), sentence = MISTAKES[mistake]
    answer = block(ANSWERS[number])
    assert right in answer
    if number == 5 and right != "-snapkv":  # that useless is useless takes a second
        monkeypatch.setattr(check, "answered", lambda score: 0)
        monkeypatch.setattr(check, "replayed", lambda score: None)
    said = says(number, answer.replace(right, wrong))
    assert said and re.search(sentence, said), said
    assert "\n" not in said and len(said) < 400


@pytest.mark.parametrize("source, sentence", [
    ("def sees(t, kept, P)\n", r"mine.py, line 1: SyntaxError: expected ':'"),
    ("\n\nsees = 1 / 0\n", "mine.py, line 3: ZeroDivisionError: division by zero"),
    ("x = 1\ndef sees(t, kept, P):\n    if t:\n        return kep\n    return range(P)\n",
     "mine.py, line 4: NameError: name 'kep' is not defined"),
    ("\ndef sees(t):\n    return []\n", r"mine.py: TypeError: sees\(\) takes 1 pos"),
    ("import sys\nsys.modules.pop('mine')\n1 / 0\n", "mine.py, line 3: ZeroDivisionError"),
    ("import sys\nsys.exit('bye')\n", "mine.py, line 2: SystemExit: bye"),
    ("sees = 3\n", "mine.py has no function sees")])
def test_an_error_names_its_line(source, sentence, says):
    said = says(2, source)
    assert re.match(sentence, said) and "\n" not in said, said


@pytest.mark.parametrize("number, right, also", [
    (1, "return -k.norm(dim=-1).t()", "score = k.new_zeros(k.shape[1], len(k))\n"
     "    score -= k.norm(dim=-1).t()\n    return score"),
    (4, "return long / short", "from fractions import Fraction\n"
     "        return Fraction(long, short)"),
    (8, "return seen", "return seen.tolist()"), (8, "return seen", "return seen.bool().numpy()")])
def test_other_types_are_right_too(number, right, also, says):
    answer = block(ANSWERS[number])
    assert right in answer and says(number, answer.replace(right, also)) is None


def test_encodings(tmp_path):
    path = tmp_path / "mine.py"
    answer = block(ANSWERS[2])
    latin = f"name = '\u00e9'\n{answer}".encode("latin-1")
    for source in (b"\xef\xbb\xbf" + answer.encode(), b"# coding: latin-1\n" + latin):
        path.write_bytes(source)
        assert check.check(2, str(path)) is None
    path.write_bytes(latin)  # and does not say so
    said = check.check(2, str(path))
    assert said.startswith("mine.py") and "SyntaxError" in said and "\n" not in said


def test_a_file_beside_it(tmp_path, says, monkeypatch):
    search = sys.path[:]
    (tmp_path / "beside_mine.py").write_text(block(ANSWERS[2]))
    importlib.invalidate_caches()  # the folder was read a moment ago
    monkeypatch.setitem(sys.modules, "beside_mine", None)
    monkeypatch.delitem(sys.modules, "beside_mine")  # and once more when the test ends
    assert says(2, "from beside_mine import sees\n") is None
    assert sys.path == search and "mine" not in sys.modules


def test_a_gap_is_told(says, monkeypatch):
    for error in (1e-5, 1e-3):  # the first is rounding
        monkeypatch.setattr(check, "replay", lambda net, rollout, policies: {
            "shadow": rollout.logp_roll + error})
        said = says(1, block(ANSWERS[1]))
        assert error < 1e-4 and said is None or "learner differ by up to 0.001, not" in said


def test_command_line(tmp_path, capsys):
    path = tmp_path / "mine.py"
    answer = block(ANSWERS[2])
    path.write_text(answer)
    assert check.main(["2", str(path)]) == 0
    assert capsys.readouterr().out == "right\n"
    path.write_text(answer.replace("t == 0", "t == 1"))
    assert check.main(["2", str(path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("wrong: sees(t=0, ") and said.count("\n") == 1
    for argv in (["9", str(path)], ["2"], ["two", str(path)], ["2", str(tmp_path / "no.py")]):
        with pytest.raises(SystemExit, match="^error: [^\n]+$"):
            check.main(argv)


def test_the_tricks_are_tricks():
    p = problem("kv", "train", seed=0, index=0, tokens=200, encode=str.split)
    tricks = list(check.tricks(p, "1234"))
    assert len(dict(tricks)) == len(tricks) == 30
    assert all(check.in_form(text.strip(), p.answer) < 1 for text, _ in tricks)
    assert "refuses your trick and 30 others" in TASKS[6].replace("\n", " ")
    assert check.in_form(p.answer, p.answer) == 1
    honest = [is_honest for _, is_honest, _ in check.scorers()]
    assert honest.count(True) == honest.count(False) == 8


def test_what_the_answers_say_of_the_embedded_checkpoint(monkeypatch):
    """23 of 32 with SnapKV, 4 at random, 1 by norm; another processor may round some away."""
    right = {name: check.answered(kvcache.EVICT[name]) for name in ("snapkv", "random")}
    assert 20 <= right["snapkv"] <= 26 and 2 <= right["random"] <= 7
    assert check.answered(check.key_length) <= 2
    chosen = []

    def spy(q, k, e, elsewhere=None):
        chosen.append(k.norm(dim=-1))
        return check.key_length(q, k, e)

    net, tok, encode = check.embedded()
    ids = encode(problem("kv", "eval", seed=0, index=0, tokens=192, encode=encode).text)
    # no vmap: values can be read
    monkeypatch.setitem(kvcache.EVICT, "spy", kvcache.Method(spy, by_head=True))
    check.generate(net, [ids], group=1, max_new_tokens=1,
                   eviction=kvcache.Eviction("spy", budget=48, window=16, sinks=2))
    norm = chosen[0][2:-16, 0]                                   # first layer and head
    least = norm.argsort()[:48 - 16 - 2] + 2
    assert [tok.decode([ids[j]]) for j in least] == [" code"] * 18 + [" for"] * 12
    same = torch.tensor(ids[2:-16]) == ids[least[0]]
    assert norm[same].std() < 1e-5 < norm.std()  # the norm is the token's


def test_inputs_depend_on_the_text(says, monkeypatch):
    seen = []
    monkeypatch.setitem(check.EXERCISES, 2, (lambda seeds, sees: seen.append(seeds), ["sees"]))
    for text in ("sees = print\n", "sees = print  # once more\n"):
        assert says(2, text) is None
    assert seen[0][0] == seen[1][0] == 0 and seen[0][1] != seen[1][1]
