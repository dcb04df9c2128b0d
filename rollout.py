"""
Sampling under a compressed KV cache, with everything logged that the learner needs to become the same policy.

The idea. `generate` prefills every prompt densely, compresses its cache (kvcache.py), then decodes G samples per prompt from
the compressed cache, one token per sample and step. It records the log-probability each token was drawn with, and which
keys were dropped when: the Shadow Mask, which grpo.py replays.

On a GPU the decoding step is recorded once per rollout as a CUDA graph and replayed for every further token; between two
replays the cache may evict response keys.

Left out on purpose: top-p and top-k (they cut the support and bias every ratio), beam search, streaming.
"""
from dataclasses import dataclass, field
from itertools import groupby

import torch

from fast.launch import kernels
from fast.sampling import sample_triton
from kvcache import Eviction, KVCache
from shadow_attn import prepare, shadow_attention


@dataclass
class Rollout:
    """B prompts, G responses each, up to R tokens; on the device of the model that sampled it."""
    prompts: list              # B lists of token ids
    tokens: torch.Tensor       # (B, G, R) int64, 0 past each length
    lengths: torch.Tensor      # (B, G) int64, the stop token counted
    logp_roll: torch.Tensor    # (B, G, R) fp32, the sampler's log-probs at `temperature`, 0 past each length
    temperature: float         # 0: greedy, log-probs at temperature 1
    kept: list                 # B x (L, nkv, K) int64, kept prompt positions, ascending; a list of L (nkv, K) where K differs by layer
    until: torch.Tensor        # (L, nkv, B, G, R) int32: response step at which each response key dies; R: never
    stopped: torch.Tensor      # (B, G) bool: ended by a stop token rather than cut at R
    kv: dict = field(default_factory=dict)  # KV bytes: kept, dense, dense with the prompt shared by its group

    @property
    def mask(self):
        """(B, G, R) bool: which tokens are part of a response."""
        return torch.arange(self.tokens.shape[2], device=self.tokens.device) < self.lengths[:, :, None]

    def select(self, prompts, samples=None):
        """The rollout of some of the prompts, given by index; of their samples (n, G') if given, else of all."""
        b = torch.as_tensor(prompts, device=self.tokens.device)                             # (n,)
        g = torch.arange(self.tokens.shape[1], device=b.device)[None] if samples is None else samples
        b = b[:, None]
        chosen = b.flatten().tolist()
        return Rollout(
            prompts=[self.prompts[i] for i in chosen], tokens=self.tokens[b, g], lengths=self.lengths[b, g],
            logp_roll=self.logp_roll[b, g], temperature=self.temperature, kept=[self.kept[i] for i in chosen],
            until=self.until[:, :, b, g], stopped=self.stopped[b, g])


def draw_token(logits, temperature, rng):
    """One token from softmax(logits / temperature) for each row of logits (S, V) fp32 -> tokens (S,), their log-probs (S,).

    The largest of log-probs plus Gumbel noise -log(e), e exponential, is an exact draw (the Gumbel-max trick). Temperature 0
    takes the maximum, and its log-prob at temperature 1. On a GPU fast/sampling.py does this in one pass over the logits."""
    logp = (logits / (temperature or 1.0)).log_softmax(-1)                                   # (S, V)
    noisy = logp
    if temperature:
        e = torch.empty_like(logp).exponential_(generator=rng)
        noisy = logp - e.clamp_min_(torch.finfo(e.dtype).tiny).log_()
    token = noisy.argmax(-1)                                                                 # (S,)
    return token, logp.gather(1, token[:, None])[:, 0]


def prefill(model, cache, prompts, max_rows):
    """Run the prompts densely, packed into rows of about `max_rows` tokens, filling `cache`. -> last tokens' logits (B, V)"""
    logits = []
    first = 0
    while first < len(prompts):
        last = first + 1
        while last < len(prompts) and sum(map(len, prompts[first:last + 1])) <= max_rows:
            last += 1
        logits.append(prefill_pass(model, cache, prompts[first:last], first))
        first = last
    return torch.cat(logits)                                                                 # (B, V)


def prefill_pass(model, cache, prompts, first):
    """Prompts that fit into one packed row, of which the first is number `first` of the cache. -> logits (n, V)"""
    sizes = [len(p) for p in prompts]
    n = torch.tensor(sizes, device=model.device)                                             # (n,)
    ends = n.cumsum(0)                                                                       # (n,) a key dies where its prompt ends
    until = ends.repeat_interleave(n, output_size=sum(sizes)).int()                          # (N,)
    until = until.expand(model.config.n_kv_head, -1).contiguous()                            # (nkv, N)
    plan = prepare(until, backward=False) if until.is_cuda else None                         # once for all layers
    ids = torch.tensor([t for p in prompts for t in p], device=model.device)                 # (N,)
    pos = torch.cat([torch.arange(size, device=model.device) for size in sizes])             # (N,)

    def attend(layer, q, k, v):
        row, b = 0, first
        for size, same in groupby(sizes):  # neighbours of one length together
            which = slice(b, b + len(list(same)))
            rows = slice(row, row + size * (which.stop - b))
            cache.write_prompts(which, layer, q[rows], k[rows], v[rows])
            row, b = rows.stop, which.stop
        # the output goes over q, which nobody needs any more: the dense keys go when this layer is done
        return shadow_attention(q, k, v, until, plan=plan, out=q if plan else None)

    hidden = model(ids, pos, attend)                                                         # (N, C)
    return model.logits(hidden[ends - 1])                                                    # (n, V)


