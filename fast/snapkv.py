"""
SnapKV at prefill: votes, choice and copy of a whole pack of prompts in four launches a layer.

KVCache.write_pack calls it in place of write_prompts for kvcache.snapkv, the definition that it is
tested against. There a
layer takes dozens of launches for each length of prompt; here prompts of all lengths go together.

The idea. Four kernels, of which each program owns a part of one prompt:

1. sums: the maximum and the sum of exponentials of each query of the window, over a part of the
   keys. It is a softmax that has not been divided yet.
2. votes: what each key receives, summed over the window and the query heads of its KV head.
3. choose: neighbours' votes are pooled; the K-th largest is found bit by bit, as numbers that are
   not negative are ordered like their bits; what lies above it stays, and of what equals it the
   earlier keys. A second walk over the keys writes the positions in ascending order.
4. copy: the kept keys and values go into the cache.

Sums are fp32 and in a fixed order, so two runs agree bit for bit. Their order is not the formula's,
so votes differ from its in the last digits, and keys whose votes differ no more than that may be
chosen otherwise.

Letters: n prompts of P tokens each, one after the other in N rows; nh query and nkv KV heads of
size hs, g = nh // nkv; W queries vote; K keys stay; c columns.
Left out: budgets that differ between KV heads, votes on response keys.
"""
from itertools import accumulate, groupby

import torch

from fast.launch import cdiv, jit, kernels, next_power_of_2, tl

BLOCK = 64     # keys (of a copy: slots) of one step
SPLIT = 512    # keys of a program of `sums`: at least so many
SPLITS = 32    # programs for the keys of a prompt: at most so many
CHOICE = 4096  # keys of one step of `choose`: at most so many


def knows(eviction, k):
    """Can `compress` do what the settings ask for keys k?"""
    uniform = eviction.spread in ("uniform", "pyramid")  # the KV heads of a layer
    return uniform and eviction.pool_by in ("max", "mean") and kernels(k)


def neighbours(lengths, which):
    """Which of the prompts of a slice follow each other and have one length. -> their slice and
    that of their rows, one after the other"""
    first, row = which.start, 0
    for P, same in groupby(lengths[which]):
        n = len(list(same))
        yield slice(first, first + n), slice(row, row + n * P)
        first, row = first + n, row + n * P


def edges(lengths, device):
    """Where prompts begin and end if they follow each other, (B + 1,) int64."""
    return torch.tensor([0, *accumulate(lengths)], device=device)


def compress(cache, which, layer, q, k, v):
    """Replaces KVCache.write_prompts for SnapKV: prompts `which`, a slice, at one layer. q
    (N, nh, hs), k, v (N, nkv, hs). Raises ValueError unless their heads follow each other."""
    (N, nkv, hs), eviction = k.shape, cache.eviction
    if any(x.stride()[1:] != (hs, 1) for x in (q, k, v)):
        raise ValueError("heads of q, k and v must follow each other")
    lengths, slots = cache.lengths[which], cache.slots[layer][which]
    n, longest, most = len(lengths), max(lengths), max(slots)
    budget = eviction.budget_of(layer, len(cache.slots))
    kept = torch.empty(n, nkv, most, device=k.device, dtype=torch.int64)
    prompts = dict(EDGES=cache.edges[which.start:], NKV=nkv, budget=budget)
    sizes = dict(HEAD_DIM=hs, HEAD_DIM_PADDED=max(16, next_power_of_2(hs)))
    prompt_k, prompt_v = cache.prompt_k[layer][which], cache.prompt_v[layer][which]
    step = min(CHOICE, next_power_of_2(longest))
    with torch.cuda.device_of(k):  # Triton launches on the current card
        # votes, and scores after pooling
        votes = torch.empty(2, nkv, N, device=k.device, dtype=torch.float32)
        if longest > budget:
            count_votes(votes[0], lengths, q, k=k, window=eviction.window, **prompts,
                        **sizes)
        choose_kernel[n * nkv,](
            VOTES=votes[0], SCORES=votes[1], KEPT=kept,
            FINITE=cache.finite.view(torch.uint8), N=N, slots=most,
            sinks=eviction.sinks, W=eviction.window, POOL=eviction.pool,
            MEAN=eviction.pool_by == "mean", BLOCK=step,
            num_warps=4 if step <= 1024 else 8, **prompts)
        copy_kernel[n * nkv, cdiv(most, BLOCK)](
            K=k, V=v, KEPT=kept, PROMPT_K=prompt_k, PROMPT_V=prompt_v,
            k_row=k.stride(0), v_row=v.stride(0), slots=most, room=prompt_k.shape[2],
            BLOCK=BLOCK, **prompts, **sizes)
    # into the log, cut where a short prompt ends
    first = 0
    for counts, same in groupby([*zip(*cache.slots)][which]):
        last = first + len(list(same))
        cache.kept[layer].append(kept[first:last, :, :counts[layer]])
        first = last


