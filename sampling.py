"""
Drawing tokens from logits, with the log-probability they were drawn with.

The idea. The largest of log-probs plus Gumbel noise is an exact sample of the softmax (the Gumbel-max trick), and adding a
constant to the log-probs does not move it, so one pass over a row of logits suffices: keep a running log-sum-exp and the best
noisy logit. The kernel reads each logit once and writes two numbers a row; in PyTorch the same takes some twelve passes over
(samples, vocabulary), a tenth of a decoding step with a vocabulary of 150,000.

The kernel's noise is counter-based (Philox): a function of (seed, step, row, column) alone, read off the device, so that a CUDA
graph can replay it and the draws do not depend on how many came before.

Left out: top-p and top-k (they cut the support and bias every ratio).
"""
import torch

from fused import jit, kernels, tl


def sample(logits, temperature, rng, seed, t):
    """logits (S, V) fp32 -> token (S,), its log-prob (S,) under softmax(logits / temperature); temperature 0: the maximum, at 1.

    On CUDA the noise is a function of seed (an int) and t (an int64 tensor on the device), elsewhere of the generator rng."""
    if kernels(logits) and logits.dtype == torch.float32:
        return sample_triton(logits, temperature, seed, t)
    logp = (logits / (temperature or 1.0)).log_softmax(-1)                                            # (S, V)
    noise = 0.0
    if temperature:
        noise = -torch.empty_like(logp).exponential_(generator=rng).clamp_min_(torch.finfo(logp.dtype).tiny).log_()
    token = (logp + noise).argmax(-1)                                                                 # (S,)
    return token, logp.gather(1, token[:, None])[:, 0]


def sample_triton(logits, temperature, seed, t):
    (S, V), logits = logits.shape, logits.contiguous()
    token = torch.empty(S, device=logits.device, dtype=torch.int64)
    logp = torch.empty(S, device=logits.device, dtype=torch.float32)
    sample_kernel[S,](logits, token, logp, t, seed, V, 1 / (temperature or 1.0), GREEDY=not temperature, BLOCK=1024, num_warps=8)
    return token, logp


@jit
def consider(x, c, r, m, l, best, at, x_best, GREEDY: tl.constexpr):
    # one logit x of column c per lane, r 32 random bits. m, l: running maximum and sum of exponentials; best noisy logit, where, which
    m_new = tl.maximum(m, x)
    l = l * tl.exp(m - m_new) + tl.exp(x - m_new)
    noisy = x
    if not GREEDY:
        u = (r.to(tl.float32) + 0.5) * 2.0 ** -32                          # uniform on (0, 1], fine near 0
        # the largest noise comes from the smallest exponentials -log(1 - u), where 1 - u would round to 1
        e = tl.where(u < 2.0 ** -10, u + 0.5 * u * u, -tl.log(1 - u))
        noisy = x - tl.log(e)
    better = noisy > best
    return m_new, l, tl.where(better, noisy, best), tl.where(better, c, at), tl.where(better, x, x_best)


@jit
def sample_kernel(X, TOKEN, LOGP, T, seed, V, scale, GREEDY: tl.constexpr, BLOCK: tl.constexpr):
    # one program per row of X (S, V); every lane keeps its own running numbers, joined at the end
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    X += row.to(tl.int64) * V
    step = tl.load(T).to(tl.int32)
    m = tl.full((BLOCK,), -3e38, tl.float32)                               # finite: -inf - (-inf) is NaN
    l = tl.zeros((BLOCK,), tl.float32)
    best, x_best, at = m, m, lane
    for start in range(0, V, 4 * BLOCK):
        c = start + lane
        zero = tl.zeros_like(c)
        r0, r1, r2, r3 = tl.philox(seed, c, zero + row, zero + step, zero)
        x = tl.load(X + c, mask=c < V, other=float("-inf")) * scale
        m, l, best, at, x_best = consider(x, c, r0, m, l, best, at, x_best, GREEDY)
        c += BLOCK
        x = tl.load(X + c, mask=c < V, other=float("-inf")) * scale
        m, l, best, at, x_best = consider(x, c, r1, m, l, best, at, x_best, GREEDY)
        c += BLOCK
        x = tl.load(X + c, mask=c < V, other=float("-inf")) * scale
        m, l, best, at, x_best = consider(x, c, r2, m, l, best, at, x_best, GREEDY)
        c += BLOCK
        x = tl.load(X + c, mask=c < V, other=float("-inf")) * scale
        m, l, best, at, x_best = consider(x, c, r3, m, l, best, at, x_best, GREEDY)
    top = tl.max(m, 0)
    total = tl.sum(l * tl.exp(m - top), 0)
    token = tl.min(tl.where(best == tl.max(best, 0), at, V - 1), 0)        # of equals the first
    chosen = tl.sum(tl.where(at == token, x_best, 0.0), 0)                 # a column belongs to one lane
    tl.store(TOKEN + row, token.to(tl.int64))
    tl.store(LOGP + row, chosen - top - tl.log(total))
