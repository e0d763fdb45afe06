"""Power before the first run: the smallest effect that a study notices, and the band that it can fill.

Effects are in units of sd_d, the standard deviation of the difference of one seed. One comparison, and
the rules ``own`` and ``factorial``, use the exact power of the t-test, from the noncentral t
distribution. ``shared`` uses the quantiles of its t distribution times a factor from simulations of
the whole rule with 18 comparisons (docs/verdicts.md).

In all functions, ``n`` ≥ 2 is a number of seeds, ``m`` the number of comparisons of the family, and
``variances`` how many of them have a variance that counts in the mean; by default all.
"""

import math
from collections.abc import Callable

from lib.report.options import MIN_SEEDS, LookPlan
from lib.report.statistics import (
    INTERVAL_ERROR,
    VerdictRule,
    factorial_degrees,
    shared_degrees,
    t_isf,
)

MAX_SEEDS = 60
# Seeds → smallest effect of the simulated rule / closed form.
_SIMULATED = {3: 1.17, 4: 1.14, 5: 1.12, 6: 1.10, 8: 1.09, 10: 1.08}
_BEYOND = 1.05
_STEPS = 400
_PRECISION = 1e-6


def detectable_effect(
    n: int, m: int, rule: VerdictRule, alpha: float | None = None, variances: int | None = None
) -> float:
    """Return the smallest effect that gets BETTER or WORSE with the probability ``rule.power``.

    In units of sd_d; ``alpha`` is that of the look, by default that of the rule.
    """
    error, degrees = (alpha or rule.alpha) / (2 * m), _degrees(n, m, rule, variances)
    limit, root = t_isf(error, degrees), math.sqrt(n)
    if _is_shared(m, rule):
        return _simulated(n, limit + t_isf(1 - rule.power, degrees))

    def power(effect: float) -> float:
        return _mean_over_sd(lambda s: _normal(effect * root - limit * s), degrees)

    return _smallest(power, rule.power)


def fillable_band(
    n: int, m: int, rule: VerdictRule, alpha: float | None = None, variances: int | None = None
) -> float:
    """Return the smallest band in which a step without effect is EQUIVALENT with ``rule.power``."""
    error, degrees = (alpha or rule.alpha) / m, _degrees(n, m, rule, variances)
    limit, root = t_isf(error, degrees), math.sqrt(n)
    if _is_shared(m, rule):
        return _simulated(n, limit + t_isf((1 - rule.power) / 2, degrees))

    def power(band: float) -> float:
        return _mean_over_sd(lambda s: max(0.0, 2 * _normal(band * root - limit * s) - 1), degrees)

    return _smallest(power, rule.power)


def _is_shared(m: int, rule: VerdictRule) -> bool:
    return m > 1 and rule.variance == "shared"


def _degrees(n: int, m: int, rule: VerdictRule, variances: int | None) -> float:
    """Return the degrees of freedom of the variance that the rule uses."""
    count = m if variances is None else variances
    if rule.variance == "factorial":
        return factorial_degrees(n, count)
    return shared_degrees(n, count) if _is_shared(m, rule) else n - 1


def word_probability(
    effect: float,
    band: float,
    n: int,
    m: int,
    rule: VerdictRule,
    alpha: float,
    variances: int | None = None,
) -> float:
    """Return the probability that a comparison of a true ``effect`` ≥ 0 has a word after ``n`` seeds.

    ``effect`` and ``band`` are in units of sd_d; ``alpha`` is that of the look.
    """
    shares, root = _is_shared(m, rule), math.sqrt(n)
    degrees = _degrees(n, m, rule, variances)
    differ, equal = t_isf(alpha / (2 * m), degrees), t_isf(alpha / m, degrees)
    gates = t_isf(INTERVAL_ERROR / 2, n - 1), t_isf(INTERVAL_ERROR, n - 1)

    def given(s: float) -> float:
        # The mean variance of the study is near 1; the own sample has the standard deviation s.
        scale = max(s, 1.0) if shares else s
        limits = differ * scale, equal * scale
        if shares:
            limits = max(limits[0], gates[0] * s), max(limits[1], gates[1] * s)
        shift, width = effect * root, band * root - limits[1]
        equivalent = _normal(width - shift) - _normal(-width - shift) if width > 0 else 0.0
        return max(_normal(shift - limits[0]), equivalent)

    return _mean_over_sd(given, n - 1 if shares else degrees)


def expected_seeds(
    effect: float,
    band: float,
    looks: LookPlan,
    m: int,
    rule: VerdictRule,
    variances: int | None = None,
) -> float:
    """Return the mean number of seeds until a comparison of a true ``effect`` has a word.

    Without a word, it has those of the last look. In units of sd_d.
    """
    expected, without = 0.0, 1.0
    before = 0
    for n, share in zip(looks.seeds, looks.shares, strict=True):
        expected += without * (n - before)
        before = n
        # A decision is final, so earlier looks had it at most as often.
        given = word_probability(effect, band, n, m, rule, rule.alpha * share, variances)
        without = min(without, 1 - given)
    return expected


def seeds_for(size: float, needed: Callable[[int], float]) -> int | None:
    """Return the smallest number of seeds with ``needed(n)`` ≤ ``size``; None if more than 60."""
    low, high = MIN_SEEDS, MAX_SEEDS
    if needed(high) > size:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needed(middle) <= size else (middle + 1, high)
    return low


def pilot_factor(k: int) -> float:
    """Return the factor from the standard deviation of ``k`` runs to its upper 80 % limit.

    A study planned with the estimate itself is too small half of the time (Browne 1995).
    """
    degrees, low, high = k - 1, 0.0, float(k)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_cdf(middle, degrees) < 0.2 else (low, middle)
    return math.sqrt(degrees / high)


def _simulated(n: int, quantiles: float) -> float:
    known = sorted(_SIMULATED)
    if n > known[-1]:
        factor = _BEYOND
    else:
        below = max((k for k in known if k <= n), default=known[0])
        above = min(k for k in known if k >= n)
        share = (n - below) / (above - below) if above > below else 0.0
        factor = _SIMULATED[below] + share * (_SIMULATED[above] - _SIMULATED[below])
    return factor * quantiles / math.sqrt(n)


def _smallest(power: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    while power(high) < wanted:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < wanted else (low, middle)
    return high


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _mean_over_sd(function: Callable[[float], float], degrees: float) -> float:
    """Return the mean of ``function`` of a sample standard deviation, by Simpson's rule."""
    log_scale = math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
    width = (3 + 12 / math.sqrt(2 * degrees)) / _STEPS
    total = 0.0
    for i in range(1, _STEPS):
        s = i * width
        density = math.exp(log_scale + (degrees - 1) * math.log(s) - degrees * s * s / 2)
        total += (4 if i % 2 else 2) * function(s) * density
    return total * width / 3


def _chi_square_cdf(x: float, degrees: int) -> float:
    """Return the series of the incomplete gamma function (Abramowitz and Stegun 1964, 6.5.29)."""
    if x <= 0:
        return 0.0
    a, half = degrees / 2, x / 2
    term = total = 1.0
    k = 0
    while term > 1e-16 * total:
        k += 1
        term *= half / (a + k)
        total += term
    return total * math.exp(a * math.log(half) - half - math.lgamma(a + 1))