def count_votes(votes, lengths, q, k, EDGES, NKV, budget, window, HEAD_DIM,
                HEAD_DIM_PADDED):
    """votes (nkv, N) fp32: those of the keys before each window are filled."""
    n, longest, (N, nh, _) = len(lengths), max(lengths), q.shape
    rows = 32 if window > 16 else 16  # queries of one step
    size = max(SPLIT, BLOCK * cdiv(longest, BLOCK * SPLITS))
    splits = cdiv(longest, size)
    sums = torch.empty(n, nh, splits, 2, window, device=q.device, dtype=torch.float32)
    same = dict(Q=q, K=k, EDGES=EDGES, SUMS=sums, q_row=q.stride(0), k_row=k.stride(0),
                splits=splits, budget=budget, scale=HEAD_DIM ** -0.5, NKV=NKV,
                GROUP=nh // NKV, HEAD_DIM=HEAD_DIM, HEAD_DIM_PADDED=HEAD_DIM_PADDED,
                W=window, ROWS=rows, BLOCK=BLOCK)
    programs = n * nh * cdiv(window, rows) * splits
    sums_kernel[programs,](size=size, **same)
    votes_kernel[n * NKV, cdiv(longest, BLOCK)](
        VOTES=votes, N=N, SPLITS=next_power_of_2(splits), **same)


# The kernels. Upper case: pointers and compile-time constants; lower case: values. A prompt of no
# more than `budget` tokens keeps all and is not scored.

@jit()
def place(EDGES, b):
    # the row where prompt b begins, its tokens
    start = tl.load(EDGES + b)
    return start - tl.load(EDGES), (tl.load(EDGES + b + 1) - start).to(tl.int32)


