"""
Several processes that train one model (data parallel), started by torchrun.

    torchrun --standalone --nproc_per_node=4 train.py

The idea. Each process, called a rank, holds the whole model. It takes its `share` of the work, and
what depends on more than that is computed from what all ranks found (`gather`, `sum_gradients`), so
that a run is the same for any number of ranks, up to rounding. Tensors travel by NCCL where one of
them lies on a card, all else by gloo, through the memory of the CPU. Without torchrun there is one
rank: `share` is everything, `gather` a list of one, the rest does nothing.

How it ends. A rank that fails says why, or rank 0 does in its place where it has to save first; no
other does. They learn of it from the launcher's store, also while they wait in a collective, and
end without a word. Where a rank is killed, the others say that it has gone.

Left out: parts of a model or of an optimizer on each rank, ranks that come and go. Nothing here
knows what is trained.
"""
import ctypes
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=1)  # for a rank that is late; one that fails is noticed
FAILED = "failed"             # in the store: how many ranks have failed
GRACE = 2                     # seconds: the launcher sees whose failure came first


def size():
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    """The number of this one, from 0; 0 alone writes and prints."""
    return dist.get_rank() if size() > 1 else 0


def launched():
    """Was this process started by torchrun? Its run id alone may be that of another process."""
    return (dist.is_available() and dist.is_torchelastic_launched()
            and "LOCAL_RANK" in os.environ)


def card():
    """Which card of its machine a rank is to use: one of its own, or one that it shares where NCCL
    (2.31 can, 2.28 cannot) is told to allow that, which is slow and good for tests."""
    number = int(os.environ["LOCAL_RANK"])
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return number % max(1, torch.cuda.device_count())
    return number


# work and results

