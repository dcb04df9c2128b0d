"""
Which kernels run here, and how they are compiled.

The idea. A file of kernels should import wherever PyTorch does: without Triton (Mac,
Windows) its kernels stay undecorated and nobody calls them. Whether they compute a tensor
is asked in one place, `kernels(x)`; where it says no, the formula in PyTorch runs.

On Hopper and later a small kernel may be launched `early`, while the one before it still runs
(programmatic dependent launch): its programs take their places and wait there, in `wait`, for the
end of all that was launched before. So the next one begins at once.

Left out: other accelerators than CUDA, tables of tuned block sizes.
References: docs.nvidia.com/cuda/cuda-c-programming-guide, programmatic dependent launch.
"""
import functools
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=None)  # all that a kernel's signature asks for


def jit(*varying, unaligned=()):
    """triton.jit as a decorator; without Triton it leaves the function as it is.

    Triton compiles a kernel again for an integer that is 1 or a multiple of 16, and for a
    pointer that is not a multiple of 16. varying: names of integers that differ between
    steps; unaligned: names of pointers into the middle of a tensor. Neither leads to
    another compilation."""
    if triton is None:
        return unchanged
    return triton.jit(
        do_not_specialize=list(varying), do_not_specialize_on_alignment=list(unaligned))


def unchanged(f):
    return f


# what Triton has under these names takes ten times as long, being for kernels too

def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


def cdiv(a, b):
    return -(-a // b)


@jit()
def probe():
    pass


def interpreted():
    """Whether Triton's CPU interpreter runs the kernels: TRITON_INTERPRET=1 at the import."""
    return triton is not None and not isinstance(probe, triton.runtime.JITFunction)


def early(x):
    """Arguments of a launch, for tensors where x is: the kernel starts early if the card can do so.
    It must call wait(EARLY) before it reads or writes anything."""
    if x.is_cuda and starts_early(x.get_device()):
        return dict(EARLY=True, launch_pdl=True)
    return {}


@functools.cache
def starts_early(card):
    """Whether kernels can be launched before the last one has ended, compute capability 9.0."""
    if interpreted() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(card) >= (9, 0)


@jit()
def wait(EARLY: tl.constexpr):
    # first let the next kernel take its places, as it waits too, then wait for the last one
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def kernels(x):
    """Whether the Triton kernels compute x: on CUDA or in the interpreter, but not everything."""
    if triton is None or x.dtype == torch.float64:  # fp64: tests want the formula
        return False
    if x.is_cuda:
        return True
    # the interpreter computes bf16 wrongly (triton issue 11584)
    return interpreted() and x.dtype != torch.bfloat16


def widen(x):
    """x in fp32, the dtype of reductions; fp64 stays fp64, so that tests can run a model in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
