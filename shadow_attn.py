"""
Attention under a Shadow Mask: one integer per key says when the key dies.

The idea. Call the index of a packed row *time*. A key is born with its row and is seen until it is
evicted. Attention does not care about the order of keys, so the kernel sorts each KV head's keys by
the time they die: keys that die together share tiles, and two comparisons tell whether a tile of
queries and a tile of keys have anything to do with each other. No N x N mask exists anywhere.

The backward pass is FlashAttention-2's (recompute the probabilities from the saved log-sum-exp) in
two kernels without atomics, so two runs agree bit for bit. Sums are fp32; products are bf16 or fp16
on tensor cores, or true fp32 (no TF32).

Here: the definition, the picture, the Triton kernels, the preparation, the launch, the PyTorch path
(used for real on CPU). `python shadow_attn.py` checks both paths against the definition.
Left out: dropout, biases, softcap, attention sinks, second derivatives, autotuning, paged caches.
References: FlashAttention-2 (arXiv 2307.08691), the Triton tutorial on fused attention,
FlexAttention (2412.05496: lists of full and partial tiles).
"""
import math
import time
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fast.launch import interpreted, jit, tl, triton


def visible(until):
    """visible[kv_head, i, j]: query i sees key j iff j <= i < until[kv_head, j]."""
    j = torch.arange(until.shape[1], device=until.device)                  # (N,)
    i = j[:, None]                                                         # (N, 1)
    return (j <= i) & (i < until[:, None])                                 # (nkv, N, N)


def definition(q, k, v, until, scale=None):
    """What this file computes, in fp64; shapes as `shadow_attention`."""
    group = q.shape[1] // k.shape[1]                                       # query heads per KV head
    k = k.double().repeat_interleave(group, 1)                             # (N, nh, hs)
    v = v.double().repeat_interleave(group, 1)                             # (N, nh, hs)
    seen = visible(until).repeat_interleave(group, 0)                      # (nh, N, N)
    if scale is None:
        scale = q.shape[2] ** -0.5
    qk = torch.einsum("ihc,jhc->hij", q.double(), k) * scale               # (nh, N, N)
    hidden = ~seen & seen.any(2, keepdim=True)                             # a row without keys: 0
    p = qk.masked_fill(hidden, -math.inf).softmax(2) * seen                # (nh, N, N)
    return torch.einsum("hij,jhc->ihc", p, v)                              # (N, nh, hs)


# The picture: one KV head's keys, sorted by `until`, of one packed group: a prompt of 8
# rows, of which 4 keys are evicted after prefill, and 2 responses of 4 rows, each in a
# dense copy and in a shadow copy. Here a tile is 4 x 4.
#
#     keys                    dense A   evicted   dense B   shadow A    kept    shadow B
#     until                      12        16        16        20        24        24
#     rows  0 ..  3 prompt        .         /         .         .         /         .
#     rows  4 ..  7 prompt        .         /         .         .         /         .
#     rows  8 .. 11 dense A       /         #         .         .         #         .
#     rows 12 .. 15 dense B       .         #         /         .         #         .
#     rows 16 .. 19 shadow A      .         .         .         /         #         .
#     rows 20 .. 23 shadow B      .         .         .         .         #         /
#
#     .  dead: never visited    /  partial: compare two integers per pair    #  full: no mask
#
# Unsorted, evicted and kept keys would alternate, and the shadow copies would visit every
# tile of the prompt, with a mask. For a tile of queries and a tile of keys,
#
#     any visible:  min(born) <= last query   and  max(until) > first query     (else dead)
#     all visible:  max(born) <= first query  and  min(until) > last query      (then full)
#
# The first may visit a tile for nothing but never misses one. The answers are kept as short
# lists of key tiles per query tile, and for dK and dV of query tiles per key tile.

TILE_Q, TILE_K = 128, 64  # rows of a query tile, keys of a key tile


def shadow_attention(q, k, v, until, scale=None, impl=None, plan=None, out=None):
    """Attention in which query row i sees key row j iff j <= i < until[kv_head, j].

    q (N, nh, hs), k and v (N, nkv, hs), any strides, one floating dtype; until (nkv, N) int32, in
    rows. Query head h reads KV head h // (nh // nkv). scale: factor on q.k, 1/sqrt(hs) if None.
    impl: "triton", "ref", or None for Triton on CUDA and PyTorch elsewhere. plan: `prepare(until)`,
    if the caller made it before (once for all layers). out: where the result may go if no gradient
    is recorded, like q with heads next to each other; it may be q itself. PyTorch ignores both.

    Returns (N, nh, hs) in q's dtype, differentiable once in q, k and v. A query that sees no key
    gives 0 and gets gradient 0; a key that nobody sees gets gradient 0, whatever it holds. Raises
    ValueError for shapes, dtypes and devices that do not fit, and for an impl that cannot run here.
    """
    check(q, k, v, until)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if impl not in (None, "triton", "ref"):
        raise ValueError(f"impl={impl!r} is unknown: use 'triton', 'ref' or None")
    if impl == "ref" or (impl is None and not q.is_cuda):
        return shadow_attention_ref(q, k, v, until, scale=scale)
    check_triton(q, plan, out)
    with torch.cuda.device_of(q):  # Triton launches on the current card, which need not be q's
        if plan is None:
            plan = prepare(until, torch.is_grad_enabled())
        return ShadowAttention.apply(q, k, v, plan, scale, out)


# The Triton kernels. Upper case: pointers and compile-time constants; lower case: values.
#   rows     query rows, in time order
#   keys     indices into the sorted keys; K_BORN and K_DIES hold the row and the `until` of each
#   nq, nk   tiles of queries and of keys, per KV head; `group` of the nh query heads share one
#   flat     number of a tile among those of all KV heads
#   scale    carries log2(e): scores are in base 2, as the card has exp2 but no exp
# HEAD_DIM_PADDED is the next power of two, as Triton wants; columns past HEAD_DIM hold 0.

