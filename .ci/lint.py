"""
What the project's style asks for and ruff cannot say.

    python .ci/lint.py      # one line per finding; exit code 1 if there is any

- Imports go one way. Tests never import each other.
- More than four positional arguments need names. Kernel launches, code inside kernels, shapes and
  functions that take any number of arguments are aside.
- No "text" * condition, and no function that returns tuples of varying length.
- No function has more than 60 lines.
- Code is at most CODE columns wide, lines with comments and docstrings at most PROSE, tests WIDER.
- The README has at most 2,500 words.
"""
import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# who is right of whom: a room imports from these and from itself, nothing else of the project
METHOD = "objectives grpo rollout kvcache shadow_attn data model fast support"
RIGHT_OF = {"fast": "", "support": "", "model": "fast support", "shadow_attn": "fast",
            "kvcache": "fast", "rollout": "kvcache shadow_attn fast support",
            "grpo": "shadow_attn fast", "data": "model fast support",
            "objectives": "grpo shadow_attn fast",
            "run": METHOD, "train": f"run {METHOD}"}
ROOMS = {*RIGHT_OF, "experiments"}
PROGRAMS = {"data/pretrain.py"}  # nothing imports them, they may import anything

# take a shape, or any number of arguments, and are defined elsewhere
VARIADIC = set("""apply checkpoint dict einsum empty expand join max min new_empty
    new_ones new_zeros ones permute print product rand randn repeat reshape
    save_for_backward view zeros zip""".split())

CODE, PROSE = 88, 100  # columns; prose are lines of comments and docstrings
WIDER = {"tests": PROSE}  # folder: columns of its code


def name_of(function):
    """The last name of what is called or decorates: f in f, a.f and a.f(...)."""
    if isinstance(function, ast.Call):
        function = function.func
    return getattr(function, "attr", getattr(function, "id", ""))


def functions(tree):
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def own(function):
    """The nodes of a function that belong to no function inside it."""
    todo = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)


def check_imports(path, tree):
    path = path.relative_to(ROOT)
    room = path.parts[0].removesuffix(".py")
    if path.as_posix() in PROGRAMS:
        room = "experiments"
    allowed = {room, *RIGHT_OF.get(room, " ".join(ROOMS)).split()}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            top = name.split(".")[0]
            if top in ROOMS - allowed or top == "tests" or top.startswith("test_"):
                yield node.lineno, f"{room} must not import {name}"


def check_calls(tree, variadic):
    kernels = [f for f in functions(tree)
               if any(name_of(d).endswith("jit") for d in f.decorator_list)]
    inside = {id(node) for kernel in kernels for node in ast.walk(kernel)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in inside:
            continue
        name = name_of(node)
        launch = isinstance(node.func, ast.Subscript)  # kernel[grid](...)
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if len(plain) > 4 and name not in variadic and not launch:
            yield node.lineno, f"{len(plain)} positional arguments in a call of {name}"


def check_products(tree):
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        if is_choice(node.left, node.right) or is_choice(node.right, node.left):
            yield node.lineno, "text or a list times a condition: write if"


def is_choice(what, times):
    """Is this text or a list, there or not there? "-" * width and [None] * n are repetitions."""
    if isinstance(times, (ast.Compare, ast.BoolOp)) or name_of(times) == "bool":
        return isinstance(what, (ast.JoinedStr, ast.List)) or is_text(what)
    words = isinstance(what, ast.JoinedStr) or (is_text(what) and len(what.value) > 4)
    return words and isinstance(times, (ast.Name, ast.Attribute))


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def check_functions(tree):
    for f in functions(tree):
        lines = f.end_lineno - f.lineno + 1
        if lines > 60:
            yield f.lineno, f"{f.name} has {lines} lines"
        tuples = [n.value.elts for n in own(f)
                  if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple)]
        starred = [[x.value for x in t if isinstance(x, ast.Starred)] for t in tuples]
        lengths = {len(t) for t, stars in zip(tuples, starred) if not stars}
        choices = [x for stars in starred for x in stars if isinstance(x, ast.IfExp)]
        if len(lengths) > 1 or choices:
            yield f.lineno, f"{f.name} returns tuples of varying length"


def check_width(path, tree):
    """Code, without a comment behind it, and whole lines."""
    limit = WIDER.get(path.relative_to(ROOT).parts[0], CODE)
    text = path.read_text(encoding="utf-8")
    docs = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and is_text(n.value)]
    prose = {row for n in docs for row in range(n.lineno, n.end_lineno + 1)}
    lines = [line.rstrip() for line in text.splitlines()]
    code = [*lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            code[row - 1] = code[row - 1][:column].rstrip()
    for row, (line, part) in enumerate(zip(lines, code), 1):
        if row not in prose and len(part) > limit:
            yield row, f"{len(part)} columns of code, at most {limit}"
        if len(line) > PROSE:
            yield row, f"{len(line)} columns, at most {PROSE}"


def main():
    paths = [p for p in sorted(ROOT.rglob("*.py"))
             if not p.relative_to(ROOT).parts[0].startswith((".venv", "out"))]
    trees = {p: ast.parse(p.read_text(encoding="utf-8")) for p in paths}
    variadic = set(VARIADIC)
    for tree in trees.values():
        variadic |= {f.name for f in functions(tree) if f.args.vararg}
    found = []
    for path, tree in trees.items():
        findings = [*check_imports(path, tree), *check_calls(tree, variadic),
                    *check_products(tree), *check_functions(tree),
                    *check_width(path, tree)]
        where = path.relative_to(ROOT)
        found += [f"{where}:{line}: {text}" for line, text in sorted(findings)]
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    if words > 2500:
        found.append(f"README.md: {words} words, at most 2,500")
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
