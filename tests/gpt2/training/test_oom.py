"""Out-of-memory fallbacks: the step is rolled back and repeated with smaller micro-batches.

Memory runs out when a test says so: the forward pass raises what torch raises on a GPU.
"""

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gpt2.model import GPT
from gpt2.training.loop import optimizer_step
from gpt2.training.out_of_memory import UNSUPPORTED_FALLBACKS, apply_next_fallback
from gpt2.training.state import StepMetrics, TrainingSession
from lib.errors import ConfigError, RunError
from lib.runs.run_dir import State
from tests.gpt2.training.conftest import Trained

FAST = {"RUN_PROFILE_MAXOUT_SPEED": True}
WHOLE = {**FAST, "BATCH_SIZE": 4, "GRAD_ACCUMULATION": 1}
SINGLES = {**FAST, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 4}
DOWN_TO_1 = [
    ({"micro_batch": 4, "accumulation": 1}, {"micro_batch": 2, "accumulation": 2}),
    ({"micro_batch": 2, "accumulation": 2}, {"micro_batch": 1, "accumulation": 4}),
]


@contextmanager
def memory_for(sequences: int, since: int = 1, rank: int | None = None) -> Iterator[None]:
    """Make passes of more than ``sequences`` run out of memory from iteration ``since`` on.

    On one ``rank`` alone, or on every one.
    """
    forward, at = GPT.forward, [0]

    def noted(session: TrainingSession, *rest: Any) -> StepMetrics:
        at[0] = session.iteration + 1
        return optimizer_step(session, *rest)

    def limited(model: GPT, x_BT: Tensor, *rest: Tensor) -> Tensor:
        here = rank is None or rank == int(os.environ.get("RANK", "0"))
        if here and at[0] >= since and x_BT.size(0) > sequences:
            # The failed pass has already used the generator.
            torch.rand(7)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return forward(model, x_BT, *rest)

    with (
        mock.patch("gpt2.model.GPT.forward", limited),
        mock.patch("gpt2.training.loop.optimizer_step", noted),
    ):
        yield


def fallbacks(trained: Trained) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trained.manifest()["oom_fallbacks"]
    return found


def without_evaluations(trained: Trained) -> list[Any]:
    """Return training rows, weights and the order of the data."""
    order = trained.summary()["final"]["data_order_digest"]
    return [trained.rows("train"), trained.files.weights.read_bytes(), order]


