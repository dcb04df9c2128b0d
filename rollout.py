"""
Sampling under a compressed KV cache, with all logged that the learner needs to be the same policy.

The idea. `generate` prefills every prompt densely, compresses its cache (kvcache.py), then decodes
G samples per prompt from the compressed cache, one token per sample and step. It records the
log-probability each token was drawn with, and which keys were dropped when: the Shadow Mask, which
grpo.py replays.

On a GPU the decoding step is recorded once per rollout as a CUDA graph (fast/record.py) and
replayed for every further token; between two replays the cache may evict response keys.

Left out on purpose: top-p and top-k (they cut the support and bias every ratio), beam search,
streaming.
"""
import operator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from fast.attention import make_plan
from fast.launch import kernels
from fast.record import record
from fast.sampling import sample_triton
from kvcache import Eviction, KVCache, NotFinite
from shadow_attn import shadow_attention


@dataclass
class Rollout:
    """B prompts, G responses each, up to R tokens; on the device of the model that sampled it."""
    prompts: list              # B lists of token ids
    tokens: torch.Tensor       # (B, G, R) int64, 0 past each length
    lengths: torch.Tensor      # (B, G) int64, the stop token counted
    logp_roll: torch.Tensor    # (B, G, R) fp32 (fp64 of a model in fp64), the sampler's log-probs,
                               # 0 past each length
    temperature: float         # of the sampler; 0: greedy, log-probs at temperature 1
    kept: list                 # of each prompt (L, nkv, K) int64: kept prompt positions, ascending;
                               # lists where K differs; kept[b][layer][head] is (K,) in any case
    until: torch.Tensor        # (L, nkv, B, G, R) int32: step at which a response key dies, or R
    stopped: torch.Tensor      # (B, G) bool: ended by a stop token rather than cut at R
    kv: dict = field(default_factory=dict)  # bytes: kept, dense, dense_shared; see kv_bytes
    sizes: list = None         # tokens of each prompt when it was sampled, or None: unknown
    rewards: torch.Tensor = None  # (B, G) once they are judged

    @property
    def mask(self):
        """(B, G, R) bool: which tokens are part of a response."""
        t = torch.arange(self.tokens.shape[2], device=self.tokens.device)
        return t < self.lengths[..., None]

    def select(self, prompts, samples=None):
        """The rollout of n prompts, given by index; of some samples (n, G') of each, or of all."""
        b = torch.as_tensor(prompts, device=self.tokens.device)
        chosen = b.tolist()
        b = b[:, None]                                                    # (n, 1)
        g = samples
        if samples is None:
            g = torch.arange(self.tokens.shape[1], device=b.device)[None]  # (1, G)
        sizes = None
        if self.sizes is not None:
            sizes = [self.sizes[i] for i in chosen]
        rewards = None
        if self.rewards is not None:
            rewards = self.rewards[b, g]
        return Rollout(
            prompts=[self.prompts[i] for i in chosen], kept=[self.kept[i] for i in chosen],
            sizes=sizes, rewards=rewards,
            tokens=self.tokens[b, g], lengths=self.lengths[b, g], stopped=self.stopped[b, g],
            logp_roll=self.logp_roll[b, g], temperature=self.temperature,
            until=self.until[:, :, b, g])


    def cut(self, ends):
        """The rollout whose responses end after ends (B, G) int64 tokens, as a stop token would
        have ended them; 0: as they are."""
        lengths = torch.where(ends > 0, ends, self.lengths)
        shorter = replace(self, lengths=lengths, stopped=self.stopped | (ends > 0))
        past = ~shorter.mask
        return replace(shorter, tokens=self.tokens.masked_fill(past, 0),
                       logp_roll=self.logp_roll.masked_fill(past, 0))


def join(rollouts):
    """Rollouts of different prompts, under the same settings, as one: the prompts follow each
    other. One alone comes back as it is."""
    if len(rollouts) == 1:
        return rollouts[0]
    together = {name: torch.cat([getattr(r, name) for r in rollouts])
                for name in ("tokens", "lengths", "logp_roll", "stopped")}
    lists = {name: sum((getattr(r, name) for r in rollouts), [])
             for name in ("prompts", "kept", "sizes")}
    return Rollout(
        **together, **lists, temperature=rollouts[0].temperature,
        until=torch.cat([r.until for r in rollouts], dim=2),
        kv={name: sum(r.kv[name] for r in rollouts) for name in rollouts[0].kv})


