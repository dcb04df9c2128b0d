"""
Attention of one decoding step: one new token per sample, over the prompt its group shares and the
response it owns.

The idea. Decoding reads every key once per token and computes almost nothing with it, so time is
bytes. The G samples of a group stand at the same prompt: their query heads are stacked, and the
prompt's keys are read once per group instead of once per sample. A sample's own response is read
only as far as it has come. The pieces, each a softmax over some of the keys, are put together by
their maxima m and sums l:

    out = sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) l_i,    M = max_i m_i

Each piece is one program, so that even a few prompts keep all processors busy. The piece that owns
the start of a response begins with the new token itself, which every query sees, and stores its key
and value in the cache. The step number is read from the device: one CUDA graph serves all steps.

Here: the formula, the same in PyTorch (used for real on CPU), two Triton kernels (pieces, then
their sum), the launch. `python -m experiments.attention` checks against the formula and prints
times.
Letters: B prompts with K slots for keys, G samples of each, S = B * G with R slots; t of them are
filled; nh query and nkv KV heads of size hs, g = nh // nkv; c columns. Loops: sample s of prompt b,
query head h.
Left out: gradients, paged caches, response keys that die while decoding.
References: splitting the keys: FlashDecoding (crfm.stanford.edu/2023/10/12/flashdecoding.html);
sharing a prefix: Hydragen (arXiv 2402.05099).
"""
import math

import torch

from fast.head import matmul32
from fast.launch import cdiv, early, jit, kernels, next_power_of_2, tl, wait


def formula(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t):
    """What this file computes, in fp64; shapes as `decode_attention`."""
    (S, nh, hs), (B, nkv, _, _) = q.shape, prompt_k.shape
    out = torch.empty(S, nh, hs, dtype=torch.float64, device=q.device)
    for s in range(S):
        b = s // (S // B)
        for h in range(nh):
            g = h // (nh // nkv)
            n = int(n_kept[b, g])
            keys = prompt_k[b, g, :n], response_k[s, g, :t], k[s, g, None]
            values = prompt_v[b, g, :n], response_v[s, g, :t], v[s, g, None]
            keys, values = torch.cat(keys), torch.cat(values)   # (n + t + 1, hs)
            qk = keys.double() @ q[s, h].double() * hs ** -0.5
            out[s, h] = qk.softmax(0) @ values.double()
    return out


BLOCK = 64      # keys of one step of a program's loop
# keys of one program: at most so many of a response, at least so many of a prompt (or half
# of a short one)
SPLIT = 256
PROGRAMS = 256  # wanted for prompts, about two for each processor of a large card


