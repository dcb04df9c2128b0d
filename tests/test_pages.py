"""The pages of docs/ for those who run it: their files are made, their commands run and print what
stands below them.

A page is run from top to bottom in one folder. python and jsonl blocks become files, of the last
name in backquotes in the line above. sh blocks are run command by command, train.py with few steps;
models of the hub, also of a config file, are the embedded checkpoint with a chat template; gsm8k/
has two files in the form of GSM8K, their problems as long; torchrun starts two ranks, whatever it
is told. A block without a language says lines that the sh block above it prints, ... standing for
anything; where one begins with "error:", the last command of that block must fail, all others must
end well. A text block right below an sh block is what one machine printed: the same lines with
other numbers. All other text blocks are read: what they say to train.py must be settings."""
import fnmatch
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from itertools import zip_longest

import pytest
from torch.distributed.run import parse_args

import train
from conftest import ROOT, Forked, Ranks
from experiments import logs
from run.settings import MAY_CHANGE

PAGES = "problems models watching trouble memory lora several-gpus reproduce".split()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# appended to each command of train.py
SMALL = ["--steps=2", "--prompts=2", "--group=4", "--eval_problems=2", "--eval_final=2",
         "--eval_every=2", "--eval_batch=2", "--save_every=9", "--max_new_tokens=5",
         "--device=cpu"]
OF_THE_HUB = ("config/gsm8k.py", "config/qwen2.5.py", "config/smollm2.py")
NEEDS = {"experiments.plot": "matplotlib", "--tracker=tensorboard": "tensorboard",
         "with_peft.py": "peft"}  # words of commands that are only read where this is missing
CHAT = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")


def page(name):
    with open(os.path.join(ROOT, "docs", f"{name}.md"), encoding="utf-8") as f:
        return f.read()


def run_here(folder, words):
    """`python words` in a folder, of which words[0] is a file or -m."""
    os.chdir(folder)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    script = words[0] if os.path.exists(words[0]) else os.path.join(ROOT, words[0])
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def as_one_rank(folder, args):
    os.chdir(folder)
    train.main(args)


def run(folder, line):
    """A command of a sh block. -> exit code, what it printed"""
    program, *words = shlex.split(line, comments=True)
    ranks = program == "torchrun"
    if ranks:
        asked = parse_args(words)
        assert asked.standalone and int(asked.nproc_per_node) > 1
        words = [asked.training_script, *asked.training_script_args]
    else:
        assert program == "python", f"{line!r}: commands begin with python or torchrun"
    if words[0] == "train.py":
        words += SMALL
    if any(word in OF_THE_HUB for word in words):
        words.append(f"--model={folder}/model")
    words = [re.sub("^--model=[A-Z].*", f"--model={folder}/model", word) for word in words]
    if ranks:
        assert words[0] == "train.py"
        codes, texts = Ranks(2, folder, as_one_rank, (str(folder), words[1:])).wait()
        return max(codes), texts[0]
    printed = os.path.join(folder, "printed.txt")
    start = os.path.getsize(printed) if os.path.exists(printed) else 0
    code = Forked(printed, run_here, str(folder), words).wait()
    with open(printed, encoding="utf-8") as f:
        return code, f.read()[start:]


