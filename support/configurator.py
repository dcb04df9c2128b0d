"""
Configuration by plain assignments: defaults, then config files and --key=value in the order
given; what --help says of them. `--key value` and a bare `--flag` will do too.

The idea is nanoGPT's: a config file is Python that assigns names, a command line overrides
one name at a time. Its holes are mended: an unknown key is an error that names the nearest
one, and a value must have the type of its default (an int will do for a float). A number is
written in plain decimal digits (12, -0.5, 1e-3), else it is text; it must be finite and fit
64 bits. A setting is described once, by the comment beside its default; --help reads it there.

Left out: limits on what a config file does. It is a program and may do all that one can; only
its size is bounded, and it must be a file, not a pipe.
"""
import argparse
import ast
import difflib
import functools
import io
import math
import os
import re
import tempfile
import tokenize
from types import ModuleType

from support.jsonfile import shown
from support.run import failures
from support.screen import tell

LARGEST = 1_000_000  # bytes of a config file
NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf|nan)", re.ASCII)
FLAGS = ("True", "true", "False", "false")
# other trainers' names (TRL, verl, OpenRLHF, transformers) for settings of train.py
ELSEWHERE = dict(
    learning_rate="lr", output_dir="out_dir", save_dir="out_dir",
    num_generations="group", n_samples_per_prompt="group", rollout_n="group",
    num_train_epochs="steps", max_steps="steps", total_training_steps="steps",
    epochs="steps", train_batch_size="prompts", batch_size="prompts",
    per_device_train_batch_size="prompts", rollout_batch_size="prompts",
    max_completion_length="max_new_tokens", max_response_length="max_new_tokens",
    max_tokens="max_new_tokens", generate_max_len="max_new_tokens",
    max_prompt_length="prompt_tokens", prompt_max_len="prompt_tokens", epsilon="clip",
    epsilon_high="clip_high", clip_ratio="clip", eps_clip="clip", kl_coef="ref_kl",
    init_kl_coef="ref_kl", num_iterations="updates", ppo_epochs="updates",
    lora_r="lora_rank", lora_target_modules="lora_targets",
    gradient_checkpointing="checkpointing", max_grad_norm="grad_clip",
    max_norm="grad_clip", warmup_steps="warmup", lr_scheduler_type="lr_schedule",
    model_name_or_path="model", pretrain="model", dataset_name="task", dataset="task",
    reward_funcs="reward", random_seed="seed", torch_dtype="dtype", loss_type="norm",
    eval_steps="eval_every", save_steps="save_every", report_to="tracker",
    stop_words="stop", adam_beta2="beta2", adapter="model")
CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f]")
SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def configure(defaults, argv, choices=None, refused=None):
    """-> dict of all keys. Raises ValueError, one line that names the culprit.

    defaults: dict of bool, int, float or str. argv: config files and --key=value. choices:
    key -> allowed values. refused: key -> why it is not offered."""
    config = dict(defaults)
    for arg in joined(argv, defaults):
        where = printable(arg)
        if arg.startswith("--"):
            found = read_option(arg, defaults)
        else:
            found = read_file(arg, defaults)
        for key, value in found.items():
            config[key] = check(
                key, value, where, defaults, choices=choices, refused=refused)
    return config


def joined(argv, defaults):
    """argv with `--key value` and `--flag` written as --key=value. A flag takes the next word only
    if that is True or False; another key takes it whatever it is, but for an option."""
    words, out = list(argv), []
    while words:
        word = words.pop(0)
        default = defaults.get(word[2:]) if word.startswith("--") else None
        if isinstance(default, bool):
            value = "True"
            if words and words[0] in FLAGS:
                value = words.pop(0)
            word = f"{word}={value}"
        elif default is not None and words and not words[0].startswith("--"):
            word = f"{word}={words.pop(0)}"
        out.append(word)
    return out


def printable(text):
    """Text as it is; quoted if it would not be seen or would break a line, cut if it is long."""
    return text if text.isprintable() and 0 < len(text) <= 300 else shown(text)


def check(key, value, where, defaults, choices=None, refused=None):
    """-> the value, as a float where an int stands for one, with ~ at its start expanded.
    Raises ValueError with the nearest key, the type that was expected, or the choices."""
    if refused and key in refused:
        raise ValueError(f"{where}: {key} is not offered: {refused[key]}")
    if key not in defaults:
        raise ValueError(unknown(key, where, defaults))
    want = type(defaults[key])
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"{where}: {key} does not fit 64 bits")
    if want is float and type(value) is int:
        value = float(value)
    if type(value) is not want:
        got = type(value).__name__
        if type(value) in (bool, int, float, str):
            got += f" {value!r:.80}"
        wanted = "True or False" if want is bool else want.__name__
        raise ValueError(f"{where}: {key} expects {wanted}, got {got}")
    if want is float and not math.isfinite(value):
        raise ValueError(f"{where}: {key} must be a finite number, got {value}")
    if want is str and CONTROL.search(value):
        raise ValueError(f"{where}: {key} holds a control character: {shown(value)}")
    if want is str and value.startswith("~"):
        value = os.path.expanduser(value)  # a shell does it only where a word begins
    if choices and key in choices and value not in choices[key]:
        known = ", ".join(choices[key])
        raise ValueError(f"{where}: {key} must be one of {known}, got {shown(value)}")
    return value


