"""
One decoding step, recorded as a CUDA graph.

The idea. Decoding launches hundreds of kernels per token that last a few microseconds each:
launched one by one, the host is the limit. Recorded once, they are launched together for every
further token.

What changes from token to token (slot, position, random numbers) must be read from the device,
nothing in a step may wait for it, and every tensor that it touches must stay at its address until
the last replay.

Left out: recordings that outlive a rollout, several at a time on a card.
"""
import functools
from contextlib import suppress

import torch

RECORDED = {}  # card -> its last graph: the next one works in the same memory


def record(step, device):
    """Record what step() launches on a card, without running it. -> function that runs it. Raises
    OutOfMemoryError."""
    with torch.cuda.device(device):
        graph = None
        if a_quarter_is_free():
            with suppress(torch.OutOfMemoryError):
                graph = capture(step)
        if graph is None:  # it cannot work in what is free among other tensors
            RECORDED.clear()
            torch.cuda.empty_cache()
            graph = capture(step)
    return graph.replay


def a_quarter_is_free():
    """Of the current card, or of the share of it that this process may take. Else others may need
    what this process holds and does not use."""
    free, whole = torch.cuda.mem_get_info()
    share = whole * torch.cuda.get_per_process_memory_fraction()
    return min(free, share - torch.cuda.memory_reserved()) > share / 4


def capture(step):
    """The graph of a step, on the current card. torch.cuda.graph would give back all free memory
    first: of a small model a fifth of a training step goes into giving and getting it again."""
    card = torch.cuda.current_device()
    graph, last = torch.cuda.CUDAGraph(), RECORDED.get(card)
    with torch.cuda.stream(stream_of(card)):
        # in torch 2.11 a recording first allocates two numbers, and where memory is full that ends
        # the process; this leaves room for them, or raises OutOfMemoryError
        torch.empty(1024, device="cuda")
        # of other threads anything goes: NCCL's may ask for an event at any time
        graph.capture_begin(pool=last and last.pool(), capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    RECORDED[card] = graph
    return graph


@functools.cache
def stream_of(card):
    """One for all recordings on a card: with each new one cuBLAS would keep 32 MB more."""
    return torch.cuda.Stream(card)
