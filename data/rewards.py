"""
How a response is judged: by a rule of data/answers.py, or by a function of your own.

    python train.py --reward=boxed          # a rule by name
    python train.py --reward=mine:reward    # function `reward` of mine.py in the current folder

The idea. A rule maps (text, gold answer) to True, False or a fraction; "auto" takes the rule of a
generated task, and for a file `number` where the gold answer is a number, else `exact`. A
function of your own is called as reward(row, text, tokens): the problem's row, the response without
stop tokens, thought included, and its token ids, stop token included. It returns what is learned
from, a finite number, or a dict of such numbers in which this is "reward"; the others are logged.

Left out: a limit on how long a function takes. Only its own file is watched for changes.
"""
import copy
import importlib.util
import os
import re
from numbers import Real

from data.answers import RULES, after_thought, exact, is_number, last_number
from support.checkpoint import fingerprint
from support.jsonfile import reason, shown
from support.own import find_own, is_own, must_take, place
from support.run import settings_kept

LARGEST = 1e15  # rewards become fp32, in which their squares are summed
# what a right response may look like
FORMS = ("{}", r"\boxed{{{}}}")


class RewardError(ValueError):
    """A reward that is none."""


# rules

def rule_of(name, gold):
    """-> the rule of this name for a gold answer of a file; name: auto or one of RULES."""
    if name == "auto":
        return last_number if is_number(gold) else exact
    return RULES[name]


def earns(name, gold, answer):
    """Does an answer earn 1 by a rule, written in one of FORMS? Where gold itself does not, no
    text can."""
    texts = [after_thought(form.format(answer), False) for form in FORMS]
    return any(text and rule_of(name, gold)(text, gold) == 1 for text in texts)


def check_reward(name):
    """Raise ValueError for a setting `reward` that is neither auto, a rule nor module:function."""
    if name in ("auto", *RULES):
        if name == "math" and not importlib.util.find_spec("math_verify"):
            raise ValueError("reward=math needs the package math-verify: pip install "
                             "math-verify")
        return
    hint = meant(name)
    if not is_own(name) or hint not in ("", name):
        also = f"; did you mean {hint}?" if hint else ""
        raise ValueError(f"unknown reward {shown(name)}: one of auto, "
                         f"{', '.join(RULES)}, or module:function{also}")


def meant(name):
    """module:function for the name of a file that is there: mine.py:reward, mine.reward, mine; else
    ""."""
    found = re.fullmatch(r"([\w./]+?)(?:\.py)?(?:[.:](\w+))?", name)
    if not found or not os.path.isfile(found[1].replace(".", "/") + ".py"):
        return ""
    return f"{found[1].replace('/', '.')}:{found[2] or 'FUNCTION'}"


def find_reward(name):
    """-> what judges by a setting `reward`: a rule's name, or the function of one's own."""
    return Own(name) if ":" in name else name


# functions of one's own

class Own:
    """A function of one's own: own(row, text, tokens) -> {"reward": x, name: x, ...}; one whose
    attribute `batch` is true is asked once for all responses, own.many(rows, texts, tokens).

    name: "module:function"; the module is looked for in the current folder first. file: where it
    is; fingerprint: of that file. Raises ValueError where there is no such function."""

    def __init__(self, name):
        self.name, self.names = name, None  # the names of the numbers that it returns
        self.function, self.file = find_own(name, "reward")
        self.fingerprint = fingerprint(self.file)
        self.batch = bool(getattr(self.function, "batch", False))
        function = name.partition(":")[2]
        if not callable(self.function):
            raise ValueError(f"reward {name}: {self.file} must define the function "
                             f"{function!r}, got {self.function!r:.80}")
        taken = ("rows", "texts") if self.batch else ("row", "text")
        must_take(f"reward {name}", self.function, *taken, "tokens")

    def __str__(self):
        return f"{self.name} of {self.file}"

    def __call__(self, row, text, tokens):
        """Raises RewardError, and whatever the function raises."""
        # a copy: what it changes there would be another problem from then on
        with settings_kept():
            found = self.function(copy.deepcopy(row), text, list(tokens))
        return self.checked(found)

    def many(self, rows, texts, tokens):
        """Of a function for a whole batch -> a dict for each response."""
        with settings_kept():
            found = self.function(copy.deepcopy(rows), list(texts),
                                  [list(t) for t in tokens])
        if not hasattr(found, "__len__") or len(found) != len(texts):
            many = hasattr(found, "__len__")
            got = f"{len(found)} of them" if many else repr(found)[:80]
            raise RewardError("must be a list of one number (or dict) for each of "
                              f"{len(texts)} responses, got {got}")
        checked = []
        for i, each in enumerate(found):
            try:
                each = each if isinstance(each, dict) else dict(reward=each)
                checked.append(self.checked(each))
            except RewardError as e:
                where = f"response {i + 1} of {len(texts)}"
                raise RewardError(f"{where}, {e}") from None
        return checked

    def checked(self, found):
        found = named_numbers(found)
        self.names = self.names or list(found)
        if set(found) != set(self.names):
            raise RewardError(f"has the names {', '.join(sorted(found))}, before it "
                              f"had {', '.join(sorted(self.names))}: they must be the "
                              "same in each call")
        return found


def named_numbers(returned):
    """A finite number, or a dict of such in which one is "reward" -> dict of floats. Raises
    RewardError."""
    if not isinstance(returned, dict):
        return dict(reward=number(returned))
    if "reward" not in returned:
        raise RewardError(f"must hold the name 'reward', got {list(returned)!r:.80}")
    for name in returned:
        if not isinstance(name, str) or not name.isidentifier():
            raise RewardError(f"must have names that are identifiers, got {name!r:.80}")
    return {name: number(x, f"number {name!r}: ") for name, x in returned.items()}


def number(x, what=""):
    if getattr(x, "ndim", None) == 0:  # of numpy, its bool too, or torch
        x = x.item()
    if not isinstance(x, Real) or not abs(x) <= LARGEST:
        raise RewardError(f"{what}must be a finite number, got {x!r:.80}")
    return float(x)


def explain(e):
    """What an exception says of a reward, and where it was raised if the reward's code did that."""
    if isinstance(e, RewardError):
        return str(e)
    return f"raised {reason(e)} ({place(e)})"


def means(parts):
    """{name: numbers} -> {reward_name: their mean}"""
    return {f"reward_{name}": sum(xs) / len(xs) for name, xs in parts.items()}
