"""
The learner: a logged rollout becomes one packed row, one forward pass scores both policies, and GRPO's loss is a formula.

The idea. `pack` lays each group out in one long row of tokens,

    [ prompt | dense copies of the G responses | shadow copies of the G responses ] [ next prompt | ...

and gives every key, in every layer and KV head, the row at which it dies: `until`. This is where a logged eviction becomes a
lifetime. `replay` runs the model once over that row. Dense copies see the whole prompt, shadow copies see what the sampler
saw, so one forward pass yields the log-probs of the dense policy and of the policy that sampled, and the KL between them.

GRPO: the G responses to one prompt are each other's baseline.

    A_g = (reward_g - mean) / (std + 1e-4)                                   "constant" leaves out the division
    r_t = exp(logp_t - logp_old_t)                                           ratio to the learner before the update
    L   = sum_t scale_t w_t * -min(r_t A, clip(r_t, 1 - clip, 1 + clip_high) A)

`scale` is the reduction by name. `w` corrects for a sampler that was not the learner: with a dense learner and an evicting
sampler it is all there is; with replay both are one policy and w is 1. On the first update after a rollout r is exactly 1,
so the loss is 0 by construction ("sequence"; the others leave the spread of lengths), its gradient not.

Left out on purpose: reward models, entropy bonus, a dual clip, sequence-level ratios (GSPO).
Departures: tokens that a correction rejects weigh 0 but stay in the loss's denominator (verl takes them out of the mask).

References: GRPO 2402.03300, PPO's clip 1707.06347, DAPO (token mean, clip-higher) 2503.14476, Dr. GRPO ("constant")
2503.20783, Shadow Mask Distillation 2605.06850, Sparse-RL 2601.10079, acceptance 2606.08446, reference KL with the ratio
factor 2512.02556 (all arXiv); estimator k3: joschu.net/blog/kl-approx.html.
"""
from dataclasses import dataclass

import torch

from fast.head import head_rows
from fast.launch import widen
from shadow_attn import prepare_layers, shadow_attention

NORMS = ("sequence", "token", "constant")


@dataclass
class Packed:
    """Groups laid out in one row of N tokens, for one forward pass of the learner."""
    ids: torch.Tensor    # (N,) int64
    pos: torch.Tensor    # (N,) int64 true positions: response token t sits at P + t in every copy
    until: torch.Tensor  # (L, nkv, N) int32: visible(query i, key j) = j <= i < until[layer, kv_head, j]
    rows: dict           # policy -> (B, G, R) int64: the row that predicts each response token, -1 past each length


def pack_by_hand(rollout, policies=("dense", "shadow")):
    """What `pack` does, one key at a time: the text to read. -> Packed

    Response token 0 is predicted by the prompt's last row, which saw all keys in the sampler too. Token t > 0 is predicted by
    the row of token t - 1, so the last token of a response needs no row: n tokens take n - 1 rows per copy."""
    B, G, R = rollout.tokens.shape
    L, nkv = rollout.until.shape[:2]
    policies = [p for p in ("dense", "shadow") if p in policies]  # dense first: dropped prompt keys die where shadow begins
    ids, pos, until = [], [], []                                  # of each row; until[row][layer][kv_head]
    rows = {p: torch.full((B, G, R), -1) for p in policies}
    for b, prompt in enumerate(rollout.prompts):
        lengths = rollout.lengths[b].tolist()
        own = sum(n - 1 for n in lengths)                         # rows of one copy of all responses
        first, P = len(ids), len(prompt)
        end = first + P + len(policies) * own                     # where the next group begins
        shadow_begins = end - own if "shadow" in policies else end

        for j, token in enumerate(prompt):
            ids.append(token)
            pos.append(j)
            # a kept prompt key lives to the end of its group, a dropped one until the shadow copies begin
            until.append([[end if j in rollout.kept[b][layer][h].tolist() else shadow_begins
                           for h in range(nkv)] for layer in range(L)])
        for policy in policies:
            for g in range(G):
                born = len(ids)                                   # the first row of this copy
                ends = born + lengths[g] - 1
                rows[policy][b, g, 0] = first + P - 1
                for t in range(lengths[g] - 1):
                    ids.append(int(rollout.tokens[b, g, t]))
                    pos.append(P + t)
                    # a response key dies with its copy, in a shadow copy also when the sampler dropped it
                    died = [[born + int(rollout.until[layer, h, b, g, t]) for h in range(nkv)] for layer in range(L)]
                    until.append([[min(d, ends) if policy == "shadow" else ends for d in heads] for heads in died])
                    rows[policy][b, g, t + 1] = born + t
    until = torch.tensor(until, dtype=torch.int32).permute(1, 2, 0)  # (L, nkv, N)
    return Packed(torch.tensor(ids), torch.tensor(pos), until, rows)


