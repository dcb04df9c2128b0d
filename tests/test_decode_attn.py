"""
Attention of a decoding step: reference and kernel against the fp64 formula; the kernel on a GPU if there is one, else in Triton's
interpreter, in a process of its own (TRITON_INTERPRET must be set before the import).
"""
import os
import subprocess
import sys

import pytest
import torch

from fast import decode_attn
from fast.decode_attn import decode_attention, example, formula
from fast.launch import triton

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CUDA = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
REAL = {name: getattr(decode_attn, name) for name in ("BLOCK", "SPLIT", "PROGRAMS")}
kernel = pytest.mark.skipif(triton is None or not (CUDA or INTERPRET), reason="needs a GPU or TRITON_INTERPRET=1")
IMPLS = ["ref", pytest.param("triton", marks=kernel)]
#         B, G, nh, nkv, hs, K, R, t: one sample; equal heads; three and six query heads a KV head; first and last slot; no power of two
SHAPES = [(1, 1, 2, 2, 24, 1, 1, 0), (2, 2, 3, 1, 16, 40, 9, 3), (2, 3, 6, 1, 64, 70, 40, 39), (1, 2, 4, 2, 8, 33, 20, 17),
          (2, 12, 12, 2, 16, 64, 3, 0), (3, 2, 2, 2, 128, 5, 50, 33)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces and several steps per piece at sizes that the interpreter can compute."""
    monkeypatch.setattr(decode_attn, "BLOCK", 16)
    monkeypatch.setattr(decode_attn, "SPLIT", 16)
    monkeypatch.setattr(decode_attn, "PROGRAMS", 6)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * CUDA, ids=str)
def test_against_formula(impl, shape, dtype):
    """Values; slots that do not count hold NaN, which must not leak; the new key and value are stored at slot t and nowhere else."""
    torch.manual_seed(0)
    q, k, v, *rest = example(*shape, DEVICE, dtype)
    want, before, t = formula(q, k, v, *rest), [x.clone() for x in rest], shape[-1]
    got = decode_attention(q, k, v, *rest, impl=impl)
    assert got.dtype == dtype and error(got, want) < (1e-6 if dtype == torch.float32 else 6e-3)
    for x, now, new in ((before[3], rest[3], k), (before[4], rest[4], v)):
        assert torch.equal(now[:, :, t], new)
        x[:, :, t] = new
        assert torch.equal(now.nan_to_num(7.0), x.nan_to_num(7.0))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before[:3], rest[:3]))


@pytest.mark.parametrize("impl", IMPLS)
def test_negative_controls(impl):
    """Each of these mistakes is far outside the tolerance."""
    torch.manual_seed(0)
    q, k, v, pk, pv, n_kept, rk, rv, t = (x.nan_to_num(1.0) if x.is_floating_point() else x for x in example(2, 3, 6, 2, 16, 40, 30, 11, DEVICE, torch.float32))
    n_kept[1] = 20
    want = formula(q, k, v, pk, pv, n_kept, rk, rv, t)
    go = lambda q=q, k=k, v=v, pk=pk, n=n_kept, t=t: error(decode_attention(q, k, v, pk, pv, n, rk.clone(), rv.clone(), t, impl=impl), want)
    assert go() < 1e-6
    assert go(n=torch.full_like(n_kept, 40)) > 1e-2           # padding taken for keys
    assert go(t=t - 1) > 1e-2 and go(t=t + 1) > 1e-2          # one response key too few, one too many
    assert go(k=k.flip(1)) > 1e-2                             # the new token under the other KV head
    assert go(pk=pk.flip(0)) > 1e-2                           # the other prompt's keys
    assert go(q=q.roll(1, 1)) > 1e-2                          # query heads shifted by one
    # the new token dropped: the last response key takes its place, so that the formula sees the t earlier ones and no more
    last = [x[:, :, t - 1] for x in (rk, rv)]
    without = formula(q, *last, pk, pv, n_kept, rk, rv, t - 1)
    assert error(without, want) > 1e-2


def test_refuses_an_impl_that_cannot_run():
    args = example(1, 1, 2, 2, 16, 4, 3, 1, "cpu", torch.float64)
    for impl in ("tritn", "triton"):  # a wrong name; no kernel computes fp64
        with pytest.raises(ValueError, match="unknown or cannot compute torch.float64 on cpu"):
            decode_attention(*args, impl=impl)


@kernel
def test_kernel_refuses_other_layouts():
    q, k, v, *rest = example(1, 2, 2, 2, 16, 20, 5, 2, DEVICE, torch.float32)
    with pytest.raises(ValueError, match="heads of q, k and v"):
        decode_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, *rest, impl="triton")


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 9, 3, 64, 256, 127, 126), (2, 8, 12, 2, 128, 1024, 300, 280)], ids=str)
def test_real_blocks(monkeypatch, shape, dtype):
    """The block sizes of a rollout, which must also fit the card's shared memory in every dtype."""
    for name, size in REAL.items():
        monkeypatch.setattr(decode_attn, name, size)
    torch.manual_seed(0)
    args = example(*shape, DEVICE, dtype)
    want = formula(*args)
    assert error(decode_attention(*args, impl="triton"), want) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_one_graph_serves_every_step():
    """A graph recorded once and replayed while t advances gives what separate calls give, bit for bit."""
    torch.manual_seed(0)
    q, k, v, pk, pv, n_kept, rk, rv, t = (x.nan_to_num(1.0) if x.is_floating_point() else x
                                          for x in example(2, 4, 6, 2, 64, 300, 40, 0, "cuda", torch.bfloat16))
    decode_attention(q, k, v, pk, pv, n_kept, rk.clone(), rv.clone(), t)  # compiles
    rk2, rv2, t2, graph = rk.clone(), rv.clone(), t.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, pk, pv, n_kept, rk2, rv2, t2)
        t2.add_(1)
    previous = None
    for step in range(40):
        graph.replay()
        want = decode_attention(q, k, v, pk, pv, n_kept, rk, rv, torch.tensor(step, device="cuda"))
        assert torch.equal(out, want) and (previous is None or not torch.equal(out, previous))
        previous = want
    assert torch.equal(rk, rk2) and torch.equal(rv, rv2)


@pytest.mark.skipif(CUDA or INTERPRET or triton is None, reason="runs the kernels where there is no GPU")
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter(__file__, "(triton or kernel) and not interpreter")


def test_self_check_command():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "decode_attn.py"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.rstrip().endswith("ok"), result.stdout + result.stderr