def draw_token(logits, temperature, rng, rows=None):
    """One token from softmax(logits / temperature) for each row of logits (S, V) fp32.
    -> tokens (S,), their log-probs (S,)

    The largest of log-probs plus Gumbel noise -log(e), e exponential, is an exact draw (the
    Gumbel-max trick). Temperature 0 takes the maximum, and its log-prob at temperature 1. rows:
    (number of the first, of all) where these are some of the rows: noise is drawn for all. On a GPU
    fast/sampling.py does this in one pass over the logits."""
    logp = (logits / (temperature or 1.0)).log_softmax(-1)                # (S, V)
    noisy = logp
    if temperature:
        first, n = rows or (0, len(logp))
        e = logp.new_empty(n, logp.shape[1]).exponential_(generator=rng)
        e = e[first:first + len(logp)]                                    # (S, V)
        noisy = logp - e.clamp_min_(torch.finfo(e.dtype).tiny).log_()
    token = noisy.argmax(-1)                                              # (S,)
    return token, logp.gather(1, token[:, None])[:, 0]


def prefill(model, cache, prompts, max_rows):
    """Run the prompts densely, packed into rows of about `max_rows` tokens, filling `cache`.
    -> logits (B, V) of each prompt's last token"""
    logits = []
    first = 0
    while first < len(prompts):
        last = first + 1
        while last < len(prompts) and sum(map(len, prompts[first:last + 1])) <= max_rows:
            last += 1
        logits.append(prefill_row(model, cache, prompts[first:last], first))
        first = last
    return torch.cat(logits)


def prefill_row(model, cache, prompts, first):
    """Prompts packed into one row; the first is number `first` of the cache. -> logits (n, V)"""
    sizes = [len(p) for p in prompts]
    n = torch.tensor(sizes, device=model.device)                          # (n,)
    ends = n.cumsum(0)                                                    # (n,)
    until = ends.repeat_interleave(n, output_size=sum(sizes)).int()       # (N,) the prompt's end
    until = until.expand(model.config.n_kv_head, -1).contiguous()         # (nkv, N)
    plan = make_plan(until, backward=False) if until.is_cuda else None    # once for all layers
    ids = torch.tensor([t for p in prompts for t in p], device=model.device)          # (N,)
    pos = torch.cat([torch.arange(size, device=model.device) for size in sizes])      # (N,)

    def attend(layer, q, k, v):
        row, b = 0, first
        for size, same in groupby(sizes):  # neighbours of one length together
            which = slice(b, b + len(list(same)))
            rows = slice(row, row + size * (which.stop - b))
            cache.write_prompts(which, layer, q[rows], k=k[rows], v=v[rows])
            row, b = rows.stop, which.stop
        # the output goes over q, which nobody needs any more; the dense keys go with this layer
        return shadow_attention(q, k, v, until, plan=plan, out=q if plan else None)

    hidden = model(ids, pos, attend)                                      # (N, C)
    return model.logits(hidden[ends - 1])