def check_log(rollout, policies):
    """Raise ValueError for unknown policies and for a log that does not fit the rollout."""
    if not policies or len(set(policies)) < len(policies) or not set(policies) <= {"dense", "shadow"}:
        raise ValueError(f"policies are 'dense' and 'shadow', each at most once, got {tuple(policies)}")
    B, G, R = rollout.tokens.shape
    if len(rollout.prompts) != B or len(rollout.kept) != B or rollout.until.shape[2:] != (B, G, R):
        raise ValueError(f"the log does not fit {B} prompts x {G} samples x {R} tokens: kept for {len(rollout.kept)} "
                         f"prompts, until {tuple(rollout.until.shape)}")
    if rollout.lengths.min() < 1 or rollout.lengths.max() > R:
        raise ValueError(f"response lengths must be 1 to {R}, got {int(rollout.lengths.min())} to {int(rollout.lengths.max())}")


def prompt_lifetimes(kept, until, dropped_at, end):
    """until (L, nkv, P) of a prompt's keys, filled in place: those kept live to `end`, the others die at `dropped_at`."""
    L, nkv, P = until.shape
    until.fill_(dropped_at)
    if torch.is_tensor(kept):                                     # all layers keep equally many: (L, nkv, K)
        layers = [(until, kept)]
    else:
        layers = list(zip(until, kept))
    if len(layers) not in (1, L):
        raise ValueError(f"the log has {len(layers)} layers, the model {L}")
    for lives, positions in layers:
        if positions.shape[:-1] != lives.shape[:-1] or positions.max() >= P:
            raise ValueError(f"kept is {tuple(positions.shape)} up to {int(positions.max())}, the prompt has {P} tokens")
        lives.scatter_(-1, positions, end)


def pack(rollout, policies=("dense", "shadow")):
    """Lay a rollout out for the learner; which copies of the responses it holds is up to `policies`. -> Packed

    `pack_by_hand` in tensors, a policy's copies of a whole group at a time. Raises ValueError for misaligned logs."""
    check_log(rollout, policies)
    policies = [p for p in ("dense", "shadow") if p in policies]
    B, G, R = rollout.tokens.shape
    (L, nkv), dev = rollout.until.shape[:2], rollout.tokens.device
    ids, pos, until = [], [], []
    rows = {p: torch.full((B, G, R), -1, dtype=torch.int64, device=dev) for p in policies}
    first = 0                                                     # row at which this group begins
    for b, prompt in enumerate(rollout.prompts):
        P = len(prompt)
        n = rollout.lengths[b] - 1                                # (G,) rows of each copy
        own = int(n.sum())
        size = P + len(policies) * own
        end = first + size
        shadow_begins = end - own if "shadow" in policies else end
        dies = torch.empty(L, nkv, size, dtype=torch.int32, device=dev)
        prompt_lifetimes(rollout.kept[b], dies[:, :, :P], shadow_begins, end)
        ids.append(torch.tensor(prompt, device=dev))
        pos.append(torch.arange(P, device=dev))
        g, t = (torch.arange(R, device=dev) < n[:, None]).nonzero(as_tuple=True)  # (own,) sample and token of each row
        born = P                                                  # of this policy's copies, counted from `first`
        for policy in policies:
            ids.append(rollout.tokens[b, g, t])
            pos.append(P + t)
            dropped = n[g]                                        # (own,) response step: the end of its copy, or earlier
            if policy == "shadow":
                dropped = rollout.until[:, :, b, g, t].minimum(dropped)  # (L, nkv, own)
            copy = first + born + n.cumsum(0)[g] - n[g]           # (own,) row at which the copy begins
            dies[:, :, born:born + own] = copy + dropped
            rows[policy][b, :, 0] = first + P - 1
            rows[policy][b, g, t + 1] = first + torch.arange(born, born + own, device=dev)
            born += own
        until.append(dies)
        first = end
    return Packed(torch.cat(ids), torch.cat(pos), torch.cat(until, dim=2), rows)