def unknown(key, where, defaults):
    written = key.lower().replace("-", "_")[:100]
    text = f"{where}: unknown key {shown(key)}; "
    near = difflib.get_close_matches(written, defaults, n=1, cutoff=0.6)
    if ELSEWHERE.get(written) in defaults:
        text += f"here it is called {ELSEWHERE[written]!r}"
    elif near:
        text += f"the nearest is {near[0]!r}"
    else:
        text += "--help lists the keys"
    if not where.startswith(("--", "'--")):
        text += " (names that are no settings must begin with _)"
    return text


def read_option(arg, defaults):
    """'--key=value' -> {key: value}"""
    key, equals, text = arg[2:].partition("=")
    if not equals and (not key or key in defaults):  # another is unknown, however written
        raise ValueError(f"{printable(arg)}: write --key=value; --help lists the keys")
    if isinstance(defaults.get(key), str):
        return {key: text}  # a folder may be called 7
    return {key: parse(text)}


def parse(text):
    """The bool, int or float that text spells, else text."""
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    if not NUMBER.fullmatch(text):
        return text
    try:
        return int(text)
    except ValueError:
        return float(text)


def read_file(path, defaults):
    """-> what a config file assigns, without modules and names that begin with _. Whatever
    it does wrong is its fault: the error says which file."""
    where = printable(path)
    if not os.path.isfile(path):
        if os.path.exists(path):
            raise ValueError(f"{where}: a config file must be a file, not a folder, a "
                             "device or a pipe")
        raise ValueError(f"{where}: no such config file (settings are written "
                         "--key=value, --help lists them)")
    scope = {"__file__": os.path.abspath(path)}
    line = ""
    try:
        with open(path, "rb") as f:
            source = f.read(LARGEST + 1)
        if len(source) > LARGEST:
            raise ValueError(f"larger than {LARGEST:,} bytes")
        tree = ast.parse(source, path)  # of bytes: a byte-order mark is harmless
        exec(compile(tree, path, "exec"), scope)
    except failures() as e:
        if isinstance(e, SyntaxError) and e.lineno:
            line = f", line {e.lineno}"
        why = " ".join([type(e).__name__, *str(e).split()])
        raise ValueError(f"{where}{line}: {why:.300}") from None
    for node in bare_annotations(tree):
        key, at = node.target.id, f"{where}, line {node.lineno}"
        if key not in defaults:
            raise ValueError(unknown(key, at, defaults))
        raise ValueError(f"{at}: a type behind {key}: sets no value; "
                         f"write {key} = value")
    return {key: value for key, value in scope.items()
            if not key.startswith("_") and not isinstance(value, ModuleType)}


def bare_annotations(node):
    """Lines such as `lr: 1e-3`, which Python takes and forgets; not those of functions and
    classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.AnnAssign):
            if child.value is None and isinstance(child.target, ast.Name):
                yield child
        elif not isinstance(child, SCOPES):
            yield from bare_annotations(child)


def check_ranges(config, ranges):
    """Raise ValueError for a setting outside its (lowest, highest)."""
    for key, (low, high) in ranges.items():
        value = getattr(config, key)
        if not low <= value <= high:
            raise ValueError(f"{key} must be between {low} and {high}, got {value}")


def make_folder(path):
    """Make a folder and see that files can be written there: better before hours of work than
    after. Raises ValueError."""
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        raise ValueError(f"cannot write to folder {path!r}: {e.strerror}") from None


# what --help says

def describe(path, defaults):
    """The settings of defaults as the source at path assigns them, `key = value  # comment`, or
    key=value in a dict(...). -> lines: key, default, comment, under comments that stand above"""
    with tokenize.open(path) as f:
        source = f.read()
    comments = {}  # row -> text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string[1:].strip()
    places = {}  # key -> its node
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            places.setdefault(node.targets[0].id, node)
            if isinstance(node.value, ast.Call):
                for keyword in node.value.keywords:
                    places.setdefault(keyword.arg, keyword)
    rows = source.split("\n")
    lines = []
    for key, default in defaults.items():
        node = places[key]
        above = node.lineno - 1
        if rows[above - 1].lstrip().startswith("#"):
            lines.append(f"  {comments[above]}")
        said = comments.get(node.end_lineno, "")
        lines.append(f"    {f'--{key}={default}':26s}  {said}".rstrip())
    return lines


def help_if_asked(argv, doc, *sources):
    """If argv has -h or --help: print doc and all settings, then exit with 0. sources: (title, path
    of a .py file, the defaults that it assigns)."""
    if "-h" not in argv and "--help" not in argv:
        return
    tell((doc or "").strip())  # python -OO drops it
    for title, path, defaults in sources:
        tell("\n".join(["", f"{title}:", *describe(path, defaults)]))
    raise SystemExit(0)


class Arguments(argparse.ArgumentParser):
    """argparse, whose errors are one line here, whose numbers and True or False are written as
    settings are, and whose --help says the defaults."""

    def __init__(self, prog, description):
        super().__init__(prog=f"python -m experiments.{prog}", description=description,
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for kind in (bool, int, float):
            self.register("type", kind, functools.partial(self.number, kind()))

    def number(self, default, text):
        return check("value", parse(text), text, {"value": default})

    def error(self, message):
        raise SystemExit(f"error: {' '.join(message.split())} (--help says more)")

    def print_help(self, file=None):
        tell(self.format_help(), file)
