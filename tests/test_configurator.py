"""support/configurator.py: what a config file and an option may say, how a number is written, what
--help prints."""
import json
import os
import re
import shutil

import pytest

import train
from conftest import ROOT
from experiments import ablate, bench, draw, generate, variance
from support.configurator import (
    ELSEWHERE,
    Arguments,
    configure,
    describe,
    joined,
    make_folder,
    parse,
)

DEFAULTS = dict(lr=3e-4, steps=120, beta2=0.95, resume=False, task="kv", out_dir="out")


def read(tmp_path, text):
    """The settings after a config file of this text or these bytes."""
    if isinstance(text, str):
        text = text.encode()
    path = tmp_path / "some.py"
    path.write_bytes(text)
    return configure(DEFAULTS, [str(path)])


# config files

@pytest.mark.parametrize("text, says", [
    ("lr: 1e-3", "line 1: a type behind lr: sets no value; write lr = value"),
    ("steps = 3\nif steps:\n    lr: float", "line 3: a type behind lr: sets no value"),
    ("lrr: 1e-3", "line 1: unknown key 'lrr'; the nearest is 'lr'"),
    ("lrr: float = 1e-3", "unknown key 'lrr'; the nearest is 'lr'"),
    ("base = 8", r"unknown key 'base'.*\(names that are no settings must begin"),
    ("def half(x): return x / 2", r"unknown key 'half'.*\(names that are no settings must begin"),
    ("class _A:\n    def __repr__(self): return 'a\\nb'\nlr = _A()", "expects float, got _A$"),
    ("steps = 10**30", "steps does not fit 64 bits"), ("lr = 10**5000", "lr does not fit 64 bits"),
    ("task = 'a\\0b'", "task holds a control character"),
    ("out_dir = 'a\\nb'", "out_dir holds a control character"),
    ("lr =", "line 1: SyntaxError"), ("lr = 1 / 0", "ZeroDivisionError"),
    (b"task = '\xff'", "line 1: SyntaxError .*utf-8"), (b"lr = 1\0", "null bytes"),
    (b"#" * 1_000_001, "larger than 1,000,000 bytes"), ("(" * 300, "SyntaxError|MemoryError"),
])
def test_config_files_are_refused_in_one_line(tmp_path, text, says):
    with pytest.raises(ValueError, match=says) as e:
        read(tmp_path, text)
    assert str(e.value).startswith(str(tmp_path / "some.py")) and "\n" not in str(e.value)


@pytest.mark.parametrize("text, changed", [
    ("lr = 1e-3", dict(lr=1e-3)), ("lr: float = 1", dict(lr=1.0)),
    ("_base = 8\nimport math\nsteps = math.ceil(_base / 3)", dict(steps=3)),
    ("class _A:\n    lr: float\ndef _f(x: int):\n    y: int\n    return x\nsteps = _f(4)",
     dict(steps=4)),
    (b"\xef\xbb\xbfsteps = 5\r\n", dict(steps=5)), ("task = 'h\u00e9'", dict(task="h\u00e9")),
    ("out_dir = '~/x'", dict(out_dir=os.path.expanduser("~/x"))),
    (b"#" * 999_990 + b"\nsteps=7", dict(steps=7)),
])
def test_config_files_that_are_right(tmp_path, text, changed):
    assert read(tmp_path, text) == DEFAULTS | changed


def test_a_config_file_knows_where_it_stands(tmp_path):
    assert read(tmp_path, "task = __file__")["task"] == str(tmp_path / "some.py")


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="must be a file, not a folder, a device or a pipe"):
            configure(DEFAULTS, [str(path)])
    for path in (tmp_path / "nothing.py", "", "-x"):
        with pytest.raises(ValueError, match="no such config file"):
            configure(DEFAULTS, [str(path)])


# options

def test_numbers_are_written_in_plain_decimal():
    numbers = {"12": 12, "-3": -3, "+4": 4, "007": 7, "0.5": 0.5, ".5": 0.5, "5.": 5.0,
               "1e-3": 1e-3, "1E3": 1e3, "9" * 30: int("9" * 30)}
    for text, value in numbers.items():
        assert (parse(text), type(parse(text))) == (value, type(value))
    for text in ("1_000", " 5", "5 ", "5\n", "0x10", "Infinity", "1e", "\u0665", "\uff15", "",
                 "1,5", "--5", "e3", "."):
        assert parse(text) == text
    assert (parse("True"), parse("false"), parse("TRUE")) == (True, False, "TRUE")


