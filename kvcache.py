"""
The compressed KV cache: which keys stay, how they are stored, and the log of what was dropped.

The idea. A prompt is prefilled densely, one layer at a time: attend to all keys, score them, copy
the best into the cache, let go of the rest before the next layer runs. So the last prompt token
still saw everything: response token 0 is dense, tokens 1.. see the kept keys only. What a prompt
keeps depends on the prompt alone, so the G samples of a group share one compressed prompt. Each
sample owns the keys of its response, which may be evicted too, every `period` steps. Kept keys
stay rotated to their true positions; nothing is renumbered.

A method is one function that scores the keys of one prompt (or of one sample's response) and one
line in EVICT. How the budget is spread over layers and KV heads is a choice of its own (SPREAD).

Departures. SnapKV (arXiv 2404.14469): attention sinks are protected (StreamingLLM, 2309.17453), the
query heads of a KV head vote together, pooling takes the largest (its LongBench settings; its class
defaults to the mean: pool_by). R-KV (2505.24133): sinks are protected too, the prompt, shared by
its group, is compressed once and each response by itself; lambda is the paper's 0.1 (its code:
0.07). H2O (2306.14048): one budget for heavy hitters and recent keys, of which `window` are recent,
all of them keys that are there (its code's recent budget counts the next token too); attention adds
up from `period` queries at a time. StreamingLLM: positions are not renumbered, and as prompt and
response have budgets of their own the prompt's last keys never slide out. PyramidKV (2406.02069):
its line over the layers, rounded so that together they keep n_layer x budget, if the prompt is
longer than the first layers' budget; what a shorter prompt leaves there is not given to the others,
as its code does. Ada-KV (2407.11550): no KV head keeps more than twice the mean of what is free, so
that storage stays rectangular; a fifth of the mean is a floor, where its code mixes a fifth of the
mean into each head's count; scores of different heads are compared as they are.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fast.decode_attn import decode_attention
from fast.head import matmul32
from fast.launch import widen


class NotFinite(ValueError, FloatingPointError):
    """NaN or inf in a method's scores or in a model's logits: a wrong argument to a caller, a run
    that diverged to train.py."""


@dataclass(frozen=True)
class Eviction:
    """Which keys a rollout keeps, counted in keys per layer and KV head. Raises ValueError for
    what cannot mean what it says."""
    method: str = "snapkv"   # a name in EVICT; "none" keeps all
    budget: int = 256        # prompt keys kept, window and sinks included
    window: int = 32         # the last keys: always kept, and it is their queries that vote
    sinks: int = 4           # the first keys, on which trained models park attention: always kept
    pool: int = 7            # odd width in keys over which SnapKV and R-KV pool their votes
    pool_by: str = "max"     # a name in POOL: the largest of neighbouring votes, or their mean
    response_budget: int | None = None  # response keys kept, window included; None: all
    period: int = 128        # decoding steps between evictions of response keys
    spread: str = "uniform"  # a name in SPREAD: how the budget is spread over layers and KV heads

    def __post_init__(self):
        method, window, sinks = self.method, self.window, self.sinks
        if method not in EVICT:
            raise ValueError(f"unknown eviction method {method!r}: choose from {', '.join(EVICT)}")
        if self.spread not in SPREAD:
            raise ValueError(f"unknown spread {self.spread!r}: choose from {', '.join(SPREAD)}")
        if self.pool_by not in POOL:
            raise ValueError(f"unknown pool_by {self.pool_by!r}: choose from {', '.join(POOL)}")
        if window < 1 or sinks < 0 or not 1 <= self.pool < 1000 or self.pool % 2 == 0:
            raise ValueError(f"window {window} must be at least 1, sinks {sinks} at least 0, "
                             f"pool {self.pool} odd and below 1000")
        if method != "none" and self.budget <= window + sinks:
            raise ValueError(f"budget {self.budget} must be above window + sinks = "
                             f"{window} + {sinks}, or no key is left to choose")
        if self.response_budget is None:
            return
        if method == "none":
            raise ValueError(f"response_budget {self.response_budget} evicts response keys: evict "
                             "must name a method, not 'none'")
        if self.response_budget <= window or self.period < 1:
            raise ValueError(f"response_budget {self.response_budget} must be above the window of "
                             f"{window}, and period {self.period} at least 1")


    def budget_of(self, layer, n_layer):
        """Keys per KV head of a layer, on average over its heads."""
        return SPREAD[self.spread](self, layer, n_layer)

    def evicts(self, P, R, n_layer):
        """Can any key of a prompt of P tokens, or of a response of R, be dropped before a token
        that would see it?"""
        if self.method == "none":
            return False
        if any(P > self.budget_of(layer, n_layer) for layer in range(n_layer)):
            return True
        # the last choice that counts is made before the last but one response token is fed
        last = (R - 2) // self.period * self.period
        return self.response_budget is not None and last > self.response_budget

    def slots(self, layer, n_layer, P):
        """Slots per KV head that a prompt of P tokens takes in a layer."""
        budget = self.budget_of(layer, n_layer)
        if self.method == "none" or P <= budget:
            return P
        if self.spread in BY_HEAD:  # one head may keep twice what is free
            budget += budget - self.window - self.sinks
        return min(P, budget)


# The scores of one prompt, or of one sample's response. Every function takes
#   q (W, nh, hs)   the queries of the last W rows: at most e.window, or all for ALL_QUERIES
#   k (n, nkv, hs)  the keys to choose from, in time order; both are rotated
#   e               the Eviction settings
#   elsewhere       None, or (nh, W): log-sum-exp of q . k / sqrt(hs) over keys that are not among
#                   k: the prompt's, where response keys are scored. `attention` takes it; methods
#                   in RELATIVE have no use for it
# and returns finite numbers (nkv, n): the highest stay. It runs under torch.vmap: it cannot see
# other prompts, must not branch on values nor fill a fresh tensor (stack instead); torch's CPU
# generator is seeded by (seed, layer, step) for it. spread = "adaptive" compares the numbers of the
# KV heads of a layer.

def logits(q, k):
    """q . k / sqrt(hs): (nkv, g, W, n) for the g = nh // nkv query heads of each KV head"""
    (W, nh, hs), (n, nkv, _) = q.shape, k.shape
    q = q.view(W, nkv, nh // nkv, hs).permute(1, 2, 0, 3)                 # (nkv, g, W, hs)
    s = matmul32(q.flatten(1, 2), k.permute(1, 2, 0))                     # (nkv, g * W, n)
    s = s.view(nkv, -1, W, n)
    s *= hs ** -0.5
    return s


def attention(q, k, elsewhere=None):
    """Softmax attention of the last W rows, each of which sees no later key.
    -> (nkv, g, W, n)"""
    W, n, nkv = len(q), *k.shape[:2]
    s = logits(q, k)                                                      # (nkv, g, W, n)
    row = torch.arange(n - W, n, device=q.device)  # of the queries, and of keys some may not see
    s[..., n - W:].masked_fill_(row > row[:, None], float("-inf"))
    if elsewhere is not None:  # one more key, whose share is dropped
        s = torch.cat((s, elsewhere.view(nkv, -1, W, 1)), dim=-1)         # (nkv, g, W, n + 1)
    return s.softmax(-1)[..., :n]


def snapkv(q, k, e, elsewhere=None):
    """Votes (2404.14469, eq. 5): the attention that a key receives from the last W queries, summed
    over them, averaged over the query heads of a KV head, and pooled over neighbouring keys, so
    that what belongs together stays together."""
    votes = received(q, k, elsewhere)                                     # (nkv, g, n)
    votes = votes.mean(1)[:, :len(k) - e.window]                          # the window stays anyway
    votes = pooled(votes, e)
    return F.pad(votes, (0, e.window))                                    # (nkv, n)


def rkv(q, k, e, elsewhere=None):
    """0.1 importance - 0.9 redundancy (2505.24133, as in its code). Importance: for each of the
    last W queries the softmax over the candidates, all keys before the window, of the largest logit
    of the query heads; mean over the queries, pooled. So attention to anything else has no
    influence. Redundancy: softmax over all keys of their `similarity`."""
    n = len(k) - e.window                                                 # candidates
    importance = pooled(relative(q, k[:n]), e)                            # (nkv, n)
    redundancy = similarity(k).softmax(-1)[:, :n]
    return F.pad(0.1 * importance - (1 - 0.1) * redundancy, (0, e.window))


def h2o(q, k, e, elsewhere=None):
    """Attention that a key has received so far from all queries (2306.14048)."""
    return received(q, k, elsewhere).sum(1)


def recent(q, k, e, elsewhere=None):
    """The later the better: sinks plus a sliding window (StreamingLLM, 2309.17453)."""
    return torch.arange(len(k), device=k.device).float().expand(k.shape[1], -1)


def random(q, k, e, elsewhere=None):
    """A uniform choice for each KV head; the same positions in all prompts of one length, so that
    what a prompt keeps does not depend on its batch."""
    return torch.rand(k.shape[1], len(k)).to(k.device)


EVICT = {"none": None, "snapkv": snapkv, "rkv": rkv, "h2o": h2o, "recent": recent, "random": random}
ALL_QUERIES = {"h2o"}  # get the queries of all rows; scores add up from one eviction to the next
RELATIVE = {"rkv"}  # weigh the scored keys against each other alone: `elsewhere` is never computed
# score a KV head by itself and draw nothing: prompts may pass as further KV heads, all in one call.
# It saves launches and changes no score; a new method need not be here
ALONE = {"snapkv", "rkv", "h2o"}


# How the budget is spread over the layers: (e, layer, n_layer) -> keys per KV head of that layer

def uniform(e, layer, n_layer):
    return e.budget


def pyramid(e, layer, n_layer):
    """PyramidKV (2406.02069): what is free after window and sinks falls in a straight line from the
    first layer, 1.95 times the mean, to the last, 0.05 times."""
    fixed = e.window + e.sinks
    top, slope = (1.95, 1.9 / (n_layer - 1)) if n_layer > 1 else (1, 0)

    def free(layers):  # keys of the first so many layers together
        return round((e.budget - fixed) * (top * layers - slope * layers * (layers - 1) / 2))
    return fixed + free(layer + 1) - free(layer)


def adaptive(score, e):
    """Ada-KV (2407.11550): the KV heads of a layer compete for what is free after window and sinks;
    each keeps at least a fifth of the mean and at most twice. score (..., nkv, n) -> (..., nkv)"""
    nkv, n = score.shape[-2:]
    free = e.budget - e.window - e.sinks
    s = score[..., e.sinks:n - e.window]                                  # (..., nkv, candidates)
    rank = s.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # within its head
    s = s.masked_fill(rank < free // 5, float("inf")).masked_fill(rank >= 2 * free, float("-inf"))
    best = s.flatten(-2).topk(nkv * free).indices // s.shape[-1]          # KV head of each winner
    won = best[..., None] == torch.arange(nkv, device=score.device)       # (..., winners, nkv)
    return e.window + e.sinks + won.sum(-2)


SPREAD = {"uniform": uniform, "pyramid": pyramid, "adaptive": uniform}
BY_HEAD = {"adaptive": adaptive}  # and over the KV heads of a layer: (score, e) -> keys of each


def keep(score, K, window, sinks, count=None):
    """score (..., n) -> kept positions (..., K), ascending: sinks, window, the best of the rest; of
    equals the earlier key. Sinks and window stay whatever their scores are. count (...): keep fewer
    than K; what follows them is n."""
    n = score.shape[-1]
    score = score.nan_to_num(nan=0.0, posinf=3e38, neginf=-3e38)
    score[..., :sinks] = float("inf")
    score[..., n - window:] = float("inf")
    best = score.argsort(dim=-1, descending=True, stable=True)[..., :K]
    if count is not None:
        best = best.where(torch.arange(K, device=best.device) < count[..., None], n)
    return best.sort(dim=-1).values


class KVCache:
    """Keys and values of B prompts (compressed, shared by their group) and S = B x group responses.

    config: model.Config. lengths: prompt lengths in tokens. group: samples per prompt.
    max_new_tokens: longest response. eviction: Eviction. What a decoding step reads and counts
    stays on the device, so that a CUDA graph can step."""

    def __init__(self, config, lengths, group, max_new_tokens, eviction, seed=0, device="cpu",
                 dtype=torch.float32):
        self.config, self.lengths, self.eviction, self.seed = config, list(lengths), eviction, seed
        L, nkv, hs = config.n_layer, config.n_kv_head, config.head_size
        B, S, R = len(lengths), len(lengths) * group, max_new_tokens
        like = dict(device=device, dtype=dtype)
        # prompts: slots past what a prompt fills are padding. By layer, as budgets may differ
        self.slots = [[eviction.slots(layer, L, P) for P in lengths] for layer in range(L)]
        self.prompt_k = [torch.zeros(B, nkv, max(slots), hs, **like) for slots in self.slots]
        self.prompt_v = [torch.zeros_like(k) for k in self.prompt_k]
        filled = torch.tensor(self.slots, device=device, dtype=torch.int32)         # (L, B)
        self.prompt_filled = filled[..., None].repeat(1, 1, nkv)                    # (L, B, nkv)
        # responses: the last sampled token is never fed back, so R tokens have R - 1 keys
        slots = R - 1
        if eviction.response_budget is not None:
            slots = min(slots, eviction.response_budget + eviction.period)
        self.response_k = torch.zeros(L, S, nkv, slots, hs, **like)
        self.response_v = torch.zeros_like(self.response_k)
        self.response_filled = torch.zeros((), device=device, dtype=torch.int64)    # in all samples
        self.t = torch.zeros_like(self.response_filled)                  # response tokens fed
        # the log
        self.kept = [[None] * L for _ in lengths]                        # [prompt][layer] (nkv, K)
        self.until = torch.full((L, S, nkv, R), R, device=device, dtype=torch.int32)
        self.finite = torch.ones((), device=device, dtype=torch.bool)    # was every score so far?
        if eviction.response_budget is not None:
            self.prepare_response_eviction(S, R, like)

    def write_prompts(self, which, layer, q, k, v):
        """Compress prompts of one length at one layer. which: their indices, a slice.
        q (n * P, nh, hs), k, v (n * P, nkv, hs): rotated, one prompt after the other."""
        e, P, n = self.eviction, self.lengths[which.start], which.stop - which.start
        q, k, v = (x.unflatten(0, (n, P)) for x in (q, k, v))            # (n, P, heads, hs)
        K, nkv = self.slots[layer][which.start], k.shape[2]
        if e.method == "none" or P <= e.budget_of(layer, self.config.n_layer):
            kept = torch.arange(P, device=k.device).expand(n, nkv, -1)
        else:
            W = P if e.method in ALL_QUERIES else e.window
            score = self.scores(layer, 0, q[:, P - W:], k)               # (n, nkv, P)
            count = None
            if e.spread in BY_HEAD:
                count = BY_HEAD[e.spread](score, e)                      # (n, nkv)
                self.prompt_filled[layer, which] = count.int()
            kept = keep(score, K, e.window, e.sinks, count=count)        # (n, nkv, K)
        index = kept[..., None].clamp(max=P - 1).expand(-1, -1, -1, k.shape[3])
        # copies: no view keeps the dense keys alive
        self.prompt_k[layer][which, :, :K] = k.transpose(1, 2).gather(2, index)
        self.prompt_v[layer][which, :, :K] = v.transpose(1, 2).gather(2, index)
        for i in range(n):
            self.kept[which.start + i][layer] = kept[i]                  # (nkv, K)

    def scores(self, layer, t, q, k, elsewhere=None):
        """The method's scores of n prompts or samples, each by itself: q (n, W, nh, hs), k
        (n, keys, nkv, hs), elsewhere None or (n, nh, W) -> (n, nkv, keys)."""
        (n, W, nh, _), (_, keys, nkv, _) = q.shape, k.shape
        method, inputs = self.eviction.method, [q, k]
        if elsewhere is not None:
            inputs.append(elsewhere)

        def one(q, k, *elsewhere):
            score = EVICT[method](q, k, self.eviction, *elsewhere)
            if score.shape != (k.shape[1], keys):
                raise ValueError(f"{method} scored {tuple(score.shape)}, not (KV heads, keys) = "
                                 f"{(k.shape[1], keys)}")
            return score

        def seeded(*inputs):
            torch.default_generator.manual_seed(hash((self.seed, layer, t)) % 2**63)
            return one(*inputs)

        if method in ALONE:  # the same scores as below, in a fifth of the launches
            q, k = q.transpose(0, 1).flatten(1, 2), k.transpose(0, 1).flatten(1, 2)
            score = one(q, k, *(x.flatten(0, 1) for x in inputs[2:]))    # (n * nkv, keys)
            score = score.unflatten(0, (n, nkv))
        else:
            at_once = max(1, SCORE_BYTES // (4 * W * nh * keys))
            inputs[:2] = q.clone(), k.clone()  # whoever writes into them must not change the cache
            with torch.random.fork_rng(devices=[]):
                score = torch.vmap(seeded, chunk_size=at_once, randomness="same")(*inputs)
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
    # room for response_budget + period of them, however long the response.

    def prepare_response_eviction(self, S, R, like):
        """What choosing takes beside the keys; nbytes does not count it."""
        c, e = self.config, self.eviction
        voters = e.period if e.method in ALL_QUERIES else min(e.window, e.period)
        voters = max(1, min(voters, R - 1))
        # the last queries, that of step u in slot u % voters
        self.queries = torch.zeros(c.n_layer, S, voters, c.n_head, c.head_size, **like)
        nothing = torch.zeros(S, c.n_kv_head, 0, device=like["device"])
        # by layer (S, nkv, held): step at which each key was born; its score so far (ALL_QUERIES)
        self.born = [nothing.long()] * c.n_layer
        self.past = [nothing] * c.n_layer

    def evict_responses(self, t):
        """Call when t response tokens were fed: every `period` steps, drop what is too much."""
        e = self.eviction
        if e.response_budget is None or t % e.period:
            return
        for layer in range(self.config.n_layer):
            self.evict_layer(layer, t)
        self.response_filled.fill_(self.born[0].shape[2])

    def evict_layer(self, layer, t):
        """Score the keys held, log which die, move those that stay to the first slots."""
        e, K = self.eviction, self.eviction.response_budget
        adds_up = e.method in ALL_QUERIES
        S, nkv, held = self.born[layer].shape
        n = held + e.period                                              # keys held now
        fresh = torch.arange(t - e.period, t, device=self.t.device).expand(S, nkv, -1)
        born = torch.cat((self.born[layer], fresh), dim=2)               # (S, nkv, n)
        if n > K or adds_up:
            voters = self.queries.shape[2]
            steps = torch.arange(t - voters, t, device=self.t.device)
            q = self.queries[layer][:, steps % voters]                   # (S, voters, nh, hs)
            k = self.response_k[layer][:, :, :n].transpose(1, 2)         # (S, n, nkv, hs)
            elsewhere = None
            if e.method not in RELATIVE:
                elsewhere = self.prompt_mass(layer, q)                   # (S, nh, voters)
            score = self.scores(layer, t, q, k, elsewhere=elsewhere)     # (S, nkv, n)
        if adds_up:
            score = score + F.pad(self.past[layer], (0, e.period))
            self.past[layer] = score
        if n > K:
            stay = keep(score, K, e.window, sinks=0)                     # (S, nkv, K) slots
            never = self.until.shape[3]
            dies = torch.full_like(born, t).scatter_(2, stay, never)     # step t - 1 saw it last
            self.until[layer].scatter_(2, born, dies.int())
            index = stay[..., None].expand(-1, -1, -1, self.config.head_size)
            for store in (self.response_k[layer], self.response_v[layer]):
                store[:, :, :K] = store.gather(2, index)
            born = born.gather(2, stay)
            if adds_up:
                self.past[layer] = score.gather(2, stay)
        self.born[layer] = born

    def prompt_mass(self, layer, q):
        """q (S, W, nh, hs) -> (S, nh, W) fp32: log-sum-exp of scores on the prompt's kept keys."""
        (S, W, nh, hs), (B, nkv, K, _) = q.shape, self.prompt_k[layer].shape
        q = q.view(B, S // B, W, nkv, nh // nkv, hs).permute(0, 3, 1, 4, 2, 5)
        padding = torch.arange(K, device=q.device) >= self.prompt_filled[layer][..., None]
        mass = []
        for b in range(B):
            k = self.prompt_k[layer][b].transpose(1, 2)                  # (nkv, hs, K)
            s = matmul32(q[b].flatten(1, 3), k) * hs ** -0.5             # (nkv, G * g * W, K)
            s = s.masked_fill(padding[b, :, None], float("-inf"))
            mass.append(s.logsumexp(-1).view(nkv, S // B, -1, W))        # (nkv, G, g, W)
        return torch.stack(mass).transpose(1, 2).reshape(S, nh, W)

    def kept_positions(self):
        """The log of each prompt: (L, nkv, K) int64 where all layers and KV heads keep equally
        many, else lists [layer][KV head] of (K,). Index either by layer and KV head."""
        out = []
        for P, layers in zip(self.lengths, self.kept):
            if self.eviction.spread in BY_HEAD:
                layers = [[kept[kept < P] for kept in heads] for heads in layers]
            elif len({heads.shape for heads in layers}) == 1:
                layers = torch.stack(layers)
            out.append(layers)
        return out

    def nbytes(self):
        """Bytes of storage that hold keys and values, counted from the storages themselves."""
        tensors = [*self.prompt_k, *self.prompt_v, self.response_k, self.response_v]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())


# What scores are made of, a slice at a time: attention of many queries to a long prompt is large

SCORE_BYTES = 32 * 2**20  # fp32 attention (or similarity) held at a time, about twice


def slice_sizes(q, k):
    """-> query heads per KV head; KV heads whose attention is held at a time; queries of one KV
    head, where even its attention is too large"""
    (W, nh, _), (n, nkv, _) = q.shape, k.shape
    g = nh // nkv
    return g, max(1, SCORE_BYTES // (4 * g * W * n)), max(1, min(W, SCORE_BYTES // (4 * g * n)))


def received(q, k, elsewhere=None):
    """attention(q, k, elsewhere) summed over its queries -> (nkv, g, n)"""
    W, (n, nkv, _) = len(q), k.shape
    g, heads, rows = slice_sizes(q, k)
    total = []
    for h in range(0, nkv, heads):
        mine = slice(h * g, (h + heads) * g)                             # query heads
        part = 0
        for lo in range(0, W, rows):
            hi = min(lo + rows, W)
            seen = n - W + hi                                            # none of these sees more
            z = None if elsewhere is None else elsewhere[mine, lo:hi]
            att = attention(q[lo:hi, mine], k[:seen, h:h + heads], z)
            part = part + F.pad(att.sum(2), (0, n - seen))               # (heads, g, n)
        total.append(part)
    return torch.cat(total)


def relative(q, k):
    """Softmax over all of k, for each query, of the largest logit of the query heads, averaged over
    the queries -> (nkv, n)"""
    W, nkv = len(q), k.shape[1]
    g, heads, rows = slice_sizes(q, k)
    total = []
    for h in range(0, nkv, heads):
        part = 0
        for lo in range(0, W, rows):
            some = q[lo:lo + rows, h * g:(h + heads) * g]
            s = logits(some, k[:, h:h + heads]).amax(1)                  # (heads, rows, n)
            part = part + s.softmax(-1).sum(1)                           # (heads, n)
        total.append(part / W)
    return torch.cat(total)


def pooled(x, e):
    """(nkv, n): each key gets the largest, or the mean, of e.pool neighbouring scores; for the
    mean those past either end count as 0, as in SnapKV's code."""
    return POOL[e.pool_by](x[None], e.pool, stride=1, padding=e.pool // 2)[0]


POOL = {"max": F.max_pool1d, "mean": F.avg_pool1d}


def similarity(k, similar=0.5):
    """Mean cosine similarity of each key to all, (nkv, n). For each key the latest of those more
    than `similar` to it is not counted, so that of many alike the latest stays (R-KV)."""
    k = F.normalize(widen(k), dim=-1).transpose(0, 1)                    # (nkv, n, hs)
    nkv, n, _ = k.shape
    row = torch.arange(n, device=k.device)
    heads, rows = max(1, SCORE_BYTES // (4 * n * n)), max(1, min(n, SCORE_BYTES // (4 * n)))
    total = []
    for part in k.split(heads):
        mean = 0
        for lo in range(0, n, rows):
            s = part[:, lo:lo + rows] @ part.transpose(1, 2)             # (heads, rows, n)
            s = s.masked_fill(row == row[lo:lo + rows, None], 0)         # not with itself
            latest = torch.where(s > similar, row, 0).amax(-1, keepdim=True)  # key 0 if none is
            mean = mean + s.scatter(-1, latest, 0.0).sum(1) / n          # (heads, n)
        total.append(mean)
    return torch.cat(total)
