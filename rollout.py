"""
Sampling under a compressed KV cache, with all logged that the learner needs to be the same policy.

The idea. `generate` prefills every prompt densely, compresses its cache (kvcache.py), then decodes
G samples per prompt from the compressed cache, one token per sample and step. It records the
log-probability each token was drawn with, and which keys were dropped when: the Shadow Mask, which
grpo.py replays.

On a GPU the decoding step is recorded once per rollout as a CUDA graph (fast/record.py) and
replayed for every further token; between two replays the cache may evict response keys.

Left out: top-p and top-k (they cut the support and bias every ratio), beam search, continuous
batching: all samples step together, and one that has ended decodes on, unused, until all have. That
keeps one recorded step for all.

Letters in shapes: B prompts of P tokens, G samples of each, S = B * G in all, R response tokens at
most; N packed rows of width C, L layers, nkv KV heads, V token ids; t counts response tokens.
"""
from dataclasses import dataclass, field, replace

import torch

from fast.attention import make_plan
from fast.launch import kernels
from fast.record import KNOWN, kind_of, record
from fast.sampling import sample_triton
from kvcache import Eviction, KVCache, NotFinite
from shadow_attn import shadow_attention
from support.rollouts import check_log, check_model, check_request


@dataclass
class Rollout:
    """B prompts, G responses each, up to R tokens; on the device of the model that sampled it."""
    prompts: list               # B lists of token ids
    tokens: torch.Tensor        # (B, G, R) int64, 0 past each length
    lengths: torch.Tensor       # (B, G) int64, the stop token counted
    # (B, G, R) fp32 (fp64 of a model in fp64): the sampler's log-probs, 0 past each length
    logp_roll: torch.Tensor
    temperature: float          # of the sampler; 0: greedy, log-probs at temperature 1
    # of each prompt (L, nkv, K) int64: kept prompt positions, ascending; lists where K differs, so
    # that kept[b][layer][head] is (K,) in any case
    kept: list
    # (L, nkv, B, G, R) int32: the step at which a response key dies, or R. What the learner makes
    # of it, Packed.until, counts rows
    until: torch.Tensor
    stopped: torch.Tensor       # (B, G) bool: ended by a stop token, not cut at R
    kv: dict = field(default_factory=dict)  # bytes: kept, dense, dense_shared; see `logged`
    sizes: list = None          # tokens of each prompt as it was sampled; None: unknown
    rewards: torch.Tensor = None  # (B, G) once they are judged

    @property
    def mask(self):
        """(B, G, R) bool: which tokens are part of a response."""
        t = torch.arange(self.tokens.shape[2], device=self.tokens.device)
        return t < self.lengths[..., None]

    @property
    def sampled(self):
        """Where those are: prompt, sample and step, (n,) int64 each. To ask stalls a card."""
        return self.mask.nonzero(as_tuple=True)

    # they raise ValueError: for a log that does not fit the rollout; for a log or for tokens that a
    # model cannot have. check returns where the kept keys are
    check, check_model = check_log, check_model

    def select(self, prompts, samples=None):
        """The rollout of n prompts, given by index or by a slice, which takes no copy; of some
        samples (n, G') of each, or of all."""
        numbers = prompts
        if isinstance(prompts, slice):
            numbers = range(len(self.prompts))[prompts]
        if samples is not None or numbers is prompts or numbers.step < 0:
            prompts = torch.as_tensor(numbers, device=self.tokens.device)
            numbers = prompts.tolist()
        at = prompts, slice(None)
        if samples is not None:
            at = prompts[:, None], samples                      # (n, 1), (n, G')
        chosen = {name: getattr(self, name)[at]
                  for name in ("tokens", "lengths", "logp_roll", "stopped", "rewards")
                  if getattr(self, name) is not None}
        for name in ("prompts", "kept", "sizes"):
            if getattr(self, name) is not None:
                chosen[name] = [getattr(self, name)[i] for i in numbers]
        return replace(self, **chosen, until=self.until[:, :, at[0], at[1]], kv={})

    def cut(self, ends):
        """The rollout whose responses end after ends (B, G) tokens, as by a stop token; 0: as they
        are."""
        lengths = torch.where(ends > 0, ends, self.lengths)
        stopped = self.stopped | (ends > 0)
        shorter = replace(self, lengths=lengths, stopped=stopped)
        past = ~shorter.mask
        return replace(shorter, tokens=self.tokens.masked_fill(past, 0),
                       logp_roll=self.logp_roll.masked_fill(past, 0))


