"""
Attention under a Shadow Mask: one integer per key says when the key dies.

The idea. Call the index of a packed row *time*. A key is born with its row and lives until it is evicted:

    visible(query i, key j)  =  j <= i < until[kv_head, j]
    out[i, h] = sum_j p_ij v[j, h // group],   p_ij = softmax over the visible j of scale * q[i, h] . k[j, h // group]

Attention does not care about the order of keys, so the kernel sorts each KV head's keys by `until` first (ties keep time
order). Keys that die together then share tiles, and two comparisons per (query tile, key tile) tell whether it is dead
(never visited), full (no mask at all) or partial (compare two integers per pair). No N x N mask exists anywhere: the tile
lists are (N / tile)^2 small integers. A query that sees no key gives 0 and gets gradient 0, never NaN; a key that nobody
sees gets gradient exactly 0, whatever it holds.

The backward pass is FlashAttention-2's (recompute the probabilities from the saved log-sum-exp) in two kernels without
atomics, so two runs agree bit for bit: dQ per query tile; dK and dV per key tile, summed over the query heads of the group
in fp32. Products are bf16 or fp16 on tensor cores with fp32 sums, or true fp32 (no TF32).

Here: the PyTorch reference (used for real on CPU), the preparation, the Triton forward and backward, the dispatch.
Left out on purpose: dropout, biases, softcap, attention sinks, second derivatives, autotuning (one config per dtype and
head size, and a smaller one for cards with little shared memory), paged caches.

References: FlashAttention (arXiv 2205.14135), FlashAttention-2 (2307.08691), the Triton tutorial on fused attention,
FlexAttention (2412.05496: lists of full and partial tiles).

On a GPU the first call of each dtype and head size compiles for some seconds (3 and 6 on an H100); another length N does not
compile again, but for dK and dV once more where it crosses FEW_TILES.
`python shadow_attn.py` checks everything against an fp64 dense-mask formula and prints a table.
"""
import functools
import math
import time
import warnings

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fast.launch import interpreted, jit, tl, triton


def shadow_attention(q, k, v, until, scale=None, impl=None, plan=None, out=None):
    """Attention in which query row i sees key row j iff j <= i < until[kv_head, j].

    q (N, nh, hs), k and v (N, nkv, hs), any strides, one floating dtype; until (nkv, N) int32, in rows. Query head h reads
    KV head h // (nh // nkv). scale: factor on q.k, 1/sqrt(hs) if None. impl: "triton", "ref", or None for Triton on CUDA
    and the reference elsewhere. plan: `prepare(until)`, if the caller made it before (once for all layers). out: where the result may
    go if no gradient is recorded, like q with heads next to each other; it may be q itself. The reference ignores both. Returns
    (N, nh, hs) in q's dtype, differentiable once in q, k and v. Raises ValueError for shapes, dtypes and devices that do not fit,
    and for a forced impl that cannot run here."""
    check(q, k, v, until)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if impl not in (None, "triton", "ref"):
        raise ValueError(f"impl={impl!r} is unknown: use 'triton', 'ref' or None")
    if impl == "ref" or (impl is None and not q.is_cuda):
        return shadow_attention_ref(q, k, v, until, scale)
    if triton is None:
        raise ValueError("impl='triton' needs the triton package, which is not installed (impl='ref' works everywhere)")
    if not q.is_cuda and not interpreted():
        raise ValueError(f"impl='triton' needs CUDA tensors, got {q.device} (or TRITON_INTERPRET=1 set before Python starts)")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"impl='triton' takes float32, bfloat16 or float16, got {q.dtype}")
    if interpreted() and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly (triton issue 11584): use float32")
    if q.shape[2] > 128:
        raise ValueError(f"impl='triton' takes head sizes up to 128, got {q.shape[2]}")
    if plan and plan[3] is None and torch.is_grad_enabled():
        raise ValueError("this plan was prepared without backward lists, and gradients are enabled")
    if out is not None and (torch.is_grad_enabled() or out.shape != q.shape or out.dtype != q.dtype or out.stride()[1:] != (q.shape[2], 1)):
        raise ValueError(f"out, {tuple(out.shape)} with strides {out.stride()}, does not fit q or would be part of a recorded graph")
    with torch.cuda.device_of(q):  # Triton launches on the current card, which need not be q's
        return ShadowAttention.apply(q, k, v, plan or prepare(until, torch.is_grad_enabled()), scale, out)


