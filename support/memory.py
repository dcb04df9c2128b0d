"""
What memory a piece of a program takes at its peak, what would lower it, and how to tell that memory
ran out.

The idea. Peaks are measured, not predicted: what is to be run is run, once as asked and once with
each setting changed that might help. On a card torch counts the bytes that are allocated. On a CPU
the kernel knows how much of this process was resident at most since it was last asked to forget
(Linux); Python and torch themselves are in that, and memory that a library keeps for later, so it
is called "about". Elsewhere nothing is known but time.

Left out on purpose: other processes on the same card, memory that torch's allocator holds but does
not use. Nothing here knows what is trained.
"""
import ctypes
import gc
import os
import re
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from support.screen import tell

# what torch's allocators and the libraries below them say
SAID = re.compile("out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


def ran_out(error):
    """Does an exception say that memory ran out, or one that it came after? The end of a CUDA graph
    that could not be recorded hides the reason."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and SAID.search(str(error)):
            return True
        error = error.__context__
    return False


@contextmanager
def memory_errors(text):
    """Where memory runs out, MemoryError says this text."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not ran_out(e):
            raise
        raise MemoryError(text) from None


@contextmanager
def saving_if_memory_runs_out(run, opt, phases, savings):
    """Where memory runs out in a run: save the steps that are done, unless an update has begun to
    change the weights, and raise MemoryError, one line.

    run: Run. opt: Masters. phases: {name of a function: what happens in it}, which of them it was
    is read from the traceback. savings: function of settings and phase -> {key: value}, what would
    lower memory there."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as e:
        if not ran_out(e):
            raise
        frames = traceback.walk_tb(e.__traceback__)
        names = [frame.f_code.co_name for frame, _ in frames]
        phase = next((phases[name] for name in names if name in phases), None)
        now = gigabytes(held(run.config.device))
        line = f"out of memory in step {run.step}, {now} GB held"
        release(e)
    if phase:
        line += f", in {phase}{advice(run, savings(run.config, phase))}"
    # elsewhere it is not known whether step `run.step` is done
    if phase and run.writes and run.unsaved and not opt.halfway:
        opt.forget()  # the gradients of what is not learned
        try:
            run.save(opt.state())
        except (OSError, RuntimeError, MemoryError, FloatingPointError) as e:
            line += f"; the steps since the last checkpoint could not be saved: {e}"
    raise MemoryError(line)


def advice(run, found):
    """What may be set differently, where a run goes on and where it begins again."""
    text = ""
    for how, resumes in (("--resume=True and ", True), ("a new run with ", False)):
        said = [f"--{key}={value} (now {getattr(run.config, key)})"
                for key, value in found.items() if (key in run.may_change) == resumes]
        if said:
            text += f"; lower: {how}{' or '.join(said)}"
    return text + "; --dry_run=True measures what each saves"


def release(error=None):
    """Give back what is no longer in use, but for the memory of recordings (fast/record.py,
    fast/recorded.py); also what the frames that an error came through hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):  # no glibc
            ctypes.CDLL(None).malloc_trim(0)


def memory_of(device):
    """Bytes of memory that a card or, for the CPU, this machine has; inf if it does not say."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float("inf")


def held(device, line="VmRSS"):
    """Bytes held now: allocated on the card or, for the CPU, resident in this process; None where
    the system does not say."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated()
    with suppress(OSError), open("/proc/self/status") as f:
        found = re.search(rf"{line}:\s*(\d+) kB", f.read())
        return 1024 * int(found[1]) if found else None


def start_peak(device):
    """Forget the peak so far. -> function: bytes held at most since then, or None."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        return lambda: None
    return partial(held, device, "VmHWM")


@dataclass
class Cost:
    """Of one run of something: its peak in bytes, None if unknown; seconds; did it fit?"""
    peak: int
    seconds: float
    fits: bool = True


def measure(run, device):
    """Run it once. -> Cost. What it raises for another reason than memory is raised."""
    release()
    peak = start_peak(device)
    began, fits = time.perf_counter(), True
    try:
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    except Exception as e:
        if not ran_out(e):
            raise
        release(e)
        fits = False
    return Cost(peak(), time.perf_counter() - began, fits)


def measure_all(phases, config, device, known=None):
    """The phases one after the other, up to one that does not fit. known: {name: Cost} of those
    that need not be run. -> {name: Cost}"""
    costs = {}
    for name, run in phases.items():
        before = (known or {}).get(name)
        costs[name] = before or measure(partial(run, config), device)
        if not costs[name].fits:
            break
    return costs


def compare(phases, config, device, trials, first):
    """Run the phases and print what each takes; then what the whole takes with other settings. ->
    {name: Cost} of the phases, up to one that does not fit

    phases: {name: function of settings}. first: settings of a small step, which makes whatever
    is made once. trials: function of the phase that holds the peak -> {name: (settings, names of
    the phases that they change)}."""
    start = measure_all(phases, first, device)
    if not start[highest(start)].fits:
        raise ValueError(
            f"out of memory in {highest(start)} with a single prompt and a few new "
            f"tokens, {gigabytes(held(device))} GB held: lower prompt_tokens or group, "
            "or take a smaller model")
    release()
    about = "" if device.startswith("cuda") else " (about, of the whole process)"
    tell(f"dry run: GB held at the peak of each phase{about}; weights and optimizer "
         f"alone: {gigabytes(held(device))}")
    costs = measure_all(phases, config, device)
    tell(f"{'':24s}{'peak GB':>14s}{'':12s}{'seconds':>10s}")
    for name, cost in costs.items():
        tell_row(name, {name: cost})
    tell_row("all", costs)
    worst = highest(costs)
    before = costs[worst].peak if costs[worst].fits else None
    if costs[worst].fits and before is None:
        tell("the peak is not known: this system does not say what a process holds")
        return costs
    tell(f"the same, with one setting changed that may lower the peak of {worst}:")
    for name, (other, reached) in trials(worst).items():
        known = {phase: cost for phase, cost in costs.items()
                 if phase not in reached and cost.fits}
        tell_row(name, measure_all(phases, other, device, known), before)
    return costs


def highest(costs):
    """Name of the phase that holds the peak, or in which memory ran out."""
    return max(costs, key=lambda name: (not costs[name].fits, costs[name].peak or 0))


def gigabytes(n):
    return "unknown" if n is None else f"{n / 1e9:.3f}"


def tell_row(name, costs, before=None):
    """Peak over the phases in costs, its difference to `before`, seconds of all; "no help" where it
    is no lower."""
    worst, change, verdict = highest(costs), "", ""
    said, peak = gigabytes(costs[worst].peak), costs[worst].peak
    if not costs[worst].fits:
        said = "out of memory"
    elif before is not None:
        change = f"{(peak - before) / 1e9:+.3f}"
        if not change.startswith("-") or change == "-0.000":
            verdict = "  no help"
    seconds = sum(cost.seconds for cost in costs.values())
    tell(f"{name:24s}{said:>14s}{change:>12s}{seconds:10.2f}{verdict}")