@jit()
def load_head(X, rows, inside, stride_row, head,
              HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    # rows (M,) int64 of one head of X (N, heads, HEAD_DIM) -> (M, padded), 0 outside
    c = tl.arange(0, HEAD_DIM_PADDED)
    at = rows[:, None] * stride_row + head * HEAD_DIM + c[None, :]
    return tl.load(X + at, mask=inside[:, None] & (c < HEAD_DIM)[None, :], other=0.0)


@jit("splits", "size", "budget", unaligned=("EDGES",))
def sums_kernel(Q, K, EDGES, SUMS, q_row, k_row, splits, size, budget, scale,
                NKV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                HEAD_DIM_PADDED: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):
    # program of a (prompt, query head, ROWS of the window, split of the keys).
    # SUMS (n, nh, splits, 2, W): maxima, then sums
    PARTS: tl.constexpr = (W + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    split = pid % splits
    part = pid // splits % PARTS
    owner = pid // (splits * PARTS)  # prompt and head
    head = owner % (NKV * GROUP)
    start, n = place(EDGES, owner // (NKV * GROUP))
    row = part * ROWS + tl.arange(0, ROWS)  # of the window
    position = n - W + row
    q = load_head(Q, start + position, (row < W) & (position >= 0), q_row, head,
                  HEAD_DIM, HEAD_DIM_PADDED)
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    lo = split * size
    hi = tl.where(n > budget, tl.minimum(lo + size, n), lo)
    for first in range(lo, hi, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        k = load_head(K, start + keys, keys < hi, k_row, head // GROUP,
                      HEAD_DIM, HEAD_DIM_PADDED)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (ROWS, BLOCK)
        seen = (keys[None, :] <= position[:, None]) & (keys < hi)[None, :]
        x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(x, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - (-inf) is NaN
        l_i = l_i * tl.exp(m_i - m_ref) + tl.sum(tl.exp(x - m_ref[:, None]), 1)
        m_i = m_new
    SUMS += (owner * splits + split).to(tl.int64) * 2 * W + row
    tl.store(SUMS, m_i, mask=row < W)
    tl.store(SUMS + W, l_i, mask=row < W)


@jit("splits", "budget", "N", unaligned=("EDGES",))
def votes_kernel(Q, K, EDGES, SUMS, VOTES, q_row, k_row, splits, budget, N, scale,
                 NKV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                 HEAD_DIM_PADDED: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
                 BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    # program of a (prompt and KV head, block of keys). Keys before the window are seen by
    # all its queries. VOTES (NKV, N)
    PARTS: tl.constexpr = (W + ROWS - 1) // ROWS
    owner = tl.program_id(0)
    kv_head = owner % NKV
    start, n = place(EDGES, owner // NKV)
    keys = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = keys < n - W
    k = load_head(K, start + keys, inside, k_row, kv_head, HEAD_DIM, HEAD_DIM_PADDED)
    votes = tl.zeros((BLOCK,), tl.float32)
    some = (n > budget) & (tl.program_id(1) * BLOCK < n - W)
    piece = tl.arange(0, SPLITS)[:, None]
    for step in range(0, tl.where(some, GROUP * PARTS, 0)):
        head = kv_head * GROUP + step // PARTS
        row = step % PARTS * ROWS + tl.arange(0, ROWS)
        real = row < W
        # the parts of the softmax put together
        at = (owner // NKV * (NKV * GROUP) + head) * splits + piece
        at = at.to(tl.int64) * 2 * W + row[None, :]
        there = (piece < splits) & real[None, :]
        m = tl.load(SUMS + at, mask=there, other=float("-inf"))  # (SPLITS, ROWS)
        l = tl.load(SUMS + at + W, mask=there, other=0.0)
        top = tl.where(real, tl.max(m, 0), 0.0)                 # (ROWS,)
        total = tl.where(real, tl.sum(l * tl.exp(m - top[None, :]), 0), 1.0)
        q = load_head(Q, start + n - W + row, real, q_row, head,
                      HEAD_DIM, HEAD_DIM_PADDED)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (ROWS, BLOCK)
        p = tl.exp(x - top[:, None]) / total[:, None]
        votes += tl.sum(tl.where(real[:, None], p, 0.0), 0)
    VOTES += kv_head.to(tl.int64) * N + start
    tl.store(VOTES + keys, votes / GROUP, mask=inside)


@jit()
def bits(SCORES, keys, n):
    # scores as integers of the same order, -1 past the last key
    score = tl.load(SCORES + keys, mask=keys < n, other=0.0)
    return tl.where(keys < n, score.to(tl.int32, bitcast=True), -1)


@jit("N", "slots", "budget", "sinks", unaligned=("EDGES", "SCORES"))
def choose_kernel(VOTES, SCORES, EDGES, KEPT, FINITE, N, slots, budget, sinks,
                  W: tl.constexpr, POOL: tl.constexpr, MEAN: tl.constexpr,
                  NKV: tl.constexpr, BLOCK: tl.constexpr):
    # program of a (prompt, KV head). VOTES, SCORES (NKV, N), KEPT (n, NKV, slots)
    owner = tl.program_id(0)
    start, n = place(EDGES, owner // NKV)
    KEPT += owner.to(tl.int64) * slots
    lane = tl.arange(0, BLOCK)
    if n <= budget:
        for first in range(0, n, BLOCK):
            keys = first + lane
            tl.store(KEPT + keys, keys.to(tl.int64), mask=keys < n)
    else:
        VOTES += (owner % NKV).to(tl.int64) * N + start
        SCORES += (owner % NKV).to(tl.int64) * N + start
        for first in range(0, n, BLOCK):  # pool
            keys = first + lane
            inside = keys < n - W
            own = tl.load(VOTES + keys, mask=inside, other=0.0)
            if tl.sum((own - own != 0).to(tl.int32), 0) > 0:  # NaN or inf
                tl.store(FINITE, 0)
            score = tl.zeros((BLOCK,), tl.float32)
            for i in range(POOL):
                near = keys + i - POOL // 2
                x = tl.load(VOTES + near, mask=inside & (near >= 0) & (near < n - W),
                            other=0.0)
                score = score + x if MEAN else tl.maximum(score, x)
            if MEAN:
                score = tl.div_rn(score, tl.full((BLOCK,), POOL, tl.float32))
            # as kvcache.keep: no number counts as 0; sinks and window stay
            score = tl.where(score == score, tl.minimum(score, 3e38), 0.0)
            score = tl.where((keys < sinks) | (keys >= n - W), float("inf"), score)
            tl.store(SCORES + keys, score, mask=keys < n)
        tl.debug_barrier()  # they are read by other threads
        least = 0  # the largest number that `budget` scores reach
        step = 1 << 30
        for _bit in range(31):
            count = 0
            for first in range(0, n, BLOCK):
                reach = bits(SCORES, first + lane, n) >= least + step
                count += tl.sum(reach.to(tl.int32), 0)
            least = tl.where(count >= budget, least + step, least)
            step = step // 2
        above = 0
        for first in range(0, n, BLOCK):
            above += tl.sum((bits(SCORES, first + lane, n) > least).to(tl.int32), 0)
        filled, ties = 0, 0  # of equals the earlier
        for first in range(0, n, BLOCK):
            keys = first + lane
            score = bits(SCORES, keys, n)
            tie = (score == least).to(tl.int32)
            stay = (score > least) | (
                (tie > 0) & (ties + tl.cumsum(tie, 0) <= budget - above))
            one = stay.to(tl.int32)
            slot = filled + tl.cumsum(one, 0) - 1
            tl.store(KEPT + slot, keys.to(tl.int64), mask=stay)
            filled += tl.sum(one, 0)
            ties += tl.sum(tie, 0)


@jit("slots", "room", "budget", unaligned=("EDGES",))
def copy_kernel(K, V, EDGES, KEPT, PROMPT_K, PROMPT_V, k_row, v_row,
                slots, room, budget, NKV: tl.constexpr, HEAD_DIM: tl.constexpr,
                HEAD_DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr):
    # program of a (prompt and KV head, block of slots). PROMPT_K, PROMPT_V
    # (n, NKV, room, HEAD_DIM), KEPT (n, NKV, slots)
    owner = tl.program_id(0)
    head = owner % NKV
    start, n = place(EDGES, owner // NKV)
    KEPT += owner.to(tl.int64) * slots
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < tl.minimum(n, budget)
    rows = start + tl.load(KEPT + slot, mask=inside, other=0)
    c = tl.arange(0, HEAD_DIM_PADDED)
    to = (owner.to(tl.int64) * room + slot)[:, None] * HEAD_DIM + c[None, :]
    both = inside[:, None] & (c < HEAD_DIM)[None, :]
    k = load_head(K, rows, inside, k_row, head, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(PROMPT_K + to, k, mask=both)
    v = load_head(V, rows, inside, v_row, head, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(PROMPT_V + to, v, mask=both)
