"""
Sampling under a compressed KV cache, and packing what was sampled for the learner.

The idea. `generate` prefills every prompt densely, compresses its cache (kvcache.py), then decodes G samples per prompt
from the compressed cache, one token per sample and step, and records the log-probability each token was drawn with.
`pack` lays groups out in one long row,

    [ prompt | dense copies of the G responses | shadow copies of the G responses ] [ next prompt | ...

and gives every key of every layer and KV head the row at which it dies. One forward pass under these lifetimes then
scores both the dense policy and the policy that really sampled (the shadow policy).

Left out on purpose: top-p and top-k (they cut the support and bias every ratio), beam search, streaming, CUDA graphs.
"""
from dataclasses import dataclass, field

import torch

from kvcache import KVCache
from shadow_attn import shadow_attention


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
    logits, b = [], 0
    while b < len(prompts):
        chunk = [b]
        while chunk[-1] + 1 < len(prompts) and sum(len(prompts[i]) for i in chunk) + len(prompts[chunk[-1] + 1]) <= max_rows:
            chunk.append(chunk[-1] + 1)
        sizes = [len(prompts[i]) for i in chunk]
        n = torch.tensor(sizes, device=model.device)                                                  # (prompts,)
        ends = n.cumsum(0)                                                                            # (prompts,)
        # a key dies where its prompt ends
        until = ends.repeat_interleave(n).int().expand(model.config.n_kv_head, -1).contiguous()       # (nkv, N)
        starts = (ends - n).tolist()
        ids = torch.tensor([t for i in chunk for t in prompts[i]], device=model.device)              # (N,)
        pos = torch.cat([torch.arange(size, device=model.device) for size in sizes])                 # (N,)

        def attend(layer, q, k, v):
            y = shadow_attention(q, k, v, until)
            for i, start, size in zip(chunk, starts, sizes):  # compressed before the next layer runs
                rows = slice(start, start + size)
                cache.write_prompt(i, layer, q[rows], k[rows], v[rows])
            return y

        hidden = model(ids, pos, attend)                                                              # (N, C)
        logits.append(model.logits(hidden[ends - 1]))                                                 # (prompts, V)
        b = chunk[-1] + 1
    return torch.cat(logits)


def sample(logits, temperature, rng):
    """logits (S, V) fp32 -> token (S,), its log-prob (S,) under softmax(logits / temperature); temperature 0: the maximum."""
    logp = (logits / (temperature or 1.0)).log_softmax(-1)                                            # (S, V)
    noise = 0.0
    if temperature:  # argmax of log-probs plus Gumbel noise is an exact sample (the Gumbel-max trick)
        noise = -torch.empty_like(logp).exponential_(generator=rng).clamp_min_(torch.finfo(logp.dtype).tiny).log_()
    token = (logp + noise).argmax(-1)                                                                 # (S,)
    return token, logp.gather(1, token[:, None])[:, 0]


