"""
PPO under the Shadow Mask: GRPO's clipped surrogate with an advantage per token, from a learned value of every prefix.

The idea. A linear head on the hidden states predicts the reward from each prefix (it starts at 0). Generalized advantage
estimation turns rewards and values into an advantage per token; the head learns the returns, clipped like the policy.
Policy and values are read from `replay` under the mask, so the policy that is updated is the policy that sampled.

Departures: no KL to a reference; reduced by sequence unless `norm` says otherwise (TRL and verl: over tokens). A response that
was cut is taken for one that ended: no value is added to its reward.

References: PPO 1707.06347, GAE 1506.02438 (arXiv); the value's clip: PPO2 in OpenAI's baselines.
"""
import torch

from grpo import GRPO, token_scale


class PPO(GRPO):
    def __init__(self, model, settings, initial):
        super().__init__(model, settings, initial)
        self.value = torch.nn.Linear(model.config.width, 1, device=model.device)  # in the checkpoint, not in the saved model
        for p in self.value.parameters():
            torch.nn.init.zeros_(p)

    def check_group(self, at_least):  # the value stands in for the group's mean
        super().check_group(at_least=1)

    def prepare(self, rollout, rewards, score):
        c, mask = self.c, rollout.mask
        out = score(rollout)
        logp, values = out[c.learner], out["value"]                                           # (B, G, R)
        at_end = torch.zeros_like(logp).scatter(2, rollout.lengths[..., None] - 1, rewards[..., None])
        adv, returns = gae(at_end, values, mask, gamma=c.gamma, lam=c.lam)
        batch = dict(adv=whiten(adv, mask), scale=token_scale(mask, c.norm), values=values, returns=returns)
        log = dict(value=values.sum().item() / mask.sum().item())
        if c.correction != "none":
            batch["weight"], numbers = self.weigh(rollout, logp)
            log.update(numbers)
        return rollout, batch, log

    def loss(self, out, part, batch, old, whole):
        loss, numbers = super().loss(out, part, batch, old, whole)
        error = value_loss(out["value"], batch["values"], batch["returns"], part.mask, clip=self.c.clip, scale=batch["scale"])
        return loss + self.c.value_coef * error, dict(numbers, value_loss=error.item())


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
