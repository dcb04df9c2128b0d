"""
Online DPO under the Shadow Mask: raise the odds of a group's best response over its worst, measured
against the initial model.

The idea. The reward only ranks the samples of a group. Both responses are scored by the learner and
by a frozen copy of the initial model, each under the mask that the rollout logged, so the policy
that is updated is the policy that sampled.

References: DPO 2305.18290, online DPO 2402.04792 (arXiv).
"""
import torch
import torch.nn.functional as F

from grpo import check_rewards, same_shape, token_scale


class DPO:
    value = None
    uses = ("norm", "beta", "updates")  # norm: of the distillation

    def __init__(self, model, settings, initial):
        self.config = settings
        self.reference = initial()

    @classmethod
    def check(cls, config):
        if config.group < 2:
            raise ValueError(f"group must be at least 2, got {config.group}: samples "
                             "of one prompt are compared")

    def prepare(self, rollout, rewards, score):
        pairs = best_and_worst(rollout, rewards)
        log = dict(pairs=len(pairs.prompts))
        if not pairs.prompts:
            return pairs, {}, log
        ref = score(pairs, model=self.reference)[self.config.learner]     # (pairs, 2, R)
        scale = token_scale(pairs.mask, self.config.norm)                 # (pairs, 2, R)
        return pairs, dict(ref=ref, scale=scale), log

    def loss(self, out, part, batch, old, whole):
        logp = out[self.config.learner]
        losses, margins = dpo_loss(logp, batch["ref"], part.mask, self.config.beta)
        pairs = len(whole.prompts)
        return losses.sum() / pairs, dict(margin=margins.sum().double() / pairs)


def best_and_worst(rollout, rewards):
    """The rollout of a pair per prompt, best response first, by rewards (B, G); of equals the
    first. -> Rollout, G = 2

    Prompts whose responses all earned the same have no pair and are left out, so the rollout may
    hold no prompt at all. Raises ValueError for rewards that are not finite, or not one for each
    response."""
    check_rewards(rewards, rollout.lengths)
    differ = rewards.max(1).values > rewards.min(1).values                # (B,)
    pair = torch.stack([rewards.argmax(1), rewards.argmin(1)], 1)         # (B, 2) samples
    return rollout.select(differ.nonzero()[:, 0], pair[differ])


def dpo_loss(logp, logp_ref, mask, beta=0.1):
    """-log sigmoid(beta ((logp_w - ref_w) - (logp_l - ref_l))), of whole responses (2305.18290,
    eq. 7).

    logp, logp_ref, mask (B, 2, R), the better response (w) first, the reference without gradient ->
    losses (B,), margins (B,) detached: what stands in the brackets behind beta. What stands past
    the mask has no influence, NaN included. Raises ValueError for other shapes."""
    same_shape(logp, logp_ref=logp_ref, mask=mask)
    if logp.dim() != 3 or logp.shape[1] != 2:
        raise ValueError("log-probs must be (pairs, 2, R): a pair has 2 responses, "
                         f"got {logp.shape[1]} in {tuple(logp.shape)}")
    gain = torch.where(mask, logp, 0.0) - torch.where(mask, logp_ref.detach(), 0.0)
    gain = gain.sum(-1)                                                   # (B, 2)
    margin = gain[:, 0] - gain[:, 1]
    return -F.logsigmoid(beta * margin), margin.detach()
