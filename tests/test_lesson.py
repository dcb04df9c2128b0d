"""docs/lesson.md: its cells run from top to bottom and print what stands there; its notebook.

What is compared: words, integers and the order of everything exactly; a number with a decimal point
within 1e-3 of its value plus one of its last digit. After training (part 11) within 0.25, or 25 %
of a number above 1: another processor's sums differ in late digits, and training spreads that.
"""
import json
import os
import re
import sys

import pytest

from experiments import notebook

NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?|-?\d+")
TRAINED = "## 11. "  # the heading from which on numbers are those of a trained model


def same(got, want, trained=False):
    """Do two printed texts agree?"""
    words = [NUMBER.sub("#", text).split() for text in (got, want)]
    if words[0] != words[1]:
        return False
    return all(close(a, b, trained) for a, b in zip(NUMBER.findall(got), NUMBER.findall(want)))


def close(a, b, trained):
    """Do two numbers, as printed, agree?"""
    if "." not in a or "." not in b:
        return a == b
    error = abs(float(a) - float(b))
    if trained:
        return error <= 0.25 * max(1, abs(float(b)))
    last = 10.0 ** -len(b.split(".")[1])
    return error <= 1e-3 * abs(float(b)) + 1.01 * last


# what the cells print, one after the other, in a process that works beside the other tests
BESIDE = """
import json, signal
from experiments import notebook
before = signal.getsignal(signal.SIGINT)
with open(notebook.LESSON, encoding="utf-8") as f:
    cells = notebook.parse(f.read())
printed = [*notebook.run(source for kind, source, _ in cells if kind == "code")]
assert signal.getsignal(signal.SIGINT) == before  # Ctrl-C still stops a prompt
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def lesson(beside):
    """The cells of the text, and what its code prints here, in the order of the code cells."""
    with open(notebook.LESSON, encoding="utf-8") as f:
        cells = notebook.parse(f.read())
    return cells, json.loads(beside.splitlines()[-1])


def test_every_cell_prints_what_stands_below_it(lesson):
    """And every fence of Python is a cell: another kind would be text that nobody runs."""
    cells, printed = lesson
    printed, trained, compared = iter(printed), False, 0
    for kind, source, want in cells:
        if kind == "markdown":
            trained = trained or TRAINED in source
            assert not re.search(r"^\s*(?:```|~~~)\s*py", source, re.M)
            continue
        got = next(printed)
        assert same(got, want, trained), f"{source}\nprints\n{got}\nnot\n{want}"
        compared += bool(want)
    assert trained and compared > 15


def test_a_changed_number_or_word_would_be_found(lesson):
    """Control: every block, changed in one place, is another."""
    cells, _ = lesson
    for _, _, want in cells:
        for word in re.findall(r"[A-Za-z]+", want):
            assert not same(want.replace(word, word + "s", 1), want, trained=True)
        for match in NUMBER.finditer(want):
            if "." in match[0]:
                x = float(match[0])
                other = f"{x + 0.3 * abs(x) + 0.3:.3f}"
            else:
                other = str(int(match[0]) + 1)
            changed = want[:match.start()] + other + want[match.end():]
            assert not same(changed, want, trained=True), (match[0], want)


def test_what_is_the_same():
    assert same("a 2.350 (4, 2)\n", "a  2.351 (4, 2)\n")
    assert not same("a 2.350 (4, 2)", "a 2.356 (4, 2)")
    assert not same("7359", "7358") and not same("7359 True", "7359 False")
    assert same("0.08 2.4", "0.30 2.9", trained=True)
    assert not same("0.08 2.4", "0.30 3.4", trained=True)
    assert not same("0.08", "0.34", trained=True) and not same("1 2", "1", trained=True)


def test_cells_can_be_pasted_into_a_prompt():
    assert notebook.run(["for i in (1, 2):\n    print(i)\n\nprint(3)\n"]) == ["1\n2\n3\n"]
    for cells, error in ((["for i in (1, 2):\n    print(i)\nprint(3)\n"], SyntaxError),
                         (["x = (1,\n"], SyntaxError), (["x = 1\n", "y\n"], NameError)):
        with pytest.raises(error):  # the first: the line after a block needs an empty line
            notebook.run(cells)


def test_update_rewrites_the_blocks_and_nothing_else():
    text = "# a\n\n```python\nx = 1\n```\n\nb\n\n```python\nprint(x)\n```\n```\n2\n```\nc\n"
    cells = notebook.parse(text)
    assert [cell[0] for cell in cells] == ["markdown", "code"] * 2 + ["markdown"]
    assert cells[3] == ["code", "print(x)\n", "2\n"]
    assert notebook.updated(text, ["", "2\n"]) == text
    printed = notebook.run(source for kind, source, _ in cells if kind == "code")
    assert notebook.updated(text, printed) == text.replace("2", "1")
    assert notebook.updated(text, ["", ""]) == text.replace("```\n2\n```\n", "")


def test_the_notebook_holds_the_lesson(tmp_path, capsys):
    path = str(tmp_path / "lesson.ipynb")
    notebook.main([f"--out={path}"])
    with open(notebook.LESSON, encoding="utf-8") as f:
        cells = notebook.parse(f.read())
    with open(path, encoding="utf-8") as f:
        text = f.read()
    with open(notebook.LESSON.replace(".md", ".ipynb"), encoding="utf-8") as f:
        assert f.read() == text, "python -m experiments.notebook makes docs/lesson.ipynb anew"
    made = json.loads(text)
    assert (made["nbformat"], made["metadata"]["kernelspec"]["name"]) == (4, "python3")
    first, *rest = made["cells"]
    assert first["source"] == notebook.FIRST
    for cell, (kind, source, printed) in zip(rest, cells, strict=True):
        out = "".join(out["text"] for out in cell.get("outputs", []))
        assert (cell["cell_type"], cell["source"], out) == (kind, source.rstrip("\n"), printed)
        assert set(cell) - {"cell_type", "metadata", "source"} == (
            {"execution_count", "outputs"} if kind == "code" else set())
    count = sum(kind == "code" for kind, _, _ in cells)
    assert capsys.readouterr().out.startswith(f"written to {path}: {count} cells ")
    with pytest.raises(SystemExit, match="out must end in .ipynb, got 'docs/lesson.md'"):
        notebook.main(["--out=docs/lesson.md"])  # no text is overwritten


def test_the_first_cell_finds_the_root_or_fetches_it(tmp_path, monkeypatch):
    ran = []

    def run(command, check):
        """Not run; git makes what it would fetch."""
        ran.append(command)
        if command[0] == "git":
            os.makedirs(os.path.join(command[-1], "data", "tiny"))

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="or say above where one is"):
        exec(notebook.FIRST, {})
    hostile = "https://example.org/smd.git; rm -rf '/'"
    first = notebook.FIRST.replace("clone = ''", f"clone = {hostile!r}")
    root = tmp_path / "repository"
    for _ in range(2):  # the second time it is there
        exec(first, {})
        assert os.getcwd() == str(root) == sys.path[0]
    (root / "docs").mkdir()
    monkeypatch.chdir(root / "docs")
    exec(first, {})
    assert os.getcwd() == str(root)
    fetched, *installed = ran
    assert fetched == ["git", "clone", "--depth=1", hostile, "repository"]
    assert [command[1:] for command in installed] == [
        ["-m", "pip", "install", "-q", "-r", "requirements.txt"]] * 3
