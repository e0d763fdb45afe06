"""Tests of the state-pruning variants: formulas, layer profile, and availability."""

import itertools
from collections.abc import Callable

import pytest
import torch

from gpt2.study.designs import ResolvedSweep, grid, parse_axes, resolve_grid
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.pruning.options import PRUNING_VARIANTS, rescale_profile
from lib.pruning.reference import PruningSnapshot, StateReference
from tests.lib.pruning.cases import STEPS


def matrix_of(tree: KconfigTree, base: list[ConfigLayer], axes: str) -> ResolvedSweep:
    """Return the resolved test matrix."""
    cells = grid(parse_axes(tree, axes, "AXES"), "AXES")

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
def test_a_variant_brings_ramp_scope_and_budget(trial: Callable, variant: str) -> None:
    options = trial(variant).options
    assert (options.ramp, options.scope, options.stretch) == TABLE[variant]
    shown = options.summary.partition(variant)[2]
    assert shown.endswith(f" {options.stretch:g}") if options.stretch != 1.0 else shown == ""
    if variant not in ("bitter2", "bitter8"):
        assert trial(variant, ADAMWPRUNE_STRETCH=False).options.stretch == 1.0


def _expected_scores(run, steps: int) -> list[list[float]]:
    found = []
    for parameter in run.weights.values():
        state = run.optimizer.state[parameter]
        lists = [t.flatten().tolist() for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        found.append(lists)
    joined = [list(itertools.chain(*lists)) for lists in zip(*found, strict=True)]
    weights, m, v = joined
    seen = PruningSnapshot(weights, m=m, v=v, bias_correction=1 - 0.9**steps)
    ranked = iter(StateReference(run.options).scores(seen).tolist())
    return [[next(ranked) for _ in lists[0]] for lists in found]


@pytest.mark.parametrize("variant", TABLE)
def test_one_update_equals_the_reference(trial: Callable, variant: str) -> None:
    run = trial(variant)
    run.steps(1, 7)
    expected = _expected_scores(run, 7)
    found = [run.pruner.score(name, run.optimizer).flatten() for name in run.weights]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-4, atol=1e-6)
    run.pruner.after_step(20, 20 / STEPS, run.optimizer)
    reached = run.options.sparsity_at(20 / STEPS)
    if variant == "bitter4":
        assert run.options.scope == "layer"
        counts = run.options.layer_sparsities(reached, [len(layer) for layer in expected])
        lowest = [
            set(sorted(range(len(layer)), key=layer.__getitem__)[: round(share * len(layer))])
            for layer, share in zip(expected, counts, strict=True)
        ]
    else:
        ranked = sorted((s, k, i) for k, layer in enumerate(expected) for i, s in enumerate(layer))
        taken = {(k, i) for _, k, i in ranked[: round(reached * len(ranked))]}
        lowest = [{i for k, i in taken if k == layer} for layer in range(len(expected))]
    for zeros, indices in zip(run.zeros().values(), lowest, strict=True):
        assert set(zeros.flatten().nonzero().flatten().tolist()) == indices


def test_bias_correction_alone_changes_no_mask(trial: Callable) -> None:
    """bitter8 is therefore unavailable at bitter3's budget."""
    third, eighth = trial("bitter3"), trial("bitter8")
    for step in range(1, STEPS + 1):
        third.step(step)
        eighth.step(step)
    assert all(torch.equal(third.pruner.masks[n], eighth.pruner.masks[n]) for n in third.weights)


@pytest.mark.parametrize("variant", ["bitter2", "bitter8"])
def test_a_variant_is_left_out_where_it_would_be_another_again(
    trial: Callable, tree: KconfigTree, variant: str
) -> None:
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


def test_an_unknown_variant_names_the_known_ones(tree: KconfigTree) -> None:
    base = ConfigLayer.of("config", ".config", {"OPTIMIZER_ADAMWPRUNE": True})
    with pytest.raises(ConfigError) as caught:
        matrix_of(tree, [base], "ADAMWPRUNE_VARIANT=bitter0,bitter10")
    (problem,) = caught.value.problems
    assert problem.code == "config.invalid-value" and "'bitter10'" in problem.what
    assert all(variant in problem.what for variant in PRUNING_VARIANTS)


def test_optimizers_and_pruners_go_together_as_stated(tree: KconfigTree) -> None:
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
def test_profile_equals_a_bisection(mean: float) -> None:
    low, high = 0.0, 1000.0
    for _ in range(200):
        c = (low + high) / 2
        reached = sum(n * min(0.98, c * p) for n, p in zip(SIZES, PROFILE)) / sum(SIZES)
        low, high = (c, high) if reached < mean else (low, c)
    found = rescale_profile(PROFILE, SIZES, mean, 0.98)
    assert found == pytest.approx([min(0.98, high * p) for p in PROFILE], abs=1e-9)
    assert sum(n * s for n, s in zip(SIZES, found)) / sum(SIZES) == pytest.approx(mean)
    assert found == sorted(found)


def test_profile_without_cap_is_the_stated_one(trial: Callable) -> None:
    found = trial("bitter4").options.layer_sparsities(0.5, [10, 10, 10])
    assert found == pytest.approx([0.35, 0.5, 0.65])
    assert trial("bitter4").options.layer_sparsities(0.5, [10]) == pytest.approx([0.5])
    assert trial("bitter4").options.layer_sparsities(0.99, [5, 7]) == pytest.approx([0.99, 0.99])


def test_layers_follow_the_profile(trial: Callable) -> None:
    run = trial("bitter4")
    run.steps(1, STEPS)
    sizes = [p.numel() for p in run.weights.values()]
    expected = run.options.layer_sparsities(0.5, sizes)
    assert list(run.pruner.sparsity_by_layer().values()) == pytest.approx(expected, abs=0.003)
    assert set(PRUNING_VARIANTS) == set(TABLE)
