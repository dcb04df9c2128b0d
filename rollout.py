"""
Sampling under a compressed KV cache, and packing what was sampled for the learner.

The idea. `generate` prefills every prompt densely, compresses its cache (kvcache.py), then decodes G samples per prompt
from the compressed cache, one token per sample and step, and records the log-probability each token was drawn with.
`pack` lays groups out in one long row,

    [ prompt | dense copies of the G responses | shadow copies of the G responses ] [ next prompt | ...

and gives every key of every layer and KV head the row at which it dies. One forward pass under these lifetimes then
scores both the dense policy and the policy that really sampled (the shadow policy).

On a GPU the decoding step is recorded once per rollout as a CUDA graph and replayed for every further token; between two
replays the cache may evict response keys.

Left out on purpose: beam search, streaming.
"""
from dataclasses import dataclass, field
from itertools import groupby

import torch

from kvcache import KVCache
from fast.sampling import sample
from shadow_attn import prepare, shadow_attention


@dataclass
class Rollout:
    """B prompts, G responses each, up to R tokens; on the device of the model that sampled it."""
    prompts: list              # B lists of token ids
    tokens: torch.Tensor       # (B, G, R) int64, 0 past each length
    lengths: torch.Tensor      # (B, G) int64, the stop token counted
    logp_roll: torch.Tensor    # (B, G, R) fp32, the sampler's log-probs at `temperature`, 0 past each length
    temperature: float         # 0: greedy, log-probs at temperature 1
    kept: list                 # B x (L, nkv, K) int64: kept prompt positions, ascending
    until: torch.Tensor        # (L, nkv, B, G, R) int32: response step at which each response key dies; R: never
    stopped: torch.Tensor      # (B, G) bool: ended by a stop token rather than cut at R
    kv: dict = field(default_factory=dict)  # KV bytes: kept, dense, dense with the prompt shared by its group

    @property
    def mask(self):
        """(B, G, R) bool: which tokens are part of a response."""
        return torch.arange(self.tokens.shape[2], device=self.tokens.device) < self.lengths[:, :, None]

    def select(self, prompts):
        """The rollout of some of the prompts, given by index."""
        i = torch.as_tensor(prompts, device=self.tokens.device)
        return Rollout([self.prompts[b] for b in prompts], self.tokens[i], self.lengths[i], self.logp_roll[i], self.temperature,
                       [self.kept[b] for b in prompts], self.until[:, :, i], self.stopped[i])


def prefill(model, cache, prompts, max_rows):
    """Run the prompts densely, packed into rows of about `max_rows` tokens, filling `cache`. -> last tokens' logits (B, V)"""
    logits, first = [], 0
    while first < len(prompts):
        last = first + 1
        while last < len(prompts) and sum(map(len, prompts[first:last + 1])) <= max_rows:
            last += 1
        sizes = [len(p) for p in prompts[first:last]]
        n = torch.tensor(sizes, device=model.device)                                                  # (prompts,)
        ends = n.cumsum(0)                                                                            # (prompts,)
        # a key dies where its prompt ends
        until = ends.repeat_interleave(n, output_size=sum(sizes)).int().expand(model.config.n_kv_head, -1).contiguous()  # (nkv, N)
        plan = prepare(until, backward=False) if until.is_cuda else None  # once for all layers
        ids = torch.tensor([t for p in prompts[first:last] for t in p], device=model.device)         # (N,)
        pos = torch.cat([torch.arange(size, device=model.device) for size in sizes])                 # (N,)

        def attend(layer, q, k, v):
            row, b = 0, first
            for size, same in groupby(sizes):  # what the cache keeps is copied; the dense keys go when this layer is done
                which = slice(b, b + len(list(same)))
                rows = slice(row, row + size * (which.stop - b))
                cache.write_prompts(which, layer, q[rows], k[rows], v[rows])
                row, b = rows.stop, which.stop
            return shadow_attention(q, k, v, until, plan=plan, out=q if plan else None)  # over q, which nobody needs any more

        hidden = model(ids, pos, attend)                                                              # (N, C)
        logits.append(model.logits(hidden[ends - 1]))                                                 # (prompts, V)
        first = last
    return torch.cat(logits)


