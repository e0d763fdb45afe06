"""Tests of cell resolution: trainable variants, and problems of skipped cells."""

import itertools

import pytest

from gpt2.study.designs import (
    Cell,
    Level,
    design_cells,
    grid,
    parse_axes,
    parse_features,
    resolve_design,
    resolve_grid,
    slug,
)
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from tests.errors import error_of

FIVE = "RATE=0.5 GATE WIDE CROSS N_LAYER=4"


def combined(tree: KconfigTree, axes: str, base: list[ConfigLayer]):
    """Return the matrix of ``axes``, with the resolved values as configurations."""
    cells = grid(parse_axes(tree, axes, "AXES"))
    return resolve_grid(tree, cells, lambda each: resolve(tree, base, each))


def resolve(tree: KconfigTree, base: list[ConfigLayer], each: Cell):
    return tree.resolve([*base, ConfigLayer.of("axis", each.slug, each.delta)]).values


def designed(tree: KconfigTree, design: str, text: str):
    """Return the design of the features in ``text``, with the resolved values as configurations."""
    features = parse_features(tree, [], text, "FEATURES")
    return resolve_design(design_cells(design, features), lambda each: resolve(tree, [], each))


def test_a_matrix_is_the_cross_product_without_what_kconfig_forbids(small_tree):
    block, left_out = combined(small_tree, "OPTIMIZER=adamw,spam PRUNING=none,movement", [])
    slugs = [variant.slug for variant, _ in block]
    assert slugs == ["adamw-none", "adamw-movement", "spam-none"]
    assert block[1][0].delta == {"OPTIMIZER_ADAMW": True, "PRUNING_MOVEMENT": True}
    assert block[1][0].levels == {"OPTIMIZER": "adamw", "PRUNING": "movement"}
    (problem,) = left_out
    assert problem.what.startswith("spam-movement: ") and "OPTIMIZER_ADAMW=y" in problem.what
    assert problem.code == "config.unmet-dependency"


def test_an_axis_that_does_not_apply_gives_one_run(small_tree):
    axes = "PRUNING=none,movement SPARSITY=0.3,0.6,0.9 N_LAYER=1,2"
    block, left_out = combined(small_tree, axes, [])
    slugs = [variant.slug for variant, _ in block]
    assert slugs[:2] == ["none-n-layer-1", "none-n-layer-2"]
    assert len(slugs) == 2 + 3 * 2
    assert [p.what.partition(": ")[0] for p in left_out] == slugs[:2]
    assert [p.code for p in left_out] == ["design.not-applicable"] * 2
    assert all("SPARSITY" in p.what for p in left_out)


OPTIMIZER_SPAM = ConfigLayer.of("config", ".config", {"OPTIMIZER_SPAM": True})


@pytest.mark.parametrize(
    ("axes", "base", "code", "parts"),
    [
        ("N_LAYER=2,9 PRUNING=none,movement", [], "config.out-of-range", ["N_LAYER=9: "]),
        (
            "PRUNING=none,movement",
            [OPTIMIZER_SPAM],
            "config.unmet-dependency",
            ["PRUNING_MOVEMENT=y: ", "OPTIMIZER_ADAMW"],
        ),
        (
            "PRUNING=none SPARSITY=0.3,0.4",
            [],
            "config.unmet-dependency",
            ["SPARSITY=0.3: ", "PRUNING_MOVEMENT=y"],
        ),
    ],
)
def test_a_value_valid_in_no_cell_is_an_error(small_tree, axes, base, code, parts):
    problem = error_of(combined, small_tree, axes, base).problems[0]
    assert problem.code == code and all(part in problem.what for part in parts)


def test_a_value_out_of_range_is_named_as_such_also_where_it_does_not_always_apply(small_tree):
    cells = grid(parse_axes(small_tree, "PRUNING=none,movement SPARSITY=0.5,1.5", "AXES"))

    def bounded(each: Cell):
        if each.delta.get("SPARSITY") == "1.5":
            what, code = "SPARSITY: 1.5 is out of range [0.01, 0.99]", "config.out-of-range"
            raise ConfigError(Problem(what, each.slug, code=code))
        return resolve(small_tree, [], each)

    (problem,) = error_of(resolve_grid, small_tree, cells, bounded).problems
    assert (problem.where, problem.code) == ("movement-sparsity-1.5", "config.out-of-range")


def test_a_very_long_name_is_cut_and_stays_unique(small_tree):
    block, _ = combined(small_tree, f"RATE={'9' * 130},{'9' * 131}", [])
    slugs = [variant.slug for variant, _ in block]
    assert len(set(slugs)) == 2 and all(len(slug) < 140 for slug in slugs)


