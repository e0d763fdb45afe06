"""Tests of the state-pruning variants: ramp and budget, layer profile, and availability."""

import pytest
import torch

from gpt2.study.designs import grid, parse_axes, resolve_grid
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.pruning.options import PRUNING_VARIANTS
from lib.pruning.reference import VARIANTS, documented_stretch, scope_sparsities
from tests.lib.pruning.cases import STEPS


def matrix_of(tree, base, axes):
    """Return the resolved test matrix, and what is left out."""
    cells = grid(parse_axes(tree, axes, "AXES"))

    def resolve(cell):
        return tree.resolve([*base, ConfigLayer.of("axis", cell.slug, cell.delta)]).values

    return resolve_grid(tree, cells, resolve)


@pytest.mark.parametrize("variant", PRUNING_VARIANTS)
def test_a_variant_brings_ramp_scope_and_budget(trial, variant):
    options = trial(variant).options
    assert (options.ramp, options.scope, options.stretch) == VARIANTS[variant]
    shown = options.summary.partition(f", {variant}")[2]
    assert shown == ("" if options.stretch == 1.0 else f", budget x {documented_stretch(variant)}")
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
    _, (left_out,) = matrix_of(tree, [base], axes)
    assert f"{variant}-adamwprune-stretch-n: " in left_out.what
    assert left_out.code == "config.unmet-dependency"


def test_optimizers_and_pruners_go_together_as_stated(tree):
    axes = "OPTIMIZER=sgd,adam,adamw,adamwadv,adamwspam,adamwprune "
    block, left_out = matrix_of(tree, [], axes + "PRUNING=none,magnitude,movement,state")
    assert len(block) == 16
    reasons = [str(problem).split(": ")[0] for problem in left_out]
    others = ["sgd", "adam", "adamw", "adamwadv", "adamwspam"]
    pruners = ["none", "magnitude", "movement"]
    expected = [f"{name}-state" for name in others] + [f"adamwprune-{name}" for name in pruners]
    assert reasons == expected
    assert block[-1][0].slug == "adamwprune-state"
    # State pruning has its own scope and ramp.
    tree.resolve([ConfigLayer.of("test", "test", {"OPTIMIZER_ADAMWPRUNE": True})])
    choices = [tree.kconf.named_choices[f"PRUNING_{name}"] for name in ("RAMP", "SCOPE")]
    assert [choice.visibility for choice in choices] == [0, 0]


@pytest.mark.parametrize("mean", [0.01, 0.5, 0.9, 0.97, 0.98, 0.99])
def test_the_layer_profile_equals_a_bisection(trial, mean):
    options, sizes = trial("bitter4").options, [100, 3000, 50, 700, 700, 2400]
    found = options.layer_sparsities(mean, sizes)
    assert found == pytest.approx([s for _, s in scope_sparsities(options, mean, sizes)], abs=1e-9)
    assert sum(n * s for n, s in zip(sizes, found)) / sum(sizes) == pytest.approx(mean)
    assert options.layer_sparsities(0.5, [10, 10, 10]) == pytest.approx([0.35, 0.5, 0.65])
