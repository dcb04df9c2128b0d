"""
Attention under a Shadow Mask: one integer per key says when the key dies.

The idea. A key is born with its row and is seen until it is evicted: two comparisons for a query
and a key are the whole mask, and no N x N mask exists.

Here, from what is plain to what is fast:

    definition             the formula in fp64, with a dense mask
    simple_attention       a Triton kernel to be read, forward and backward
    shadow_attention_ref   PyTorch's attention, a chunk of queries at a time; for real on CPU
    shadow_attention       the front door: fast/attention.py on CUDA, PyTorch elsewhere

The tuned kernels in fast/attention.py sort the keys, skip the dead ones, and say in steps what they
add to the readable one. `python -m experiments.attention` holds all of them against the
definition. Left out: dropout, biases, softcap, learned sink logits, second derivatives.

Letters: N rows of queries q, keys k and values v; nh query heads, nkv KV heads, of size hs; i a
query's row, j a key's. In a kernel upper case is a pointer or a constant of compilation.
References: FlashAttention-2 (arXiv 2307.08691), the Triton tutorial on fused attention.
"""
import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fast.attention import fast_attention
from fast.launch import interpreted, jit, next_power_of_2, tl, triton


def visible(until):
    """visible[kv_head, i, j]: query i sees key j iff j <= i < until[kv_head, j]."""
    j = torch.arange(until.shape[1], device=until.device)       # (N,)
    i = j[:, None]                                              # (N, 1)
    return (j <= i) & (i < until[:, None])                      # (nkv, N, N)


def definition(q, k, v, until, scale=None):
    """What this file computes, in fp64; shapes as `shadow_attention`."""
    group = q.shape[1] // k.shape[1]  # query heads per KV head
    k = k.double().repeat_interleave(group, 1)                  # (N, nh, hs)
    v = v.double().repeat_interleave(group, 1)                  # (N, nh, hs)
    seen = visible(until).repeat_interleave(group, 0)           # (nh, N, N)
    if scale is None:
        scale = q.shape[2] ** -0.5
    qk = torch.einsum("ihc,jhc->hij", q.double(), k) * scale  # (nh, N, N)
    hidden = ~seen & seen.any(2, keepdim=True)  # a row without keys: 0
    weight = qk.masked_fill(hidden, -math.inf).softmax(2) * seen  # (nh, N, N)
    return torch.einsum("hij,jhc->ihc", weight, v)              # (N, nh, hs)


def shadow_attention(q, k, v, until, scale=None, impl=None, plan=None, out=None):
    """Attention in which query row i sees key row j iff j <= i < until[kv_head, j].

    q (N, nh, hs), k and v (N, nkv, hs), any strides, one floating dtype; until (nkv, N) int32, in
    rows. Query head h reads KV head h // (nh // nkv). scale: factor on q.k, 1/sqrt(hs) if None.
    impl: "triton" (tuned), "simple" (readable), "ref" (PyTorch), or None for Triton on CUDA and
    PyTorch elsewhere. Two more are for "triton" alone: plan, `fast.attention.make_plan(until)` if
    the caller made it before, once for all layers; out, where the result may go if no gradient is
    recorded, like q with heads next to each other; it may be q itself.

    Returns (N, nh, hs) in q's dtype, differentiable once in q, k and v. A query that sees no key
    gives 0 and gets gradient 0; a key that nobody sees gets gradient 0, whatever it holds. Raises
    ValueError for shapes, dtypes and devices that do not fit, and for an impl that cannot run here.
    """
    check(q, k, v, until)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if impl not in (None, "triton", "simple", "ref"):
        raise ValueError(
            f"impl={impl!r} is unknown: use 'triton', 'simple', 'ref' or None")
    if impl is None:
        impl = "triton" if q.is_cuda else "ref"
    if impl == "ref":
        return shadow_attention_ref(q, k, v, until, scale=scale)
    check_triton(q, impl)
    if impl == "simple":
        return simple_attention(q, k, v, until, scale=scale)
    return fast_attention(q, k, v, until, scale=scale, plan=plan, out=out)