def replay(model, rollout, policies=("dense", "shadow"), distill_to=None, stats=False, checkpointing=False, value=None):
    """Score the rollout's tokens with the learner, under every policy asked for, in one packed forward pass.

    -> dict of (B, G, R), fp32, at the rollout's temperature (0, greedy, scores at 1, as the sampler does), 0 past each length:
      the log-probs of each policy by its name, with gradients;
      "kl", where distill_to names the student: KL(student || other policy) per token over the vocabulary, teacher detached;
      with stats, without gradients: "entropy" of the last policy and, of two, "accept" = sum over the vocabulary of
      min(p_dense, p_shadow);
      "value", with value (hidden (n, C) fp32 -> (n, 1)): of the rows that predict the tokens under the last policy.
    checkpointing: see Transformer.forward. Raises ValueError for unknown policies, a student without a teacher, and a log
    that does not fit the model."""
    policies = tuple(policies)
    packed, mask, c = pack(rollout, policies), rollout.mask, model.config
    if distill_to is not None and (len(policies) < 2 or distill_to not in policies):
        raise ValueError(f"distill_to={distill_to!r} needs both policies and one of their names, got {policies}")
    N = len(packed.ids)
    if packed.until.shape != (c.n_layer, c.n_kv_head, N):
        raise ValueError(f"the log holds lifetimes {tuple(packed.until.shape)}, the model needs "
                         f"{(c.n_layer, c.n_kv_head, N)}: (layers, KV heads, rows)")
    # one preparation for all layers saves thousands of small launches; for very long rows its lists would be large
    plans = [None] * c.n_layer
    if packed.until.is_cuda and c.n_layer * c.n_kv_head * N ** 2 < 2**39:
        plans = prepare_layers(packed.until, torch.is_grad_enabled())

    def attend(layer, q, k, v):
        return shadow_attention(q, k, v, packed.until[layer], plan=plans[layer])

    hidden = model(packed.ids, packed.pos, attend, checkpointing)                             # (N, C)
    # only rows that predict a response token meet the head. Indexing, not index_select: the prompt's last row is gathered once
    # per response; this sums its gradients in a fixed order
    hidden = [hidden[packed.rows[p][mask]] for p in policies]                                 # (n, C) each
    student = policies.index(distill_to) if distill_to else None
    out = head_rows(model.head, hidden, rollout.tokens[mask], temperature=rollout.temperature or 1.0, student=student,
                    stats=stats)
    out.update(zip(policies, out.pop("logp")))
    if value is not None:
        out["value"] = value(widen(hidden[-1]))[:, 0]
    return {name: x.new_zeros(mask.shape).masked_scatter(mask, x) for name, x in out.items()}  # (n,) -> (B, G, R)


# from here on: pure functions of log-probs, advantages and masks, all (B, G, R) unless said otherwise

def advantages(rewards, norm="sequence"):
    """rewards (B, G) -> advantages (B, G): reward minus the group's mean, over (std + 1e-4) unless norm is "constant".

    The standard deviation is the unbiased one (G - 1), as in TRL and verl. Computed in fp64: equal fp32 rewards give
    exactly 0, where fp32 leaves a residue that division by a tiny std would blow up. Raises ValueError for an unknown
    norm, another shape, rewards that are not finite, and G < 2: a response has no baseline in itself."""
    check_norm(norm)
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (prompts, samples) with at least 2 samples a prompt, got {tuple(rewards.shape)}")
    x = rewards.double()
    if not x.isfinite().all():
        raise ValueError(f"{int((~x.isfinite()).sum())} of {x.numel()} rewards are not finite")
    adv = x - x.mean(1, keepdim=True)
    if norm != "constant":
        adv = adv / (x.std(1, keepdim=True) + 1e-4)
    return adv.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def check_norm(norm):
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: one of {', '.join(NORMS)}")


