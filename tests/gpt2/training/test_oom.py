"""Out-of-memory fallbacks: the step is rolled back and repeated with smaller micro-batches.

Memory runs out when a test says so: the forward pass raises what torch raises on a GPU.
"""

import os
import resource
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from gpt2.model import GPT
from gpt2.training.loop import optimizer_step
from gpt2.training.out_of_memory import apply_next_fallback
from lib.errors import ConfigError, RunError
from lib.runs.run_dir import State
from tests.gpt2.training.conftest import at_call

FAST = {"RUN_PROFILE_MAXOUT_SPEED": True}
WHOLE = {**FAST, "BATCH_SIZE": 4, "GRAD_ACCUMULATION": 1}
SINGLES = {**FAST, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 4}
DOWN_TO_1 = [
    ({"micro_batch": 4, "accumulation": 1}, {"micro_batch": 2, "accumulation": 2}),
    ({"micro_batch": 2, "accumulation": 2}, {"micro_batch": 1, "accumulation": 4}),
]


@contextmanager
def memory_for(sequences, since=1, rank=None):
    """Make passes of more than ``sequences`` run out of memory from iteration ``since`` on.

    On one ``rank`` alone, or on every one.
    """
    forward, at = GPT.forward, [0]

    def noted(session, *rest):
        at[0] = session.iteration + 1
        return optimizer_step(session, *rest)

    def limited(model, x_BT, *rest):
        here = rank is None or rank == int(os.environ.get("RANK", "0"))
        if model.training and here and at[0] >= since and x_BT.size(0) > sequences:
            # The failed pass has already used the generator.
            torch.rand(7)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return forward(model, x_BT, *rest)

    with (
        mock.patch("gpt2.model.GPT.forward", limited),
        mock.patch("gpt2.training.loop.optimizer_step", noted),
    ):
        yield


def fallbacks(trained):
    return trained.manifest()["oom_fallbacks"]


def without_evaluations(trained):
    """Return training rows, weights and the order of the data."""
    order = trained.summary()["final"]["data_order_digest"]
    return [trained.rows("train"), trained.files.weights.read_bytes(), order]


def test_the_micro_batch_is_halved_until_it_fits_and_nothing_else_changes(configure, train):
    """Falls back to one sequence in the first step: byte-identical to a run configured so."""
    with memory_for(1):
        fallen = train(configure(**WHOLE, MAX_ITERS=4), "fallen")
        # Fallbacks are left to training.
        warm = train(configure(**WHOLE, MAX_ITERS=4, WARMUP_ITERATIONS=2), "warm")
    assert fallen.status.state is State.SUCCESS
    records = fallbacks(fallen)
    assert [(r["from"], r["to"]) for r in records] == DOWN_TO_1
    assert {(r["iteration"], r["action"]) for r in records} == {(1, "micro-batch")}
    assert all(r["peak_bytes"] > 10**7 for r in records)
    shown = [line for line in fallen.lines().splitlines() if line.startswith("OOM")]
    assert len(shown) == 2 and "micro_batch=4 accumulation=1 -> micro_batch=2" in shown[0]
    assert "Tried to allocate 2.00 GiB" in shown[0] and "more" not in shown[0]
    assert "OOM out of memory in the warm-up" in warm.lines() and warm.core() == fallen.core()
    # Dropout is on: the generators were restored after the failed passes.
    small = train(configure(**SINGLES, MAX_ITERS=4), "small")
    assert fallbacks(small) == []
    assert without_evaluations(fallen) == without_evaluations(small)


@contextmanager
def limited_memory():
    """Limit the address space of this process, of which passes of several sequences need more."""
    forward = GPT.forward

    def large(model, x_BT, *rest):
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