# The readable kernels. A Triton kernel is a function that many programs run at once, each with its
# own `program_id`: kernel[n, m](...) starts n * m of them. A tensor arrives as a pointer to its
# first number; tl.load and tl.store take a block of pointers, whose shape is known when the kernel
# is compiled (constexpr). `@jit("N")` is triton.jit, without a new compilation for each N.
#
# Tensors lie with heads first and are padded with zeros: N to a multiple of BLOCK, the head size to
# WIDTH, a power of two; padded keys are dead. `row` holds the numbers of BLOCK queries, `key` of
# BLOCK keys, `dies` the keys' `until`. Dead keys are read here and get weight 0.

BLOCK = 32


@jit()
def load_block(X, at, WIDTH: tl.constexpr):
    # lines `at` (BLOCK,) of a matrix of WIDTH columns
    place = at.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(X + place)                                      # (BLOCK, WIDTH)


@jit()
def store_block(X, x, at, WIDTH: tl.constexpr):
    place = at.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(X + place, x.to(X.dtype.element_ty))


@jit()
def times(a, b):
    return tl.dot(a, b, input_precision="ieee")  # true fp32, no TF32


@jit()
def masked_qk(q, k, row, key, dies, scale):
    # q.k for each query and key; -inf where the query does not see the key
    qk = times(q, tl.trans(k)) * scale
    seen = (key[None, :] <= row[:, None]) & (row[:, None] < dies[None, :])
    return tl.where(seen, qk, float("-inf"))                    # (BLOCK, BLOCK)


@jit("N")
def simple_forward(Q, K, V, UNTIL, OUT, LSE, N, group, scale,
                   WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # one program: BLOCK queries of one query head, all keys that they may see
    block, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // group  # which this query head reads
    row = block * BLOCK + tl.arange(0, BLOCK)                   # (BLOCK,)
    q = load_block(Q, head * N + row, WIDTH)                    # (BLOCK, WIDTH)
    # softmax one block of keys at a time. Of the qk so far: the largest, the sum of
    # exp(qk - largest), and the sum of the values with these weights. It starts finite, as
    # -inf - -inf is NaN where a query has seen no key yet
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):  # later keys are not born yet
        key = start + tl.arange(0, BLOCK)                       # (BLOCK,)
        k = load_block(K, kv_head * N + key, WIDTH)             # (BLOCK, WIDTH)
        v = load_block(V, kv_head * N + key, WIDTH)             # (BLOCK, WIDTH)
        dies = tl.load(UNTIL + kv_head * N + key)               # (BLOCK,)
        qk = masked_qk(q, k, row, key, dies, scale)             # (BLOCK, BLOCK)
        larger = tl.maximum(largest, tl.max(qk, 1))             # (BLOCK,)
        shrink = tl.exp(largest - larger)  # of what was summed so far
        weight = tl.exp(qk - larger[:, None])                   # (BLOCK, BLOCK) 0: not seen
        total = total * shrink + tl.sum(weight, 1)
        out = out * shrink[:, None] + times(weight.to(v.dtype), v)
        largest = larger
    total = tl.where(total > 0, total, 1.0)  # a query that sees no key: 0 / 1
    store_block(OUT, out / total[:, None], head * N + row, WIDTH)
    tl.store(LSE + head * N + row, largest + tl.log(total))  # log of sum of exp(qk)


# Backward. With weight = exp(qk - lse), which sums to 1 over the keys, and out = weight v,
#
#     d_v = weight^T d_out        d_weight = d_out v^T        d_qk = weight (d_weight - delta)
#     d_q = scale d_qk k          d_k = scale d_qk^T q
#
# where delta, sum(weight * d_weight) of a row from the softmax's derivative, is sum(out * d_out).
# d_q sums over keys, d_k and d_v over queries: a kernel each, and the weights are made again.
# experiments/attention.py and tests/test_shadow_attn.py hold them against the definition.

@jit()
def qk_gradient(weight, d_out, delta, v):
    return weight * (times(d_out, tl.trans(v)) - delta[:, None])  # (BLOCK, BLOCK)