@pytest.mark.parametrize("arg, says", [
    ("--steps=1_000", "steps expects int, got str '1_000'"), ("--steps= 5", "expects int"),
    ("--lr=0x10", "expects float, got str"), ("--lr=inf", "finite number, got inf"),
    ("--lr=1e400", "lr must be a finite number, got inf"), ("--lr=-1e400", "got -inf"),
    ("--lr=" + "9" * 400, "lr does not fit 64 bits"), ("--lr=" + "9" * 5000, "finite number"),
    ("--resume=1", "expects True or False, got int 1"),
    ("--task=a\nb", "task holds a control character"),
    ("--task=a\x1bb", "task holds a control character"), ("--out-dir=x", "nearest is 'out_dir'"),
    ("--lr", "--lr: write --key=value"), ("--", "write --key=value"), ("--=3", "unknown key ''"),
])
def test_options_are_refused_in_one_line(arg, says):
    with pytest.raises(ValueError, match=re.escape(says)) as e:
        configure(DEFAULTS, [arg])
    assert "\n" not in str(e.value) and len(str(e.value)) < 6000


def test_two_words_and_bare_flags():
    """--key value and --flag mean what --key=value does; a config file behind a flag stays one."""
    same = configure(DEFAULTS, ["--lr=1e-3", "--resume=True", "--task=7", "--steps=3"])
    assert configure(DEFAULTS, ["--lr", "1e-3", "--resume", "--task", "7", "--steps", "3"]) == same
    assert configure(DEFAULTS, ["--resume", "true", "--steps", "3", "--lr", "1e-3",
                                "--task=7"]) == same
    assert joined(["--resume", "a.py", "--resume", "False", "--lr", "-1"], DEFAULTS) == [
        "--resume=True", "a.py", "--resume=False", "--lr=-1"]
    for alone in (["--lr"], ["--lr", "--resume"]):
        with pytest.raises(ValueError, match="--lr: write --key=value"):
            configure(DEFAULTS, alone)


def test_other_names():
    """Those of other trainers lead to ours; nonsense leads to no name."""
    assert not {*ELSEWHERE.values()} - {*train.DEFAULTS} and not {*ELSEWHERE} & {*train.DEFAULTS}
    says = {key: f"here it is called '{ours}'" for key, ours in ELSEWHERE.items()}
    says.update({"output-dir": "here it is called 'out_dir'", "lrr": "the nearest is 'lr'",
                 "xyzzy_plugh": "--help lists the keys"})
    for key, text in says.items():
        for argv in ([f"--{key}=3"], [f"--{key}", "3"], [f"--{key}"]):
            with pytest.raises(ValueError, match=f"unknown key '{key}'; {text}$"):
                configure(train.DEFAULTS, argv)


# --help

SOURCE = '''"""Head."""
import os
# first
# group
key = 1        # a comment with # and = 2
other = "# no comment"

def f():
    key = 3    # not this one
# second
OWN = dict(
    third=0.5,  # in a call
    fourth=os.path.join(
        "a", "b"),  # behind its last row
)
ranges = dict(third=(0, 1))  # nor this
'''


def test_settings_are_described_where_they_stand(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SOURCE)
    lines = describe(str(path), dict(key=1, other="x", third=0.5, fourth="a/b"))
    pad = " " * 20
    assert lines == ["  group", f"    --key=1{pad[:-1]}  a comment with # and = 2", "    --other=x",
                     f"    --third=0.5{pad[:-5]}  in a call",
                     f"    --fourth=a/b{pad[:-6]}  behind its last row"]


@pytest.mark.parametrize("argv", [["config/dpo.py", "--help"], ["--bugdet=3", "-h"]])
def test_help_of_train(argv, capsys):
    with pytest.raises(SystemExit) as e:
        train.main(argv)
    said = capsys.readouterr().out
    assert e.value.code == 0 and said.startswith(train.__doc__.strip())
    for key, value in train.DEFAULTS.items():
        assert said.count(f"\n    --{key}={value}") == 1, key
    assert "\n  rollout\n    --prompts=16 " in said
    assert "    --clip_high=0.2             upper clip of the ratio; 0.28 in DAPO\n" in said


def test_help_of_experiments(capsys):
    budget = f"--budget={train.budget} "
    shown = {ablate: ["--jobs=1 ", "--keep=", budget], draw: ["--out"],
             variance: ["--prompts=8 ", "--resamples=1000 ", budget],
             bench: ["--shape", "default: out-bench"], generate: ["--prompt", "default: 64"]}
    for program, words in shown.items():
        for flag in ("-h", "--help"):
            with pytest.raises(SystemExit) as e:
                program.main([flag])
            said = capsys.readouterr().out
            assert e.value.code == 0
            assert all(word in said for word in words), program
    assert "--prompts=16" not in said


# what experiments share

def test_arguments_are_refused_in_one_line():
    a = Arguments(prog="x", description="")
    a.add_argument("--n", type=int, default=3)
    a.add_argument("--t", type=float, default=0.5)
    assert vars(a.parse_args(["--n=7", "--t=1"])) == dict(n=7, t=1.0)
    for argv in (["--n=1_0"], ["--n=1.5"], ["--t=nan"], ["--t= 1"], ["--n"], ["more"], ["--\nx"]):
        with pytest.raises(SystemExit, match=r"^error: [^\n]* \(--help says more\)$"):
            a.parse_args(argv)


