"""
Scores of many prompts at once, and of large attention a slice at a time.

The idea. An eviction method scores the keys of one prompt, or of one sample's response:
KVCache.scores is

    torch.stack([score(q[i], k[i]) for i in range(n)])

A method that scores each KV head by itself computes the same if the prompts pass as further KV
heads, in a fifth of the launches (`folded`); any other runs under torch.vmap (`vmapped`), where a
prompt cannot see the others either. And attention of all queries to a long prompt is large, but
what a method makes of it is a sum over queries, so few of them are held at a time (`summed`).
Letters are those of kvcache.py.
"""
import torch

from fast.head import matmul32

SCORE_BYTES = 32 * 2**20  # fp32 attention (or similarity) held at a time, about twice


def folded(score, q, k, *elsewhere):
    """q (n, W, nh, hs), k (n, keys, nkv, hs), maybe elsewhere (n, nh, W) -> (n, nkv, keys)"""
    n, _, nkv, _ = k.shape
    q = q.transpose(0, 1).flatten(1, 2)                         # (W, n * nh, hs)
    k = k.transpose(0, 1).flatten(1, 2)                         # (keys, n * nkv, hs)
    elsewhere = [x.flatten(0, 1) for x in elsewhere]            # (n * nh, W)
    return score(q, k, *elsewhere).unflatten(0, (n, nkv))


def vmapped(score, q, k, *elsewhere, seed):
    """The same, for a method that compares KV heads or draws: torch's CPU generator starts at the
    seed for each of the n, and is left as it was."""
    def seeded(*inputs):
        torch.default_generator.manual_seed(seed)
        return score(*inputs)

    _, W, nh, _ = q.shape
    at_once = max(1, SCORE_BYTES // (4 * W * nh * k.shape[1]))
    # copies: whoever writes into them must not change the cache
    inputs = q.clone(), k.clone(), *elsewhere
    with torch.random.fork_rng(devices=[]):
        return torch.vmap(seeded, chunk_size=at_once, randomness="same")(*inputs)


def summed(part, q, k, elsewhere=None):
    """part(rows, q, k, elsewhere) of slices of q (W, nh, hs), k (n, nkv, hs) and elsewhere (nh, W)
    or None, summed over the rows of q, a slice too, and joined along the KV heads, part's first
    dimension."""
    W, nh, _ = q.shape
    n, nkv, _ = k.shape
    group = nh // nkv  # query heads of a KV head
    kv_at_once = max(1, SCORE_BYTES // (4 * group * W * n))
    rows_at_once = max(1, min(W, SCORE_BYTES // (4 * group * n)))
    sums = []
    for first in range(0, nkv, kv_at_once):
        last = min(first + kv_at_once, nkv)
        heads = slice(first * group, last * group)
        total = 0
        for row in range(0, W, rows_at_once):
            rows = slice(row, min(row + rows_at_once, W))
            other = None if elsewhere is None else elsewhere[heads, rows]
            total = total + part(rows, q[rows, heads], k[:, first:last], other)
        sums.append(total)
    return torch.cat(sums)


def mass(q, k, filled):
    """What the queries of a prompt's samples see of its kept keys: of each sample
    kvcache.logits(q, k).logsumexp(-1). q (S, W, nh, hs), k (B, nkv, K, hs) of which filled
    (B, nkv) are no padding -> (S, nh, W) fp32"""
    S, W, nh, hs = q.shape
    B, nkv, K, _ = k.shape
    G = S // B
    q = q.view(B, G, W, nkv, nh // nkv, hs)
    q = q.permute(0, 3, 1, 4, 2, 5)                             # (B, nkv, G, g, W, hs)
    padding = torch.arange(K, device=q.device) >= filled[..., None]  # (B, nkv, K)
    found = []
    for b in range(B):
        rows = q[b].flatten(1, 3)                               # (nkv, G * g * W, hs)
        logits = matmul32(rows, k[b].transpose(1, 2)) * hs ** -0.5  # (nkv, .., K)
        logits = logits.masked_fill(padding[b, :, None], -torch.inf)
        found.append(logits.logsumexp(-1).view(nkv, G, -1, W))  # (nkv, G, g, W)
    return torch.stack(found).transpose(1, 2).reshape(S, nh, W)
