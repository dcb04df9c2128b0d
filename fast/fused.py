"""
What stands between the matrix products of a layer: RMSNorm, rotary embedding, SwiGLU.

The idea. These touch every activation and compute almost nothing, so their time is the
number of times memory is read and written, and in decoding the number of launches. The
formulas stand in model.py; here each has one Triton kernel forward and one backward instead
of five to ten launches. A kernel reads once, computes in fp32, writes once, and saves for
the backward pass no more than its inputs (and one number a row). tests/test_fused.py holds
each against the formula it replaces.

RMSNorm also has its backward pass by hand on CPU, where autograd would keep and read again
every intermediate; its forward pass there gives the formula's bits.

The gradient of an RMSNorm weight sums over all rows: programs sum over rows in a fixed
order and their partial sums are added in a fixed order, so two runs agree bit for bit.

Letters: N rows of C columns (SwiGLU: 2 M and M), x in, y out, w the weight, d a gradient's prefix,
c and d numbers of columns, h of heads; r, n, s and g as in the formulas. Upper case in a kernel:
pointers and constants of compilation.

Left out: LayerNorm, GELU, residual adds (see fast/residual.py).
"""
import torch

from fast.launch import cdiv, early, jit, kernels, next_power_of_2, tl, wait, widen

PROGRAMS = 1024        # partial sums of an RMSNorm weight's gradient
SWIGLU_COLUMNS = 1024  # columns of a SwiGLU program


# ---- RMSNorm ----

def rms_norm(x, weight, eps):
    """Replaces model.rms_norm: x (..., C), weight (C,) -> (..., C)."""
    if torch.is_grad_enabled() or not kernels(x):
        return Norm.apply(x, weight, eps)
    return launch_norm(x.contiguous(), weight, eps)[0]


class Norm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) and n = x r:

        y = w n      dx = r (w dy - n mean(w dy n))      dw = sum over rows of dy n
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        if kernels(x):
            y, r = launch_norm(x, weight, eps)
        else:
            r = torch.rsqrt(widen(x).pow(2).mean(-1, keepdim=True) + eps)  # (..., 1)
            y = weight * (widen(x) * r).to(x.dtype)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        if kernels(x):
            dx, dw = launch_norm_backward(x, weight, r, dy.contiguous())
        else:
            dy = widen(dy)
            n = widen(x) * r
            g = dy * weight
            mean = (g * n).mean(-1, keepdim=True)               # (..., 1)
            dx = torch.addcmul(g, n, mean, value=-1).mul_(r).to(x.dtype)
            if not ctx.needs_input_grad[1]:  # a frozen weight
                return dx, None, None
            dw = (dy * n.to(x.dtype)).reshape(-1, x.shape[-1])  # (N, C)
        return dx, dw.sum(0).to(weight.dtype), None


