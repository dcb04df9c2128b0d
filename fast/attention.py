"""
The tuned attention kernels: what shadow_attn.simple_attention computes, made fast.

The steps, each over the one before. Step 0 is the readable kernel in shadow_attn.py: a program
takes a block of queries, walks all blocks of keys up to the diagonal, and compares two integers
for every pair.

1. Sort. Attention does not care about the order of keys, so each KV head's keys are laid out by
   the time they die (`make_plan`, `sort_keys`): keys that die together share tiles.
2. Skip. Two comparisons tell whether a tile of queries and a tile of keys have anything to do with
   each other (`tiles_meet`). A program walks a list of the tiles that it meets, so dead ones cost
   nothing (`lists_kernel`).
3. No mask where all is visible: full tiles have a loop of their own (MASKED=False).
4. The same lists the other way round serve dK and dV. With few KV heads a key tile's query heads
   go to several programs, whose sums are added up (`shares`).
5. Start long programs first (`order`), and side by side those that read the same keys
   (`my_queries`).
6. Exponentials in base 2, as the card has no other: scale carries log2(e).
7. Copy nothing but the sorted keys: q and gradients are read with the strides that they have, dK
   and dV go straight to the row where their key was born, the result may go over q.
8. Blocks for each dtype and head size (`configs`), smaller ones where shared memory is short, and
   one compilation for all numbers of rows (`attention_jit`).

The backward pass is FlashAttention-2's (recompute the probabilities from the saved log-sum-exp) in
two kernels without atomics, so two runs agree bit for bit. Sums are fp32; products are bf16 or fp16
on tensor cores, or true fp32 (no TF32).

Left out: autotuning, paged caches, second derivatives.
References: FlashAttention-2 (arXiv 2307.08691), the Triton tutorial on fused attention,
FlexAttention (2412.05496: lists of full and partial tiles).
"""
import math
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fast.launch import jit, next_power_of_2, tl, triton

TILE_Q, TILE_K = 128, 64  # rows of a query tile, keys of a key tile


# The picture: what is skipped. One KV head's keys, sorted by `until`, of one prompt with two
# samples: a prompt of 8 rows, of which 4 keys are evicted after prefill, and 2 responses of 4 rows,
# each in a dense copy and in a shadow copy. Here a tile is 4 x 4.
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


# The Triton kernels. Upper case: pointers and compile-time constants; lower case: values.
#   rows     query rows, in time order
#   keys     indices into the sorted keys; K_BORN and K_DIES hold the row and the `until` of each
#   nq, nk   tiles of queries and of keys, per KV head; `group` of the nh query heads share one
#   flat     number of a tile among those of all KV heads
#   scale    carries log2(e): qk is in base 2, as the card has exp2 but no exp
# HEAD_DIM_PADDED is the next power of two, as Triton wants; columns past HEAD_DIM hold 0.

# no new compilation where N is new at every step and lists are slices of those of all layers
attention_jit = jit("N", "nq", "nk", "nh", "group", "shares",
                    unaligned=("LISTS", "N_PARTIAL", "N_VISIBLE", "ORDER"))