@pytest.mark.slow
def test_in_the_middle_of_a_run_only_rounding_changes_also_if_it_is_killed_then(configure, train):
    """The resumed run has enough memory, but keeps the micro-batch of the checkpoint."""
    exact = {**WHOLE, "DROPOUT": "0.0", "PRUNING_MAGNITUDE": None, "PRUNING_FREQUENCY": None}
    exact |= {"MAX_ITERS": 6}
    config = configure(**exact, CHECKPOINT_INTERVAL=0, LOADER_WORKERS=1)

    if (child := os.fork()) == 0:
        # Called before and after each step: before the sixth one.
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with memory_for(1, since=4), at_call("gpt2.training.loop._due", 10, kill):
            train(config, "killed")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with memory_for(1, since=4):
        whole = train(config, "whole")
    resumed, plain = train(config, "killed"), train(configure(**exact), "plain")
    line = next(line for line in resumed.lines().splitlines() if "resumes at iteration 4" in line)
    assert "after 2 out-of-memory" in line and "BATCH_SIZE=1 GRAD_ACCUMULATION=4" in line
    assert without_evaluations(resumed) == without_evaluations(whole)
    for done in (resumed, whole):
        assert [(r["iteration"], r["to"]) for r in fallbacks(done)] == [
            (4, to) for _, to in DOWN_TO_1
        ]
    assert resumed.manifest()["batch"].items() >= DOWN_TO_1[1][1].items()
    found, wanted = whole.rows("train"), plain.rows("train")
    assert found[:3] == wanted[:3] and found != wanted
    # The same sequences in every step.
    for a, b in zip(found, wanted, strict=True):
        assert (a["iteration"], a["tokens"], a["lr"]) == (b["iteration"], b["tokens"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_after_the_last_fallback_the_run_fails_with_advice(configure, train):
    with memory_for(0):
        failed = train(configure(**WHOLE))
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    assert "with BATCH_SIZE=1, gradient checkpointing on" in failed.status.message
    # In this order, each as the command of a run that is another experiment.
    commands = [line for line in failed.lines().splitlines() if "as an arm of its own" in line]
    assert [line.partition("make SET=")[2] for line in commands] == [
        "BLOCK_SIZE=8",
        "'LORA=y PRUNING_NONE=y INIT_FROM=run:NAME'",
        "'LORA=y LORA_BASE_NF4=y PRUNING_NONE=y INIT_FROM=run:NAME'",
    ]
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
    with pytest.raises(RunError, match="BATCH_SIZE=1.* not available") as caught:
        apply_next_fallback(opened, "out of memory")
    assert caught.value.codes == ["run.out-of-memory"] and opened.oom_fallbacks == []


@pytest.mark.parametrize(
    ("beyond", "changes"),
    [
        # Under paper_repro, with what cannot be rolled back, and beside the steps.
        ("gpt2.model.GPT.forward", {"BATCH_SIZE": 4, "GRAD_ACCUMULATION": 1}),
        ("torch.nn.utils.clip_grads_with_norm_", WHOLE),
        ("gpt2.training.loop.record_results", WHOLE),
    ],
)
def test_memory_that_no_fallback_frees_fails_the_run_with_advice(configure, train, beyond, changes):
    def run_out():
        raise torch.OutOfMemoryError("out of memory")

    with at_call(beyond, 0, run_out):
        failed = train(configure(MAX_ITERS=2, **changes))
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    assert "Halve BATCH_SIZE and double GRAD_ACCUMULATION" in failed.status.message
    assert fallbacks(failed) == []
    assert train(configure(MAX_ITERS=2, **changes)).status.state is State.SUCCESS


def test_paper_repro_refuses_fallbacks(configure):
    with pytest.raises(ConfigError, match="OOM_FALLBACK"):
        configure(OOM_FALLBACK=True)


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


@pytest.mark.slow
def test_a_rank_that_runs_out_later_ends_the_run(configure, together):
    """A step cannot be rolled back during a collective operation."""
    with memory_for(1, since=5, rank=1):
        config = configure(**FAST, GPUS=2, BATCH_SIZE=2, GRAD_ACCUMULATION=1)
        _, (main, other) = together(config)
    assert "[run.lost-process]" in main
    assert "[run.out-of-memory]" in other and "Tried to allocate" in other
