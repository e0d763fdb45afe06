"""Runs whose weights are sharded over the processes (FSDP2), against DDP."""

from itertools import islice

import pytest
import torch

# Imported by DDP and FSDP: once here instead of in every forked process.
import torch._dynamo
import torch.distributed.fsdp
from torch.utils._pytree import tree_leaves

from gpt2.training.loop import open_session, optimizer_step
from gpt2.training.records import RecordWriter
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process
from lib.env.sharded import local
from lib.errors import ConfigError
from lib.runs.checkpoint import load_latest_checkpoint
from lib.runs.run_dir import RunDir
from tests.gpt2.training.conftest import BARE, BARE_ITERATIONS, SPARSE, SPLITS, losses, moved

FSDP = {"DATA_PARALLEL_FSDP": True}
_OTHER_OPTIMIZER = {"OPTIMIZER_ADAMWSPAM": None}
CASES = {
    "dropout and SPAM with spikes, clipping and resets": {
        "DROPOUT": "0.2",
        "SPAM_CLIP_DELAY": 1,
        "SPAM_SPIKE_WINDOW": 2,
        "SPAM_SPIKE_THRESHOLD": "0.1",
        "SPAM_INTERVAL": 2,
        "SPAM_WARMUP_STEPS": 1,
        "RECIPROCAL": True,
        "RECIPROCAL_LEARNABLE": True,
        "VALUE_RESIDUAL": True,
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_steps_are_those_of_ddp(configure, build_dir, ranks, size):
    def steps(group, **changes):
        """Train a few steps; return the facts of this rank."""
        config = configure(**BARE | SPLITS[size] | changes)
        records = RecordWriter(RunDir(build_dir), opened=False)
        session = open_session(config, build_dir, records, group=group)
        numbers = []
        for done, micro_batches in enumerate(islice(session.batches(), _STEPS), 1):
            measured = optimizer_step(session, micro_batches, 1e-3)
            numbers += [measured.loss.item(), measured.gradient_norm.item()]
            session.pruner.after_step(done, done / _STEPS, session.optimizer)
        numbers.append(session.evaluate(session.whole_model()).loss)
        elements = sum(local(p).numel() for p in session.weights().values())
        sparsity, events = session.pruner.sparsity_by_layer(), session.optimizer.statistics()
        return [numbers, events, sparsity, elements]

    def body(rank):
        group = ProcessGroup.join(current_process())
        return {
            name: [steps(group, **changes), steps(group, **changes, **FSDP)]
            for name, changes in CASES.items()
        }

    first, *others = ranks(size, body)
    assert isinstance(first, dict), first
    for name, (ddp, fsdp) in first.items():
        tolerance = _TOLERANCES.get(name, 2e-6)
        assert fsdp[0] == pytest.approx(ddp[0], rel=tolerance), name
        assert fsdp[1] == pytest.approx(ddp[1], rel=tolerance), name
        assert fsdp[2] == pytest.approx(ddp[2], abs=0.01), name
        # Every rank stores the same number of rows, or one row less.
        assert fsdp[3] < 1.05 * ddp[3] / size + 100, name
        assert all(other[name][1][:3] == fsdp[:3] for other in others), name


@pytest.mark.slow
def test_checkpoints_are_those_of_ddp_and_resume_on_other_numbers_of_processes(configure, together):
    def start(size, name, **rest):
        return together(
            configure(**BARE, **SPLITS[size], **FSDP if name != "ddp" and size > 1 else {}),
            name,
            **rest,
        )

    def saved(trained):
        checkpoint = load_latest_checkpoint(trained.files.checkpoints, pytest.fail)
        session = checkpoint.state["session"]
        leaves = tree_leaves([session[part] for part in ("optimizer", "pruner")])
        return checkpoint.weights, list(filter(torch.is_tensor, leaves))

    whole, _ = start(1, "whole")
    ddp, _ = start(2, "ddp", stop_at=2)
    fsdp, _ = start(2, "fsdp", stop_at=2)
    (weights, states), (its_weights, its_states) = saved(fsdp), saved(ddp)
    torch.testing.assert_close(weights, its_weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, its_states, rtol=1e-3, atol=1e-4)
    # From FSDP to one process, and from DDP to FSDP in four.
    for size, begun in ((1, fsdp), (4, ddp)):
        trained, ended = start(size, moved(begun, f"in-{size}"))
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