def check_request(model, prompts, group, max_new_tokens, temperature, prefill_rows, stop_ids,
                  seed, part):
    """-> prompts, stop_ids as lists of ints; number of the first sample, of all. Raises ValueError,
    naming the culprit, for a request that cannot be served as asked."""
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts must be a list of lists of token ids, got {prompts!r:.80}")
    if not prompts or group < 1 or max_new_tokens < 1:
        raise ValueError("need at least one prompt, sample and new token: got "
                         f"{len(prompts)}, {group}, {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    first, n = part or (0, len(prompts))
    if not 0 <= first <= n - len(prompts):
        raise ValueError(f"part must be (first, all), with {len(prompts)} prompts from the first "
                         f"on, got {part}")
    if prefill_rows < 1:
        raise ValueError(f"prefill_rows must be at least 1, got {prefill_rows}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")
    c = model.config
    prompts = [token_ids(f"prompt {b}", p, c.vocab_size) for b, p in enumerate(prompts)]
    for b, p in enumerate(prompts):
        if len(p) == 0:
            raise ValueError(f"prompt {b} is empty")
        if len(p) + max_new_tokens > c.max_pos:
            raise ValueError(f"prompt {b} has {len(p)} tokens; with {max_new_tokens} new ones that "
                             f"exceeds the context of {c.max_pos}")
    return prompts, token_ids("stop_ids", stop_ids, c.vocab_size), (first * group, n * group)


def token_ids(name, ids, vocab_size):
    """ids as a list of ints. Raises ValueError, saying whose they are, if they are none."""
    try:
        ids = [operator.index(token) for token in ids]
    except TypeError:
        raise ValueError(f"{name} must be a list of token ids, got {ids!r:.80}") from None
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, the vocabulary has {vocab_size}")
    return ids


@torch.no_grad()
def generate(model, prompts, group, max_new_tokens, temperature=1.0, evict="snapkv", budget=256,
             window=32, sinks=4, response_budget=None, period=128, stop_ids=(), seed=0, pool=7,
             prefill_rows=16384, eviction=None, part=None):
    """Sample `group` responses to each prompt under the compressed cache. -> Rollout

    prompts: B lists of token ids, ragged. temperature 0 is greedy. eviction: kvcache.Eviction, or
    the most used of its fields one by one; evict is the method. stop_ids: a response ends with the
    first of these, which is part of it. prefill_rows: prompt tokens per prefill pass. part: (number
    of the first prompt, of all) where others are sampled elsewhere: samples are as among all.
    Raises ValueError for what it cannot serve, NotFinite for NaN or inf in logits or scores."""
    if eviction is None:
        eviction = Eviction(method=evict, budget=budget, window=window, sinks=sinks, pool=pool,
                            response_budget=response_budget, period=period)
    prompts, stop_ids, rows = check_request(
        model, prompts, group, max_new_tokens=max_new_tokens, temperature=temperature,
        prefill_rows=prefill_rows, stop_ids=stop_ids, seed=seed, part=part)
    sizes = [len(p) for p in prompts]
    dev, S, R = model.device, len(prompts) * group, max_new_tokens
    cache = KVCache(model.config, lengths=sizes, group=group, max_new_tokens=R, eviction=eviction,
                    seed=seed, device=dev, dtype=model.dtype)
    rng = torch.Generator(device=dev).manual_seed(seed)
    stop = torch.tensor(sorted(stop_ids), device=dev, dtype=torch.int64)
    start = torch.tensor(sizes, device=dev).repeat_interleave(group)      # (S,) first position
    tokens = torch.zeros(S, R, dtype=torch.int64, device=dev)
    logps = torch.zeros(S, R, dtype=torch.promote_types(model.dtype, torch.float32), device=dev)
    new = torch.zeros(S, dtype=torch.int64, device=dev)                   # tokens drawn last

    def draw(logits):
        """Draw response token t of every sample. All in place and on the device: a CUDA graph
        records it once."""
        t = cache.t
        if kernels(logits) and logits.dtype == torch.float32:
            token, logp = sample_triton(logits, temperature, seed, t, first=rows[0])
        else:
            token, logp = draw_token(logits, temperature, rng, rows)
        tokens.index_copy_(1, t[None], token[:, None])
        logps.index_copy_(1, t[None], logp[:, None])
        new.copy_(token)

    def step():
        """Feed the tokens drawn last, then draw the next."""
        hidden = model(new, start + cache.t, cache.attend)                # (S, C)
        cache.advance()
        draw(model.logits(hidden))                                        # (S, V)

    draw(prefill(model, cache, prompts, prefill_rows).repeat_interleave(group, 0))
    run = step
    for t in range(1, R):
        # asking a card whether all have ended stalls it, so ask now and then; what is drawn in
        # between is dropped below
        asks = len(stop) and (dev.type == "cpu" or t % 8 == 0)
        if asks and (tokens[:, :t, None] == stop).any(2).any(1).all():
            break
        if t == 2 and dev.type == "cuda":  # the step before compiled and warmed up all there is
            run = record(step, dev)
        run()
        if t < R - 1:  # nothing is sampled after step R - 1
            cache.evict_responses(t)
    return logged(cache, prompts, group, temperature=temperature, tokens=tokens, logps=logps,
                  stop=stop)


def logged(cache, prompts, group, temperature, tokens, logps, stop):
    """Cut what was drawn, (S, R) each, after the first stop token, and add the cache's log."""
    (S, R), grid = tokens.shape, (len(prompts), group)
    ends = (tokens[..., None] == stop).any(-1)                            # (S, R)
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, R)       # (S,) with the stop token
    past = torch.arange(R, device=tokens.device) >= lengths[:, None]      # (S, R)
    logps = logps.masked_fill(past, 0)
    # asked once and not at every step: NaN or inf among its logits makes a token's log-prob NaN
    if not logps.isfinite().all():
        raise NotFinite("the model's logits hold NaN or inf: a weight is not finite, or training "
                        "diverged")
    if not cache.finite:
        method = cache.eviction.method
        raise NotFinite(f"eviction method {method!r} gave scores that are not finite")
    return Rollout(
        prompts=prompts, temperature=temperature, kept=cache.kept_positions(),
        sizes=[len(p) for p in prompts],
        tokens=tokens.masked_fill(past, 0).view(*grid, R),
        logp_roll=logps.view(*grid, R),
        lengths=lengths.view(grid), stopped=ends.any(1).view(grid),
        until=cache.until.unflatten(1, grid).permute(0, 3, 1, 2, 4).contiguous(),
        kv=kv_bytes(cache, sum(len(p) for p in prompts), group, S * (R - 1)))


def kv_bytes(cache, prompt, group, own):
    """Bytes of keys and values: kept by this cache, by a dense one, and by a dense one that shares
    each prompt within its group. prompt, own: tokens of all prompts, keys of all responses."""
    per_token = cache.config.kv_bytes_per_token(cache.response_k.dtype)
    return dict(kept=cache.nbytes(), dense=(prompt * group + own) * per_token,
                dense_shared=(prompt + own) * per_token)
