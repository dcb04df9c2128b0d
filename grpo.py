"""
The learner: a logged rollout becomes one packed row, one forward pass scores both policies, and
GRPO's loss is a formula.

The idea. `pack` lays each group out in one long row of tokens,

    [ prompt | dense copies of the G responses | shadow copies of the G responses ] [ next prompt ..

and gives every key, in every layer and KV head, the row at which it dies: `until`. This is where a
logged eviction becomes a lifetime. `replay` runs the model once over that row. Dense copies see the
whole prompt, shadow copies see what the sampler saw: one forward pass yields the log-probs of the
dense policy and of the policy that sampled, and the KL between them.

GRPO: the G responses to one prompt are each other's baseline.

    A_g = (reward_g - mean) / (std + 1e-4)                    "constant" leaves out the division
    r_t = exp(logp_t - logp_old_t)                             to the learner before its update
    L   = sum_t scale_t w_t * -min(r_t A, clip(r_t, 1 - clip, 1 + clip_high) A)

`scale` is the reduction by name. `w` corrects for a sampler that was not the learner: with a dense
learner and an evicting sampler it is all there is; with replay both are one policy and w is 1. On
the first update after a rollout r is exactly 1, so the loss is 0 by construction ("sequence"; the
others leave the spread of lengths), its gradient is not. With ratio_to = "sampler" logp_old is the
sampler's log-prob: what trainers call bypass, and their answer to a sampler that was not the
learner. ref_kl adds a KL to the initial model, train.update the distillation term.

Left out on purpose: reward models, entropy bonus, a dual clip, sequence-level ratios (GSPO).
Departures: tokens that a correction rejects weigh 0 but stay in the loss's denominator, which
shortens the gradient (verl and Sparse-RL's code, github.com/lsjia/Sparse-RL, take them out of the
mask). Sparse-RL's weights are its code's, over their mean in the whole batch (there in each call of
the loss). "mis" masks tokens (TRL's default masks whole sequences, cap 3).

References (arXiv): GRPO 2402.03300, PPO's clip 1707.06347, DAPO (token mean, clip-higher)
2503.14476, Dr. GRPO ("constant") 2503.20783, Shadow Mask Distillation 2605.06850, Sparse-RL
2601.10079, acceptance 2606.08446, reference KL with the ratio factor 2512.02556. Estimator k3:
joschu.net/blog/kl-approx.html.
"""
from dataclasses import dataclass

import torch

from fast.attention import make_plans
from fast.head import head_rows
from fast.launch import widen
from shadow_attn import shadow_attention

NORMS = ("sequence", "token", "constant")
CORRECTIONS = ("tis", "mis", "sparse_rl")


@dataclass
class Packed:
    """Groups laid out in one row of N tokens, for one forward pass of the learner."""
    ids: torch.Tensor    # (N,) int64
    pos: torch.Tensor    # (N,) int64 true positions: response token t sits at P + t in every copy
    until: torch.Tensor  # (L, nkv, N) int32: query i sees key j if j <= i < until[layer, head, j]
    rows: dict           # policy -> (B, G, R) int64: the row that predicts each token, else -1


def pack_by_hand(rollout, policies=("dense", "shadow")):
    """What `pack` does, one key at a time: the text to read. rollout: see rollout.Rollout, whose
    until counts response steps; here it becomes rows. -> Packed

    Response token 0 is predicted by the prompt's last row, which saw all keys in the sampler too.
    Token t > 0 is predicted by the row of token t - 1, so the last token of a response needs no
    row: n tokens take n - 1 rows per copy."""
    B, G, R = rollout.tokens.shape
    L, nkv = rollout.until.shape[:2]
    # dense copies come first: prompt keys that were dropped die where the shadow copies begin
    policies = [p for p in ("dense", "shadow") if p in policies]
    ids, pos, until = [], [], []  # of each row; until[row][layer][kv_head]
    rows = {p: torch.full((B, G, R), -1) for p in policies}
    for b, prompt in enumerate(rollout.prompts):
        P, lengths = len(prompt), rollout.lengths[b].tolist()
        first = len(ids)  # the row of the prompt's first token
        own = sum(n - 1 for n in lengths)  # rows that the responses take under one policy
        end = first + P + len(policies) * own  # where the next group begins
        dropped_at = end - own if "shadow" in policies else end  # where the shadow copies begin

        for j, token in enumerate(prompt):
            ids.append(token)
            pos.append(j)
            until.append([[end if j in rollout.kept[b][layer][head] else dropped_at
                           for head in range(nkv)] for layer in range(L)])

        for policy in policies:
            for g in range(G):
                born = len(ids)  # the first row of this copy
                gone = born + lengths[g] - 1  # the row after its last
                rows[policy][b, g, 0] = first + P - 1
                for t in range(lengths[g] - 1):
                    ids.append(int(rollout.tokens[b, g, t]))
                    pos.append(P + t)
                    dies = torch.full((L, nkv), gone)  # with its copy
                    if policy == "shadow":  # or when the sampler dropped it
                        dies = dies.minimum(born + rollout.until[:, :, b, g, t].cpu())
                    until.append(dies.tolist())
                    rows[policy][b, g, t + 1] = born + t
    until = torch.tensor(until, dtype=torch.int32).permute(1, 2, 0).contiguous()  # (L, nkv, N)
    return Packed(torch.tensor(ids), torch.tensor(pos), until, rows)


