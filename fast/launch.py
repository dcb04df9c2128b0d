"""
Which kernels run here, and how they are compiled.

The idea. A file of kernels should import wherever PyTorch does: without Triton (Mac,
Windows) its kernels stay undecorated and nobody calls them. Whether they compute a tensor
is asked in one place, `kernels(x)`; where it says no, the formula in PyTorch runs.

Left out: other accelerators than CUDA, tables of tuned block sizes.
"""
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


@jit()
def probe():
    pass


def interpreted():
    """Whether Triton's CPU interpreter runs the kernels: TRITON_INTERPRET=1 at the import."""
    return triton is not None and not isinstance(probe, triton.runtime.JITFunction)


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
