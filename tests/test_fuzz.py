"""
A bounded run of fuzz.py, and that it finds what it looks for.
"""
import json
import os
import random

import fuzz
import pytest

from support import hf_config


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return fuzz.Valid(str(tmp_path_factory.mktemp("fuzz")))


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_inputs_that_are_nearly_right(valid, kind):
    base, _, use = fuzz.KINDS[kind]
    with fuzz.as_before():  # the control: unchanged it is accepted
        use(fuzz.Case(random.Random(0), valid, base))
    counts, finds = fuzz.fuzz(valid, seed=0, kinds=[kind], cases=25)
    assert not finds, finds
    assert counts[kind]["refused"] + counts[kind]["accepted"] == 25
    assert counts[kind]["refused"] > 3


def nothing(case):
    """is changed"""


def raises(error):
    def use(case):
        raise error
    return use


def writes(case):
    open(case.path("new"), "w").close()
    raise ValueError(f"{case.folder} is refused")


def waits(case):
    os.mkfifo(case.path("fifo"))
    open(case.path("fifo"))


def does_not_work(case):
    assert 1 == 2, "does not work"


PLANTED = {
    "KeyError at": raises(KeyError("x")), "RecursionError at": raises(RecursionError()),
    "SystemExit at": raises(SystemExit(1)), "message of 0 ": raises(ValueError()),
    "message of 3 ": raises(ValueError("a\nb")), "message of 5000 ": raises(OSError("x" * 5000)),
    "message of 6 ": raises(ValueError("nobody")), "something was written": writes,
    "Hang at": waits, "does not work": does_not_work}


@pytest.mark.parametrize("says", PLANTED)
def test_each_sort_of_find(valid, says, monkeypatch):
    monkeypatch.setitem(fuzz.KINDS, "planted", ("own", nothing, PLANTED[says]))
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    counts, finds = fuzz.fuzz(valid, seed=0, kinds=["planted"], cases=1)
    (find, text), = finds.items()
    assert counts["planted"] == dict(refused=0, accepted=0, finds=1)
    assert says in f"{find}: {text}" and "--seed=0 --kind='planted' --case=0" in text
    monkeypatch.setitem(fuzz.KINDS, "planted", ("own", nothing, str))
    assert not fuzz.fuzz(valid, seed=0, kinds=["planted"], cases=1)[1]


def test_memory_is_watched(valid, monkeypatch):
    monkeypatch.setitem(fuzz.KINDS, "planted", ("own", nothing, str))
    for peaks, found in (((0, 2**31), True), ((2**31, 2**31), False)):
        monkeypatch.setattr(fuzz, "peak", iter(peaks).__next__)
        assert bool(fuzz.fuzz(valid, seed=0, kinds=["planted"], cases=1)[1]) == found


def test_a_careless_reader_is_found_and_repeated(valid, monkeypatch):
    """json.load in place of read_json; the same case again gives the same."""
    def careless(file):
        with open(file) as f:
            return json.load(f)

    monkeypatch.setattr(hf_config, "read_json", careless)
    _, finds = fuzz.fuzz(valid, seed=0, kinds=["config.json"], cases=100)
    found = " ".join(finds)
    assert "AttributeError" in found or "RecursionError" in found
    find, text = next(iter(finds.items()))
    number = int(text.rpartition("=")[2])
    assert fuzz.attempt(valid, 0, "config.json", number) == (find, text)
    monkeypatch.undo()
    assert fuzz.attempt(valid, 0, "config.json", number)[0] == "refused"
