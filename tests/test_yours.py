"""docs/yours.md: its files are made, its commands run and print what stands below them. The page's
comment says how."""
import fnmatch
import json
import os
import re
import runpy
import shlex
import shutil
import sys

import pytest

from conftest import ROOT, Forked

PAGE = os.path.join(ROOT, "docs", "yours.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# appended to each command of train.py
SMALL = ["--steps=2", "--prompts=2", "--group=4", "--eval_problems=2", "--eval_final=2",
         "--eval_every=2", "--eval_batch=2", "--save_every=9", "--max_new_tokens=5",
         "--device=cpu"]
OF_THE_HUB = ("config/gsm8k.py", "config/smollm2.py")  # config files that name a model there
CHAT = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")


def sections():
    with open(PAGE, encoding="utf-8") as f:
        _, *parts = re.split(r"^## ", f.read(), flags=re.M)
    return {part.split("\n")[0]: part for part in parts}


def blocks(text):
    """-> (language, content, the last name in backquotes in the line above) of each block"""
    for m in BLOCK.finditer(text):
        above = text[:m.start()].rstrip().rpartition("\n")[2]
        yield m[1], m[2], (re.findall(r"`([^`]+)`", above) or [None])[-1]


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


def run(folder, line):
    """A command of a sh block. -> exit code, what it printed"""
    python, *words = shlex.split(line, comments=True)
    assert python == "python", f"{line!r}: commands of this page begin with python"
    if words[0] == "train.py":
        words += SMALL
    if any(word in OF_THE_HUB for word in words):
        words.append(f"--model={folder}/model")
    words = [re.sub("^--model=[A-Z].*", f"--model={folder}/model", word) for word in words]
    printed = os.path.join(folder, "printed.txt")
    start = os.path.getsize(printed) if os.path.exists(printed) else 0
    code = Forked(printed, run_here, str(folder), words).wait()
    with open(printed, encoding="utf-8") as f:
        return code, f.read()[start:]


def prepare(folder):
    """What the page takes to be there: config, data/tiny, a model with a chat template, GSM8K."""
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


@pytest.mark.parametrize("name", sections())
def test_the_page_runs(name, tmp_path):
    prepare(tmp_path)
    found = list(blocks(sections()[name]))
    printed = ""
    for i, (language, content, file) in enumerate(found):
        if language == "":
            assert printed, "a block without language stands below no sh block"
            assert not missing(content, printed), printed
        elif language == "sh":
            said = found[i + 1][1] if i + 1 < len(found) and not found[i + 1][0] else ""
            fails = re.search("^error:", said, re.M) is not None
            printed, (_, *lines) = "", re.split("^(?=python )", content, flags=re.M)
            for n, line in enumerate(lines, 1):
                code, text = run(tmp_path, line)
                printed += text
                assert (code != 0) == (fails and n == len(lines)), f"{line}\n{text}"
        elif language != "text":
            assert language in ("python", "jsonl", "jinja") and file, f"{language!r} block: {file}"
            (tmp_path / file).write_text(content)


def test_a_line_that_is_not_printed_is_found():
    """Control."""
    printed = "step 0 | reward 0.5 | 1 s\nmine.jsonl: 20 [held] out"
    assert not missing("step 0 | reward ... s\nmine.jsonl: ... [held] out", printed)
    assert missing("step 0 | reward\nmine", printed) == ["step 0 | reward", "mine"]
    assert missing("mine.jsonl: 21 ...", printed) == ["mine.jsonl: 21 ..."]


def test_problems_as_long_as_real_ones_need_the_tokens_that_the_page_names(tmp_path):
    """Control of the command for GSM8K."""
    prepare(tmp_path)
    code, text = run(tmp_path, "python train.py config/gsm8k.py --task=gsm8k:gsm8k --shots=2")
    assert code == 1 and "are longer than prompt_tokens=320" in text


def test_a_command_that_fails_is_found(tmp_path):
    prepare(tmp_path)
    code, text = run(tmp_path, "python train.py --reward=nobodys")
    assert code == 1 and text.startswith("error: unknown reward 'nobodys'")
