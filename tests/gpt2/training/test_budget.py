"""Iterations, tokens and training time."""

import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from gpt2.evaluate import Evaluator
from gpt2.training.budget import TrainingBudget
from gpt2.training.loop import optimizer_step
from lib.runs import checkpoint

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


def test_the_schedule_follows_the_stretched_budget(configure, train):
    longer = train(configure(**BITTER3))
    assert "16 it x 64 tokens (budget x 1.3)" in longer.lines()
    assert longer.summary()["final"]["budget_stretch"] == 1.3
    rates = [row["lr"] for row in longer.rows("train")]
    assert len(rates) == 16 and rates[-1] < rates[11] < rates[2]


def test_a_time_budget_counts_training_only_and_survives_a_resume(configure, train):
    """A step takes 7 s of 60; evaluation and saving take an hour each and do not count."""
    now = [100.0]

    def slow(function: Callable, seconds: float) -> Callable:
        def timed(*arguments: Any, **named: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **named)

        return timed

    config = configure(**TIME, GPT2_MAX_TIME=60, WARMUP_STEPS=3)
    with (
        mock.patch("gpt2.training.loop.optimizer_step", slow(optimizer_step, 7.0)),
        mock.patch.object(Evaluator, "__call__", slow(Evaluator.__call__, 3600.0)),
        mock.patch.object(checkpoint, "save_checkpoint", slow(checkpoint.save_checkpoint, 3600.0)),
    ):
        train(config, stop_at=4, clock=lambda: now[0])
        done = train(config, clock=lambda: now[0])
    rows = done.rows("train")
    # Nine steps take 63 s: a step that starts within the budget is finished.
    assert [row["progress"] for row in rows] == [min(1.0, 7 * i / 60) for i in range(1, 10)]
    assert done.summary()["timing"]["train_seconds"] == 63.0
    # Warm-up ends after 3 iterations, at 21 s; the cosine falls from there, across the resume.
    rates = [row["lr"] for row in rows]
    assert rates[2] == rates[3] == 0.01
    assert all(b < a for a, b in itertools.pairwise(rates[3:]))
    assert done.status.iterations == 0
    assert json.loads(done.files.timing.read_text().splitlines()[-1])["eta_seconds"] == 0.0