@jit("N")
def simple_backward_q(Q, K, V, UNTIL, LSE, DELTA, D_OUT, D_Q, N, group, scale,
                      WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # programs and loop as in simple_forward
    block, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // group
    row = block * BLOCK + tl.arange(0, BLOCK)                   # (BLOCK,)
    q = load_block(Q, head * N + row, WIDTH)                    # (BLOCK, WIDTH)
    d_out = load_block(D_OUT, head * N + row, WIDTH)            # (BLOCK, WIDTH)
    lse = tl.load(LSE + head * N + row)                         # (BLOCK,)
    delta = tl.load(DELTA + head * N + row)                     # (BLOCK,)
    d_q = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        key = start + tl.arange(0, BLOCK)                       # (BLOCK,)
        k = load_block(K, kv_head * N + key, WIDTH)             # (BLOCK, WIDTH)
        v = load_block(V, kv_head * N + key, WIDTH)             # (BLOCK, WIDTH)
        dies = tl.load(UNTIL + kv_head * N + key)               # (BLOCK,)
        weight = tl.exp(masked_qk(q, k, row, key, dies, scale) - lse[:, None])
        d_q += times(qk_gradient(weight, d_out, delta, v).to(k.dtype), k)
    store_block(D_Q, d_q * scale, head * N + row, WIDTH)


@jit("N")
def simple_backward_kv(Q, K, V, UNTIL, LSE, DELTA, D_OUT, D_K, D_V, N, group, scale,
                       WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # one program: BLOCK keys of one KV head, all queries that may see them, of all the
    # query heads that read it
    block, kv_head = tl.program_id(0), tl.program_id(1)
    key = block * BLOCK + tl.arange(0, BLOCK)                   # (BLOCK,)
    k = load_block(K, kv_head * N + key, WIDTH)                 # (BLOCK, WIDTH)
    v = load_block(V, kv_head * N + key, WIDTH)                 # (BLOCK, WIDTH)
    dies = tl.load(UNTIL + kv_head * N + key)                   # (BLOCK,)
    d_k = tl.zeros((BLOCK, WIDTH), tl.float32)
    d_v = tl.zeros((BLOCK, WIDTH), tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(block * BLOCK, N, BLOCK):  # earlier queries are too early
            row = start + tl.arange(0, BLOCK)                   # (BLOCK,)
            q = load_block(Q, head * N + row, WIDTH)            # (BLOCK, WIDTH)
            d_out = load_block(D_OUT, head * N + row, WIDTH)    # (BLOCK, WIDTH)
            lse = tl.load(LSE + head * N + row)                 # (BLOCK,)
            delta = tl.load(DELTA + head * N + row)             # (BLOCK,)
            weight = tl.exp(masked_qk(q, k, row, key, dies, scale) - lse[:, None])
            d_v += times(tl.trans(weight.to(d_out.dtype)), d_out)
            d_qk = qk_gradient(weight, d_out, delta, v).to(q.dtype)
            d_k += times(tl.trans(d_qk), q)
    store_block(D_K, d_k * scale, kv_head * N + key, WIDTH)
    store_block(D_V, d_v, kv_head * N + key, WIDTH)


class SimpleAttention(torch.autograd.Function):
    """The readable kernels as one differentiable step: q (nh, N, WIDTH), k and v (nkv, N, WIDTH)
    and until (nkv, N), padded -> (nh, N, WIDTH)."""

    @staticmethod
    def forward(ctx, q, k, v, until, scale):
        nh, N, width = q.shape
        out = torch.empty_like(q)                               # (nh, N, WIDTH)
        lse = torch.empty(nh, N, device=q.device)               # (nh, N) fp32
        ctx.sizes = N, nh // len(k), scale, width, BLOCK
        simple_forward[N // BLOCK, nh](q, k, v, until, out, lse, *ctx.sizes)
        ctx.save_for_backward(q, k, v, until, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, until, out, lse = ctx.saved_tensors
        d_out = d_out.contiguous()                              # (nh, N, WIDTH)
        delta = (out.float() * d_out.float()).sum(2)            # (nh, N)
        given = q, k, v, until, lse, delta, d_out
        d_q, d_k, d_v = map(torch.empty_like, (q, k, v))
        blocks = q.shape[1] // BLOCK
        simple_backward_q[blocks, len(q)](*given, d_q, *ctx.sizes)
        simple_backward_kv[blocks, len(k)](*given, d_k, d_v, *ctx.sizes)
        return d_q, d_k, d_v, None, None


def simple_attention(q, k, v, until, scale):
    """`shadow_attention` by the readable kernels, its arguments checked."""
    N, _, hs = q.shape
    missing = -N % BLOCK  # rows to the next multiple of BLOCK
    width = max(16, next_power_of_2(hs))

    def padded(x):
        x = F.pad(x.transpose(0, 1), (0, width - hs, 0, missing))
        return x.contiguous()                                   # (heads, N, WIDTH)

    k, v = without_unseen(k, v, until)                          # (N, nkv, hs)
    until = F.pad(until, (0, missing)).contiguous()             # (nkv, N)
    with torch.cuda.device_of(q):  # Triton launches on the current card
        out = SimpleAttention.apply(padded(q), padded(k), padded(v), until, scale)
    return out[:, :N, :hs].transpose(0, 1)                      # (N, nh, hs)


def without_unseen(k, v, until):
    """k, v (N, nkv, hs) with 0 where nobody sees the key: 0 * NaN would be NaN."""
    row = torch.arange(len(k), device=k.device)                 # (N,)
    unseen = (until <= row).t()[:, :, None]                     # (N, nkv, 1)
    if bool(unseen.any()):
        k = k.masked_fill(unseen, 0)                            # (N, nkv, hs)
        v = v.masked_fill(unseen, 0)                            # (N, nkv, hs)
    return k, v


# The same in PyTorch, for real on CPU.

CHUNK = 256  # query rows at a time: fewer cost calls, more cost work on hidden pairs


def shadow_attention_ref(q, k, v, until, scale=None):
    """`shadow_attention` by PyTorch's own attention; fp32 inside (fp64 for fp64).

    Never an N x N mask: rows are cut into blocks that do not see each other (packed sequences) and
    blocks into chunks of at most CHUNK queries. What exists at a time is one (chunk, keys) mask;
    blocks of at most 4 chunks keep theirs for the backward pass, longer ones rebuild it."""
    check(q, k, v, until)
    dtype, widened = q.dtype, torch.promote_types(q.dtype, torch.float32)
    k, v = without_unseen(k, v, until)                          # (N, nkv, hs)
    row = torch.arange(len(q), device=q.device)                 # (N,)
    dies = torch.where(until > row, until, 0)                   # (nkv, N) 0: unseen
    sizes = block_sizes(dies)
    blocks = [x.to(widened).split(sizes) for x in (q, k, v)]
    blocks.append(dies.split(sizes, dim=1))
    out = []
    first = 0
    for q, k, v, dies in zip(*blocks):
        rows = len(q)
        dies = dies - first  # in rows of the block
        first += rows
        chunks = math.ceil(rows / CHUNK)
        for i in range(chunks):
            low, high = rows * i // chunks, rows * (i + 1) // chunks
            chunk = q[low:high], k[:high], v[:high], dies[:, :high], low, scale
            if chunks <= 4:
                part = attend_chunk(*chunk)                     # (high - low, nh, hs)
            else:
                part = checkpoint(attend_chunk, *chunk, use_reentrant=False,
                                  preserve_rng_state=False)
            out.append(part)
    return torch.cat(out).to(dtype)                             # (N, nh, hs)


def block_sizes(dies):
    """Cut where everything born before is dead: dies (nkv, N) -> rows of each block."""
    row = torch.arange(dies.shape[1], device=dies.device)
    last = dies.amax(0).cummax(0).values                        # (N,) of all born so far
    cuts = 1 + (last[:-1] <= row[1:]).nonzero().flatten()
    edges = [0, *cuts.tolist(), len(row)]
    return [end - start for start, end in zip(edges, edges[1:])]


def attend_chunk(q, k, v, dies, first, scale):
    """q (rows, nh, hs), those from `first` on in a block; k, v (first + rows, nkv, hs) and dies
    (nkv, first + rows) of all the block's keys until then -> (rows, nh, hs)"""
    rows, nh, hs = q.shape
    nkv = len(dies)
    group = nh // nkv
    q = q.view(rows, nkv, group, hs).permute(1, 2, 0, 3)        # (nkv, group, rows, hs)
    k, v = k.transpose(0, 1), v.transpose(0, 1)                 # (nkv, first + rows, hs)
    if first == 0 and bool((dies >= rows).all()):  # nothing dies, as in prefill: no mask
        k, v = for_group(k, group), for_group(v, group)         # (nkv, group, rows, hs)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(rows, nh, hs)
    row = torch.arange(first, first + rows, device=q.device)[:, None]  # (rows, 1)
    born = torch.arange(first + rows, device=q.device)[None]    # (1, first + rows)
    # only a row that does not see itself may see nothing
    sees_nothing = bool((dies[:, first:] <= 0).any())
    live = dies > first                                         # (nkv, first + rows)
    most = max(1, int(live.sum(1).max()))
    if most < live.shape[1] // 2:  # most are dead: live ones to the front, rest away
        born = live.byte().argsort(dim=1, descending=True, stable=True)
        born = born[:, :most]                                   # (nkv, most)
        k = k.take_along_dim(born[:, :, None], 1)               # (nkv, most, hs)
        v = v.take_along_dim(born[:, :, None], 1)
        dies = dies.gather(1, born)
    seen = (born[:, None] <= row) & (row < dies[:, None])       # (nkv, rows, keys)
    if sees_nothing:  # softmax needs a key: lend such a row all, drop its output below
        blind = ~seen.any(2, keepdim=True)                      # (nkv, rows, 1)
        seen = seen | blind
    k, v = for_group(k, group), for_group(v, group)             # (nkv, group, keys, hs)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
    if sees_nothing:
        out = out.masked_fill(blind[:, None], 0)                # (nkv, group, rows, hs)
    return out.permute(2, 0, 1, 3).reshape(rows, nh, hs)


def for_group(x, group):
    """x (nkv, keys, hs), once for each query head -> (nkv, group, keys, hs), without a copy"""
    return x[:, None].expand(-1, group, -1, -1)


# The checks of arguments.

def check(q, k, v, until):
    """Raise a one-line ValueError unless the four tensors fit together."""
    if q.dim() != 3 or k.dim() != 3 or 0 in q.shape or 0 in k.shape:
        raise ValueError("q and k must be (N, heads, head size) and not empty, "
                         f"got {tuple(q.shape)} and {tuple(k.shape)}")
    N, nh, hs = q.shape
    nkv = k.shape[1]
    if k.shape != (N, nkv, hs) or v.shape != k.shape:
        raise ValueError(f"k and v must be ({N}, nkv, {hs}) like q, "
                         f"got {tuple(k.shape)} and {tuple(v.shape)}")
    if nh % nkv:
        raise ValueError(f"{nh} query heads do not divide into {nkv} KV heads")
    if until.shape != (nkv, N) or until.dtype != torch.int32:
        raise ValueError(f"until must be int32 of shape ({nkv}, {N}), "
                         f"got {until.dtype} of shape {tuple(until.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError("q, k and v must share one floating dtype, "
                         f"got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device == until.device:
        raise ValueError("q, k, v and until are on "
                         f"{q.device}, {k.device}, {v.device} and {until.device}")


def check_triton(q, impl):
    """Raise a one-line ValueError for what the kernels cannot do."""
    if triton is None:
        raise ValueError(f"impl={impl!r} needs the triton package, which is not "
                         "installed (impl='ref' works everywhere)")
    if not q.is_cuda and not interpreted():
        raise ValueError(f"impl={impl!r} needs CUDA tensors, got {q.device} "
                         "(or TRITON_INTERPRET=1 set before Python starts)")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"impl={impl!r} takes float32, bfloat16 or float16, got {q.dtype}")
    if interpreted() and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly (triton issue "
                         "11584): use float32")
    if q.shape[2] > 128:
        raise ValueError(f"impl={impl!r} takes head sizes up to 128, got {q.shape[2]}")
