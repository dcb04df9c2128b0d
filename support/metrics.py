"""Numbers of an optimizer step that is made of several micro-batches."""
import torch


class Metrics:
    """Numbers of one optimizer step: sums over micro-batches, and numbers of single tokens."""

    def __init__(self, **sums):
        self.sums, self.parts = sums, {}

    def add(self, **numbers):
        for name, x in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + x

    def collect(self, mask, **tensors):
        """Keep the entries of each tensor where mask is True."""
        for name, x in tensors.items():
            self.parts.setdefault(name, []).append(x[mask])

    @classmethod
    def together(cls, several):
        """Of several, what one of them had, had it been told everything."""
        whole = cls()
        for metrics in several:
            whole.add(**metrics.sums)
            for name, parts in metrics.parts.items():
                whole.parts.setdefault(name, []).extend(parts)
        return whole

    def has(self, name):
        return name in self.parts

    def tokens(self, name):
        """All that was collected under this name, (n,) fp32."""
        return torch.cat(self.parts[name]).float()


def quantile(x, q):
    """x (n,) -> the q-quantile, between two numbers in proportion, of any n: torch's own refuses
    more than 2^24."""
    x = x.sort().values
    at = q * (len(x) - 1)
    low = int(at)
    high = min(low + 1, len(x) - 1)
    return torch.lerp(x[low], x[high], at - low)