def pack(rollout, policies=("dense", "shadow")):
    """Lay a rollout out for the learner; `policies` says which copies it holds. -> Packed

    `pack_by_hand` in tensors, a policy's copies of a whole group at a time. Raises ValueError for a
    log that does not fit."""
    check_policies(policies)
    lengths = check_log(rollout)
    kept = kept_slots(rollout)
    policies = [p for p in ("dense", "shadow") if p in policies]
    B, G, R = rollout.tokens.shape
    (L, nkv), dev = rollout.until.shape[:2], rollout.tokens.device
    ids, pos, until = [], [], []
    rows = {p: torch.full((B, G, R), -1, dtype=torch.int64, device=dev) for p in policies}
    first = 0
    for b, prompt in enumerate(rollout.prompts):
        P, own = len(prompt), sum(lengths[b]) - G
        n = rollout.lengths[b] - 1                                        # (G,) rows of a copy
        end = first + P + len(policies) * own
        dropped_at = end - own if "shadow" in policies else end
        dies = torch.full((L, nkv, end - first), dropped_at, dtype=torch.int32, device=dev)
        lives = torch.full((L * nkv * P,), dropped_at, dtype=torch.int32, device=dev)
        dies[:, :, :P] = lives.index_fill_(0, kept[b], end).view(L, nkv, P)
        ids.append(torch.tensor(prompt, device=dev))
        pos.append(torch.arange(P, device=dev))
        # sample and token of each row of a policy's copies, (own,) each
        g, t = (torch.arange(R, device=dev) < n[:, None]).nonzero(as_tuple=True)
        born = first + P
        for policy in policies:
            ids.append(rollout.tokens[b, g, t])
            pos.append(P + t)
            steps = n[g]                                                  # (own,) the copy's length
            if policy == "shadow":
                steps = rollout.until[:, :, b, g, t].minimum(steps)       # (L, nkv, own)
            copy = born + n.cumsum(0)[g] - n[g]                           # first row of its copy
            dies[:, :, born - first:born - first + own] = copy + steps
            rows[policy][b, :, 0] = first + P - 1
            rows[policy][b, g, t + 1] = torch.arange(born, born + own, device=dev)
            born += own
        until.append(dies)
        first = end
    return Packed(torch.cat(ids), torch.cat(pos), torch.cat(until, dim=2), rows)


def check_policies(policies):
    if (not policies or len(set(policies)) < len(policies)
            or not set(policies) <= {"dense", "shadow"}):
        raise ValueError(f"policies are 'dense' and 'shadow', each at most once, got {policies!r}")


