"""What a user may type as an axis, and what is refused."""

import math
import random

import pytest

from lib.designs.axes import parse_axes
from lib.designs.grid import grid, sample, size
from lib.errors import ConfigError


def test_an_axis_may_be_a_choice_or_any_symbol(tree):
    axes = parse_axes(tree, "OPTIMIZER=adamw,spam N_LAYER=1,2 RATE=3e-4,0.1", "AXES")
    cells = grid(axes, "AXES")
    assert size(axes) == len(cells) == 8
    assert cells[0].slug == "adamw-n-layer-1-rate-3e-4"
    assert cells[0].delta == {"OPTIMIZER_ADAMW": True, "N_LAYER": "1", "RATE": "3e-4"}
    assert cells[7].texts == {"OPTIMIZER": "spam", "N_LAYER": "2", "RATE": "0.1"}


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("RATE=log:1e-4:1e-2:5", ["0.0001", "0.000316", "0.001", "0.00316", "0.01"]),
        ("RATE=lin:0:0.3:4", ["0", "0.1", "0.2", "0.3"]),
        ("N_LAYER=lin:1:8:3", ["1", "4", "8"]),
    ],
)
def test_ranges(tree, axis, values):
    (found,) = parse_axes(tree, axis, "AXES")
    assert [level.text for level in found.levels] == values


def test_a_sample_is_drawn_once_for_all_and_can_be_extended(tree):
    axes = parse_axes(tree, "RATE=log:1e-4:1e-1 N_LAYER=1,2,3", "AXES")
    drawn = sample(axes, 40, seed=3)
    assert [c.slug for c in sample(axes, 10, seed=3)] == [c.slug for c in drawn[:10]]
    assert [c.slug for c in sample(axes, 10, seed=4)] != [c.slug for c in drawn[:10]]
    assert len({c.slug for c in drawn}) == 40
    rates = [float(c.texts["RATE"]) for c in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    # Evenly in the logarithm: the middle is where half of them lie.
    assert 10 < sum(rate < math.sqrt(1e-5) for rate in rates) < 30


def test_a_sample_of_a_small_grid_ends(tree):
    axes = parse_axes(tree, "N_LAYER=1,2 OPTIMIZER=adamw,spam", "AXES")
    assert len(sample(axes, 100, seed=1)) == 4


def test_a_range_without_a_count_is_no_grid(tree):
    axes = parse_axes(tree, "RATE=log:1e-4:1e-2", "SWEEP")
    with pytest.raises(ConfigError, match="SWEEP: RATE is a range without a count"):
        grid(axes, "SWEEP")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("", "names no axis"),
        ("N_LAYER", "is not NAME=value"),
        ("N_LAYER=1,,2", "is not NAME=value"),
        ("NO_SUCH=1", "NO_SUCH: no such symbol or choice that can be set$"),
        ("OPTIMISER=adamw", "no such symbol or choice that can be set; nearest: OPTIMIZER"),
        ("OPTIMIZER=adamw,sgd", "'sgd' is not one of adamw, spam"),
        ("N_LAYER=1 N_LAYER=2", "N_LAYER stands twice"),
        ("N_LAYER=1,1", "n-layer-1 stands twice"),
        ("N_LAYER=lin:1:2:5", "stands twice"),
        ("SEED=1,2", "SEED is no axis"),
        ("RATE=log:0:1:3", ".*LOW > 0"),
        ("RATE=lin:2:1:3", ".*LOW < HIGH"),
        ("RATE=lin:0:1:1", ".*at least 2"),
        ("RATE=lin:0:x:3", "RATE: 'x' is not a number"),
        ("RATE=log:1:2:3:4", ".*is not lin:LOW:HIGH:COUNT"),
    ],
)
def test_a_bad_axis_is_refused_with_its_place(tree, axes, message):
    with pytest.raises(ConfigError, match=f"^AXES: .*{message}"):
        parse_axes(tree, axes, "AXES")


def test_all_bad_axes_are_told_at_once(tree):
    with pytest.raises(ConfigError) as raised:
        parse_axes(tree, "NO_SUCH=1 OPTIMIZER=sgd RATE", "AXES")
    assert len(raised.value.problems) == 3


def test_a_continuum_reaches_its_ends(tree):
    (axis,) = parse_axes(tree, "RATE=log:1e-4:1e-2", "AXES")
    assert axis.continuum is not None
    assert (axis.continuum.at(0.0), axis.continuum.at(1.0)) == ("0.0001", "0.01")
    assert 1e-4 <= float(axis.draw(random.Random(0)).text) <= 1e-2
