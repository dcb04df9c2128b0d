"""What an update is made of: micro-batches, a whole rollout replayed, the numbers of the log."""
import torch

from fast import head
from grpo import replay
from run.settings import policies_of
from support import parallel
from support.screen import say


def micro_batches(rollout, copies, limit, share=False):
    """Slices of the prompts of each micro-batch: as many groups as fit into `limit` packed rows, at
    least one. copies: of each response, one per policy. share: only this rank's prompts."""
    parts = []
    used = 0
    n = len(rollout.prompts)
    rows = (rollout.lengths - 1).sum(1).tolist()
    for b in parallel.share(n) if share else range(n):
        size = len(rollout.prompts[b]) + copies * rows[b]
        if not parts or used + size > limit:
            parts.append(slice(b, b))
            used = 0
        parts[-1] = slice(parts[-1].start, b + 1)
        used += size
    return parts


def size_logits(config):
    """Let the logits of a chunk of rows take logit_mb; for the whole process."""
    head.LOGIT_BYTES = config.logit_mb * 2**20


def replay_all(net, objective, config, rollout, model=None):
    """What replay returns for the learner's policy of net, or of another model, of a whole rollout
    and of all ranks, without gradients."""
    say("replaying")
    value = None if model else objective.value
    copies = len(policies_of(config))
    outs = []
    for some in micro_batches(rollout, copies, config.micro_rows, share=True):
        part = rollout.select(some)
        with torch.no_grad():
            outs.append(replay(model or net, part, (config.learner,), value=value))
    outs = sum(parallel.gather(outs), [])
    return {name: torch.cat([out[name] for out in outs]) for name in outs[0]}


def check_batch(batch, config):
    """Raise ValueError for what an objective prepared without what `update` takes from it."""
    if config.distill and "scale" not in batch:
        raise ValueError(f"objective={config.objective}: the batch that prepare "
                         "returns must hold 'scale', by which the KL is averaged "
                         f"(grpo.token_scale); it has {', '.join(batch) or 'nothing'}")


class Metrics:
    """Numbers of one optimizer step: sums over micro-batches, and numbers of single tokens. Tensors
    stay what they are, as a question stalls a card, and the sums of fp64 tensors are those of
    Python's numbers."""

    def __init__(self, **sums):
        self.sums = sums
        self.parts = {}

    def add(self, **numbers):
        for name, x in numbers.items():
            if torch.is_tensor(x):
                if x.numel() != 1:
                    raise ValueError(f"{name} must be one number, got {tuple(x.shape)}")
                x = x.detach().double().view(())
            self.sums[name] = self.sums.get(name, 0.0) + x

    def collect(self, at, **tensors):
        """Keep the entries of each tensor at these places. Indices take no question, a mask does.
        """
        for name, x in tensors.items():
            self.parts.setdefault(name, []).append(x[at])

    @classmethod
    def together(cls, several):
        """Of several, what one of them had, had it been told everything."""
        whole = cls()
        for metrics in several:
            whole.add(**metrics.sums)
            for name, parts in metrics.parts.items():
                whole.parts.setdefault(name, []).extend(parts)
        return whole

    def tokens(self, name):
        """All that was collected under this name, (n,) fp32."""
        return torch.cat(self.parts[name]).float()

    def numbers(self):
        """Sums, and what the log says of single tokens: numbers or tensors ()."""
        found = dict(self.sums)
        if "gap" in self.parts:
            gap, entropy = self.tokens("gap"), self.tokens("entropy")
            found.update(gap=gap.mean(), gap_max=gap.max(), entropy=entropy.mean())
        if "accept" in self.parts:
            found.update(overlap(self.tokens("accept")))
        return found


def asked(numbers):
    """The same with numbers in place of tensors (); a card is asked once."""
    tensors = {name: x.double() for name, x in numbers.items() if torch.is_tensor(x)}
    if not tensors:
        return numbers
    like = next(iter(tensors.values()))  # an objective's may lie elsewhere
    found = torch.stack([x.to(like) for x in tensors.values()]).tolist()
    return {**numbers, **dict(zip(tensors, found))}


def summary(done):
    """Numbers of a rollout's updates -> those for the log: of the first update, but those of the
    ratio, which in it is mostly 1 by definition, are the last one's."""
    log, last = dict(done[0]), done[-1]
    of_the_ratio = ("clip_frac", "ratio", "kl_old")
    log.update({name: last[name] for name in of_the_ratio if name in last})
    if "skipped" in last:  # of float16
        log.update(loss_scale=last["loss_scale"],
                   skipped=sum((numbers["skipped"] for numbers in done), 0.0))
    return log


def overlap(accept):
    """accept (n,), the overlap of both policies by token -> its numbers for the log, tensors ()"""
    return dict(accept=accept.mean(), accept_p05=quantile(accept, 0.05))


def quantile(x, q):
    """x (n,) -> the q-quantile, between two numbers in proportion, of any n: torch's own refuses
    more than 2^24."""
    x = x.sort().values
    at = q * (len(x) - 1)
    low = int(at)
    high = min(low + 1, len(x) - 1)
    return torch.lerp(x[low], x[high], at - low)