def check_log(rollout):
    """-> lengths as lists. Raises ValueError for a log that does not fit the rollout."""
    grid = B, G, R = rollout.tokens.shape
    shapes = rollout.until.shape[2:], rollout.lengths.shape
    if (len(rollout.prompts), len(rollout.kept), *shapes) != (B, B, grid, grid[:2]):
        raise ValueError(f"the log does not fit {B} prompts x {G} samples x {R} tokens: "
                         f"{len(rollout.prompts)} prompts, kept for {len(rollout.kept)}, until "
                         f"{tuple(rollout.until.shape)}, lengths {tuple(rollout.lengths.shape)}")
    check_integers(tokens=rollout.tokens, lengths=rollout.lengths, until=rollout.until)
    T = rollout.temperature
    if not isinstance(T, (int, float)) or not 0 <= T < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {T!r}")
    sizes = [len(prompt) for prompt in rollout.prompts]
    for b, (P, sampled) in enumerate(zip(sizes, rollout.sizes or sizes)):
        if P < 1 or P != sampled:
            raise ValueError(f"prompt {b} has {P} tokens, the one that was sampled from {sampled}")
    lengths = rollout.lengths.tolist()  # asked once: each question stalls a card
    shortest, longest = min(map(min, lengths)), max(map(max, lengths))
    if shortest < 1 or longest > R:
        raise ValueError(f"response lengths must be 1 to {R}, got {shortest} to {longest}")
    born = torch.arange(R, device=rollout.until.device)
    if not ((rollout.until > born) | ~rollout.mask).all():
        raise ValueError("until of response token t must be above t: its own query sees its key")
    return lengths


def check_integers(**tensors):
    for name, x in tensors.items():
        if not torch.is_tensor(x) or x.is_floating_point():
            got = x.dtype if torch.is_tensor(x) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of integers, got {got}")


def kept_slots(rollout):
    """Of each prompt the kept keys' (n,) places in a flattened (L, nkv, P). Raises ValueError for
    what is not kept by all layers and KV heads, or not in ascending order from 0 to P - 1."""
    L, nkv = rollout.until.shape[:2]
    slots, sound = [], []
    for prompt, kept in zip(rollout.prompts, rollout.kept):
        if len(kept) != L or any(len(heads) != nkv for heads in kept):
            raise ValueError(f"kept is not given for {L} layers and {nkv} KV heads")
        if torch.is_tensor(kept):  # all keep equally many
            positions, counts = kept.flatten(), kept.shape[2]
        else:
            heads = [positions for heads in kept for positions in heads]
            for positions in heads:
                check_integers(kept=positions)
            positions = torch.cat(heads)                                  # (n,)
            counts = torch.tensor([len(x) for x in heads], device=positions.device)
        check_integers(kept=positions)
        head = torch.arange(L * nkv, device=positions.device).repeat_interleave(
            counts, output_size=len(positions))                           # (n,)
        slot = head * len(prompt) + positions
        inside = (positions >= 0) & (positions < len(prompt))
        sound.append(inside.all() & (slot.diff() > 0).all())
        slots.append(slot)
    for b, good in enumerate(torch.stack(sound).tolist()):  # asked once, before any is used
        if not good:
            raise ValueError(f"kept of prompt {b}: positions must be ascending and inside, the "
                             f"prompt has {len(rollout.prompts[b])} tokens")
    return slots


