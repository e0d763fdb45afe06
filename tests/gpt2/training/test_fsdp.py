"""Runs whose weights are sharded over the processes (FSDP2), against DDP."""

import os
import shutil
import signal
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

# Imported by DDP and FSDP: once here instead of in every forked process.
import torch._dynamo
import torch.distributed.fsdp
from torch.utils._pytree import tree_leaves

from gpt2.config import Config
from gpt2.model import GPT
from gpt2.training.loop import open_session, optimizer_step
from gpt2.training.records import RecordWriter
from gpt2.training.state import TrainingSession
from lib.config.field import SymbolValue
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process
from lib.env.sharded import local
from lib.errors import ConfigError
from lib.runs.checkpoint import Checkpoint, load_latest_checkpoint
from lib.runs.run_dir import RunDir, State, read_status
from tests.gpt2.training.conftest import SPARSE, SPLITS, Trained, losses

Changes = dict[str, SymbolValue | None]
FSDP: Changes = {"DATA_PARALLEL_FSDP": True}
_OTHER_OPTIMIZER: Changes = {"OPTIMIZER_ADAMWSPAM": None}
# The same kind of model and run in each; six iterations of four sequences.
ITERATIONS = 6
BARE: Changes = {"DROPOUT": "0.0", "EVAL_INTERVAL": 0, "CHECKPOINT_INTERVAL": 0}
BARE |= {"MAX_ITERS": ITERATIONS}
CASES: dict[str, Changes] = {
    "dropout and SPAM with spikes, clipping and resets": {
        "DROPOUT": "0.2",
        "SPAM_CLIP_DELAY": 1,
        "SPAM_SPIKE_WINDOW": 2,
        "SPAM_SPIKE_THRESHOLD": "0.1",
        "SPAM_INTERVAL": 4,
        "SPAM_WARMUP_STEPS": 1,
        "RECIPROCAL": True,
        "RECIPROCAL_LEARNABLE": True,
        "POSITIONS_ROPE": True,
    },
    "native sparse attention, SGD": {**SPARSE, **_OTHER_OPTIMIZER, "OPTIMIZER_SGD": True},
    "latent attention, AMSGrad, movement by layer": {
        "ATTENTION_PROJECTION_LATENT": True,
        "MLP_LATENT": True,
        **_OTHER_OPTIMIZER,
        "OPTIMIZER_ADAM": True,
        "ADAM_AMSGRAD": True,
        "PRUNING_MAGNITUDE": None,
        "PRUNING_MOVEMENT": True,
        "PRUNING_SCOPE_LAYER": True,
    },
    "mechanisms, checkpointing, state pruning": {
        "RA_CROSS_TOKEN": True,
        "MLP_CROSS_TOKEN": True,
        "MLP_ATTN_GATE": True,
        "GRAD_CHECKPOINTING": True,
        **_OTHER_OPTIMIZER,
        "OPTIMIZER_ADAMWPRUNE": True,
        "PRUNING_MAGNITUDE": None,
        "PRUNING_INCLUDE_EMBEDDINGS": True,
    },
    # The casts of a micro-batch must not be used for the next one.
    "bf16": {"RUN_PROFILE_MAXOUT_SPEED": True, "OOM_FALLBACK": False, "PRECISION_BF16": True},
}
# SPAM resets in the last one.
_STEPS = 5
# A loss in bf16 has eight bits of mantissa, and pruning amplifies differences.
_TOLERANCES = {"bf16": 1e-3}


def steps(
    config: Config, build_dir: Path, group: ProcessGroup, rate: float = 1e-3
) -> dict[str, Any]:
    """Train a few steps; return the facts of this rank."""
    session = open_session(
        config, build_dir, RecordWriter(RunDir(build_dir), opened=False), group=group
    )
    losses = []
    for done, micro_batches in enumerate(islice(session.batches(), _STEPS), 1):
        measured = optimizer_step(session, micro_batches, rate)
        losses.append([measured.loss.item(), measured.gradient_norm.item()])
        session.pruner.after_step(done, done / _STEPS, session.optimizer)
    return {
        "losses": losses,
        "validation": session.evaluate(session.whole_model()).loss,
        "sparsity": session.pruner.sparsity_by_layer(),
        "statistics": session.optimizer.statistics(),
        "elements": sum(local(p).numel() for p in session.weights().values()),
    }