def decode_attention(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t,
                     scale=None, impl=None):
    """The new token of each sample attends to its prompt's kept keys, its own response and itself;
    k and v are stored at slot t.

    q (S, nh, hs), k, v (S, nkv, hs), S = B x G samples, sample s of prompt s // G.
    prompt_k, prompt_v (B, nkv, K, hs), of which slots below n_kept (B, nkv) int32 count: KV heads
    may hold different numbers of keys. response_k, response_v (S, nkv, R, hs), of which slots below
    t, an int64 tensor (), count. scale: 1/sqrt(hs) if None. impl: "triton", "ref", or None for
    Triton on CUDA and PyTorch elsewhere. -> (S, nh, hs)
    Raises ValueError for n_kept of another shape and an impl that is unknown or cannot run here."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if n_kept.shape != prompt_k.shape[:2]:
        raise ValueError(f"n_kept must be (B, nkv) = {tuple(prompt_k.shape[:2])}, "
                         f"got {tuple(n_kept.shape)}")
    if impl not in (None, "triton", "ref") or (impl == "triton" and not kernels(q)):
        raise ValueError(f"impl={impl!r} is unknown or cannot compute {q.dtype} on "
                         f"{q.device}: use None")
    attend = decode_attention_ref
    if impl != "ref" and kernels(q):
        attend = decode_attention_triton
    return attend(q, k, v, prompt_k=prompt_k, prompt_v=prompt_v, n_kept=n_kept,
                  response_k=response_k, response_v=response_v, t=t, scale=scale)


def decode_attention_ref(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t,
                         scale):
    """In PyTorch, for real on CPU: the prompt's keys are read once per group here too."""
    (S, nh, hs), (B, nkv, K, _), t = q.shape, prompt_k.shape, int(t)
    G = S // B
    response_k[:, :, t] = k
    response_v[:, :, t] = v
    rk, rv = response_k[:, :, :t + 1], response_v[:, :, :t + 1]  # (S, nkv, t+1, hs)
    q = q.view(S, nkv, nh // nkv, hs)                           # (S, nkv, g, hs)
    together = by_prompt(q, G)                                  # (B, nkv, G*g, hs)
    qk_prompt = matmul32(together, prompt_k.transpose(-1, -2))  # (B, nkv, G*g, K)
    if int(n_kept.min()) < K:
        padding = torch.arange(K, device=q.device) >= n_kept[:, :, None]  # (B, nkv, K)
        qk_prompt = qk_prompt.masked_fill(padding[:, :, None], float("-inf"))
        prompt_v = prompt_v.masked_fill(padding[..., None], 0)  # 0 * NaN is NaN
    qk_response = matmul32(q, rk.transpose(-1, -2))             # (S, nkv, g, t+1)
    qk = torch.cat((by_sample(qk_prompt, G), qk_response), dim=-1)  # (S, nkv, g, K+t+1)
    qk = qk * scale
    p = torch.exp(qk - qk.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)                             # (S, nkv, g, 1) fp32
    # as the learner's kernel: weights are rounded before, normalised after the product
    p_prompt, p_response = p.to(v.dtype).split((K, t + 1), dim=-1)
    out = matmul32(by_prompt(p_prompt, G), prompt_v)            # (B, nkv, G*g, hs)
    out = by_sample(out, G) + matmul32(p_response, rv)          # (S, nkv, g, hs)
    return (out / total).to(v.dtype).reshape(S, nh, hs)


def by_prompt(x, G):
    """Stack the query heads of a group: x (B * G, nkv, g, n) -> (B, nkv, G * g, n)."""
    return x.unflatten(0, (-1, G)).transpose(1, 2).flatten(2, 3)


def by_sample(x, G):
    """And back: x (B, nkv, G * g, n) -> (B * G, nkv, g, n)."""
    return x.unflatten(2, (G, -1)).transpose(1, 2).flatten(0, 1)


# The Triton kernels. Upper case: pointers and compile-time constants; lower case: values.
# scale carries log2(e): qk is in base 2. HEAD_DIM_PADDED: the next power of two. A
# piece leaves ACC (S, nh, pieces, HEAD_DIM_PADDED) fp32, not yet divided by its sum, and ML
# (S, nh, pieces, 2), its maximum and sum. M: query heads of one program, a power of two of
# 16 or more, of which those `real` count.

@jit()
def attend_keys(acc, m_i, l_i, q, K, V, lo, hi, scale,
                HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
                BLOCK: tl.constexpr):
    # online softmax of q (M, padded) over the keys lo..hi-1 of K, V (., HEAD_DIM)
    c = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    for start in range(lo, hi, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        at = keys[:, None] * HEAD_DIM + c
        real = (keys < hi)[:, None] & (c < HEAD_DIM)
        # 1. qk
        k = tl.load(K + at, mask=real, other=0.0)               # (BLOCK, padded)
        v = tl.load(V + at, mask=real, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (M, BLOCK)
        qk = tl.where((keys < hi)[None, :], qk, float("-inf"))
        # 2. softmax
        m_new = tl.maximum(m_i, tl.max(qk, 1))  # finite: key lo is there
        p = tl.exp2(qk - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)  # shrinks earlier terms
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        # 3. values
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_i, l_i


@jit()
def load_queries(Q, sample, head, stride_q, real,
                 HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    # (M, padded); sample, head, real: (M,), or one sample for all
    c = tl.arange(0, HEAD_DIM_PADDED)
    at = (sample * stride_q + head * HEAD_DIM)[:, None] + c[None, :]
    return tl.load(Q + at, mask=real[:, None] & (c < HEAD_DIM)[None, :], other=0.0)


@jit()
def store_piece(ACC, ML, at, real, acc, m_i, l_i, HEAD_DIM_PADDED: tl.constexpr):
    # at (M,): index of (sample, head, piece)
    c = tl.arange(0, HEAD_DIM_PADDED)
    tl.store(ACC + at[:, None] * HEAD_DIM_PADDED + c[None, :], acc, mask=real[:, None])
    tl.store(ML + at * 2, m_i, mask=real)
    tl.store(ML + at * 2 + 1, l_i, mask=real)


@jit()
def prompt_piece(pid, Q, PROMPT_K, PROMPT_V, N_KEPT, ACC, ML,
                 stride_q, K, G, splits, size, pieces, scale,
                 NH: tl.constexpr, NKV: tl.constexpr, HEAD_DIM: tl.constexpr,
                 HEAD_DIM_PADDED: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    # program of a (prompt, KV head, M of the group's query heads on this KV head, split)
    GROUP: tl.constexpr = NH // NKV
    blocks = (G * GROUP + M - 1) // M
    split = pid % splits
    block = pid // splits % blocks
    kv_head = pid // (splits * blocks) % NKV
    b = pid // (splits * blocks * NKV)
    row = block * M + tl.arange(0, M)                           # (M,) of G * GROUP
    real = row < G * GROUP
    sample = (b * G + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    q = load_queries(Q, sample, head, stride_q, real, HEAD_DIM, HEAD_DIM_PADDED)
    m_i = tl.full((M,), float("-inf"), tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, HEAD_DIM_PADDED), tl.float32)
    first = (b * NKV + kv_head).to(tl.int64) * K * HEAD_DIM
    lo = split * size
    hi = tl.minimum(lo + size, tl.load(N_KEPT + b * NKV + kv_head))
    acc, m_i, l_i = attend_keys(
        acc, m_i, l_i, q, PROMPT_K + first, PROMPT_V + first, lo, hi, scale,
        HEAD_DIM, HEAD_DIM_PADDED, BLOCK)
    at = (sample * NH + head) * pieces + split
    store_piece(ACC, ML, at, real, acc, m_i, l_i, HEAD_DIM_PADDED)


@jit()
def response_piece(pid, Q, NEW_K, NEW_V, RESPONSE_K, RESPONSE_V, T, ACC, ML,
                   stride_q, stride_k, stride_v, R, splits, size, pieces, before, scale,
                   NH: tl.constexpr, NKV: tl.constexpr, HEAD_DIM: tl.constexpr,
                   HEAD_DIM_PADDED: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    # program of a (sample, KV head, split); `before`: the prompt's pieces, which come first
    GROUP: tl.constexpr = NH // NKV
    split = pid % splits
    kv_head = pid // splits % NKV
    sample = (pid // (splits * NKV)).to(tl.int64)
    c = tl.arange(0, HEAD_DIM_PADDED)
    t = tl.load(T).to(tl.int32)
    row = tl.arange(0, M)
    real = row < GROUP
    head = kv_head * GROUP + row
    q = load_queries(Q, sample, head, stride_q, real, HEAD_DIM, HEAD_DIM_PADDED)
    m_i = tl.full((M,), float("-inf"), tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, HEAD_DIM_PADDED), tl.float32)
    first = (sample * NKV + kv_head) * R * HEAD_DIM
    if split == 0:  # the new token: alone so far, its weight is 1
        inside = c < HEAD_DIM
        at_k = sample * stride_k + kv_head * HEAD_DIM + c
        at_v = sample * stride_v + kv_head * HEAD_DIM + c
        k = tl.load(NEW_K + at_k, mask=inside, other=0.0)       # (padded,)
        v = tl.load(NEW_V + at_v, mask=inside, other=0.0)
        tl.store(RESPONSE_K + first + t * HEAD_DIM + c, k, mask=inside)
        tl.store(RESPONSE_V + first + t * HEAD_DIM + c, v, mask=inside)
        m_i = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
        l_i += 1
        acc += v.to(tl.float32)[None, :]
    lo = split * size
    hi = tl.minimum(lo + size, t)
    acc, m_i, l_i = attend_keys(
        acc, m_i, l_i, q, RESPONSE_K + first, RESPONSE_V + first, lo, hi, scale,
        HEAD_DIM, HEAD_DIM_PADDED, BLOCK)
    at = (sample * NH + head) * pieces + before + split
    store_piece(ACC, ML, at, real, acc, m_i, l_i, HEAD_DIM_PADDED)


# n_kept may be one layer's part of a larger tensor
@jit("n_prompt", "K", "R", "G", "splits_prompt", "splits_response", "size_prompt",
     unaligned=("N_KEPT",))
def pieces_kernel(Q, NEW_K, NEW_V, PROMPT_K, PROMPT_V, N_KEPT, RESPONSE_K, RESPONSE_V,
                  T, ACC, ML, stride_q, stride_k, stride_v,
                  n_prompt, K, R, G, splits_prompt, splits_response,
                  size_prompt, size_response, scale,
                  NH: tl.constexpr, NKV: tl.constexpr, HEAD_DIM: tl.constexpr,
                  HEAD_DIM_PADDED: tl.constexpr, M_PROMPT: tl.constexpr,
                  M_RESPONSE: tl.constexpr, BLOCK: tl.constexpr,
                  EARLY: tl.constexpr = False):
    # both kinds in one launch: the first n_prompt programs have pieces of prompts, the
    # others of responses
    wait(EARLY)
    pid = tl.program_id(0)
    pieces = splits_prompt + splits_response
    if pid < n_prompt:
        prompt_piece(pid, Q, PROMPT_K, PROMPT_V, N_KEPT, ACC, ML,
                     stride_q, K, G, splits_prompt, size_prompt, pieces, scale,
                     NH, NKV, HEAD_DIM, HEAD_DIM_PADDED, M_PROMPT, BLOCK)
    else:
        response_piece(pid - n_prompt, Q, NEW_K, NEW_V, RESPONSE_K, RESPONSE_V,
                       T, ACC, ML, stride_q, stride_k, stride_v,
                       R, splits_response, size_response, pieces, splits_prompt, scale,
                       NH, NKV, HEAD_DIM, HEAD_DIM_PADDED, M_RESPONSE, BLOCK)


@jit("pieces")
def sum_kernel(ACC, ML, OUT, pieces,
               HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
               PIECES: tl.constexpr, EARLY: tl.constexpr = False):
    # one program per (sample, head); a piece without keys has maximum -inf and sum 0
    wait(EARLY)
    at = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, HEAD_DIM_PADDED)
    piece = tl.arange(0, PIECES)
    real = piece < pieces
    i = at * pieces + piece
    m = tl.load(ML + i * 2, mask=real, other=float("-inf"))     # (PIECES,)
    l = tl.load(ML + i * 2 + 1, mask=real, other=0.0)
    w = tl.exp2(m - tl.max(m, 0))  # finite: the new token is always there
    ACC += i[:, None] * HEAD_DIM_PADDED + c[None, :]
    acc = tl.load(ACC, mask=real[:, None], other=0.0)           # (PIECES, padded)
    out = tl.sum(acc * w[:, None], 0) / tl.sum(l * w, 0)        # (padded,)
    tl.store(OUT + at * HEAD_DIM + c, out.to(OUT.dtype.element_ty), mask=c < HEAD_DIM)


# The launch.

def decode_attention_triton(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v,
                            t, scale):
    (S, nh, hs), (B, nkv, K, _), R = q.shape, prompt_k.shape, response_k.shape[2]
    G = S // B
    heads_apart = any(x.stride()[1:] != (hs, 1) for x in (q, k, v))
    caches = prompt_k, prompt_v, response_k, response_v, n_kept
    if heads_apart or not all(x.is_contiguous() for x in caches):
        raise ValueError("heads of q, k and v must follow each other, and the caches "
                         "and n_kept be contiguous")
    width = max(16, next_power_of_2(hs))
    if q.element_size() == 2:
        block, most = BLOCK, 64
    else:  # fp32 dots run on ordinary cores: more would spill at head size 128
        block, most = min(BLOCK, 16), 32
    rows = G * nh // nkv  # of a group, per KV head
    M = min(most, max(16, next_power_of_2(rows)))
    owners = B * nkv * cdiv(rows, M)
    even = cdiv(K, BLOCK * cdiv(PROGRAMS, owners))  # BLOCKs for each program
    least = min(SPLIT // BLOCK, cdiv(K, 2 * BLOCK))
    size_prompt = BLOCK * max(even, least)
    splits_prompt, splits_response = cdiv(K, size_prompt), cdiv(R, SPLIT)
    pieces = splits_prompt + splits_response
    n_prompt = owners * splits_prompt
    acc = torch.empty(S, nh, pieces, width, device=q.device, dtype=torch.float32)
    ml = torch.empty(S, nh, pieces, 2, device=q.device, dtype=torch.float32)
    out = torch.empty(S, nh, hs, device=q.device, dtype=q.dtype)
    with torch.cuda.device_of(q):  # Triton launches on the current card
        pieces_kernel[n_prompt + S * nkv * splits_response,](
            Q=q, NEW_K=k, NEW_V=v, PROMPT_K=prompt_k, PROMPT_V=prompt_v, N_KEPT=n_kept,
            RESPONSE_K=response_k, RESPONSE_V=response_v, T=t, ACC=acc, ML=ml,
            stride_q=q.stride(0), stride_k=k.stride(0), stride_v=v.stride(0),
            n_prompt=n_prompt, K=K, R=R, G=G,
            splits_prompt=splits_prompt, splits_response=splits_response,
            size_prompt=size_prompt, size_response=SPLIT,
            scale=scale * math.log2(math.e),
            NH=nh, NKV=nkv, HEAD_DIM=hs, HEAD_DIM_PADDED=width,
            M_PROMPT=M, M_RESPONSE=max(16, next_power_of_2(nh // nkv)), BLOCK=block,
            **early(q))
        sum_kernel[S * nh,](
            ACC=acc, ML=ml, OUT=out, pieces=pieces,
            HEAD_DIM=hs, HEAD_DIM_PADDED=width, PIECES=next_power_of_2(pieces),
            num_warps=1 if pieces <= 8 else 4, **early(q))
    return out
