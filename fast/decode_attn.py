"""
Attention of one decoding step: one new token per sample, over the prompt its group shares and the response it owns.

The idea. Decoding reads every key once per token and computes almost nothing with it, so time is bytes. The G samples of a
group stand at the same prompt: their query heads are stacked, and the prompt's keys are read once per group instead of once per
sample. A sample's own response is read only as far as it has come. The pieces, each a softmax over some of the keys, are put
together by their maxima m and sums l:

    out = sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) l_i,    M = max_i m_i

Each piece is one program, so that even a few prompts keep all processors busy. The piece that owns the start of a response
begins with the new token itself, which every query sees, and stores its key and value in the cache. The step number is read
from the device: one CUDA graph serves all steps.

Here: the PyTorch reference (used for real on CPU), two Triton kernels (pieces, then their sum), the dispatch.
Left out: gradients, paged caches, response keys that die while decoding.

References: splitting the keys: FlashDecoding (crfm.stanford.edu/2023/10/12/flashdecoding.html); sharing a prefix: Hydragen
(arXiv 2402.05099). `python decode_attn.py` checks against an fp64 formula and, on a GPU, prints times.
"""
import math

import torch

from fast.launch import jit, kernels, tl, triton
from fast.head import matmul32

BLOCK = 64      # keys of one step of a program's loop
SPLIT = 256     # keys of one program: at most this many of a response, at least this many of a prompt (or half of a short one)
PROGRAMS = 256  # wanted for prompts, about two for each processor of a large card