@attention_jit
def load_rows(X, stride_row, stride_col, start, N,
              ROWS: tl.constexpr,
              HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    # (ROWS, HEAD_DIM_PADDED) of one head, 0 past the last row and column; the start is
    # 64-bit, offsets within a tile are small
    r = tl.arange(0, ROWS)
    c = tl.arange(0, HEAD_DIM_PADDED)
    X += start.to(tl.int64) * stride_row
    inside = (start + r < N)[:, None] & (c < HEAD_DIM)[None, :]
    at = r[:, None] * stride_row + c[None, :] * stride_col
    return tl.load(X + at, mask=inside, other=0.0)


@attention_jit
def load_keys(X, keys, HEAD_DIM_PADDED: tl.constexpr):
    c = tl.arange(0, HEAD_DIM_PADDED)
    return tl.load(X + keys[:, None] * HEAD_DIM_PADDED + c[None, :])


@attention_jit
def store_rows(X, x, stride_row, start, N,
               ROWS: tl.constexpr,
               HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, HEAD_DIM_PADDED)
    X += start.to(tl.int64) * stride_row
    inside = (start + r < N)[:, None] & (c < HEAD_DIM)[None, :]
    at = r[:, None] * stride_row + c[None, :]
    tl.store(X + at, x.to(X.dtype.element_ty), mask=inside)


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
    head = (kv_head * group + pid % group).to(tl.int64)
    return flat, kv_head.to(tl.int64), head, start


@attention_jit
def my_keys(flat, kv_head, nk, K, V, K_BORN, K_DIES, LISTS, N_PARTIAL, N_VISIBLE,
            HEAD_DIM_PADDED: tl.constexpr, TILE_K: tl.constexpr):
    # this KV head's keys, and the list of key tiles that query tile `flat` meets
    first = kv_head * nk * TILE_K
    K += first * HEAD_DIM_PADDED
    V += first * HEAD_DIM_PADDED
    K_BORN += first
    K_DIES += first
    TILES = LISTS + flat.to(tl.int64) * nk
    n_partial = tl.load(N_PARTIAL + flat)
    n_visible = tl.load(N_VISIBLE + flat)
    return K, V, K_BORN, K_DIES, TILES, n_partial, n_visible


@attention_jit
def forward_loop(acc, m_i, l_i, q, rows, K, V, K_BORN, K_DIES, TILES, lo, hi, scale,
                 MASKED: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
                 BLOCK_K: tl.constexpr, TILE_K: tl.constexpr):
    # online softmax over the key tiles TILES[lo:hi]. m_i, l_i (BLOCK_Q,): running maximum
    # and sum; acc (BLOCK_Q, HEAD_DIM_PADDED): the output before its division by l_i
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    for t in range(lo * PARTS, hi * PARTS):
        tile = tl.load(TILES + t // PARTS).to(tl.int32)
        part = t % PARTS
        keys = tile * TILE_K + part * BLOCK_K + tl.arange(0, BLOCK_K)
        # 1. qk
        k = load_keys(K, keys, HEAD_DIM_PADDED)                 # (BLOCK_K, padded)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")     # (BLOCK_Q, BLOCK_K)
        # 2. mask
        if MASKED:
            k_born = tl.load(K_BORN + keys)                     # (BLOCK_K,)
            k_dies = tl.load(K_DIES + keys)
            seen = k_born[None, :] <= rows[:, None]
            seen = seen & (rows[:, None] < k_dies[None, :])
            qk = tl.where(seen, qk, float("-inf"))
        # 3. softmax; a row that has seen nothing yet has maximum -inf, and -inf - (-inf) is NaN
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * scale - m_ref[:, None])
        alpha = tl.exp2(m_i - m_ref)  # shrinks earlier terms
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        # 4. values
        v = load_keys(V, keys, HEAD_DIM_PADDED)                 # (BLOCK_K, padded)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_i, l_i


@attention_jit
def forward_kernel(Q, K, V, OUT, LSE, K_BORN, K_DIES,
                   LISTS, N_PARTIAL, N_VISIBLE, ORDER,
                   stride_q_row, stride_q_head, stride_q_col, stride_out_row,
                   N, nq, nk, nh, group, scale,
                   HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
                   BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    # OUT (N, nh, HEAD_DIM), which may be Q: a program reads its rows of Q first.
    # LSE (nh, nq * TILE_Q): log-sum-exp of each row, in base 2
    flat, kv_head, head, start = my_queries(ORDER, nq, group, BLOCK_Q, TILE_Q)
    rows = start + tl.arange(0, BLOCK_Q)
    K, V, K_BORN, K_DIES, TILES, n_partial, n_visible = my_keys(
        flat, kv_head, nk, K, V, K_BORN, K_DIES, LISTS, N_PARTIAL, N_VISIBLE,
        HEAD_DIM_PADDED, TILE_K)

    q = load_rows(Q + head * stride_q_head, stride_q_row, stride_q_col, start, N,
                  BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    m_i = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM_PADDED), tl.float32)
    acc, m_i, l_i = forward_loop(  # partial tiles
        acc, m_i, l_i, q, rows, K, V, K_BORN, K_DIES, TILES, 0, n_partial,
        scale, True, HEAD_DIM_PADDED, BLOCK_K, TILE_K)
    acc, m_i, l_i = forward_loop(  # full tiles
        acc, m_i, l_i, q, rows, K, V, K_BORN, K_DIES, TILES, n_partial, n_visible,
        scale, False, HEAD_DIM_PADDED, BLOCK_K, TILE_K)

    # a row that sees nothing or is past the end: output 0, and log-sum-exp +inf, so that
    # the backward pass finds exp2(qk - inf) = 0
    some = (l_i > 0) & (rows < N)
    l_i = tl.where(some, l_i, 1.0)
    store_rows(OUT + head * HEAD_DIM, acc / l_i[:, None], stride_out_row, start, N,
               BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    lse = tl.where(some, m_i + tl.log2(l_i), float("inf"))
    tl.store(LSE + head * nq * TILE_Q + rows, lse)


@attention_jit
def dq_loop(dq, q, do, lse, delta, rows, K, V, K_BORN, K_DIES, TILES, lo, hi, scale,
            MASKED: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
            BLOCK_K: tl.constexpr, TILE_K: tl.constexpr):
    # adds what the key tiles TILES[lo:hi] give to dq (BLOCK_Q, HEAD_DIM_PADDED)
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    for t in range(lo * PARTS, hi * PARTS):
        tile = tl.load(TILES + t // PARTS).to(tl.int32)
        part = t % PARTS
        keys = tile * TILE_K + part * BLOCK_K + tl.arange(0, BLOCK_K)
        # 1. probabilities, from qk and the saved log-sum-exp
        k = load_keys(K, keys, HEAD_DIM_PADDED)                 # (BLOCK_K, padded)
        v = load_keys(V, keys, HEAD_DIM_PADDED)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")     # (BLOCK_Q, BLOCK_K)
        p = tl.exp2(qk * scale - lse[:, None])
        # 2. mask
        if MASKED:
            k_born = tl.load(K_BORN + keys)                     # (BLOCK_K,)
            k_dies = tl.load(K_DIES + keys)
            seen = k_born[None, :] <= rows[:, None]
            seen = seen & (rows[:, None] < k_dies[None, :])
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
    K, V, K_BORN, K_DIES, TILES, n_partial, n_visible = my_keys(
        flat, kv_head, nk, K, V, K_BORN, K_DIES, LISTS, N_PARTIAL, N_VISIBLE,
        HEAD_DIM_PADDED, TILE_K)

    q = load_rows(Q + head * stride_q_head, stride_q_row, stride_q_col, start, N,
                  BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    do = load_rows(DO + head * stride_do_head, stride_do_row, stride_do_col, start, N,
                   BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    out = load_rows(OUT + head * HEAD_DIM, nh * HEAD_DIM, 1, start, N,
                    BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)   # (BLOCK_Q,)
    tl.store(DELTA + head * nq * TILE_Q + rows, delta)
    lse = tl.load(LSE + head * nq * TILE_Q + rows)
    dq = tl.zeros((BLOCK_Q, HEAD_DIM_PADDED), tl.float32)
    dq = dq_loop(  # partial tiles
        dq, q, do, lse, delta, rows, K, V, K_BORN, K_DIES, TILES, 0, n_partial,
        scale, True, HEAD_DIM_PADDED, BLOCK_K, TILE_K)
    dq = dq_loop(  # full tiles
        dq, q, do, lse, delta, rows, K, V, K_BORN, K_DIES, TILES, n_partial, n_visible,
        scale, False, HEAD_DIM_PADDED, BLOCK_K, TILE_K)
    store_rows(DQ + head * HEAD_DIM, dq * scale_out, nh * HEAD_DIM, start, N,
               BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)


@attention_jit
def dkv_loop(dk, dv, k, v, k_born, k_dies, Q, DO, LSE, DELTA,
             stride_q_row, stride_q_col, stride_do_row, stride_do_col,
             TILES, lo, hi, N, scale, MASKED: tl.constexpr,
             HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
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
        # 1. probabilities, from qk and the saved log-sum-exp, which is +inf past the last row
        q = load_rows(Q, stride_q_row, stride_q_col, start, N,
                      BLOCK_Q, HEAD_DIM, HEAD_DIM_PADDED)       # (BLOCK_Q, padded)
        lse = tl.load(LSE + rows)                               # (BLOCK_Q,)
        delta = tl.load(DELTA + rows)                           # (BLOCK_Q,)
        qk = tl.dot(k, tl.trans(q), input_precision="ieee")     # (BLOCK_K, BLOCK_Q)
        p = tl.exp2(qk * scale - lse[None, :])
        # 2. mask
        if MASKED:
            seen = k_born[:, None] <= rows[None, :]
            seen = seen & (rows[None, :] < k_dies[:, None])
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
    k = load_keys(K, keys, HEAD_DIM_PADDED)                     # (BLOCK_K, padded)
    v = load_keys(V, keys, HEAD_DIM_PADDED)
    k_born = tl.load(K_BORN + keys)                             # (BLOCK_K,)
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
    row = share.to(tl.int64) * N + k_born                      # (BLOCK_K,) of DK and DV
    nkv = nh // group
    vector = row * nkv + kv_head       # (BLOCK_K,) number of each key's HEAD_DIM values
    at = vector[:, None] * HEAD_DIM + c[None, :]                # (BLOCK_K, padded)
    real = (k_born < N)[:, None] & (c < HEAD_DIM)[None, :]
    tl.store(DK + at, (dk * scale_out).to(DK.dtype.element_ty), mask=real)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=real)


# The plan: sort the keys, list the tiles.

class TileLists(NamedTuple):
    """For each tile of one side, `tiles` per KV head, those of the other that it meets.

    lists (nkv, tiles, other tiles) int16: partial tiles first, then full ones. n_partial, n_visible
    (nkv, tiles) int32: how many of a list are partial, and its length; what follows is not set.
    order (nkv * tiles,) int32: flat tile numbers, the longest list first, so that no long program
    starts last."""
    lists: torch.Tensor
    n_partial: torch.Tensor
    n_visible: torch.Tensor
    order: torch.Tensor


class Plan(NamedTuple):
    """Everything about `until` that the kernels read.

    born, dies (nkv, nk * TILE_K) int32: row and `until` of each key, sorted by the latter. Keys
    that are never visible and the padding (born >= N) have dies = 0, so they come first and fill
    dead tiles. by_query: key tiles of each query tile. by_key: query tiles of each key tile, None
    without a backward pass."""
    born: torch.Tensor
    dies: torch.Tensor
    by_query: TileLists
    by_key: TileLists | None


def make_plan(until, backward=True):
    """Sort each KV head's keys by the time they die and list which tiles meet. Never waits for the
    GPU. until (nkv, N) int32 -> Plan, without `by_key` unless `backward`. Raises ValueError for
    more rows than tile numbers reach."""
    return make_plans(until[None], backward)[0]


def make_plans(until, backward=True):
    """The same for all layers in one go, as its small launches cost more than their work.
    until (L, nkv, N) -> list of L plans"""
    L, nkv, N = until.shape
    if N > TILE_K * 2**15:
        raise ValueError(f"{N} rows are more than the kernel's 16-bit tile numbers "
                         f"reach ({TILE_K * 2**15})")
    heads = L * nkv
    nk = math.ceil(N / TILE_K)
    until = until.flatten(0, 1).contiguous()                    # (heads, N)
    row = torch.arange(nk * TILE_K, device=until.device, dtype=torch.int32)
    dies = F.pad(until, (0, len(row) - N))                      # (heads, nk * TILE_K)
    dies, born = torch.where(dies > row, dies, 0).sort(dim=1, stable=True)
    born = born.int()
    bounds = []
    for x in (born, dies):
        bounds += x.view(heads, nk, TILE_K).aminmax(dim=2)      # (heads, nk) each
    by_query = tile_lists(bounds, N, L, by_key=False)
    by_key = [None] * L
    if backward:
        by_key = tile_lists(bounds, N, L, by_key=True)
    born = born.view(L, nkv, -1)                                # (L, nkv, nk * TILE_K)
    dies = dies.view(L, nkv, -1)
    return [Plan(*layer) for layer in zip(born, dies, by_query, by_key)]


def plans_of(until, backward=True):
    """`make_plans` on a card, whose thousands of small launches it saves; L times None elsewhere,
    and of very long rows, whose lists for all layers would be large."""
    L, nkv, N = until.shape
    if until.is_cuda and L * nkv * N ** 2 < 2**39:
        return make_plans(until, backward)
    return [None] * L


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
    order = n_visible.flatten(1).argsort(dim=1, descending=True)  # (L, nkv * tiles)
    order = order.int()
    return [TileLists(*layer) for layer in zip(lists, n_partial, n_visible, order)]


@attention_jit
def tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX, kv_head, a, b, N, nq, nk,
               BY_KEY: tl.constexpr, TILE_Q: tl.constexpr):
    # tile a of one side, tiles b (BLOCK,) of the other -> any visible, all visible (BLOCK,)
    a += tl.zeros_like(b)  # as wide as b
    query, key = (b, kv_head * nk + a) if BY_KEY else (a, kv_head * nk + b)
    inside = b < (nq if BY_KEY else nk)
    first = query * TILE_Q  # rows of the query tile
    last = tl.minimum(first + TILE_Q, N) - 1
    born_min = tl.load(BORN_MIN + key, mask=inside, other=0)
    dies_max = tl.load(DIES_MAX + key, mask=inside, other=0)
    some = (born_min <= last) & (dies_max > first)
    born_max = tl.load(BORN_MAX + key, mask=inside, other=0)
    dies_min = tl.load(DIES_MIN + key, mask=inside, other=0)
    full = (born_max <= first) & (dies_min > last)
    return some & inside, full & inside


@attention_jit
def lists_kernel(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX,
                 ALL_LISTS, ALL_PARTIAL, ALL_VISIBLE, N, nq, nk,
                 BY_KEY: tl.constexpr, TILE_Q: tl.constexpr, BLOCK: tl.constexpr):
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
        some, full = tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX,
                                kv_head, a, b, N, nq, nk, BY_KEY, TILE_Q)
        n_visible += tl.sum(some.to(tl.int32), 0)
        n_full += tl.sum(full.to(tl.int32), 0)
    n_partial = n_visible - n_full
    at_partial, at_full = 0, n_partial
    for start in range(0, others, BLOCK):
        b = start + tl.arange(0, BLOCK)
        some, full = tiles_meet(BORN_MIN, BORN_MAX, DIES_MIN, DIES_MAX,
                                kv_head, a, b, N, nq, nk, BY_KEY, TILE_Q)
        f = full.to(tl.int32)
        p = some.to(tl.int32) - f
        number = b.to(tl.int16)
        tl.store(ALL_LISTS + at_partial + tl.cumsum(p, 0) - 1, number, mask=p > 0)
        tl.store(ALL_LISTS + at_full + tl.cumsum(f, 0) - 1, number, mask=f > 0)
        at_partial += tl.sum(p, 0)
        at_full += tl.sum(f, 0)
    tl.store(ALL_PARTIAL + pid, n_partial)
    tl.store(ALL_VISIBLE + pid, n_visible)


@attention_jit
def sort_kernel(K, V, SORTED_K, SORTED_V, K_BORN, K_DIES,
                stride_k_row, stride_k_head, stride_k_col,
                stride_v_row, stride_v_head, stride_v_col, nk,
                HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
                TILE_K: tl.constexpr):
    # K, V (N, nkv, HEAD_DIM) -> SORTED_K, SORTED_V (nkv, nk * TILE_K, HEAD_DIM_PADDED): in
    # sorted order; 0 for keys that nobody sees, for 0 * NaN is NaN
    kv_head = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, HEAD_DIM_PADDED)
    keys = (kv_head * nk + tl.program_id(0)) * TILE_K + tl.arange(0, TILE_K)
    k_born = tl.load(K_BORN + keys).to(tl.int64)
    k_dies = tl.load(K_DIES + keys)
    seen = (k_dies > 0)[:, None] & (c < HEAD_DIM)[None, :]
    to = keys[:, None] * HEAD_DIM_PADDED + c[None, :]
    K += kv_head * stride_k_head
    at = k_born[:, None] * stride_k_row + c[None, :] * stride_k_col
    tl.store(SORTED_K + to, tl.load(K + at, mask=seen, other=0.0))
    V += kv_head * stride_v_head
    at = k_born[:, None] * stride_v_row + c[None, :] * stride_v_col
    tl.store(SORTED_V + to, tl.load(V + at, mask=seen, other=0.0))


def sort_keys(k, v, born, dies, width):
    """k, v (N, nkv, hs) -> (nkv, nk * TILE_K, width) each, sorted; 0 for keys that nobody sees"""
    nkv, n_keys = born.shape
    nk = n_keys // TILE_K
    sorted_k = torch.empty(nkv, n_keys, width, device=k.device, dtype=k.dtype)
    sorted_v = torch.empty_like(sorted_k)
    sort_kernel[nk, nkv](
        K=k, V=v, SORTED_K=sorted_k, SORTED_V=sorted_v, K_BORN=born, K_DIES=dies,
        **strides("k", k), **strides("v", v), nk=nk,
        HEAD_DIM=k.shape[2], HEAD_DIM_PADDED=width, TILE_K=TILE_K)
    return sorted_k, sorted_v


# The launch.

# key tiles of all KV heads: about eight for each processor of a large card
FEW_TILES = 1024
SETTLED = {}   # (kernel, dtype, width) -> index of the first config that fits this card


def strides(name, x):
    """The kernels' arguments for the strides of x (N, heads, hs)."""
    names = [f"stride_{name}_{part}" for part in ("row", "head", "col")]
    return dict(zip(names, x.stride()))


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


def fast_attention(q, k, v, until, scale, plan=None, out=None):
    """`shadow_attn.shadow_attention` on a card, its arguments checked but for plan and out."""
    recorded = torch.is_grad_enabled()
    if plan is not None and plan.by_key is None and recorded:
        raise ValueError(
            "this plan was prepared without backward lists, and gradients are enabled")
    if out is not None:
        fits = out.shape == q.shape and out.dtype == q.dtype
        fits = fits and out.stride()[1:] == (q.shape[2], 1)
        if recorded or not fits:
            raise ValueError(f"out, {tuple(out.shape)} with strides {out.stride()}, "
                             "does not fit q or would be part of a recorded graph")
    with torch.cuda.device_of(q):  # Triton launches on the current card
        if plan is None:
            plan = make_plan(until, recorded)
        return ShadowAttention.apply(q, k, v, plan, scale, out)


class ShadowAttention(torch.autograd.Function):
    """The kernels as one differentiable step."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, out):
        N, nh, hs = q.shape
        nkv = k.shape[1]
        width = max(16, next_power_of_2(hs))  # tl.arange and tl.dot want it so
        born, dies, by_query, by_key = plan
        nq, nk = by_query.lists.shape[1:]
        # (nkv, nk * TILE_K, width) each
        k, v = sort_keys(k, v, born=born, dies=dies, width=width)
        if out is None:
            out = torch.empty(N, nh, hs, device=q.device, dtype=q.dtype)
        lse = torch.empty(nh, nq * TILE_Q, device=q.device, dtype=torch.float32)
        launch(
            forward_kernel, q.dtype, width,
            lambda block_q, _: nh * nq * (TILE_Q // block_q),
            Q=q, K=k, V=v, OUT=out, LSE=lse, K_BORN=born, K_DIES=dies,
            LISTS=by_query.lists, N_PARTIAL=by_query.n_partial,
            N_VISIBLE=by_query.n_visible, ORDER=by_query.order,
            **strides("q", q), stride_out_row=out.stride(0),
            N=N, nq=nq, nk=nk, nh=nh, group=nh // nkv,
            scale=scale * math.log2(math.e),
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
        N, nh, hs = q.shape
        nkv, _, width = k.shape
        nq, nk = by_query.lists.shape[1:]
        # with few KV heads a key tile's program is long and there are few of them: then the
        # query heads of a group go to programs of their own
        shares, share_dtype = 1, q.dtype
        if nkv * nk < FEW_TILES:
            shares = nh // nkv
        if shares > 1:
            share_dtype = torch.float32
        delta = torch.empty_like(lse)
        dq = torch.empty(N, nh, hs, device=q.device, dtype=q.dtype)
        dk = torch.empty(shares, N, nkv, hs, device=q.device, dtype=share_dtype)
        dv = torch.empty(shares, N, nkv, hs, device=q.device, dtype=share_dtype)
        common = dict(
            Q=q, K=k, V=v, DO=grad, LSE=lse, DELTA=delta, K_BORN=born, K_DIES=dies,
            # grad's own strides: after .sum() it is one number seen through strides of 0
            **strides("q", q), **strides("do", grad),
            N=N, nq=nq, nk=nk, nh=nh, group=nh // nkv,
            scale=ctx.scale * math.log2(math.e), scale_out=ctx.scale,
            HEAD_DIM=hs)
        launch(
            dq_kernel, q.dtype, width,
            lambda block_q, _: nh * nq * (TILE_Q // block_q),
            OUT=out, DQ=dq,
            LISTS=by_query.lists, N_PARTIAL=by_query.n_partial,
            N_VISIBLE=by_query.n_visible, ORDER=by_query.order,
            **common)
        launch(
            dkv_kernel, q.dtype, width,
            lambda _, block_k: nkv * nk * (TILE_K // block_k) * shares,
            DK=dk, DV=dv,
            LISTS=by_key.lists, N_PARTIAL=by_key.n_partial,
            N_VISIBLE=by_key.n_visible, ORDER=by_key.order,
            shares=shares,
            **common)
        if shares == 1:
            dk, dv = dk[0], dv[0]                               # (N, nkv, hs)
        else:
            dk = dk.sum(0).to(q.dtype)                          # (N, nkv, hs)
            dv = dv.sum(0).to(q.dtype)
        return dq, dk, dv, None, None, None
