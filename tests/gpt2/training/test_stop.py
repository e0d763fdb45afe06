"""A run that is stopped at any moment, and resumed, ends with the bytes of an uninterrupted run."""

import multiprocessing
import os
import pkgutil
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest

# Imported by DistributedDataParallel: once here instead of in every forked process.
import torch._dynamo  # noqa: F401

from gpt2.running.backend import train_in_worker
from lib.runner.worker import ParentConnection, train_worker
from lib.runs.lease import Lease
from lib.runs.run_dir import RunDir, State
from tests.gpt2.training.conftest import SPLITS

# Statistics and an evaluation after two steps, a checkpoint after three, statistics and the final
# evaluation after four. An evaluation has two batches of one window.
SHORT = {
    "MAX_ITERS": 4,
    "EVAL_TOKENS": 32,
    "EVAL_INTERVAL": 2,
    "CHECKPOINT_INTERVAL": 3,
    "STATISTICS_INTERVAL": 2,
}
# Before each step and after the last one, and in two evaluations before each batch of rank 0.
POLLS = {1: 5 + 2 * 2, 2: 5 + 2 * 1}


@pytest.fixture(scope="module")
def whole() -> dict[int, dict[str, Any]]:
    """Results of uninterrupted runs by the number of ranks, trained by the first test of each."""
    return {}


@pytest.fixture
def finished(configure, together, whole) -> Callable[[int, str], bool]:
    """Return a function that resumes a run, and returns whether it has the uninterrupted bytes."""

    def resume(size: int, name: str) -> bool:
        config = configure(**SHORT, **SPLITS[size])
        if size not in whole:
            uninterrupted, _ = together(config, "whole")
            for kind in ("eval", "statistics"):
                assert [row["iteration"] for row in uninterrupted.rows(kind)] == [2, 4]
            whole[size] = uninterrupted.core()
        resumed, _ = together(config, name)
        return resumed.status.state is State.SUCCESS and resumed.core() == whole[size]

    return resume


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stop_at_any_poll_loses_nothing(configure, together, finished, size):
    config, other = configure(**SHORT, **SPLITS[size]), []
    for poll in count(1):
        name = f"stopped-{poll}"
        polls = count(1)
        first, _ = together(config, name, stop=lambda: next(polls) >= poll)
        if first.status.state is State.SUCCESS:
            break
        assert first.status.state is State.INTERRUPTED, first.status
        if not finished(size, name):
            other.append(poll)
    assert poll == POLLS[size] + 1
    assert not other, f"other bytes after a stop at poll {other} of {POLLS[size]}"


def test_a_stop_requested_while_a_run_starts_stops_it(configure, train):
    """As ``make stop`` requests it, before the worker has loaded torch."""
    config = configure(**SHORT)
    train.prepare(config, "run").stop_request.touch()
    stopped = train(config)
    assert (stopped.status.state, stopped.status.iteration) == (State.INTERRUPTED, 0)


# Function at whose call the signal arrives, number of calls before, ranks, state of the stopped run.
MOMENTS = {
    "while it starts": ("gpt2.training.loop.warm_up", 0, 1, State.INTERRUPTED),
    "in the first step": ("gpt2.training.loop.optimizer_step", 0, 2, State.INTERRUPTED),
    "in statistics": ("gpt2.training.loop.record_statistics", 0, 1, State.INTERRUPTED),
    "in an evaluation": ("gpt2.model.GPT.token_losses", 0, 2, State.INTERRUPTED),
    "in a checkpoint": ("gpt2.training.loop.save_checkpoint", 0, 1, State.INTERRUPTED),
    "in the final checkpoint": ("gpt2.training.loop.save_checkpoint", 1, 2, State.INTERRUPTED),
    # Nothing is left to train.
    "in the results": ("gpt2.training.loop.write_results", 0, 1, State.SUCCESS),
    "at the final status": ("gpt2.training.loop.finalize_run", 0, 2, State.SUCCESS),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_call_loses_nothing(configure, train, ranks, finished, moment):
    """SIGTERM to every worker, as a batch system sends it."""
    target, calls, size, state = MOMENTS[moment]
    run = RunDir(train.folder / "run")
    train.prepare(configure(**SHORT, **SPLITS[size]), "run")
    function = partial(train_in_worker, build_dir=train.build_dir, allow_stale=False, order={})
    assert Lease.take(run, 60, None)
    original, number = pkgutil.resolve_name(target), count()

    def call(*arguments: Any, **named: Any) -> Any:
        if next(number) == calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **named)

    def body(rank: int) -> None:
        _ours, theirs = multiprocessing.Pipe()
        with mock.patch(target, call):
            train_worker(function, run.path, 1, ParentConnection(theirs))

    assert ranks(size, body) == [None] * size
    stopped = train.found("run")
    assert stopped.status.state is state, stopped.status
    assert finished(size, "run")