def replay(model, rollout, policies=("dense", "shadow"), distill_to=None, stats=False,
           checkpointing=False, value=None, teacher=None):
    """Score the rollout's tokens with the learner, under every policy asked for, in one packed
    forward pass. -> dict of (B, G, R), fp32, 0 past each length:

    "dense", "shadow": log-probs under the policies, with gradients, at the rollout's temperature
        (greedy: at 1, as the sampler's).
    "kl": KL(student || teacher) per token over the vocabulary, where distill_to names the student.
        teacher: a frozen model, the same policy of it; None: the model's other policy, detached.
    "entropy", of the last policy, and "accept", of two policies the sum over the vocabulary of the
        smaller probability: with stats, without gradients.
    "value": value(hidden (n, C) fp32) -> (n, 1) of the rows that predict the tokens under the last
        policy.
    checkpointing: see Transformer.forward. Raises ValueError for unknown policies, a student
    without a teacher or the reverse, and a log that does not fit the model."""
    policies = tuple(policies)
    asked = distill_to is not None or teacher is not None
    alone = len(policies) < 2 and teacher is None
    if asked and (alone or distill_to not in policies):
        raise ValueError(f"distill_to={distill_to!r} needs both policies, or a teacher, and one of "
                         f"their names, got {policies}")
    packed, mask, c = pack(rollout, policies), rollout.mask, model.config
    targets = rollout.tokens[mask]                                        # (n,)
    need = (c.n_layer, c.n_kv_head, len(packed.ids))
    if packed.until.shape != need:
        raise ValueError(f"the log holds lifetimes {tuple(packed.until.shape)}, the model needs "
                         f"{need}: (layers, KV heads, rows)")
    longest = max(map(len, rollout.prompts)) + rollout.tokens.shape[2]
    if longest > c.max_pos:
        raise ValueError(f"prompt and response have up to {longest} tokens, the model's context is "
                         f"{c.max_pos}")
    check_tokens(packed.ids, targets, model)
    # one preparation for all layers saves thousands of small launches; of very long rows its lists
    # would be large
    plans = [None] * c.n_layer
    if packed.until.is_cuda and c.n_layer * c.n_kv_head * len(packed.ids) ** 2 < 2**39:
        plans = make_plans(packed.until, torch.is_grad_enabled())

    def attend(layer, q, k, v):  # here the Shadow Mask enters the learner
        return shadow_attention(q, k, v, packed.until[layer], plan=plans[layer])

    hidden = model(packed.ids, packed.pos, attend, checkpointing)         # (N, C)
    # only rows that predict a response token meet the head. Indexing, not index_select: the
    # prompt's last row is gathered once per response, and this sums its gradients in a fixed order
    hidden = [hidden[packed.rows[p][mask]] for p in policies]             # (n, C) each
    student = policies.index(distill_to) if distill_to else None
    if teacher is not None:
        with torch.no_grad():
            rows = packed.rows[distill_to][mask]                          # (n,)
            teacher = teacher.head, teacher(packed.ids, packed.pos, attend)[rows]
    out = head_rows(model.head, hidden, targets, student=student, stats=stats,
                    temperature=rollout.temperature or 1.0, absent=model.absent, teacher=teacher)
    out.update(zip(policies, out.pop("logp")))
    if value is not None:
        out["value"] = value(widen(hidden[-1]))[:, 0]
    return {name: torch.zeros_like(mask, dtype=x.dtype).masked_scatter(mask, x)
            for name, x in out.items()}


def check_tokens(ids, targets, model):
    """Raise ValueError for ids of which the model has no embedding, or, of targets, no logit."""
    lowest, highest, least, most = torch.stack((*ids.aminmax(), *targets.aminmax())).tolist()
    if lowest < 0 or highest >= model.config.vocab_size:
        raise ValueError(f"the rollout holds token ids {lowest} to {highest}, the vocabulary has "
                         f"{model.config.vocab_size}")
    if least < 0 or most >= model.vocab_used:
        raise ValueError(f"the responses hold token ids {least} to {most}, the model samples ids "
                         f"below {model.vocab_used}")


# From here on pure functions of log-probs, advantages and masks, (B, G, R) unless said otherwise.
# What stands past the mask has no influence on any of them, NaN included.

def advantages(rewards, norm="sequence"):
    """rewards (B, G) -> advantages (B, G): reward minus the group's mean, over (std + 1e-4) unless
    norm is "constant".

    The standard deviation is the unbiased one (G - 1), as in TRL and verl. Computed in fp64: equal
    fp32 rewards give exactly 0, where fp32 leaves a residue that division by a tiny std would blow
    up. Raises ValueError for an unknown norm, another shape, rewards that are not finite, and
    G < 2: a response has no baseline in itself."""
    check_norm(norm)
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError("rewards must be (prompts, samples) with at least 2 samples a prompt, got "
                         f"{tuple(rewards.shape)}")
    check_finite(rewards)
    x = rewards.double()
    adv = x - x.mean(1, keepdim=True)
    if norm != "constant":
        adv = adv / (x.std(1, keepdim=True) + 1e-4)
    return adv.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def check_rewards(rewards, rollout):
    """Raise ValueError unless there is one finite number for each response."""
    same_shape(rollout.lengths, rewards=rewards)
    check_finite(rewards)


def check_finite(rewards):
    if not rewards.isfinite().all():
        raise ValueError(f"{int((~rewards.isfinite()).sum())} of {rewards.numel()} rewards are not "
                         "finite")


def check_norm(norm):
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: one of {', '.join(NORMS)}")


