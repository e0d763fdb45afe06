"""The sign-flip test against an enumeration of all patterns, and its smallest p for n seeds."""

import random
from itertools import product

import pytest

from lib.report.statistics import sign_flip_p, smallest_p


def by_counting(differences: list[float]) -> float:
    """Return p by enumerating all 2^n patterns."""
    patterns = list(product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in patterns]
    return sum(found >= abs(sum(differences)) - 1e-9 for found in sums) / len(patterns)


@pytest.mark.parametrize("n", range(2, 10))
def test_equals_the_count_of_all_patterns(n):
    draw = random.Random(n)
    for _ in range(20):
        differences = [draw.gauss(0.3, 1.0) for _ in range(n)]
        assert sign_flip_p(differences) == by_counting(differences)


def test_more_seeds_can_show_more():
    # Published small-sample figures of the paired test.
    assert [smallest_p(n) for n in (3, 4, 5, 6, 10)] == [0.25, 0.125, 0.0625, 0.03125, 2**-9]
    for n in (3, 6):
        assert sign_flip_p([-0.1 * (i + 1) for i in range(n)]) == smallest_p(n)


def test_ties_zero_and_rounding_count_as_extreme():
    assert sign_flip_p([0.0, 0.0, 0.0]) == 1.0
    assert sign_flip_p([0.1, 0.2, 0.3]) == sign_flip_p([0.3, 0.2, 0.1]) == 0.25
    assert sign_flip_p([1.0, -1.0]) == 1.0


def test_one_seed_has_no_p():
    assert sign_flip_p([0.5]) is None
    assert sign_flip_p([]) is None
    assert sign_flip_p([0.1] * 21) is None
