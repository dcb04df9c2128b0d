"""
Student's t for a handful of seeds: intervals, paired differences, Holm's correction.

The idea. Arms run with the same seeds are paired: the difference of two arms, seed by seed, is a
sample of n numbers, and its mean is compared with 0. A few seeds are few degrees of freedom, so
the interval is Student's and wide. Who makes several comparisons would find something by chance:
Holm's correction pays for that, whatever the comparisons have to do with each other.

For a whole number of degrees of freedom the distribution is a finite sum (Abramowitz and Stegun,
Handbook of Mathematical Functions, 26.7.3 and 26.7.4), so nothing else is needed. Holm, A simple
sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979).
"""
import math
from statistics import fmean, stdev


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


def holm(ps):
    """p-values -> those adjusted for their number, in the same order."""
    adjusted, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = least
    return adjusted