def decode_attention(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t, scale=None, impl=None):
    """The new token of each sample attends to its prompt's kept keys, its own response and itself; k, v are stored at slot t.

    q (S, nh, hs), k, v (S, nkv, hs), S = B x G samples, sample s of prompt s // G. prompt_k, prompt_v (B, nkv, K, hs), of which
    slots below n_kept (B,) int32 count. response_k, response_v (S, nkv, R, hs), of which slots below t, an int64 tensor (), count.
    scale: 1/sqrt(hs) if None. impl: "triton", "ref", or None for Triton on CUDA and the reference elsewhere. -> (S, nh, hs)
    Raises ValueError for an impl that is unknown or cannot run here."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if impl not in (None, "triton", "ref") or (impl == "triton" and not kernels(q)):
        raise ValueError(f"impl={impl!r} is unknown or cannot compute {q.dtype} on {q.device}: use None")
    if impl != "ref" and kernels(q):
        return decode_attention_triton(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t, scale)
    return decode_attention_ref(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t, scale)


def decode_attention_ref(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t, scale):
    (S, nh, hs), (B, nkv, K, _), t = q.shape, prompt_k.shape, int(t)
    G, g = S // B, nh // nkv
    response_k[:, :, t], response_v[:, :, t] = k, v
    rk, rv = response_k[:, :, :t + 1], response_v[:, :, :t + 1]                         # (S, nkv, t+1, hs)
    q = q.view(B, G, nkv, g, hs)
    by_prompt = lambda x: x.transpose(1, 2).reshape(B, nkv, G * g, -1)  # (B, G, nkv, g, .) -> (B, nkv, G*g, .)
    by_sample = lambda x: x.view(B, nkv, G, g, -1).transpose(1, 2).reshape(S, nkv, g, -1)
    sp = matmul32(by_prompt(q), prompt_k.transpose(-1, -2))                             # (B, nkv, G*g, K)
    if int(n_kept.min()) < K:
        padding = torch.arange(K, device=q.device) >= n_kept[:, None]                   # (B, K)
        sp = sp.masked_fill(padding[:, None, None], float("-inf"))
        prompt_v = prompt_v.masked_fill(padding[:, None, :, None], 0)                   # 0 * NaN is NaN
    sr = matmul32(q.reshape(S, nkv, g, hs), rk.transpose(-1, -2))                       # (S, nkv, g, t+1)
    s = torch.cat((by_sample(sp), sr), dim=-1) * scale                                  # (S, nkv, g, K+t+1) fp32
    p = torch.exp(s - s.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    p = p.to(v.dtype)  # as the learner's kernel: weights rounded before, normalised after the product with the values
    pp, pr = p.split((K, t + 1), dim=-1)
    out = by_sample(matmul32(by_prompt(pp.reshape(B, G, nkv, g, -1)), prompt_v)) + matmul32(pr, rv)  # (S, nkv, g, hs)
    return (out / total).to(v.dtype).reshape(S, nh, hs)


# ---- Triton kernels ----
# scores are in base 2 (scale carries log2(e)). HP: hs rounded up to a power of two. A piece leaves ACC (S, nh, pieces, HP) fp32, not yet
# divided by its sum, and ML (S, nh, pieces, 2): maximum and sum.

@jit()
def attend_keys(acc, m, l, q, K, V, lo, hi, scale, HS: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr):
    # online softmax of q (M, HP) over the keys lo..hi-1 of K, V (., HS)
    c = tl.arange(0, HP)[None, :]
    for start in range(lo, hi, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        at, real = keys[:, None] * HS + c, (keys < hi)[:, None] & (c < HS)
        k = tl.load(K + at, mask=real, other=0.0)                          # (BLOCK, HP)
        v = tl.load(V + at, mask=real, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale         # (M, BLOCK)
        s = tl.where((keys < hi)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))                                # finite: key lo is there
        p = tl.exp2(s - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return acc, m, l


@jit()
def store_piece(ACC, ML, at, real, acc, m, l, HP: tl.constexpr):
    # at (M,): index of (sample, head, piece)
    tl.store(ACC + at[:, None] * HP + tl.arange(0, HP)[None, :], acc, mask=real[:, None])
    tl.store(ML + at * 2, m, mask=real)
    tl.store(ML + at * 2 + 1, l, mask=real)


@jit()
def prompt_piece(pid, Q, PK, PV, KEPT, ACC, ML, q_row, K, G, splits, size, pieces, scale, NH: tl.constexpr, NKV: tl.constexpr,
                 HS: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    # program of a (prompt, KV head, M of the group's query heads on this KV head, split)
    GROUP: tl.constexpr = NH // NKV
    blocks, c = (G * GROUP + M - 1) // M, tl.arange(0, HP)
    split, kv, b = pid % splits, pid // (splits * blocks) % NKV, pid // (splits * blocks * NKV)
    row = pid // splits % blocks * M + tl.arange(0, M)
    real, sample, head = row < G * GROUP, (b * G + row // GROUP).to(tl.int64), kv * GROUP + row % GROUP
    q = tl.load(Q + (sample * q_row + head * HS)[:, None] + c[None, :], mask=real[:, None] & (c < HS)[None, :], other=0.0)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, HP), tl.float32)
    first = (b * NKV + kv).to(tl.int64) * K * HS
    lo = split * size
    hi = tl.minimum(lo + size, tl.load(KEPT + b))
    acc, m, l = attend_keys(acc, m, l, q, PK + first, PV + first, lo, hi, scale, HS, HP, BLOCK)
    store_piece(ACC, ML, (sample * NH + head) * pieces + split, real, acc, m, l, HP)


@jit()
def response_piece(pid, Q, KN, VN, RK, RV, T, ACC, ML, q_row, k_row, v_row, R, splits, size, pieces, piece, scale, NH: tl.constexpr,
                   NKV: tl.constexpr, HS: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    # program of a (sample, KV head, split); its pieces come after the `piece` ones of the prompt
    GROUP: tl.constexpr = NH // NKV
    split, kv, sample, c = pid % splits, pid // splits % NKV, (pid // (splits * NKV)).to(tl.int64), tl.arange(0, HP)
    t, row = tl.load(T).to(tl.int32), tl.arange(0, M)
    real, head = row < GROUP, kv * GROUP + row
    q = tl.load(Q + (sample * q_row + head * HS)[:, None] + c[None, :], mask=real[:, None] & (c < HS)[None, :], other=0.0)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, HP), tl.float32)
    first = (sample * NKV + kv) * R * HS
    if split == 0:  # the new token: alone so far, its weight is 1
        k = tl.load(KN + sample * k_row + kv * HS + c, mask=c < HS, other=0.0)
        v = tl.load(VN + sample * v_row + kv * HS + c, mask=c < HS, other=0.0)
        tl.store(RK + first + t * HS + c, k, mask=c < HS)
        tl.store(RV + first + t * HS + c, v, mask=c < HS)
        m = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
        l += 1
        acc += v.to(tl.float32)[None, :]
    lo = split * size
    acc, m, l = attend_keys(acc, m, l, q, RK + first, RV + first, lo, tl.minimum(lo + size, t), scale, HS, HP, BLOCK)
    store_piece(ACC, ML, (sample * NH + head) * pieces + piece + split, real, acc, m, l, HP)


@jit("n_prompt", "K", "R", "G", "splits_p", "splits_r", "size_p")
def pieces_kernel(Q, KN, VN, PK, PV, KEPT, RK, RV, T, ACC, ML, q_row, k_row, v_row, n_prompt, K, R, G, splits_p, splits_r, size_p,
                  size_r, scale, NH: tl.constexpr, NKV: tl.constexpr, HS: tl.constexpr, HP: tl.constexpr, MP: tl.constexpr,
                  MR: tl.constexpr, BLOCK: tl.constexpr):
    # both kinds in one launch: the first n_prompt programs have pieces of prompts, the others of responses
    pid, pieces = tl.program_id(0), splits_p + splits_r
    if pid < n_prompt:
        prompt_piece(pid, Q, PK, PV, KEPT, ACC, ML, q_row, K, G, splits_p, size_p, pieces, scale, NH, NKV, HS, HP, MP, BLOCK)
    else:
        response_piece(pid - n_prompt, Q, KN, VN, RK, RV, T, ACC, ML, q_row, k_row, v_row, R, splits_r, size_r, pieces, splits_p,
                       scale, NH, NKV, HS, HP, MR, BLOCK)


@jit("pieces")
def sum_kernel(ACC, ML, OUT, pieces, HS: tl.constexpr, HP: tl.constexpr, PIECES: tl.constexpr):
    # one program per (sample, head); a piece without keys has maximum -inf and sum 0
    at, c = tl.program_id(0).to(tl.int64), tl.arange(0, HP)
    piece = tl.arange(0, PIECES)
    i = at * pieces + piece
    m = tl.load(ML + i * 2, mask=piece < pieces, other=float("-inf"))
    l = tl.load(ML + i * 2 + 1, mask=piece < pieces, other=0.0)
    w = tl.exp2(m - tl.max(m, 0))                                          # the maximum is finite: the new token is always there
    acc = tl.load(ACC + i[:, None] * HP + c[None, :], mask=(piece < pieces)[:, None], other=0.0)
    out = tl.sum(acc * w[:, None], 0) / tl.sum(l * w, 0)
    tl.store(OUT + at * HS + c, out.to(OUT.dtype.element_ty), mask=c < HS)


def decode_attention_triton(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t, scale):
    (S, nh, hs), (B, nkv, K, _), R = q.shape, prompt_k.shape, response_k.shape[2]
    caches = prompt_k, prompt_v, response_k, response_v
    if any(x.stride()[1:] != (hs, 1) for x in (q, k, v)) or not all(x.is_contiguous() for x in caches):
        raise ValueError("heads of q, k and v must follow each other, and the caches be contiguous")
    p2, up = triton.next_power_of_2, triton.cdiv
    rows = S // B * nh // nkv                                              # query heads of a group on one KV head
    # fp32 dots run on ordinary cores: the blocks of bf16 would need 176 KB of shared memory and spill at head size 128
    block, most = (BLOCK, 64) if q.element_size() == 2 else (min(BLOCK, 16), 32)
    MP = min(most, max(16, p2(rows)))
    owners = B * nkv * up(rows, MP)
    even = up(K, BLOCK * up(PROGRAMS, owners))                             # blocks of keys a program has if PROGRAMS share the work
    least = min(SPLIT // BLOCK, up(K, 2 * BLOCK))
    size_p = BLOCK * max(even, least)
    splits_p, splits_r = up(K, size_p), up(R, SPLIT)
    pieces, HP = splits_p + splits_r, max(16, p2(hs))
    acc = torch.empty(S, nh, pieces, HP, device=q.device, dtype=torch.float32)
    ml = torch.empty(S, nh, pieces, 2, device=q.device, dtype=torch.float32)
    out = torch.empty(S, nh, hs, device=q.device, dtype=q.dtype)
    n_prompt = owners * splits_p
    with torch.cuda.device_of(q):  # Triton launches on the current card, which need not be q's
        pieces_kernel[n_prompt + S * nkv * splits_r,](
            q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t, acc, ml, q.stride(0), k.stride(0), v.stride(0), n_prompt, K, R,
            S // B, splits_p, splits_r, size_p, SPLIT, scale * math.log2(math.e), NH=nh, NKV=nkv, HS=hs, HP=HP, MP=MP,
            MR=max(16, p2(nh // nkv)), BLOCK=block)
        sum_kernel[S * nh,](acc, ml, out, pieces, HS=hs, HP=HP, PIECES=p2(pieces), num_warps=1 if pieces <= 8 else 4)
    return out


def formula(q, k, v, prompt_k, prompt_v, n_kept, response_k, response_v, t):
    """The definition, one sample and head at a time, in fp64."""
    (S, nh, hs), (B, nkv), out = q.shape, prompt_k.shape[:2], torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for s in range(S):
        b, n, kv = s // (S // B), int(n_kept[s // (S // B)]), torch.arange(nh) // (nh // nkv)
        keys, values = (torch.cat((p[b, :, :n], r[s, :, :int(t)], x[s][:, None]), 1).double()[kv]
                        for p, r, x in ((prompt_k, response_k, k), (prompt_v, response_v, v)))     # (nh, keys, hs)
        weights = (torch.einsum("hc,hjc->hj", q[s].double(), keys) * hs ** -0.5).softmax(-1)
        out[s] = torch.einsum("hj,hjc->hc", weights, values)
    return out


def example(B, G, nh, nkv, hs, K, R, t, device, dtype):
    """Random arguments of decode_attention; slots that do not count hold NaN."""
    n_kept = torch.randint(1, K + 1, (B,), device=device, dtype=torch.int32)
    n_kept[0] = K
    draw = lambda *shape: torch.randn(*shape, device=device).to(dtype)
    qkv = draw(B * G, nh + 2 * nkv, hs)  # views of one matrix, as in the model
    prompt, response = [draw(B, nkv, K, hs) for _ in "kv"], [draw(B * G, nkv, R, hs) for _ in "kv"]
    for x in prompt:
        x.masked_fill_((torch.arange(K, device=device) >= n_kept[:, None])[:, None, :, None], math.nan)
    for x in response:
        x[:, :, t:] = math.nan
    return [*qkv.split([nh, nkv, nkv], 1), *prompt, n_kept, *response, torch.tensor(t, device=device)]


def main():
    """Check against the definition; on a GPU also time one call inside a CUDA graph. Exit code 1 if an error is too large."""
    cuda, ok = torch.cuda.is_available(), True
    device, dtype, bound = ("cuda", torch.bfloat16, 1e-2) if cuda else ("cpu", torch.float32, 1e-5)
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {dtype}; error: norm of the difference from fp64, over norm")
    for B, G, nh, nkv, hs, K, R, t in ((8, 8, 9, 3, 64, 256, 127, 64), (8, 8, 12, 2, 128, 1024, 255, 128), (8, 8, 12, 2, 128, 8192, 1023, 512)):
        torch.manual_seed(0)
        args = example(B, G, nh, nkv, hs, K, R, t, device, dtype)
        want = formula(*args)
        error = ((decode_attention(*args).double() - want).norm() / want.norm()).item()
        ok &= error < bound
        line = f"{B}x{G} samples, {nh}:{nkv} heads of {hs}, {K} prompt keys, {t} of {R} response keys: error {error:.1e}"
        if cuda:
            args[5].fill_(K)
            for x in args[3:5]:
                x.nan_to_num_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(50):
                    decode_attention(*args)
            us = triton.testing.do_bench(graph.replay, return_mode="median") * 1e3 / 50
            size = 2 * args[3].nbytes + 2 * B * G * nkv * t * hs * dtype.itemsize
            line += f", {us:.1f} us, {size / us / 1e3:.0f} GB/s (caches that fit L2 are read from there)"
        print(line)
    print("ok" if ok else f"FAILED: an error exceeds {bound}")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
