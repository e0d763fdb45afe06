"""Tests of movement scores against the sum over a recorded history."""

import math
from collections.abc import Callable

import pytest
import torch

from lib.pruning.reference import MovementReference, PruningSnapshot


def test_scores_are_the_sum_over_all_steps_before_clipping(trial: Callable) -> None:
    run = trial("movement-global-cubic")
    run.steps(1, 30)
    for name, parameter in run.weights.items():
        seen = PruningSnapshot(parameter.flatten().tolist(), [step[name] for step in run.history])
        expected = torch.tensor(MovementReference(run.options).scores(seen))
        found = run.pruner.score(name, run.optimizer).flatten()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        # Both signs must occur, or a wrong sign would go unnoticed.
        assert 0.1 < float((found < 0).float().mean()) < 0.9


def test_the_weight_that_is_pushed_towards_zero_goes_whatever_its_size(trial: Callable) -> None:
    run = trial("movement-global-cubic", PRUNING_SPARSITY="0.5")
    with torch.no_grad():
        for parameter in run.weights.values():
            parameter[0] = 9.0
            parameter[1] = -0.01
            # Descent moves the first row down to zero, the second away from it.
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[:2] = 1.0
    run.pruner.observe(torch.tensor(1.0))
    run.pruner.after_step(1, 1.0, run.optimizer)
    for zeros in run.zeros().values():
        assert bool(zeros[0].all()) and not bool(zeros[1].any())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_skipped_counts_for_nothing(trial: Callable, bad: float) -> None:
    run = trial("movement-global-cubic")
    run.steps(1, 3)
    before = {name: run.pruner.score(name, run.optimizer) for name in run.weights}
    run.model.first.weight.grad[0, 0] = bad
    run.pruner.observe(torch.tensor(bad))
    for name, score in before.items():
        assert torch.equal(run.pruner.score(name, run.optimizer), score)
