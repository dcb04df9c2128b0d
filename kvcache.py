"""
The compressed KV cache: what is kept, what is dropped, and the log of it.

The idea. A prompt is prefilled densely, one layer at a time: score the layer's keys, copy the kept ones into the cache,
attend to all of them, let go of them before the next layer runs. So the dense cache of one layer is the most that ever exists,
and the last prompt token still saw everything: response token 0 is dense, tokens 1.. see the kept keys only. What was
kept depends on the prompt alone, so the G samples of a group share one compressed prompt; each sample owns the keys of
its response. Kept keys stay rotated to their true positions; nothing is ever re-rotated or renumbered.

A new method is one scoring function and one line in EVICT: it gives each key a score, the highest are kept. Sinks (the
first keys, on which trained models park attention) and the observation window (the last W) are kept by every method.

Departures from SnapKV (arXiv 2404.14469): attention sinks are protected (StreamingLLM, 2309.17453), the query heads of
one KV head vote together (mean), and the cache is per KV head, never expanded to query heads.
Left out here: methods that evict response keys while decoding (R-KV, H2O); `until` in the log has their place.
"""
import torch
import torch.nn.functional as F

from decode_attn import decode_attention
from model import matmul32

SCORE_BYTES = 32 * 2**20  # fp32 attention of the window that SnapKV holds at a time, twice

# ---------------------------------------------------------------------------------------------------------------------
# scores: (q of the last W prompt rows (W, nh, hs), k of all prompt rows (P, nkv, hs), pool, rng) -> (nkv, P), higher is kept

