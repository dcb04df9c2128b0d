"""
Attention held against its formulas, with times on a card.

    python -m experiments.attention     # exit code 1 if an error is too large

The learner's attention, all ways to compute it, against shadow_attn.definition, and that of a
decoding step against fast.decode_attn.formula, in fp64. Here too: random inputs and a clock, which
bench.py uses.
"""
import math
import statistics
import sys
import time

import torch

from fast.attention import make_plan
from fast.decode_attn import decode_attention, formula
from fast.launch import interpreted, triton
from fast.recorded import pooled
from shadow_attn import definition, shadow_attention
from support.configurator import help_if_asked
from support.run import tell

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # errors relative to the norm
# prompts, samples of each, query and KV heads, head size, prompt keys, response slots, step
DECODING = ((8, 8, 9, 3, 64, 256, 127, 64),
            (8, 8, 12, 2, 128, 1024, 255, 128),
            (8, 8, 12, 2, 128, 8192, 1023, 512))


def group_until(P, G, R, budget, nkv, device="cpu"):
    """until (nkv, N) of one packed group [prompt | G dense copies | G shadow copies]: random prompt
    keys beyond `budget` die where the shadow copies begin, response keys where their copy ends."""
    n = R - 1  # rows of a copy
    N = P + 2 * G * n
    copy = torch.arange(2 * G * n, device=device) // n          # (2 * G * n,)
    ends = P + (copy + 1) * n
    dropped = torch.rand(nkv, P, device=device).argsort(1) >= budget  # (nkv, P)
    prompt = torch.where(dropped, P + G * n, N)
    return torch.cat((prompt, ends.expand(nkv, -1)), dim=1).int()  # (nkv, N)


def decoding(B, G, nh, nkv, hs, K, R, t, device, dtype):
    """Random arguments of decode_attention. KV heads hold different numbers of prompt keys, and
    slots that do not count hold NaN."""
    n_kept = torch.randint(1, K + 1, (B, nkv), device=device, dtype=torch.int32)
    n_kept[0, 0] = K
    padding = torch.arange(K, device=device) >= n_kept[:, :, None]  # (B, nkv, K)
    # views of one matrix, as in the model
    qkv = torch.randn(B * G, nh + 2 * nkv, hs, device=device).to(dtype)
    q, k, v = qkv.split([nh, nkv, nkv], 1)
    prompt = torch.randn(2, B, nkv, K, hs, device=device).to(dtype)
    prompt.masked_fill_(padding[..., None], math.nan)
    response = torch.randn(2, B * G, nkv, R, hs, device=device).to(dtype)
    response[:, :, :, t:] = math.nan
    return [q, k, v, *prompt, n_kept, *response, torch.tensor(t, device=device)]


def run(f, grad, *leaves):
    """[out, dq, dk, dv] of out = f(q, k, v) and its backward pass."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(got, want):
    """Norm of the difference over norm."""
    return ((got - want).norm() / want.norm()).item()


# the clock

def sync():
    """Wait for the card, if there is one."""
    if CUDA:
        torch.cuda.synchronize()


def allocated():
    """GB at the peak since the last reset, that of recordings included; None on a CPU."""
    return (torch.cuda.max_memory_allocated() + pooled()) / 1e9 if CUDA else None


def clock(f, repeat=5, warm=1):
    """Time f(): the first call apart (it compiles), `warm` more calls, then the median of `repeat`.
    -> first_s, ms, times_ms, peak_gb

    On a card by events, with no wait between calls: what a call does on the host hides behind the
    card's work, as in a model."""
    start = time.perf_counter()
    f()
    sync()
    first = time.perf_counter() - start
    for _ in range(warm):
        f()
    sync()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    marks = [mark()]
    for _ in range(repeat):
        f()
        marks.append(mark())
    sync()
    times = [between(a, b) for a, b in zip(marks, marks[1:])]
    return dict(first_s=first, ms=statistics.median(times), times_ms=times,
                peak_gb=allocated())