def test_folders_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "x", "/proc/x", "", tmp_path / ("n" * 300)):
        with pytest.raises(ValueError, match="^cannot write to folder [^\n]*$"):
            make_folder(str(path))
    make_folder(str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("argv, says", [
    (["--group=0"], "group must be between 1"), (["--temperature=-1"], "temperature must be"),
    (["--budget=5"], "budget 5 must be above"), (["--device=foo"], "device must be auto"),
    (["--model=/no/where"], "'/no/where': no such folder"),
    (["--system=x"], "system 'x': this checkpoint has no chat template"),
    (["--system=x", "--raw_text=True"], "system 'x': raw_text=True uses no chat template"),
    (["--response_budget=-1"], "response_budget"),
    (["--template=[1]"], "template must"), (["--template={\"a\": 1}"], "has no chat template"),
    (["--seed=-1"], "seed must be"), (["--max_new_tokens=5000"], "exceed the model's context")])
def test_generate_refuses_in_one_line(argv, says, capsys):
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{says}[^\n]*$"):
        generate.main(["--prompt=x", "--device=cpu", *argv])
    assert capsys.readouterr().out == ""


def test_generate_prints_the_answer(capsys):
    asked = ["--prompt=The code for pin is 4817.\nRepeat each word with its code: pin.",
             "--device=cpu", "--window=8", "--sinks=2", "--max_new_tokens=5"]
    generate.main([*asked, "--evict=none"])
    answer, facts = capsys.readouterr().out.splitlines()
    assert answer == " pin 4817<|end|>" and facts.startswith("[22 prompt tokens, 22 kept")
    generate.main([*asked, "--budget=12"])  # control: too few keys
    answer, facts = capsys.readouterr().out.splitlines()
    assert "4817" not in answer and facts.startswith("[22 prompt tokens, 12 kept")


def test_generate_names_the_models_of_a_run(finished):
    """Control: the model of one of them answers."""
    out = finished[0]
    with pytest.raises(SystemExit, match=f"^error: {out} is a run's folder: use "
                       f"--model={out}/model or {out}/best$"):
        generate.main(["--prompt=x", "--device=cpu", f"--model={out}"])
    generate.main(["--prompt=x", "--device=cpu", f"--model={out}/best", "--max_new_tokens=1"])


def test_generate_hands_arguments_to_the_template(tmp_path, capsys):
    """And what the system says, before the prompt."""
    folder = tmp_path / "model"
    shutil.copytree(os.path.join(ROOT, "data", "tiny"), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if not short %} code code{% endif %}")
    asked = ["--prompt=The code for pen is 4817", "--device=cpu", f"--model={folder}",
             "--max_new_tokens=2", "--evict=none"]
    generate.main([*asked])
    assert "[10 prompt tokens" in capsys.readouterr().out
    generate.main([*asked, '--template={"short": true}'])
    assert "[8 prompt tokens" in capsys.readouterr().out
    generate.main([*asked, "--system=code code "])
    assert "[15 prompt tokens" in capsys.readouterr().out


def test_draw_names_a_picture(tmp_path):
    for out in ("", "x", "x.pdf", "/proc/x/y.png"):
        with pytest.raises(SystemExit, match="^error: [^\n]*$"):
            draw.main([f"--out={out}"])


def test_the_settings_are_json():
    """--key=value can say every default again."""
    argv = [f"--{key}={value}" for key, value in train.DEFAULTS.items()]
    assert configure(train.DEFAULTS, argv) == train.DEFAULTS
    assert json.loads(json.dumps(train.DEFAULTS)) == train.DEFAULTS


def test_messages_are_short_however_long_the_value(tmp_path):
    """In an option, its key, a file's name and a file; a path of 200 characters is shown whole."""
    long, file = "x" * 5000, tmp_path / "mine.py"
    for line in (f"evict = {long!r}", f"lr = {long!r}", f"lr: {long!r}", f"{long} = 1",
                 f"{long}: 1", f"lr: {'-' * 500}1", f"task = {long!r}", f"raise OSError({long!r})"):
        file.write_text(line)
        for argv in ([str(file)], [f"--{line.replace(' = ', '=')}"], [long]):
            with pytest.raises(ValueError) as e:
                train.settings(argv)
            assert 0 < len(str(e.value)) < 1000
    with pytest.raises(ValueError, match="^" + "y" * 200 + ".py: no such config file"):
        train.settings(["y" * 200 + ".py"])


def test_whatever_a_config_file_raises_is_its_fault(tmp_path, ctrl_c):
    with pytest.raises(ValueError, match="some.py: CancelledError$"):
        read(tmp_path, "import asyncio\nraise asyncio.CancelledError")
    with pytest.raises(KeyboardInterrupt):  # the control: somebody's Ctrl-C
        read(tmp_path, "raise KeyboardInterrupt")
