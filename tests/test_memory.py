"""support/memory.py and what train.py makes of it: the dry run, and runs whose memory ends."""
import os

import pytest
import torch

import rollout
import train
from conftest import FAST, learner, read_checkpoint, read_log, toy, train_here
from support.memory import Cost, compare, highest, measure, ran_out

MB = 10**6
GONE = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you"


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


# memory of a piece of a program

def test_a_peak_is_measured_though_it_is_gone():
    """200 MB that live within the call alone; the control allocates nothing."""
    some, none = (measure(lambda n=n: torch.ones(n * MB // 4).sum(), "cpu") for n in (200, 1))
    assert 150 * MB < some.peak - none.peak < 250 * MB and some.fits
    assert measure(lambda: torch.ones(50 * MB // 4), "cpu").peak < some.peak - 100 * MB


def test_a_system_that_does_not_say(monkeypatch, capsys):
    """The dry run then tells seconds, and that peaks are not known; no trials."""
    def closed(path, *args):
        raise PermissionError(path)
    monkeypatch.setattr("builtins.open", closed)
    cost = measure(lambda: None, "cpu")
    assert cost.peak is None and cost.fits
    compare(dict(all=lambda c: None), {}, "cpu", trials=None, first={})
    assert "not known" in capsys.readouterr().out


@pytest.mark.parametrize("error, yes", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError(GONE), True), (MemoryError(), True),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True),
    (RuntimeError("shapes differ"), False), (ValueError("out of memory"), False)])
def test_which_errors_say_that_memory_ran_out(error, yes):
    assert ran_out(error) == yes

    def fail():
        raise error
    if yes:
        assert not measure(fail, "cpu").fits
    else:
        with pytest.raises(type(error)):
            measure(fail, "cpu")


def test_the_highest_phase_is_that_which_did_not_fit():
    costs = dict(a=Cost(5, 1), b=Cost(9, 1), c=Cost(3, 1))
    assert highest(costs) == "b"
    assert highest(dict(costs, d=Cost(1, 1, fits=False))) == "d"