def allowed(on: set[str]) -> bool:
    """Return whether ``on`` satisfies the only rule of the tree: CROSS needs GATE."""
    return "CROSS" not in on or "GATE" in on


def expected(design: str, names: list[str]) -> list[set[str]]:
    """Return the enabled features of each cell, from the definition of the design."""
    everything = set(names)
    return {
        "leave_one_out": [everything, *(everything - {n} for n in names)],
        "add_one_in": [set(), *({n} for n in names)],
        "cumulative": [set(names[:i]) for i in range(len(names) + 1)],
        "factorial": [
            set(chosen)
            for count in range(len(names) + 1)
            for chosen in itertools.combinations(names, count)
        ],
    }[design]


DESIGNS = ("leave_one_out", "add_one_in", "cumulative", "factorial")


@pytest.mark.parametrize("design", DESIGNS)
def test_a_design_has_the_cells_of_its_definition_and_lists_what_is_forbidden(small_tree, design):
    block, left_out = designed(small_tree, design, FIVE)
    cells = expected(design, ["RATE", "GATE", "WIDE", "CROSS", "N_LAYER"])
    legal = [on for on in cells if allowed(on)]
    trained = [{f for f, level in v.levels.items() if level == "on"} for v, _ in block]
    assert sorted(map(sorted, trained)) == sorted(map(sorted, legal))
    assert len(left_out) == len(cells) - len(legal)
    assert all("CROSS=y: " in problem.what for problem in left_out)
    assert all(problem.code == "config.unmet-dependency" for problem in left_out)
    assert bool(left_out) == (design != "cumulative")


def test_each_cell_is_compared_with_the_cell_it_changes(small_tree):
    features = parse_features(small_tree, [], "GATE WIDE", "FEATURES")
    parents = {
        design: {each.slug: each.parent for each in design_cells(design, features)}
        for design in DESIGNS
    }
    assert parents["leave_one_out"] == {"all": "", "no-gate": "all", "no-wide": "all"}
    assert parents["add_one_in"] == {"none": "", "gate": "none", "wide": "none"}
    assert parents["cumulative"] == {"none": "", "plus-gate": "none", "plus-wide": "plus-gate"}
    assert parents["factorial"] == {"none": "", "wide": "none", "gate": "none", "gate-wide": "none"}


def test_two_combinations_of_one_name_are_refused(small_tree):
    names = ("GATE", "GATE_WIDE", "WIDE_CROSS", "CROSS")
    features = [Level(name, "on", slug(name), {}) for name in names]
    error = error_of(resolve_design, design_cells("factorial", features), lambda each: each)
    assert error.codes == ["run.duplicate-name"]
    assert "gate-wide-cross" in str(error)


def test_what_is_left_out_is_skipped_as_a_parent(small_tree):
    block, left_out = designed(small_tree, "cumulative", "WIDE CROSS GATE")
    parents = {variant.slug: variant.parent for variant, _ in block}
    assert parents == {"none": "", "plus-wide": "none", "plus-gate": "plus-wide"}
    assert [variant.number for variant, _ in block] == [0, 1, 3]
    assert [str(p).split(":")[0] for p in left_out] == ["plus-cross"]


def test_a_design_without_its_baseline_is_an_error(small_tree):
    features = "OPTIMIZER_SPAM PRUNING_MOVEMENT GATE"
    (problem,) = error_of(designed, small_tree, "leave_one_out", features).problems
    assert (problem.where, problem.code) == ("all", "design.invalid-baseline")
    assert problem.what.startswith("PRUNING_MOVEMENT=y: ") and "OPTIMIZER_ADAMW=y" in problem.what


@pytest.mark.parametrize(
    ("features", "code", "part"),
    [
        ("", "design.empty", ""),
        ("NO_SUCH", "config.unknown-symbol", "NO_SUCH: "),
        ("GATE GATE", "design.duplicate", "GATE"),
        ("PRUNING", "config.not-settable", "PRUNING_NONE, PRUNING_MOVEMENT"),
        ("GATE=", "design.malformed-feature", "'GATE='"),
        ("GATE+SEED=3", "design.seed-axis", "SEED: "),
        ("N_LAYER=2", "design.no-effect", "N_LAYER: "),
        ("PRUNING_NONE", "design.no-effect", "PRUNING_NONE: "),
    ],
)
def test_an_invalid_feature_is_rejected(small_tree, features, code, part):
    (problem,) = error_of(parse_features, small_tree, [], features, "FEATURES").problems
    assert (problem.where, problem.code) == ("FEATURES", code) and part in problem.what
