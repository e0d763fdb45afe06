"""Mechanism statistics of a run: no effect on results, visible to watchers."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.mechanism_statistics import collect_statistics
from gpt2.model import GPT
from gpt2.records.audit import audit
from gpt2.training.metrics import record_statistics
from lib.runs.run_dir import State
from lib.tracking.watch import raised_alarms, read_watched_records
from tests.json_rows import read_rows

NONE = {"STATISTICS_INTERVAL": 0}
ALWAYS = {"STATISTICS_INTERVAL": 1, "STATISTICS_ROWS": 3}
EVERYTHING = {
    "ATTENTION_PROJECTION_LATENT": True,
    "RECIPROCAL": True,
    "RA_CROSS_TOKEN": True,
    "MLP_ATTN_GATE": True,
    "MLP_CROSS_TOKEN": True,
    "MLP_LATENT": True,
}
NSA = {
    "ATTENTION_PROJECTION_GROUPED": True,
    "N_KV_HEAD": 1,
    "ATTENTION_PATTERN_NSA": True,
    "NSA_COMPRESS_BLOCK": 4,
    "NSA_COMPRESS_STRIDE": 2,
    "NSA_SELECT_BLOCK": 4,
    "NSA_SELECT_COUNT": 3,
    "NSA_WINDOW": 4,
    "DROPOUT": "0.0",
}


def learned(done: Any) -> list[Any]:
    """Return the results of training and evaluation."""
    summary = done.summary()
    summary.pop("timing")
    files = (done.files.weights, done.files.per_query, done.files.sample)
    rows = [done.rows("train"), done.rows("eval"), summary]
    return rows + [file.read_bytes() for file in files]


@pytest.mark.parametrize("mechanisms", [EVERYTHING, NSA], ids=["everything", "nsa"])
@pytest.mark.slow
def test_statistics_do_not_change_results(configure, train, mechanisms, build_dir):
    few = {**mechanisms, "MAX_ITERS": 6}
    without, told = configure(**few, **NONE), configure(**few, **ALWAYS)
    assert without.hash8 == told.hash8
    plain, watched = train(without, "plain"), train(told, "told")
    assert learned(plain) == learned(watched)
    assert plain.rows("statistics") == []
    assert [row["iteration"] for row in watched.rows("statistics")] == [*range(1, 7)]
    # The audit accepts the rows and their positions.
    assert audit(watched.files, build_dir).findings == []


def test_statistics_are_measured_at_the_interval_and_at_the_end(configure, train):
    done = train(configure(STATISTICS_INTERVAL=5))
    rows = done.rows("statistics")
    assert [(row["iteration"], row["tokens"]) for row in rows] == [(5, 320), (10, 640), (12, 768)]
    kinds = [row["kind"] for row in read_rows(done.files.metrics)]
    assert kinds[4:7] == ["train", "statistics", "eval"]
    assert kinds[-3:] == ["train", "statistics", "eval"]


def test_statistics_use_the_same_text_at_every_iteration(session):
    seen: list[Tensor] = []

    def note(model: GPT, idx_BT: Tensor) -> Any:
        seen.append(idx_BT)
        return collect_statistics(model, idx_BT)

    opened = session(**ALWAYS)
    opened.model.train()
    with mock.patch("gpt2.training.metrics.collect_statistics", note):
        for opened.iteration in (1, 2):
            record_statistics(opened)
    assert opened.model.training
    assert torch.equal(seen[0], seen[1])
    # The first sequences of the order.
    opened.iteration = 0
    first = torch.cat([x_BT for x_BT, _ in next(opened.batches())])
    assert torch.equal(seen[0], first[:3])


@pytest.mark.slow
def test_statistics_of_an_interrupted_run_are_the_same(configure, train):
    config = configure(STATISTICS_INTERVAL=2)
    whole = train(config, "whole").core()
    # Between two statistics, and at one, with an evaluation.
    for iteration in (3, 10):
        train(config, "resumed", stop_at=iteration)
    assert train(config, "resumed").core() == whole


def test_training_continues_if_statistics_run_out_of_memory(configure, train):
    plain = train(configure(**NONE), "plain")
    trouble = torch.OutOfMemoryError("CUDA out of memory")
    with mock.patch("gpt2.training.metrics.collect_statistics", side_effect=trouble):
        done = train(configure(STATISTICS_INTERVAL=6))
    assert done.status.state is State.SUCCESS and learned(done) == learned(plain)
    shown = [line for line in done.lines().splitlines() if line.startswith("WARN")]
    assert len(shown) == 2 and "iteration 6: " in shown[0] and "STATISTICS_ROWS=" in shown[0]


@pytest.mark.slow
def test_statistics_are_measured_on_rank_0_only(configure, train, ranks):
    split = {"GPUS": 2, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 2, "MAX_ITERS": 4}

    def left(changes: dict[str, Any], name: str) -> Any:
        config = configure(**split, **changes)
        assert ranks(2, lambda rank: train(config, name).status.state) == ["SUCCESS"] * 2
        return train.found(name)

    plain, told = left(NONE, "plain"), left(ALWAYS, "told")
    assert learned(plain) == learned(told)
    assert [row["iteration"] for row in told.rows("statistics")] == [1, 2, 3, 4]
    beats = [[*read_rows(told.files.heartbeat(rank))] for rank in (0, 1)]
    assert [sum(b["msg"] == "statistics" for b in found) for found in beats] == [4, 0]


def collapsed(model: GPT, *seed: int, initial: Callable = GPT.init_weights) -> None:
    """Open only the window branch in all gates of the second block."""
    initial(model, *seed)
    bias = model.h[1].attn.pattern.gates.bias.data.view(3, -1)
    bias[:2], bias[2] = -9.0, 9.0


def watched(done: Any, config: Config) -> dict[str, str]:
    """Return the alarms of make watch for the run's files."""
    return raised_alarms(
        read_watched_records(done.files, time.time()), config.telemetry.stall_seconds
    )


