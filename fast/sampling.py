"""
Drawing tokens from logits, with the log-probability they were drawn with.

Replaces rollout.draw_token on a GPU: log_softmax, plus Gumbel noise, argmax. The largest of
log-probs plus Gumbel noise is an exact sample of the softmax.

The idea. Adding a constant to the log-probs does not move the maximum, so one pass over a row of
logits suffices: keep a running log-sum-exp and the best noisy logit. One kernel reads each logit
once and leaves five numbers for each part of a row, a second joins the parts; PyTorch needs about a
dozen passes over (samples, vocabulary). The kernel's noise is counter-based (Philox): a function of
(seed, step, row, column) alone, read off the device, so that a CUDA graph can replay it and the
draws do not depend on how many came before.

Left out: top-p and top-k (they cut the support and bias every ratio).
"""
import torch

from fast.launch import cdiv, early, jit, tl, wait

# logits that a program reads at once, four times per step: Philox makes four words
BLOCK = 1024
PARTS = 16  # a row is cut into at most so many parts, each for a program of its own


def sample_triton(logits, temperature, seed, t, first=0):
    """Replaces rollout.draw_token: logits (S, V) fp32 -> token (S,), its log-prob (S,) under
    softmax(logits / temperature); temperature 0: the maximum, with its log-prob at temperature 1.

    The noise is a function of seed (an int), t (an int64 tensor () on the device) and a row's
    number, which starts at first."""
    (S, V), logits = logits.shape, logits.contiguous()
    size = 4 * BLOCK * cdiv(V, 4 * BLOCK * PARTS)  # logits of one part
    parts = cdiv(V, size)
    found = torch.empty(S, parts, 4, device=logits.device, dtype=torch.float32)
    where = torch.empty(S, parts, device=logits.device, dtype=torch.int32)
    token = torch.empty(S, device=logits.device, dtype=torch.int64)
    logp = torch.empty(S, device=logits.device, dtype=torch.float32)
    with torch.cuda.device_of(logits):  # Triton launches on the current card
        part_kernel[S, parts](
            X=logits, FOUND=found, WHERE=where, T=t,
            seed=seed, first=first, V=V, size=size, scale=1 / (temperature or 1.0),
            GREEDY=not temperature, BLOCK=BLOCK, **early(logits))
        join_kernel[S,](
            FOUND=found, WHERE=where, TOKEN=token, LOGP=logp, parts=parts,
            PARTS=PARTS, num_warps=1, **early(logits))
    return token, logp


@jit()
def gumbel(r):
    # 32 random bits -> Gumbel noise -log(-log(1 - u)) of u = (r + 0.5) / 2^32, which is never 0 nor
    # 1: from -3.14 to 22.88. Near both ends the noise is made from the distance to that end, p,
    # which fp32 holds to seven digits, where u or 1 - u would round to 1
    r = r.to(tl.int32, bitcast=True)
    low = r >= 0  # u < 1/2
    p = (tl.where(low, r, ~r).to(tl.float32) + 0.5) * 2.0 ** -32  # u or 1 - u, (0, 1/2]
    series = p * (1 + p * (1 / 2 + p * (1 / 3 + p * (1 / 4))))  # -log(1 - p), small p
    e = -tl.log(tl.where(low, 1 - p, p))
    return -tl.log(tl.where(low & (p < 2.0 ** -5), series, e))


@jit()
def consider(x, c, r, m_i, l_i, best, at, x_best, GREEDY: tl.constexpr):
    # one logit x of column c per lane, r: 32 random bits. m_i, l_i: running maximum and sum
    # of exponentials; best: the largest noisy logit, at: its column, x_best: without noise
    m_new = tl.maximum(m_i, x)
    l_i = l_i * tl.exp(m_i - m_new) + tl.exp(x - m_new)
    noisy = x
    if not GREEDY:
        noisy = x + gumbel(r)
    better = noisy > best
    best = tl.where(better, noisy, best)
    at = tl.where(better, c, at)
    x_best = tl.where(better, x, x_best)
    return m_new, l_i, best, at, x_best


@jit("seed", "first")
def part_kernel(X, FOUND, WHERE, T, seed, first, V, size, scale,
                GREEDY: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    # one program per row and part of X (S, V); every lane keeps its own running numbers,
    # joined at the end. Word i that Philox makes for column c serves column c + i * BLOCK
    wait(EARLY)
    row, part, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    X += row.to(tl.int64) * V
    step = tl.load(T).to(tl.int32)
    m_i = tl.full((BLOCK,), -3e38, tl.float32)  # -inf - (-inf) is NaN
    l_i = tl.zeros((BLOCK,), tl.float32)
    best, x_best, at = m_i, m_i, lane
    for start in range(part * size, min(part * size + size, V), 4 * BLOCK):
        c = start + lane
        zero = tl.zeros_like(c)
        words = tl.philox(seed, c, zero + row + first, zero + step, zero)
        for i in tl.static_range(4):
            x = tl.load(X + c, mask=c < V, other=float("-inf")) * scale
            m_i, l_i, best, at, x_best = consider(
                x, c, words[i], m_i, l_i, best, at, x_best, GREEDY)
            c += BLOCK
    top, winner = tl.max(m_i, 0), tl.max(best, 0)
    token = tl.min(tl.where(best == winner, at, V - 1), 0)  # of equals the first
    chosen = (at == token) & (best == winner)
    x_token = tl.max(tl.where(chosen, x_best, float("-inf")), 0)
    FOUND += (row * tl.num_programs(1) + part) * 4
    tl.store(FOUND, top)
    tl.store(FOUND + 1, tl.sum(l_i * tl.exp(m_i - top), 0))
    tl.store(FOUND + 2, winner)
    tl.store(FOUND + 3, x_token)
    tl.store(WHERE + row * tl.num_programs(1) + part, token)


@jit("parts")
def join_kernel(FOUND, WHERE, TOKEN, LOGP, parts, PARTS: tl.constexpr,
                EARLY: tl.constexpr = False):
    # one program per row
    wait(EARLY)
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    real, i = part < parts, row * parts + part
    m = tl.load(FOUND + i * 4, mask=real, other=-3e38)          # (PARTS,)
    l = tl.load(FOUND + i * 4 + 1, mask=real, other=0.0)
    best = tl.load(FOUND + i * 4 + 2, mask=real, other=float("-inf"))
    x = tl.load(FOUND + i * 4 + 3, mask=real, other=0.0)
    at = tl.load(WHERE + i, mask=real, other=0)
    top = tl.max(m, 0)
    # of equals the first
    first = tl.min(tl.where(best == tl.max(best, 0), part, PARTS - 1), 0)
    chosen = tl.sum(tl.where(part == first, x, 0.0), 0)
    tl.store(TOKEN + row, tl.sum(tl.where(part == first, at, 0), 0).to(tl.int64))
    tl.store(LOGP + row, chosen - top - tl.log(tl.sum(l * tl.exp(m - top), 0)))
