"""Tests of the state-pruning variants: formulas, layer profile, and availability."""

import pytest
import torch

from gpt2.study.designs import grid, parse_axes, resolve_grid
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.pruning.options import PRUNING_VARIANTS, rescale_profile
from tests.lib.pruning.cases import STEPS


def matrix_of(tree, base, axes):
    """Return the resolved test matrix."""
    cells = grid(parse_axes(tree, axes, "AXES"))

    def resolve(cell):
        return tree.resolve([*base, ConfigLayer.of("axis", cell.slug, cell.delta)]).values

    return resolve_grid(tree, base, cells, resolve, "AXES")


# Variant → ramp, scope, multiple of the budget.
TABLE = {
    "bitter0": ("linear", "global", 1.0),
    "bitter1": ("linear", "global", 1.0),
    "bitter2": ("linear", "global", 1.21),
    "bitter3": ("cubic", "global", 1.3),
    "bitter4": ("cubic", "layer", 1.3),
    "bitter5": ("cubic", "global", 1.0),
    "bitter6": ("cubic", "global", 1.0),
    "bitter7": ("cubic", "global", 1.0),
    "bitter8": ("cubic", "global", 1.0),
    "bitter9": ("cubic", "global", 1.0),
}


@pytest.mark.parametrize("variant", TABLE)
def test_a_variant_brings_ramp_scope_and_budget(trial, variant):
    options = trial(variant).options
    assert (options.ramp, options.scope, options.stretch) == TABLE[variant]
    shown = options.summary.partition(variant)[2]
    assert shown.endswith(f" {options.stretch:g}") if options.stretch != 1.0 else shown == ""
    if variant not in ("bitter2", "bitter8"):
        assert trial(variant, ADAMWPRUNE_STRETCH=False).options.stretch == 1.0


def test_bias_correction_alone_changes_no_mask(trial):
    """bitter8 is therefore unavailable at bitter3's budget."""
    third, eighth = trial("bitter3"), trial("bitter8")
    for step in range(1, STEPS + 1):
        third.step(step)
        eighth.step(step)
    assert all(torch.equal(third.pruner.masks[n], eighth.pruner.masks[n]) for n in third.weights)


@pytest.mark.parametrize("variant", ["bitter2", "bitter8"])
def test_a_variant_is_left_out_where_it_would_be_another_again(trial, tree, variant):
    with pytest.raises(ConfigError) as caught:
        trial(variant, ADAMWPRUNE_STRETCH=False)
    (problem,) = caught.value.problems
    assert problem.code == "config.unmet-dependency"
    assert f"{variant.upper()}=y: " in problem.what and "ADAMWPRUNE_STRETCH=y" in problem.what
    base = ConfigLayer.of("config", ".config", {"OPTIMIZER_ADAMWPRUNE": True})
    axes = f"ADAMWPRUNE_VARIANT=bitter3,{variant} ADAMWPRUNE_STRETCH=y,n"
    matrix = matrix_of(tree, [base], axes)
    (left_out,) = matrix.left_out
    assert f"{variant}-adamwprune-stretch-n: " in left_out.what
    assert left_out.code == "config.unmet-dependency"
    assert "ADAMWPRUNE_STRETCH=y" in left_out.what


def test_an_unknown_variant_names_the_known_ones(tree):
    base = ConfigLayer.of("config", ".config", {"OPTIMIZER_ADAMWPRUNE": True})
    with pytest.raises(ConfigError) as caught:
        matrix_of(tree, [base], "ADAMWPRUNE_VARIANT=bitter0,bitter10")
    (problem,) = caught.value.problems
    assert problem.code == "config.invalid-value" and "'bitter10'" in problem.what
    assert all(variant in problem.what for variant in PRUNING_VARIANTS)


def test_optimizers_and_pruners_go_together_as_stated(tree):
    axes = "OPTIMIZER=sgd,adam,adamw,adamwadv,adamwspam,adamwprune "
    matrix = matrix_of(tree, [], axes + "PRUNING=none,magnitude,movement,state")
    assert len(matrix.block) == 16
    reasons = [str(problem).split(": ")[0] for problem in matrix.left_out]
    others = ["sgd", "adam", "adamw", "adamwadv", "adamwspam"]
    pruners = ["none", "magnitude", "movement"]
    expected = [f"{name}-state" for name in others] + [f"adamwprune-{name}" for name in pruners]
    assert reasons == expected
    assert matrix.block[-1][0].slug == "adamwprune-state"


SIZES = [100, 3000, 50, 700, 700, 2400]
PROFILE = [0.7 + 0.6 * i / 5 for i in range(6)]


@pytest.mark.parametrize("mean", [0.01, 0.3, 0.5, 0.75, 0.9, 0.97, 0.98])
def test_profile_equals_a_bisection(mean):
    low, high = 0.0, 1000.0
    for _ in range(200):
        c = (low + high) / 2
        reached = sum(n * min(0.98, c * p) for n, p in zip(SIZES, PROFILE)) / sum(SIZES)
        low, high = (c, high) if reached < mean else (low, c)
    found = rescale_profile(PROFILE, SIZES, mean, 0.98)
    assert found == pytest.approx([min(0.98, high * p) for p in PROFILE], abs=1e-9)
    assert sum(n * s for n, s in zip(SIZES, found)) / sum(SIZES) == pytest.approx(mean)
    assert found == sorted(found)


def test_profile_without_cap_is_the_stated_one(trial):
    found = trial("bitter4").options.layer_sparsities(0.5, [10, 10, 10])
    assert found == pytest.approx([0.35, 0.5, 0.65])
    assert trial("bitter4").options.layer_sparsities(0.5, [10]) == pytest.approx([0.5])
    assert trial("bitter4").options.layer_sparsities(0.99, [5, 7]) == pytest.approx([0.99, 0.99])


def test_layers_follow_the_profile(trial):
    run = trial("bitter4")
    run.steps(1, STEPS)
    sizes = [p.numel() for p in run.weights.values()]
    expected = run.options.layer_sparsities(0.5, sizes)
    assert list(run.pruner.sparsity_by_layer().values()) == pytest.approx(expected, abs=0.003)
    assert set(PRUNING_VARIANTS) == set(TABLE)
