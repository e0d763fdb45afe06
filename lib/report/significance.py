"""Significance tests for loss differences over seeds, and corrections for several comparisons.

Two runs with the same seed form a pair. In the sign-flip test (Fisher 1935), each pair's difference
is equally likely to have either sign under the null hypothesis, so all 2^n sign patterns are equally
likely. The test assumes no distribution; with few seeds its smallest possible p is large.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from operator import mul

# Limit of the sign-flip test: more seeds give too many sign patterns to enumerate.
_MAX_PAIRS = 20
# Sums of the same numbers in another order can differ in their last bits.
_TOLERANCE = 1e-12
# Limits of the continued fraction and of the search for a quantile.
_TINY = 1e-300
_EPSILON = 1e-16
_MAX_TERMS = 100_000
_MAX_STEPS = 200


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p: the share of sign patterns whose sum is at least as far from zero.

    Returns None for fewer than two or more than 20 differences.
    """
    n = len(differences)
    if not 1 < n <= _MAX_PAIRS:
        return None
    # Every pattern is a sum of one signed sum from each half of the differences.
    left = sorted(_signed_sums(differences[: n // 2]))
    right = _signed_sums(differences[n // 2 :])
    limit = abs(math.fsum(differences)) * (1 - _TOLERANCE)
    # A pattern and its negation have the same distance from zero: count one side.
    extreme = sum(len(left) - bisect_left(left, limit - value) for value in right)
    return min(1.0, 2 * extreme / 2**n)


def _signed_sums(values: Sequence[float]) -> list[float]:
    return [math.fsum(map(mul, signs, values)) for signs in product((1, -1), repeat=len(values))]


def smallest_p(n: int) -> float:
    """Return the smallest possible p of ``n`` ≥ 1 pairs: 2 of 2^n sign patterns."""
    return 2.0 ** (1 - n)


# Student's t distribution and corrections for several comparisons.
#
# The tail is half a regularised incomplete beta function (Abramowitz and Stegun 1964, 26.5.27),
# evaluated as a continued fraction by Lentz's method (Press et al., Numerical Recipes, 6.4). The
# relative error is below 1e-12 for 1 to 1000 degrees of freedom.


def t_sf(t: float, degrees: float) -> float:
    """Return P(T > t) with ``degrees`` degrees of freedom, which need not be an integer."""
    if t < 0:
        return 1 - t_sf(-t, degrees)
    # t² overflows beyond 1e154, and the tail of a single degree of freedom is 1e-154 there.
    square = min(t, 1e150) ** 2 / degrees
    a = degrees / 2
    log_front = math.lgamma(a + 0.5) - math.lgamma(a) - math.lgamma(0.5) - a * math.log1p(square)
    if square == 0:
        return 0.5
    log_front += 0.5 * (math.log(square) - math.log1p(square))
    x, complement = 1 / (1 + square), square / (1 + square)
    if x < (a + 1) / (a + 2.5):
        return 0.5 * math.exp(log_front) * _fraction(a, 0.5, x) / a
    return 0.5 - 0.5 * math.exp(log_front) * _fraction(0.5, a, complement) / 0.5


@functools.lru_cache(maxsize=4096)
def t_isf(p: float, degrees: float) -> float:
    """Return the t with P(T > t) = ``p``, for 0 < p < 1."""
    if p > 0.5:
        return -t_isf(1 - p, degrees)
    low, high = 0.0, 1.0
    while t_sf(high, degrees) > p:
        low, high = high, 2 * high
    t = (low + high) / 2
    for _ in range(_MAX_STEPS):
        tail = t_sf(t, degrees)
        low, high = (t, high) if tail > p else (low, t)
        # Newton's method on the logarithm of the tail, which is nearly linear in log t.
        step = tail * (math.log(tail) - math.log(p)) / _density(t, degrees)
        following = t + step if low < t + step < high else (low + high) / 2
        if abs(following - t) <= 4 * _EPSILON * abs(t):
            return following
        t = following
    return t


def _density(t: float, degrees: float) -> float:
    half = (degrees + 1) / 2
    log_scale = math.lgamma(half) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return math.exp(log_scale - half * math.log1p(t * t / degrees))


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function."""
    numerator = 1.0
    denominator = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = denominator
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / _nonzero(1 + term * denominator)
            numerator = _nonzero(1 + term / numerator)
            factor = denominator * numerator
            value *= factor
        if abs(factor - 1) <= _EPSILON:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def bonferroni(values: Sequence[float], m: int) -> list[float]:
    """Return the p-values corrected for ``m`` comparisons (Bonferroni 1936)."""
    return [min(1.0, m * p) for p in values]


def holm(values: Sequence[float], m: int) -> list[float]:
    """Return the p-values corrected for ``m`` comparisons, those not in ``values`` being 1."""
    adjusted, running = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        running = max(running, min(1.0, (m - rank) * values[i]))
        adjusted[i] = running
    return adjusted
