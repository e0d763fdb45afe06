"""Runs whose weights are sharded over the processes (FSDP2), against DDP."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

# Imported by DDP and FSDP: once here instead of in every forked process.
import torch._dynamo
import torch.distributed.fsdp
from torch.utils._pytree import tree_leaves

from gpt2.config import Config
from gpt2.training.loop import open_session, optimizer_step
from gpt2.training.records import RecordWriter
from lib.config.field import SymbolValue
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process
from lib.env.sharded import local
from lib.errors import ConfigError
from lib.runs.checkpoint import Checkpoint, load_latest_checkpoint
from lib.runs.run_dir import RunDir
from tests.gpt2.training.conftest import (
    BARE,
    BARE_ITERATIONS,
    SPARSE,
    SPLITS,
    Trained,
    losses,
    moved,
)

Changes = dict[str, SymbolValue | None]
FSDP: Changes = {"DATA_PARALLEL_FSDP": True}
_OTHER_OPTIMIZER: Changes = {"OPTIMIZER_ADAMWSPAM": None}
CASES: dict[str, Changes] = {
    "dropout and SPAM with spikes, clipping and resets": {
        "DROPOUT": "0.2",
        "SPAM_CLIP_DELAY": 1,
        "SPAM_SPIKE_WINDOW": 2,
        "SPAM_SPIKE_THRESHOLD": "0.1",
        "SPAM_INTERVAL": 2,
        "SPAM_WARMUP_STEPS": 1,
        "RECIPROCAL": True,
        "RECIPROCAL_LEARNABLE": True,
        "POSITIONS_ROPE": True,
        "UNTIED_HEAD": True,
    },
    "native sparse attention, SGD": {**SPARSE, **_OTHER_OPTIMIZER, "OPTIMIZER_SGD": True},
    "Muon, stacked rows of several ranks": {
        **_OTHER_OPTIMIZER,
        "OPTIMIZER_MUON": True,
        "MUON_LEARNING_RATE": "1e-3",
        "ATTENTION_PROJECTION_GROUPED": True,
        "N_KV_HEAD": 1,
    },
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
_STEPS = 3
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
    # From FSDP to one process, and from DDP to FSDP in four.
    for size, begun in ((1, fsdp), (4, ddp)):
        trained, ended = together(split(size, size > 1), moved(begun, f"in-{size}"))
        assert ended == [["SUCCESS", BARE_ITERATIONS, ""]] * size
        tables = [losses(run, BARE_ITERATIONS) for run in (trained, whole)]
        torch.testing.assert_close(*tables, rtol=2e-6, atol=2e-6)
        # Measured on the whole model.
        assert [row["iteration"] for row in trained.rows("statistics")] == [BARE_ITERATIONS]
    manifest = trained.manifest()
    assert manifest["knobs"]["data_parallel"]["observed"] == "fsdp"
    assert manifest["deviations"] == []


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
