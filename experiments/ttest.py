"""
Student's t for a handful of seeds: intervals, paired differences, Holm's correction; beside it
Wilcoxon's signed ranks.

The idea. Arms run with the same seeds are paired: the difference of two arms, seed by seed, is a
sample of n numbers, and its mean is compared with 0. A few seeds are few degrees of freedom, so
the interval is Student's and wide. Who makes several comparisons would find something by chance:
Holm's correction pays for that, whatever the comparisons have to do with each other. Ranks ask
nothing of how the differences are distributed but that they lie evenly around their middle; of few
seeds their p cannot be small, of 5 never below 1/16.

For a whole number of degrees of freedom the distribution is a finite sum (Abramowitz and Stegun,
Handbook of Mathematical Functions, 26.7.3 and 26.7.4), so nothing else is needed. Holm, A simple
sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979).
Wilcoxon, Individual comparisons by ranking methods, Biometrics Bulletin 1 (1945).
"""
import math
from collections import Counter
from statistics import fmean, stdev

RANKED = 100  # the most differences whose ranks are tested: they have some 10,000 sums


def within(t, df):
    """The probability that |T| <= t, of Student's distribution with df degrees of freedom."""
    theta = math.atan2(t, math.sqrt(df))
    sin, cos = math.sin(theta), math.cos(theta)
    # odd: cos + 2/3 cos^3 + 2 4 / (3 5) cos^5 ..; even: 1 + 1/2 cos^2 + 1 3 / (2 4) cos^4 ..
    power = df % 2
    term = cos ** power
    total = 0.0
    while power <= df - 2:
        total += term
        power += 2
        term *= cos * cos * (power - 1) / power
    if df % 2:
        return 2 / math.pi * (theta + sin * total)
    return sin * total


def quantile(df, level=0.95):
    """The t with within(t, df) = level."""
    low, high = 0.0, 1.0
    while within(high, df) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if within(middle, df) < level:
            low = middle
        else:
            high = middle
    return high


def interval(values, level=0.95):
    """-> mean, and how far the interval of the mean reaches to either side; at least 2 values"""
    n = len(values)
    return fmean(values), quantile(n - 1, level) * stdev(values) / math.sqrt(n)


def p_value(differences):
    """Two-sided p of the paired t test: of no difference, this or a larger mean. 1 of fewer than 2
    differences; where all are equal, 0, or 1 if they are 0."""
    if len(differences) < 2 or not any(differences):
        return 1.0
    spread = stdev(differences) / math.sqrt(len(differences))
    mean = abs(fmean(differences))
    t = mean / spread if spread else math.inf
    return max(0.0, 1 - within(t, len(differences) - 1))


def signed_rank_p(differences, equal=1e-5):
    """Two-sided p of Wilcoxon's signed ranks, exact: of all ways to choose the signs, the share in
    which the sum of signed ranks is as far from 0, or farther. Zeros are dropped, ties get their
    mean rank; `equal` is how close both may be, as rewards are logged at 6 digits. Raises
    ValueError for more than RANKED."""
    if len(differences) > RANKED:
        raise ValueError(f"ranks of at most {RANKED} differences, got "
                         f"{len(differences)}")
    left = sorted((x for x in differences if abs(x) > equal), key=abs)
    sizes = [abs(x) for x in left]
    starts = [i for i, x in enumerate(sizes) if not i or x - sizes[i - 1] > equal]
    ranks = []  # twice the mean of a + 1 to b, a whole number
    for a, b in zip(starts, [*starts[1:], len(left)]):
        ranks += [a + 1 + b] * (b - a)
    ways = Counter([0])  # sum of signed ranks -> how many ways lead there
    for rank in ranks:
        ways = (Counter({s + rank: n for s, n in ways.items()})
                + Counter({s - rank: n for s, n in ways.items()}))
    found = abs(sum(rank if x > 0 else -rank for x, rank in zip(left, ranks)))
    return sum(n for s, n in ways.items() if abs(s) >= found) / 2 ** len(ranks)


def holm(ps):
    """p-values -> those adjusted for their number, in the same order."""
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = least
    return adjusted