def require_equal(by_rank: list[Any], tolerances: dict[str, float]) -> None:
    """Compare the facts of DDP and FSDP of each case, on all ranks."""
    first, *others = by_rank
    assert isinstance(first, dict), first
    for name, (ddp, fsdp) in first.items():
        tolerance = tolerances.get(name, 2e-6)
        assert fsdp["losses"] == [pytest.approx(row, rel=tolerance) for row in ddp["losses"]], name
        assert fsdp["validation"] == pytest.approx(ddp["validation"], rel=tolerance), name
        assert fsdp["sparsity"] == pytest.approx(ddp["sparsity"], abs=0.01), name
        assert fsdp["statistics"] == pytest.approx(ddp["statistics"], rel=tolerance), name
        # Every rank stores the same number of rows, or one row less.
        assert fsdp["elements"] < 1.05 * ddp["elements"] / len(by_rank) + 100, name
        for other in others:
            assert other[name][1] | {"elements": 0} == fsdp | {"elements": 0}, name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_steps_are_those_of_ddp(configure, build_dir, ranks, size):
    def body(rank: int) -> dict[str, Any]:
        group = ProcessGroup.join(current_process())
        return {
            name: [
                steps(configure(**BARE | SPLITS[size] | changes | mode), build_dir, group)
                for mode in ({}, FSDP)
            ]
            for name, changes in CASES.items()
        }

    require_equal(ranks(size, body), _TOLERANCES)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(configure, together):
    """With dropout, evaluations, statistics, pruning and a sample."""
    config = configure(**SPLITS[2], **FSDP, STATISTICS_INTERVAL=3, MAX_ITERS=6)
    whole, ended = together(config, "whole")
    assert ended == [["SUCCESS", 6, ""]] * 2
    assert whole.manifest()["knobs"]["data_parallel"]["observed"] == "fsdp"
    assert whole.manifest()["deviations"] == []

    def deadly(session: TrainingSession, *rest: Any) -> Any:
        if session.group.rank == 1 and session.iteration == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimizer_step(session, *rest)

    with mock.patch("gpt2.training.loop.optimizer_step", deadly):
        _, (main, other) = together(config, "killed")
    assert "[run.lost-process]" in main and other == -signal.SIGKILL
    resumed, ended = together(config, "killed")
    assert ended == [["SUCCESS", 6, ""]] * 2
    assert resumed.core() == whole.core()


def moved(begun: Trained, name: str) -> str:
    """Copy the checkpoints of a run for another division; return the name of the new run."""
    path = begun.files.path.with_name(name)
    shutil.copytree(begun.files.checkpoints, path / "checkpoints")
    for file in (begun.files.metrics, begun.files.timing):
        shutil.copy(file, path)
    return name


@pytest.mark.slow
def test_checkpoints_are_those_of_ddp_and_resume_on_other_numbers_of_processes(configure, together):
    def split(size: int, fsdp: bool) -> Config:
        return configure(**BARE, **SPLITS[size], **FSDP if fsdp else {})

    def saved(trained: Trained) -> Checkpoint:
        checkpoint = load_latest_checkpoint(trained.files.checkpoints, pytest.fail)
        assert checkpoint
        return checkpoint

    whole, _ = together(split(1, False), "whole")
    ddp, _ = together(split(2, False), "ddp", stop_at=2)
    fsdp, _ = together(split(2, True), "fsdp", stop_at=2)
    torch.testing.assert_close(saved(fsdp).weights, saved(ddp).weights, rtol=1e-4, atol=1e-5)
    states = [saved(trained).state["session"] for trained in (fsdp, ddp)]
    for part in ("optimizer", "pruner"):
        tensors = [list(filter(torch.is_tensor, tree_leaves(state[part]))) for state in states]
        torch.testing.assert_close(*tensors, rtol=1e-3, atol=1e-4)
    # 2 -> 4 -> 1 processes, the last one without FSDP.
    four, _ = together(split(4, True), moved(fsdp, "four"), stop_at=4)
    one, ended = together(split(1, False), moved(four, "one"))
    assert ended == [["SUCCESS", ITERATIONS, ""]]
    # From DDP to FSDP.
    sharded, ended = together(split(2, True), moved(ddp, "sharded"))
    assert ended == [["SUCCESS", ITERATIONS, ""]] * 2
    for trained in (one, sharded):
        tables = [losses(run, ITERATIONS) for run in (trained, whole)]
        torch.testing.assert_close(*tables, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_a_non_finite_loss_on_one_rank_is_located(configure, train, ranks):
    config = configure(**SPLITS[2], **FSDP, CHECK_NUMERICS=True)

    def body(rank: int) -> str:
        calls, forward = count(), GPT.forward

        def spoiled(*arguments: Any) -> torch.Tensor:
            bad = rank == 1 and next(calls) >= 3
            return forward(*arguments) * (float("nan") if bad else 1.0)

        with mock.patch("gpt2.model.GPT.forward", spoiled):
            return train(config).status.message

    main, other = ranks(2, body)
    assert main.startswith("loss is NaN (rank 1) at it 2")
    assert other == f"RunError: {main} [numerics.non-finite]"
    assert read_status(train.found("run").files).state is State.FAILED


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"GPUS": 1, "GRAD_ACCUMULATION": 4}, "config.conflict"),
        ({"RUN_PROFILE_MAXOUT_SPEED": True, "OOM_FALLBACK": True}, "config.unmet-dependency"),
        ({"DDP_SAFE": True}, "config.unmet-dependency"),
        ({"COMPILE": True}, "config.conflict"),
        ({"DEVICE_CPU": None, "PRECISION_FP16": True}, "config.conflict"),
    ],
)
def test_settings_that_sharding_does_not_support_are_refused(configure, changes, code):
    with pytest.raises(ConfigError) as refusal:
        configure(**SPLITS[2] | FSDP | changes)
    assert code in refusal.value.codes
