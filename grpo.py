"""
The learner: a logged rollout becomes one packed sequence, one forward pass scores both policies,
and GRPO's loss is a formula.

The idea. `pack` lays each group out in one long sequence, each position of which is a row:

    [ prompt | dense copies of the G responses | shadow copies of the G responses ] [ next prompt ..

and gives every key, in every layer and KV head, the row at which it dies: `until`. This is where a
logged eviction becomes a lifetime. `replay` runs the model once over all rows. Dense copies see the
whole prompt, shadow copies see what the sampler saw: one forward pass yields the log-probs of the
dense policy and of the policy that sampled, and the KL between them.

GRPO: the G responses to one prompt are each other's baseline.

    A_g = (reward_g - mean) / (std + 1e-4)                    "constant" leaves out the division
    r_t = exp(logp_t - logp_old_t)                             to the learner before its update
    L   = sum_t scale_t weight_t * -min(r_t A, clip(r_t, 1 - clip, 1 + clip_high) A)

`scale` averages over tokens and responses as `norm` says (token_scale). `weight` corrects for a
sampler that was not the learner, as where it evicts and the learner is dense; with replay both are
one policy and it is 1. On the first update after a rollout r is exactly 1: with norm = "sequence"
the loss is then 0, as a group's advantages sum to 0, but its gradient is not. With ratio_to =
"sampler" logp_old is the sampler's log-prob: what trainers call bypass, and their answer to a
sampler that was not the learner. ref_kl adds a KL to the initial model, train.update the
distillation term.

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

from fast.attention import plans_of
from fast.head import head_rows
from fast.launch import widen
from fast.recorded import recorded
from shadow_attn import shadow_attention

NORMS = ("sequence", "token", "constant")
CORRECTIONS = ("tis", "mis", "sparse_rl")


@dataclass
class Packed:
    """Groups laid out in one sequence of N rows, for one forward pass of the learner."""
    # (N,) int64 the token of each row
    ids: torch.Tensor
    # (N,) int64 true positions: response token t sits at P + t in every copy
    pos: torch.Tensor
    # (L, nkv, N) int32 rows: query i sees key j if j <= i < until[layer, head, j]
    until: torch.Tensor
    # policy -> (B, G, R) int64: the row that predicts each token, else -1
    rows: dict


def pack_by_hand(rollout, policies=("dense", "shadow")):
    """What `pack` does, one key at a time: the text to read. rollout: see rollout.Rollout, whose
    until counts response steps; here it becomes rows. -> Packed

    Response token 0 is predicted by the prompt's last row, which saw all keys in the sampler too.
    Token t > 0 is predicted by the row of token t - 1, so the last token of a response needs no
    row: n tokens take n - 1 rows per copy."""
    B, G, R = rollout.tokens.shape
    L, nkv = rollout.until.shape[:2]
    # dense copies come first: prompt keys that were dropped die where the shadow copies begin
    policies = [policy for policy in ("dense", "shadow") if policy in policies]
    ids, pos, until = [], [], []  # of each row; until[row][layer][kv_head]
    rows = {policy: torch.full((B, G, R), -1) for policy in policies}
    for group, prompt in enumerate(rollout.prompts):
        P = len(prompt)
        fed = [n - 1 for n in rollout.lengths[group].tolist()]  # rows of each copy
        first = len(ids)  # the row of the prompt's first token
        own = sum(fed)  # rows that the responses take under one policy
        end = first + P + len(policies) * own  # where the next group begins
        # where the shadow copies begin. One row too late shows in the gap of the shadow policy. One
        # row too early takes keys from the last dense row, which no gap compares with a sampler:
        # tests/test_grpo.py holds both
        dropped_at = end - own if "shadow" in policies else end

        for position, token in enumerate(prompt):
            ids.append(token)
            pos.append(position)
            until.append([[end if position in kept else dropped_at for kept in layer]
                          for layer in rollout.kept[group]])  # kept: of one KV head

        for policy in policies:
            for sample in range(G):
                born = len(ids)  # the first row of this copy
                gone = born + fed[sample]  # the row after its last
                rows[policy][group, sample, 0] = first + P - 1
                for step in range(fed[sample]):
                    ids.append(int(rollout.tokens[group, sample, step]))
                    pos.append(P + step)
                    dies = torch.full((L, nkv), gone)  # with its copy
                    if policy == "shadow":  # or when the sampler dropped it
                        dropped = born + rollout.until[:, :, group, sample, step].cpu()
                        dies = dies.minimum(dropped)
                    until.append(dies.tolist())
                    rows[policy][group, sample, step + 1] = born + step
    until = torch.tensor(until, dtype=torch.int32)              # (N, L, nkv)
    until = until.permute(1, 2, 0).contiguous()                 # (L, nkv, N)
    return Packed(torch.tensor(ids), torch.tensor(pos), until, rows)


def pack(rollout, policies=("dense", "shadow")):
    """Lay a rollout out for the learner; `policies` says which copies it holds. -> Packed

    `pack_by_hand` in tensors: all prompts at a time, then all copies of all groups. Of a group with
    responses of 4, 2 and 3 tokens, where a policy's copies begin at row 100:

        sample  0    0    0    1    2    2      of each row
        step    0    1    2    0    0    1      the token's number in its response
        row     100  101  102  103  104  105
        born    100  100  100  103  104  104    by sample 100 103 104, fed 3 1 2
        gone    103  103  103  104  106  106    by sample 103 104 106

    Raises ValueError for a log that does not fit."""
    if sorted(policies) not in (["dense"], ["shadow"], ["dense", "shadow"]):
        raise ValueError("policies must be 'dense', 'shadow' or both, each once, "
                         f"got {policies!r}")
    kept = rollout.check()
    (G, R), (L, nkv) = rollout.tokens.shape[1:], rollout.until.shape[:2]
    policies = [policy for policy in ("dense", "shadow") if policy in policies]
    device = rollout.tokens.device
    tokens = torch.tensor([token for prompt in rollout.prompts for token in prompt],
                          device=device)
    P = torch.tensor([len(prompt) for prompt in rollout.prompts], device=device)  # (B,)
    fed = rollout.lengths - 1                                   # (B, G)
    own = fed.sum(1)                                            # (B,)
    end = (P + len(policies) * own).cumsum(0)                   # (B,)
    copies = end - len(policies) * own  # (B,) the rows where a policy's copies begin
    first = copies - P
    dropped_at = end - own if "shadow" in policies else end
    ids, pos = tokens.new_empty(2, int(end[-1]))
    until = torch.empty(L * nkv, len(ids), dtype=torch.int32, device=device)

    group = torch.repeat_interleave(P, output_size=len(tokens))
    row = torch.arange(len(tokens), device=device) + (first - P.cumsum(0) + P)[group]
    ids[row], pos[row] = tokens, row - first[group]
    until[:, row] = dropped_at[group].int()
    group, head, position = kept
    until[head, first[group] + position] = end[group].int()

    # (n,) each, of a policy's copies; samples are counted on from group to group
    sample, step = rollout.mask[..., 1:].flatten(0, 1).nonzero(as_tuple=True)
    # of all policies, Q of them, at a time; number 0 is the first
    number = torch.arange(len(policies), device=device)[:, None, None]
    gone = copies[:, None] + number * own[:, None] + fed.cumsum(1)  # (Q, B, G)
    born = gone - fed                                           # (Q, B, G)
    rows = born[..., None] + torch.arange(-1, R - 1, device=device)  # (Q, B, G, R)
    rows[..., 0] = (first + P - 1)[:, None]
    rows.masked_fill_(~rollout.mask, -1)
    born, gone = born.flatten(1)[:, sample], gone.flatten(1)[:, sample]  # (Q, n)
    row = born + step                                           # (Q, n)
    ids[row] = rollout.tokens.flatten(0, 1)[sample, step].long()
    pos[row] = P[sample // G] + step
    until[:, row] = gone.int()
    if "shadow" in policies:  # the last of them
        dropped = rollout.until.flatten(2, 3).flatten(0, 1)[:, sample, step]
        until[:, row[-1]] = gone[-1].minimum(born[-1] + dropped).int()
    return Packed(ids, pos, until.view(L, nkv, -1), dict(zip(policies, rows)))


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
    has_teacher = teacher is not None or len(policies) == 2
    distills = teacher is not None or distill_to is not None
    if distills and not (has_teacher and distill_to in policies):
        raise ValueError(f"distill_to={distill_to!r} must be one of the policies, "
                         f"with a second one or a teacher, got {policies}")
    packed = pack(rollout, policies)
    rollout.check_model(model)
    # all that asks a card for sizes comes before the pass, for which it would have to wait
    mask, tokens = rollout.mask, rollout.sampled                # (B, G, R); (n,) indices
    targets = rollout.tokens[tokens]                            # (n,)
    at = {policy: packed.rows[policy][tokens] for policy in policies}  # (n,) rows, each

    def attend_under(until):  # here the Shadow Mask enters the learner
        plans = plans_of(until, torch.is_grad_enabled())
        return lambda layer, q, k, v: shadow_attention(
            q, k, v, until[layer], plan=plans[layer])

    hidden = recorded(model, packed.ids, packed.pos, until=packed.until,
                      attend_under=attend_under, checkpointing=checkpointing)  # (N, C)
    # only rows that predict a response token meet the head. Indexing, not index_select: the
    # prompt's last row is gathered once per response, and this sums its gradients in a fixed order
    scored = [hidden[at[policy]] for policy in policies]        # (n, C) each
    student = policies.index(distill_to) if distill_to else None
    frozen = None  # the teacher's head and hidden states, where it is another model
    if teacher is not None:
        with torch.no_grad():
            attend = attend_under(packed.until)
            theirs = teacher(packed.ids, packed.pos, attend)    # (N, C)
            frozen = teacher.head, theirs[at[distill_to]]       # (n, C)
    out = head_rows(
        model.head, scored, targets, student=student, stats=stats, teacher=frozen,
        temperature=rollout.temperature or 1.0, absent=model.absent)
    logps = out.pop("logp")
    out.update(zip(policies, logps))
    if value is not None:
        out["value"] = value(widen(scored[-1]))[:, 0]           # (n,)
    return {name: torch.zeros_like(mask, dtype=found.dtype).masked_scatter(mask, found)
            for name, found in out.items()}                     # (B, G, R) each


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
        raise ValueError("rewards must be (prompts, samples) with at least 2 samples a "
                         f"prompt, got {tuple(rewards.shape)}")
    check_rewards(rewards, rewards)
    exact = rewards.double()
    adv = exact - exact.mean(1, keepdim=True)
    if norm != "constant":
        adv = adv / (exact.std(1, keepdim=True) + 1e-4)
    return adv.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def check_rewards(rewards, like):
    """Raise ValueError unless they are finite and, as like (B, G), one for each response."""
    same_shape(like, rewards=rewards)
    wrong = int((~rewards.isfinite()).sum())
    if wrong:
        raise ValueError(f"{wrong} of {rewards.numel()} rewards are not finite")


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
    logp = torch.where(mask, logp, 0.0)
    logp_old = torch.where(mask, logp_old, 0.0)
    return (logp - logp_old).clamp(-20, 20)


def policy_loss(logp, logp_old, adv, mask, clip=0.2, clip_high=None, norm="sequence",
                weight=None, scale=None):
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
    by_token = adv.dim() == logp.dim()
    same_shape(logp if by_token else logp[..., 0], adv=adv)
    if scale is None:
        scale = token_scale(mask, norm)
    if logp_old is None:
        logp_old = logp
    adv = adv.detach()
    adv = torch.where(mask, adv, 0.0) if by_token else adv[..., None]
    low = 1 - clip
    high = 1 + (clip if clip_high is None else clip_high)

    change = log_ratio(mask, logp, logp_old.detach())
    ratio = change.exp()
    loss = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    if weight is not None:
        loss = loss * torch.where(mask, weight, 0.0).detach()
    with torch.no_grad():
        tokens = mask.sum().clamp(min=1)
        clipped = ((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))
        stats = dict(
            clip_frac=(clipped & mask).sum() / tokens,
            ratio=(ratio * mask).sum() / tokens,
            kl_old=(ratio - 1 - change).sum() / tokens)
    return (scale * loss).sum(), stats


def same_shape(like, **tensors):
    """Raise ValueError for a tensor (None: left out) of another shape than like's, most of which
    would broadcast, and for a mask that is not bool: other numbers would be weights or indices."""
    for name, found in tensors.items():
        if found is not None and found.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(found.shape)}, it must be "
                             f"{tuple(like.shape)} like the others")
    mask = tensors.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")


def correction(name, logp_old, logp_roll, mask):
    """Weights for a sampler that was not the learner, of ratio = exp(logp_old - logp_roll).

    logp_old: the learner before its update, so that the weight does not move with it. name: "tis"
    min(ratio, 2); "mis" the ratio within [0.5, 2], else 0; "sparse_rl" (2601.10079) min(ratio, 1.5)
    over its mean over the tokens given, then 0 for ratios outside [0.5, 1.5] and for whole
    responses with any below 1e-4. That mean is why the log-probs must be the whole batch's. Raises
    ValueError for an unknown name and shapes that would broadcast."""
    same_shape(mask, mask=mask, logp_old=logp_old, logp_roll=logp_roll)
    ratio = log_ratio(mask, logp_old.detach(), logp_roll).exp() * mask
    if name == "tis":
        return ratio.clamp(max=2)
    if name == "mis":
        return ratio * ((ratio >= 0.5) & (ratio <= 2))
    if name == "sparse_rl":
        capped = ratio.clamp(max=1.5)
        mean = capped.sum() / mask.sum().clamp(min=1)
        sound = ~((ratio < 1e-4) & mask).any(-1, keepdim=True)      # (B, G, 1)
        return capped / mean * ((ratio >= 0.5) & (ratio <= 1.5) & sound)
    raise ValueError(f"unknown correction {name!r}: one of {', '.join(CORRECTIONS)}")


def reference_kl(logp, logp_ref, mask, logp_old=None):
    """KL(policy || reference) on sampled tokens, 0 past mask: ratio * k3, where
    k3 = e^change - change - 1 and change = logp_ref - logp.

    The ratio to the sampling policy (None: exactly 1, as in policy_loss) carries the half of the
    gradient that differentiating k3 alone loses: without it the expected gradient is that of
    KL(reference || policy). Raises ValueError for shapes that would broadcast."""
    same_shape(logp, logp_ref=logp_ref, mask=mask, logp_old=logp_old)
    if logp_old is None:
        logp_old = logp
    change = log_ratio(mask, logp_ref.detach(), logp)
    ratio = log_ratio(mask, logp, logp_old.detach()).exp()
    return ratio * (change.exp() - change - 1)


class GRPO:
    """The objective as train.py's loop sees it; objectives/ has others with the same methods.

    settings: those of train.py. initial(): a frozen copy of the model as it was before training,
    for objectives that need one."""
    value = None  # PPO: a head that is trained and saved with the model
    at_least = 2  # samples per prompt
    uses = ("correction", "ratio_to", "ref_kl", "norm", "clip", "clip_high", "updates")

    def __init__(self, model, settings, initial):
        self.config = settings
        self.reference = initial() if settings.ref_kl else None

    @classmethod
    def check(cls, config):
        """Raise ValueError for settings that make no sense together, before a model is loaded."""
        if config.group < cls.at_least:
            raise ValueError(f"group must be at least {cls.at_least}, got "
                             f"{config.group}: samples of one prompt are compared")
        if config.correction == "none":
            return
        name = f"correction={config.correction}"
        if config.ratio_to == "sampler":
            raise ValueError(f"{name} and ratio_to=sampler correct the same "
                             "difference twice: choose one of them")
        if config.evict == "none" or config.learner == "shadow":
            raise ValueError(f"{name} is for a sampler that differs from the learner; "
                             f"with evict={config.evict}, learner={config.learner} "
                             "they are one policy: evict keys, with --learner=dense")

    def prepare(self, rollout, rewards, score):
        """Once per rollout, before its first update: what takes the whole batch, so that
        micro-batches of any size give the same gradient.

        rewards (B, G). score(rollout, model=...): what replay returns for the learner's policy of
        this model, or another, without gradients. -> the rollout to learn from; batch, tensors of
        which micro-batches take their prompts, "scale" among them; numbers for the log"""
        config = self.config
        mask = rollout.mask
        check_rewards(rewards, rollout.lengths)
        # without these the learner's log-probs come with the first update
        needs_scores = self.value is not None or config.correction != "none"
        out = score(rollout) if needs_scores else {}
        batch, log = self.credit(rollout, rewards, out)
        batch["scale"] = token_scale(mask, config.norm)
        if config.correction != "none":
            weight = correction(
                config.correction, out[config.learner], rollout.logp_roll, mask)
            batch["weight"] = weight
            tokens = mask.sum().item()
            rejected = ((weight == 0) & mask).sum().item()
            log.update(weight=weight.sum().item() / tokens, rejected=rejected / tokens)
        if self.reference is not None:
            batch["ref"] = score(rollout, model=self.reference)[config.learner]
        return rollout, batch, log

    def credit(self, rollout, rewards, out):
        """What each response, or token, has earned: advantages and what else the loss learns from.
        out: what score returned, if the objective has a value head. -> batch, numbers"""
        return dict(adv=advantages(rewards, self.config.norm)), {}

    def loss(self, out, part, batch, old, whole):
        """One micro-batch `part` of the rollout `whole`. out: what replay returned. batch: the
        part's share of prepare's. old: the learner's log-probs before its first update, None in
        that. -> loss (), numbers for the log, tensors () too; both add up over micro-batches"""
        config = self.config
        logp = out[config.learner]
        if config.ratio_to == "sampler":
            old = part.logp_roll
        scale = batch["scale"]                                  # (b, G, R)
        loss, stats = policy_loss(
            logp, old, batch["adv"], part.mask, clip=config.clip,
            clip_high=config.clip_high, weight=batch.get("weight"), scale=scale)
        tokens, of_all = part.mask.sum(), whole.mask.sum()
        numbers = {name: x.double() * tokens / of_all for name, x in stats.items()}
        if self.reference is not None:
            kl = (scale * reference_kl(logp, batch["ref"], part.mask, old)).sum()
            loss = loss + config.ref_kl * kl
            numbers["ref_kl"] = kl.detach()
        return loss, numbers