def check_request(model, prompts, group, max_new_tokens, temperature, response_budget):
    """Raise ValueError, naming the culprit, for a request that cannot be served as asked."""
    if not prompts or group < 1 or max_new_tokens < 1:
        raise ValueError(f"need at least one prompt, sample and new token: got {len(prompts)}, {group}, {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if response_budget is not None:
        raise ValueError("response_budget: evicting response keys while decoding is not built; leave it None")
    c = model.config
    for b, p in enumerate(prompts):
        if len(p) == 0:
            raise ValueError(f"prompt {b} is empty")
        if len(p) + max_new_tokens > c.max_pos:
            raise ValueError(f"prompt {b} has {len(p)} tokens; with {max_new_tokens} new ones that exceeds the context of {c.max_pos}")
        if min(p) < 0 or max(p) >= c.vocab_size:
            raise ValueError(f"prompt {b} holds token id {min(p) if min(p) < 0 else max(p)}, the vocabulary has {c.vocab_size}")


@torch.no_grad()
def generate(model, prompts, group, max_new_tokens, temperature=1.0, evict="snapkv", budget=256, window=32, sinks=4,
             response_budget=None, period=128, stop_ids=(), seed=0, pool=7, prefill_rows=16384):
    """Sample `group` responses to each prompt under the compressed cache. prompts: B lists of token ids, ragged. -> Rollout

    temperature 0 is greedy, for evaluation. evict, budget, window, sinks, pool: see kvcache.KVCache. response_budget and
    period belong to methods that evict response keys while decoding; none is built yet, so anything but None is refused.
    stop_ids: a response ends with the first of these, which is part of it. Decoding ends when every row has ended.
    prefill_rows: prompt tokens per prefill pass. Raises ValueError for settings or prompts it cannot serve."""
    check_request(model, prompts, group, max_new_tokens, temperature, response_budget)
    if prefill_rows < 1:
        raise ValueError(f"prefill_rows must be at least 1, got {prefill_rows}")
    c, dev, B, S, R = model.config, model.device, len(prompts), len(prompts) * group, max_new_tokens
    prompts = [list(p) for p in prompts]
    cache = KVCache(c, [len(p) for p in prompts], group, R, evict, budget, window, sinks, pool, seed, dev, model.dtype)
    rng = torch.Generator(device=dev).manual_seed(seed)
    stop = torch.tensor(sorted(stop_ids), device=dev, dtype=torch.int64)
    tokens = torch.zeros(S, R, dtype=torch.int64, device=dev)
    logps = torch.zeros(S, R, dtype=torch.float32, device=dev)
    lengths = torch.full((S,), R, device=dev)
    done = torch.zeros(S, dtype=torch.bool, device=dev)
    start = torch.tensor([len(p) for p in prompts], device=dev).repeat_interleave(group)              # (S,) first position

    logits = prefill(model, cache, prompts, prefill_rows).repeat_interleave(group, 0)                 # (S, V) each row draws
    for t in range(R):
        token, logp = sample(logits, temperature, rng)
        tokens[:, t] = token.where(~done, 0)
        logps[:, t] = logp.where(~done, 0.0)
        ends = torch.isin(token, stop) & ~done
        lengths = lengths.where(~ends, t + 1)
        done = done | ends
        # asking the device whether all rows are done stalls it, so ask now and then; the steps in between change nothing
        if t == R - 1 or ((dev.type == "cpu" or t % 8 == 7) and bool(done.all())):
            break
        hidden = model(token, start + t, cache.attend)                                                # (S, C)
        cache.advance()
        logits = model.logits(hidden)                                                                 # (S, V)

    per_key = c.kv_bytes_per_token(model.dtype)
    total, own = sum(len(p) for p in prompts), S * (R - 1)  # prompt tokens; response keys
    shape = lambda x: x.view(B, group, *x.shape[1:])
    until = torch.full((c.n_layer, c.n_kv_head, B, group, R), R, dtype=torch.int32, device=dev)  # no response key is evicted
    kept = [torch.stack(layers) for layers in cache.kept]
    return Rollout(prompts, shape(tokens), shape(lengths), shape(logps), temperature, kept, until, shape(done),
                   dict(kept=cache.nbytes(), dense=(total * group + own) * per_key, dense_shared=(total + own) * per_key))


@dataclass
class Packed:
    """Groups laid out in one row of N tokens, for one forward pass of the learner."""
    ids: torch.Tensor    # (N,) int64
    pos: torch.Tensor    # (N,) int64 true positions: response token t sits at P + t in every copy
    until: torch.Tensor  # (L, nkv, N) int32: visible(query i, key j) = j <= i < until[layer, kv_head, j]
    rows: dict           # policy -> (B, G, R) int64: the row that predicts each response token, -1 past each length


def pack(rollout, policies=("dense", "shadow")):
    """Lay a rollout out for the learner; which copies of the responses it holds is up to `policies`. -> Packed

    The row that predicts response token 0 is the prompt's last row, shared by all copies; the last token of a response is
    never fed, so a response of n tokens takes n - 1 rows per copy. Raises ValueError for misaligned logs."""
    unknown = set(policies) - {"dense", "shadow"}
    if unknown or not policies:
        raise ValueError(f"policies are 'dense' and 'shadow', got {tuple(policies)}")
    # dense copies come first: keys that the rollout dropped die where the shadow copies begin
    policies = [p for p in ("dense", "shadow") if p in policies]
    B, G, R = rollout.tokens.shape
    (L, nkv), dev = rollout.until.shape[:2], rollout.tokens.device
    if len(rollout.prompts) != B or len(rollout.kept) != B or rollout.until.shape[2:] != (B, G, R):
        raise ValueError(f"the log does not fit {B} prompts x {G} samples x {R} tokens: kept for {len(rollout.kept)} prompts, "
                         f"until {tuple(rollout.until.shape)}")
    if rollout.lengths.min() < 1 or rollout.lengths.max() > R:
        raise ValueError(f"response lengths must be 1 to {R}, got {int(rollout.lengths.min())} to {int(rollout.lengths.max())}")
    lengths = rollout.lengths.tolist()
    ids, pos, until = [], [], []
    rows = {p: torch.full((B, G, R), -1, dtype=torch.int64) for p in policies}
    row = 0  # next free row
    for b, prompt in enumerate(rollout.prompts):
        P, last = len(prompt), row + len(prompt) - 1
        size = P + len(policies) * sum(n - 1 for n in lengths[b])
        end, born = row + size, row + P
        shadow_start = end - sum(n - 1 for n in lengths[b]) if "shadow" in policies else end  # where evicted keys die
        kept = rollout.kept[b]
        if kept.shape[:2] != (L, nkv) or kept.max() >= P:
            raise ValueError(f"kept of prompt {b} is {tuple(kept.shape)} up to {int(kept.max())}, the prompt has {P} tokens")
        death = torch.full((L, nkv, size), shadow_start, dtype=torch.int32, device=dev)
        death[:, :, :P].scatter_(2, kept, end)
        ids.append(torch.tensor(prompt, device=dev))
        pos.append(torch.arange(P, device=dev))
        for policy in policies:
            for g, n in enumerate(lengths[b]):
                m = n - 1
                ids.append(rollout.tokens[b, g, :m])
                pos.append(torch.arange(P, P + m, device=dev))
                dies = rollout.until[:, :, b, g, :m].clamp(max=m) if policy == "shadow" else m     # response step
                death[:, :, born - row:born - row + m] = born + dies
                rows[policy][b, g, 0] = last
                rows[policy][b, g, 1:n] = torch.arange(born, born + m)
                born += m
        until.append(death)
        row = end
    return Packed(torch.cat(ids), torch.cat(pos), torch.cat(until, dim=2), {p: r.to(dev) for p, r in rows.items()})


if __name__ == "__main__":  # python rollout.py --prompt "..." [--model folder or hub name]: generate under a compressed cache
    import argparse
    import os

    from model import Transformer, find_checkpoint
    from tasks import prompt_encoder
    from tokenizer import Tokenizer
    a = argparse.ArgumentParser(description="generate under a compressed KV cache")
    a.add_argument("--prompt", required=True)
    a.add_argument("--model", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "model"))
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in dict(group=1, max_new_tokens=64, temperature=0.0, evict="snapkv", budget=256, window=32, sinks=4, pool=7,
                              seed=0).items():
        a.add_argument(f"--{name}", default=default, type=type(default))
    a = vars(a.parse_args())
    try:
        folder, prompt, device = find_checkpoint(a.pop("model")), a.pop("prompt"), a.pop("device")
        tok = Tokenizer(folder)
        net = Transformer.from_pretrained(folder, device, torch.bfloat16 if device.startswith("cuda") else torch.float32)
        net.vocab_used = min(len(tok), net.config.vocab_size)
        ids = prompt_encoder(tok)(prompt)
        r = generate(net, [ids], stop_ids=tok.stop_ids, **a)
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}")
    for tokens, n in zip(r.tokens[0].tolist(), r.lengths[0].tolist()):
        print(tok.decode(tokens[:n]))
    print(f"[{len(ids)} prompt tokens, {r.kept[0].shape[2]} kept per layer and KV head ({a['evict']}); "
          f"KV bytes {r.kv['kept']:,}, dense {r.kv['dense']:,}]")
