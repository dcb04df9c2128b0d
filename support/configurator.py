"""
Configuration by plain assignments: defaults, then config files and --key=value in the order given.

The idea is nanoGPT's: a config file is Python that assigns names, a command line overrides one name at a time. Its holes
are mended: an unknown key is an error that names the nearest one, and a value must have the type of its default (an int
will do for a float).
"""
import difflib
import math
import os


def set_key(config, key, value, where, choices, refused):
    """Override one key, or raise ValueError with the nearest key, the type that was expected, or the choices."""
    if key in refused:
        raise ValueError(f"{where}: {key} is not offered: {refused[key]}")
    if key not in config:
        near = difflib.get_close_matches(key, config, n=1, cutoff=0.0)[0]
        raise ValueError(f"{where}: unknown key {key!r}; the nearest is {near!r}")
    want = type(config[key])
    if want is float and type(value) is int and abs(value) < 10**300:
        value = float(value)
    if type(value) is not want:
        raise ValueError(f"{where}: {key} expects {want.__name__}, got {type(value).__name__} {value!r}")
    if want is float and not math.isfinite(value):
        raise ValueError(f"{where}: {key} must be a finite number, got {value}")
    if key in choices and value not in choices[key]:
        raise ValueError(f"{where}: {key} must be one of {', '.join(choices[key])}, got {value!r}")
    config[key] = value


def configure(defaults, argv, choices={}, refused={}):
    """defaults: dict of bool, int, float or str. argv: config files and --key=value. choices: key -> allowed values;
    refused: key -> why it is not offered. -> dict of all keys. Raises ValueError, one line that names the culprit."""
    config = dict(defaults)
    for arg in argv:
        if arg.startswith("--"):
            key, eq, text = arg[2:].partition("=")
            if not eq:
                raise ValueError(f"{arg}: write --key=value; the keys stand at the top of train.py")
            value = text
            if type(config.get(key)) is not str:
                for parse in (int, float, {"True": True, "true": True, "False": False, "false": False}.__getitem__):
                    try:
                        value = parse(text)
                        break
                    except (ValueError, KeyError):
                        pass
            set_key(config, key, value, arg, choices, refused)
        else:
            if not os.path.isfile(arg):
                raise ValueError(f"{arg}: no such config file (options are written --key=value)")
            scope = {}
            with open(arg, encoding="utf-8") as f:
                try:
                    exec(compile(f.read(), arg, "exec"), scope)
                except (Exception, SystemExit) as e:  # whatever a config file does wrong is the file's fault: say which file
                    line = f", line {e.lineno}" if isinstance(e, SyntaxError) else ""
                    raise ValueError(f"{arg}{line}: {' '.join([type(e).__name__, *str(e).split()])}") from None
            for key, value in scope.items():
                if not key.startswith("__"):
                    set_key(config, key, value, arg, choices, refused)
    return config


def check_ranges(c, ranges):
    """Raise ValueError for a setting of the namespace c out of its (lowest, highest); None: no limit."""
    for key, (low, high) in ranges.items():
        value = getattr(c, key)
        if high is None and value < low:
            raise ValueError(f"{key} must be at least {low}, got {value}")
        if high is not None and not low <= value <= high:
            raise ValueError(f"{key} must be between {low} and {high}, got {value}")