def token_scale(mask, norm="sequence"):
    """Weights (B, G, R) fp32 by which per-token losses are summed; 0 where mask (B, G, R) bool is False.

    "sequence": mean over a response's tokens, then over responses (GRPO). "token": mean over all tokens (DAPO).
    "constant": sum over B x G x R (Dr. GRPO), R being the number of columns, so it must not be trimmed to the longest
    response. Micro-batches take slices of the whole batch's scale: gradients then add up to those of the whole batch."""
    check_norm(norm)
    weight = mask.float()
    if norm == "sequence":
        return weight / weight.sum(-1, keepdim=True).clamp(min=1) / (mask.numel() / mask.shape[-1])
    return weight / (weight.sum().clamp(min=1) if norm == "token" else mask.numel())


def log_ratio(mask, logp, logp_old):
    """logp - logp_old, 0 where mask is False whatever stands there (NaN too), within +-20 so that exp stays finite."""
    return (torch.where(mask, logp, 0.0) - torch.where(mask, logp_old, 0.0)).clamp(-20, 20)


def policy_loss(logp, logp_old, adv, mask, clip=0.2, clip_high=None, norm="sequence", weight=None, scale=None):
    """Clipped surrogate. logp, logp_old, weight (B, G, R), adv (B, G) or (B, G, R), mask (B, G, R) bool -> loss (), stats.

    logp_old None: first update after a rollout, the ratio is exp(logp - logp.detach()), exactly 1. Later updates pass the
    learner's own log-probs recorded before the first one. clip, clip_high (None: as clip): the ratio earns nothing beyond
    1 - clip and 1 + clip_high. weight: per-token correction, detached here. scale: a slice of the whole batch's
    `token_scale` when this is a micro-batch; it replaces norm. What stands past the mask has no influence, NaN included.
    stats, detached (): means over the mask of clipped (tokens whose gradient the clip cut), ratio, and kl_old (k3 estimate of
    KL(old || new)). Raises ValueError for shapes that would broadcast and an unknown norm."""
    check_norm(norm)
    for name, x, shape in (("mask", mask, logp.shape), ("logp_old", logp_old, logp.shape), ("weight", weight, logp.shape),
                           ("scale", scale, logp.shape), ("adv", adv, logp.shape if adv.dim() == logp.dim() else logp.shape[:-1])):
        if x is not None and x.shape != shape:  # most would broadcast
            raise ValueError(f"{name} has shape {tuple(x.shape)}, log-probs of {tuple(logp.shape)} need {tuple(shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    scale = token_scale(mask, norm) if scale is None else scale
    d = log_ratio(mask, logp, (logp if logp_old is None else logp_old).detach())  # (B, G, R)
    adv = adv.detach()[..., None] if adv.dim() < logp.dim() else torch.where(mask, adv.detach(), 0.0)  # of responses or tokens
    ratio, high = d.exp(), clip if clip_high is None else clip_high
    loss = -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + high) * adv)  # (B, G, R)
    if weight is not None:
        loss = loss * torch.where(mask, weight, 0.0).detach()
    with torch.no_grad():
        n = mask.sum().clamp(min=1)
        clipped = ((adv > 0) & (ratio > 1 + high)) | ((adv < 0) & (ratio < 1 - clip))
        stats = dict(clipped=(clipped & mask).sum() / n, ratio=(ratio * mask).sum() / n, kl_old=(ratio - 1 - d).sum() / n)
    return (scale * loss).sum(), stats