def join(rollouts):
    """Rollouts of different prompts, under the same settings, as one: the prompts follow each
    other. One alone comes back as it is."""
    if len(rollouts) == 1:
        return rollouts[0]
    together = {name: torch.cat([getattr(one, name) for one in rollouts])
                for name in ("tokens", "lengths", "logp_roll", "stopped")}
    lists = {name: sum((getattr(one, name) for one in rollouts), [])
             for name in ("prompts", "kept", "sizes")}
    return Rollout(
        **together, **lists, temperature=rollouts[0].temperature,
        until=torch.cat([one.until for one in rollouts], dim=2),
        kv={name: sum(one.kv[name] for one in rollouts) for name in rollouts[0].kv})


def draw_token(logits, temperature, rng, samples=None):
    """One token from softmax(logits / temperature) for each row of logits (S, V) fp32.
    -> tokens (S,), their log-probs (S,)

    The largest of log-probs plus Gumbel noise -log(e), e exponential, is an exact draw (the
    Gumbel-max trick). Temperature 0 takes the maximum, and its log-prob at temperature 1. samples:
    (number of the first, of all) where these are some of them: noise is drawn for all. On a GPU
    fast/sampling.py does this in one pass over the logits."""
    logp = (logits / (temperature or 1.0)).log_softmax(-1)      # (S, V)
    noisy = logp
    if temperature:
        S, V = logp.shape
        first, count = samples or (0, S)
        noise = logp.new_empty(count, V).exponential_(generator=rng)
        noise = noise[first:first + S]                          # (S, V)
        noisy = logp - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()
    token = noisy.argmax(-1)                                    # (S,)
    return token, logp.gather(1, token[:, None])[:, 0]


def prefill(model, cache, prompts, max_rows):
    """Run the prompts densely, about `max_rows` tokens in a packed sequence, filling `cache`.
    -> logits (B, V) of each prompt's last token"""
    logits = []
    first = rows = 0
    for last, prompt in enumerate(prompts):
        if last > first and rows + len(prompt) > max_rows:
            logits.append(prefill_pack(model, cache, prompts[first:last], first))
            first, rows = last, 0
        rows += len(prompt)
    logits.append(prefill_pack(model, cache, prompts[first:], first))
    return torch.cat(logits)


def prefill_pack(model, cache, prompts, first):
    """Prompts packed into one sequence, the first of which is number `first` -> logits (n, V)"""
    # built here and sent at once: on a card each small operation takes as long as a layer's
    n = torch.tensor([len(prompt) for prompt in prompts])       # (n,)
    ends = n.cumsum(0)                                          # (n,)
    start = (ends - n).repeat_interleave(n)                     # (N,)
    pos = torch.arange(len(start)) - start                      # (N,)
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    # every key lives to the end of its prompt
    rows = torch.stack((ids, pos, ends.repeat_interleave(n)))   # (3, N)
    ids, pos, until = rows.to(model.device)
    until = until.int().expand(model.config.n_kv_head, -1).contiguous()  # (nkv, N)
    plan = None
    if until.is_cuda:  # once for all layers
        plan = make_plan(until, backward=False)

    def attend(layer, q, k, v):
        cache.write_pack(slice(first, first + len(prompts)), layer, q, k=k, v=v)
        # the output goes over q, which nobody needs any more; the dense keys go with this layer
        return shadow_attention(q, k, v, until, plan=plan, out=q if plan else None)

    hidden = model(ids, pos, attend)                            # (N, C)
    return model.logits(hidden[(ends - 1).to(hidden.device)])


