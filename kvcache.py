"""
The compressed KV cache: what is kept, what is dropped, and the log of it.

The idea. A prompt is prefilled densely, one layer at a time: score the layer's keys, copy the kept ones into the cache,
attend to all of them, let go of them before the next layer runs. So the dense cache of one layer is the most that ever exists,
and the last prompt token still saw everything: response token 0 is dense, tokens 1.. see the kept keys only. What was
kept depends on the prompt alone, so the G samples of a group share one compressed prompt; each sample owns the keys of
its response. Kept keys stay rotated to their true positions; nothing is ever re-rotated or renumbered.

If asked (`response_budget`), response keys are evicted too: after every `period` steps the same scoring function picks the
`response_budget` keys that stay, for each sample, layer and KV head, and they move to the front of the cache. All samples hold
equally many keys at any time, so the cache has room for response_budget + period keys, however long the response.

A new method is one scoring function and one line in EVICT: it gives each key a score, the highest are kept. Sinks (the
first prompt keys, on which trained models park attention) and the window (the last W keys) are kept by every method.

Departures. SnapKV (arXiv 2404.14469): attention sinks are protected (StreamingLLM, 2309.17453), the query heads of one KV head
vote together (mean), and the cache is per KV head, never expanded to query heads. R-KV (2505.24133): the prompt, shared by its
group, is compressed once and the response by itself, where R-KV compresses them together; attention to response keys is still
normalised over all that the query saw. H2O (2306.14048): one budget for heavy hitters and recent keys, of which `window` are recent;
a key's attention is added up from `period` queries at a time, not greedily at every step.
"""
import torch
import torch.nn.functional as F

from fast.decode_attn import decode_attention
from fast.head import matmul32

SCORE_BYTES = 32 * 2**20  # fp32 attention (or similarity) that a scoring function holds at a time, twice

# ---------------------------------------------------------------------------------------------------------------------
# scores: (q of the last W rows (W, nh, hs), k of all rows (P, nkv, hs), pool, rng, elsewhere) -> (nkv, P), higher is kept.
# elsewhere: None, or log-sum-exp (nh, W) of the queries' scores on keys that are not among k

