"""What one watches of a run: columns of its log, texts of evaluations, a terminal's last line."""
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

import pytest
import torch

import train
from conftest import FAST, ROOT, Forked, share_of_digits, train_here
from experiments import logs
from support.screen import LAST, one_line_errors, progress, say, tell


def rows_of(out):
    with open(os.path.join(out, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


# the log

def documented():
    """{column: (where, meaning)} of the table of docs/yours.md."""
    with open(os.path.join(ROOT, "docs", "yours.md")) as f:
        section = f.read().split("\n## Watching\n")[1].split("\n## ")[0]
    found = {}
    for names, where, meaning in re.findall(r"^\| (`.*?) \| (\w+) \| (.*) \|$", section, re.M):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found
            found[name] = where, meaning
    return found


SETTINGS = [[], ["config/tis.py"], ["config/dpo.py", "--temperature=3"], ["config/ppo.py"],
            ["--ref_kl=0.1"], ["--reward=named:score"]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{kind: names} of the columns that any of SETTINGS, or a GPU, writes."""
    found = dict(step=set(), eval=set())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.tasks.reward", share_of_digits)
        patch.chdir(ROOT)
        named = tmp_path_factory.mktemp("named")
        (named / "named.py").write_text(
            "def score(row, text, tokens):\n    return dict(reward=0, NAME=1)\n")
        patch.syspath_prepend(named)
        for i, more in enumerate(SETTINGS):
            out = tmp_path_factory.mktemp("columns") / str(i)
            train_here(*more, "--steps=2", "--eval_every=9", f"--out_dir={out}")
            for row in rows_of(out):
                found[row["kind"]] |= row.keys()
        more, = (more for more in SETTINGS if any("named" in x for x in more))
        out = tmp_path_factory.mktemp("columns") / "again"
        for args in (["--steps=1"], ["--steps=2", "--resume=True"]):
            train_here(*more, *args, "--eval_every=9", f"--out_dir={out}")
            with open(named / "named.py", "a") as f:
                f.write("# another\n")
        for row in rows_of(out):
            found[row["kind"]] |= row.keys()
        found["eval"].add("changed")  # where an evaluation comes first: tests/test_rewards.py
        rewards = torch.ones(1, 2).as_subclass(OnACard)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 2e9)
        found["step"] |= train.facts(Nothing, rewards, {}).keys()
    return found


class OnACard(torch.Tensor):
    is_cuda = True


class Nothing:
    """What train.facts asks of a rollout."""
    stopped, lengths, kv = torch.ones(1, 2), torch.ones(1, 2), {}


def test_every_column_is_documented(written):
    """And nothing that no setting writes, each in the kind of row where it is. The control: a
    single run writes less than all settings do."""
    table = documented()
    kinds = {name: {kind for kind in written if name in written[kind]}
             for name in written["step"] | written["eval"]}
    said = {name: {"step", "eval"} if where == "both" else {where}
            for name, (where, _) in table.items()}
    assert said == kinds
    assert all(meaning.strip() for _, meaning in table.values())
    assert {"value_loss", "margin", "rejected", "ref_kl", "peak_gb", "texts"} <= said.keys()


def test_the_table_asks_for_every_setting(finished):
    alone = set().union(*(row.keys() for row in rows_of(finished[0])))
    assert alone < documented().keys()
    assert documented().keys() - alone == {
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

    found = train.side_by_side([(problem, "a", 0.5)] * 6, [(problem, "b", 1.0)] * 6)
    assert len(found) == 4 and found[0] == dict(
        question="x" * 500, answer="7", compressed="a", reward_compressed=0.5, dense="b",
        reward_dense=1.0)


def test_logs_are_read_with_and_without_texts(finished, tmp_path):
    """`compact` drops them and keeps the rest; a log from before there were any reads the same."""
    path, old = os.path.join(finished[0], "log.jsonl"), tmp_path / "old.jsonl"
    rows = rows_of(finished[0])
    old.write_text("".join(json.dumps({k: x for k, x in row.items() if k != "texts"}) + "\n"
                           for row in rows))
    new, before = logs.compact(logs.read(path)), logs.compact(logs.read(str(old)))
    assert new == before and logs.ended(new)
    assert not any("texts" in row for row in new)
    assert sum("texts" in row for row in logs.read(path)) == 3  # the control
    assert logs.compact(new) == new


def test_step_rows_of_an_empty_rollout(tmp_path):
    """A DPO step whose groups all earned the same learns nothing, and says what others say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.tasks.reward", lambda problem, text: 1.0)
        train_here(os.path.join(ROOT, "config", "dpo.py"), "--steps=1", "--eval_every=9",
                   f"--out_dir={tmp_path / 'out'}")
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
        """Its lines, each as wide as it was written, the last one where the cursor is."""
        lines, line, at = [], [], 0
        for c in self.data.decode():
            if c == "\n":
                lines.append("".join(line).rstrip())
                line, at = [], 0
            elif c == "\r":
                at = 0
            else:
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


STEP = "step   12 | reward 0.168 | loss +0.0081 kl 0.0808 | gap 5.0e-07 max 2.8e-05 | accept 0.758"


@pytest.mark.parametrize("errors", ["terminal", "file"])
def test_a_terminal_has_one_line_for_steps(terminal, errors, monkeypatch):
    """They replace each other, with what goes on now; facts stay. Whatever errors lead to."""
    there = terminal.stream if errors == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", there)
    tell("a fact")
    say("step 12: rollout")
    progress(STEP, end="eta 3.1 min")
    say("update 1/1, micro-batch 1/2")
    say("eval")
    tell("eval   13 | held-out reward")
    say("step 13: rollout")
    progress(STEP.replace("12", "13"), end="eta 3.0 min")
    LAST.leave()
    tell("error: x", there)
    terminal.close()
    lines = terminal.screen()
    assert lines[:2] == ["a fact", "eval   13 | held-out reward"]
    assert lines[2] == (STEP.replace("12", "13")[:79 - 14] + " | eta 3.0 min")
    if errors == "terminal":
        assert lines[3:] == ["error: x", ""]
    else:
        assert lines[3:] == [""] and there.getvalue() == "error: x\n"
    written = terminal.data.decode()
    assert "| eta 3.1 min | update 1/1, micro-batch 1/2\r" in written
    assert written.count("step   12 | rew") == 4  # alone, twice with what goes on, after the fact
    assert all(len(part) <= 79 for part in re.split("[\r\n]+", written))


def test_a_terminal_that_becomes_narrow(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    for width in (80, 40, 12, 200):
        terminal.resize(width)
        before = len(terminal.data)
        progress(STEP, end="eta 3.1 min")
        say("update 1/1, micro-batch 1/2")
        time.sleep(0.05)
        drawn = terminal.data[before:].decode().split("\r")[1:]
        assert [len(part) for part in drawn] == [width - 1] * 2
        assert drawn[0].startswith("step   12"[:(width - 1) // 3])
    assert drawn[1].rstrip() == f"{STEP} | eta 3.1 min | update 1/1, micro-batch 1/2"
    tell("")
    terminal.close()
    assert terminal.screen() == ["", ""]


def test_elsewhere_lines_are_plain(terminal, monkeypatch):
    """A pipe or a file gets what it always got, whatever goes on beside it on errors."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    for errors in (io.StringIO(), terminal.stream):
        monkeypatch.setattr(sys, "stderr", errors)
        say("step 12: rollout")
        progress(STEP, end="eta 3.1 min")
    assert file.getvalue() == 2 * f"{STEP} | eta 3.1 min\n"
    terminal.close()
    assert terminal.screen() == [""] and b"step 12: rollout" in terminal.data
    pretends = io.StringIO()  # the control
    pretends.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", pretends)
    progress(STEP, end="eta 3.1 min")
    assert pretends.getvalue() == f"\r{STEP[:65]} | eta 3.1 min"


def test_an_error_leaves_the_terminal_alone():
    """Its control characters are shown, not obeyed; letters of any script stay."""
    with pytest.raises(SystemExit) as e, one_line_errors(ValueError):
        raise ValueError("a\x1b[2J\x07\r\nb é 日")
    assert str(e.value) == r"error: a\x1b[2J\x07 b é 日"


@pytest.mark.parametrize("e", [ValueError("x"), KeyboardInterrupt(), RuntimeError("x")])
def test_what_ends_a_program_begins_on_a_fresh_line(e, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    with pytest.raises((SystemExit, RuntimeError)), one_line_errors(ValueError):
        say("going on")
        raise e
    say("")
    terminal.close()
    assert terminal.screen() == ["going on", ""]


def interrupted(signals, *args):
    """train.main, with signals in its second rollout, after two batches of evaluation."""
    calls, generate = [], train.generate

    def cut(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return generate(*args, **kwargs)

    train.generate = cut  # of a process of its own
    train.main([*FAST, *args])


def test_a_run_on_a_terminal(finished, tmp_path):
    """Facts and evaluations are the lines that a pipe gets, steps take one; Ctrl-C lets the run
    save and ends on a fresh line, a second one at once."""
    facts = [line for line in finished[1].splitlines() if not line.startswith("step ")]
    out = str(tmp_path / "out")
    terminal = Terminal(300)
    assert Forked(terminal.name, train.main, [*FAST, f"--out_dir={out}"]).wait() == 0
    terminal.close()
    lines = terminal.screen()
    assert lines == [*(line.replace(finished[0], out) for line in facts), ""]
    drawn = [part for part in terminal.data.decode().split("\r") if part.startswith("step    3 |")]
    assert any(part.rstrip().endswith("eval (dense cache) 0/4") for part in drawn)

    for signals in (1, 2):
        terminal, out = Terminal(40), str(tmp_path / f"cut{signals}")
        assert Forked(terminal.name, interrupted, signals, f"--out_dir={out}").wait() == 130
        terminal.close()
        *lines, cursor = terminal.screen()
        assert cursor == "" and any(line.startswith("SIGINT: finishing") for line in lines)
        assert lines[-1].startswith("saved in ") == (signals == 1)