def prepare(folder):
    """What a page takes to be there: config, data/tiny, a model with a chat template, GSM8K, and
    logs."""
    shutil.copytree(os.path.join(ROOT, "results", "main"), folder / "results" / "main")
    os.symlink(os.path.join(ROOT, "config"), folder / "config")
    os.makedirs(folder / "data")
    os.symlink(os.path.join(ROOT, "data", "tiny"), folder / "data" / "tiny")
    shutil.copytree(os.path.join(ROOT, "data", "tiny"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    os.makedirs(folder / "gsm8k")
    for name, first in (("train", 0), ("test", 100)):
        rows = [worked_problem(i) for i in range(first, first + 12)]
        (folder / "gsm8k" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def worked_problem(i):
    """About as long as one of GSM8K, whose median question has 42 words and its answer 47 in three
    steps; the longest have 183 and 216 in nine, one of ten here 117 and 101. In words that the
    embedded tokenizer knows: it would need twice the tokens of others."""
    steps, long = 3, i % 10 == 9
    if long:
        steps = 9
    story, work, coins = [], [], i
    for n in range(steps):
        before, coins = coins, coins + n
        story.append(f"On Sunday {n} coins stayed at the market until evening.")
        work.append(f"After the storm the bus was closed and {before}+{n}="
                    f"<<{before}+{n}={coins}>>{coins} coins stayed.")
        if long and n % 2:
            story.append("The winter was mild.")
    question = f"In the spring {i} coins stayed. {' '.join(story)} How many coins at last?"
    return dict(question=question, answer="\n".join([*work, f"#### {coins}"]))


def missing(said, printed):
    """Lines of `said`, ... standing for anything, that were not printed."""
    def pattern(line):
        parts = [re.sub(r"([\[*?])", r"[\1]", part) for part in line.split("...")]
        return "*".join(parts)

    lines = printed.splitlines()
    return [line for line in said.splitlines()
            if not any(fnmatch.fnmatchcase(got, pattern(line)) for got in lines)]


def other_numbers(text):
    """Lines without their numbers, and without the verdict that hangs on one."""
    return {" ".join(re.sub(r"[-+]?\d[\d.,]*|no help", "", line).split())
            for line in text.splitlines()}


def run_block(folder, content, fails):
    """The commands of a sh block, of which the last must fail if `fails`. -> what they printed,
    None where a package is missing"""
    printed, (_, *lines) = "", re.split("^(?=python |torchrun )", content, flags=re.M)
    for n, line in enumerate(lines, 1):
        if any(word in line and not importlib.util.find_spec(name)
               for word, name in NEEDS.items()):
            return None
        code, text = run(folder, line)
        printed += text
        assert (code != 0) == (fails and n == len(lines)), f"{line}\n{text}"
    return printed


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    prepare(tmp_path)
    text, printed, before = page(name), "", ""
    found = list(BLOCK.finditer(text))
    assert "sh" in [block[1] for block in found[:3]], "a page begins with a command"
    for block, following in zip_longest(found, found[1:]):
        language, content = block.groups()
        if language == "sh":
            said = following[2] if following and not following[1] else ""
            fails = re.search("^error:", said, re.M) is not None
            printed = run_block(tmp_path, content, fails)
        elif language == "":
            assert printed != "", "a block without language stands below no sh block"
            assert printed is None or not missing(content, printed), printed
        elif language == "text" and before == "sh":
            assert other_numbers(content) <= other_numbers(printed), printed
        elif language == "text":  # not run
            for line in re.findall(r"^(?:python|torchrun .*) train\.py(.*)", content, re.M):
                train.settings(shlex.split(line, comments=True))
        else:
            above = text[:block.start()].rstrip().rpartition("\n")[2]
            file = re.findall(r"`([^`]+)`", above)[-1]
            assert language in ("python", "jsonl")
            (tmp_path / file).write_text(content)
        before = language


def test_a_line_that_is_not_printed_is_found():
    """Control."""
    printed = "step 0 | reward 0.5 | 1 s\nmine.jsonl: 20 [held] out"
    assert not missing("step 0 | reward ... s\nmine.jsonl: ... [held] out", printed)
    assert missing("step 0 | reward\nmine.jsonl: 21 ...", printed) == [
        "step 0 | reward", "mine.jsonl: 21 ..."]
    assert other_numbers("a=8  0.4 -0.1 no help") == other_numbers("a=16  1,000.5 +0.1")
    assert other_numbers("a=8  0.4") != other_numbers("b=8  0.4")


def test_a_command_that_fails_is_found(tmp_path):
    """Control of the command for GSM8K, whose problems here are as long as real ones."""
    prepare(tmp_path)
    code, text = run(tmp_path, "python train.py config/gsm8k.py --task=gsm8k:gsm8k --shots=2")
    assert code == 1 and "are longer than prompt_tokens=320" in text


# numbers that stand on these pages, and their logs; those of lora.md, several-gpus.md and memory.md
# are in test_lora.py, test_parallel.py and test_readme.py

def kept(name):
    with open(os.path.join(ROOT, "results", name), encoding="utf-8") as f:
        return f.read()


def test_the_default_run_is_that_of_its_logs():
    said = " ".join(page("reproduce").split())
    for start, name in (("ended at", "two-threads"), ("EPYC it ended at", "two-threads-epyc"),
                        ("With one thread on the Xeon it ended at", "smd-0")):
        last = json.loads(kept(f"default-cpu/{name}.jsonl").splitlines()[-1])
        ends = "{eval_compressed:.3f} / {eval_dense:.3f}".format(**last)
        assert re.search(rf"{start} {ends}.*?`results/default-cpu/{name}.jsonl`", said)
    times = kept("times.log").split("60 steps, two threads, two idle cores")[1]
    (idle, busy), text = re.findall(r"real\s+(\d+m[\d.]+)s", times), times.split("five seeds")[1]
    idle, busy = (60 * int(x.split("m")[0]) + float(x.split("m")[1]) for x in (idle, busy))
    assert f"it took {idle:.0f} seconds" in said and f"it took {busy / 60:.0f} minutes" in said
    minutes = {arm: [float(x) for x in re.findall(rf"^{arm} .* after ([\d.]+) min", text, re.M)]
               for arm in ("smd", "naive")}
    assert all(len(x) == 5 for x in minutes.values())
    assert ("took {} to {} minutes each, those of naive {} to {} (").format(
        *(f(minutes[arm]) for arm in ("smd", "naive") for f in (min, max))) in said
    first = re.match(r"round 1 (\d+) s", kept("tune/time.txt"))[1]
    assert f"83 runs of 150 steps, took {first} seconds on two cards" in said


def test_the_seeds_of_lora_are_those_of_their_logs():
    arm = logs.load(os.path.join(ROOT, "results", "lora"))["smd lora_rank=8 lr=3e-3"]
    seeds = logs.results(arm, "eval_compressed")
    assert f"({', '.join(f'{seeds[i]:.3f}' for i in range(3))})" in page("lora") and len(seeds) == 3


def test_what_a_resume_may_change():
    said, = re.findall(r"These settings may change: (.*?)\.", page("trouble"))
    assert {*re.findall(r"`(\w+)`", said)} == MAY_CHANGE - {"resume", "overwrite", "dry_run"}


def test_dtypes_are_those_of_the_log():
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in page("reproduce").splitlines() if re.match(r"\| \d\dM \|", line)]
    found = re.findall(r"^([\d.]+)M \| --prompt_tokens=(\d+) \| float32 ([\d.]+)\+([\d.]+) s.*"
                       r"bfloat16 ([\d.]+)\+([\d.]+) s", kept("dtype-h100.log"), re.M)
    assert len(rows) == len(found) == 4
    for row, (size, prompt, *seconds) in zip(rows, found):
        a, b, c, d = (f"{float(x):.2f}" for x in seconds)
        assert row[0] == f"{float(size):.0f}M" and row[1].startswith(f"{int(prompt):,}, ")
        assert row[2:] == [f"{a} + {b}", f"{c} + {d}"]


def test_what_is_compared_is_that_of_its_logs():
    text = kept("tests.txt")
    toys = re.findall(r"^[\w-]+: logits std .*, largest difference (\S+)$", text, re.M)
    values = [f"{max(map(float, toys)):.1e}"]
    values += re.findall(r"^(?:smollm2|qwen): largest logit difference (\S+) of", text, re.M)
    values += [f"{n} of 5,000 strings" for n in
               re.findall(r"^(?:smollm2|qwen): (\d+) of 5000 strings", text, re.M)]
    values += [f"{x} relative" for x in
               re.search(r"fp64: values (\S+), gradients (\S+)", text).groups()]
    for dtype in ("float32", "bfloat16"):
        lines = re.findall(rf"^triton {dtype} .* \d+:\d+ +\d+ (.*)\|", kept("shadow_attn-h100.txt"),
                           re.M)
        values.append(f"{max(float(x) for line in lines for x in line.split()):.1e} relative")
    table = page("reproduce").split("| what is compared |")[1].split("\n\n")[0]
    said = [line.strip("|").split("|")[1].strip() for line in table.splitlines()[2:]]
    assert said == [x.replace("e-0", "e-") for x in values] and len(said) == 9
