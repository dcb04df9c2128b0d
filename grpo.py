"""
Policy objectives (GRPO, PPO, online DPO) as pure functions, and `replay`, which scores a rollout with the learner.

The idea of GRPO. G responses to one prompt are each other's baseline:

    A_g = (reward_g - mean) / (std + 1e-4)                                   advantages; "constant" leaves out the division
    r_t = exp(logp_t - logp_old_t)                                           per-token ratio to the policy before the update
    L   = sum_t scale_t w_t * -min(r_t A, clip(r_t, 1 - clip, 1 + clip_high) A)

`scale` is the reduction by name, `w` corrects for a sampler that was not the learner: with a dense learner and an evicting
sampler it is all there is (`correction`); with replay both are one policy. On the first update after a rollout r is exactly 1,
so the loss is 0 by construction ("sequence"; the others leave the spread of lengths), its gradient not.

PPO has the same L with an advantage per token, from a learned value of every prefix (`gae`, `value_loss`). Online DPO keeps the
best and the worst response of each group and raises the odds of the one over the other (`best_and_worst`, `dpo_loss`). Both
read the learner's policy from `replay`, so under the Shadow Mask they too update the policy that sampled.

`replay` packs each group once, runs one forward under the key lifetimes that the rollout logged, and returns the log-probs
of the dense and of the shadow policy. Head, log-softmax and the KL between the two (over the whole vocabulary, so no
estimator is needed) are computed in chunks of rows, again in the backward pass: rows x vocabulary never exists.

Left out on purpose: reward models, entropy bonus, a dual clip, sequence-level ratios (GSPO), top-p and top-k.
Departures: tokens that a correction rejects weigh 0 but stay in the loss's denominator (verl takes them out of the mask), so
that a reduction means one thing for all methods. PPO takes a response that was cut for one that ended: no value is added to its reward.

References: GRPO 2402.03300, PPO's clip 1707.06347, DAPO (token mean, clip-higher) 2503.14476, Dr. GRPO ("constant")
2503.20783, GAE 1506.02438, DPO 2305.18290, online DPO 2402.04792, Shadow Mask Distillation 2605.06850, Sparse-RL 2601.10079,
acceptance 2606.08446, reference KL with the ratio factor 2512.02556 (all arXiv); the value's clip: PPO2 in OpenAI's baselines;
estimator k3: joschu.net/blog/kl-approx.html.
"""
from dataclasses import dataclass, replace

import torch

from fast.launch import widen
from fast.head import head_rows, kl_rows
from shadow_attn import prepare_layers, shadow_attention

NORMS = ("sequence", "token", "constant")


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


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalized advantage estimation. rewards, values (B, G, R) per token, mask bool -> advantages, returns (B, G, R).

        delta_t = reward_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   return_t = A_t + V_t

    V_t is the value of the prefix that predicts token t; past the last token of a response V and A are 0, whatever stands
    there, and so is what is returned. Detached (1506.02438, eq. 16)."""
    rewards, values = (torch.where(mask, x.detach(), 0.0) for x in (rewards, values))
    adv, last = torch.zeros_like(values), torch.zeros_like(values[..., 0])
    for t in reversed(range(values.shape[-1])):
        after = values[..., t + 1] if t + 1 < values.shape[-1] else 0.0
        last = rewards[..., t] + gamma * after - values[..., t] + gamma * lam * last  # (B, G)
        adv[..., t] = last
    return adv, adv + values


def whiten(x, mask):
    """x (B, G, R) minus the mean over the mask's tokens, over (std + 1e-4); 0 past the mask. Computed in fp64, as advantages."""
    some = x[mask].double()  # (n,)
    some = (some - some.mean()) / (some.std(correction=min(1, len(some) - 1)) + 1e-4)
    return torch.zeros_like(x).masked_scatter(mask, some.to(x.dtype))


def value_loss(values, values_old, returns, mask, clip=0.2, scale=None):
    """Clipped value loss of PPO2, all (B, G, R), mask bool -> scalar: sum of scale (None: mean over all tokens) times

        0.5 max((V - return)^2, (V_old + clamp(V - V_old, -clip, clip) - return)^2)

    values_old: before the first update on the rollout. A value that moved by more than clip towards its return has no
    gradient. What stands past the mask has no influence, NaN included."""
    scale = token_scale(mask, "token") if scale is None else scale
    values, old, returns = (torch.where(mask, x, 0.0) for x in (values, values_old.detach(), returns.detach()))
    near = old + (values - old).clamp(-clip, clip)
    return (scale * 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)).sum()


def best_and_worst(rollout, rewards):
    """The rollout of a pair per prompt, best response first, by rewards (B, G); of equals the first. -> Rollout, G = 2

    Prompts whose responses all earned the same have no pair and are left out, so the rollout may hold no prompt at all."""
    b = (rewards.max(1).values > rewards.min(1).values).nonzero()  # (pairs, 1) prompts
    g = torch.stack([rewards.argmax(1), rewards.argmin(1)], 1)[b[:, 0]]  # (pairs, 2) samples
    r, of_prompts = rollout, lambda x: [x[i] for i in b[:, 0].tolist()]
    return replace(r, prompts=of_prompts(r.prompts), kept=of_prompts(r.kept), tokens=r.tokens[b, g], lengths=r.lengths[b, g],
                   logp_roll=r.logp_roll[b, g], until=r.until[:, :, b, g], stopped=r.stopped[b, g], kv={})


