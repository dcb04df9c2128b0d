"""support/apart.py: what a program from outside may take, and that nothing of it is left."""
import gc
import os
import signal
import time

import pytest

from conftest import alive
from support import apart
from support.apart import Apart


class Program:
    """What a file from outside might do."""
    names = {"a", "b"}

    def __init__(self, how="well"):
        if how == "fails":
            raise ValueError("cannot\nbe read")
        if how == "hangs":
            while True:
                pass

    def add(self, x, y):
        return x + y

    def fails(self):
        raise KeyError

    def hangs(self):
        while True:
            pass

    def grows(self):
        return len("x" * 10 ** 10)

    def grows_slowly(self):
        whole = []
        while True:
            whole.append("x" * 10 ** 6 + str(len(whole)))

    def breaks(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def pid(self):
        return os.getpid()

    def waits(self):
        time.sleep(0.5)
        return "done"


def test_answers():
    """Of one child, which is asked again after it was asked wrongly."""
    program = Apart(Program, what="x")
    assert program.ask("add", 2, 3) == 5
    assert program.ask("add", "\ud800\u00e9", "b" * 10**7)[:3] == "\ud800\u00e9b"
    assert sorted(program.ask("names")) == ["a", "b"]
    pid = program.ask("pid")
    with pytest.raises(ValueError, match="^KeyError$"):
        program.ask("fails")
    assert program.ask("pid") == pid != os.getpid()
    with pytest.raises(ValueError, match="^cannot be read$"):
        Apart(Program, "fails", what="x")


@pytest.mark.parametrize("name, says", [
    ("hangs", "x takes more than 0.3 s of computing"), ("grows", "MemoryError"),
    ("grows_slowly", "MemoryError|x takes more than 1 GB of memory, or broke"),
    ("breaks", r"x takes more than 1 GB of memory, or broke \(-11\)")])
def test_limits(name, says, monkeypatch):
    """Each ends in one line, and the next question finds a new child."""
    monkeypatch.setattr(apart, "SECONDS", 0.3 if name == "hangs" else 20)
    program = Apart(Program, what="x")
    with pytest.raises(ValueError, match=f"^({says})") as e:
        program.ask(name)
    assert "\n" not in str(e.value)
    assert program.ask("add", 1, 2) == 3
    if name == "hangs":
        with pytest.raises(ValueError, match=says):
            Apart(Program, "hangs", what="x")
        assert program.ask("waits") == "done"  # the control: of computing, not of waiting


def test_no_child_is_left():
    program = Apart(Program, what="x")
    pid = program.ask("pid")
    assert alive(pid)
    del program
    gc.collect()
    assert not alive(pid)


def test_no_child_outlives_its_parent(tmp_path):
    """Killed by SIGKILL."""
    parent = os.fork()
    if not parent:
        try:
            (tmp_path / "pid").write_text(str(Apart(Program, what="x").ask("pid")))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    pid, until = int((tmp_path / "pid").read_text()), time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def test_after_a_fork_each_has_its_own():
    program = Apart(Program, what="x")
    mine = program.ask("pid")
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, str(program.ask("pid")).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 100)) != mine == program.ask("pid")
    os.close(read)
    os.close(write)