# no new compilation where N is new at every step and lists are slices of those of all layers
attention_jit = jit("N", "nq", "nk", "nh", "group", "shares",
                    unaligned=("LISTS", "N_PARTIAL", "N_VISIBLE", "ORDER"))


@attention_jit
def load_rows(X, stride_row, stride_col, start, N,
              ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    # (ROWS, HEAD_DIM_PADDED) of one head, 0 past the last row and column; the start is
    # 64-bit, offsets within a tile are small
    r = tl.arange(0, ROWS)
    c = tl.arange(0, HEAD_DIM_PADDED)
    X += start.to(tl.int64) * stride_row
    inside = (start + r < N)[:, None] & (c < HEAD_DIM)[None, :]
    return tl.load(X + r[:, None] * stride_row + c[None, :] * stride_col, mask=inside, other=0.0)


@attention_jit
def store_rows(X, x, stride_row, start, N,
               ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, HEAD_DIM_PADDED)
    X += start.to(tl.int64) * stride_row
    inside = (start + r < N)[:, None] & (c < HEAD_DIM)[None, :]
    tl.store(X + r[:, None] * stride_row + c[None, :], x.to(X.dtype.element_ty), mask=inside)


@attention_jit
def my_queries(ORDER, nq, group, BLOCK_Q: tl.constexpr, TILE_Q: tl.constexpr):
    # which tile, KV head, query head and first row this program owns; a tile may be split
    # into several parts. Neighbouring programs share a KV head and a tile, so their keys
    # stay in L2
    PARTS: tl.constexpr = TILE_Q // BLOCK_Q
    pid = tl.program_id(0)
    flat = tl.load(ORDER + pid // (PARTS * group))
    kv_head = flat // nq
    tile = flat % nq
    part = pid // group % PARTS
    start = tile * TILE_Q + part * BLOCK_Q
    return flat, kv_head.to(tl.int64), (kv_head * group + pid % group).to(tl.int64), start


@attention_jit
def forward_loop(acc, m_i, l_i, q, rows, K, V, K_BORN, K_DIES, TILES, lo, hi, scale,
                 MASKED: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
                 BLOCK_K: tl.constexpr, TILE_K: tl.constexpr):
    # online softmax over the key tiles TILES[lo:hi]. m_i, l_i (BLOCK_Q,): running maximum
    # and sum; acc (BLOCK_Q, HEAD_DIM_PADDED): the output before its division by l_i
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    c = tl.arange(0, HEAD_DIM_PADDED)
    for t in range(lo * PARTS, hi * PARTS):
        tile = tl.load(TILES + t // PARTS).to(tl.int32)
        part = t % PARTS
        keys = tile * TILE_K + part * BLOCK_K + tl.arange(0, BLOCK_K)
        # 1. scores
        k = tl.load(K + keys[:, None] * HEAD_DIM_PADDED + c[None, :])      # (BLOCK_K, padded)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")                # (BLOCK_Q, BLOCK_K)
        # 2. mask
        if MASKED:
            k_born = tl.load(K_BORN + keys)                                # (BLOCK_K,)
            k_dies = tl.load(K_DIES + keys)
            seen = (k_born[None, :] <= rows[:, None]) & (rows[:, None] < k_dies[None, :])
            qk = tl.where(seen, qk, float("-inf"))
        # 3. softmax; a row that has seen nothing yet has maximum -inf, and -inf - (-inf) is NaN
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * scale - m_ref[:, None])
        alpha = tl.exp2(m_i - m_ref)                                       # shrinks earlier terms
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        # 4. values
        v = tl.load(V + keys[:, None] * HEAD_DIM_PADDED + c[None, :])      # (BLOCK_K, padded)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_i, l_i


@attention_jit
def forward_kernel(Q, K, V, OUT, LSE, K_BORN, K_DIES, LISTS, N_PARTIAL, N_VISIBLE, ORDER,
                   stride_q_row, stride_q_head, stride_q_col, stride_out_row,
                   N, nq, nk, nh, group, scale,
                   HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
                   BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # OUT (N, nh, HEAD_DIM), which may be Q: a program reads its rows of Q first.
    # LSE (nh, nq * TILE_Q): log-sum-exp of each row, in base 2
    flat, kv_head, head, start = my_queries(ORDER, nq, group, BLOCK_Q, TILE_Q)
    rows = start + tl.arange(0, BLOCK_Q)
    first = kv_head * nk * TILE_K                                          # of this head's keys
    K += first * HEAD_DIM_PADDED
    V += first * HEAD_DIM_PADDED
    K_BORN += first
    K_DIES += first
    TILES = LISTS + flat.to(tl.int64) * nk
    n_partial = tl.load(N_PARTIAL + flat)
    n_visible = tl.load(N_VISIBLE + flat)

    q = load_rows(Q + head * stride_q_head, stride_q_row, stride_q_col, start, N,
                  BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    m_i = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM_PADDED), tl.float32)
    acc, m_i, l_i = forward_loop(  # partial tiles
        acc, m_i, l_i, q, rows, K, V, K_BORN, K_DIES, TILES, 0, n_partial, scale,
        True, HEAD_DIM_PADDED, BLOCK_K, TILE_K)
    acc, m_i, l_i = forward_loop(  # full tiles
        acc, m_i, l_i, q, rows, K, V, K_BORN, K_DIES, TILES, n_partial, n_visible, scale,
        False, HEAD_DIM_PADDED, BLOCK_K, TILE_K)

    # a row that sees nothing or is past the end: output 0, and log-sum-exp +inf, so that
    # the backward pass finds exp2(qk - inf) = 0
    some = (l_i > 0) & (rows < N)
    l_i = tl.where(some, l_i, 1.0)
    store_rows(OUT + head * HEAD_DIM, acc / l_i[:, None], stride_out_row, start, N,
               BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(LSE + head * nq * TILE_Q + rows, tl.where(some, m_i + tl.log2(l_i), float("inf")))


@attention_jit
def dq_loop(dq, q, do, lse, delta, rows, K, V, K_BORN, K_DIES, TILES, lo, hi, scale,
            MASKED: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
            BLOCK_K: tl.constexpr, TILE_K: tl.constexpr):
    # adds what the key tiles TILES[lo:hi] give to dq (BLOCK_Q, HEAD_DIM_PADDED)
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    c = tl.arange(0, HEAD_DIM_PADDED)
    for t in range(lo * PARTS, hi * PARTS):
        tile = tl.load(TILES + t // PARTS).to(tl.int32)
        part = t % PARTS
        keys = tile * TILE_K + part * BLOCK_K + tl.arange(0, BLOCK_K)
        # 1. probabilities, from scores and the saved log-sum-exp
        k = tl.load(K + keys[:, None] * HEAD_DIM_PADDED + c[None, :])      # (BLOCK_K, padded)
        v = tl.load(V + keys[:, None] * HEAD_DIM_PADDED + c[None, :])
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")                # (BLOCK_Q, BLOCK_K)
        p = tl.exp2(qk * scale - lse[:, None])
        # 2. mask
        if MASKED:
            k_born = tl.load(K_BORN + keys)                                # (BLOCK_K,)
            k_dies = tl.load(K_DIES + keys)
            seen = (k_born[None, :] <= rows[:, None]) & (rows[:, None] < k_dies[None, :])
            p = tl.where(seen, p, 0.0)
        # 3. softmax, backward
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        # 4. gradient
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@attention_jit
def dq_kernel(Q, K, V, OUT, DO, LSE, DELTA, DQ, K_BORN, K_DIES,
              LISTS, N_PARTIAL, N_VISIBLE, ORDER,
              stride_q_row, stride_q_head, stride_q_col,
              stride_do_row, stride_do_head, stride_do_col,
              N, nq, nk, nh, group, scale, scale_out,
              HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
              BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
              TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # programs as in forward_kernel; also leaves DELTA = sum(out * grad_out) of each row,
    # laid out like LSE, for dkv_kernel
    flat, kv_head, head, start = my_queries(ORDER, nq, group, BLOCK_Q, TILE_Q)
    rows = start + tl.arange(0, BLOCK_Q)
    first = kv_head * nk * TILE_K                                          # of this head's keys
    K += first * HEAD_DIM_PADDED
    V += first * HEAD_DIM_PADDED
    K_BORN += first
    K_DIES += first
    TILES = LISTS + flat.to(tl.int64) * nk
    n_partial = tl.load(N_PARTIAL + flat)
    n_visible = tl.load(N_VISIBLE + flat)

    q = load_rows(Q + head * stride_q_head, stride_q_row, stride_q_col, start, N,
                  BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    do = load_rows(DO + head * stride_do_head, stride_do_row, stride_do_col, start, N,
                   BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    out = load_rows(OUT + head * HEAD_DIM, nh * HEAD_DIM, 1, start, N,
                    BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)              # (BLOCK_Q,)
    tl.store(DELTA + head * nq * TILE_Q + rows, delta)
    lse = tl.load(LSE + head * nq * TILE_Q + rows)
    dq = tl.zeros((BLOCK_Q, HEAD_DIM_PADDED), tl.float32)
    dq = dq_loop(  # partial tiles
        dq, q, do, lse, delta, rows, K, V, K_BORN, K_DIES, TILES, 0, n_partial, scale,
        True, HEAD_DIM_PADDED, BLOCK_K, TILE_K)
    dq = dq_loop(  # full tiles
        dq, q, do, lse, delta, rows, K, V, K_BORN, K_DIES, TILES, n_partial, n_visible, scale,
        False, HEAD_DIM_PADDED, BLOCK_K, TILE_K)
    store_rows(DQ + head * HEAD_DIM, dq * scale_out, nh * HEAD_DIM, start, N,
               BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)


@attention_jit
def dkv_loop(dk, dv, k, v, k_born, k_dies, Q, DO, LSE, DELTA,
             stride_q_row, stride_q_col, stride_do_row, stride_do_col,
             TILES, lo, hi, N, scale,
             MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
             BLOCK_Q: tl.constexpr, TILE_Q: tl.constexpr):
    # adds what the query tiles TILES[lo:hi] of one head give to dk and dv. Scores are
    # transposed, (BLOCK_K, BLOCK_Q), so that p and ds are left operands straight from
    # registers
    PARTS: tl.constexpr = TILE_Q // BLOCK_Q
    for t in range(lo * PARTS, hi * PARTS):
        tile = tl.load(TILES + t // PARTS).to(tl.int32)
        part = t % PARTS
        start = tile * TILE_Q + part * BLOCK_Q
        rows = start + tl.arange(0, BLOCK_Q)
        # 1. probabilities, from scores and the saved log-sum-exp, which is +inf past the last row
        q = load_rows(Q, stride_q_row, stride_q_col, start, N,
                      BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)                  # (BLOCK_Q, padded)
        lse = tl.load(LSE + rows)                                          # (BLOCK_Q,)
        delta = tl.load(DELTA + rows)                                      # (BLOCK_Q,)
        qk = tl.dot(k, tl.trans(q), input_precision="ieee")                # (BLOCK_K, BLOCK_Q)
        p = tl.exp2(qk * scale - lse[None, :])
        # 2. mask
        if MASKED:
            seen = (k_born[:, None] <= rows[None, :]) & (rows[None, :] < k_dies[:, None])
            p = tl.where(seen, p, 0.0)
        # 3. gradient of the values
        do = load_rows(DO, stride_do_row, stride_do_col, start, N,
                       BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        # 4. softmax, backward, and gradient of the keys
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@attention_jit
def dkv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, K_BORN, K_DIES,
               LISTS, N_PARTIAL, N_VISIBLE, ORDER,
               stride_q_row, stride_q_head, stride_q_col,
               stride_do_row, stride_do_head, stride_do_col,
               N, nq, nk, nh, group, scale, scale_out, shares,
               HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
               BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
               TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # one program per key tile or part of one. It sums over the query heads of its group, in
    # fp32 and in a fixed order, or over one of `shares` equal shares of them: DK and DV
    # (shares, N, nkv, HEAD_DIM) are then added up outside
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    pid = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    flat = tl.load(ORDER + pid // PARTS)
    kv_head = (flat // nk).to(tl.int64)
    c = tl.arange(0, HEAD_DIM_PADDED)
    tile = flat % nk
    part = pid % PARTS
    keys = (kv_head * nk + tile) * TILE_K + part * BLOCK_K + tl.arange(0, BLOCK_K)
    k = tl.load(K + keys[:, None] * HEAD_DIM_PADDED + c[None, :])          # (BLOCK_K, padded)
    v = tl.load(V + keys[:, None] * HEAD_DIM_PADDED + c[None, :])
    k_born = tl.load(K_BORN + keys)                                        # (BLOCK_K,)
    k_dies = tl.load(K_DIES + keys)
    TILES = LISTS + flat.to(tl.int64) * nq
    n_partial = tl.load(N_PARTIAL + flat)
    n_visible = tl.load(N_VISIBLE + flat)

    dk = tl.zeros((BLOCK_K, HEAD_DIM_PADDED), tl.float32)
    dv = tl.zeros((BLOCK_K, HEAD_DIM_PADDED), tl.float32)
    for g in range(group // shares * share, group // shares * (share + 1)):
        head = kv_head * group + g
        head_q = Q + head * stride_q_head
        head_do = DO + head * stride_do_head
        head_lse = LSE + head * nq * TILE_Q
        head_delta = DELTA + head * nq * TILE_Q
        dk, dv = dkv_loop(  # partial tiles
            dk, dv, k, v, k_born, k_dies, head_q, head_do, head_lse, head_delta,
            stride_q_row, stride_q_col, stride_do_row, stride_do_col,
            TILES, 0, n_partial, N, scale,
            True, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_Q, TILE_Q)
        dk, dv = dkv_loop(  # full tiles
            dk, dv, k, v, k_born, k_dies, head_q, head_do, head_lse, head_delta,
            stride_q_row, stride_q_col, stride_do_row, stride_do_col,
            TILES, n_partial, n_visible, N, scale,
            False, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_Q, TILE_Q)
    # undo the sort: each key's gradient goes to the row where it was born
    at = (share.to(tl.int64) * N + k_born) * (nh // group) + kv_head       # (BLOCK_K,) row, head
    at = at[:, None] * HEAD_DIM + c[None, :]                               # (BLOCK_K, padded)
    real = (k_born < N)[:, None] & (c < HEAD_DIM)[None, :]
    tl.store(DK + at, (dk * scale_out).to(DK.dtype.element_ty), mask=real)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=real)


# The preparation: sort the keys, list the tiles.

class TileLists(NamedTuple):
    """For each tile of one side, `tiles` per KV head, those of the other that it meets."""
    lists: torch.Tensor      # (nkv, tiles, other tiles) int16: partial tiles first, then full ones
    n_partial: torch.Tensor  # (nkv, tiles) int32: how many of a list are partial
    n_visible: torch.Tensor  # (nkv, tiles) int32: length of a list; what follows is not set
    order: torch.Tensor      # (nkv * tiles,) int32: flat tile numbers, the longest list first,
    #                          so that no long program starts last


class Plan(NamedTuple):
    """Everything about `until` that the kernels read. Keys that are never visible and the
    padding (born >= N) have dies = 0, so they come first and fill dead tiles."""
    born: torch.Tensor            # (nkv, nk * TILE_K) int32: row of each sorted key
    dies: torch.Tensor            # (nkv, nk * TILE_K) int32: its `until`, ascending
    by_query: TileLists           # key tiles of each query tile
    by_key: TileLists | None      # query tiles of each key tile; None: no backward pass


def prepare(until, backward=True):
    """Sort each KV head's keys by the time they die and list which tiles meet. Never waits
    for the GPU. until (nkv, N) int32 -> Plan, without `by_key` unless `backward`. Raises
    ValueError for more rows than tile numbers reach."""
    return prepare_layers(until[None], backward)[0]


def prepare_layers(until, backward=True):
    """The same for all layers in one go, as its small launches cost more than their work.
    until (L, nkv, N) -> list of L plans"""
    L, nkv, N = until.shape
    if N > TILE_K * 2**15:
        raise ValueError(f"{N} rows are more than the kernel's 16-bit tile numbers reach "
                         f"({TILE_K * 2**15})")
    heads = L * nkv
    nk = math.ceil(N / TILE_K)
    until = until.flatten(0, 1).contiguous()                               # (heads, N)
    row = torch.arange(nk * TILE_K, device=until.device, dtype=torch.int32)
    dies = F.pad(until, (0, len(row) - N))                                 # (heads, nk * TILE_K)
    dies, born = torch.where(dies > row, dies, 0).sort(dim=1, stable=True)
    born = born.int()
    born_min, born_max = born.view(heads, nk, TILE_K).aminmax(dim=2)       # (heads, nk)
    dies_min, dies_max = dies.view(heads, nk, TILE_K).aminmax(dim=2)
    bounds = born_min, born_max, dies_min, dies_max
    by_query = tile_lists(bounds, N, L, by_key=False)
    by_key = tile_lists(bounds, N, L, by_key=True) if backward else [None] * L
    born, dies = born.view(L, nkv, -1), dies.view(L, nkv, -1)              # (L, nkv, nk * TILE_K)
    return [Plan(*layer) for layer in zip(born, dies, by_query, by_key)]


def tile_lists(bounds, N, L, by_key):
    """bounds: 4 x (L * nkv, nk), smallest and largest born, then dies, of a tile's keys ->
    list of L TileLists"""
    heads, nk = bounds[0].shape
    nq = math.ceil(N / TILE_Q)
    tiles, others = (nk, nq) if by_key else (nq, nk)
    device = bounds[0].device
    lists = torch.empty(L, heads // L, tiles, others, device=device, dtype=torch.int16)
    n_partial = torch.empty(L, heads // L, tiles, device=device, dtype=torch.int32)
    n_visible = torch.empty(L, heads // L, tiles, device=device, dtype=torch.int32)
    born_min, born_max, dies_min, dies_max = bounds
    with torch.cuda.device_of(lists):
        lists_kernel[heads * tiles,](
            BORN_MIN=born_min, BORN_MAX=born_max, DIES_MIN=dies_min, DIES_MAX=dies_max,
            ALL_LISTS=lists, ALL_PARTIAL=n_partial, ALL_VISIBLE=n_visible,
            N=N, nq=nq, nk=nk,
            BY_KEY=by_key, TILE_Q=TILE_Q, BLOCK=128)
    order = n_visible.flatten(1).argsort(dim=1, descending=True).int()     # (L, nkv * tiles)
    return [TileLists(*layer) for layer in zip(lists, n_partial, n_visible, order)]


@attention_jit
def tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv_head, a, b, N, nq, nk,
               BY_KEY: tl.constexpr, TILE_Q: tl.constexpr):
    # tile a of one side, tiles b (BLOCK,) of the other -> any visible, all visible (BLOCK,)
    a += tl.zeros_like(b)                                                  # as wide as b
    query, key = (b, kv_head * nk + a) if BY_KEY else (a, kv_head * nk + b)
    inside = b < (nq if BY_KEY else nk)
    first = query * TILE_Q                                                 # rows of the query tile
    last = tl.minimum(first + TILE_Q, N) - 1
    born_min = tl.load(BORN_MIN + key, mask=inside, other=0)
    dies_max = tl.load(DIES_MAX + key, mask=inside, other=0)
    some = (born_min <= last) & (dies_max > first)
    born_max = tl.load(BORN_MAX + key, mask=inside, other=0)
    dies_min = tl.load(DIES_MIN + key, mask=inside, other=0)
    full = (born_max <= first) & (dies_min > last)
    return some & inside, full & inside


@attention_jit
def lists_kernel(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, ALL_LISTS, ALL_PARTIAL, ALL_VISIBLE,
                 N, nq, nk, BY_KEY: tl.constexpr, TILE_Q: tl.constexpr, BLOCK: tl.constexpr):
    # one program per query tile, which lists the key tiles it meets, or BY_KEY the other
    # way round: it counts them, then writes the partial ones to the front of its list, the
    # full ones behind. Of all layers at once: these pointers are aligned, so the names
    # differ from attention_jit's
    tiles, others = (nk, nq) if BY_KEY else (nq, nk)
    pid = tl.program_id(0)
    kv_head = pid // tiles
    a = pid % tiles
    ALL_LISTS += pid.to(tl.int64) * others
    n_visible, n_full = 0, 0
    for start in range(0, others, BLOCK):
        b = start + tl.arange(0, BLOCK)
        some, full = tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv_head, a, b, N, nq, nk,
                                BY_KEY, TILE_Q)
        n_visible += tl.sum(some.to(tl.int32), 0)
        n_full += tl.sum(full.to(tl.int32), 0)
    n_partial = n_visible - n_full
    at_partial, at_full = 0, n_partial
    for start in range(0, others, BLOCK):
        b = start + tl.arange(0, BLOCK)
        some, full = tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv_head, a, b, N, nq, nk,
                                BY_KEY, TILE_Q)
        f = full.to(tl.int32)
        p = some.to(tl.int32) - f
        tl.store(ALL_LISTS + at_partial + tl.cumsum(p, 0) - 1, b.to(tl.int16), mask=p > 0)
        tl.store(ALL_LISTS + at_full + tl.cumsum(f, 0) - 1, b.to(tl.int16), mask=f > 0)
        at_partial += tl.sum(p, 0)
        at_full += tl.sum(f, 0)
    tl.store(ALL_PARTIAL + pid, n_partial)
    tl.store(ALL_VISIBLE + pid, n_visible)


@attention_jit
def sort_kernel(X, Y, K_BORN, K_DIES, stride_row, stride_head, stride_col, nk,
                HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, TILE_K: tl.constexpr):
    # X (N, nkv, HEAD_DIM) -> Y (nkv, nk * TILE_K, HEAD_DIM_PADDED): keys in sorted order;
    # 0 for keys that nobody sees, for 0 * NaN is NaN
    kv_head = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, HEAD_DIM_PADDED)
    keys = (kv_head * nk + tl.program_id(0)) * TILE_K + tl.arange(0, TILE_K)
    k_born = tl.load(K_BORN + keys).to(tl.int64)
    k_dies = tl.load(K_DIES + keys)
    seen = (k_dies > 0)[:, None] & (c < HEAD_DIM)[None, :]
    X += kv_head * stride_head
    x = tl.load(X + k_born[:, None] * stride_row + c[None, :] * stride_col, mask=seen, other=0.0)
    tl.store(Y + keys[:, None] * HEAD_DIM_PADDED + c[None, :], x)


def sort_keys(x, born, dies, width):
    """x (N, nkv, hs) -> (nkv, nk * TILE_K, width), sorted; 0 for keys that nobody sees"""
    nkv, n_keys = born.shape
    nk = n_keys // TILE_K
    y = torch.empty(nkv, n_keys, width, device=x.device, dtype=x.dtype)
    sort_kernel[nk, nkv](
        X=x, Y=y, K_BORN=born, K_DIES=dies,
        stride_row=x.stride(0), stride_head=x.stride(1), stride_col=x.stride(2),
        nk=nk,
        HEAD_DIM=x.shape[2], HEAD_DIM_PADDED=width, TILE_K=TILE_K)
    return y


# The launch.

FEW_TILES = 1024  # key tiles of all KV heads: about eight for each processor of a large card
SETTLED = {}      # (kernel, dtype, width) -> index of the first config that fits this card


def configs(kernel, dtype, width):
    """(BLOCK_Q, BLOCK_K, warps, stages) for a kernel's name, best first; later ones need
    less shared memory. Tuned on an H100."""
    if dtype == torch.float32:
        # true fp32 runs on ordinary cores: with large blocks the compiler unrolls for minutes
        return [(32, 32, 4, 1), (16, 16, 4, 1)]
    if kernel == "dkv_kernel":
        best = (32, 64, 4, 3) if width == 128 else (64, 64, 4, 3)
    else:
        best = (128, 64, 8, 3) if width == 128 else (128, 64, 4, 3)
    return [best, (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)]


def launch(kernel, dtype, width, programs, **arguments):
    """Run a kernel with the first config that fits the card's shared memory, saying so if
    it is not the best one. programs(BLOCK_Q, BLOCK_K) -> number of programs. A dtype and
    width compiles for some seconds once; another N does not compile again, but for dK and
    dV where it crosses FEW_TILES."""
    key = kernel.__name__, dtype, width
    options = configs(*key)
    for i in range(SETTLED.get(key, 0), len(options)):
        block_q, block_k, warps, stages = options[i]
        try:
            kernel[programs(block_q, block_k),](
                **arguments,
                HEAD_DIM_PADDED=width, BLOCK_Q=block_q, BLOCK_K=block_k,
                TILE_Q=TILE_Q, TILE_K=TILE_K,
                num_warps=warps, num_stages=stages)
        except triton.runtime.errors.OutOfResources as e:
            if i + 1 == len(options):
                raise
            warnings.warn(f"{key[0]}: blocks {options[i]} do not fit this card ({e}); "
                          f"using the slower {options[i + 1]}", stacklevel=2)
            continue
        SETTLED[key] = i
        return


class ShadowAttention(torch.autograd.Function):
    """The kernels as one differentiable step: see `shadow_attention` for what goes in."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, out):
        (N, nh, hs), nkv = q.shape, k.shape[1]
        width = max(16, triton.next_power_of_2(hs))  # tl.arange and tl.dot want it so
        born, dies, by_query, by_key = plan
        nq, nk = by_query.lists.shape[1:]
        k = sort_keys(k, born, dies, width)                                # (nkv, nk * TILE_K, .)
        v = sort_keys(v, born, dies, width)                                # (nkv, nk * TILE_K, .)
        if out is None:
            out = torch.empty(N, nh, hs, device=q.device, dtype=q.dtype)
        lse = torch.empty(nh, nq * TILE_Q, device=q.device, dtype=torch.float32)
        launch(
            forward_kernel, q.dtype, width, lambda block_q, _: nh * nq * (TILE_Q // block_q),
            Q=q, K=k, V=v, OUT=out, LSE=lse, K_BORN=born, K_DIES=dies,
            LISTS=by_query.lists, N_PARTIAL=by_query.n_partial,
            N_VISIBLE=by_query.n_visible, ORDER=by_query.order,
            stride_q_row=q.stride(0), stride_q_head=q.stride(1), stride_q_col=q.stride(2),
            stride_out_row=out.stride(0),
            N=N, nq=nq, nk=nk, nh=nh, group=nh // nkv, scale=scale * math.log2(math.e),
            HEAD_DIM=hs)
        if by_key:
            ctx.save_for_backward(q, k, v, out, lse, born, dies, *by_query, *by_key)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse, born, dies, *lists = ctx.saved_tensors
        by_query, by_key = TileLists(*lists[:4]), TileLists(*lists[4:])
        (N, nh, hs), (nkv, _, width) = q.shape, k.shape
        nq, nk = by_query.lists.shape[1:]
        # with few KV heads a key tile's program is long and there are few of them: then the
        # query heads of a group go to programs of their own
        shares = nh // nkv if nkv * nk < FEW_TILES else 1
        share_dtype = q.dtype if shares == 1 else torch.float32
        delta = torch.empty_like(lse)
        dq = torch.empty(N, nh, hs, device=q.device, dtype=q.dtype)
        dk = torch.empty(shares, N, nkv, hs, device=q.device, dtype=share_dtype)
        dv = torch.empty(shares, N, nkv, hs, device=q.device, dtype=share_dtype)
        common = dict(
            Q=q, K=k, V=v, DO=grad, LSE=lse, DELTA=delta, K_BORN=born, K_DIES=dies,
            stride_q_row=q.stride(0), stride_q_head=q.stride(1), stride_q_col=q.stride(2),
            # grad's own strides: after .sum() it is one number seen through strides of 0
            stride_do_row=grad.stride(0), stride_do_head=grad.stride(1),
            stride_do_col=grad.stride(2),
            N=N, nq=nq, nk=nk, nh=nh, group=nh // nkv,
            scale=ctx.scale * math.log2(math.e), scale_out=ctx.scale,
            HEAD_DIM=hs)
        launch(
            dq_kernel, q.dtype, width, lambda block_q, _: nh * nq * (TILE_Q // block_q),
            OUT=out, DQ=dq,
            LISTS=by_query.lists, N_PARTIAL=by_query.n_partial,
            N_VISIBLE=by_query.n_visible, ORDER=by_query.order,
            **common)
        launch(
            dkv_kernel, q.dtype, width, lambda _, block_k: nkv * nk * (TILE_K // block_k) * shares,
            DK=dk, DV=dv,
            LISTS=by_key.lists, N_PARTIAL=by_key.n_partial,
            N_VISIBLE=by_key.n_visible, ORDER=by_key.order,
            shares=shares,
            **common)
        if shares == 1:
            dk, dv = dk[0], dv[0]                                          # (N, nkv, hs)
        else:
            dk, dv = dk.sum(0).to(q.dtype), dv.sum(0).to(q.dtype)          # (N, nkv, hs)
        return dq, dk, dv, None, None, None


# The same in PyTorch, for real on CPU.

CHUNK = 256  # query rows at a time: fewer cost calls, more cost work on hidden pairs


def shadow_attention_ref(q, k, v, until, scale=None):
    """`shadow_attention` by PyTorch's own attention; fp32 inside (fp64 for fp64).

    Never an N x N mask: rows are cut into blocks that do not see each other (packed
    sequences) and blocks into chunks of at most CHUNK queries. What exists at a time is one
    (chunk, keys) mask; blocks of at most 4 chunks keep theirs for the backward pass, longer
    ones rebuild it."""
    check(q, k, v, until)
    dtype, widened = q.dtype, torch.promote_types(q.dtype, torch.float32)
    row = torch.arange(len(q), device=q.device)                            # (N,)
    dies = torch.where(until > row, until, 0)                              # (nkv, N) 0: unseen
    unseen = (dies == 0).t()[:, :, None]                                   # (N, nkv, 1)
    if bool(unseen.any()):  # 0 * NaN is NaN: zero what these keys hold
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)          # (N, nkv, hs)
    sizes = block_sizes(dies)
    blocks = zip(*(x.to(widened).split(sizes) for x in (q, k, v)), dies.split(sizes, dim=1))
    out = []
    start = 0
    for block_q, block_k, block_v, block_dies in blocks:
        n = len(block_q)
        block_dies = block_dies - start                                    # in rows of the block
        start += n
        chunks = math.ceil(n / CHUNK)
        for i in range(chunks):
            lo, hi = n * i // chunks, n * (i + 1) // chunks
            chunk = block_q[lo:hi], block_k[:hi], block_v[:hi], block_dies[:, :hi], lo, scale
            if chunks <= 4:
                y = attend_chunk(*chunk)                                   # (hi - lo, nh, hs)
            else:
                y = checkpoint(attend_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            out.append(y)
    return torch.cat(out).to(dtype)                                        # (N, nh, hs)


def block_sizes(dies):
    """Cut where everything born before is dead: dies (nkv, N) -> rows of each block."""
    row = torch.arange(dies.shape[1], device=dies.device)
    last = dies.amax(0).cummax(0).values                                   # (N,) of all born so far
    cuts = 1 + (last[:-1] <= row[1:]).nonzero().flatten()
    edges = [0, *cuts.tolist(), len(row)]
    return [end - start for start, end in zip(edges, edges[1:])]


def attend_chunk(q, k, v, dies, first, scale):
    """q (n, nh, hs), rows first .. first + n - 1 of a block; k, v (first + n, nkv, hs) and
    dies (nkv, first + n) of all the block's keys until then -> (n, nh, hs)"""
    (n, nh, hs), nkv = q.shape, len(dies)
    group = nh // nkv
    q = q.view(n, nkv, group, hs).permute(1, 2, 0, 3)                      # (nkv, group, n, hs)
    k, v = k.transpose(0, 1), v.transpose(0, 1)                            # (nkv, first + n, hs)
    if first == 0 and bool((dies >= n).all()):  # nothing dies, as in prefill: no mask to build
        k, v = spread(k, group), spread(v, group)                          # (nkv, group, n, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return y.permute(2, 0, 1, 3).reshape(n, nh, hs)
    row = torch.arange(first, first + n, device=q.device)[:, None]         # (n, 1)
    born = torch.arange(first + n, device=q.device)[None]                  # (1, first + n)
    sees_nothing = bool((dies[:, first:] <= 0).any())  # only a row that does not see itself may
    live = dies > first                                                    # (nkv, first + n)
    most = max(1, int(live.sum(1).max()))
    if most < live.shape[1] // 2:  # most keys are dead: live ones to the front, the rest away
        born = live.byte().argsort(dim=1, descending=True, stable=True)[:, :most]  # (nkv, most)
        k = k.take_along_dim(born[:, :, None], 1)                          # (nkv, most, hs)
        v = v.take_along_dim(born[:, :, None], 1)
        dies = dies.gather(1, born)
    seen = (born[:, None] <= row) & (row < dies[:, None])                  # (nkv, n, keys)
    if sees_nothing:  # softmax needs a key: lend such a row all of them, drop its output below
        blind = ~seen.any(2, keepdim=True)                                 # (nkv, n, 1)
        seen = seen | blind
    k, v = spread(k, group), spread(v, group)                              # (nkv, group, keys, hs)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
    if sees_nothing:
        y = y.masked_fill(blind[:, None], 0)                               # (nkv, group, n, hs)
    return y.permute(2, 0, 1, 3).reshape(n, nh, hs)


def spread(x, group):
    """x (nkv, keys, hs) -> (nkv, group, keys, hs), without a copy"""
    return x[:, None].expand(-1, group, -1, -1)


# The checks of arguments.

def check(q, k, v, until):
    """Raise a one-line ValueError unless the four tensors fit together."""
    if q.dim() != 3 or k.dim() != 3 or 0 in q.shape or 0 in k.shape:
        raise ValueError("q and k must be (N, heads, head size) and not empty, "
                         f"got {tuple(q.shape)} and {tuple(k.shape)}")
    (N, nh, hs), nkv = q.shape, k.shape[1]
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


def check_triton(q, plan, out):
    """Raise a one-line ValueError for what the kernels cannot do."""
    if triton is None:
        raise ValueError("impl='triton' needs the triton package, which is not installed "
                         "(impl='ref' works everywhere)")
    if not q.is_cuda and not interpreted():
        raise ValueError(f"impl='triton' needs CUDA tensors, got {q.device} "
                         "(or TRITON_INTERPRET=1 set before Python starts)")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"impl='triton' takes float32, bfloat16 or float16, got {q.dtype}")
    if interpreted() and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly (triton issue 11584): "
                         "use float32")
    if q.shape[2] > 128:
        raise ValueError(f"impl='triton' takes head sizes up to 128, got {q.shape[2]}")
    if plan is not None and plan.by_key is None and torch.is_grad_enabled():
        raise ValueError("this plan was prepared without backward lists, and gradients are enabled")
    if out is not None:
        fits = (out.shape == q.shape and out.dtype == q.dtype
                and out.stride()[1:] == (q.shape[2], 1))
        if torch.is_grad_enabled() or not fits:
            raise ValueError(f"out, {tuple(out.shape)} with strides {out.stride()}, "
                             "does not fit q or would be part of a recorded graph")


# The self-check.

def group_until(P, G, R, budget, nkv, device="cpu"):
    """until (nkv, N) of one packed group [prompt | G dense copies | G shadow copies]:
    random prompt keys beyond `budget` die where the shadow copies begin, response keys
    where their copy ends."""
    n = R - 1                                                              # rows of a copy
    N = P + 2 * G * n
    copy = torch.arange(2 * G * n, device=device) // n                     # (2 * G * n,)
    ends = P + (copy + 1) * n
    dropped = torch.rand(nkv, P, device=device).argsort(1) >= budget       # (nkv, P)
    prompt = torch.where(dropped, P + G * n, N)
    return torch.cat((prompt, ends.expand(nkv, -1)), dim=1).int()          # (nkv, N)


def run(f, grad, *leaves):
    """[out, dq, dk, dv] of out = f(q, k, v) and its backward pass."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def milliseconds(f, *args, repeat=10):
    """Median wall-clock time of f(*args), after one call to warm up."""
    times = []
    for _ in range(repeat + 1):
        synchronize()
        start = time.perf_counter()
        f(*args)
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[1:])[repeat // 2]


def synchronize():
    """Wait for the card, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_errors(impl, until, grad, q, k, v):
    """One line of the table: errors against the definition, times -> the largest error"""
    def attend(q, k, v):
        return shadow_attention(q, k, v, until, impl=impl)

    def exact(q, k, v):
        return definition(q, k, v, until)

    want = run(exact, *(x.double() for x in (grad, q, k, v)))
    errors = []
    for got, right in zip(run(attend, grad, q, k, v), want):
        errors.append(((got - right).norm() / right.norm()).item())
    line = f"{impl:6s} {str(q.dtype)[6:]:8s} {len(q):4d} {q.shape[1]:3d}:{k.shape[1]:<2d} "
    line += f"{q.shape[2]:4d}  " + " ".join(f"{e:.1e}" for e in errors) + " | "
    if impl == "ref" or q.is_cuda:  # the interpreter's times say nothing
        line += f"{milliseconds(attend, q, k, v):12.2f} "
        line += f"{milliseconds(run, attend, grad, q, k, v):14.2f}"
    print(line)
    return max(errors)


def print_times():
    """Time both policies of one group with a long prompt."""
    until = group_until(P=8192, G=8, R=256, budget=1024, nkv=8, device="cuda")
    N = until.shape[1]
    grad, q, k, v = (torch.randn(N, heads, 128, device="cuda", dtype=torch.bfloat16)
                     for heads in (16, 16, 8, 8))

    def attend(q, k, v):
        return shadow_attention(q, k, v, until)

    print(f"prompt 8192, 8 responses of 256, both policies (N {N}), 1024 prompt keys kept, "
          f"16:8 heads of 128, bf16:\npreparation {milliseconds(prepare, until):.2f} ms, "
          f"with forward {milliseconds(attend, q, k, v):.2f}, "
          f"with backward {milliseconds(run, attend, grad, q, k, v):.2f} ms")


def main():
    """Hold both paths against the definition, print errors and times; exit code 1 if an
    error is too large."""
    device, card, dtypes = "cpu", "CPU", [torch.float32]
    if torch.cuda.is_available():
        device, card = "cuda", torch.cuda.get_device_name()
        dtypes.append(torch.bfloat16)
    impls, version = ["ref"], "absent"
    if triton is not None:
        version = triton.__version__
        if interpreted():
            version += " (interpreted)"
        if device == "cuda" or interpreted():
            impls.append("triton")
    print(f"{card}, torch {torch.__version__}, triton {version}; "
          "errors: norm of the difference from fp64 with a dense mask, over norm")
    print("impl   dtype       N nh:nkv  hs     out      dq      dk      dv "
          "| ms forward  with backward")
    bounds = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
    ok = True
    for nh, nkv, hs in ((4, 2, 32), (8, 2, 128)):
        torch.manual_seed(0)
        if device == "cuda":
            until = group_until(P=700, G=4, R=64, budget=128, nkv=nkv, device=device)
        else:
            until = group_until(P=200, G=2, R=16, budget=48, nkv=nkv)
        N = until.shape[1]
        for dtype in dtypes:
            grad, q, k, v = (torch.randn(N, heads, hs, device=device).to(dtype)
                             for heads in (nh, nh, nkv, nkv))
            for impl in impls:
                error = print_errors(impl, until, grad, q=q, k=k, v=v)
                ok &= error < bounds[dtype]
    if device == "cuda" and triton is not None:
        print_times()
    print("ok" if ok else "FAILED: an error exceeds 1e-5 (float32) or 1e-2 (bfloat16)")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
