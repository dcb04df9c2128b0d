"""
What is your own, named "module:name" on the command line: a reward, an eviction method, an
objective, a task. The module is looked for in the current folder first, then in
those of PYTHONPATH.
"""
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from contextlib import contextmanager

from support.jsonfile import reason, shown
from support.run import failures, settings_kept

OWN = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")  # module:name
LIBRARIES = tuple(sysconfig.get_path(key) + os.sep
                  for key in ("stdlib", "purelib", "platlib"))
FILES = {}  # file of a module that was named -> its name


def is_own(name):
    return bool(OWN.fullmatch(name))


def find_own(name, what):
    """-> what "module:name" stands for, the file that it comes from. what: the setting. Raises
    ValueError where there is none."""
    module, attribute = OWN.fullmatch(name).groups()
    loaded = load(module, what)
    file = getattr(loaded, "__file__", None) or module
    if getattr(loaded, attribute, None) is None:
        raise ValueError(
            f"{what} {shown(name)}: {file} does not define {attribute!r}")
    FILES[file] = module
    return getattr(loaded, attribute), file


def must_take(what, function, *names, by_name=()):
    """Raise ValueError where a function does not take arguments of these names: the first in this
    order, those of by_name as name=value. what: the setting, and what it says."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in one does not say what it takes
        return
    try:
        signature.bind(*names, **dict.fromkeys(by_name))
    except TypeError:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(f"{what}: {name}{signature} must take "
                         f"({', '.join((*names, *by_name))})") from None


def load(module, what):
    """Import a module, from the current folder if it is there. what: whose fault it is."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        with settings_kept():
            found = importlib.import_module(module)
    except failures() as e:  # whatever it does wrong is its fault
        line = f" ({place(e)})"
        if isinstance(e, SyntaxError):
            line = f", line {e.lineno}"
        elif isinstance(e, ModuleNotFoundError):
            line = ""
        raise ValueError(f"{what}: cannot import {module} from {here}, PYTHONPATH "
                         f"or what is installed: {reason(e)}{line}") from None
    want = os.path.join(here, *module.split(".")) + ".py"
    got = getattr(found, "__file__", None) or "built in"
    same = os.path.exists(got) and os.path.exists(want) and os.path.samefile(want, got)
    if os.path.exists(want) and not same:
        raise ValueError(
            f"{what}: {module} is {got}, which hides {want}: choose another name")
    return found


def place(e):
    """File and line where an exception was raised; inside a library, whence that was called."""
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


@contextmanager
def placed(*kinds):
    """What a module of one's own raises, of these kinds, becomes a ValueError that names module,
    file and line. A reward's failure says so already (data/rewards.py)."""
    try:
        yield
    except kinds as e:
        frames = traceback.extract_tb(e.__traceback__)
        frames = [frame for frame in frames if frame.filename in FILES]
        if not frames:
            raise
        file = frames[-1].filename
        raise ValueError(f"{FILES[file]} raised {reason(e)} "
                         f"({file}:{frames[-1].lineno})") from e
