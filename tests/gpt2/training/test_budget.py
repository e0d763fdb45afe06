"""Iterations, tokens and training time."""

import itertools
import json
from collections.abc import Callable
from typing import Any

from gpt2.training.budget import TrainingBudget, TrainingClock
from gpt2.training.loop import optimizer_step
from lib.runs.run_dir import State


class Clock:
    """Manually advanced clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_tokens_are_rounded_up_to_whole_iterations(configure):
    changes = {"BUDGET_TOKENS": True, "MAX_ITERS": None}
    assert TrainingBudget(configure(MAX_TOKENS=640, **changes)).iterations == 10
    assert TrainingBudget(configure(MAX_TOKENS=641, **changes)).iterations == 11
    assert TrainingBudget(configure(MAX_TOKENS=1, **changes)).iterations == 1


def test_a_budget_of_flops_gives_costly_models_fewer_iterations(configure):
    changes = {"BUDGET_FLOPS": True, "MAX_ITERS": None}
    base = configure(**changes)
    # 64 tokens per iteration.
    flops = 64 * base.model.flops_per_token()
    amount = {**changes, "MAX_FLOPS": str(10.5 * flops)}
    wide = configure(**amount, MLP_HIDDEN=1024)
    assert TrainingBudget(configure(**amount)).iterations == 11
    assert TrainingBudget(wide).iterations == -(
        -10.5 * flops // (64 * wide.model.flops_per_token())
    )
    assert TrainingBudget(wide).iterations < 11


def test_the_budget_of_flops_is_part_of_the_identity_if_it_applies(configure):
    assert "max_flops" not in configure().identity()["train"]
    changes = {"BUDGET_FLOPS": True, "MAX_ITERS": None}
    assert configure(**changes, MAX_FLOPS="1e9").identity()["train"]["max_flops"] == 1e9


def test_progress_of_iterations_ignores_the_clock(configure):
    found = TrainingBudget(configure())
    assert [found.progress(i, 1e9) for i in (0, 3, 12)] == [0.0, 0.25, 1.0]
    assert found.warmup_progress == 2 / 12


def test_a_token_budget_trains_that_many_tokens(configure, train):
    # The warm-up of five steps ends with the run, of which a note warns.
    changes = {"BUDGET_TOKENS": True, "MAX_ITERS": None, "WARMUP_STEPS": 5}
    done = train(configure(**changes, MAX_TOKENS=300))
    assert "WARN WARMUP_STEPS=5: the run ends in its warm-up" in done.lines()
    assert done.summary()["final"]["iterations"] == 5
    assert done.summary()["final"]["tokens"] == 320


def test_the_stopwatch_counts_only_inside():
    clock = Clock()
    watch = TrainingClock(clock)
    with watch:
        clock.now += 3
        assert watch.seconds == 3
    clock.now += 50
    assert watch.seconds == 3
    watch.resume_at(10)
    with watch:
        clock.now += 1
    assert watch.seconds == 11


def test_a_time_budget_counts_training_only_and_survives_a_resume(configure, train, monkeypatch):
    """A step takes 7 s of 60; evaluation and saving take an hour each and do not count."""
    clock = Clock()

    def slow(function: Callable, seconds: float) -> Callable:
        def timed(*arguments: Any, **named: Any) -> Any:
            clock.now += seconds
            return function(*arguments, **named)

        return timed

    from gpt2.evaluate import Evaluator
    from lib.runs import checkpoint

    monkeypatch.setattr("gpt2.training.loop.optimizer_step", slow(optimizer_step, 7.0))
    monkeypatch.setattr(Evaluator, "__call__", slow(Evaluator.__call__, 3600.0))
    monkeypatch.setattr(checkpoint, "save_checkpoint", slow(checkpoint.save_checkpoint, 3600.0))
    config = configure(BUDGET_TIME=True, MAX_ITERS=None, GPT2_MAX_TIME=60, WARMUP_STEPS=3)
    stopped = train(config, stop_at=4, clock=clock)
    assert stopped.status.state is State.INTERRUPTED
    done = train(config, clock=clock)
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
