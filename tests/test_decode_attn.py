"""
Attention of a decoding step: the PyTorch path and the kernel against the fp64 formula; the kernel
on a GPU if there is one, else in Triton's interpreter, in a process of its own.
"""
from collections import namedtuple

import pytest
import torch

from conftest import CUDA, DEVICE, beside_interpreter, kernel
from experiments.attention import decoding as example
from experiments.attention import error
from fast import decode_attn, fused, launch
from fast.decode_attn import decode_attention, formula

KERNELS = "(triton or kernel) and not interpreter"  # tests that run in the interpreter
REAL = {name: getattr(decode_attn, name) for name in ("BLOCK", "SPLIT", "PROGRAMS")}
IMPLS = ["ref", pytest.param("triton", marks=kernel)]


# prompts, samples of each, query and KV heads, head size, prompt keys, response slots, slot
# of the new token
Shape = namedtuple("Shape", "B G nh nkv hs K R t")
SHAPES = [
    (1, 1, 2, 2, 24, 1, 1, 0),        # one sample, first and last slot
    (2, 2, 3, 1, 16, 40, 9, 3),       # three query heads a KV head
    (2, 3, 6, 1, 64, 70, 40, 39),     # six
    (1, 2, 4, 2, 8, 33, 20, 17),      # no power of two
    (2, 6, 12, 2, 16, 64, 3, 0),      # a group's heads in two programs, the second ragged
    (3, 2, 2, 2, 128, 5, 50, 33)]     # equal heads


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces and several steps per piece at sizes that the interpreter can compute."""
    monkeypatch.setattr(decode_attn, "BLOCK", 16)
    monkeypatch.setattr(decode_attn, "SPLIT", 16)
    monkeypatch.setattr(decode_attn, "PROGRAMS", 6)


def same(a, b):
    """Equal bit for bit; NaN equals NaN."""
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def finite_example(*shape, dtype):
    """An example whose slots that do not count hold 1.0, not NaN."""
    return [x.nan_to_num(1.0) if x.is_floating_point() else x
            for x in example(*shape, DEVICE, dtype)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * CUDA, ids=str)
def test_against_formula(impl, shape, dtype):
    """Values; slots that do not count hold NaN, which must not leak; the new key and value
    are stored at slot t and nowhere else."""
    torch.manual_seed(0)
    q, k, v, *rest = example(*shape, DEVICE, dtype)
    want, before, t = formula(q, k, v, *rest), [x.clone() for x in rest], shape[-1]
    got = decode_attention(q, k, v, *rest, impl=impl)
    assert got.dtype == dtype
    bounds = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
    assert error(got, want) < bounds[dtype]
    for x, now, new in ((before[3], rest[3], k), (before[4], rest[4], v)):
        assert torch.equal(now[:, :, t], new)
        x[:, :, t] = new
        assert same(now, x)
    assert all(same(a, b) for a, b in zip(before[:3], rest[:3]))


@pytest.mark.parametrize("impl", IMPLS)
def test_negative_controls(impl):
    """Each of these mistakes is far outside the tolerance. KV heads hold different numbers of keys;
    what is in the slots that a head does not use is not seen."""
    torch.manual_seed(0)
    names = "q k v prompt_k prompt_v n_kept response_k response_v t".split()
    shape = Shape(B=2, G=2, nh=4, nkv=2, hs=16, K=24, R=14, t=11)
    right = dict(zip(names, finite_example(*shape, dtype=torch.float32)))
    n_kept = torch.tensor([[24, 7], [1, 13]], device=DEVICE, dtype=torch.int32)
    right["n_kept"] = n_kept
    want = formula(**right)

    def wrong_by(**change):
        fresh = {name: right[name].clone() for name in ("response_k", "response_v")}
        return error(decode_attention(**{**right, **fresh, **change}, impl=impl), want)

    q, k, t = right["q"], right["k"], right["t"]
    padding = (torch.arange(24, device=DEVICE) >= n_kept[:, :, None])[..., None]
    dirty = {name: right[name].masked_fill(padding, torch.nan) for name in ("prompt_k", "prompt_v")}
    assert wrong_by() < 1e-6 and wrong_by(**dirty) < 1e-6
    fullest = n_kept.amax(1, keepdim=True).repeat(1, 2)
    for change in (dict(n_kept=torch.full_like(n_kept, 24)),  # padding taken for keys
                   # counts of another KV head, of another prompt, of the fullest head
                   *(dict(n_kept=x) for x in (n_kept.flip(1), n_kept.flip(0), fullest)),
                   dict(t=t - 1), dict(t=t + 1),  # a response key too few, too many
                   dict(k=k.flip(1)),  # the new token of the other KV head
                   dict(prompt_k=right["prompt_k"].flip(0)),  # the other prompt's keys
                   dict(q=q.roll(1, 1))):  # query heads shifted by one
        assert wrong_by(**change) > 1e-2, change.keys()
    # the new token dropped: the last response key takes its place, so that the formula sees
    # the t earlier ones and no more
    last_k, last_v = (right[name][:, :, t - 1] for name in ("response_k", "response_v"))
    without = formula(**{**right, "k": last_k, "v": last_v, "t": t - 1})
    assert error(without, want) > 1e-2


def test_refusals():
    """A wrong name, fp64, which no kernel computes, and one count for all KV heads."""
    shape = Shape(B=2, G=1, nh=2, nkv=2, hs=16, K=4, R=3, t=1)
    args = example(*shape, device="cpu", dtype=torch.float64)
    for impl in ("tritn", "triton"):
        with pytest.raises(ValueError, match="cannot compute torch.float64 on cpu"):
            decode_attention(*args, impl=impl)
    args[5] = args[5][:, 0]
    with pytest.raises(ValueError, match=r"must be \(B, nkv\) = \(2, 2\), got \(2,\)"):
        decode_attention(*args)


@kernel
def test_kernel_refuses_other_layouts():
    shape = Shape(B=1, G=2, nh=2, nkv=2, hs=16, K=20, R=5, t=2)
    q, *rest = example(*shape, device=DEVICE, dtype=torch.float32)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="heads of q, k and v"):
        decode_attention(apart, *rest, impl="triton")
    rest[4] = rest[4][:, :1].expand(-1, 2)
    with pytest.raises(ValueError, match="n_kept be contiguous"):
        decode_attention(q, *rest, impl="triton")


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 9, 3, 64, 256, 127, 126),
                                   (2, 8, 12, 2, 128, 1024, 300, 280)], ids=str)
def test_real_blocks(monkeypatch, shape, dtype):
    """The block sizes of a rollout must also fit the card's shared memory in every dtype."""
    for name, size in REAL.items():
        monkeypatch.setattr(decode_attn, name, size)
    torch.manual_seed(0)
    args = example(*shape, DEVICE, dtype)
    want = formula(*args)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert error(decode_attention(*args, impl="triton"), want) < tolerance


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_one_graph_serves_every_step():
    """A graph recorded once and replayed while t advances gives what separate calls give,
    bit for bit."""
    torch.manual_seed(0)
    shape = 2, 4, 6, 2, 64, 300, 40, 0
    *fixed, rk, rv, t = finite_example(*shape, dtype=torch.bfloat16)
    decode_attention(*fixed, rk.clone(), rv.clone(), t)  # compiles
    rk2, rv2, t2, graph = rk.clone(), rv.clone(), t.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*fixed, rk2, rv2, t2)
        t2.add_(1)
    previous = None
    for step in range(40):
        graph.replay()
        want = decode_attention(*fixed, rk, rv, torch.tensor(step, device="cuda"))
        assert torch.equal(out, want)
        assert previous is None or not torch.equal(out, previous)
        previous = want
    assert torch.equal(rk, rk2) and torch.equal(rv, rv2)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_early_launches_change_nothing(monkeypatch):
    """In a graph of steps that feed each other, kernels launched early give the bits of others."""
    if not launch.starts_early(0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    shape = 2, 4, 6, 2, 64, 300, 400, 0
    q, k, v, *fixed, rk, rv, t = finite_example(*shape, dtype=torch.bfloat16)
    weight = torch.rand(64, device="cuda", dtype=torch.bfloat16)
    angle = torch.rand(8, 32, device="cuda")

    def run():
        a, b, c, at = q.clone(), rk.clone(), rv.clone(), t.clone()

        def step():
            with torch.no_grad():
                fused.rotate(a, k.clone(), angle.cos(), angle.sin())
                out = decode_attention(a, k, v, *fixed, response_k=b, response_v=c, t=at)
                a.copy_(fused.rms_norm(out, weight, 1e-6))
            at.add_(1)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(300):
            graph.replay()
        return a

    quick = run()
    assert torch.equal(run(), quick) and launch.early(q)
    monkeypatch.setattr(launch, "starts_early", lambda card: False)
    assert torch.equal(run(), quick) and not launch.early(q)
    weight *= 1.01
    assert not torch.equal(run(), quick)  # control


@beside_interpreter
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()
