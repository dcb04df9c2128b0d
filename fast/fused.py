"""
What stands between the matrix products of a layer: RMSNorm, rotary embedding, SwiGLU. One kernel each instead of five to ten.

The idea. These touch every activation and compute almost nothing, so their time is the number of times memory is read and
written, and in decoding the number of launches. Each function below is its formula in PyTorch, which runs on CPU, and a
Triton kernel forward and backward, which runs on CUDA: reads once, computes in fp32, writes once, and saves for the backward
pass no more than its inputs (and one number a row). RMSNorm and rotation have the same hand-written backward pass on CPU, where
autograd would keep and read again every intermediate.

The gradient of an RMSNorm weight sums over all rows: programs sum over rows in a fixed order and their partial sums are added
in a fixed order, so two runs agree bit for bit.

Left out: LayerNorm, GELU, residual adds (the matrix products before them do those: `model.add_linear`).
"""
import torch
import torch.nn.functional as F

from fast.launch import jit, kernels, tl, triton, widen

PROGRAMS = 1024  # partial sums of an RMSNorm weight's gradient


def blocks(width, rows):
    """(rows, columns) of a program's block, powers of two: 4,096 numbers, fewer where programs would be too few for a card."""
    columns = triton.next_power_of_2(width)
    return max(1, min(4096 // columns, triton.next_power_of_2(rows // 256 + 1))), columns


# ---- RMSNorm ----

def rms_norm(x, weight, eps):
    """x (..., n), weight (n,) -> weight * x / sqrt(mean(x^2) + eps). Normalised in fp32, cast, then scaled: the order the
    checkpoints were trained with."""
    return RMSNormFunction.apply(x, weight, eps)


@jit("N")
def norm_kernel(X, W, Y, R, N, eps, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # X, Y (N, C); R (N,) fp32 1 / sqrt(mean(x^2) + eps)
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (c < C)[None, :]
    at = row.to(tl.int64)[:, None] * C + c[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)             # (ROWS, COLUMNS)
    r = 1 / tl.sqrt(tl.sum(x * x, 1) / C + eps)                            # (ROWS,)
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    y = (x * r[:, None]).to(Y.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(R + row, r, mask=row < N)


@jit("N")
def norm_backward_kernel(X, W, R, DY, DX, DW, N, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # DW (programs, C) fp32, one row a program
    c = tl.arange(0, COLUMNS)
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    dw = tl.zeros((COLUMNS,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (c < C)[None, :]
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        r = tl.load(R + row, mask=row < N, other=0.0)
        n = tl.load(X + at, mask=inside, other=0.0).to(tl.float32) * r[:, None]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        g = dy * w[None, :]
        dx = r[:, None] * (g - n * (tl.sum(g * n, 1) / C)[:, None])
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        dw += tl.sum(dy * n.to(X.dtype.element_ty).to(tl.float32), 0)
    tl.store(DW + tl.program_id(0) * C + c, dw, mask=c < C)


class RMSNormFunction(torch.autograd.Function):
    """n = x * r with r = 1 / sqrt(mean(x^2) + eps), y = w n;  dx = r (w dy - n mean(w dy n)),  dw = sum over rows of dy n"""
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        C, N = x.shape[-1], x.numel() // x.shape[-1]
        if kernels(x):
            y, r = torch.empty_like(x), torch.empty(N, device=x.device, dtype=torch.float32)
            rows, columns = blocks(C, N)
            norm_kernel[triton.cdiv(N, rows),](x, weight, y, r, N, eps, C=C, ROWS=rows, COLUMNS=columns)
        else:
            r = torch.rsqrt(widen(x).pow(2).mean(-1, keepdim=True) + eps)
            y = weight * (widen(x) * r).to(x.dtype)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        C, N = x.shape[-1], x.numel() // x.shape[-1]
        if kernels(x):
            rows, columns = blocks(C, N)
            programs = min(PROGRAMS, triton.cdiv(N, rows))
            dx, dw = torch.empty_like(x), torch.empty(programs, C, device=x.device, dtype=torch.float32)
            norm_backward_kernel[programs,](x, weight, r, dy.contiguous(), dx, dw, N, C=C, ROWS=rows, COLUMNS=columns)
        else:
            n, dy = widen(x) * r, widen(dy)
            g = dy * weight
            dx = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1).mul_(r).to(x.dtype)
            dw = (dy * n.to(x.dtype)).reshape(N, C)
        return dx, dw.sum(0).to(weight.dtype), None


# ---- rotary embedding ----

def rotate(q, k, cos, sin):
    """Rotate q (N, nh, hs) and k (N, nkv, hs), any strides with hs contiguous: channel i pairs with i + hs/2, as Hugging Face
    checkpoints have it; cos, sin (N, hs/2) fp32. Without gradients, on a GPU, in place: q and k are what the caller gets back."""
    if torch.is_grad_enabled() or not kernels(q):
        return Rotate.apply(q, k, cos, sin)
    return launch_rotate(q, k, q, k, cos, sin, False)


def rotate_one(x, cos, sin):
    a, b = widen(x).chunk(2, dim=-1)                                       # (N, heads, hs/2) each
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@jit()
def rotate_heads(X, Y, x_row, x_head, y_row, y_head, cos, sin, row, HEADS: tl.constexpr, HALF: tl.constexpr,
                 H: tl.constexpr, D: tl.constexpr):
    h, d = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    inside = (h < HEADS) & (d < HALF)
    X, Y = X + row * x_row + h * x_head + d, Y + row * y_row + h * y_head + d
    a = tl.load(X, mask=inside, other=0.0).to(tl.float32)                  # (H, D)
    b = tl.load(X + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + HALF, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


@jit()
def rotate_kernel(Q, K, QY, KY, COS, SIN, q_row, q_head, k_row, k_head, qy_row, qy_head, ky_row, ky_head,
                  NH: tl.constexpr, NKV: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
                  NHP: tl.constexpr, NKVP: tl.constexpr, D: tl.constexpr):
    # one program per row, all heads; BACK: the inverse rotation, which is the gradient's
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    cos = tl.load(COS + row * HALF + d, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(SIN + row * HALF + d, mask=d < HALF, other=0.0)[None, :]
    sin = -sin if BACK else sin
    rotate_heads(Q, QY, q_row, q_head, qy_row, qy_head, cos, sin, row, NH, HALF, NHP, D)
    rotate_heads(K, KY, k_row, k_head, ky_row, ky_head, cos, sin, row, NKV, HALF, NKVP, D)


def launch_rotate(q, k, q_out, k_out, cos, sin, back):
    (N, nh, hs), nkv = q.shape, k.shape[1]
    p2 = triton.next_power_of_2
    strides = [s for x in (q, k, q_out, k_out) for s in x.stride()[:2]]
    rotate_kernel[N,](q, k, q_out, k_out, cos, sin, *strides, NH=nh, NKV=nkv, HALF=hs // 2, BACK=back, NHP=p2(nh), NKVP=p2(nkv),
                      D=p2(hs // 2), num_warps=2)
    return q_out, k_out


class Rotate(torch.autograd.Function):
    """The gradient of a rotation is the gradient, rotated back."""
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        if not kernels(q):
            return rotate_one(q, cos, sin), rotate_one(k, cos, sin)
        new = lambda x: torch.empty(x.shape, device=x.device, dtype=x.dtype)
        return launch_rotate(q, k, new(q), new(k), cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        if not kernels(dq):
            return rotate_one(dq, cos, -sin), rotate_one(dk, cos, -sin), None, None
        dq, dk = dq.contiguous(), dk.contiguous()
        return *launch_rotate(dq, dk, torch.empty_like(dq), torch.empty_like(dk), cos, sin, True), None, None


# ---- SwiGLU ----

def swiglu(x):
    """x (N, 2 M), gate and up side by side -> silu(gate) * up (N, M)."""
    if kernels(x):
        return Swiglu.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@jit()
def swiglu_kernel(X, Y, DY, M, BACK: tl.constexpr, BLOCK: tl.constexpr):
    # forward: X (N, 2 M) -> Y (N, M). BACK: X, DY (N, M) -> gradient of X, into Y (N, 2 M)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < M
    gate = tl.load(X + row * 2 * M + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * M + M + c, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    if BACK:
        dy = tl.load(DY + row * M + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + row * 2 * M + c, (dy * up * s * (1 + gate * (1 - s))).to(Y.dtype.element_ty), mask=inside)
        tl.store(Y + row * 2 * M + M + c, (dy * gate * s).to(Y.dtype.element_ty), mask=inside)
    else:
        tl.store(Y + row * M + c, (gate * s * up).to(Y.dtype.element_ty), mask=inside)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        N, M = len(x), x.shape[1] // 2
        y = torch.empty(N, M, device=x.device, dtype=x.dtype)
        swiglu_kernel[N, triton.cdiv(M, 1024)](x, y, y, M, BACK=False, BLOCK=1024)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        N, M = len(x), x.shape[1] // 2
        dx = torch.empty_like(x)
        swiglu_kernel[N, triton.cdiv(M, 1024)](x, dx, dy.contiguous(), M, BACK=True, BLOCK=1024)
        return dx
