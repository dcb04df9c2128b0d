"""
Which kernels run here, and how they are compiled.
"""
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Mac, Windows: the formulas still work
    triton, tl = None, SimpleNamespace(constexpr=None)


def jit(*varying, unaligned=()):
    """triton.jit, or nothing without Triton. By default Triton compiles a kernel again for an integer that is 1 or a multiple of 16 and
    for a pointer that is not a multiple of 16. varying: names of integers that differ between steps, unaligned: of pointers that may
    point into the middle of a tensor; neither then leads to another compilation."""
    if triton is None:
        return lambda f: f
    return triton.jit(do_not_specialize=list(varying), do_not_specialize_on_alignment=list(unaligned))


@jit()
def probe():
    pass


def widen(x):
    """x in fp32, the dtype of reductions here; fp64 stays fp64, so that an fp64 model is fp64 from end to end (tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def interpreted():
    """True if Triton's CPU interpreter runs the kernels (TRITON_INTERPRET=1 when this file was imported)."""
    return triton is not None and not isinstance(probe, triton.runtime.JITFunction)


def kernels(x):
    """Whether the Triton kernels compute x: on CUDA, except in fp64, which only tests use; and in the interpreter, except in bf16, which
    it computes wrongly (triton issue 11584)."""
    return triton is not None and x.dtype != torch.float64 and (x.is_cuda or (interpreted() and x.dtype != torch.bfloat16))