def dpo_loss(logp, logp_ref, mask, beta=0.1):
    """-log sigmoid(beta ((logp_w - ref_w) - (logp_l - ref_l))), summed log-probs of whole responses (2305.18290, eq. 7).

    logp, logp_ref, mask (B, 2, R), the better response (w) first, the reference without gradient -> losses (B,), margins
    (B,) detached: what stands in the brackets behind beta. What stands past the mask has no influence, NaN included."""
    if logp.shape[1] != 2:
        raise ValueError(f"a pair has 2 responses, got {logp.shape[1]}")
    gain = (torch.where(mask, logp, 0.0) - torch.where(mask, logp_ref.detach(), 0.0)).sum(-1)  # (B, 2)
    margin = gain[:, 0] - gain[:, 1]
    return -torch.nn.functional.logsigmoid(beta * margin), margin.detach()


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


def distill_kl(student_logits, teacher_logits, mask):
    """Mean over masked rows of KL(student || teacher), teacher detached; 0 if no row is masked. logits (n, V), mask (n,) bool.

    Rows outside the mask are never computed with, so what stands there cannot leak."""
    student = widen(student_logits[mask]).log_softmax(-1)  # (rows, V)
    teacher = widen(teacher_logits[mask]).detach().log_softmax(-1)
    return kl_rows(student, teacher).sum() / max(1, len(student))


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
    rows = {p: torch.full((B, G, R), -1, dtype=torch.int64, device=dev) for p in policies}
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
        m = rollout.lengths[b] - 1                                                                 # (G,) rows of a copy
        g, t = (torch.arange(R, device=dev) < m[:, None]).nonzero(as_tuple=True)                   # sample and token of each row
        for policy in policies:
            ids.append(rollout.tokens[b, g, t])
            pos.append(P + t)
            dies = rollout.until[:, :, b, g, t].minimum(m[g]) if policy == "shadow" else m[g]      # response step
            death[:, :, born - row:born - row + len(g)] = born + m.cumsum(0)[g] - m[g] + dies      # a copy begins, and then
            rows[policy][b, :, 0] = last
            rows[policy][b, g, t + 1] = torch.arange(born, born + len(g), device=dev)
            born += len(g)
        until.append(death)
        row = end
    return Packed(torch.cat(ids), torch.cat(pos), torch.cat(until, dim=2), rows)


def replay(model, rollout, policies=("dense", "shadow"), distill_to=None, stats=False, checkpointing=False, value=None):
    """Score the rollout's tokens with the learner, under every policy asked for, in one packed forward pass.

    -> dict of (B, G, R), fp32, at the rollout's temperature (0, greedy, scores at 1, as the sampler does), 0 past each length:
    the log-probs of each policy by its name, with gradients; "kl" = KL(student || teacher) per token over the vocabulary,
    teacher detached, where distill_to names the student and the other policy teaches; with stats, and without gradients,
    "entropy" of the last policy and, of two, "accept" = sum over the vocabulary of min(p_dense, p_shadow). checkpointing: see
    Transformer.forward. value: hidden (n, C) fp32 -> (n, 1), given the rows that predict the tokens under the last policy: "value".
    Raises ValueError for unknown policies, a student without a teacher, and a log that does not fit the model."""
    policies = tuple(policies)
    if not policies or len(set(policies)) < len(policies) or not set(policies) <= {"dense", "shadow"}:
        raise ValueError(f"policies are 'dense' and 'shadow', each at most once, got {policies}")
    if distill_to is not None and (len(policies) < 2 or distill_to not in policies):
        raise ValueError(f"distill_to={distill_to!r} needs both policies and one of their names, got {policies}")
    packed, mask, c = pack(rollout, policies), rollout.mask, model.config
    need = (c.n_layer, c.n_kv_head, len(packed.ids))
    if packed.until.shape != need:
        raise ValueError(f"the log holds lifetimes {tuple(packed.until.shape)}, the model needs {need}: (layers, kv heads, rows)")
    rows = [packed.rows[p][mask] for p in policies]  # (n,) each: only rows that predict a response token meet the head
    if len(rows[0]) == 0 or min(int(r.min()) for r in rows) < 0:
        raise ValueError("the rollout holds no response token, or one that no packed row predicts")
    # one preparation for all layers saves thousands of small launches; for very long rows its lists would be large
    together = packed.until.is_cuda and c.n_layer * c.n_kv_head * len(packed.ids) ** 2 < 2**39
    plans = prepare_layers(packed.until, torch.is_grad_enabled()) if together else [None] * c.n_layer
    attend = lambda layer, q, k, v: shadow_attention(q, k, v, packed.until[layer], plan=plans[layer])
    hidden = model(packed.ids, packed.pos, attend, checkpointing)  # (N, C)
    # indexing, not index_select: the prompt's last row is gathered once per response; this sums its gradients in a fixed order
    hidden = [hidden[r] for r in rows]  # (n, C) each
    student = policies.index(distill_to) if distill_to else None
    found = head_rows(model.head, hidden, rollout.tokens[mask], temperature=rollout.temperature or 1.0,
                      student=student, stats=stats)
    logp = found.pop("logp")  # (policies, n)
    found = {**dict(zip(policies, logp)), **found}  # (n,) each
    if value is not None:
        found["value"] = value(widen(hidden[-1]))[:, 0]
    return {name: x.new_zeros(mask.shape).masked_scatter(mask, x) for name, x in found.items()}