def token_scale(mask, norm="sequence"):
    """Weights, fp32, by which per-token losses are summed; 0 where mask (bool) is False.

    "sequence": mean over a response's tokens, then over responses (GRPO). "token": mean over all
    tokens (DAPO). "constant": sum over B x G x R (Dr. GRPO), R being the number of columns, so it
    must not be trimmed to the longest response. Micro-batches take slices of the whole batch's
    scale: gradients then add up to those of the whole batch."""
    check_norm(norm)
    same_shape(mask, mask=mask)
    weight = mask.float()
    if norm == "sequence":
        responses = mask.numel() / mask.shape[-1]
        return weight / weight.sum(-1, keepdim=True).clamp(min=1) / responses
    if norm == "token":
        return weight / weight.sum().clamp(min=1)
    return weight / mask.numel()


def log_ratio(mask, logp, logp_old):
    """logp - logp_old, 0 where mask is False, within +-20 so that exp stays finite."""
    return (torch.where(mask, logp, 0.0) - torch.where(mask, logp_old, 0.0)).clamp(-20, 20)


def policy_loss(logp, logp_old, adv, mask, clip=0.2, clip_high=None, norm="sequence", weight=None,
                scale=None):
    """Clipped surrogate. adv (B, G), or (B, G, R) by token; mask bool -> loss (), stats.

    logp_old None: first update after a rollout, the ratio is exp(logp - logp.detach()), exactly 1.
    Later updates pass the learner's own log-probs recorded before the first one. clip, clip_high
    (None: as clip): the ratio earns nothing beyond 1 - clip and 1 + clip_high. weight: per-token
    correction, detached here. scale: a slice of the whole batch's `token_scale` when this is a
    micro-batch; it replaces norm. stats, detached (): means over the mask of clip_frac (1 where the
    clip cut the gradient), ratio, and kl_old (k3 estimate of KL(old || new)). Raises ValueError for
    shapes that would broadcast and an unknown norm."""
    check_norm(norm)
    same_shape(logp, mask=mask, logp_old=logp_old, weight=weight, scale=scale)
    same_shape(logp if adv.dim() == logp.dim() else logp[..., 0], adv=adv)
    if scale is None:
        scale = token_scale(mask, norm)
    if logp_old is None:
        logp_old = logp
    adv = adv.detach()
    adv = torch.where(mask, adv, 0.0) if adv.dim() == logp.dim() else adv[..., None]
    low, high = 1 - clip, 1 + (clip if clip_high is None else clip_high)

    d = log_ratio(mask, logp, logp_old.detach())
    ratio = d.exp()
    loss = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    if weight is not None:
        loss = loss * torch.where(mask, weight, 0.0).detach()
    with torch.no_grad():
        n = mask.sum().clamp(min=1)
        clipped = ((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))
        stats = dict(clip_frac=(clipped & mask).sum() / n, ratio=(ratio * mask).sum() / n,
                     kl_old=(ratio - 1 - d).sum() / n)
    return (scale * loss).sum(), stats


def same_shape(like, **tensors):
    """Raise ValueError for a tensor (None: left out) of another shape than like's, most of which
    would broadcast, and for a mask that is not bool: other numbers would be weights or indices."""
    for name, x in tensors.items():
        if x is not None and x.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be {tuple(like.shape)} "
                             "like the others")
    mask = tensors.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")


def correction(name, logp_old, logp_roll, mask):
    """Weights for a sampler that was not the learner, of w = exp(logp_old - logp_roll).

    logp_old: the learner before its update, so that the weight does not move with it. name: "tis"
    min(w, 2); "mis" w within [0.5, 2], else 0; "sparse_rl" (2601.10079) min(w, 1.5) over its mean
    over the tokens given, then 0 for w outside [0.5, 1.5] and for whole responses with any
    w < 1e-4. That mean is why the log-probs must be the whole batch's. Raises ValueError for an
    unknown name and shapes that would broadcast."""
    same_shape(mask, mask=mask, logp_old=logp_old, logp_roll=logp_roll)
    w = log_ratio(mask, logp_old.detach(), logp_roll).exp() * mask
    if name == "tis":
        return w.clamp(max=2)
    if name == "mis":
        return w * ((w >= 0.5) & (w <= 2))
    if name == "sparse_rl":
        capped = w.clamp(max=1.5)
        mean = capped.sum() / mask.sum().clamp(min=1)
        sound = ~((w < 1e-4) & mask).any(-1, keepdim=True)                # (B, G, 1)
        return capped / mean * ((w >= 0.5) & (w <= 1.5) & sound)
    raise ValueError(f"unknown correction {name!r}: one of {', '.join(CORRECTIONS)}")


