"""Whether a difference over seeds could be chance: exact sign-flip and permutation tests.

Both go back to Fisher (1935) and Pitman (1937).

Runs of one seed are a pair. If a change did nothing, each pair's difference could as well have had
the other sign, and all 2^n patterns of signs were equally likely. No distribution is assumed, and
few seeds show little: that is said with every p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

# Beyond this many ways to share seeds out they are too many, too.
_MOST_WAYS = 1 << 20
# Beyond this many seeds the patterns are too many to count one by one.
_MOST = 20
# Sums of the same numbers in another order may differ in their last bits.
_TOLERANCE = 1e-12


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Two-sided p: share of sign patterns whose sum is at least as far from zero.

    None for one difference, which shows nothing, and beyond 20.
    """
    n = len(differences)
    if not 1 < n <= _MOST:
        return None
    observed = abs(sum(differences)) * (1 - _TOLERANCE)
    first, rest = differences[0], differences[1:]
    # A pattern and its opposite are equally far: half of them is enough.
    extreme = sum(
        abs(first + sum(s * d for s, d in zip(signs, rest, strict=True))) >= observed
        for signs in product((1, -1), repeat=n - 1)
    )
    return extreme / 2 ** (n - 1)


def smallest_p(n: int) -> float:
    """What ``n`` ≥ 1 pairs reach when all agree: 2 of 2^n patterns."""
    return 2.0 ** (1 - n)


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p without pairs: share of the ways to deal the values out to two groups of these
    sizes whose means are at least as far apart.

    None where a group has one value, which has no spread, and beyond a million ways.
    """
    if min(len(a), len(b)) < 2 or comb(len(a) + len(b), len(a)) > _MOST_WAYS:
        return None
    values = [*a, *b]
    total, n, m = sum(values), len(a), len(b)

    def gap(first: float) -> float:
        return abs(first / n - (total - first) / m)

    observed = gap(sum(a)) * (1 - _TOLERANCE)
    ways = [gap(sum(chosen)) >= observed for chosen in combinations(values, n)]
    return sum(ways) / len(ways)


def smallest_permutation_p(n: int, m: int) -> float:
    """What groups of ``n`` and ``m`` reach when they do not overlap.

    Of groups of one size the mirror image is as extreme, and counts as well.
    """
    return (2 if n == m else 1) / comb(n + m, n)


@dataclass(frozen=True)
class Interval:
    """Two order statistics, and how often such a pair has the true median between them."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The narrowest pair of order statistics, as many from either end, that covers the median with
    at least ``level``; the extremes where even they do not (fewer than six values at 0.95).

    Each value lies below the median with probability 1/2, whatever the distribution, so that the
    count that does is binomial (Thompson 1936).
    """
    ordered, n = sorted(values), len(values)
    # Values left out at either end, and how often the median lies among those of both ends.
    left_out, missed = 0, 2 / 2**n
    while 2 * (left_out + 2) < n:
        more = 2 * comb(n, left_out + 1) / 2**n
        if missed + more > 1 - level:
            break
        left_out, missed = left_out + 1, missed + more
    return Interval(ordered[left_out], ordered[n - 1 - left_out], 1 - missed)
