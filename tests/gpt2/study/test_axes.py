"""Tests of axis parsing."""

import pytest

from gpt2.study.designs import grid, parse_axes
from tests.errors import error_of


def test_an_axis_may_be_a_choice_or_any_symbol(small_tree):
    axes = parse_axes(small_tree, "OPTIMIZER=adamw,spam N_LAYER=1,2 RATE=3e-4,0.1", "AXES")
    cells = grid(axes)
    assert len(cells) == 8
    assert cells[0].slug == "adamw-n-layer-1-rate-3e-4"
    assert cells[0].delta == {"OPTIMIZER_ADAMW": True, "N_LAYER": "1", "RATE": "3e-4"}
    assert [level.text for level in cells[7].levels] == ["spam", "2", "0.1"]


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
        ("SEED=1,2", "design.seed-axis", "SEED: "),
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
