"""
JSON files from outside: an object or one line that says what is wrong with the file.
"""
import json
import os

DEPTH = 100  # levels; what is read must be written again, which Python does by recursion


def read_json(file):
    """-> dict. Raises FileNotFoundError or ValueError, one line that names the file, for what is
    no JSON object, is nested deeper than DEPTH or holds a key twice."""
    if not os.path.isfile(file):  # a FIFO would be waited for
        raise FileNotFoundError(f"{file} is missing, or is no file")
    try:
        with open(file, encoding="utf-8") as f:
            found = json.load(f, object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        why = " ".join(str(e).split())[:200]
        raise ValueError(f"{file} is not valid JSON: {why}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object {{...}}, got {shown(found)}")
    level = [found]
    for _ in range(DEPTH):
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)
                 if isinstance(y, (dict, list))]
    if level:
        raise ValueError(f"{file} is nested deeper than {DEPTH} levels")
    return found


def once(pairs):
    """An object's (key, value) pairs -> dict. Which of two values counts is anybody's guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"key {shown(twice)} is there twice")
    return found


def shown(value):
    """A value of a JSON file for an error message: one line and short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