def attention_received(q, k, elsewhere=None):
    """Softmax attention that each key receives, summed over the queries -> (nkv, group, P), for each query head of a KV head."""
    (W, nh, hs), (P, nkv, _) = q.shape, k.shape
    group = nh // nkv
    q = q.view(W, nkv, group, hs).permute(1, 2, 0, 3)                                 # (nkv, group, W, hs)
    born, total = torch.arange(P, device=q.device), []
    heads = max(1, SCORE_BYTES // (4 * group * W * P))                                # KV heads at a time
    rows = max(1, min(W, SCORE_BYTES // (4 * group * P)))                             # and, of one head, queries
    for i, (a, b) in enumerate(zip(q.split(heads), k.permute(1, 2, 0).split(heads))):
        received = 0
        for lo in range(0, W, rows):
            part, first = a[:, :, lo:lo + rows], P - W + lo                           # (heads, group, n, hs); row of the first query
            n = part.shape[2]
            att = matmul32(part.reshape(len(a), group * n, hs), b).mul_(hs ** -0.5).view(-1, group, n, P)
            att[..., first:].masked_fill_(born[first:] > born[first:first + n, None], float("-inf"))  # a query sees no later key
            if elsewhere is not None:
                z = elsewhere.view(nkv, group, W, 1)[i * heads:i * heads + len(a), :, lo:lo + n]
                att = torch.cat((att, z), dim=-1)                                     # as one more key, whose share is dropped
            received = received + att.softmax(-1)[..., :P].sum(2)                     # (heads, group, P)
        total.append(received)
    return torch.cat(total)


def max_pool(x, pool):
    """Each key gets the largest of `pool` neighbouring scores, so that what belongs together stays together; pads with -inf."""
    return F.max_pool1d(x[None], pool, stride=1, padding=pool // 2)[0]


def score_snapkv(q, k, pool, rng, elsewhere=None):
    """Attention from the last W queries to each earlier key, summed over the window, averaged over the query heads of a KV head,
    then max-pooled (2404.14469, eq. 5)."""
    votes = attention_received(q, k, elsewhere).mean(1)[:, :len(k) - len(q)]          # the window is kept anyway
    return F.pad(max_pool(votes, pool), (0, len(q)))                                  # (nkv, P)


def score_rkv(q, k, pool, rng, elsewhere=None, weight=0.1, similar=0.5):
    """weight * importance - (1 - weight) * redundancy (2505.24133). Importance: attention of the last W queries, averaged over them,
    the largest of the query heads, max-pooled. Redundancy: softmax over keys of the mean cosine similarity to all keys; for each
    key, the latest of those more than `similar` to it is not counted, so that of many alike the latest stays."""
    importance = max_pool(attention_received(q, k, elsewhere).amax(1) / len(q), pool)  # (nkv, P)
    k = F.normalize(k.to(torch.promote_types(k.dtype, torch.float32)), dim=-1).transpose(0, 1)  # (nkv, P, hs)
    P, born, total = k.shape[1], torch.arange(k.shape[1], device=k.device), []
    heads, rows = max(1, SCORE_BYTES // (4 * P * P)), max(1, min(P, SCORE_BYTES // (4 * P)))
    for part in k.split(heads):
        mean = 0
        for lo in range(0, P, rows):
            s = part[:, lo:lo + rows] @ part.transpose(1, 2)                          # (heads, rows, P)
            s[:, born[:s.shape[1]], born[lo:lo + s.shape[1]]] = 0                     # not with itself
            latest = torch.where(s > similar, born, 0).amax(-1, keepdim=True)         # key 0 where none is similar, as in R-KV's code
            mean = mean + s.scatter(-1, latest, 0.0).sum(1) / P                       # (heads, P)
        total.append(mean)
    return weight * importance - (1 - weight) * torch.cat(total).softmax(-1)


def score_h2o(q, k, pool, rng, elsewhere=None):
    """Attention that a key has received so far from all queries (2306.14048); here from those given, see `ACCUMULATES`."""
    return attention_received(q, k, elsewhere).sum(1)


def score_recent(q, k, pool, rng, elsewhere=None):
    """The later the better: sinks plus a sliding window (StreamingLLM, 2309.17453)."""
    return torch.arange(len(k), device=k.device).float().expand(k.shape[1], -1)


def score_random(q, k, pool, rng, elsewhere=None):
    """A uniform choice, drawn for each KV head on its own."""
    return torch.rand(k.shape[1], len(k), generator=rng).to(k.device)


EVICT = {"none": None, "snapkv": score_snapkv, "rkv": score_rkv, "h2o": score_h2o, "recent": score_recent, "random": score_random}
ACCUMULATES = {"h2o"}  # methods that get all queries, not the window's, and whose scores add up from one eviction to the next


def keep(score, budget, window, sinks):
    """score (nkv, P) -> kept positions (nkv, budget), ascending: sinks, window, the best of the rest; of equals the earlier key."""
    score = score.clone()
    score[:, :sinks] = float("inf")
    score[:, score.shape[1] - window:] = float("inf")
    best = score.argsort(dim=-1, descending=True, stable=True)[:, :budget]
    return best.sort(dim=-1).values


class KVCache:
    """Keys and values of B prompts (compressed, shared by the group) and of B x G responses.

    config: model.Config. lengths: prompt lengths in tokens. group: samples per prompt. max_new_tokens: longest response.
    evict: a name in EVICT. budget: prompt keys kept per layer and KV head, window and sinks included; a prompt no longer
    than that is kept whole, exactly the dense method. window, sinks: see the head of this file. pool: odd width in keys.
    response_budget: response keys kept after every `period` steps, window included; None: all. The votes are those of the last
    min(window, period) queries, of h2o those of all `period`; they are held beside the cache and `nbytes` does not count them.
    Raises ValueError for settings that cannot mean what they say."""

    def __init__(self, config, lengths, group, max_new_tokens, evict="snapkv", budget=256, window=32, sinks=4, pool=7,
                 seed=0, device="cpu", dtype=torch.float32, response_budget=None, period=128):
        check_eviction(evict, budget, window, sinks, pool, response_budget, period)
        self.c, self.lengths, self.evict = config, list(lengths), evict
        self.score, self.budget, self.window, self.sinks, self.pool = EVICT[evict], budget, window, sinks, pool
        self.response_budget, self.period = response_budget, period
        self.rng = torch.Generator().manual_seed(seed)
        B, L, nkv, hs = len(lengths), config.n_layer, config.n_kv_head, config.head_size
        S, new = B * group, lambda *shape, dtype=dtype: torch.zeros(*shape, device=device, dtype=dtype)
        self.n_kept = [P if self.score is None else min(P, budget) for P in self.lengths]
        pairs = lambda rows, slots: [tuple(new(rows, nkv, slots, hs) for _ in "kv") for _ in range(L)]
        # kept keys differ in number only between prompts shorter than the budget (or when nothing is evicted)
        self.prompt = pairs(B, max(self.n_kept))
        # the last sampled token is never fed back, so a response of R tokens has R - 1 keys
        R = max_new_tokens
        self.response = pairs(S, R - 1 if response_budget is None else min(R - 1, response_budget + period))
        filled = torch.tensor(self.n_kept, device=device, dtype=torch.int32)
        self.prompt_filled = filled[:, None].repeat(1, nkv)  # (B, nkv) slots in use, the rest is padding
        # both are read by a CUDA graph, which also moves them on; without eviction of response keys they are equal
        self.t = new((), dtype=torch.int64)                # response tokens fed so far: their keys were born at steps 0 .. t - 1
        self.response_filled = new((), dtype=torch.int64)  # response slots in use, the same number for all samples
        # the log
        self.kept = [[None] * L for _ in range(B)]  # [prompt][layer] -> (nkv, K) kept positions
        self.until = torch.full((L, S, nkv, R), R, device=device, dtype=torch.int32)  # step at which each response key dies; R: never
        if response_budget is not None:  # what choosing among response keys takes
            n = max(1, min(period if evict in ACCUMULATES else min(window, period), R - 1))
            self.queries = [new(S, n, config.n_head, hs) for _ in range(L)]  # of the last n steps, step u in row u % n
            self.born = [new(S, nkv, 0, dtype=torch.int64) for _ in range(L)]  # step of each key held at the last eviction
            self.past = [new(S, nkv, 0, dtype=torch.float32) for _ in range(L)]  # and its score so far, of a method that accumulates

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
            W = P if self.evict in ACCUMULATES else self.window
            last = heads(q.unflatten(0, (n, -1))[:, -W:].flatten(0, 1))                    # (W, n * nh, hs)
            kept = keep(self.scores(last, k), K, self.window, self.sinks)                  # (n * nkv, K)
        index = kept[:, :, None].expand(-1, -1, k.shape[2])                                # (n * nkv, K, hs)
        for store, x in zip(self.prompt[layer], (k, v)):  # a copy: no view keeps the dense keys alive
            store[which, :, :K] = x.transpose(0, 1).gather(1, index).unflatten(0, (n, -1))
        for b, positions in zip(range(which.start, which.stop), kept.unflatten(0, (n, -1))):
            self.kept[b][layer] = positions                                                # (nkv, K)

    def scores(self, q, k, elsewhere=None):
        """The method's scores, (KV heads, keys), see the head of this file; a new method's mistake is found here."""
        score = self.score(q, k, self.pool, self.rng, elsewhere)                           # (heads, keys)
        if score.shape != (k.shape[1], len(k)):
            raise ValueError(f"the scoring function gave {tuple(score.shape)}, not (KV heads, keys) = {(k.shape[1], len(k))}")
        return score

    def attend(self, layer, q, k, v):
        """One decoding step at one layer, see decode_attn.py. q (S, nh, hs), k, v (S, nkv, hs) with S = B x G -> (S, nh, hs)."""
        if self.response_budget is not None:
            self.queries[layer].index_copy_(1, self.t[None] % self.queries[layer].shape[1], q[:, None])
        return decode_attention(q, k, v, *self.prompt[layer], self.prompt_filled, *self.response[layer],
                                self.response_filled)

    def advance(self):
        """Call once per decoding step, after the last layer. In place, so that a CUDA graph counts as it is replayed."""
        self.t.add_(1)
        self.response_filled.add_(1)

    def evict_responses(self, t):
        """Call after step t - 1, when t response tokens were fed: every `period` steps, drop response keys beyond the budget."""
        if self.response_budget is None or t % self.period:
            return
        for layer in range(self.c.n_layer):
            self.evict_layer(layer, t)
        self.response_filled.fill_(self.born[0].shape[2])

    def evict_layer(self, layer, t):
        """Choose at one layer, log what dies, move what stays to the first slots."""
        (S, nkv, held), K = self.born[layer].shape, self.response_budget
        n = held + self.period                                                             # slots in use
        born = torch.cat((self.born[layer], torch.arange(t - self.period, t, device=self.t.device).expand(S, nkv, -1)), dim=2)
        rows = torch.arange(t - self.queries[layer].shape[1], t, device=self.t.device) % self.queries[layer].shape[1]
        q, k = self.queries[layer][:, rows], self.response[layer][0][:, :, :n]             # (S, W, nh, hs), (S, nkv, n, hs)
        if n > K or self.evict in ACCUMULATES:  # to the scoring function S samples look like one with S times the heads
            score = self.scores(q.transpose(0, 1).flatten(1, 2), k.permute(2, 0, 1, 3).flatten(1, 2), self.prompt_mass(layer, q))
            score = score.unflatten(0, (S, nkv)).clone()                                   # (S, nkv, n)
        if self.evict in ACCUMULATES:
            score[:, :, :held] += self.past[layer]
            self.past[layer] = score
        if n > K:
            kept = keep(score.flatten(0, 1), K, self.window, 0).unflatten(0, (S, nkv))     # (S, nkv, K) slots
            dies = torch.full_like(born, t).scatter_(2, kept, self.until.shape[3])         # the query of step t - 1 was the last to see it
            self.until[layer].scatter_(2, born, dies.int())
            for store in self.response[layer]:
                store[:, :, :K] = store[:, :, :n].gather(2, kept[..., None].expand(-1, -1, -1, store.shape[3]))
            born = born.gather(2, kept)
            if self.evict in ACCUMULATES:
                self.past[layer] = score.gather(2, kept)
        self.born[layer] = born

    def prompt_mass(self, layer, q):
        """q (S, W, nh, hs) -> (S * nh, W) fp32: log-sum-exp of the queries' scores on their prompt's kept keys."""
        (S, W, nh, hs), (B, nkv, K, _) = q.shape, self.prompt[layer][0].shape
        q = q.view(B, S // B, W, nkv, nh // nkv, hs).permute(0, 3, 1, 4, 2, 5)             # (B, nkv, G, group, W, hs)
        mass = [torch.logsumexp(matmul32(a.flatten(1, 3), k[:, :n].transpose(1, 2)) * hs ** -0.5, -1).view(nkv, S // B, -1, W)
                for a, k, n in zip(q, self.prompt[layer][0], self.n_kept)]                 # (nkv, G, group, W) of each prompt
        return torch.stack(mass).transpose(1, 2).reshape(S * nh, W)

    def nbytes(self):
        """Bytes of storage that hold keys and values, counted from the storages themselves."""
        tensors = [x for part in (self.prompt, self.response) for layer in part for x in layer]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def check_eviction(evict, budget, window, sinks, pool=7, response_budget=None, period=128):
    """Raise ValueError for an unknown method or a budget that leaves no key to choose."""
    if evict not in EVICT:
        raise ValueError(f"unknown eviction method {evict!r}: choose from {', '.join(EVICT)}")
    if window < 1 or sinks < 0 or not 1 <= pool < 1000 or pool % 2 == 0:
        raise ValueError(f"window {window} must be at least 1, sinks {sinks} at least 0, pool {pool} odd and below 1000")
    if evict != "none" and budget <= window + sinks:
        raise ValueError(f"budget {budget} must be above window + sinks = {window} + {sinks}, or no key is left to choose")
    if response_budget is not None and (evict == "none" or response_budget <= window or period < 1):
        raise ValueError(f"response_budget {response_budget} must be above the window of {window}, period {period} at least 1, and evict a "
                         f"method, not {evict!r}")
