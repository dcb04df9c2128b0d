"""
One decoding step, recorded as a CUDA graph; fast/recorded.py records the learner with the same.

The idea. Decoding launches hundreds of kernels per token that last a few microseconds each:
launched one by one, the host is the limit. Recorded once, they are launched together for every
further token.

What changes from token to token (slot, position, random numbers) must be read from the device,
nothing in a step may wait for the device, and every tensor that a step touches must stay at its
address until the last replay: the frame of rollout.generate holds them.

Kernels are compiled and loaded as a step first runs, which a recording does not allow for, so that
whoever records runs one step before. Where the same has been recorded in this process, it need not.

Left out: replaying a decoding step in a later rollout, several of them at a time on a card.
"""
import functools
import weakref

import torch

RECORDED = {}  # card -> the last graph there, whose memory the next one takes over
LEARNERS = weakref.WeakKeyDictionary()  # model -> what fast/recorded.py holds of it
KNOWN = set()  # kinds of steps that were recorded: their kernels are there


def kind_of(model, cache, temperature, seed):
    """All that decides which kernels a decoding step takes, and how they are compiled: a model, its
    type, the shapes of its cache, and whether the seed is one of Triton's small integers."""
    shapes = [x.shape for x in (cache.until, cache.response_k, *cache.prompt_k)]
    return (weakref.ref(model), model.device, model.dtype, model.vocab_used,
            len(model.absent), cache.eviction, temperature > 0, seed < 2**31, *shapes)


def record(step, device, kind=None):
    """Record what step() launches on a card, without running it. -> function that runs it. kind:
    from now on KNOWN. Raises OutOfMemoryError where it does not fit.

    torch.cuda.graph would first give the card back all memory that torch holds without use. Of
    SmolLM2-135M's training step on an H200 a fifth went into giving it back and getting it again,
    so that is done where memory is short only."""
    with torch.cuda.device(device):
        card, graph = torch.cuda.current_device(), None
        if a_quarter_is_free():
            try:
                graph = RECORDED[card] = capture(step, RECORDED.get(card))
            except RuntimeError as e:
                if not memory_ended(e):
                    raise
        if graph is None:
            RECORDED.pop(card, None)
            for learner in LEARNERS.values():
                learner.drop()
            torch.cuda.empty_cache()
            graph = capture(step)  # not kept: others need its memory soon
    gone = [known for known in KNOWN if known and known[0]() is None]  # models
    KNOWN.difference_update(gone)
    KNOWN.add(kind)
    return graph.replay


def memory_ended(error):
    """Did memory run out in a recording? Its end may hide what ended it."""
    full = torch.OutOfMemoryError
    return isinstance(error, full) or isinstance(error.__context__, full)


def a_quarter_is_free(beyond=0):
    """Is a quarter of the current card held by nobody, or of the part of it that this process may
    take, even if so many bytes more are taken? If not, others may need what this process holds
    without use."""
    free, whole = torch.cuda.mem_get_info()
    part = whole * torch.cuda.get_per_process_memory_fraction()
    return min(free, part - torch.cuda.memory_reserved()) - beyond > part / 4


def capture(step, last=None):
    """The graph of a step, on the current card. last: a graph that will not be replayed again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream_of(torch.cuda.current_device())):
        # in torch 2.11 a recording first allocates two numbers, and where memory is full that ends
        # the process; this leaves room for them, or raises OutOfMemoryError
        torch.empty(1024, device="cuda")
        # of other threads anything goes: NCCL's may ask for an event at any time
        graph.capture_begin(pool=last and last.pool(),
                            capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    return graph


@functools.cache
def stream_of(card):
    """One for all recordings on a card: with each new one cuBLAS would keep 32 MB more."""
    return torch.cuda.Stream(card)
