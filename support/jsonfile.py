"""
JSON from outside: an object and values of the type that is wanted, or one line that says which file
or key is wrong.
"""
import json
import os
import re

LARGEST = 2**25  # bytes of a file
# levels; what is read must be written again, which Python does by recursion
DEPTH = 100
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text",
         list: "a list", dict: "an object"}


def read_json(file, default=None):
    """-> dict; the default, if one is given, where there is no file. Raises FileNotFoundError or
    ValueError, one line that names the file."""
    if default is not None and not os.path.exists(file):
        return default
    return parse_object(read_text(file), file)


def read_text(file):
    """What a text file holds. Raises FileNotFoundError or ValueError, which names it."""
    if not os.path.isfile(file):  # a FIFO would be waited for
        raise FileNotFoundError(f"{file} is missing, or is not a regular file")
    if os.path.getsize(file) > LARGEST:
        raise ValueError(f"{file} has {os.path.getsize(file):,} bytes, at most "
                         f"{LARGEST:,} are read")
    try:
        with open(file, encoding="utf-8-sig") as f:
            return f.read()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8") from None


def parse_object(text, name):
    """-> dict. Raises ValueError, naming what the text is, for what is no JSON object, is nested
    deeper than DEPTH or holds a key twice."""
    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        why = " ".join(str(e).split())[:200]
        raise ValueError(f"{name} is not valid JSON: {why}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} must hold a JSON object {{...}}, got {shown(found)}")
    level = [found]
    for _ in range(DEPTH):
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [value for values in inner for value in values
                 if isinstance(value, (dict, list))]
    if level:
        raise ValueError(f"{name} is nested deeper than {DEPTH} levels")
    return found


def once(pairs):
    """An object's (key, value) pairs -> dict. Which of two values counts is anybody's guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"key {shown(twice)} is there twice")
    return found


def entry(raw, key, kind, default=None):
    """raw[key], or the default where it is absent or null. Raises ValueError unless it is of the
    kind: bool, int, float (an int will do), str, list or dict."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{key} is missing or null")
    kinds = (int, float) if kind is float else kind
    # to Python true is a 1
    if not isinstance(value, kinds) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"{key} must be {KINDS[kind]}, got {shown(value)}")
    return value


def check_shape(value, shape, name):
    """Raise ValueError, with the value's name, unless it is as the shape says: a type, as entry has
    it; [shape] of each item of a list; (shape, shape) of the items of a list of so many;
    {key: shape} of what an object must have, or, where the key ends in ?, may have."""
    kind = shape
    if not isinstance(shape, type):
        kind = dict if isinstance(shape, dict) else list
    entry({name: value}, name, kind)
    if isinstance(shape, dict):
        for key, of_key in shape.items():
            found = value.get(key.rstrip("?"))
            if found is not None or not key.endswith("?"):
                check_shape(found, of_key, f"{name}.{key.rstrip('?')}")
    elif not isinstance(shape, type):
        shapes = shape * len(value) if isinstance(shape, list) else shape
        if len(shapes) != len(value):
            raise ValueError(f"{name} must have {len(shapes)} items, got {len(value)}")
        for i, (item, of_item) in enumerate(zip(value, shapes)):
            check_shape(item, of_item, f"{name}.{i}")


def printable(text):
    """Text on one line; control characters, which a terminal would obey, are escaped."""
    line = " ".join(text.splitlines())
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in line)


def harmless(text):
    """Text whose control characters are escaped, but for line breaks and tabs."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def reason(e):
    """What an exception of somebody's own says: its name and a short text, if it has one."""
    try:
        text = " ".join(str(e).split())
    except BaseException:  # whatever its __str__ raises; the name is told all the same
        text = "its message cannot be read"
    return printable(f"{type(e).__name__}: {text}"[:200].removesuffix(": "))


def shown(value):
    """A value from outside for an error message: one line and short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