def reference_kl(logp, logp_ref, mask, logp_old=None):
    """KL(policy || reference) on sampled tokens, 0 past mask: ratio * k3, k3 = e^d - d - 1,
    d = logp_ref - logp.

    The ratio to the sampling policy (None: exactly 1, as in policy_loss) carries the half of the
    gradient that differentiating k3 alone loses: without it the expected gradient is that of
    KL(reference || policy). Raises ValueError for shapes that would broadcast."""
    same_shape(logp, logp_ref=logp_ref, mask=mask, logp_old=logp_old)
    if logp_old is None:
        logp_old = logp
    d = log_ratio(mask, logp_ref.detach(), logp)
    ratio = log_ratio(mask, logp, logp_old.detach()).exp()
    return ratio * (d.exp() - d - 1)


class GRPO:
    """The objective as train.py's loop sees it; objectives/ has others with the same methods.

    settings: those of train.py. initial(): a frozen copy of the model as it was before training,
    for objectives that need one."""
    value = None  # PPO: a head that is trained and saved with the model
    at_least = 2  # samples per prompt
    uses = ("correction", "ratio_to", "ref_kl", "norm", "clip", "clip_high", "updates")

    def __init__(self, model, settings, initial):
        self.c = settings
        self.reference = initial() if settings.ref_kl else None

    @classmethod
    def check(cls, c):
        """Raise ValueError for settings that make no sense together, before a model is loaded."""
        if c.group < cls.at_least:
            raise ValueError(f"group must be at least {cls.at_least}, got {c.group}: samples of "
                             "one prompt are compared")
        if c.correction == "none":
            return
        if c.ratio_to == "sampler":
            raise ValueError(f"correction={c.correction} with ratio_to=sampler would count twice "
                             "what sets the learner apart from the sampler")
        if c.evict == "none" or c.learner == "shadow":
            raise ValueError(f"correction={c.correction} weighs a sampler that was not the "
                             f"learner; with evict={c.evict}, learner={c.learner} both are one "
                             "policy and all weights 1: it takes an eviction method and "
                             "--learner=dense")

    def prepare(self, rollout, rewards, score):
        """Once per rollout, before its first update: what takes the whole batch, so that
        micro-batches of any size give the same gradient.

        rewards (B, G). score(rollout, model=...): what replay returns for the learner's policy of
        this model, or another, without gradients. -> the rollout to learn from; batch, tensors of
        which micro-batches take their prompts, "scale" among them; numbers for the log"""
        c, log = self.c, {}
        check_rewards(rewards, rollout)
        batch = dict(adv=advantages(rewards, c.norm), scale=token_scale(rollout.mask, c.norm))
        if c.correction != "none":  # else the learner's log-probs come with the first update
            batch["weight"], log = self.weigh(rollout, score(rollout)[c.learner])
        if self.reference is not None:
            batch["ref"] = score(rollout, model=self.reference)[c.learner]
        return rollout, batch, log

    def weigh(self, rollout, logp):
        """-> weights (B, G, R) of the configured correction, their numbers for the log"""
        mask = rollout.mask
        weight, n = correction(self.c.correction, logp, rollout.logp_roll, mask), mask.sum().item()
        rejected = ((weight == 0) & mask).sum().item()
        return weight, dict(weight=weight.sum().item() / n, rejected=rejected / n)

    def loss(self, out, part, batch, old, whole):
        """One micro-batch `part` of the rollout `whole`. out: what replay returned. batch: the
        part's share of prepare's. old: the learner's log-probs before its first update, None in
        that. -> loss (), numbers for the log; both add up over micro-batches"""
        c, logp = self.c, out[self.c.learner]
        if c.ratio_to == "sampler":
            old = part.logp_roll
        loss, stats = policy_loss(
            logp, old, batch["adv"], part.mask, clip=c.clip, clip_high=c.clip_high,
            weight=batch.get("weight"), scale=batch["scale"])
        n, of_all = part.mask.sum().item(), whole.mask.sum().item()
        numbers = {name: x.item() * n / of_all for name, x in stats.items()}
        if self.reference is not None:
            kl = (batch["scale"] * reference_kl(logp, batch["ref"], part.mask, old)).sum()
            loss = loss + c.ref_kl * kl
            numbers["ref_kl"] = kl.item()
        return loss, numbers
