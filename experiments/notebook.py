"""
The lesson (docs/lesson.md): its cells, run as if pasted into a Python prompt; the same as a
notebook.

    python -m experiments.notebook                     # writes docs/lesson.ipynb
    python -m experiments.notebook --update            # runs all cells, rewrites what they print

The idea. There is one source, the text. A ```python block is a cell, a block without a language
right after it is what the cell prints. The notebook is made from it, with what the cells print.
docs/lesson.ipynb is kept, and a test holds it against the text: after a change of the text, make it
anew.

Left out on purpose: figures that cells draw; a notebook that is edited and read back.
"""
import code
import contextlib
import io
import json
import os
import re

from support.configurator import Arguments
from support.run import write_text
from support.screen import one_line_errors, tell

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LESSON = os.path.join(ROOT, "docs", "lesson.md")
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```\n(.*?)^```\n)?", re.S | re.M)


def parse(text):
    """-> list of [kind, source, printed]: "markdown" or "code", in order; printed is "" where no
    block follows."""
    cells, at = [], 0
    for match in CELL.finditer(text):
        cells.append(["markdown", text[at:match.start()].strip(), ""])
        cells.append(["code", match[1], match[2] or ""])
        at = match.end()
    cells.append(["markdown", text[at:].strip(), ""])
    return [cell for cell in cells if cell[1]]


class Prompt(code.InteractiveConsole):
    """Python's prompt, whose errors are raised. As there, an empty line ends a block."""

    def showtraceback(self):
        raise

    def showsyntaxerror(self, *args, **kwargs):
        raise


def run(sources):
    """Paste cells, one after the other, into one prompt. -> what each prints. Raises what they
    raise, SyntaxError for what a prompt does not take."""
    prompt = Prompt({"__name__": "__main__"})
    printed = []
    for source in sources:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for line in [*source.splitlines(), ""]:  # return is pressed once more
                more = prompt.push(line)
        if more:
            raise SyntaxError(f"a cell is not complete: {source!r}")
        printed.append(out.getvalue())
    return printed


def updated(text, printed):
    """The text with other output blocks. printed: of each cell, in order."""
    printed = iter(printed)

    def block(match):
        out = next(printed)
        cell = f"```python\n{match[1]}```\n"
        return cell + f"```\n{out}```\n" if out else cell
    return CELL.sub(block, text)


# brings a notebook to the repository's root, on a fresh machine too
FIRST = """\
import os
import subprocess
import sys
# where to fetch the repository from, if this notebook lies in no copy of it
clone = ''
if not os.path.exists("data/tiny") and os.path.exists("../data/tiny"):
    os.chdir("..")  # from docs/ to the root of the repository
if not os.path.exists("data/tiny"):
    assert clone, "open this in a copy of the repository, or say above where one is"
    git = ["git", "clone", "--depth=1", clone, "repository"]
    subprocess.run(git, check=True)
    os.chdir("repository")
sys.path.insert(0, os.getcwd())
pip = [sys.executable, "-m", "pip", "install", "-q", "-r", "requirements.txt"]
subprocess.run(pip, check=True)  # nothing, where all is there"""


def notebook(cells):
    """nbformat 4 as a dict. cells: of `parse`."""
    made = []
    for kind, source, printed in [["code", FIRST, ""], *cells]:
        cell = dict(cell_type=kind, metadata={}, source=source.rstrip("\n"))
        if kind == "code":
            cell.update(execution_count=None, outputs=[])
            if printed:
                out = dict(output_type="stream", name="stdout", text=printed)
                cell["outputs"] = [out]
        made.append(cell)
    kernel = dict(name="python3", display_name="Python 3", language="python")
    return dict(nbformat=4, nbformat_minor=4, metadata=dict(kernelspec=kernel),
                cells=made)


def main(argv=None):
    args = Arguments("notebook", "make a notebook of the lesson, or update its text")
    args.add_argument("--out", default=os.path.join(ROOT, "docs", "lesson.ipynb"),
                      type=os.path.expanduser, help="the notebook")
    args.add_argument("--update", action="store_true",
                      help="no notebook: write what the cells print into the lesson")
    args = args.parse_args(argv)
    with one_line_errors(OSError, ValueError):
        if not args.out.endswith(".ipynb"):
            raise ValueError(f"out must end in .ipynb, got {args.out!r}")
        with open(LESSON, encoding="utf-8") as f:
            text = f.read()
        cells, path = parse(text), args.out
        if args.update:
            os.chdir(ROOT)
            printed = run(source for kind, source, _ in cells if kind == "code")
            text, path = updated(text, printed), LESSON
        else:
            text = json.dumps(notebook(cells), indent=1) + "\n"
        write_text(path, text)
        code_cells = sum(kind == "code" for kind, _, _ in cells)
        tell(f"written to {path}: {code_cells} cells of docs/lesson.md with output")


if __name__ == "__main__":
    main()