def check_request(model, prompts, group, max_new_tokens, temperature, prefill_rows):
    """Raise ValueError, naming the culprit, for a request that cannot be served as asked."""
    if not prompts or group < 1 or max_new_tokens < 1:
        raise ValueError(f"need at least one prompt, sample and new token: got {len(prompts)}, {group}, {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if prefill_rows < 1:
        raise ValueError(f"prefill_rows must be at least 1, got {prefill_rows}")
    c = model.config
    for b, p in enumerate(prompts):
        if len(p) == 0:
            raise ValueError(f"prompt {b} is empty")
        if len(p) + max_new_tokens > c.max_pos:
            raise ValueError(f"prompt {b} has {len(p)} tokens; with {max_new_tokens} new ones that exceeds the context of "
                             f"{c.max_pos}")
        for token in (min(p), max(p)):
            if not 0 <= token < c.vocab_size:
                raise ValueError(f"prompt {b} holds token id {token}, the vocabulary has {c.vocab_size}")


def record(step, device):
    """Record the kernels that step() launches on a card in a CUDA graph, without running them. -> a function that runs them at once

    Decoding launches hundreds of kernels per token that last a few microseconds each: launched one by one, the host is the
    limit. What changes from token to token (slot, position, random numbers) must be read from the device, nothing in step()
    may wait for it, and every tensor that step() reads or writes must live at the same address until the last replay:
    generate's frame holds them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate(model, prompts, group, max_new_tokens, temperature=1.0, evict="snapkv", budget=256, window=32, sinks=4,
             response_budget=None, period=128, stop_ids=(), seed=0, pool=7, prefill_rows=16384, eviction=None):
    """Sample `group` responses to each prompt under the compressed cache. prompts: B lists of token ids, ragged. -> Rollout

    temperature 0 is greedy, for evaluation. eviction: a kvcache.Eviction; or its fields one by one, evict being the method.
    stop_ids: a response ends with the first of these, which is part of it. Decoding ends when every sample has ended.
    prefill_rows: prompt tokens per prefill pass. Raises ValueError for settings or prompts it cannot serve, and for a
    scoring function whose scores are not finite."""
    if eviction is None:
        eviction = Eviction(method=evict, budget=budget, window=window, sinks=sinks, pool=pool,
                            response_budget=response_budget, period=period)
    check_request(model, prompts, group, max_new_tokens, temperature, prefill_rows)
    prompts = [list(p) for p in prompts]
    c, dev = model.config, model.device
    B, S, R = len(prompts), len(prompts) * group, max_new_tokens
    cache = KVCache(c, [len(p) for p in prompts], group, R, eviction, seed=seed, device=dev, dtype=model.dtype)
    rng = torch.Generator(device=dev).manual_seed(seed)
    stop = torch.tensor(sorted(stop_ids), device=dev, dtype=torch.int64)
    start = torch.tensor([len(p) for p in prompts], device=dev).repeat_interleave(group)     # (S,) first position of a response
    tokens = torch.zeros(S, R, dtype=torch.int64, device=dev)
    logps = torch.zeros(S, R, dtype=torch.float32, device=dev)
    done = torch.zeros(S, dtype=torch.bool, device=dev)
    new = torch.zeros(S, dtype=torch.int64, device=dev)                                      # tokens drawn last

    def draw(logits):
        """Draw response token t of every sample. All in place and on the device: a CUDA graph records it once."""
        t = cache.t
        if kernels(logits) and logits.dtype == torch.float32:
            token, logp = sample_triton(logits, temperature, seed, t)
        else:
            token, logp = draw_token(logits, temperature, rng)
        tokens.index_copy_(1, t[None], token[:, None])
        logps.index_copy_(1, t[None], logp[:, None])
        new.copy_(token)
        if len(stop):
            done.logical_or_((token[:, None] == stop).any(1))  # isin may wait for the device, which a recording must not

    def step():
        """Feed the tokens drawn last, then draw the next."""
        hidden = model(new, start + cache.t, cache.attend)                                   # (S, C)
        cache.advance()
        draw(model.logits(hidden))                                                           # (S, V)

    draw(prefill(model, cache, prompts, prefill_rows).repeat_interleave(group, 0))           # each sample draws on its own
    run = step
    for t in range(1, R):
        # asking the device whether all are done stalls it, so ask now and then; what is drawn in between is dropped below
        if len(stop) and (dev.type == "cpu" or t % 8 == 0) and bool(done.all()):
            break
        if t == 2 and dev.type == "cuda":  # the step before has compiled and warmed up all there is
            run = record(step, dev)
        run()
        if t < R - 1:  # nothing is sampled after step R - 1
            cache.evict_responses(t)
    if not cache.finite:
        raise ValueError(f"{eviction.method} gave scores that are not finite")

    ends = torch.isin(tokens, stop) if len(stop) else torch.zeros_like(tokens, dtype=torch.bool)  # (S, R)
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, R)                          # (S,) the first stop token counts
    past = torch.arange(R, device=dev) >= lengths[:, None]                                   # (S, R)
    return Rollout(
        prompts=prompts, tokens=tokens.masked_fill_(past, 0).view(B, group, R), lengths=lengths.view(B, group),
        logp_roll=logps.masked_fill_(past, 0).view(B, group, R), temperature=temperature, kept=cache.kept_positions(),
        until=cache.until.unflatten(1, (B, group)).permute(0, 3, 1, 2, 4).contiguous(),      # (L, nkv, B, G, R)
        stopped=ends.any(1).view(B, group), kv=kv_bytes(cache, prompts, group, R, c.kv_bytes_per_token(model.dtype)))


def kv_bytes(cache, prompts, group, R, per_token):
    """Bytes of keys and values that the rollout held, that a dense cache holds, and one that shares each prompt within its group."""
    prompt, own = sum(len(p) for p in prompts), len(prompts) * group * (R - 1)               # tokens
    return dict(kept=cache.nbytes(), dense=(prompt * group + own) * per_token, dense_shared=(prompt + own) * per_token)
