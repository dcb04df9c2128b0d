"""
Configuration by plain assignments: defaults, then config files and --key=value in the order
given.

The idea is nanoGPT's: a config file is Python that assigns names, a command line overrides
one name at a time. Its holes are mended: an unknown key is an error that names the nearest
one, and a value must have the type of its default (an int will do for a float).
"""
import difflib
import math
import os


def configure(defaults, argv, choices=None, refused=None):
    """-> dict of all keys. Raises ValueError, one line that names the culprit.

    defaults: dict of bool, int, float or str. argv: config files and --key=value. choices:
    key -> allowed values. refused: key -> why it is not offered."""
    config = dict(defaults)
    for arg in argv:
        if arg.startswith("--"):
            found = read_option(arg, defaults)
        else:
            found = read_file(arg)
        for key, value in found.items():
            config[key] = check(key, value, arg, defaults, choices=choices, refused=refused)
    return config


def check(key, value, where, defaults, choices=None, refused=None):
    """-> the value, as a float where an int stands for one. Raises ValueError with the
    nearest key, the type that was expected, or the choices."""
    if refused and key in refused:
        raise ValueError(f"{where}: {key} is not offered: {refused[key]}")
    if key not in defaults:
        near = difflib.get_close_matches(key, defaults, n=1, cutoff=0.0)[0]
        raise ValueError(f"{where}: unknown key {key!r}; the nearest is {near!r}")
    want = type(defaults[key])
    if want is float and type(value) is int and abs(value) < 10**300:
        value = float(value)
    if type(value) is not want:
        raise ValueError(f"{where}: {key} expects {want.__name__}, "
                         f"got {type(value).__name__} {value!r}")
    if want is float and not math.isfinite(value):
        raise ValueError(f"{where}: {key} must be a finite number, got {value}")
    if choices and key in choices and value not in choices[key]:
        raise ValueError(f"{where}: {key} must be one of {', '.join(choices[key])}, got {value!r}")
    return value


def read_option(arg, defaults):
    """'--key=value' -> {key: value}"""
    key, equals, text = arg[2:].partition("=")
    if not equals:
        raise ValueError(f"{arg}: write --key=value; the keys stand at the top of train.py")
    if isinstance(defaults.get(key), str):
        return {key: text}  # a folder may be called 7
    return {key: parse(text)}


def parse(text):
    """The bool, int or float that text spells, else text."""
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def read_file(path):
    """-> what a config file assigns. Whatever it does wrong is its fault: the error says
    which file."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such config file (options are written --key=value)")
    scope = {}
    with open(path, encoding="utf-8") as f:
        try:
            exec(compile(f.read(), path, "exec"), scope)
        except (Exception, SystemExit) as e:
            line = f", line {e.lineno}" if isinstance(e, SyntaxError) else ""
            why = " ".join([type(e).__name__, *str(e).split()])
            raise ValueError(f"{path}{line}: {why}") from None
    return {key: value for key, value in scope.items() if not key.startswith("__")}


def check_ranges(c, ranges):
    """Raise ValueError for a setting of the namespace c outside its (lowest, highest); a highest of
    None is no limit."""
    for key, (low, high) in ranges.items():
        value = getattr(c, key)
        if high is None and value < low:
            raise ValueError(f"{key} must be at least {low}, got {value}")
        if high is not None and not low <= value <= high:
            raise ValueError(f"{key} must be between {low} and {high}, got {value}")
