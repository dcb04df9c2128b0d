"""experiments/ttest.py against printed tables and examples worked by hand."""
import itertools
import math
from statistics import fmean

import pytest

from experiments.ttest import RANKED, holm, interval, p_value, quantile, signed_rank_p, within


@pytest.mark.parametrize("df, t", [
    (1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (5, 2.570582), (6, 2.446912),
    (20, 2.085963), (120, 1.979930)])
def test_quantiles_are_those_of_the_printed_table(df, t):
    assert quantile(df) == pytest.approx(t, abs=5e-7)
    assert within(t, df) == pytest.approx(0.95, abs=1e-7)
    assert abs(quantile(df + 1) - t) > 1e-3 or df == 120  # control


def test_other_levels():
    assert quantile(4, 0.99) == pytest.approx(4.604095, abs=5e-7)
    assert within(0, 5) == 0 and within(math.inf, 4) == within(math.inf, 5) == 1
    # two degrees of freedom: t / sqrt(2 + t^2)
    assert within(3, 2) == pytest.approx(3 / math.sqrt(11))


def test_a_paired_test_worked_by_hand():
    # mean 2, sum of squares 10, so stdev sqrt(10 / 4) and t = 2 / sqrt(2.5 / 5) = 2 sqrt(2)
    d = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert interval(d) == (2.0, pytest.approx(2.776445 * math.sqrt(0.5), abs=1e-6))
    # even degrees of freedom, 4: 1 - sin (1 + cos^2 / 2) with sin^2 = 8 / 12, cos^2 = 4 / 12
    p = 1 - math.sqrt(2 / 3) * (1 + 1 / 6)
    assert p_value(d) == pytest.approx(p) == pytest.approx(0.0474206, abs=1e-6)
    assert p_value([-x for x in d]) == p_value(d)
    assert p_value([x + 1 for x in d]) < p_value(d) / 2  # control


def test_differences_without_spread():
    assert p_value([0.25] * 3) == 0 and p_value([0.0] * 3) == 1
    assert p_value([0.25]) == p_value([]) == 1  # nothing is known
    assert interval([0.25] * 3) == (0.25, 0)


@pytest.mark.parametrize("differences, p", [
    (range(1, 9), 2 / 256),                          # all positive: this and its mirror image
    ((1, 2, -3, 4, 5, 6, 7, 8), 10 / 256),           # sums of minus 0, 1, 2, 3, 1 + 2
    ((1, 1, 1, -1), 10 / 16),                        # all ranks 2.5: two-sided binomial
    ((2, -2, 3, 4, 0), 6 / 16),                      # 1.5, 1.5, 3, 4; zero dropped: 0, 1.5, 1.5
    ((0.3,), 1), ((0.0, 0.0), 1), ((), 1)])
def test_signed_ranks_by_hand(differences, p):
    assert signed_rank_p([*differences]) == p == signed_rank_p([-x for x in differences])


def test_signed_ranks_are_all_signs():
    """Each choice of signs in turn, of magnitudes with ties and without."""
    for sizes in ((1, 2, 3, 4, 5, 6), (1, 1, 2, 3, 3, 3)):
        ranks = [sum(x < y for x in sizes) + (sizes.count(y) + 1) / 2 for y in sizes]
        signs = [*itertools.product((-1, 1), repeat=len(sizes))]
        sums = [abs(sum(s * r for s, r in zip(each, ranks))) for each in signs]
        for each, found in zip(signs, sums):
            p = fmean(x >= found for x in sums)
            assert signed_rank_p([s * x for s, x in zip(each, sizes)]) == p
    assert signed_rank_p([-1, 2, 3]) != signed_rank_p([1, 2, -3])  # control: no sign test


def test_rewards_at_six_digits_are_tied():
    """10 / 1024 = 0.009765625 of rewards that were rounded; the control tells them apart."""
    near = [0.009766, 0.009765, -0.009766, 0.02, 5e-7]
    assert signed_rank_p(near) == signed_rank_p([1, 1, -1, 2]) == 8 / 16
    assert signed_rank_p(near, equal=0) == 12 / 32  # sums of minus 0, 1, 2, 3, 3.5, 3.5


def test_ranks_of_many_differences_are_refused():
    assert signed_rank_p([*range(1, RANKED + 1)]) == 2 / 2 ** RANKED
    with pytest.raises(ValueError, match="at most 100 differences, got 101"):
        signed_rank_p([1] * (RANKED + 1))


def test_holm_worked_by_hand():
    # 3 x 0.01; then 2 x 0.03; 0.04 itself would be less than the one before it
    assert holm([0.01, 0.04, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06),
                                        pytest.approx(0.06)]
    assert holm([0.5, 0.6]) == [1, 1] and holm([0.2]) == [0.2] and holm([]) == []
