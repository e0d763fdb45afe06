"""Exact significance tests for loss differences over seeds.

The sign-flip and permutation tests go back to Fisher (1935) and Pitman (1937).

Two runs with the same seed form a pair. Under the null hypothesis each pair's difference is equally
likely to have either sign, so all 2^n sign patterns are equally likely. The tests assume no
distribution. With few seeds the smallest possible p is large, so it is reported beside every p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

# Limit of the permutation test: more partitions into two groups take too long to enumerate.
_MAX_PARTITIONS = 1 << 20
# Limit of the sign-flip test: more seeds give too many sign patterns to enumerate.
_MAX_PAIRS = 20
# Sums of the same numbers in another order can differ in their last bits.
_TOLERANCE = 1e-12


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p: the share of sign patterns whose sum is at least as far from zero.

    Returns None for fewer than two or more than 20 differences.
    """
    n = len(differences)
    if not 1 < n <= _MAX_PAIRS:
        return None
    observed = abs(sum(differences)) * (1 - _TOLERANCE)
    first, rest = differences[0], differences[1:]
    # A pattern and its negation have the same distance from zero: enumerate half of them.
    extreme = sum(
        abs(first + sum(s * d for s, d in zip(signs, rest, strict=True))) >= observed
        for signs in product((1, -1), repeat=n - 1)
    )
    return extreme / 2 ** (n - 1)


def smallest_p(n: int) -> float:
    """Return the smallest possible p of ``n`` ≥ 1 pairs: 2 of 2^n sign patterns."""
    return 2.0 ** (1 - n)


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p of two unpaired groups.

    p is the share of partitions of all values into groups of these sizes whose means differ at
    least as much. Returns None if a group has fewer than two values or there are more than 2^20
    partitions.
    """
    if min(len(a), len(b)) < 2 or comb(len(a) + len(b), len(a)) > _MAX_PARTITIONS:
        return None
    values = [*a, *b]
    total, n, m = sum(values), len(a), len(b)

    def gap(first: float) -> float:
        return abs(first / n - (total - first) / m)

    observed = gap(sum(a)) * (1 - _TOLERANCE)
    extreme = [gap(sum(group)) >= observed for group in combinations(values, n)]
    return sum(extreme) / len(extreme)


def smallest_permutation_p(n: int, m: int) -> float:
    """Return the smallest possible p of groups of ``n`` and ``m`` values that do not overlap.

    With equal sizes the mirrored partition is just as extreme and counts too.
    """
    return (2 if n == m else 1) / comb(n + m, n)


@dataclass(frozen=True)
class MedianInterval:
    """An interval between two order statistics, and its coverage of the true median."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], level: float = 0.95) -> MedianInterval:
    """Return the narrowest symmetric pair of order statistics that covers the median with at least
    ``level``.

    Returns the extremes if even they do not reach ``level`` (fewer than six values at 0.95). Each
    value lies below the median with probability 1/2 for any continuous distribution, so the number
    of values below the median is binomial (Thompson 1936).
    """
    ordered, n = sorted(values), len(values)
    # Values excluded at either end, and the probability that the median lies outside the interval.
    excluded, outside = 0, 2 / 2**n
    while 2 * (excluded + 2) < n:
        more = 2 * comb(n, excluded + 1) / 2**n
        if outside + more > 1 - level:
            break
        excluded, outside = excluded + 1, outside + more
    return MedianInterval(ordered[excluded], ordered[n - 1 - excluded], 1 - outside)
