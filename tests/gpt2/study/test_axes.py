"""Tests of axis parsing, ranges and sampling."""

import math

import pytest

from gpt2.study.designs import grid, parse_axes, sample_cells
from tests.errors import error_of


def test_an_axis_may_be_a_choice_or_any_symbol(small_tree):
    axes = parse_axes(small_tree, "OPTIMIZER=adamw,spam N_LAYER=1,2 RATE=3e-4,0.1", "AXES")
    cells = grid(axes)
    assert len(cells) == 8
    assert cells[0].slug == "adamw-n-layer-1-rate-3e-4"
    assert cells[0].delta == {"OPTIMIZER_ADAMW": True, "N_LAYER": "1", "RATE": "3e-4"}
    assert [level.text for level in cells[7].levels] == ["spam", "2", "0.1"]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("RATE=log:1e-4:1e-2:5", ["0.0001", "0.000316", "0.001", "0.00316", "0.01"]),
        ("RATE=lin:0:0.3:4", ["0", "0.1", "0.2", "0.3"]),
        ("N_LAYER=lin:1:8:3", ["1", "4", "8"]),
    ],
)
def test_ranges(small_tree, axis, values):
    (found,) = parse_axes(small_tree, axis, "AXES")
    assert [level.text for level in found] == values


def test_a_sample_is_reproducible_and_can_be_extended(small_tree):
    axes = parse_axes(small_tree, "RATE=log:1e-4:1e-1:99 N_LAYER=1,2,3", "AXES")
    drawn = sample_cells(axes, 40, seed=3)
    assert [c.slug for c in sample_cells(axes, 10, seed=3)] == [c.slug for c in drawn[:10]]
    assert [c.slug for c in sample_cells(axes, 10, seed=4)] != [c.slug for c in drawn[:10]]
    assert len({c.slug for c in drawn}) == 40
    rates = [float(c.levels[0].text) for c in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    # Log-uniform: about half of the samples are below the geometric mean.
    assert 10 < sum(rate < math.sqrt(1e-5) for rate in rates) < 30


def test_a_sample_of_a_small_grid_ends(small_tree):
    axes = parse_axes(small_tree, "N_LAYER=1,2 OPTIMIZER=adamw,spam", "AXES")
    assert len(sample_cells(axes, 100, seed=1)) == 4


@pytest.mark.parametrize(
    ("axes", "code", "part"),
    [
        ("", "design.empty", ""),
        ("N_LAYER", "design.malformed-axis", "'N_LAYER'"),
        ("N_LAYER=1,,2", "design.malformed-axis", "'N_LAYER=1,,2'"),
        ("NO_SUCH=1", "config.unknown-symbol", "NO_SUCH: "),
        ("OPTIMISER=adamw", "config.unknown-symbol", "OPTIMIZER"),
        ("OPTIMIZER=adamw,sgd", "config.invalid-value", "'sgd' is not one of adamw, spam"),
        ("N_LAYER=1 N_LAYER=2", "design.duplicate", "N_LAYER"),
        ("N_LAYER=1,1", "design.duplicate", "n-layer-1"),
        ("N_LAYER=lin:1:2:5", "design.duplicate", "N_LAYER: "),
        ("SEED=1,2", "design.seed-axis", "SEED: "),
        ("RATE=log:0:1:3", "design.invalid-range", "LOW > 0"),
        ("RATE=lin:2:1:3", "design.invalid-range", "LOW < HIGH"),
        ("RATE=lin:0:1:1", "design.invalid-range", "at least 2"),
        ("RATE=lin:0:x:3", "design.invalid-range", "finite numbers"),
        ("RATE=log:1:2", "design.invalid-range", "lin:LOW:HIGH:COUNT"),
        ("RATE=log:1:2:3:4", "design.invalid-range", "lin:LOW:HIGH:COUNT"),
    ],
)
def test_an_invalid_axis_is_rejected_with_its_location(small_tree, axes, code, part):
    error = error_of(parse_axes, small_tree, axes, "AXES")
    assert set(error.codes) == {code}
    assert all(problem.where == "AXES" for problem in error.problems)
    assert part in error.problems[0].what


def test_all_invalid_axes_are_reported_at_once(small_tree):
    error = error_of(parse_axes, small_tree, "NO_SUCH=1 OPTIMIZER=sgd RATE", "AXES")
    codes = ["config.unknown-symbol", "config.invalid-value", "design.malformed-axis"]
    assert error.codes == codes
