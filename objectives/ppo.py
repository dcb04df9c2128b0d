"""
PPO under the Shadow Mask: GRPO's clipped surrogate with an advantage per token, from a learned
value of every prefix.

The idea. A linear head on the hidden states predicts the reward from each prefix; it starts at 0.
Generalized advantage estimation turns rewards and values into an advantage per token, and the head
learns the returns, clipped like the policy. Policy and values are read from `replay` under the
mask, so the policy that is updated is the policy that sampled.

Departures: the KL to a reference (ref_kl) is part of the loss, not of the rewards; reduced by
sequence unless `norm` says otherwise (TRL and verl: by token). A response that was cut is taken for
one that ended: no value is added to its reward.

References: PPO 1707.06347, GAE 1506.02438 (arXiv); the value's clip: PPO2 in OpenAI's baselines.
"""
import torch

from grpo import GRPO, same_shape, token_scale


class PPO(GRPO):
    at_least = 1  # samples per prompt: the value stands in for the group's mean
    uses = (*GRPO.uses, "gamma", "lam", "value_coef")

    def __init__(self, model, settings, initial):
        super().__init__(model, settings, initial)
        # trained and kept in the checkpoint, not part of the saved model
        self.value = torch.nn.Linear(model.config.width, 1, device=model.device)
        for weight in self.value.parameters():
            torch.nn.init.zeros_(weight)

    def credit(self, rollout, rewards, out):
        config = self.config
        mask = rollout.mask
        values = out["value"]                                             # (B, G, R)
        last = rollout.lengths[..., None] - 1                             # (B, G, 1)
        at_end = torch.zeros_like(values)
        at_end = at_end.scatter(2, last, rewards[..., None].to(values))   # (B, G, R)
        adv, returns = gae(at_end, values, mask, gamma=config.gamma, lam=config.lam)
        batch = dict(adv=whiten(adv, mask), values=values, returns=returns)
        return batch, dict(value=values.sum().item() / mask.sum().item())

    def loss(self, out, part, batch, old, whole):
        loss, numbers = super().loss(out, part, batch, old, whole=whole)
        error = value_loss(out["value"], batch["values"], batch["returns"], part.mask,
                           clip=self.config.clip, scale=batch["scale"])
        numbers["value_loss"] = error.detach()
        return loss + self.config.value_coef * error, numbers


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalized advantage estimation (1506.02438, eq. 16), detached. rewards, values (B, G, R)
    per token, mask bool -> advantages, returns (B, G, R).

        delta_t = reward_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1},   return_t = A_t + V_t

    V_t is the value of the prefix that predicts token t. Past the last token of a response V and A
    are 0, whatever stands there, and so is what is returned. Raises ValueError for shapes that
    would broadcast, as the functions below do."""
    same_shape(mask, mask=mask, rewards=rewards, values=values)
    rewards = torch.where(mask, rewards.detach(), 0.0)
    values = torch.where(mask, values.detach(), 0.0)
    adv = torch.zeros_like(values)
    last = torch.zeros_like(values[..., 0])                               # (B, G)
    after = torch.zeros_like(last)                                        # (B, G)
    for step in reversed(range(values.shape[-1])):
        delta = rewards[..., step] + gamma * after - values[..., step]
        last = delta + gamma * lam * last
        adv[..., step] = last
        after = values[..., step]
    return adv, adv + values


def whiten(adv, mask):
    """adv (B, G, R) minus the mean over the mask's tokens, over (std + 1e-4); 0 past the mask. In
    fp64, as advantages are."""
    same_shape(adv, mask=mask)
    some = adv[mask].double()                                             # (n,)
    some = (some - some.mean()) / (some.std(correction=min(1, len(some) - 1)) + 1e-4)
    return torch.zeros_like(adv).masked_scatter(mask, some.to(adv.dtype))


def value_loss(values, values_old, returns, mask, clip=0.2, scale=None):
    """Clipped value loss of PPO2, all (B, G, R), mask bool -> scalar: sum of scale (None: mean over
    all tokens) times

        0.5 max((V - return)^2, (V_old + clamp(V - V_old, -clip, clip) - return)^2)

    values_old: before the first update on the rollout. A value that moved by more than clip towards
    its return has no gradient. What stands past the mask has no influence, NaN included."""
    same_shape(values, values_old=values_old, returns=returns, mask=mask, scale=scale)
    if scale is None:
        scale = token_scale(mask, "token")
    values = torch.where(mask, values, 0.0)
    old = torch.where(mask, values_old.detach(), 0.0)
    returns = torch.where(mask, returns.detach(), 0.0)
    near = old + (values - old).clamp(-clip, clip)
    error = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return (scale * 0.5 * error).sum()