def correction(name, logp_old, logp_roll, mask):
    """Per-token weights (B, G, R) for a sampler that was not the learner, from w = exp(logp_old - logp_roll); 0 past mask.

    logp_old: the learner before its update, so that the weight does not move with it. name: "tis" min(w, 2); "mis" w
    within [0.5, 2], else 0; "sparse_rl" (2601.10079) min(w, 1.5) over its mean over the tokens given, then 0 for w outside
    [0.5, 1.5] and for whole responses with any w < 1e-4. That mean is why the log-probs must be the whole batch's.
    Raises ValueError for an unknown name."""
    w = log_ratio(mask, logp_old.detach(), logp_roll).exp() * mask  # (B, G, R)
    if name == "tis":
        return w.clamp(max=2)
    if name == "mis":
        return w * ((w >= 0.5) & (w <= 2))
    if name == "sparse_rl":
        capped = w.clamp(max=1.5)
        sound = ~((w < 1e-4) & mask).any(-1, keepdim=True)  # (B, G, 1)
        return capped / (capped.sum() / mask.sum().clamp(min=1)) * ((w >= 0.5) & (w <= 1.5) & sound)
    raise ValueError(f"unknown correction {name!r}: one of tis, mis, sparse_rl")


def reference_kl(logp, logp_ref, mask, logp_old=None):
    """KL(policy || reference) on sampled tokens, (B, G, R), 0 past mask: ratio * k3, k3 = e^d - d - 1, d = logp_ref - logp.

    The ratio to the sampling policy (None: exactly 1, as in policy_loss) carries the half of the gradient that
    differentiating k3 alone loses: without it the expected gradient is that of KL(reference || policy)."""
    d = log_ratio(mask, logp_ref.detach(), logp)
    ratio = log_ratio(mask, logp, (logp if logp_old is None else logp_old).detach()).exp()
    return ratio * (d.exp() - d - 1)


class GRPO:
    """The objective as the loop of train.py sees it; objectives/ has others with the same three methods.

    settings: those of train.py. initial(): a frozen copy of the model as it was at first, for objectives that need one."""
    value = None  # PPO: a head that is trained and saved with the model

    def __init__(self, model, settings, initial):
        c = self.c = settings
        self.check_group(at_least=2)
        if c.correction != "none" and (c.evict == "none" or c.learner == "shadow"):
            raise ValueError(f"correction={c.correction} weighs a sampler that was not the learner, with evict={c.evict} and "
                             f"learner={c.learner} they are one policy and all weights 1: say --learner=dense and evict")

    def check_group(self, at_least):
        if self.c.group < at_least:
            why = ": samples of one prompt are compared" if at_least > 1 else ""
            raise ValueError(f"group must be at least {at_least}, got {self.c.group}{why}")

    def prepare(self, rollout, rewards, score):
        """Once per rollout, before its first update: what takes the whole batch, so that micro-batches of any size give the same
        gradient. rewards (B, G); score(rollout, model=None) -> what replay returns for the learner, or for another model,
        without gradients. -> rollout to learn from, batch (tensors that micro-batches take their prompts of), numbers to log"""
        batch = dict(adv=advantages(rewards, self.c.norm), scale=token_scale(rollout.mask, self.c.norm))
        if self.c.correction == "none":  # the learner's own log-probs come with the first update
            return rollout, batch, {}
        batch["weight"], log = self.weigh(rollout, score(rollout)[self.c.learner])
        return rollout, batch, log

    def weigh(self, rollout, logp):
        """Weights (B, G, R) of the configured correction, and their numbers for the log."""
        weight, n = correction(self.c.correction, logp, rollout.logp_roll, rollout.mask), rollout.mask.sum().item()
        rejected = ((weight == 0) & rollout.mask).sum().item() / n
        return weight, dict(weight=weight.sum().item() / n, rejected=rejected)

    def loss(self, out, part, batch, old, whole):
        """One micro-batch `part` of the rollout `whole`. out: what replay returned; batch: the part's share of prepare's; old: the
        learner's log-probs before its first update, None in that. -> loss (), numbers; both add up over micro-batches"""
        c = self.c
        loss, stats = policy_loss(out[c.learner], old, batch["adv"], part.mask, clip=c.clip, clip_high=c.clip_high, norm=c.norm,
                                  weight=batch.get("weight"), scale=batch["scale"])
        share = part.mask.sum().item() / whole.mask.sum().item()
        return loss, dict(clip_frac=stats["clipped"].item() * share)