@pytest.mark.slow
def test_collapsed_gates_reach_the_alarms(configure, train):
    config = configure(**NSA, LEARNING_RATE="1e-6", MIN_LEARNING_RATE="1e-7", MAX_ITERS=3)
    well = watched(train(config, "well"), config)
    assert not well.keys() & {"gate-entropy", "gate-max", "fallbacks"}
    with mock.patch.object(GPT, "init_weights", collapsed):
        done = train(config, "collapsed")
    ill = watched(done, config)
    assert ill["gate-entropy"].startswith("mean gate entropy 0.0")
    assert "1.000" in ill["gate-max"] and "0.9" in ill["gate-max"]
    (beat,) = (b for b in read_rows(done.files.heartbeat(0)) if b["msg"] == "statistics")
    # Over all layers, and of the worst layer for the alarms.
    assert beat["statistics"]["nsa/gate_collapsed"] == 0.5
    assert beat["gate_entropy"] < 0.01 < 0.5 < beat["statistics"]["nsa/gate_entropy"]


HEARTBEAT = [
    "ts",
    "iso",
    "pid",
    "rank",
    "step",
    "msg",
    "loss",
    "lr",
    "toks_per_s",
    "mfu",
    "dt_fetch_s",
    "mem_alloc_mib",
    "mem_reserved_mib",
    "grad_norm",
    "eta_s",
    "fallbacks",
]


def test_heartbeats_have_every_published_field(configure, train):
    done = train(configure(PEAK_TFLOPS="1"))
    beats = [*read_rows(done.files.heartbeat(0))]
    trained = [beat for beat in beats if beat["msg"] == "train"]
    assert len(trained) == 4
    for beat in trained:
        assert beat.keys() == set(HEARTBEAT)
        assert None not in beat.values()
        # MiB: a process with torch has a few hundred, which excludes GiB and bytes.
        assert 50 < beat["mem_alloc_mib"] < 50_000
    assert [beat["msg"] for beat in beats if beat["step"] == 12][-2:] == ["statistics", "eval"]
