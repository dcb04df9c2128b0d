"""
Fused functions and the sampler against formulas in fp64: the kernels on a GPU if there is one, else in Triton's interpreter, in a
process of its own (TRITON_INTERPRET must be set before the import); what runs on CPU here.
"""
import os

import pytest
import torch

from fast import fused, launch
from fast.fused import rms_norm, rotate, rotate_one, swiglu
from fast.launch import triton
from fast.sampling import sample

CUDA = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
kernel = pytest.mark.skipif(triton is None or not (CUDA or INTERPRET), reason="needs a GPU or TRITON_INTERPRET=1")
DTYPES = [torch.float32] + [torch.bfloat16] * CUDA
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


def error(got, want):
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def norm_formula(x, w):
    return w * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())


def rotate_formula(q, k, cos, sin):
    """As a product of complex numbers."""
    turn = torch.complex(cos.double(), sin.double())[:, None]
    z = [torch.complex(*x.chunk(2, -1)) * turn for x in (q, k)]
    return tuple(torch.cat((x.real, x.imag), -1) for x in z)


def both(f, formula, leaves, grads):
    """[outputs and gradients] of f and, in fp64 by autograd, of the formula."""
    results = []
    for change, f in ((lambda x: x.detach(), f), (lambda x: x.detach().double(), formula)):
        x = [change(x).requires_grad_() for x in leaves]
        y = f(*x)
        y = y if isinstance(y, tuple) else (y,)
        results.append([*y, *torch.autograd.grad(y, x, [change(g).to(o.dtype) for g, o in zip(grads, y)])])
    assert launch.kernels(leaves[0]) == (CUDA or INTERPRET) and not launch.kernels(leaves[0].double())
    return results


def rand(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((1, 576), (33, 48), (5, 3, 128), (300, 20)), ids=str)
def test_rms_norm(shape, dtype, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 3)  # so that a program sums over several blocks of rows
    x, w = rand(*shape, dtype=dtype), 1 + 0.3 * rand(shape[-1], dtype=dtype)
    got, want = both(lambda x, w: rms_norm(x, w, 1e-6), norm_formula, (x, w), (rand(*shape, dtype=dtype),))
    assert error(got, want) < TOLERANCE[dtype]
    assert error(got[:1], [rms_norm(x.double(), w.double(), 0.1)]) > 1e-2  # the control: another eps
    again, _ = both(lambda x, w: rms_norm(x, w, 1e-6), norm_formula, (x, w), (torch.ones_like(x),))
    once, _ = both(lambda x, w: rms_norm(x, w, 1e-6), norm_formula, (x, w), (torch.ones_like(x),))
    assert all(torch.equal(a, b) for a, b in zip(again, once))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, nh, nkv, hs", ((1, 9, 3, 64), (17, 12, 2, 128), (40, 4, 4, 12)))
def test_rotate(N, nh, nkv, hs, dtype):
    torch.manual_seed(0)
    angle = torch.rand(N, hs // 2, device=DEVICE) * 100
    split = lambda qkv: qkv.split([nh, nkv, nkv], dim=1)[:2]  # views with gaps between rows, as in the model
    f = lambda qkv: rotate(*split(qkv), angle.cos(), angle.sin())
    formula = lambda qkv: rotate_formula(*split(qkv), angle.cos(), angle.sin())
    qkv = rand(N, nh + 2 * nkv, hs, dtype=dtype)
    got, want = both(f, formula, (qkv,), (rand(N, nh, hs, dtype=dtype), rand(N, nkv, hs, dtype=dtype)))
    assert error(got, want) < TOLERANCE[dtype]
    assert error(got[:1], [rotate_one(split(qkv)[0].double(), angle.cos(), -angle.sin())]) > 0.1  # the control: the other way round
    with torch.no_grad():  # in place, and nothing but q and k
        mine = qkv.clone()
        q, k = f(mine)
        assert (q.data_ptr() == mine.data_ptr()) == launch.kernels(q) and torch.equal(mine[:, nh + nkv:], qkv[:, nh + nkv:])
        assert torch.equal(q, got[0]) and torch.equal(k, got[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, M", ((1, 1536), (7, 100), (3, 2050)))
def test_swiglu(N, M, dtype):
    x = rand(N, 2 * M, dtype=dtype)
    formula = lambda x: x[:, :M] / (1 + torch.exp(-x[:, :M])) * x[:, M:]
    got, want = both(swiglu, formula, (x,), (rand(N, M, dtype=dtype),))
    assert error(got, want) < TOLERANCE[dtype]
    assert error(got[:1], [swiglu(x.double().roll(M, 1))]) > 0.1  # the control: gate and up swapped


@kernel
def test_sample_kernel():
    """Greedy takes the first maximum; log-probs are those of the token drawn; draws follow the softmax and depend on seed and step."""
    torch.manual_seed(0)
    t = torch.tensor(4, device=DEVICE)
    logits = torch.randn(3, 5000, device=DEVICE) * 3
    logits[1, 77] = logits[1, 4500] = 50.0
    logits[2, :4000] = float("-inf")
    for temperature in (0.0, 1.0, 0.3):
        token, logp = sample(logits, temperature, None, 11, t)
        want = (logits / (temperature or 1)).log_softmax(-1)
        torch.testing.assert_close(logp, want.gather(1, token[:, None])[:, 0], atol=2e-6, rtol=1e-5)
        if not temperature:
            assert token.tolist() == [int(logits[0].argmax()), 77, int(logits[2].argmax())]
    n = 200_000 if CUDA else 400
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]], device=DEVICE).expand(n, 5)
    token, _ = sample(logits, 0.5, None, 5, t)
    p = (logits[0] / 0.5).softmax(0)
    assert (token.bincount(minlength=5) / n - p).abs().max() < 4 * (0.25 / n) ** 0.5
    assert (p - logits[0].softmax(0)).abs().max() > 4 * (0.25 / 400) ** 0.5  # the control: another temperature would be seen
    few = logits[:n // 4]
    same = lambda seed, t: (sample(few, 0.5, None, seed, t)[0] == token[:len(few)]).float().mean()
    assert same(5, t) == 1 and abs(same(6, t) - (p * p).sum()) < 0.2 and abs(same(5, t + 1) - (p * p).sum()) < 0.2


@kernel
def test_sample_kernel_far_tail():
    """With 150,000 equal logits the winner is decided among noises of 1e-5: no column is favoured by rounding."""
    logits = torch.zeros(2000 if CUDA else 2, 150_000, device=DEVICE)
    token, logp = sample(logits, 1.0, None, 3, torch.tensor(0, device=DEVICE))
    assert (logp + torch.tensor(150_000.0).log().item()).abs().max() < 1e-5
    if CUDA:
        assert len(token.unique()) > 1960 and abs(token.double().mean().item() - 75_000) < 4 * 43_301 / 2000 ** 0.5


@pytest.mark.skipif(CUDA or INTERPRET or triton is None, reason="runs the kernels where there is no GPU")
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter(__file__, "not interpreter")


def test_rms_norm_takes_any_layout_of_gradients():
    x, w = torch.randn(5, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    g = torch.randn(3, 5, 8)
    got = torch.autograd.grad(rms_norm(x, w, 1e-6).transpose(0, 1), (x, w), g)
    want = torch.autograd.grad(norm_formula(x, w), (x, w), g.transpose(0, 1))
    assert error(got, [y.double() for y in want]) < 1e-6
