"""
The compressed KV cache: which keys stay, how they are stored, and the log of what was dropped.

The idea. A prompt is prefilled densely, one layer at a time: attend to all keys, score them, copy
the best into the cache, let go of the rest before the next layer runs. So the last prompt token
still saw everything: response token 0 is dense, tokens 1.. see the kept keys only. What a prompt
keeps depends on the prompt alone, so the G samples of a group share one compressed prompt. Each
sample owns the keys of its response, which may be evicted too, every `period` steps. Kept keys
stay rotated to their true positions; nothing is renumbered.

A method is one function that scores keys and one line in EVICT, which also says what it needs. How
the budget is spread over layers and KV heads is a choice of its own (SPREAD).

Letters, here and in shapes: B prompts of P tokens, G samples of each, S = B * G of R tokens; L
layers, nh query heads and nkv KV heads of size hs, g = nh // nkv; W queries score n keys, of which
K stay; t response tokens were fed.

Departures; docs/results.md says more. SnapKV (arXiv 2404.14469): attention sinks are protected
(StreamingLLM, 2309.17453), the query heads of a KV head vote together, pooling takes the largest.
R-KV (2505.24133): sinks too; a prompt is compressed once and each response by itself; lambda is the
paper's 0.1 (its code: 0.07). H2O (2306.14048): of one budget `window` keys are recent; attention
adds up from `period` queries at a time. StreamingLLM: the prompt's last keys never slide out.
PyramidKV (2406.02069): all layers together keep n_layer x budget; what a short prompt leaves is not
given to others. Ada-KV (2407.11550): a KV head keeps from a fifth of the mean of what is free to
twice, so that storage stays rectangular; scores of different heads are compared as they are.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fast.decode_attn import decode_attention
from fast.head import matmul32
from fast.launch import widen
from fast.scores import folded, mass, summed, vmapped
from fast.snapkv import compress, edges, knows, neighbours

INF = float("inf")


class NotFinite(ValueError, FloatingPointError):
    """NaN or inf in scores or logits: a wrong argument, or a run that has diverged."""


@dataclass(frozen=True)
class Eviction:
    """Which keys a rollout keeps, per layer and KV head. Raises ValueError for what cannot be."""
    method: str = "snapkv"   # a name in EVICT; "none" keeps all
    budget: int = 256        # prompt keys kept, window and sinks included
    window: int = 32         # the last keys: always kept, and their queries vote
    sinks: int = 4           # the first, on which models park attention: always kept
    pool: int = 7            # odd width in keys over which SnapKV and R-KV pool votes
    pool_by: str = "max"     # a name in POOL: the largest of neighbours, or their mean
    response_budget: int | None = None  # response keys kept, window included; None: all
    period: int = 128        # decoding steps between evictions of response keys
    spread: str = "uniform"  # a name in SPREAD: the budget over layers and KV heads

    def __post_init__(self):
        known = {"eviction method": (self.method, EVICT),
                 "spread": (self.spread, SPREAD), "pool_by": (self.pool_by, POOL)}
        for what, (name, table) in known.items():
            if name not in table:
                raise ValueError(
                    f"unknown {what} {name!r}: choose from {', '.join(table)}")
        window, sinks, pool = self.window, self.sinks, self.pool
        if window < 1 or sinks < 0 or not 1 <= pool < 1000 or pool % 2 == 0:
            raise ValueError(f"window {window} must be at least 1, sinks {sinks} at "
                             f"least 0, pool {pool} odd and below 1000")
        if self.method != "none" and self.budget <= window + sinks:
            raise ValueError(f"budget {self.budget} must be above window + sinks = "
                             f"{window} + {sinks}, or no key is left to choose")
        own = self.response_budget
        if own is not None and self.method == "none":
            raise ValueError(f"response_budget {own} evicts response keys: evict must "
                             "name a method, not 'none'")
        if own is not None and (own <= window or self.period < 1):
            raise ValueError(f"response_budget {own} must be above the window of "
                             f"{window}, and period {self.period} at least 1")

    def budget_of(self, layer, n_layer):
        """Keys per KV head of a layer, on average over its heads."""
        return SPREAD[self.spread](self, layer, n_layer)

    def evicts(self, P, R, n_layer):
        """Can a key of a prompt or of a response be dropped before a token that would see it?"""
        if self.method == "none":
            return False
        if any(P > self.budget_of(layer, n_layer) for layer in range(n_layer)):
            return True
        # the last choice that counts is made before the last but one response token is fed:
        # `generate` draws one more token from it and feeds that no more
        last = (R - 2) // self.period * self.period
        return self.response_budget is not None and last > self.response_budget

    def slots(self, layer, n_layer, P):
        """Slots per KV head that a prompt of P tokens takes in a layer."""
        budget = self.budget_of(layer, n_layer)
        if self.method == "none" or P <= budget:
            return P
        if self.spread in HEAD_SPREAD:  # one head may keep twice what is free
            budget += budget - self.window - self.sinks
        return min(P, budget)

    def response_slots(self, R):
        """Most response keys held at once, per KV head: the last token is never fed back."""
        if self.response_budget is None:
            return R - 1
        return min(R - 1, self.response_budget + self.period)


# The scores of one prompt, or of one sample's response. Every function takes
#   q (W, nh, hs)   the queries of the last W rows: at most eviction.window, or all
#   k (n, nkv, hs)  the keys to choose from, in time order; both are rotated
#   eviction        the settings
#   elsewhere       None, or (nh, W): log-sum-exp of q . k / sqrt(hs) over keys that are not among
#                   k: the prompt's, where response keys are scored. Hand it to `attention`
# and returns finite numbers (nkv, n): the highest stay, among all KV heads if spread = "adaptive".
# It runs under torch.vmap: it cannot see other prompts, must not branch on values nor fill a fresh
# tensor (stack instead); torch's CPU generator is seeded by (seed, layer, step) for it.

def logits(q, k):
    """q . k / sqrt(hs) -> (nkv, g, W, n)"""
    W, nh, hs = q.shape
    n, nkv, _ = k.shape
    q = q.view(W, nkv, nh // nkv, hs).permute(1, 2, 0, 3)       # (nkv, g, W, hs)
    product = matmul32(q.flatten(1, 2), k.permute(1, 2, 0))     # (nkv, g * W, n)
    return product.view(nkv, -1, W, n).mul_(hs ** -0.5)


def attention(q, k, elsewhere=None):
    """Softmax attention of the last W rows, each of which sees no later key -> (nkv, g, W, n)"""
    W = len(q)
    n, nkv, _ = k.shape
    found = logits(q, k)                                        # (nkv, g, W, n)
    # query w stands at key n - W + w: later keys are hidden
    row = torch.arange(n - W, n, device=q.device)               # (W,)
    found[..., n - W:].masked_fill_(row > row[:, None], -INF)
    if elsewhere is not None:  # the other keys as one more, whose share is dropped
        elsewhere = elsewhere.view(nkv, -1, W, 1)               # (nkv, g, W, 1)
        found = torch.cat((found, elsewhere), dim=-1)           # (nkv, g, W, n + 1)
    return found.softmax(-1)[..., :n]


def received(q, k, elsewhere=None):
    """attention(q, k, elsewhere).sum(2), the sum over the queries -> (nkv, g, n)"""
    W, n = len(q), len(k)

    # `summed` calls this for a slice of the queries at a time, and adds up: (nkv, g, W, n) never
    # exists as a whole
    def of_rows(rows, q, k, elsewhere):
        seen = n - W + rows.stop  # keys: none of these queries sees more
        return F.pad(attention(q, k[:seen], elsewhere).sum(2), (0, n - seen))
    return summed(of_rows, q, k, elsewhere)


def pooled(votes, eviction):
    """(nkv, n): each key gets the largest, or the mean, of eviction.pool neighbouring votes; for
    the mean those past either end count as 0, as in SnapKV's code."""
    pool, width = POOL[eviction.pool_by], eviction.pool
    return pool(votes[None], width, stride=1, padding=width // 2)[0]


POOL = {"max": F.max_pool1d, "mean": F.avg_pool1d}


def snapkv(q, k, eviction, elsewhere=None):
    """Votes (2404.14469, eq. 5): the attention that a key receives from the last W queries, summed
    over them, averaged over the query heads of a KV head, and pooled over neighbouring keys, so
    that what belongs together stays together."""
    window = eviction.window
    votes = received(q, k, elsewhere)                           # (nkv, g, n)
    votes = votes.mean(1)[:, :len(k) - window]  # the window stays anyway
    return F.pad(pooled(votes, eviction), (0, window))          # (nkv, n)


def rkv(q, k, eviction, elsewhere=None):
    """0.1 importance - 0.9 redundancy (2505.24133, as in its code). Importance: for each of the
    last W queries the softmax over the candidates, all keys before the window, of the largest logit
    of the query heads; mean over the queries, pooled. So attention to anything else has no
    influence. Redundancy: softmax over all keys of their `similarity`."""
    def of_rows(rows, q, k, elsewhere):
        return logits(q, k).amax(1).softmax(-1).sum(1)          # (nkv, candidates)

    window = eviction.window
    candidates = k[:len(k) - window]
    importance = pooled(summed(of_rows, q, candidates) / len(q), eviction)
    redundancy = similarity(k).softmax(-1)[:, :len(candidates)]
    return F.pad(0.1 * importance - (1 - 0.1) * redundancy, (0, window))


def similarity(k, similar=0.5):
    """Mean cosine similarity of each key to all, (nkv, n). For each key the latest of those more
    than `similar` to it is not counted, so that of many alike the latest stays (R-KV)."""
    k = F.normalize(widen(k), dim=-1)                           # (n, nkv, hs)
    n = len(k)
    key = torch.arange(n, device=k.device)

    def of_rows(rows, some, k, elsewhere):
        cosine = some.transpose(0, 1) @ k.permute(1, 2, 0)      # (nkv, rows, n)
        cosine = cosine.masked_fill(key == key[rows, None], 0)  # a key to itself
        latest = torch.where(cosine > similar, key, 0)          # none: key 0, as in R-KV's code
        latest = latest.amax(-1, keepdim=True)                  # (nkv, rows, 1)
        return cosine.scatter(-1, latest, 0.0).sum(1) / n
    return summed(of_rows, k, k)


def h2o(q, k, eviction, elsewhere=None):
    """Attention that a key has received so far from all queries (2306.14048)."""
    return received(q, k, elsewhere).sum(1)


def recent(q, k, eviction, elsewhere=None):
    """The later the better: sinks plus a sliding window (StreamingLLM, 2309.17453)."""
    return torch.arange(len(k), device=k.device).float().expand(k.shape[1], -1)


def random(q, k, eviction, elsewhere=None):
    """A uniform choice for each KV head; the same positions in all prompts of one length, so that
    what a prompt keeps does not depend on its batch."""
    return torch.rand(k.shape[1], len(k)).to(k.device)


@dataclass(frozen=True)
class Method:
    """A function that scores keys, and what it needs: of a bare function what is said here."""
    score: Callable
    all_queries: bool = False     # it takes those of all rows; its scores add up over evictions
    needs_elsewhere: bool = True  # it weighs keys against others too: `elsewhere` is computed
    # it scores each KV head by itself, without drawing: several prompts may pass as further KV
    # heads, which saves launches
    by_head: bool = False

    def __call__(self, *inputs):
        return self.score(*inputs)


EVICT = {
    "none": None,
    "snapkv": Method(snapkv, by_head=True),
    "rkv": Method(rkv, needs_elsewhere=False, by_head=True),
    "h2o": Method(h2o, all_queries=True, by_head=True),
    "recent": Method(recent, needs_elsewhere=False),
    "random": Method(random, needs_elsewhere=False),
}


# How the budget is spread over layers: (eviction, layer, n_layer) -> keys per KV head of a layer

def uniform(eviction, layer, n_layer):
    return eviction.budget


def pyramid(eviction, layer, n_layer):
    """PyramidKV (2406.02069): what is free after window and sinks falls in a straight line from the
    first layer, 1.95 times the mean, to the last, 0.05 times."""
    fixed = eviction.window + eviction.sinks
    mean = eviction.budget - fixed
    first, step = (1.95, 1.9 / (n_layer - 1)) if n_layer > 1 else (1, 0)

    def free(layers):  # keys of the first so many layers together
        return round(mean * (first * layers - step * layers * (layers - 1) / 2))
    return fixed + free(layer + 1) - free(layer)


# and over the KV heads of a layer: (score (..., nkv, n), eviction) -> keys of each (..., nkv)

def adaptive(score, eviction):
    """Ada-KV (2407.11550): the KV heads of a layer compete for what is free after window and sinks;
    each keeps at least a fifth of the mean and at most twice.

    With two heads and 5 free keys each, the best 10 candidates of both win: of head 0 those that
    are among its first 1 whatever their scores, and none but its first 10; so of head 1."""
    nkv, n = score.shape[-2:]
    fixed = eviction.window + eviction.sinks
    free = eviction.budget - fixed
    score = score[..., eviction.sinks:n - eviction.window]      # (..., nkv, candidates)
    best_first = score.argsort(dim=-1, descending=True, stable=True)
    rank = best_first.argsort(dim=-1)                           # within its head
    always, never = rank < free // 5, rank >= 2 * free
    score = score.masked_fill(always, INF).masked_fill(never, -INF)
    winners = score.flatten(-2).topk(nkv * free).indices        # (..., nkv * free)
    head = (winners // score.shape[-1])[..., None]              # the KV head of each
    won = head == torch.arange(nkv, device=score.device)        # (..., nkv * free, nkv)
    return fixed + won.sum(-2)


SPREAD = {"uniform": uniform, "pyramid": pyramid, "adaptive": uniform}
HEAD_SPREAD = {"adaptive": adaptive}  # all layers alike, and the heads of each compete


def keep(score, K, window, sinks, count=None):
    """score (..., n) -> kept positions (..., K), ascending: sinks, window, the best of the rest; of
    equals the earlier key. Sinks and window stay whatever their scores are. count (...): keep fewer
    than K; what follows them is n."""
    n = score.shape[-1]
    score = score.nan_to_num(nan=0.0, posinf=3e38, neginf=-3e38)
    score[..., :sinks] = INF
    score[..., n - window:] = INF
    best = score.argsort(dim=-1, descending=True, stable=True)[..., :K]
    if count is not None:
        counted = torch.arange(K, device=best.device) < count[..., None]
        best = best.where(counted, n)
    return best.sort(dim=-1).values


class KVCache:
    """Keys and values of B prompts (compressed, shared by their group) and of S responses.

    config: of the model. lengths: prompt lengths in tokens. group: samples per prompt.
    max_new_tokens: longest response. What a decoding step reads and counts stays on the device, so
    that a CUDA graph can step."""

    def __init__(self, config, lengths, group, max_new_tokens, eviction, seed=0,
                 device="cpu", dtype=torch.float32):
        self.config = config
        self.lengths = list(lengths)
        self.eviction = eviction
        self.seed = seed
        method = EVICT[eviction.method]
        self.method = method if isinstance(method, Method) else Method(method)
        L, nkv, hs = config.n_layer, config.n_kv_head, config.head_size
        B, S, R = len(lengths), len(lengths) * group, max_new_tokens
        like = dict(device=device, dtype=dtype)
        # prompts: slots past what a prompt fills are padding. By layer, as budgets may differ
        self.slots = [[eviction.slots(layer, L, P) for P in lengths]
                      for layer in range(L)]
        room = [B * nkv * max(slots) * hs for slots in self.slots]
        all_layers = torch.zeros(2, sum(room), **like)  # at once, for fewer launches
        both = [x.view(2, B, nkv, -1, hs) for x in all_layers.split(room, dim=1)]
        self.prompt_k, self.prompt_v = map(list, zip(*both))
        filled = torch.tensor(self.slots, device=device, dtype=torch.int32)  # (L, B)
        self.prompt_filled = filled[..., None].repeat(1, 1, nkv)  # (L, B, nkv)
        self.response_k = torch.zeros(L, S, nkv, eviction.response_slots(R), hs, **like)
        self.response_v = torch.zeros_like(self.response_k)
        # response tokens fed; slots filled, as many in all samples
        self.t = torch.zeros((), device=device, dtype=torch.int64)
        self.response_filled = torch.zeros_like(self.t)
        self.edges = edges(lengths, device)                     # (B + 1,) rows
        # the log: kept, by layer (n, nkv, K) of some prompts after the other; until, the decoding
        # step at which a response key dies (R: never), which grpo.pack turns into a row
        self.kept = [[] for _ in self.slots]
        self.until = torch.full((L, S, nkv, R), R, device=device, dtype=torch.int32)
        self.finite = torch.ones((), device=device, dtype=torch.bool)  # are all scores?
        if eviction.response_budget is None:
            return
        # what choosing among response keys takes; nbytes does not count it. The last queries, that
        # of step u in slot u % voters
        most = eviction.period if self.method.all_queries else eviction.window
        voters = max(1, min(most, eviction.period, R - 1))
        self.queries = torch.zeros(L, S, voters, config.n_head, hs, **like)
        # by layer (S, nkv, held): the step at which each key was born; of a method that adds up,
        # its score so far
        nothing = torch.zeros(S, nkv, 0, device=device)
        self.born = [nothing.long()] * L
        self.past = [nothing] * L

    def write_pack(self, which, layer, q, k, v):
        """Compress n prompts at one layer. which: their indices, a slice. q (N, nh, hs), k, v (N,
        nkv, hs): rotated, one prompt after the other."""
        if self.method.score is snapkv and knows(self.eviction, k):
            return compress(self, which, layer, q, k=k, v=v)
        for same, rows in neighbours(self.lengths, which):
            self.write_prompts(same, layer, q[rows], k=k[rows], v=v[rows])

    def write_prompts(self, which, layer, q, k, v):
        """The same for prompts of one length P: q (n * P, nh, hs), k, v (n * P, nkv, hs)."""
        n, eviction = which.stop - which.start, self.eviction
        P, K = self.lengths[which.start], self.slots[layer][which.start]
        q, k, v = (x.unflatten(0, (n, P)) for x in (q, k, v))   # (n, P, heads, hs)
        if eviction.method == "none" or P <= eviction.budget_of(layer, len(self.slots)):
            kept = torch.arange(P, device=k.device).expand(n, k.shape[2], -1)
        else:
            W = P if self.method.all_queries else eviction.window
            score = self.scores(layer, 0, q[:, P - W:], k)      # (n, nkv, P)
            count = None
            if eviction.spread in HEAD_SPREAD:
                count = HEAD_SPREAD[eviction.spread](score, eviction)  # (n, nkv)
                self.prompt_filled[layer, which] = count.int()
            kept = keep(score, K, eviction.window, eviction.sinks, count=count)
        # slots that a KV head leaves empty (adaptive) hold P, which is no position: any key may
        # fill them, as decoding reads no further than prompt_filled
        position = kept.clamp(max=P - 1)[..., None]             # (n, nkv, K, 1)
        for x, store in ((k, self.prompt_k[layer]), (v, self.prompt_v[layer])):
            store[which, :, :K] = x.transpose(1, 2).take_along_dim(position, 2)  # no view of x
        self.kept[layer].append(kept)

    def scores(self, layer, t, q, k, elsewhere=None):
        """The method's scores of n prompts or samples, each by itself (fast/scores.py does several
        at once): q (n, W, nh, hs), k (n, keys, nkv, hs), elsewhere None or (n, nh, W)
        -> (n, nkv, keys)"""
        def score_one(q, k, *elsewhere):
            score = self.method.score(q, k, self.eviction, *elsewhere)
            want = k.shape[1], len(k)
            if score.shape != want:
                raise ValueError(f"{self.eviction.method} scored {tuple(score.shape)}, "
                                 f"not (KV heads, keys) = {want}")
            return score

        inputs = [q, k] if elsewhere is None else [q, k, elsewhere]
        if self.method.by_head:
            score = folded(score_one, *inputs)
        else:
            seed = hash((self.seed, layer, t)) % 2**63  # of ints: the same everywhere
            score = vmapped(score_one, *inputs, seed=seed)
        self.finite.logical_and_(score.isfinite().all())
        return widen(score)

    def attend(self, layer, q, k, v):
        """One decoding step at one layer: k, v (S, nkv, hs) are stored. q (S, nh, hs) -> same."""
        if self.eviction.response_budget is not None:
            queries = self.queries[layer]
            queries.index_copy_(1, self.t[None] % queries.shape[1], q[:, None])
        return decode_attention(
            q, k, v, prompt_k=self.prompt_k[layer], prompt_v=self.prompt_v[layer],
            n_kept=self.prompt_filled[layer], response_k=self.response_k[layer],
            response_v=self.response_v[layer], t=self.response_filled)

    def advance(self):
        """Call once per decoding step, after the last layer. In place: a CUDA graph counts too."""
        self.t.add_(1)
        self.response_filled.add_(1)

    # Response keys. Every `period` steps the same scoring function chooses among the keys held, for
    # each sample, layer and KV head. All samples hold equally many keys at any time, so there is
    # room for response_budget + period of them, however long the response. Of one sample, layer and
    # KV head, with response_budget=6, period=3, window=4 and 17 tokens (docs/lesson.md, part 8),
    # when 9 tokens were fed:
    #
    #     slot          0  1  2  3  4  5  6  7  8    six were held, three are new
    #     born          0  1  2  3  4  5  6  7  8    the step, which is the token's number
    #     stays         x  x  .  .  .  x  x  x  x    two by their scores, the window of four
    #     until        17 17  9  9  9 17 17 17 17    the query of step 8 saw them last; 17: never
    #
    # Those that stay move to the first slots; when 12 were fed, born is 0 1 5 6 7 8 9 10 11.

    def evict_responses(self, t):
        """Call when t response tokens were fed: every `period` steps, drop what is too much."""
        if self.eviction.response_budget is None or t % self.eviction.period:
            return
        for layer in range(self.config.n_layer):
            self.evict_layer(layer, t)
        self.response_filled.fill_(self.born[0].shape[2])

    def evict_layer(self, layer, t):
        """Score the keys held, log which die, move those that stay to the first slots."""
        method, K = self.method, self.eviction.response_budget
        new = torch.arange(t - self.eviction.period, t, device=self.t.device)
        held = self.born[layer]                                 # (S, nkv, held)
        born = torch.cat((held, new.expand(*held.shape[:2], -1)), dim=2)  # (S, nkv, n)
        n = born.shape[2]  # keys held now
        if n > K or method.all_queries:
            score = self.score_responses(layer, t, n)           # (S, nkv, n)
        if n > K:
            stay = keep(score, K, self.eviction.window, sinks=0)  # (S, nkv, K) slots
            # by slot: the others die now; R: never
            until = torch.full_like(born, t).scatter(2, stay, self.until.shape[3])
            self.until[layer].scatter_(2, born, until.int())    # slot s holds token born[s]
            for store in (self.response_k[layer], self.response_v[layer]):
                store[:, :, :K] = store.take_along_dim(stay[..., None], 2)
            born = born.gather(2, stay)                         # (S, nkv, K)
            score = score.gather(2, stay)
        self.born[layer] = born
        if method.all_queries:
            self.past[layer] = score

    def score_responses(self, layer, t, n):
        """The scores of the n keys held when t tokens were fed -> (S, nkv, n)"""
        voters = self.queries.shape[2]
        steps = torch.arange(t - voters, t, device=self.t.device)
        q = self.queries[layer][:, steps % voters]              # (S, voters, nh, hs)
        k = self.response_k[layer][:, :, :n].transpose(1, 2)    # (S, n, nkv, hs)
        elsewhere = None
        if self.method.needs_elsewhere:
            elsewhere = mass(q, self.prompt_k[layer], self.prompt_filled[layer])
        score = self.scores(layer, t, q, k, elsewhere=elsewhere)
        if self.method.all_queries:
            score = score + F.pad(self.past[layer], (0, self.eviction.period))
        return score

    def kept_positions(self):
        """The log of each prompt: (L, nkv, K) int64 where all layers and KV heads keep equally
        many, else lists [layer][KV head] of (K,). Index either by layer and KV head."""
        log = []
        for layers in zip(*self.kept):  # of the same prompts
            alike = len({kept.shape for kept in layers}) == 1
            log += torch.stack(layers, 1) if alike else map(list, zip(*layers))
        if self.eviction.spread in HEAD_SPREAD:
            return [[[kept[kept < P] for kept in heads] for heads in layers]
                    for P, layers in zip(self.lengths, log)]
        return log

    def nbytes(self):
        """Bytes of storage that hold keys and values, counted from the storages themselves."""
        tensors = [*self.prompt_k, *self.prompt_v, self.response_k, self.response_v]
        storages = [x.untyped_storage() for x in tensors]
        return sum({x.data_ptr(): x.nbytes() for x in storages}.values())
