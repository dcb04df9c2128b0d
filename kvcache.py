"""
The compressed KV cache: which keys stay, how they are stored, and the log of what was dropped (the Shadow Mask).

The idea. A prompt is prefilled densely, one layer at a time: attend to all keys, score them, copy the best into the cache,
let go of the rest before the next layer runs. So the last prompt token still saw everything: response token 0 is dense,
tokens 1.. see the kept keys only. What a prompt keeps depends on the prompt alone, so the G samples of a group share one
compressed prompt; each sample owns the keys of its response, which may be evicted too, every `period` steps. Kept keys
stay rotated to their true positions; nothing is renumbered.

A method is one function that scores the keys of one prompt (or of one sample's response) and one line in EVICT. How the
budget is spread over the layers is one function more and one line in SPREAD, so the two combine.

Departures. SnapKV (arXiv 2404.14469): attention sinks are protected (StreamingLLM, 2309.17453), the query heads of a KV
head vote together. R-KV (2505.24133): the prompt, shared by its group, is compressed once and each response by itself.
H2O (2306.14048): one budget for heavy hitters and recent keys, of which `window` are recent; attention is added up from
`period` queries at a time. PyramidKV (2406.02069): its line over the layers, here rounded so that the layers together
keep exactly n_layer x budget keys. StreamingLLM: positions are not renumbered.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fast.decode_attn import decode_attention
from fast.head import matmul32
from fast.launch import widen


@dataclass(frozen=True)
class Eviction:
    """Which keys a rollout keeps, counted in keys per layer and KV head. Raises ValueError for what cannot mean what it says."""
    method: str = "snapkv"  # a name in EVICT; "none" keeps all
    budget: int = 256       # prompt keys kept, window and sinks included; a prompt no longer than that is kept whole
    window: int = 32        # the last keys: always kept, and it is their queries that vote
    sinks: int = 4          # the first keys, on which trained models park attention: always kept
    pool: int = 7           # odd width in keys over which SnapKV and R-KV pool their votes
    response_budget: int | None = None  # response keys kept after every `period` steps, window included; None: all
    period: int = 128       # decoding steps between evictions of response keys
    spread: str = "uniform"  # a name in SPREAD: how the budget is spread over the layers

    def __post_init__(self):
        if self.method not in EVICT:
            raise ValueError(f"unknown eviction method {self.method!r}: choose from {', '.join(EVICT)}")
        if self.spread not in SPREAD:
            raise ValueError(f"unknown spread {self.spread!r}: choose from {', '.join(SPREAD)}")
        if self.window < 1 or self.sinks < 0 or not 1 <= self.pool < 1000 or self.pool % 2 == 0:
            raise ValueError(f"window {self.window} must be at least 1, sinks {self.sinks} at least 0, "
                             f"pool {self.pool} odd and below 1000")
        if self.method != "none" and self.budget <= self.window + self.sinks:
            raise ValueError(f"budget {self.budget} must be above window + sinks = {self.window} + {self.sinks}, "
                             "or no key is left to choose")
        if self.response_budget is not None:
            if self.method == "none" or self.response_budget <= self.window or self.period < 1:
                raise ValueError(f"response_budget {self.response_budget} must be above the window of {self.window}, "
                                 f"period {self.period} at least 1, and evict a method, not {self.method!r}")


# scores: what one prompt, or one sample, keeps. Every function takes
#   q (W, nh, hs)   the queries of the last W rows; of all rows for methods in ALL_QUERIES
#   k (n, nkv, hs)  the keys to choose from, in time order; both rotated
#   e               the Eviction settings
#   elsewhere       None, or (nh, W): log-sum-exp of the queries' scores on keys that are not among k (a response's prompt)
# and gives finite scores (nkv, n): the highest stay. It runs under torch.vmap, so it cannot see other prompts, must not branch
# on values, and may draw from torch's generator, which is seeded by (seed, layer, step).

def attention(q, k, elsewhere=None):
    """Softmax attention of the last W rows, each of which sees no later key -> (nkv, group, W, n), group = nh // nkv."""
    (W, nh, hs), (n, nkv, _) = q.shape, k.shape
    q = q.view(W, nkv, nh // nkv, hs).permute(1, 2, 0, 3)                             # (nkv, group, W, hs)
    s = matmul32(q.flatten(1, 2), k.permute(1, 2, 0)) * hs ** -0.5                    # (nkv, group * W, n)
    s = s.view(nkv, -1, W, n)
    born = torch.arange(n, device=q.device)
    s = s.masked_fill(born > born[n - W:, None], float("-inf"))
    if elsewhere is not None:  # one more key, whose share is dropped
        s = torch.cat((s, elsewhere.view(nkv, -1, W, 1)), dim=-1)                     # (nkv, group, W, n + 1)
    return s.softmax(-1)[..., :n]


def snapkv(q, k, e, elsewhere=None):
    """Votes: the attention that a key receives from the last W queries, summed over them, averaged over the query heads of a KV
    head, then max-pooled over neighbours, so that what belongs together stays together (2404.14469, eq. 5)."""
    votes = received(q, k, elsewhere).mean(1)                                         # (nkv, n)
    votes = votes[:, :len(k) - len(q)]                                                # the window is kept anyway
    return F.pad(max_pool(votes, e.pool), (0, len(q)))                                # (nkv, n)


def rkv(q, k, e, elsewhere=None):
    """0.1 importance - 0.9 redundancy (2505.24133). Importance: attention of the last W queries, averaged over them, the largest
    of the query heads, max-pooled. Redundancy: softmax over the keys of `similarity`."""
    importance = max_pool(received(q, k, elsewhere).amax(1) / len(q), e.pool)         # (nkv, n)
    return 0.1 * importance - (1 - 0.1) * similarity(k).softmax(-1)


def h2o(q, k, e, elsewhere=None):
    """Attention that a key has received so far from all queries (2306.14048)."""
    return received(q, k, elsewhere).sum(1)


def recent(q, k, e, elsewhere=None):
    """The later the better: sinks plus a sliding window (StreamingLLM, 2309.17453)."""
    return torch.arange(len(k), device=k.device).float().expand(k.shape[1], -1)


def random(q, k, e, elsewhere=None):
    """A uniform choice for each KV head; the same positions in every prompt of one length, so that a batch changes nothing."""
    return torch.rand(k.shape[1], len(k)).to(k.device)


EVICT = {"none": None, "snapkv": snapkv, "rkv": rkv, "h2o": h2o, "recent": recent, "random": random}
ALL_QUERIES = {"h2o"}  # methods that get the queries of all rows, and whose scores add up from one eviction to the next


def uniform(e, layer, n_layer):
    return e.budget


def pyramid(e, layer, n_layer):
    """PyramidKV (2406.02069): what is free after window and sinks falls by a straight line over the layers, from 1.95 times the mean
    to 0.05 times it; rounded so that the layers add up to n_layer x budget."""
    fixed = e.window + e.sinks
    top, slope = (1.95, 1.9 / (n_layer - 1)) if n_layer > 1 else (1, 0)

    def free(layers):  # keys of the first so many layers together
        return round((e.budget - fixed) * (top * layers - slope * layers * (layers - 1) / 2))
    return fixed + free(layer + 1) - free(layer)


SPREAD = {"uniform": uniform, "pyramid": pyramid}  # (settings, layer, number of layers) -> prompt keys kept per KV head


def keep(score, count, window, sinks):
    """score (..., n) -> positions of the `count` keys that stay (..., count), ascending: sinks, window, the best of the rest; of
    equals the earlier key. Sinks and window stay whatever their scores are."""
    n = score.shape[-1]
    score = score.nan_to_num(nan=0.0, posinf=3e38, neginf=-3e38)
    score[..., :sinks] = float("inf")
    score[..., n - window:] = float("inf")
    best = score.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return best.sort(dim=-1).values


class KVCache:
    """Keys and values of B prompts (compressed, shared by the group) and of S = B x group responses.

    config: model.Config. lengths: prompt lengths in tokens. group: samples per prompt. max_new_tokens: longest response.
    eviction: Eviction. Decoding reads `t`, `response_filled` and `prompt_filled` from the device, so that a CUDA graph can step."""

    def __init__(self, config, lengths, group, max_new_tokens, eviction, seed=0, device="cpu", dtype=torch.float32):
        self.config, self.lengths, self.eviction, self.seed = config, list(lengths), eviction, seed
        L, nkv, hs = config.n_layer, config.n_kv_head, config.head_size
        B, S, R = len(lengths), len(lengths) * group, max_new_tokens
        # the prompt: slots beyond a prompt's own count are padding
        self.counts = [[self.count(layer, P) for P in self.lengths] for layer in range(L)]            # keys, per layer and prompt
        self.prompt_k = [torch.zeros(B, nkv, max(n), hs, device=device, dtype=dtype) for n in self.counts]
        self.prompt_v = [torch.zeros_like(k) for k in self.prompt_k]
        filled = torch.tensor(self.counts, device=device, dtype=torch.int32)                          # (L, B)
        self.prompt_filled = filled[:, :, None].expand(-1, -1, nkv).contiguous()                      # (L, B, nkv) slots in use
        # the responses: the last sampled token is never fed back, so R tokens have R - 1 keys
        slots = R - 1
        if eviction.response_budget is not None:
            slots = min(slots, eviction.response_budget + eviction.period)
        self.response_k = torch.zeros(L, S, nkv, slots, hs, device=device, dtype=dtype)
        self.response_v = torch.zeros_like(self.response_k)
        self.t = torch.zeros((), device=device, dtype=torch.int64)       # response tokens fed: keys were born at steps 0 .. t - 1
        self.response_filled = torch.zeros_like(self.t)                  # slots in use, the same number for all samples
        # the log
        self.kept = [[None] * L for _ in lengths]                        # [prompt][layer] -> (nkv, K) kept positions
        self.until = torch.full((L, S, nkv, R), R, device=device, dtype=torch.int32)  # step at which a response key dies; R: never
        self.finite = torch.ones((), device=device, dtype=torch.bool)    # whether every score so far was
        if eviction.response_budget is not None:
            self.prepare_response_eviction(S, R, device, dtype)

    def count(self, layer, P):
        """Keys per KV head that a prompt of P tokens keeps in a layer."""
        e = self.eviction
        if e.method == "none":
            return P
        return min(P, SPREAD[e.spread](e, layer, self.config.n_layer))

    def write_prompts(self, which, layer, q, k, v):
        """Compress prompts of one length at one layer. which: their indices, a slice; q (n * P, nh, hs), k, v (n * P, nkv, hs),
        rotated, one prompt after the other."""
        P, K, e = self.lengths[which.start], self.counts[layer][which.start], self.eviction
        n = which.stop - which.start
        q, k, v = (x.unflatten(0, (n, P)) for x in (q, k, v))                                        # (n, P, heads, hs)
        if K == P:
            kept = torch.arange(P, device=k.device).expand(n, k.shape[2], -1)                        # (n, nkv, P)
        else:
            W = P if e.method in ALL_QUERIES else e.window
            kept = keep(self.scores(layer, 0, q[:, P - W:], k), K, e.window, e.sinks)                # (n, nkv, K)
        index = kept[..., None].expand(-1, -1, -1, k.shape[3])                                       # (n, nkv, K, hs)
        # copies: no view keeps the dense keys alive
        self.prompt_k[layer][which, :, :K] = k.transpose(1, 2).gather(2, index)
        self.prompt_v[layer][which, :, :K] = v.transpose(1, 2).gather(2, index)
        for i in range(n):
            self.kept[which.start + i][layer] = kept[i]                                              # (nkv, K)

    def scores(self, layer, t, q, k, elsewhere=None):
        """The method's scores of n prompts or samples, each by itself: q (n, W, nh, hs), k (n, keys, nkv, hs), elsewhere None or
        (n, nh, W) -> (n, nkv, keys). As many at once as their attention fits into SCORE_BYTES."""
        (n, W, nh, _), (_, keys, nkv, _) = q.shape, k.shape

        def one(*args):
            torch.default_generator.manual_seed(hash((self.seed, layer, t)) % 2**63)
            score = EVICT[self.eviction.method](*args[:2], self.eviction, *args[2:])
            if score.shape != (nkv, keys):
                raise ValueError(f"{self.eviction.method} scored {tuple(score.shape)}, not (KV heads, keys) = {(nkv, keys)}")
            return score

        args = (q, k) if elsewhere is None else (q, k, elsewhere)
        with torch.random.fork_rng(devices=[]):
            score = torch.vmap(one, chunk_size=max(1, SCORE_BYTES // (4 * W * nh * keys)), randomness="same")(*args)
        self.finite.logical_and_(score.isfinite().all())
        return score

    def attend(self, layer, q, k, v):
        """One decoding step at one layer. q (S, nh, hs), k, v (S, nkv, hs) -> (S, nh, hs); k, v are stored."""
        if self.eviction.response_budget is not None:
            queries = self.queries[layer]
            queries.index_copy_(1, self.t[None] % queries.shape[1], q[:, None])
        return decode_attention(q, k, v, prompt_k=self.prompt_k[layer], prompt_v=self.prompt_v[layer],
                                n_kept=self.prompt_filled[layer][:, 0].contiguous(), response_k=self.response_k[layer],
                                response_v=self.response_v[layer], t=self.response_filled)

    def advance(self):
        """Call once per decoding step, after the last layer. In place, so that a CUDA graph counts as it is replayed."""
        self.t.add_(1)
        self.response_filled.add_(1)

    # response keys: every `period` steps the same scoring function chooses among the keys held, for each sample, layer and KV head.
    # All samples hold equally many keys at any time, so there is room for response_budget + period keys, however long the response

    def prepare_response_eviction(self, S, R, device, dtype):
        """What choosing among response keys takes; nbytes does not count it."""
        c, e = self.config, self.eviction
        voters = e.period if e.method in ALL_QUERIES else min(e.window, e.period)
        voters = max(1, min(voters, R - 1))
        self.queries = torch.zeros(c.n_layer, S, voters, c.n_head, c.head_size, device=device, dtype=dtype)  # step u in u % voters
        nothing = torch.zeros(S, c.n_kv_head, 0, device=device)
        self.born = [nothing.long() for _ in range(c.n_layer)]           # (S, nkv, held) step of each key held
        self.past = [nothing for _ in range(c.n_layer)]                  # (S, nkv, held) its score so far, of ALL_QUERIES

    def evict_responses(self, t):
        """Call when t response tokens were fed: every `period` steps, drop response keys beyond the budget and log it."""
        e = self.eviction
        if e.response_budget is None or t % e.period:
            return
        for layer in range(self.config.n_layer):
            self.evict_layer(layer, t)
        self.response_filled.fill_(self.born[0].shape[2])

    def evict_layer(self, layer, t):
        """Score the keys held, log which die, move those that stay to the first slots."""
        e, adds_up = self.eviction, self.eviction.method in ALL_QUERIES
        S, nkv, held = self.born[layer].shape
        n = held + e.period                                                                          # keys held now
        new = torch.arange(t - e.period, t, device=self.t.device).expand(S, nkv, -1)
        born = torch.cat((self.born[layer], new), dim=2)                                             # (S, nkv, n)
        if n > e.response_budget or adds_up:
            steps = torch.arange(t - self.queries.shape[2], t, device=self.t.device)
            q = self.queries[layer][:, steps % self.queries.shape[2]]                                # (S, voters, nh, hs)
            k = self.response_k[layer][:, :, :n].transpose(1, 2)                                     # (S, n, nkv, hs)
            score = self.scores(layer, t, q, k, self.prompt_mass(layer, q))                          # (S, nkv, n)
        if adds_up:
            score = score + F.pad(self.past[layer], (0, e.period))
            self.past[layer] = score
        if n > e.response_budget:
            slots = keep(score, e.response_budget, e.window, sinks=0)                                # (S, nkv, K)
            never = self.until.shape[3]
            dies = torch.full_like(born, t).scatter_(2, slots, never)                                # step t - 1 was the last to see it
            self.until[layer].scatter_(2, born, dies.int())
            index = slots[..., None].expand(-1, -1, -1, self.config.head_size)                       # (S, nkv, K, hs)
            for store in (self.response_k[layer], self.response_v[layer]):
                store[:, :, :e.response_budget] = store.gather(2, index)
            born = born.gather(2, slots)
            if adds_up:
                self.past[layer] = score.gather(2, slots)
        self.born[layer] = born

    def prompt_mass(self, layer, q):
        """q (S, W, nh, hs) -> (S, nh, W) fp32: log-sum-exp of the queries' scores on their prompt's kept keys."""
        (S, W, nh, hs), (B, nkv, K, _) = q.shape, self.prompt_k[layer].shape
        q = q.view(B, S // B, W, nkv, nh // nkv, hs).permute(0, 3, 1, 4, 2, 5)                       # (B, nkv, G, group, W, hs)
        padding = torch.arange(K, device=q.device) >= self.prompt_filled[layer][..., None]           # (B, nkv, K)
        mass = []
        for b in range(B):
            s = matmul32(q[b].flatten(1, 3), self.prompt_k[layer][b].transpose(1, 2)) * hs ** -0.5   # (nkv, G * group * W, K)
            s = s.masked_fill(padding[b, :, None], float("-inf"))
            mass.append(s.logsumexp(-1).view(nkv, S // B, -1, W))                                    # (nkv, G, group, W)
        return torch.stack(mass).transpose(1, 2).reshape(S, nh, W)

    def kept_positions(self):
        """The log of the prompts, one entry per prompt: (L, nkv, K) int64, or a list of (nkv, K) where layers keep different numbers."""
        return [torch.stack(layers) if len({x.shape for x in layers}) == 1 else layers for layers in self.kept]

    def nbytes(self):
        """Bytes of storage that hold keys and values, counted from the storages themselves."""
        tensors = [*self.prompt_k, *self.prompt_v, self.response_k, self.response_v]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())


# what the scores are made of, a slice at a time: the attention of many queries on a long prompt would not fit

SCORE_BYTES = 32 * 2**20  # fp32 attention (or similarity) held at a time, twice


def received(q, k, elsewhere=None):
    """attention(q, k, elsewhere) summed over its queries -> (nkv, group, n)"""
    (W, nh, _), (n, nkv, _) = q.shape, k.shape
    group = nh // nkv
    heads = max(1, SCORE_BYTES // (4 * group * W * n))                                # KV heads at a time
    rows = max(1, min(W, SCORE_BYTES // (4 * group * n)))                             # and, of one head, queries
    total = []
    for h in range(0, nkv, heads):
        mine = slice(h * group, (h + heads) * group)                                  # query heads
        part = 0
        for lo in range(0, W, rows):
            hi = min(lo + rows, W)
            seen = n - W + hi                                                         # later keys are seen by none of these rows
            z = None if elsewhere is None else elsewhere[mine, lo:hi]
            att = attention(q[lo:hi, mine], k[:seen, h:h + heads], z)                 # (heads, group, rows, seen)
            part = part + F.pad(att.sum(2), (0, n - seen))                            # (heads, group, n)
        total.append(part)
    return torch.cat(total)


def max_pool(x, pool):
    """(nkv, n): each key gets the largest of `pool` neighbouring scores."""
    return F.max_pool1d(x[None], pool, stride=1, padding=pool // 2)[0]


def similarity(k, similar=0.5):
    """Mean cosine similarity of each key to all, (nkv, n): of those more than `similar` to it, the latest is not counted, so that of
    many alike the latest stays (R-KV)."""
    k = F.normalize(widen(k), dim=-1).transpose(0, 1)                                 # (nkv, n, hs)
    nkv, n, _ = k.shape
    born = torch.arange(n, device=k.device)
    heads, rows = max(1, SCORE_BYTES // (4 * n * n)), max(1, min(n, SCORE_BYTES // (4 * n)))
    total = []
    for part in k.split(heads):
        mean = 0
        for lo in range(0, n, rows):
            s = part[:, lo:lo + rows] @ part.transpose(1, 2)                          # (heads, rows, n)
            s = s.masked_fill(born == born[lo:lo + rows, None], 0)                    # not with itself
            latest = torch.where(s > similar, born, 0).amax(-1, keepdim=True)         # key 0 where none is, as in R-KV's code
            mean = mean + s.scatter(-1, latest, 0.0).sum(1) / n                       # (heads, n)
        total.append(mean)
    return torch.cat(total)