@torch.no_grad()
def generate(model, prompts, group, max_new_tokens, temperature=1.0, eviction=None,
             stop_ids=(), seed=0, prefill_rows=16384, part=None):
    """Sample `group` responses to each prompt under the compressed cache. -> Rollout

    prompts: B lists of token ids, ragged. temperature 0 is greedy. eviction: kvcache.Eviction;
    None: its defaults. stop_ids: a response ends with the first of these, which is part of it.
    prefill_rows: prompt tokens per prefill pass. part: (number of the first prompt, of all) where
    others are sampled elsewhere: samples are as among all. Raises ValueError for what it cannot
    serve, NotFinite for NaN or inf in logits or scores."""
    eviction = eviction or Eviction()
    prompts, stop_ids, samples = check_request(
        model, prompts, group, max_new_tokens=max_new_tokens, temperature=temperature,
        prefill_rows=prefill_rows, stop_ids=stop_ids, seed=seed, part=part)
    device = model.device
    S, R = len(prompts) * group, max_new_tokens
    sizes = [len(prompt) for prompt in prompts]
    cache = KVCache(model.config, lengths=sizes, group=group, max_new_tokens=R,
                    eviction=eviction, seed=seed, device=device, dtype=model.dtype)
    rng = torch.Generator(device=device).manual_seed(seed)
    stop = torch.tensor(sorted(stop_ids), device=device, dtype=torch.int64)
    # the position of the first response token
    start = torch.tensor(sizes, device=device).repeat_interleave(group)  # (S,)
    tokens = torch.zeros(S, R, dtype=torch.int64, device=device)
    fp32 = torch.promote_types(model.dtype, torch.float32)
    logps = torch.zeros(S, R, dtype=fp32, device=device)
    new = torch.zeros(S, dtype=torch.int64, device=device)      # tokens drawn last

    def draw(logits):
        """Draw response token t of every sample. All in place and on the device: a CUDA graph
        records it once."""
        t = cache.t
        if kernels(logits) and logits.dtype == torch.float32:
            token, logp = sample_triton(logits, temperature, seed, t, first=samples[0])
        else:
            token, logp = draw_token(logits, temperature, rng, samples)
        tokens.index_copy_(1, t[None], token[:, None])
        logps.index_copy_(1, t[None], logp[:, None])
        new.copy_(token)

    def step():
        """Feed the tokens drawn last, then draw the next."""
        hidden = model(new, start + cache.t, cache.attend)      # (S, C)
        cache.advance()
        draw(model.logits(hidden))                              # (S, V)

    draw(prefill(model, cache, prompts, prefill_rows).repeat_interleave(group, 0))
    run, kind = step, kind_of(model, cache, temperature, seed)
    for t in range(1, R):
        # asking a card whether all have ended stalls it, so ask now and then; what is drawn in
        # between is dropped below
        asks = len(stop) and (device.type == "cpu" or t % 8 == 0)
        if asks and (tokens[:, :t, None] == stop).any(2).any(1).all():
            break
        if device.type == "cuda" and t == (1 if kind in KNOWN else 2):
            run = record(step, device, kind)  # all is compiled: by step 1 or an earlier rollout
        run()
        if t < R - 1:  # nothing is sampled after step R - 1
            cache.evict_responses(t)
    return logged(cache, prompts, group, temperature=temperature, tokens=tokens,
                  logps=logps, stop=stop)


def logged(cache, prompts, group, temperature, tokens, logps, stop):
    """Cut what was drawn, (S, R) each, after the first stop token, and add the cache's log."""
    S, R = tokens.shape
    grid = len(prompts), group
    ends = (tokens[..., None] == stop).any(-1)                  # (S, R)
    stopped = ends.any(1)                                       # (S,)
    # with the stop token
    lengths = torch.where(stopped, ends.int().argmax(1) + 1, R)  # (S,)
    past = torch.arange(R, device=tokens.device) >= lengths[:, None]  # (S, R)
    tokens = tokens.masked_fill(past, 0)
    logps = logps.masked_fill(past, 0)
    # asked once and not at every step: NaN or inf among its logits makes a token's log-prob NaN
    if not logps.isfinite().all():
        why = "a weight is not finite, or training diverged"
        if cache.response_k.dtype == torch.float16:
            why = ("activations exceed 65,504, the largest float16, or training "
                   "diverged; try --dtype=bfloat16 or --dtype=float32")
        raise NotFinite(f"the model's logits hold NaN or inf: {why}")
    if not cache.finite:
        method = cache.eviction.method
        raise NotFinite(f"eviction method {method!r} gave scores that are not finite")
    until = cache.until.unflatten(1, grid)                      # (L, B, G, nkv, R)
    sizes = [len(prompt) for prompt in prompts]
    # bytes of keys and values: in this cache, in a dense one, in a dense one that shares each
    # prompt within its group
    per_token = cache.config.kv_bytes_per_token(cache.response_k.dtype)
    own = S * (R - 1)  # keys of all responses
    kv = dict(kept=cache.nbytes(), dense=(sum(sizes) * group + own) * per_token,
              dense_shared=(sum(sizes) + own) * per_token)
    return Rollout(
        prompts=prompts, sizes=sizes, kept=cache.kept_positions(),
        tokens=tokens.view(*grid, R), logp_roll=logps.view(*grid, R),
        lengths=lengths.view(grid), stopped=stopped.view(grid), temperature=temperature,
        until=until.permute(0, 3, 1, 2, 4).contiguous(),        # (L, nkv, B, G, R)
        kv=kv)