def check(q, k, v, until):
    """Raise a one-line ValueError unless the four tensors fit together."""
    if q.dim() != 3 or k.dim() != 3 or 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q and k must be (N, heads, head size) and not empty, got {tuple(q.shape)} and {tuple(k.shape)}")
    (N, nh, hs), nkv = q.shape, k.shape[1]
    if k.shape != (N, nkv, hs) or v.shape != k.shape:
        raise ValueError(f"k and v must be ({N}, nkv, {hs}) like q, got {tuple(k.shape)} and {tuple(v.shape)}")
    if nh % nkv:
        raise ValueError(f"{nh} query heads do not divide into {nkv} KV heads")
    if until.shape != (nkv, N) or until.dtype != torch.int32:
        raise ValueError(f"until must be int32 of shape ({nkv}, {N}), got {until.dtype} of shape {tuple(until.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device == until.device:
        raise ValueError(f"q, k, v and until are on {q.device}, {k.device}, {v.device} and {until.device}")


# ---- reference ----

CHUNK = 256  # query rows per step of the reference: fewer cost calls, more cost work on masked pairs


def shadow_attention_ref(q, k, v, until, scale=None):
    """The same in PyTorch, for any device: shapes and errors of `shadow_attention`, arithmetic in fp32 (fp64 for fp64).

    Rows are cut where everything born before is dead (packed sequences do not meet), then into chunks of at most CHUNK
    queries; a chunk looks only at keys of its own block, and gathers the visible ones per KV head when most are dead. What
    exists at any time is one (chunk, keys) mask; blocks of at most 4 chunks keep theirs for the backward pass, longer ones
    rebuild it."""
    check(q, k, v, until)
    N, dtype = len(q), torch.promote_types(q.dtype, torch.float32)
    row = torch.arange(N, device=q.device)
    dies = torch.where(until > row, until, 0)                              # (nkv, N) 0: nobody may see this key
    dead = (dies == 0).t()[:, :, None]                                     # (N, nkv, 1)
    if bool(dead.any()):                                                   # 0 * NaN is NaN: zero what dead keys hold
        k, v = k.masked_fill(dead, 0), v.masked_fill(dead, 0)
    cut = dies.amax(0).cummax(0).values[:-1] <= row[1:]                    # (N-1,) nothing born before row i + 1 outlives it
    edges = [0, *(1 + cut.nonzero().flatten()).tolist(), N]
    sizes = [e - s for s, e in zip(edges, edges[1:])]
    out = []
    blocks = zip(edges, *(x.to(dtype).split(sizes) for x in (q, k, v)), dies.split(sizes, dim=1))
    for start, q_, k_, v_, dies_ in blocks:
        n = -(-len(q_) // CHUNK)
        for i in range(n):
            lo, hi = len(q_) * i // n, len(q_) * (i + 1) // n
            args = q_[lo:hi], k_[:hi], v_[:hi], dies_[:, :hi] - start, lo, scale
            y = attend_chunk(*args) if n <= 4 else checkpoint(attend_chunk, *args, use_reentrant=False, preserve_rng_state=False)
            out.append(y)
    return torch.cat(out).to(q.dtype)


def attend_chunk(q, k, v, dies, lo, scale):
    """q (n, nh, hs), rows lo..lo+n-1; k, v (lo + n, nkv, hs); dies (nkv, lo + n), same time -> (n, nh, hs)."""
    (n, nh, hs), nkv = q.shape, len(dies)
    q = q.view(n, nkv, nh // nkv, hs).permute(1, 2, 0, 3)                  # (nkv, group, n, hs)
    k, v = k.transpose(0, 1), v.transpose(0, 1)                            # (nkv, lo + n, hs)
    if lo == 0 and bool((dies >= n).all()):                                # nothing dies, as in prefill: no mask to build
        k, v = (x[:, None].expand(-1, nh // nkv, -1, -1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return y.permute(2, 0, 1, 3).reshape(n, nh, hs)
    row = torch.arange(lo, lo + n, device=q.device)[:, None]               # (n, 1)
    born = torch.arange(lo + n, device=q.device)[None]                     # (1, lo + n)
    orphan = bool((dies[:, lo:] <= 0).any())                               # only a row that does not see itself can see nothing
    live = dies > lo
    most = max(1, int(live.sum(1).max()))
    if most < live.shape[1] // 2:
        born = live.byte().argsort(dim=1, descending=True, stable=True)[:, :most]  # (nkv, most) live keys, then dead ones
        k, v = (x.take_along_dim(born[:, :, None], 1) for x in (k, v))     # (nkv, most, hs)
        dies = dies.gather(1, born)
    visible = (born[:, None] <= row) & (row < dies[:, None])               # (nkv, n, keys)
    if orphan:
        blind = ~visible.any(2, keepdim=True)                              # (nkv, n, 1) sees nothing: lend it all, drop it below
        visible = visible | blind
    k, v = (x[:, None].expand(-1, nh // nkv, -1, -1) for x in (k, v))      # (nkv, group, keys, hs) without a copy
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scale)
    if orphan:
        y = y.masked_fill(blind[:, None], 0)
    return y.permute(2, 0, 1, 3).reshape(n, nh, hs)


# ---- preparation: sort the keys, list the tiles ----

TILE_Q, TILE_K = 128, 64  # granularity of the lists: rows of a query tile, keys of a key tile
FEW_TILES = 1024  # key tiles of all KV heads: about eight for each processor of a large card


def prepare(until, backward=True):
    """Sort each KV head's keys by the time they die and list which tiles meet. Never waits for the GPU.

    until (nkv, N) int32. Returns
      born, dies (nkv, nk * TILE_K) int32: row and `until` of each sorted key. Keys that are never visible and the padding
        (born >= N) have dies = 0, so they come first and fill dead tiles;
      by_query = (lists (nkv, nq, nk) int16, partial (nkv, nq), visible (nkv, nq), order (nkv * nq,)), int32: for each query tile
        the key tiles to visit, first `partial` ones that need a mask, then full ones, `visible` in all (what follows is not set);
        `order` has the flat tile indices, longest list first, so that no long program starts last;
      by_key: the same transposed, for each key tile the query tiles that see it; None without `backward`."""
    return prepare_layers(until[None], backward)[0]


def prepare_layers(until, backward=True):
    """The same for all layers in one go, as its small launches cost more than their work: until (L, nkv, N) -> list of L."""
    (L, nkv, N), flat = until.shape, until.flatten(0, 1).contiguous()  # the kernels read rows
    if N > TILE_K * 2**15:
        raise ValueError(f"{N} rows are more than the kernel's 16-bit tile numbers reach ({TILE_K * 2**15})")
    row = torch.arange(-(-N // TILE_K) * TILE_K, device=until.device, dtype=torch.int32)
    dies = F.pad(flat, (0, len(row) - N))                              # (L * nkv, nk * TILE_K)
    dies, born = torch.where(dies > row, dies, 0).sort(dim=1, stable=True)
    born = born.int()
    bounds = [x for y in (born, dies) for x in y.view(L * nkv, -1, TILE_K).aminmax(dim=2)]  # smallest and largest of each key tile
    by_query = tile_lists(bounds, N, L, by_key=False)
    by_key = tile_lists(bounds, N, L, by_key=True) if backward else [None] * L
    return list(zip(born.view(L, nkv, -1), dies.view(L, nkv, -1), by_query, by_key))


def tile_lists(bounds, N, L, by_key):
    """bounds: 4 x (L * nkv, nk), smallest and largest born, then dies, of the keys of a tile -> for each layer (lists, partial,
    visible, order) as in `prepare`."""
    (heads, nk), nq, new = bounds[0].shape, -(-N // TILE_Q), functools.partial(torch.empty, device=bounds[0].device)
    tiles, others = (nk, nq) if by_key else (nq, nk)
    lists = new(L, heads // L, tiles, others, dtype=torch.int16)
    partial, visible = (new(L, heads // L, tiles, dtype=torch.int32) for _ in "pv")
    with torch.cuda.device_of(lists):
        lists_kernel[heads * tiles,](*bounds, lists, partial, visible, N, nq, nk, BY_KEY=by_key, TILE_Q=TILE_Q, BLOCK=128)
    order = visible.flatten(1).argsort(dim=1, descending=True).int()
    return list(zip(lists, partial, visible, order))


# ---- Triton kernels ----
# rows are query rows in time order, keys are indices into the sorted keys. HS is the head size, HP the next power of two (columns
# past HS are 0). `group` of the nh query heads share a KV head. Scores are in base 2 (scale carries log2(e)), as the card has
# exp2 but no exp.

# N is new at every step, and the lists are slices of those of all layers
attention_jit = jit("N", "nq", "nk", "nh", "group", "shares", unaligned=("lists", "partial", "visible", "order"))


@attention_jit
def load_rows(X, stride_row, stride_col, start, N, ROWS: tl.constexpr, HS: tl.constexpr, HP: tl.constexpr):
    # (ROWS, HP) of one head, 0 past the last row and column. The start is 64-bit; offsets within a tile are small
    r, c = tl.arange(0, ROWS), tl.arange(0, HP)
    X += start.to(tl.int64) * stride_row
    inside = (start + r < N)[:, None] & (c < HS)[None, :]
    return tl.load(X + r[:, None] * stride_row + c[None, :] * stride_col, mask=inside, other=0.0)


@attention_jit
def store_rows(X, x, stride_row, start, N, ROWS: tl.constexpr, HS: tl.constexpr, HP: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, HP)
    X += start.to(tl.int64) * stride_row
    inside = (start + r < N)[:, None] & (c < HS)[None, :]
    tl.store(X + r[:, None] * stride_row + c[None, :], x.to(X.dtype.element_ty), mask=inside)


@attention_jit
def tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv, a, b, N, nq, nk, BY_KEY: tl.constexpr, TILE_Q: tl.constexpr):
    # b (BLOCK,) tiles opposite tile a -> which hold a visible pair, in which all pairs are visible; + zeros makes a as wide as b
    query, key = (b, kv * nk + a + tl.zeros_like(b)) if BY_KEY else (a + tl.zeros_like(b), kv * nk + b)
    inside = b < (nq if BY_KEY else nk)
    first = query * TILE_Q                                                 # first and last row of the query tile
    last = tl.minimum(first + TILE_Q, N) - 1
    some = (tl.load(BORN_MIN + key, mask=inside, other=0) <= last) & (tl.load(DIES_MAX + key, mask=inside, other=0) > first)
    full = (tl.load(BORN_MAX + key, mask=inside, other=0) <= first) & (tl.load(DIES_MIN + key, mask=inside, other=0) > last)
    return some & inside, full & inside


@attention_jit
def lists_kernel(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, LISTS, PARTIAL, VISIBLE, N, nq, nk,
                 BY_KEY: tl.constexpr, TILE_Q: tl.constexpr, BLOCK: tl.constexpr):
    # one program per query tile, which lists the key tiles it meets, or BY_KEY the other way round: it counts them, then writes
    # those with a mask to the front of its list and the full ones behind
    tiles, others = (nk, nq) if BY_KEY else (nq, nk)
    pid = tl.program_id(0)
    kv, a = pid // tiles, pid % tiles
    LISTS += pid.to(tl.int64) * others
    n_visible, n_full = 0, 0
    for start in range(0, others, BLOCK):
        some, full = tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv, a, start + tl.arange(0, BLOCK), N, nq, nk, BY_KEY, TILE_Q)
        n_visible += tl.sum(some.to(tl.int32), 0)
        n_full += tl.sum(full.to(tl.int32), 0)
    n_partial = n_visible - n_full
    at_partial, at_full = 0, n_partial
    for start in range(0, others, BLOCK):
        b = start + tl.arange(0, BLOCK)
        some, full = tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv, a, b, N, nq, nk, BY_KEY, TILE_Q)
        f, p = full.to(tl.int32), some.to(tl.int32) - full.to(tl.int32)
        tl.store(LISTS + at_partial + tl.cumsum(p, 0) - 1, b.to(tl.int16), mask=p > 0)
        tl.store(LISTS + at_full + tl.cumsum(f, 0) - 1, b.to(tl.int16), mask=f > 0)
        at_partial += tl.sum(p, 0)
        at_full += tl.sum(f, 0)
    tl.store(PARTIAL + pid, n_partial)
    tl.store(VISIBLE + pid, n_visible)


@attention_jit
def sort_kernel(X, Y, born, dies, stride_row, stride_head, stride_col, nk,
                HS: tl.constexpr, HP: tl.constexpr, TILE_K: tl.constexpr):
    # X (N, nkv, HS) -> Y (nkv, nk * TILE_K, HP): keys in sorted order; 0 for keys that nobody sees, for 0 * NaN is NaN
    kv, c = tl.program_id(1).to(tl.int64), tl.arange(0, HP)
    keys = (kv * nk + tl.program_id(0)) * TILE_K + tl.arange(0, TILE_K)
    b, d = tl.load(born + keys).to(tl.int64), tl.load(dies + keys)
    seen = (d > 0)[:, None] & (c < HS)[None, :]
    x = tl.load(X + kv * stride_head + b[:, None] * stride_row + c[None, :] * stride_col, mask=seen, other=0.0)
    tl.store(Y + keys[:, None] * HP + c[None, :], x)


@attention_jit
def my_queries(order, nq, group, BLOCK_Q: tl.constexpr, TILE_Q: tl.constexpr):
    # which (KV head, query tile), which query head and which rows this program owns; a tile may be split into several blocks.
    # neighbouring programs share a KV head and a tile, so the keys they read stay in L2
    PARTS: tl.constexpr = TILE_Q // BLOCK_Q
    pid = tl.program_id(0)
    flat = tl.load(order + pid // (PARTS * group))
    kv = flat // nq
    start = flat % nq * TILE_Q + pid // group % PARTS * BLOCK_Q
    return flat, kv.to(tl.int64), (kv * group + pid % group).to(tl.int64), start


@attention_jit
def forward_loop(acc, m, l, q, rows, K, V, born, dies, tiles, lo, hi, scale, MASKED: tl.constexpr,
                 HP: tl.constexpr, BLOCK_K: tl.constexpr, TILE_K: tl.constexpr):
    # online softmax over the key tiles tiles[lo:hi]; m, l (BLOCK_Q,) running maximum and sum,
    # acc (BLOCK_Q, HP) the output before its division by l
    SUB: tl.constexpr = TILE_K // BLOCK_K
    c = tl.arange(0, HP)
    for t in range(lo * SUB, hi * SUB):
        keys = tl.load(tiles + t // SUB).to(tl.int32) * TILE_K + t % SUB * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tl.load(K + keys[:, None] * HP + c[None, :])                   # (BLOCK_K, HP)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")                 # (BLOCK_Q, BLOCK_K)
        if MASKED:
            b, d = tl.load(born + keys), tl.load(dies + keys)              # (BLOCK_K,)
            s = tl.where((b[None, :] <= rows[:, None]) & (rows[:, None] < d[None, :]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        # a row that has seen nothing yet has maximum -inf, and -inf - (-inf) is NaN
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s * scale - m_ref[:, None])
        shrink = tl.exp2(m - m_ref)                                        # what earlier terms lose to the new maximum
        l = l * shrink + tl.sum(p, 1)
        v = tl.load(V + keys[:, None] * HP + c[None, :])                   # (BLOCK_K, HP)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return acc, m, l


@attention_jit
def forward_kernel(Q, K, V, O, LSE, born, dies, lists, partial, visible, order,
                   sq_row, sq_head, sq_col, so_row, N, nq, nk, nh, group, scale, HS: tl.constexpr, HP: tl.constexpr,
                   BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # O (N, nh, HS), which may be Q: a program reads its rows of Q first; LSE (nh, nq * TILE_Q) log-sum-exp of each row in base 2
    flat, kv, head, start = my_queries(order, nq, group, BLOCK_Q, TILE_Q)
    rows = start + tl.arange(0, BLOCK_Q)
    first = kv * nk * TILE_K                                               # of this KV head's keys
    K, V, born, dies = K + first * HP, V + first * HP, born + first, dies + first
    tiles = lists + flat.to(tl.int64) * nk
    n_partial, n_visible = tl.load(partial + flat), tl.load(visible + flat)

    q = load_rows(Q + head * sq_head, sq_row, sq_col, start, N, BLOCK_Q, HS, HP)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, HP), tl.float32)
    acc, m, l = forward_loop(acc, m, l, q, rows, K, V, born, dies, tiles, 0, n_partial, scale, True, HP, BLOCK_K, TILE_K)
    acc, m, l = forward_loop(acc, m, l, q, rows, K, V, born, dies, tiles, n_partial, n_visible, scale, False, HP, BLOCK_K, TILE_K)

    # a row that sees nothing, or past the end: output 0, and log-sum-exp +inf so that the backward pass finds exp2(s - inf) = 0
    some = (l > 0) & (rows < N)
    l = tl.where(some, l, 1.0)
    store_rows(O + head * HS, acc / l[:, None], so_row, start, N, BLOCK_Q, HS, HP)
    tl.store(LSE + head * nq * TILE_Q + rows, tl.where(some, m + tl.log2(l), float("inf")))


@attention_jit
def dq_loop(dq, q, do, lse, delta, rows, K, V, born, dies, tiles, lo, hi, scale, MASKED: tl.constexpr,
            HP: tl.constexpr, BLOCK_K: tl.constexpr, TILE_K: tl.constexpr):
    SUB: tl.constexpr = TILE_K // BLOCK_K
    c = tl.arange(0, HP)
    for t in range(lo * SUB, hi * SUB):
        keys = tl.load(tiles + t // SUB).to(tl.int32) * TILE_K + t % SUB * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tl.load(K + keys[:, None] * HP + c[None, :])                   # (BLOCK_K, HP)
        v = tl.load(V + keys[:, None] * HP + c[None, :])
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])  # (BLOCK_Q, BLOCK_K)
        if MASKED:
            b, d = tl.load(born + keys), tl.load(dies + keys)
            p = tl.where((b[None, :] <= rows[:, None]) & (rows[:, None] < d[None, :]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])                                     # softmax backward
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@attention_jit
def dq_kernel(Q, K, V, O, DO, LSE, DELTA, DQ, born, dies, lists, partial, visible, order,
              sq_row, sq_head, sq_col, so_row, so_head, so_col, N, nq, nk, nh, group, scale, scale_out,
              HS: tl.constexpr, HP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
              TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # programs as in forward_kernel; also leaves DELTA = sum(out * grad_out) of each row, laid out like LSE, for dkv_kernel
    flat, kv, head, start = my_queries(order, nq, group, BLOCK_Q, TILE_Q)
    rows = start + tl.arange(0, BLOCK_Q)
    first = kv * nk * TILE_K                                               # of this KV head's keys
    K, V, born, dies = K + first * HP, V + first * HP, born + first, dies + first
    tiles = lists + flat.to(tl.int64) * nk
    n_partial, n_visible = tl.load(partial + flat), tl.load(visible + flat)

    q = load_rows(Q + head * sq_head, sq_row, sq_col, start, N, BLOCK_Q, HS, HP)
    do = load_rows(DO + head * so_head, so_row, so_col, start, N, BLOCK_Q, HS, HP)
    o = load_rows(O + head * HS, nh * HS, 1, start, N, BLOCK_Q, HS, HP)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)                # (BLOCK_Q,)
    tl.store(DELTA + head * nq * TILE_Q + rows, delta)
    lse = tl.load(LSE + head * nq * TILE_Q + rows)
    dq = tl.zeros((BLOCK_Q, HP), tl.float32)
    dq = dq_loop(dq, q, do, lse, delta, rows, K, V, born, dies, tiles, 0, n_partial, scale, True, HP, BLOCK_K, TILE_K)
    dq = dq_loop(dq, q, do, lse, delta, rows, K, V, born, dies, tiles, n_partial, n_visible, scale, False, HP, BLOCK_K, TILE_K)
    store_rows(DQ + head * HS, dq * scale_out, nh * HS, start, N, BLOCK_Q, HS, HP)


@attention_jit
def dkv_loop(dk, dv, k, v, b, d, Q, DO, LSE, DELTA, sq_row, sq_col, so_row, so_col, tiles, lo, hi, N, scale,
             MASKED: tl.constexpr, HS: tl.constexpr, HP: tl.constexpr, BLOCK_Q: tl.constexpr, TILE_Q: tl.constexpr):
    # one query head; scores are transposed, (BLOCK_K, BLOCK_Q), so that p and ds are left operands straight from registers
    SUB: tl.constexpr = TILE_Q // BLOCK_Q
    for t in range(lo * SUB, hi * SUB):
        start = tl.load(tiles + t // SUB).to(tl.int32) * TILE_Q + t % SUB * BLOCK_Q
        rows = start + tl.arange(0, BLOCK_Q)
        q = load_rows(Q, sq_row, sq_col, start, N, BLOCK_Q, HS, HP)        # (BLOCK_Q, HP)
        lse, delta = tl.load(LSE + rows), tl.load(DELTA + rows)            # (BLOCK_Q,) lse is +inf past the last row
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])
        if MASKED:
            p = tl.where((b[:, None] <= rows[None, :]) & (rows[None, :] < d[:, None]), p, 0.0)
        do = load_rows(DO, so_row, so_col, start, N, BLOCK_Q, HS, HP)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@attention_jit
def dkv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, born, dies, lists, partial, visible, order,
               sq_row, sq_head, sq_col, so_row, so_head, so_col, N, nq, nk, nh, group, scale, scale_out, shares,
               HS: tl.constexpr, HP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
               TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # one program per key tile or part of one; it sums over the query heads of its group, in fp32 and in a fixed order, or over
    # one of `shares` equal shares of them: DK, DV (shares, N, nkv, HS) are then added up outside
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    pid, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    flat = tl.load(order + pid // PARTS)
    kv, c = (flat // nk).to(tl.int64), tl.arange(0, HP)
    keys = (kv * nk + flat % nk) * TILE_K + pid % PARTS * BLOCK_K + tl.arange(0, BLOCK_K)
    k = tl.load(K + keys[:, None] * HP + c[None, :])                       # (BLOCK_K, HP)
    v = tl.load(V + keys[:, None] * HP + c[None, :])
    b, d = tl.load(born + keys), tl.load(dies + keys)
    tiles = lists + flat.to(tl.int64) * nq
    n_partial, n_visible = tl.load(partial + flat), tl.load(visible + flat)

    dk = tl.zeros((BLOCK_K, HP), tl.float32)
    dv = tl.zeros((BLOCK_K, HP), tl.float32)
    for g in range(group // shares * share, group // shares * (share + 1)):
        head = kv * group + g
        q, do, lse, delta = Q + head * sq_head, DO + head * so_head, LSE + head * nq * TILE_Q, DELTA + head * nq * TILE_Q
        dk, dv = dkv_loop(dk, dv, k, v, b, d, q, do, lse, delta, sq_row, sq_col, so_row, so_col, tiles, 0, n_partial,
                          N, scale, True, HS, HP, BLOCK_Q, TILE_Q)
        dk, dv = dkv_loop(dk, dv, k, v, b, d, q, do, lse, delta, sq_row, sq_col, so_row, so_col, tiles, n_partial, n_visible,
                          N, scale, False, HS, HP, BLOCK_Q, TILE_Q)
    # undo the sort: each key's gradient goes to the row where it was born
    at = ((share.to(tl.int64) * N + b) * (nh // group) + kv)[:, None] * HS + c[None, :]
    real = (b < N)[:, None] & (c < HS)[None, :]
    tl.store(DK + at, (dk * scale_out).to(DK.dtype.element_ty), mask=real)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=real)


# ---- launch ----

def configs(kernel, dtype, width):
    """(BLOCK_Q, BLOCK_K, warps, stages) for a kernel's name, best first; later ones need less shared memory. Tuned on an H100."""
    if dtype == torch.float32:  # true fp32 runs on the ordinary cores: small blocks, or the compiler unrolls for minutes
        return [(32, 32, 4, 1), (16, 16, 4, 1)]
    wide = width == 128
    best = dict(forward_kernel=(128, 64, 8 if wide else 4, 3), dq_kernel=(128, 64, 8 if wide else 4, 3),
                dkv_kernel=(32 if wide else 64, 64, 4, 3))[kernel]
    return [best, (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)]


SETTLED = {}  # (kernel, dtype, width) -> index of the first config that fits this card


def launch(kernel, dtype, width, programs, *args, **sizes):
    """Run a kernel with the first config that fits the card's shared memory, saying so if it is not the best one.

    programs(BLOCK_Q, BLOCK_K) -> number of programs."""
    key = kernel.__name__, dtype, width
    options = configs(*key)
    for i in range(SETTLED.get(key, 0), len(options)):
        block_q, block_k, warps, stages = options[i]
        try:
            kernel[(programs(block_q, block_k),)](*args, **sizes, HP=width, BLOCK_Q=block_q, BLOCK_K=block_k, TILE_Q=TILE_Q,
                                                  TILE_K=TILE_K, num_warps=warps, num_stages=stages)
        except triton.runtime.errors.OutOfResources as e:
            if i + 1 == len(options):
                raise
            warnings.warn(f"{key[0]}: blocks {options[i]} do not fit this card ({e}); using the slower {options[i + 1]}")
            continue
        SETTLED[key] = i
        return


def sort_keys(x, born, dies, width):
    """x (N, nkv, hs) -> (nkv, nk * TILE_K, width) in the order of `prepare`, zero where nobody looks."""
    nkv, n_keys = born.shape
    y = torch.empty((nkv, n_keys, width), device=x.device, dtype=x.dtype)
    sort_kernel[n_keys // TILE_K, nkv](x, y, born, dies, *x.stride(), n_keys // TILE_K, HS=x.shape[2], HP=width, TILE_K=TILE_K)
    return y


class ShadowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale, out):
        (N, nh, hs), nkv = q.shape, k.shape[1]
        width = max(16, triton.next_power_of_2(hs))  # tl.arange and tl.dot want powers of two, 16 or more
        born, dies, by_query, by_key = plan
        k, v = sort_keys(k, born, dies, width), sort_keys(v, born, dies, width)  # (nkv, nk * TILE_K, width)
        nq, nk = by_query[0].shape[1:]
        out = torch.empty((N, nh, hs), device=q.device, dtype=q.dtype) if out is None else out
        lse = torch.empty((nh, nq * TILE_Q), device=q.device, dtype=torch.float32)
        launch(forward_kernel, q.dtype, width, lambda block_q, _: nh * nq * (TILE_Q // block_q), q, k, v, out, lse, born, dies,
               *by_query, *q.stride(), out.stride(0), N, nq, nk, nh, nh // nkv, scale * math.log2(math.e), HS=hs)
        if by_key:
            ctx.save_for_backward(q, k, v, out, lse, born, dies, *by_query, *by_key)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse, born, dies, *lists = ctx.saved_tensors
        (N, nh, hs), (nkv, _, width) = q.shape, k.shape
        nq, nk = lists[0].shape[1:]
        delta = torch.empty_like(lse)
        dq = torch.empty((N, nh, hs), device=q.device, dtype=q.dtype)
        # with few KV heads a tile's program is long and there are few: query heads of a group then go to programs of their own
        shares = nh // nkv if nkv * nk < FEW_TILES else 1
        dk, dv = (torch.empty((shares, N, nkv, hs), device=q.device, dtype=q.dtype if shares == 1 else torch.float32) for _ in "kv")
        # grad's own strides: after .sum() it is one number seen through strides of 0
        tail = (*q.stride(), *grad.stride(), N, nq, nk, nh, nh // nkv, ctx.scale * math.log2(math.e), ctx.scale)
        launch(dq_kernel, q.dtype, width, lambda block_q, _: nh * nq * (TILE_Q // block_q),
               q, k, v, out, grad, lse, delta, dq, born, dies, *lists[:4], *tail, HS=hs)
        launch(dkv_kernel, q.dtype, width, lambda _, block_k: nkv * nk * (TILE_K // block_k) * shares,
               q, k, v, grad, lse, delta, dk, dv, born, dies, *lists[4:], *tail, shares, HS=hs)
        dk, dv = (x[0] if shares == 1 else x.sum(0).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None, None


# ---- self-check ----

def dense_formula(q, k, v, until):
    """The definition, with a dense mask, in fp64: what the two implementations are held against."""
    (N, nh, hs), nkv = q.shape, k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(nh // nkv, 1), v.double().repeat_interleave(nh // nkv, 1)
    i = torch.arange(N, device=q.device)
    mask = (i <= i[:, None]) & (i[:, None] < until.repeat_interleave(nh // nkv, 0)[:, None])  # (nh, N, N)
    s = torch.einsum("ihc,jhc->hij", q, k) * hs ** -0.5
    p = s.masked_fill(~mask & mask.any(2, keepdim=True), -math.inf).softmax(2) * mask
    return torch.einsum("hij,jhc->ihc", p, v)


def group_until(P, G, R, budget, nkv, device="cpu"):
    """until (nkv, N) of one packed group [prompt | G dense copies | G shadow copies]: random prompt keys beyond `budget` die
    where the shadow copies begin, a response's keys at the end of their copy."""
    n = R - 1
    N = P + 2 * G * n
    until = P + (torch.arange(2 * G * n, device=device) // n + 1) * n         # (2 * G * n,) end of each copy
    dropped = torch.rand(nkv, P, device=device).argsort(1) >= budget
    return torch.cat((torch.where(dropped, P + G * n, N), until.expand(nkv, -1)), dim=1).int()


def run(f, grad, *leaves):
    """[out, dq, dk, dv] of out = f(q, k, v) and its backward pass."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def milliseconds(f, repeat=10):
    """Median wall-clock time of f(), after one call to warm up."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeat + 1):
        sync()
        start = time.perf_counter()
        f()
        sync()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[1:])[repeat // 2]


def main():
    """Check both implementations against the definition, print errors and times; exit code 1 if an error is too large."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    impls = ["ref", "triton"] if triton and (cuda or interpreted()) else ["ref"]
    version = "absent" if triton is None else triton.__version__ + " (interpreted)" * interpreted()
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, triton {version}; "
          "errors: norm of the difference from fp64 with a dense mask, over norm")
    print("impl   dtype       N nh:nkv  hs     out      dq      dk      dv | ms forward  with backward")
    ok = True
    for nh, nkv, hs in ((4, 2, 32), (8, 2, 128)):
        torch.manual_seed(0)
        until = group_until(700, 4, 64, 128, nkv, device) if cuda else group_until(200, 2, 16, 48, nkv)
        N = until.shape[1]
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))[:2 if cuda else 1]:
            grad, q, k, v = (torch.randn(N, n, hs, device=device).to(dtype) for n in (nh, nh, nkv, nkv))
            exact = run(lambda *x: dense_formula(*x, until), grad.double(), q.double(), k.double(), v.double())
            for impl in impls:
                f = functools.partial(shadow_attention, until=until, impl=impl)
                errors = [((a - b).norm() / b.norm()).item() for a, b in zip(run(f, grad, q, k, v), exact)]
                ok &= max(errors) < bound
                times = "" if impl == "triton" and not cuda else \
                    f"{milliseconds(lambda: f(q, k, v)):12.2f} {milliseconds(lambda: run(f, grad, q, k, v)):14.2f}"
                errors = " ".join(f"{e:.1e}" for e in errors)
                print(f"{impl:6s} {str(dtype)[6:]:8s} {N:4d} {nh:3d}:{nkv:<2d} {hs:4d}  {errors} | {times}")
    if cuda and triton:
        until = group_until(8192, 8, 256, 1024, 8, device)
        N = until.shape[1]
        grad, q, k, v = (torch.randn(N, n, 128, device=device, dtype=torch.bfloat16) for n in (16, 16, 8, 8))
        f = functools.partial(shadow_attention, until=until)
        print(f"prompt 8192, 8 responses of 256, both policies (N {N}), 1024 prompt keys kept, 16:8 heads of 128, bf16:\n"
              f"preparation {milliseconds(lambda: prepare(until)):.2f} ms, with forward {milliseconds(lambda: f(q, k, v)):.2f}, "
              f"with backward {milliseconds(lambda: run(f, grad, q, k, v)):.2f} ms")
    print("ok" if ok else "FAILED: an error exceeds 1e-5 (float32) or 1e-2 (bfloat16)")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