def test_the_micro_batch_is_halved_until_it_fits_and_nothing_else_changes(configure, train):
    """Falls back to one sequence in the first step: byte-identical to a run configured so."""
    with memory_for(1):
        fallen = train(configure(**WHOLE, MAX_ITERS=4), "fallen")
    assert fallen.status.state is State.SUCCESS
    records = fallbacks(fallen)
    assert [(r["from"], r["to"]) for r in records] == DOWN_TO_1
    assert {(r["iteration"], r["action"]) for r in records} == {(1, "micro-batch")}
    assert all(r["peak_bytes"] > 10**7 for r in records)
    shown = [line for line in fallen.lines().splitlines() if line.startswith("OOM")]
    assert len(shown) == 2 and "micro_batch=4 accumulation=1 -> micro_batch=2" in shown[0]
    assert "Tried to allocate 2.00 GiB" in shown[0] and "more" not in shown[0]
    # Dropout is on: the generators were restored after the failed passes.
    small = train(configure(**SINGLES, MAX_ITERS=4), "small")
    assert fallbacks(small) == []
    assert without_evaluations(fallen) == without_evaluations(small)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the address space of this process, of which passes of several sequences need more."""
    forward = GPT.forward

    def large(model: GPT, x_BT: Tensor, *rest: Tensor) -> Tensor:
        if model.training and x_BT.size(0) > 1:
            torch.empty(x_BT.size(0) << 28, dtype=torch.uint8)
        return forward(model, x_BT, *rest)

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
    with mock.patch("gpt2.model.GPT.forward", large):
        yield


def test_under_a_limit_of_memory_a_run_falls_back(configure, train):
    config = configure(**WHOLE, MAX_ITERS=2)
    if (child := os.fork()) == 0:
        with limited_memory():
            train(config, "fallen")
        os._exit(0)
    os.waitpid(child, 0)
    fallen = train.found("fallen")
    assert fallen.status.state is State.SUCCESS, fallen.status.message
    assert [(r["from"], r["to"]) for r in fallbacks(fallen)] == DOWN_TO_1


def test_memory_that_runs_out_beside_a_step_fails_the_run_with_advice(configure, train):
    with mock.patch("gpt2.training.loop.record_results", side_effect=MemoryError()):
        failed = train(configure(MAX_ITERS=2))
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    assert "Halve BATCH_SIZE" in failed.status.message
    assert train(configure(MAX_ITERS=2)).status.state is State.SUCCESS


@pytest.mark.slow
def test_in_the_middle_of_a_run_only_rounding_changes_also_if_it_is_killed_then(configure, train):
    """The resumed run has enough memory, but keeps the micro-batch of the checkpoint."""
    exact = {**WHOLE, "DROPOUT": "0.0", "PRUNING_MAGNITUDE": None, "PRUNING_FREQUENCY": None}
    exact |= {"MAX_ITERS": 8}
    config = configure(**exact, CHECKPOINT_INTERVAL=0, LOADER_WORKERS=1)

    def deadly(session: TrainingSession) -> tuple[bool, bool, bool]:
        """Kill the process between two steps."""
        if session.iteration == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return False, False, False

    child = os.fork()
    if child == 0:
        with memory_for(1, since=6), mock.patch("gpt2.training.loop._due", deadly):
            train(config, "killed")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with memory_for(1, since=6):
        whole = train(config, "whole")
    resumed, plain = train(config, "killed"), train(configure(**exact), "plain")
    line = next(line for line in resumed.lines().splitlines() if "resumes at iteration 6" in line)
    assert "after 2 out-of-memory" in line and "BATCH_SIZE=1 GRAD_ACCUMULATION=4" in line
    assert without_evaluations(resumed) == without_evaluations(whole)
    for done in (resumed, whole):
        assert [(r["iteration"], r["to"]) for r in fallbacks(done)] == [
            (6, to) for _, to in DOWN_TO_1
        ]
    assert resumed.manifest()["batch"].items() >= DOWN_TO_1[1][1].items()
    found, wanted = whole.rows("train"), plain.rows("train")
    assert found[:5] == wanted[:5] and found != wanted
    # The same sequences in every step.
    for a, b in zip(found, wanted, strict=True):
        assert (a["iteration"], a["tokens"], a["lr"]) == (b["iteration"], b["tokens"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_after_the_last_fallback_the_run_fails_with_advice(configure, train):
    with memory_for(0):
        failed = train(configure(**WHOLE))
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    assert "with BATCH_SIZE=1, gradient checkpointing on" in failed.status.message
    assert all(f"OOM {name}: " in failed.lines() for name in UNSUPPORTED_FALLBACKS)
    assert [(r["from"], r["to"]) for r in fallbacks(failed)] == [
        *DOWN_TO_1,
        ({"on": False}, {"on": True}),
    ]


def test_compiled_blocks_are_not_recomputed(session, monkeypatch):
    """A compiled recomputation would use other dropout masks."""
    monkeypatch.setattr(GPT, "grad_checkpointing", False, raising=False)
    opened = session(**SINGLES)
    compiled = replace(opened.config.machine, compile=True)
    opened.config = replace(opened.config, machine=compiled)
    with pytest.raises(RunError) as caught:
        apply_next_fallback(opened, "out of memory")
    assert caught.value.codes == ["run.out-of-memory"]
    assert "BATCH_SIZE=1" in str(caught.value) and "not available" in str(caught.value)
    assert opened.oom_fallbacks == []


def test_under_paper_repro_the_run_fails_with_advice(configure, train):
    with pytest.raises(ConfigError, match="OOM_FALLBACK"):
        configure(OOM_FALLBACK=True)
    with memory_for(1, since=3):
        failed = train(configure(BATCH_SIZE=4, GRAD_ACCUMULATION=1))
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    assert "BATCH_SIZE" in failed.status.message and "GRAD_ACCUMULATION" in failed.status.message
    assert fallbacks(failed) == []
    assert len(failed.rows("train")) == 2


def test_an_update_out_of_memory_cannot_be_rolled_back(configure, train):
    trouble = torch.OutOfMemoryError("out of memory")
    with mock.patch("torch.nn.utils.clip_grads_with_norm_", side_effect=trouble):
        failed = train(configure(**WHOLE))
    assert failed.status.state is State.FAILED and fallbacks(failed) == []


@pytest.mark.slow
def test_a_warm_up_out_of_memory_leaves_fallbacks_to_training(configure, train):
    forward = GPT.forward

    def limited(model: GPT, x_BT: Tensor, *rest: Tensor) -> Tensor:
        if x_BT.size(0) > 1 and model.training and rest:
            raise torch.OutOfMemoryError("out of memory")
        return forward(model, x_BT, *rest)

    with mock.patch("gpt2.model.GPT.forward", limited):
        warm = train(configure(**WHOLE, MAX_ITERS=2, WARMUP_ITERATIONS=2), "warm")
        cold = train(configure(**WHOLE, MAX_ITERS=2), "cold")
    assert re.search("^OOM .*warm-up", warm.lines(), re.MULTILINE)
    assert not re.search("^OOM .*warm-up", cold.lines(), re.MULTILINE)
    assert warm.core() == cold.core()
    assert [r["iteration"] for r in fallbacks(warm)] == [1, 1]


@pytest.mark.slow
def test_one_rank_out_of_memory_makes_all_ranks_fall_back(configure, together):
    both = {**FAST, "GPUS": 2, "MAX_ITERS": 4}
    with memory_for(1, rank=1):
        fallen, ended = together(configure(**both, BATCH_SIZE=2, GRAD_ACCUMULATION=1), "fallen")
    assert ended == [["SUCCESS", 4, ""]] * 2
    assert [(r["iteration"], r["to"]["micro_batch"]) for r in fallbacks(fallen)] == [(1, 1)]
    assert "another rank" in fallen.files.logs.read_text()
    small, _ = together(configure(**both, BATCH_SIZE=1, GRAD_ACCUMULATION=2), "small")
    assert without_evaluations(fallen) == without_evaluations(small)


def test_a_rank_that_runs_out_later_ends_the_run(configure, together):
    """A step cannot be rolled back during a collective operation."""
    with memory_for(1, since=5, rank=1):
        config = configure(**FAST, GPUS=2, BATCH_SIZE=2, GRAD_ACCUMULATION=1)
        _, (main, other) = together(config)
    assert "[run.lost-process]" in main
    assert "[run.out-of-memory]" in other and "Tried to allocate" in other