def check_request(model, prompts, group, max_new_tokens, temperature):
    """Raise ValueError, naming the culprit, for a request that cannot be served as asked."""
    if not prompts or group < 1 or max_new_tokens < 1:
        raise ValueError(f"need at least one prompt, sample and new token: got {len(prompts)}, {group}, {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    c = model.config
    for b, p in enumerate(prompts):
        if len(p) == 0:
            raise ValueError(f"prompt {b} is empty")
        if len(p) + max_new_tokens > c.max_pos:
            raise ValueError(f"prompt {b} has {len(p)} tokens; with {max_new_tokens} new ones that exceeds the context of {c.max_pos}")
        if min(p) < 0 or max(p) >= c.vocab_size:
            raise ValueError(f"prompt {b} holds token id {min(p) if min(p) < 0 else max(p)}, the vocabulary has {c.vocab_size}")


def record(step, device):
    """Record the kernels that step() launches on a card in a CUDA graph, without running them. -> a function that runs them at once

    Decoding launches hundreds of kernels per token that last a few microseconds each: launched one by one, the host is the limit.
    What changes from token to token (slot, position, random numbers) must be read from the device, nothing in step() may wait for it,
    and every tensor that step() reads or writes must live at the same address until the last replay: generate's frame holds them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate(model, prompts, group, max_new_tokens, temperature=1.0, evict="snapkv", budget=256, window=32, sinks=4,
             response_budget=None, period=128, stop_ids=(), seed=0, pool=7, prefill_rows=16384):
    """Sample `group` responses to each prompt under the compressed cache. prompts: B lists of token ids, ragged. -> Rollout

    temperature 0 is greedy, for evaluation. evict, budget, window, sinks, pool, response_budget, period: see kvcache.KVCache.
    stop_ids: a response ends with the first of these, which is part of it. Decoding ends when every row has ended.
    prefill_rows: prompt tokens per prefill pass. Raises ValueError for settings or prompts it cannot serve."""
    check_request(model, prompts, group, max_new_tokens, temperature)
    if prefill_rows < 1:
        raise ValueError(f"prefill_rows must be at least 1, got {prefill_rows}")
    c, dev, B, S, R = model.config, model.device, len(prompts), len(prompts) * group, max_new_tokens
    prompts = [list(p) for p in prompts]
    cache = KVCache(c, [len(p) for p in prompts], group, R, evict, budget, window, sinks, pool, seed, dev, model.dtype, response_budget, period)
    rng = torch.Generator(device=dev).manual_seed(seed)
    stop = torch.tensor(sorted(stop_ids), device=dev, dtype=torch.int64)
    tokens = torch.zeros(S, R, dtype=torch.int64, device=dev)
    logps = torch.zeros(S, R, dtype=torch.float32, device=dev)
    done = torch.zeros(S, dtype=torch.bool, device=dev)
    new = torch.zeros(S, dtype=torch.int64, device=dev)                                               # tokens drawn last
    start = torch.tensor([len(p) for p in prompts], device=dev).repeat_interleave(group)              # (S,) first position

    def draw(logits):
        """Draw response token t of every sample. All in place and on the device: a CUDA graph records it once."""
        t = cache.t
        token, logp = sample(logits, temperature, rng, seed, t)
        tokens.index_copy_(1, t[None], token[:, None])
        logps.index_copy_(1, t[None], logp[:, None])
        new.copy_(token)
        if len(stop):
            done.logical_or_((token[:, None] == stop).any(1))  # isin may wait for the device, which a recording must not

    def step():
        """Feed the tokens drawn last, then draw the next."""
        hidden = model(new, start + cache.t, cache.attend)                                            # (S, C)
        cache.advance()
        draw(model.logits(hidden))                                                                    # (S, V)

    draw(prefill(model, cache, prompts, prefill_rows).repeat_interleave(group, 0))                    # each row draws on its own
    run = step
    for t in range(1, R):
        # asking the device whether all rows are done stalls it, so ask now and then; what is drawn in between is dropped below
        if len(stop) and (dev.type == "cpu" or t % 8 == 0) and bool(done.all()):
            break
        if t == 2 and dev.type == "cuda":  # the step before has compiled and warmed up all there is
            run = record(step, dev)
        run()
        if t < R - 1:  # nothing is sampled after step R - 1
            cache.evict_responses(t)
    ends = torch.isin(tokens, stop) if len(stop) else torch.zeros_like(tokens, dtype=torch.bool)      # (S, R)
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, R)                                   # the first stop token counts
    past = torch.arange(R, device=dev) >= lengths[:, None]
    tokens.masked_fill_(past, 0)
    logps.masked_fill_(past, 0)

    per_key = c.kv_bytes_per_token(model.dtype)
    total, own = sum(len(p) for p in prompts), S * (R - 1)  # prompt tokens; response keys
    shape = lambda x: x.view(B, group, *x.shape[1:])
    until = cache.until.unflatten(1, (B, group)).permute(0, 3, 1, 2, 4).contiguous()                  # (L, nkv, B, G, R)
    kept = [torch.stack(layers) for layers in cache.kept]
    return Rollout(prompts, shape(tokens), shape(lengths), shape(logps), temperature, kept, until, shape(ends.any(1)),
                   dict(kept=cache.nbytes(), dense=(total * group + own) * per_key, dense_shared=(total + own) * per_key))
