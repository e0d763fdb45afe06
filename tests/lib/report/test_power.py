"""Power, bands and pilots: the values of simulations of the whole rule, and of exact theory."""

from functools import partial

import pytest

from lib.report.options import LookPlan
from lib.report.power import (
    detectable_effect,
    expected_seeds,
    fillable_band,
    pilot_factor,
    seeds_for,
    word_probability,
)
from lib.report.statistics import VerdictRule

SHARED, OWN, FACTORIAL = (VerdictRule(variance) for variance in ("shared", "own", "factorial"))
# Seeds: smallest effect for one comparison, 18 own, 18 shared, 35 shared; band shared, own.
TABLE = {
    3: (3.26, 13.9, 4.14, 4.60, 3.97, 10.3),
    4: (2.13, 5.74, 2.92, 3.14, 2.91, 4.9),
    5: (1.68, 3.67, 2.36, 2.54, 2.38, 3.4),
    6: (1.43, 2.79, 2.03, 2.18, 2.09, 2.7),
    8: (1.16, 2.00, 1.65, 1.75, 1.71, 2.0),
    10: (1.00, 1.62, 1.42, 1.51, 1.48, 1.6),
    12: (0.89, 1.39, 1.26, 1.34, 1.32, None),
    16: (0.75, 1.13, 1.07, 1.13, 1.11, None),
    20: (0.66, 0.97, 0.93, 0.99, 0.98, None),
    30: (0.53, 0.76, 0.75, 0.79, 0.78, None),
}


@pytest.mark.parametrize("n", TABLE)
def test_the_smallest_effect_and_band(n):
    one, own, shared, chain, band, own_band = TABLE[n]
    # The table has two or three digits.
    near = partial(pytest.approx, rel=0.01, abs=0.005)
    assert detectable_effect(n, 1, SHARED) == near(one) == detectable_effect(n, 1, OWN)
    assert detectable_effect(n, 18, OWN) == near(own)
    assert detectable_effect(n, 18, SHARED) == near(shared)
    # The factors were simulated with 18 comparisons, and for effects.
    assert detectable_effect(n, 35, SHARED) == pytest.approx(chain, rel=0.02)
    assert fillable_band(n, 18, SHARED) == pytest.approx(band, rel=0.02)
    if own_band is not None:
        assert fillable_band(n, 18, OWN) == pytest.approx(own_band, rel=0.025)


@pytest.mark.parametrize(
    "k, factor", [(3, 2.12), (4, 1.73), (5, 1.56), (8, 1.35), (10, 1.29), (20, 1.18)]
)
def test_the_upper_limit_of_a_pilot(k, factor):
    assert pilot_factor(k) == pytest.approx(factor, abs=0.0051)


def test_less_alpha_and_more_power_need_larger_effects():
    effect = detectable_effect(5, 18, SHARED)
    assert detectable_effect(5, 18, SHARED, 0.01) > effect
    assert detectable_effect(5, 18, VerdictRule(power=0.95)) > effect
    assert fillable_band(5, 18, SHARED, 0.01) > fillable_band(5, 18, SHARED)


def test_the_number_of_seeds_for_an_effect():
    needed = partial(detectable_effect, m=18, rule=SHARED)
    assert seeds_for(2.4, needed) == 5 and seeds_for(2.2, needed) == 6
    assert seeds_for(100, needed) == 3 and seeds_for(0.1, needed) is None


# Effect in sd_d → share of simulated studies with a word, in percent: 3, 5 and 8 seeds, shared and own.
WORDS = {
    2: ((12, 62, 95), (4, 27, 85)),
    3: ((44, 96, 100), (8, 66, 100)),
    4: ((77, 100, 100), (13, 91, 100)),
    6: ((98, 100, 100), (29, 100, 100)),
}


@pytest.mark.parametrize("effect", WORDS)
def test_the_probability_of_a_word(effect):
    for rule, percents in zip((SHARED, OWN), WORDS[effect], strict=True):
        for n, percent in zip((3, 5, 8), percents, strict=True):
            probability = word_probability(effect, 0, n, 18, rule, 0.05)
            # Least exact between: the mean variance of few seeds is not exactly 1.
            assert 100 * probability == pytest.approx(percent, abs=10 if n == 3 else 6)


def test_the_power_of_effects():
    """Fifteen effects of 16 runs, 3 seeds, sd of a run 0.71: simulated 69, 92 and 100 %."""
    sd = 2 * 0.71 / 4
    for effect, percent in {0.8: 69, 1.0: 92, 2.0: 100}.items():
        probability = word_probability(effect / sd, 0, 3, 15, FACTORIAL, 0.05)
        assert 100 * probability == pytest.approx(percent, abs=4)
    smallest = detectable_effect(3, 15, FACTORIAL)
    assert word_probability(smallest, 0, 3, 15, FACTORIAL, 0.05) == pytest.approx(0.8, abs=1e-3)
    # Further comparisons, such as earlier ones, are corrected for, but add no variance.
    assert detectable_effect(3, 30, FACTORIAL, variances=15) > smallest


def test_the_seeds_of_looks():
    """With a band of 2, as simulated: 7.2 without an effect, 7.6, 5.1 and 3.3 with one."""
    looks = LookPlan((3, 5, 8), (0.2, 0.3, 0.4))
    for effect, seeds in {0: 7.2, 1.5: 7.6, 3: 5.1, 6: 3.3}.items():
        assert expected_seeds(effect, 2, looks, 18, SHARED) == pytest.approx(seeds, abs=0.35)
    assert expected_seeds(0, 0, looks, 18, SHARED) == pytest.approx(8, abs=0.01)
    assert expected_seeds(100, 0, looks, 18, OWN) == pytest.approx(3)
    one = word_probability(1.16, 0, 8, 1, SHARED, 0.05)
    assert one == pytest.approx(0.8, abs=0.01)