def mark():
    """A point in time: an event on a card, else seconds."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    """Milliseconds from mark a to mark b."""
    return a.elapsed_time(b) if CUDA else 1e3 * (b - a)


# the learner's attention

def check_learner(nh, nkv, hs, impls, dtypes):
    """A line for each dtype and implementation: errors and times. -> whether all are small"""
    torch.manual_seed(0)
    sizes = dict(P=200, G=2, R=16, budget=48)
    if CUDA:
        sizes = dict(P=700, G=4, R=64, budget=128)
    until = group_until(**sizes, nkv=nkv, device=DEVICE)
    N = until.shape[1]
    ok = True
    for dtype in dtypes:
        inputs = [torch.randn(N, heads, hs, device=DEVICE).to(dtype)
                  for heads in (nh, nh, nkv, nkv)]  # grad, q, k, v
        want = run(lambda *qkv: definition(*qkv, until), *(x.double() for x in inputs))
        for impl in impls:
            def attend(q, k, v):
                return shadow_attention(q, k, v, until, impl=impl)

            errors = [error(*pair) for pair in zip(run(attend, *inputs), want)]
            line = (f"{impl:6s} {str(dtype)[6:]:8s} {N:4d} {nh:3d}:{nkv:<2d} {hs:4d}  "
                    + " ".join(f"{e:.1e}" for e in errors) + " | ")
            if impl == "ref" or CUDA:  # the interpreter's times say nothing
                line += f"{clock(lambda: attend(*inputs[1:]))['ms']:12.2f} "
                line += f"{clock(lambda: run(attend, *inputs))['ms']:14.2f}"
            tell(line)
            ok &= max(errors) < BOUNDS[dtype]
    return ok


def time_learner():
    """Time both policies of one group with a long prompt."""
    until = group_until(P=8192, G=8, R=256, budget=1024, nkv=8, device=DEVICE)
    N = until.shape[1]
    inputs = [torch.randn(N, heads, 128, device=DEVICE, dtype=torch.bfloat16)
              for heads in (16, 16, 8, 8)]

    def attend(q, k, v):
        return shadow_attention(q, k, v, until)

    plan = clock(lambda: make_plan(until), 10)["ms"]
    forward = clock(lambda: attend(*inputs[1:]), 10)["ms"]
    both = clock(lambda: run(attend, *inputs), 10)["ms"]
    tell(f"prompt 8192, 8 responses of 256, both policies (N {N}), 1024 prompt keys "
         f"kept, 16:8 heads of 128, bf16:\npreparation {plan:.2f} ms, "
         f"with forward {forward:.2f}, with backward {both:.2f} ms")


# attention of a decoding step

def check_decoding(shape, dtype):
    """One line: error, on a card the time too. -> whether the error is small"""
    B, G, nh, nkv, hs, K, R, t = shape
    torch.manual_seed(0)
    arguments = decoding(*shape, DEVICE, dtype)
    off = error(decode_attention(*arguments), formula(*arguments))
    line = (f"{B}x{G} samples, {nh}:{nkv} heads of {hs}, {K} prompt keys, "
            f"{t} of {R} response keys: error {off:.1e}")
    if CUDA:  # with all slots in use
        prompt_k, prompt_v, n_kept = arguments[3:6]
        n_kept.fill_(K)
        prompt_k.nan_to_num_()
        prompt_v.nan_to_num_()
        us = microseconds(arguments)
        size = 2 * prompt_k.nbytes + 2 * B * G * nkv * t * hs * dtype.itemsize
        line += f", {us:.1f} us, {size / us / 1e3:.0f} GB/s (small caches stay in L2)"
    tell(line)
    return off < BOUNDS[dtype]


def microseconds(arguments, calls=50):
    """Time of decode_attention(*arguments) inside a CUDA graph of many calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            decode_attention(*arguments)
    return triton.testing.do_bench(graph.replay, return_mode="median") * 1e3 / calls


def main():
    """-> exit code"""
    help_if_asked(sys.argv, __doc__)
    card, dtypes = "CPU", [torch.float32]
    if CUDA:
        card = torch.cuda.get_device_name()
        dtypes.append(torch.bfloat16)
    impls, version = ["ref"], "absent"
    if triton is not None:
        version = triton.__version__
        if interpreted():
            version += " (interpreted)"
        if CUDA or interpreted():
            impls += ["simple", "triton"]
    tell(f"{card}, torch {torch.__version__}, triton {version}; "
         "errors: norm of the difference from fp64, over norm")
    tell("impl   dtype       N nh:nkv  hs     out      dq      dk      dv "
         "| ms forward  with backward")
    ok = [check_learner(*heads, impls, dtypes) for heads in ((4, 2, 32), (8, 2, 128))]
    if CUDA and triton is not None:
        time_learner()
    tell(f"\nattention of a decoding step, {str(dtypes[-1])[6:]}")
    ok += [check_decoding(shape, dtypes[-1]) for shape in DECODING]
    failed = "FAILED: an error exceeds 1e-5 (float32) or 1e-2 (bfloat16)"
    tell("ok" if all(ok) else failed)
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
