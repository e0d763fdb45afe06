"""Fractions of factorial designs: balance, orthogonality and resolution, by brute force."""

import itertools
import math

import pytest

from lib.errors import ConfigError
from lib.plan.designs import FactorLevel, fractional
from lib.plan.fractions import MAX_FACTORS, MIN_FACTORS, fraction, full_design

COUNTS = range(MIN_FACTORS, MAX_FACTORS + 1)


def column(cells, members):
    return [math.prod(1 if cell[i] else -1 for i in members) for cell in cells]


@pytest.mark.parametrize("count", COUNTS)
def test_no_word_of_less_than_four_factors_is_constant(count):
    """Resolution IV: a main effect is aliased with no effect of two factors, nor with the mean."""
    cells = fraction(count)
    assert len(set(cells)) == len(cells) == {4: 8, 9: 32, 10: 32}.get(count, 16)
    assert not any(cells[0]) and cells[0] in full_design(count)
    for size in (1, 2, 3):
        for members in itertools.combinations(range(count), size):
            assert sum(column(cells, members)) == 0


def test_five_factors_have_resolution_five():
    cells = fraction(5)
    for members in itertools.combinations(range(5), 4):
        assert sum(column(cells, members)) == 0


def features(count):
    return [FactorLevel(f"F{i}", "on", f"f{i}", {f"F{i}": True}) for i in range(count)]


def test_cells_are_named_by_their_features():
    cells = fractional(features(8))
    assert cells[0].slug == "none" and cells[0].parent == ""
    assert {cell.parent for cell in cells[1:]} == {"none"}
    # D alone turns on those of its products with two other factors: E, F and H.
    assert "f3-f4-f5-f7" in {cell.slug for cell in cells}


@pytest.mark.parametrize("count", [1, MIN_FACTORS - 1, MAX_FACTORS + 1])
def test_other_numbers_of_features_are_refused(count):
    with pytest.raises(ConfigError) as caught:
        fractional(features(count))
    assert caught.value.codes == ["design.feature-count"]
