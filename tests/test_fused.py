"""
Fused functions against the formulas that they replace in model.py, and those against formulas of
their own, in fp64.

The kernels run on a GPU if there is one, else in Triton's interpreter, in a process of its own.
What runs on CPU instead of them runs here.
"""
import pytest
import torch

import model
from conftest import CUDA, DEVICE, INTERPRET, beside_interpreter, kernel
from fast import fused, launch

KERNELS = "not interpreter"  # tests that run in the interpreter
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def error(got, want):
    pairs = zip(got, want, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def norm_formula(x, w):
    return w * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())


def rotate_formula(q, k, cos, sin):
    """As a product of complex numbers."""
    turn = torch.complex(cos.double(), sin.double())[:, None]
    z = [torch.complex(*x.chunk(2, -1)) * turn for x in (q, k)]
    return tuple(torch.cat((x.real, x.imag), -1) for x in z)


def swiglu_formula(x):
    gate, up = x.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def results(f, leaves, grads):
    """[outputs and gradients] of f by autograd."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    y = f(*leaves)
    y = y if isinstance(y, tuple) else (y,)
    grads = [g.to(o.dtype) for g, o in zip(grads, y)]
    return [*y, *torch.autograd.grad(y, leaves, grads)]


def compare(f, replaced, formula, *, leaves, grads):
    """f against the function of model.py that it replaces and both against a formula, these two in
    fp64. -> results of f"""
    assert launch.kernels(leaves[0]) == (CUDA or INTERPRET)
    assert not launch.kernels(leaves[0].double())
    got = results(f, leaves, grads)
    wide = [x.double() for x in leaves]
    want = results(replaced, wide, [g.double() for g in grads])
    apart = results(formula, wide, [g.double() for g in grads])
    tolerance = TOLERANCE[leaves[0].dtype]
    assert error(want, apart) < 1e-12
    assert error(got, want) < tolerance and error(got, apart) < tolerance
    return got


def rand(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((1, 576), (10, 48), (5, 3, 128), (300, 20)), ids=str)
def test_rms_norm(shape, dtype, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 3)  # each sums over several blocks of rows
    if len(shape) == 2 and shape[0] == 300:
        assert fused.blocks(20, 300) == (2, 32)
        if not CUDA:  # the interpreter pays per program: 19, the last one ragged
            monkeypatch.setattr(fused, "blocks", lambda width, rows: (16, 32))

    def f(x, w):
        return fused.rms_norm(x, w, 1e-6)

    def replaced(x, w):
        return model.rms_norm(x, w, 1e-6)

    x, w = rand(*shape, dtype=dtype), 1 + 0.3 * rand(shape[-1], dtype=dtype)
    dy = rand(*shape, dtype=dtype)
    got = compare(f, replaced, norm_formula, leaves=(x, w), grads=(dy,))
    # the control: another eps
    assert error(got[:1], [model.rms_norm(x.double(), w.double(), 0.1)]) > 1e-2
    again = results(f, (x, w), (dy,))
    assert all(torch.equal(a, b) for a, b in zip(again, got))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, nh, nkv, hs", ((1, 9, 3, 64), (5, 12, 2, 128), (7, 4, 4, 12)))
def test_rotate(N, nh, nkv, hs, dtype):
    torch.manual_seed(0)
    angle = torch.rand(N, hs // 2, device=DEVICE) * 100
    cos, sin = angle.cos(), angle.sin()

    def parts(qkv):  # views with gaps between rows, as in the model
        q, k, _ = qkv.split([nh, nkv, nkv], dim=1)
        return q, k

    def f(qkv):
        return model.rotate(*parts(qkv), cos, sin)

    def formula(qkv):
        return rotate_formula(*parts(qkv), cos, sin)

    qkv = rand(N, nh + 2 * nkv, hs, dtype=dtype)
    grads = rand(N, nh, hs, dtype=dtype), rand(N, nkv, hs, dtype=dtype)
    # in fp64 model.rotate is its formula
    got = compare(f, f, formula, leaves=(qkv,), grads=grads)
    # the control: the other way round
    other = model.rotate_one(parts(qkv)[0].double(), cos, -sin)
    assert error(got[:1], [other]) > 0.1
    with torch.no_grad():  # in place, and nothing but q and k
        mine = qkv.clone()
        q, k = f(mine)
        assert (q.data_ptr() == mine.data_ptr()) == launch.kernels(q)
        assert torch.equal(mine[:, nh + nkv:], qkv[:, nh + nkv:])
        assert torch.equal(q, got[0]) and torch.equal(k, got[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, M", ((1, 1536), (7, 100), (3, 2050)))
def test_swiglu(N, M, dtype):
    x = rand(N, 2 * M, dtype=dtype)
    dy = rand(N, M, dtype=dtype)
    got = compare(model.swiglu, model.swiglu, swiglu_formula, leaves=(x,), grads=(dy,))
    # the control: gate and up swapped
    assert error(got[:1], [model.swiglu(x.double().roll(M, 1))]) > 0.1


@kernel
def test_the_model_takes_the_kernels(monkeypatch):
    """model.py's formulas give way where the kernels run: one that did not would pass above."""
    called = []
    norm = model.RMSNorm(8, 1e-6).to(DEVICE)
    x, angle = rand(3, 2, 8, dtype=torch.float32), rand(3, 4, dtype=torch.float32)
    names = ["rms_norm", "rotate", "swiglu"]
    for name in names:
        monkeypatch.setattr(fused, name, lambda *args, name=name: called.append(name))
    with torch.no_grad():
        norm(x)
        model.rotate(x, x, angle, angle)
        model.swiglu(x[:, 0])
        assert called == names
        model.swiglu(x[:, 0].double())  # the control
        assert called == names


@beside_interpreter
def test_kernels_in_interpreter(pass_in_interpreter):
    pass_in_interpreter()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_rms_norm_on_cpu_has_the_formulas_bits(dtype):
    """with gradients fast/fused.py computes it, without them the formula: sampler and learner must
    not differ by that"""
    if INTERPRET and dtype == torch.float32:
        dtype = torch.bfloat16  # fp32 is the kernel's
    torch.manual_seed(0)
    norm = model.RMSNorm(16, 1e-6).to(dtype)
    norm.weight.data.normal_(1, 0.3)
    qkv = torch.randn(40, 6, 16).to(dtype)
    for x in (qkv, qkv[:, 1:3], qkv.transpose(0, 1)):
        loud = norm(x)
        with torch.no_grad():
            quiet = norm(x)
        assert loud.requires_grad and not quiet.requires_grad
        assert torch.equal(loud, quiet)
        assert torch.equal(quiet, model.rms_norm(x, norm.weight, 1e-6))
        assert not torch.equal(loud, model.rms_norm(x, norm.weight, 1e-2))  # control


def test_rms_norm_takes_any_layout_of_gradients():
    x, w = torch.randn(5, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    g = torch.randn(3, 5, 8)
    got = torch.autograd.grad(fused.rms_norm(x, w, 1e-6).transpose(0, 1), (x, w), g)
    want = torch.autograd.grad(norm_formula(x, w), (x, w), g.transpose(0, 1))
    assert error(got, [y.double() for y in want]) < 1e-6
    # the control: the same gradient laid out without the transposition
    wrong = torch.autograd.grad(norm_formula(x, w), (x, w), g.reshape(5, 3, 8))
    assert error(got, [y.double() for y in wrong]) > 0.1
