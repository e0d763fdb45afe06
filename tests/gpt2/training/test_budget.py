"""Iterations, tokens and training time. That a run follows them is tested by the check budgeted."""

import pytest

from gpt2.training.budget import TrainingBudget

TOKENS = {"BUDGET_TOKENS": True, "MAX_ITERS": None}
TIME = {"BUDGET_TIME": True, "MAX_ITERS": None}
PRUNE = {
    "OPTIMIZER_ADAMWSPAM": None,
    "PRUNING_MAGNITUDE": None,
    "OPTIMIZER_ADAMWPRUNE": True,
}
BITTER2 = {**PRUNE, "ADAMWPRUNE_VARIANT_BITTER2": True}
BITTER3 = {**PRUNE, "ADAMWPRUNE_VARIANT_BITTER3": True}


@pytest.mark.parametrize(
    ("changes", "iterations", "seconds", "stretch"),
    [
        # An iteration has 64 tokens.
        ({**TOKENS, "MAX_TOKENS": 640}, 10, 0, 1.0),
        ({**TOKENS, "MAX_TOKENS": 641}, 11, 0, 1.0),
        ({**TOKENS, "MAX_TOKENS": 1}, 1, 0, 1.0),
        ({**TOKENS, **BITTER2, "MAX_TOKENS": 6400}, 121, 0, 1.21),
        ({**TIME, **BITTER2, "GPT2_MAX_TIME": 100}, 0, 121, 1.21),
        # 12 x 1.3 is 15.6.
        (BITTER3, 16, 0, 1.3),
        ({**BITTER3, "ADAMWPRUNE_STRETCH": False}, 12, 0, 1.0),
    ],
)
def test_budgets(configure, changes, iterations, seconds, stretch):
    budget = TrainingBudget(configure(**changes))
    assert (budget.iterations, budget.stretch) == (iterations, stretch)
    assert budget.seconds == pytest.approx(seconds)
    # The progress of iterations ignores the clock.
    done, spent = iterations // 4, seconds / 4 or 1e9
    assert budget.progress(done, spent) == pytest.approx(done / iterations if iterations else 0.25)


def test_a_budget_of_flops_gives_costly_models_fewer_iterations(configure):
    flops = 64 * configure().model.flops_per_token()
    amount = {"BUDGET_FLOPS": True, "MAX_ITERS": None, "MAX_FLOPS": str(10.5 * flops)}
    wide = configure(**amount, MLP_HIDDEN=1024)
    assert TrainingBudget(configure(**amount)).iterations == 11
    iterations = -(-10.5 * flops // (64 * wide.model.flops_per_token()))
    assert TrainingBudget(wide).iterations == iterations < 11
    assert wide.identity()["train"]["max_flops"] == 10.5 * flops
    assert "max_flops" not in configure().identity()["train"]
