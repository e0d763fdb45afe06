"""Tests of magnitude pruning against sorted lists."""

from collections.abc import Callable

import pytest

from lib.pruning.reference import MagnitudeReference, PruningSnapshot


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("ramp", ["cubic", "linear"])
@pytest.mark.parametrize("progress", [0.05, 0.3, 0.6, 0.75, 1.0])
def test_one_update_equals_the_reference(
    trial: Callable, scope: str, ramp: str, progress: float
) -> None:
    run = trial(f"magnitude-{scope}-{ramp}")
    tensors = [PruningSnapshot(p.flatten().tolist()) for p in run.weights.values()]
    run.pruner.after_step(10, progress, run.optimizer)
    expected = MagnitudeReference(run.options).pruned(tensors, progress)
    for found, indices in zip(run.zeros().values(), expected, strict=True):
        assert set(found.flatten().nonzero().flatten().tolist()) == indices


def test_a_global_threshold_takes_more_of_the_smaller_matrix(trial: Callable) -> None:
    run = trial("magnitude-global-cubic")
    run.pruner.after_step(1, 1.0, run.optimizer)
    layers = run.pruner.sparsity_by_layer()
    assert layers["first.weight"] > layers["second.weight"] + 0.2