def score_snapkv(q, k, pool, rng):
    """Attention that the last W queries pay to each earlier key, summed over the window, averaged over the query heads of a
    KV head, then max-pooled over `pool` neighbouring keys so that what belongs together stays together (2404.14469, eq. 5)."""
    (W, nh, hs), (P, nkv, _) = q.shape, k.shape
    group = nh // nkv
    q = q.view(W, nkv, group, hs).permute(1, 2, 0, 3).reshape(nkv, group * W, hs)
    future = torch.ones(W, W, dtype=torch.bool, device=q.device).triu(1)              # causal inside the window
    votes, step = [], max(1, SCORE_BYTES // (4 * group * W * P))                      # KV heads at a time
    for a, b in zip(q.split(step), k.permute(1, 2, 0).split(step)):
        att = matmul32(a, b).mul_(hs ** -0.5).view(-1, group, W, P)                   # (KV heads, group, W, P)
        att[..., P - W:].masked_fill_(future, float("-inf"))
        votes.append(att.softmax(-1).sum(2).mean(1)[:, :P - W])                       # the window is kept anyway
    votes = torch.cat(votes)                                                          # (nkv, P - W)
    votes = F.max_pool1d(votes[None], pool, stride=1, padding=pool // 2)[0]           # pads with -inf, never with a vote
    return F.pad(votes, (0, W))                                                       # (nkv, P)


def score_recent(q, k, pool, rng):
    """The later the better: sinks plus a sliding window (StreamingLLM, 2309.17453)."""
    return torch.arange(len(k), device=k.device).float().expand(k.shape[1], -1)


def score_random(q, k, pool, rng):
    """A uniform choice, drawn for each KV head on its own."""
    return torch.rand(k.shape[1], len(k), generator=rng).to(k.device)


EVICT = {"none": None, "snapkv": score_snapkv, "recent": score_recent, "random": score_random}


def keep(score, budget, window, sinks):
    """score (nkv, P) -> kept positions (nkv, budget), ascending: sinks, window, the best of the rest; of equals the earlier key."""
    score = score.clone()
    score[:, :sinks] = float("inf")
    score[:, score.shape[1] - window:] = float("inf")
    best = score.argsort(dim=-1, descending=True, stable=True)[:, :budget]
    return best.sort(dim=-1).values


class KVCache:
    """Keys and values of B prompts (compressed, shared by the group) and of B x G responses.

    config: model.Config. lengths: prompt lengths in tokens. group: samples per prompt. max_new_tokens: room for responses.
    evict: a name in EVICT. budget: prompt keys kept per layer and KV head, window and sinks included; a prompt no longer
    than that is kept whole, exactly the dense method. window, sinks: see the head of this file. pool: odd width in keys.
    Raises ValueError for settings that cannot mean what they say."""

    def __init__(self, config, lengths, group, max_new_tokens, evict="snapkv", budget=256, window=32, sinks=4, pool=7,
                 seed=0, device="cpu", dtype=torch.float32):
        check_eviction(evict, budget, window, sinks, pool)
        self.c, self.lengths, self.group = config, list(lengths), group
        self.score, self.budget, self.window, self.sinks, self.pool = EVICT[evict], budget, window, sinks, pool
        self.rng = torch.Generator().manual_seed(seed)
        B, L, nkv, hs = len(lengths), config.n_layer, config.n_kv_head, config.head_size
        self.n_kept = [P if self.score is None else min(P, budget) for P in self.lengths]
        pairs = lambda rows, slots: [tuple(torch.zeros(rows, nkv, slots, hs, device=device, dtype=dtype) for _ in "kv") for _ in range(L)]
        # kept keys differ in number only between prompts shorter than the budget (or when nothing is evicted)
        self.prompt = pairs(B, max(self.n_kept))
        # the last sampled token is never fed back, so a response of R tokens has R - 1 keys
        self.response = pairs(B * group, max_new_tokens - 1)
        self.kept = [[None] * L for _ in range(B)]  # the log: [prompt][layer] -> (nkv, K) kept positions
        self.slots = torch.tensor(self.n_kept, device=device, dtype=torch.int32)  # (B,) kept keys of each prompt, the rest is padding
        self.t = torch.zeros((), dtype=torch.int64, device=device)  # response slots filled so far

    def write_prompts(self, which, layer, q, k, v):
        """Compress prompts of one length at one layer. which: their indices, a slice; q (n * P, nh, hs), k, v (n * P, nkv, hs),
        rotated, one prompt after the other."""
        P, K, n = self.lengths[which.start], self.n_kept[which.start], which.stop - which.start
        # to the scoring function n prompts look like one with n times the heads
        heads = lambda x: x.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)            # (n * P, h, hs) -> (P, n * h, hs)
        k, v = heads(k), heads(v)                                                          # (P, n * nkv, hs)
        if K == P:
            kept = torch.arange(P, device=k.device).expand(k.shape[1], -1)
        else:
            last = heads(q.unflatten(0, (n, -1))[:, -self.window:].flatten(0, 1))          # (W, n * nh, hs)
            score = self.score(last, k, self.pool, self.rng)                               # (n * nkv, P)
            if score.shape != (k.shape[1], P):
                raise ValueError(f"the scoring function gave {tuple(score.shape)}, not (KV heads, keys) = {(k.shape[1], P)}")
            kept = keep(score, K, self.window, self.sinks)                                 # (n * nkv, K)
        index = kept[:, :, None].expand(-1, -1, k.shape[2])                                # (n * nkv, K, hs)
        for store, x in zip(self.prompt[layer], (k, v)):  # a copy: no view keeps the dense keys alive
            store[which, :, :K] = x.transpose(0, 1).gather(1, index).unflatten(0, (n, -1))
        for b, positions in zip(range(which.start, which.stop), kept.unflatten(0, (n, -1))):
            self.kept[b][layer] = positions                                                # (nkv, K)

    def attend(self, layer, q, k, v):
        """One decoding step at one layer, see decode_attn.py. q (S, nh, hs), k, v (S, nkv, hs) with S = B x G -> (S, nh, hs)."""
        return decode_attention(q, k, v, *self.prompt[layer], self.slots, *self.response[layer], self.t)

    def advance(self):
        """Call once per decoding step, after the last layer. In place, so that a CUDA graph counts as it is replayed."""
        self.t.add_(1)

    def nbytes(self):
        """Bytes of storage held, counted from the storages themselves."""
        tensors = [x for part in (self.prompt, self.response) for layer in part for x in layer]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def check_eviction(evict, budget, window, sinks, pool=7):
    """Raise ValueError for an unknown method or a budget that leaves no key to choose."""
    if evict not in EVICT:
        raise ValueError(f"unknown eviction method {evict!r}: choose from {', '.join(EVICT)}")
    if window < 1 or sinks < 0 or not 1 <= pool < 1000 or pool % 2 == 0:
        raise ValueError(f"window {window} must be at least 1, sinks {sinks} at least 0, pool {pool} odd and below 1000")
    if evict != "none" and budget <= window + sinks:
        raise ValueError(f"budget {budget} must be above window + sinks = {window} + {sinks}, or no key is left to choose")


if __name__ == "__main__":  # draw what each method keeps of one prompt of the embedded checkpoint, a line per layer and KV head
    import os

    from model import Transformer
    from rollout import generate
    from tasks import problem, prompt_encoder
    from tokenizer import Tokenizer
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "model")
    net, tok = Transformer.from_pretrained(folder), Tokenizer(folder)
    p = problem("kv", "eval", 0, 1, 120, prompt_encoder(tok))
    ids = prompt_encoder(tok)(p.text)
    print(f"{p.text}\nanswer {p.answer}; {len(ids)} tokens; s sink, k kept, w window, . dropped; ^ the answer in the prompt")
    for evict in EVICT:
        r = generate(net, [ids], 1, 5, 0.0, evict, budget=24, window=16, sinks=2, stop_ids=tok.stop_ids)
        print(f"\n{evict}: {r.kept[0].shape[2]} keys, greedy answer {tok.decode(r.tokens[0, 0, :r.lengths[0, 0]].tolist())!r}")
        for layer, heads in enumerate(r.kept[0].tolist()):
            for head, kept in enumerate(heads):
                mark = lambda j: "." if j not in kept else "s" if j < 2 else "w" if j >= len(ids) - 16 else "k"
                print(f"layer {layer} head {head} {''.join(map(mark, range(len(ids))))}")
    code = tok.encode(p.answer)
    at = [j for j in range(len(ids)) if ids[j:j + len(code)] == code]
    print(" " * 15 + "".join("^" if any(s <= j < s + len(code) for s in at) else " " for j in range(len(ids))))