def blocks(width, rows):
    """(rows, columns) of a program's block, powers of two, holding 4,096 numbers; fewer
    where there would otherwise be too few programs for a card."""
    columns = next_power_of_2(width)
    return max(1, min(4096 // columns, next_power_of_2(rows // 256 + 1))), columns


def launch_norm(x, weight, eps):
    """-> y as x, r (N,) fp32."""
    C = x.shape[-1]
    N = x.numel() // C
    y = torch.empty_like(x)
    r = torch.empty(N, device=x.device, dtype=torch.float32)
    rows, columns = blocks(C, N)
    norm_kernel[cdiv(N, rows),](
        x, weight, y, r, N, eps, C=C, ROWS=rows, COLUMNS=columns, **early(x))
    return y, r


@jit("N")
def norm_kernel(X, W, Y, R, N, eps, C: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr, EARLY: tl.constexpr = False):
    # X, Y (N, C); R (N,) fp32 1 / sqrt(mean(x^2) + eps)
    wait(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (c < C)[None, :]
    at = row.to(tl.int64)[:, None] * C + c[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)  # (ROWS, COLUMNS)
    r = 1 / tl.sqrt(tl.sum(x * x, 1) / C + eps)                 # (ROWS,)
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)    # (COLUMNS,)
    y = (x * r[:, None]).to(Y.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(R + row, r, mask=row < N)


def launch_norm_backward(x, weight, r, dy):
    """-> dx as x, dw (programs, C) fp32, still to be summed."""
    C = x.shape[-1]
    N = x.numel() // C
    rows, columns = blocks(C, N)
    programs = min(PROGRAMS, cdiv(N, rows))
    dx = torch.empty_like(x)
    dw = torch.empty(programs, C, device=x.device, dtype=torch.float32)
    norm_backward_kernel[programs,](
        x, weight, r, dy, dx, dw, N, C=C, ROWS=rows, COLUMNS=columns)
    return dx, dw


@jit("N")
def norm_backward_kernel(X, W, R, DY, DX, DW, N,
                         C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # DW (programs, C) fp32, one row a program
    c = tl.arange(0, COLUMNS)
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    dw = tl.zeros((COLUMNS,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (c < C)[None, :]
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        r = tl.load(R + row, mask=row < N, other=0.0)           # (ROWS,)
        n = tl.load(X + at, mask=inside, other=0.0).to(tl.float32) * r[:, None]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)  # (ROWS, COLUMNS)
        g = dy * w[None, :]
        dx = r[:, None] * (g - n * (tl.sum(g * n, 1) / C)[:, None])
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        dw += tl.sum(dy * n.to(X.dtype.element_ty).to(tl.float32), 0)
    tl.store(DW + tl.program_id(0) * C + c, dw, mask=c < C)


# ---- rotary embedding ----

def rotate(q, k, cos, sin):
    """Replaces model.rotate: q (N, nh, hs), k (N, nkv, hs), any strides with hs contiguous;
    cos, sin (N, hs/2) fp32. Without gradients in place: q and k are what the caller gets
    back."""
    if torch.is_grad_enabled():
        return Rotate.apply(q, k, cos, sin)
    launch_rotate(q, k, q_out=q, k_out=k, cos=cos, sin=sin, back=False)
    return q, k


class Rotate(torch.autograd.Function):
    """The gradient of a rotation is the gradient, rotated back."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        # not empty_like, which keeps the gaps between the rows of a view
        q_out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        k_out = torch.empty(k.shape, device=k.device, dtype=k.dtype)
        launch_rotate(q, k, q_out=q_out, k_out=k_out, cos=cos, sin=sin, back=False)
        return q_out, k_out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        dq, dk = dq.contiguous(), dk.contiguous()
        q_out, k_out = torch.empty_like(dq), torch.empty_like(dk)
        launch_rotate(dq, dk, q_out=q_out, k_out=k_out, cos=cos, sin=sin, back=True)
        return q_out, k_out, None, None


def launch_rotate(q, k, q_out, k_out, cos, sin, back):
    N, nh, hs = q.shape
    nkv = k.shape[1]
    strides = [s for x in (q, k, q_out, k_out) for s in x.stride()[:2]]
    rotate_kernel[N,](
        q, k, q_out, k_out, cos, sin, *strides,
        NH=nh, NKV=nkv, HALF=hs // 2, BACK=back,
        NHP=next_power_of_2(nh), NKVP=next_power_of_2(nkv),
        D=next_power_of_2(hs // 2), num_warps=2, **early(q))


@jit()
def rotate_kernel(Q, K, QY, KY, COS, SIN,
                  q_row, q_head, k_row, k_head, qy_row, qy_head, ky_row, ky_head,
                  NH: tl.constexpr, NKV: tl.constexpr, HALF: tl.constexpr,
                  BACK: tl.constexpr, NHP: tl.constexpr, NKVP: tl.constexpr,
                  D: tl.constexpr, EARLY: tl.constexpr = False):
    # one program per row, all heads; BACK: the inverse rotation, which is the gradient's
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    cos = tl.load(COS + row * HALF + d, mask=d < HALF, other=0.0)[None, :]  # (1, D)
    sin = tl.load(SIN + row * HALF + d, mask=d < HALF, other=0.0)[None, :]
    sin = -sin if BACK else sin
    rotate_heads(Q, QY, q_row, q_head, qy_row, qy_head, cos, sin, row,
                 NH, HALF, NHP, D)
    rotate_heads(K, KY, k_row, k_head, ky_row, ky_head, cos, sin, row,
                 NKV, HALF, NKVP, D)


@jit()
def rotate_heads(X, Y, x_row, x_head, y_row, y_head, cos, sin, row,
                 HEADS: tl.constexpr, HALF: tl.constexpr,
                 H: tl.constexpr, D: tl.constexpr):
    h, d = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    inside = (h < HEADS) & (d < HALF)
    X += row * x_row + h * x_head + d
    Y += row * y_row + h * y_head + d
    a = tl.load(X, mask=inside, other=0.0).to(tl.float32)       # (H, D)
    b = tl.load(X + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + HALF, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


# ---- SwiGLU ----

def swiglu(x):
    """Replaces model.swiglu: x (N, 2 M), gate and up side by side -> (N, M)."""
    if torch.is_grad_enabled():
        return Swiglu.apply(x)
    return launch_swiglu_forward(x)


class Swiglu(torch.autograd.Function):
    """With s = sigmoid(gate):

        y = gate s up      d_gate = dy up s (1 + gate (1 - s))      d_up = dy gate s
    """

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return launch_swiglu_forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        dx = torch.empty_like(x)
        launch_swiglu(x, dx, dy.contiguous(), back=True)
        return dx


def launch_swiglu_forward(x):
    y = torch.empty(len(x), x.shape[1] // 2, device=x.device, dtype=x.dtype)
    launch_swiglu(x, y, y, back=False)
    return y


def launch_swiglu(x, out, dy, back):
    N, M = len(x), x.shape[1] // 2
    swiglu_kernel[N, cdiv(M, SWIGLU_COLUMNS)](
        x, out, dy, M, BACK=back, BLOCK=SWIGLU_COLUMNS, **early(x))


@jit()
def swiglu_kernel(X, Y, DY, M, BACK: tl.constexpr, BLOCK: tl.constexpr,
                  EARLY: tl.constexpr = False):
    # forward: X (N, 2 M) -> Y (N, M). BACK: X, DY (N, M) -> gradient of X, into Y (N, 2 M)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < M
    gate = tl.load(X + row * 2 * M + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * M + M + c, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))                                 # (BLOCK,)
    if BACK:
        dy = tl.load(DY + row * M + c, mask=inside, other=0.0).to(tl.float32)
        d_gate = dy * up * s * (1 + gate * (1 - s))
        d_up = dy * gate * s
        tl.store(Y + row * 2 * M + c, d_gate.to(Y.dtype.element_ty), mask=inside)
        tl.store(Y + row * 2 * M + M + c, d_up.to(Y.dtype.element_ty), mask=inside)
    else:
        tl.store(Y + row * M + c, (gate * s * up).to(Y.dtype.element_ty), mask=inside)