def share(n):
    """Which of n things are this rank's, a range; those of all ranks follow each other."""
    return range(n * rank() // size(), n * (rank() + 1) // size())


def gather(value):
    """What every rank has, as a list, on every rank; its own as it is. Tensors on a card come to
    the card of the rank that gets them."""
    if size() == 1:
        return [value]
    data, found = io.BytesIO(), [None] * size()
    apart = Apart(data)
    apart.dump(value)
    kinds = [(x.is_cuda, x.dtype, x.shape) for x in apart.tensors]
    with among_ranks():
        dist.all_gather_object(found, (data.getvalue(), kinds))
    tensors = gather_tensors(apart.tensors, [kinds for _, kinds in found])
    return [value if r == rank() else Whole(io.BytesIO(pickled), tensors[r]).load()
            for r, (pickled, _) in enumerate(found)]


class Apart(pickle.Pickler):
    """Pickles a value; tensors are collected, and what is pickled asks `tensor_of` for them."""

    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def reducer_override(self, x):  # persistent_id is called for each number, too
        if not isinstance(x, torch.Tensor):
            return NotImplemented
        self.tensors.append(x.detach())
        return tensor_of, (len(self.tensors) - 1,)


def tensor_of(i):
    raise TypeError("what Apart has pickled is for Whole")


class Whole(pickle.Unpickler):
    """Puts a value and its tensors together again."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self.tensors = tensors

    def find_class(self, module, name):
        if (module, name) == (__name__, tensor_of.__name__):
            return self.tensors.__getitem__
        return super().find_class(module, name)


def gather_tensors(tensors, kinds):
    """A list of tensors for each rank. kinds: for each rank, of each of its tensors: is it on a
    card, its dtype, its shape. All travel as one row of bytes, of which they then are parts, by
    NCCL if any is on a card."""
    sizes = [  # multiples of 8: any dtype may begin there
        [-(-shape.numel() * dtype.itemsize // 8) * 8 for _, dtype, shape in several]
        for several in kinds]
    device = "cpu"
    if any(on_card for several in kinds for on_card, _, _ in several):
        device = "cuda"
    mine = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8, device=device)
    for place, x in zip(mine[:sum(sizes[rank()])].split(sizes[rank()]), tensors):
        place[:x.nbytes] = x.contiguous().view(-1).view(torch.uint8)
    rows = [torch.empty_like(mine) for _ in kinds]
    if len(mine):
        with among_ranks():
            dist.all_gather(rows, mine)
    found = []
    for row, several, of_each in zip(rows, kinds, sizes):
        found.append([])
        places = row[:sum(of_each)].split(of_each)
        for place, (on_card, dtype, shape) in zip(places, several):
            x = place[:shape.numel() * dtype.itemsize].view(dtype).view(shape)
            found[-1].append(x if on_card else x.cpu())
    return found


def attempt(kind, work):
    """work(), of each rank its own. Where one raises an exception of this kind, rank 0 raises it,
    so that it can save what there is; the others wait for its end."""
    if size() == 1:
        return work()
    found = error = None
    try:
        found = work()
    except kind as e:
        error = e
    errors = [e for e in gather(error) if e is not None]
    if errors and rank() == 0:
        raise errors[0]
    while errors:  # `watch` ends it
        time.sleep(1)
    return found


def sum_gradients(params):
    """Add up the gradients of all ranks, which then have equal bits; a rank without one adds 0."""
    if size() == 1:
        return
    grads = []
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.append(p.grad)
    for several in bundles(grads):
        row = several[0]
        if len(several) > 1:
            row = torch.cat([grad.reshape(-1) for grad in several])
        with among_ranks():
            dist.all_reduce(row)
        if len(several) > 1:
            for grad, x in zip(several, row.split([grad.numel() for grad in several])):
                grad.copy_(x.view_as(grad))


def bundles(tensors, limit=2**22):
    """Lists of tensors, each of one dtype and at most so many numbers, or of one larger tensor:
    many small messages take longer."""
    found, n = [], 0
    for x in tensors:
        n += x.numel()
        if not found or x.dtype != found[-1][0].dtype or n > limit:
            found.append([])
            n = x.numel()
        found[-1].append(x)
    return found


@torch.no_grad()
def check_equal(tensors, what):
    """Raise ValueError where the bits of a tensor have another sum than on rank 0."""
    if size() == 1:
        return
    bits = [x.contiguous().view(torch.int32).sum(dtype=torch.int64) for x in tensors]
    found = gather(torch.stack(bits).tolist())
    apart = [r for r, x in enumerate(found) if x != found[0]]
    if apart:
        raise ValueError(
            f"{what} of rank {apart[0]} are not those of rank 0: nothing more is saved;"
            " do all ranks read the same files, on cards of one kind?")


@contextmanager
def among_ranks():
    """A collective fails where another rank is gone. If that rank has said why, end without a word,
    else raise ConnectionError."""
    try:
        yield
    except RuntimeError as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's
        time.sleep(GRACE)
        if STORE.check([FAILED]):
            os._exit(1)
        raise ConnectionError("another rank has ended without an error, killed perhaps "
                              f"({e!s:.200})") from None


# beginning and end

@contextmanager
def ranks():
    """Around the whole program: under torchrun it is one of several ranks in here. An exception
    that leaves ends the process, and with it all others."""
    if not launched():
        yield
        return
    start()
    try:
        yield
        gather(None)  # rank 0 may have more to do
    except SystemExit as e:
        if isinstance(e.code, str):
            fail(SystemExit(e.code), f"{e.code}\n")
        leave()
        raise
    except BaseException as e:
        fail(e, traceback.format_exc())
    leave()


def leave():
    ENDED.set()
    WATCH.join(GRACE)  # C++ may abort where a thread is in it when the interpreter ends
    dist.destroy_process_group()


def start():
    global STORE, WATCH
    # optimizers import it; later it would hold the group, whose threads may abort the program's end
    import torch.distributed.nn.functional  # noqa: F401
    end_with_launcher()
    try:
        STORE, number, n = next(dist.rendezvous("env://"))
    except ValueError as e:
        raise SystemExit(f"error: TORCHELASTIC_RUN_ID says that torchrun started "
                         f"this process, but: {e}") from None
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"  # by where a tensor lies
    dist.init_process_group(
        backend, store=STORE, rank=number, world_size=n, timeout=PATIENCE)
    WATCH = threading.Thread(target=watch, args=(STORE.clone(),), daemon=True)
    WATCH.start()


def end_with_launcher():
    """From here on the launcher, however it ends, takes this process with it (Linux); end where it
    has gone already: one would be waited for for half an hour. Later `watch` sees to that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    try:
        socket.create_connection((host, port), timeout=30).close()
    except OSError as e:
        raise SystemExit(f"error: torchrun does not answer at {host}:{port} ({e}): "
                         "perhaps it was killed") from None


def watch(store):
    """End this rank soon after one has failed or the launcher has gone, wherever it then is."""
    with suppress(RuntimeError):
        while not store.check([FAILED]):
            if ENDED.wait(0.5):
                return
    if not ENDED.wait(GRACE):
        os._exit(1)


def fail(e, text):
    """End this rank; print the text if it is the first that fails."""
    first = False
    with suppress(RuntimeError):  # the launcher has gone
        first = STORE.add(FAILED, 1) == 1
    if first:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler
        get_error_handler().record_exception(e)  # for the launcher's own report
    else:
        time.sleep(GRACE)
    os._exit(1)


STORE = None                # what the launcher keeps for all ranks
WATCH = None                # the thread of `watch`
ENDED = threading.Event()   # has this rank ended well?
