"""What one watches of a run: columns of its log, texts of evaluations, what stays on a terminal."""
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
import time
from statistics import median
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import FAST, ROOT, Forked, at_call, read_checkpoint, share_of_digits, train_here
from experiments import logs
from run.evaluate import side_by_side
from run.report import facts, report, show
from support.screen import LAST, one_line_errors, progress, say, tell, wide


def rows_of(out):
    with open(os.path.join(out, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


# the log

def documented():
    """{column: (where, meaning)} of the table of docs/watching.md."""
    with open(os.path.join(ROOT, "docs", "watching.md")) as f:
        section = f.read().split("\n## The columns of the log\n")[1].split("\n## ")[0]
    found = {}
    for names, where, meaning in re.findall(r"^\| (`.*?) \| (\w+) \| (.*) \|$", section, re.M):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found
            found[name] = where, meaning
    return found


SETTINGS = [["config/tis.py", "--ref_kl=0.1"], ["config/dpo.py", "--temperature=3"],
            ["config/ppo.py"]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{kind: names} of the columns that any of SETTINGS, or a GPU, writes."""
    found = dict(step=set(), eval={"changed"})  # where one comes first: tests/test_rewards.py
    folder = tmp_path_factory.mktemp("columns")
    named = folder / "named.py"
    named.write_text("def reward(row, text, tokens):\n    return dict(reward=0, NAME=1)\n")
    own = ["--reward=named:reward", "--eval_every=9"]
    asked = [*enumerate(SETTINGS), (9, own), (9, [*own, "--resume=True", "--steps=2"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.tasks.reward", share_of_digits)
        patch.chdir(ROOT)
        patch.syspath_prepend(folder)
        for number, args in asked:
            out = folder / str(number)
            train_here("--steps=1", "--eval_final=2", *args, f"--out_dir={out}")
            named.write_text(named.read_text() + "# another\n")
            for row in rows_of(out):
                found[row["kind"]] |= row.keys()
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 2e9)
        found["step"] |= facts(Nothing, {}).keys()
    return found


class OnACard(torch.Tensor):
    is_cuda = True


class Nothing:
    """What `facts` asks of a rollout."""
    stopped, lengths, kv = torch.ones(1, 2), torch.ones(1, 2), {}
    rewards = torch.ones(1, 2).as_subclass(OnACard)


def test_every_column_is_documented(written, finished):
    """And nothing that no setting writes, each in the kind of row where it is. The control: a
    single run writes less than all settings do."""
    table = documented()
    kinds = {name: {kind for kind in written if name in written[kind]}
             for name in written["step"] | written["eval"]}
    said = {name: {"step", "eval"} if where == "both" else {where}
            for name, (where, _) in table.items()}
    assert said == kinds
    assert all(meaning.strip() for _, meaning in table.values())
    alone = set().union(*(row.keys() for row in rows_of(finished[0])))
    assert alone < said.keys() and said.keys() - alone == {
        "changed", "weight", "rejected", "value", "value_loss", "pairs", "margin", "ref_kl",
        "peak_gb", "reward_NAME", "eval_compressed_NAME", "eval_dense_NAME"}


def test_evaluations_carry_texts(finished):
    """Those of the same first problems each time, as samples.txt has them, under either cache."""
    with open(os.path.join(finished[0], "samples.txt")) as f:
        samples = f.read()
    evals = [row for row in rows_of(finished[0]) if row["kind"] == "eval"]
    asked = [[(t["question"], t["answer"]) for t in e["texts"]] for e in evals]
    assert asked[0] == asked[1] == asked[2] and len(asked[0]) == 4
    assert asked[0][0] == ("Repeat each word with its code: jewel.", "jewel 9253")
    for e in evals:
        for name in ("compressed", "dense"):
            part = samples.split(f"--- eval {e['step']}, {name} cache\n")[1].split("---")[0]
            assert part == "".join(
                f">>> {t[name]!r} (answer {t['answer']}) reward {t[f'reward_{name}']:.2f}\n"
                for t in e["texts"])
            earned = [t[f"reward_{name}"] for t in e["texts"]]  # all four problems of this run
            assert sum(earned) / 4 == e[f"eval_{name}"]
    assert any(t["compressed"] != t["dense"] for t in evals[0]["texts"])  # the control


def test_long_questions_are_cut():
    class problem:
        text, answer = "facts\n" + "x" * 600 + "\n \n", "7"

    found = side_by_side([(problem, "a", 0.5)] * 6, [(problem, "b", 1.0)] * 6)
    assert len(found) == 4 and found[0] == dict(
        question="x" * 500, answer="7", compressed="a", reward_compressed=0.5, dense="b",
        reward_dense=1.0)


def test_step_rows_of_an_empty_rollout(tmp_path):
    """A DPO step whose groups all earned the same learns nothing, and says what others say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.tasks.reward", lambda problem, text: 1.0)
        train_here("--objective=dpo", "--steps=1", f"--out_dir={tmp_path / 'out'}")
    row, = [row for row in rows_of(tmp_path / "out") if row["kind"] == "step"]
    assert row["pairs"] == 0 and row["lr"] > 0 and row["length"] > 0 and row["tokens_per_s"] > 0


def test_the_soak_is_that_of_its_log():
    """2,000 steps neither grow nor slow down by 5 %, and docs/reproduce.md says by how much."""
    soak = os.path.join(ROOT, "results", "soak")
    log = logs.read(os.path.join(soak, "kv-0.jsonl"))
    assert logs.ended(log, 2000) and not logs.ended(log[:-1] + log[-2:], 2000)
    assert [r["step"] for r in log if "eval_dense" in r] == list(range(0, 2001, 100))
    seconds = [r["seconds"] for r in log if "reward" in r]
    early, late = median(seconds[200:700]), median(seconds[-500:])
    assert abs(late / early - 1) < 0.05
    with open(os.path.join(soak, "memory.log")) as f:
        samples = [line.split() for line in f if not line.startswith("#")]
    sizes = [(int(step), int(kib)) for step, kib, *_ in samples if int(step) >= 200]
    grown = max(kib for _, kib in sizes) / sizes[0][1] - 1
    assert grown < 0.05 and sizes[-1][0] > 1900
    with open(os.path.join(ROOT, "docs", "reproduce.md")) as f:
        said = " ".join(f.read().split())
    assert (f"from step {sizes[0][0]} on resident memory grew by {100 * grown:.1f} %, the median "
            f"step of the last 500 took {1000 * late:.1f} ms, of steps 200 to 700 "
            f"{1000 * early:.1f} ms") in said


# a terminal

class Terminal:
    """A pseudo-terminal and what would stand on its screen."""

    def __init__(self, width):
        self.master, slave = pty.openpty()
        self.name, self.data, self.width = os.ttyname(slave), b"", width
        self.resize(width)
        self.stream = os.fdopen(slave, "w")
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def resize(self, width):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def read(self):
        try:
            while more := os.read(self.master, 65536):
                self.data += more
        except OSError:  # the last one who wrote has closed it
            pass

    def close(self):
        self.stream.close()
        self.reader.join(10)
        os.close(self.master)

    def screen(self):
        """Its lines as a screen of this width shows them, the last one where the cursor is."""
        lines, line, at = [], [], 0
        for c in self.data.decode():
            if c == "\n" or at == self.width:
                lines.append("".join(line).rstrip())
                line, at = [], 0
            if c == "\r":
                at = 0
            elif c != "\n":
                assert c.isprintable()
                line[at:at + 1] = c
                at += 1
        return [*lines, "".join(line).rstrip()]


@pytest.fixture
def terminal():
    t = Terminal(80)
    yield t
    if not t.stream.closed:
        t.close()
    LAST.leave()


ROW = dict(reward=0.168, loss=0.0081, kl=0.0808, gap=5e-7, gap_max=2.8e-5, accept=0.758,
           accept_p05=0.02, entropy=0.5, clip_frac=0.0, truncated=0.8, equal=0.9, grad_norm=0.1,
           rollout_s=0.5, learn_s=1.2)
STEP = show(dict(ROW, step=12))
SHORT = "step   12 | reward 0.168 | gap 5.0e-07 | accept 0.758 | kl 0.0808 | eta 3.1 min"


@pytest.mark.parametrize("steps, every", [(4, 1), (40, 2), (60, 3), (200, 10), (2000, 10)])
def test_steps_that_stay_on_a_terminal(steps, every, terminal, monkeypatch):
    """About 20 of a run, more where it is long, each on one line of 80 columns with what tells
    most; the last one too. The others are replaced. Control: without any that stays."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    told, memory = [], {}
    for step in range(min(steps, 40)):
        run = SimpleNamespace(step=step, log=lambda kind, row: told.append(row), memory=memory,
                              minutes_left=lambda: 3.1)
        config = SimpleNamespace(steps=steps, save_every=10**6)
        rollout = SimpleNamespace(kv={}, prompts=[[]], select=None)
        if step not in (0, steps - 1):  # there are samples then
            say(f"step {step}: rollout")
            report(SimpleNamespace(run=run, config=config), None, rollout, dict(ROW, step=step))
    progress(STEP, end="eta 3.1 min", stays=False)
    tell("a fact")
    terminal.close()
    *lines, fact, cursor = terminal.screen()
    want = [step for step in range(1, min(steps - 1, 40)) if step % every == 0]
    assert lines == [SHORT.replace("step   12", f"step {step:4d}") for step in want]
    assert (fact, cursor) == ("a fact", "") and len(told) == min(steps - 2, 39)
    assert all(len(line) <= 79 for line in lines)


@pytest.mark.parametrize("errors", ["terminal", "file"])
def test_other_steps_share_a_line(terminal, errors, monkeypatch):
    """They replace each other, with what goes on now; facts stay. Whatever errors lead to."""
    there = terminal.stream if errors == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", there)
    tell("a fact")
    say("step 12: rollout")
    progress(STEP, end="eta 3.1 min", stays=False)
    say("update 1/1, micro-batch 1/2")
    say("eval")
    tell("eval   13 | held-out reward")
    say("step 13: rollout")
    progress(STEP.replace("12", "13"), end="eta 3.1 min", stays=False)
    LAST.leave()
    tell("error: x", there)
    terminal.close()
    lines = terminal.screen()
    assert lines[:3] == ["a fact", "eval   13 | held-out reward", SHORT.replace("12", "13")]
    if errors == "terminal":
        assert lines[3:] == ["error: x", ""]
    else:
        assert lines[3:] == [""] and there.getvalue() == "error: x\n"
    written = terminal.data.decode()
    assert "step   12 | reward 0.168 | eta 3.1 min | update 1/1, micro-batch 1/2" in written
    assert written.count("step   12 | rew") == 4  # alone, twice with what goes on, after the fact


@pytest.mark.parametrize("width", [80, 40, 12, 300])
def test_a_terminal_of_another_width(width, terminal, monkeypatch):
    """Whole columns are left out, nothing is wrapped; letters of some scripts take two. Control: a
    line that is told is wrapped."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    terminal.resize(width)
    terminal.width = width
    progress(STEP, end="eta 3.1 min", stays=False)
    say("update 1/1, micro-batch 1/2")
    time.sleep(0.05)
    drawn = terminal.data.decode().split("\r")[1:]
    assert [len(part) for part in drawn] == [width - 1] * 2
    assert drawn[0].startswith("step   12"[:width - 1])
    columns = f"{STEP} | eta 3.1 min | update 1/1, micro-batch 1/2".split(" | ")
    if width >= 80:
        assert set(drawn[1].strip().split(" | ")) <= set(columns)
    if width == 300:
        assert drawn[1].rstrip() == " | ".join(columns)
    say("日" * 200)
    assert wide(LAST.line(width - 1)) <= width - 1
    tell("")
    assert terminal.stream.write("x" * (width + 1))
    terminal.close()
    assert terminal.screen() == ["", "x" * width, "x"]


def test_elsewhere_lines_are_plain(terminal, monkeypatch):
    """A pipe or a file gets each step, whatever goes on beside it on errors."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    for errors in (io.StringIO(), terminal.stream):
        monkeypatch.setattr(sys, "stderr", errors)
        say("step 12: rollout")
        progress(STEP, end="eta 3.1 min", stays=False)
    assert file.getvalue() == 2 * f"{STEP} | eta 3.1 min\n"
    terminal.close()
    assert terminal.screen() == [""] and b"step 12: rollout" in terminal.data
    pretends = io.StringIO()  # the control
    pretends.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", pretends)
    progress(STEP, end="eta 3.1 min", stays=False)
    assert pretends.getvalue() == f"\r{SHORT}"


def test_control_characters_are_shown_not_obeyed(terminal, monkeypatch):
    """Whoever wrote them: in lines, in steps, in what goes on and in errors; letters of any script
    stay, and in a line breaks and tabs."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    wrong = "a\x1b]0;title\x07b\x9b2Jc\rd\x7f"
    right = r"a\x1b]0;title\x07b\x9b2Jc\rd\x7f"
    say(wrong)
    progress(f"step 1 | {wrong}", end=wrong)
    say("e \u00e9\u3042\n\x1b[2J")
    tell(f"{wrong}\n\te\u3042\u00e9\u00a0")
    LAST.leave()
    terminal.close()
    said = terminal.data.decode().replace("\r\n", "\n")
    assert "\x1b" not in said and "\x07" not in said and "\x9b" not in said
    assert "e \u00e9\u3042 \\x1b[2J" in said
    assert said.endswith(f"{right}\n\te\u3042\u00e9\u00a0\n")
    once = right.replace("c\\rd", "c d")  # a step is one line
    assert f"step 1 | {once} | {once}" in said
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    progress(wrong, end="x")
    assert sys.stdout.getvalue() == f"{once} | x\n"
    for text, says in (("a\x1b[2J\x07\r\nb é 日", r"error: a\x1b[2J\x07 b é 日"),
                       ("begin" + "x" * 9000 + "end", "error: beginx+ [.]{3} x+end")):
        with pytest.raises(SystemExit) as e, one_line_errors(ValueError):
            raise ValueError(text)
        assert str(e.value) == says or re.fullmatch(says, str(e.value))
        assert len(str(e.value)) < 2100  # both ends of a long one stay


@pytest.mark.parametrize("e", [ValueError("x"), KeyboardInterrupt(), RuntimeError("x")])
def test_what_ends_a_program_begins_on_a_fresh_line(e, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    with pytest.raises((SystemExit, RuntimeError)) as ended, one_line_errors(ValueError):
        say("going on")
        raise e
    assert (getattr(ended.value, "code", None) == 130) == isinstance(e, KeyboardInterrupt)
    say("")
    terminal.close()
    assert terminal.screen() == ["going on", ""]


def interrupted(signals, *args):
    """train.main, with signals in its second rollout, after two batches of evaluation."""
    at_call(4, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(signals)])
    train.main([*FAST, *args])


def test_a_run_on_a_terminal(finished, tmp_path):
    """The lines that a pipe gets, but for the clock; Ctrl-C lets the run save and ends on a fresh
    line, a second one at once."""
    def without_clock(line):
        return re.sub(r"\| \d+\.\d\+.*", "", line)

    out, terminal = str(tmp_path / "out"), Terminal(300)
    assert Forked(terminal.name, train.main, [*FAST, f"--out_dir={out}"]).wait() == 0
    terminal.close()
    *lines, cursor = map(without_clock, terminal.screen())
    want = [without_clock(line.replace(finished[0], out)) for line in finished[1].splitlines()]
    assert lines == want and cursor == "" and sum(line.startswith("step ") for line in want) == 4
    assert "eval (dense cache) 0/4" in terminal.data.decode()

    for signals in (1, 2):
        terminal, out = Terminal(40), str(tmp_path / f"cut{signals}")
        terminal.width = 300
        assert Forked(terminal.name, interrupted, signals, f"--out_dir={out}").wait() == 130
        terminal.close()
        *lines, cursor = terminal.screen()
        assert cursor == "" and any(line.startswith("SIGINT: finishing") for line in lines)
        assert lines[-1].startswith("saved in ") == (signals == 1)
        assert read_checkpoint(out)["step"] == 2 * (signals == 1)  # nothing more is saved else
