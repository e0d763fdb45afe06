"""Mechanism statistics of a run: no effect on results, visible to watchers."""

import time
from unittest import mock

import pytest
import torch

from gpt2.mechanism_statistics import collect_statistics
from gpt2.model import GPT
from gpt2.records.audit import audit
from gpt2.training.metrics import record_statistics
from lib.runs.run_dir import State
from lib.tracking.watch import raised_alarms, read_watched_records
from tests.gpt2.training.conftest import NSA
from tests.json_rows import read_rows

EVERYTHING = {
    "ATTENTION_PROJECTION_LATENT": True,
    "RECIPROCAL": True,
    "RA_CROSS_TOKEN": True,
    "MLP_ATTN_GATE": True,
    "MLP_CROSS_TOKEN": True,
    "MLP_LATENT": True,
}


def learned(done):
    """Return the results without the statistics."""
    return done.core() | {"metrics.jsonl": [done.rows("train"), done.rows("eval")]}


@pytest.mark.slow
@pytest.mark.parametrize("mechanisms", [EVERYTHING, NSA], ids=["everything", "nsa"])
def test_statistics_do_not_change_results(configure, train, mechanisms, build_dir):
    few = {**mechanisms, "MAX_ITERS": 3}
    without = configure(**few, STATISTICS_INTERVAL=0)
    told = configure(**few, STATISTICS_INTERVAL=1, STATISTICS_ROWS=3)
    assert without.hash8 == told.hash8
    plain, watched = train(without, "plain"), train(told, "told")
    assert learned(plain) == learned(watched)
    assert plain.rows("statistics") == []
    assert [row["iteration"] for row in watched.rows("statistics")] == [1, 2, 3]
    # The audit accepts the rows and their positions.
    assert audit(watched.files, build_dir).findings == []


def test_statistics_use_the_first_sequences_of_the_order_at_every_iteration(session):
    opened = session(STATISTICS_INTERVAL=1, STATISTICS_ROWS=3)
    opened.model.train()
    with mock.patch("gpt2.training.metrics.collect_statistics", wraps=collect_statistics) as noted:
        for opened.iteration in (1, 2):
            record_statistics(opened)
    assert opened.model.training
    opened.iteration = 0
    first = torch.cat([x_BT for x_BT, _ in next(opened.batches())])
    assert [torch.equal(call.args[1], first[:3]) for call in noted.call_args_list] == [True, True]


def test_training_continues_if_statistics_run_out_of_memory(configure, train, trained):
    trouble = torch.OutOfMemoryError("CUDA out of memory")
    with mock.patch("gpt2.training.metrics.collect_statistics", side_effect=trouble):
        done = train(configure(STATISTICS_INTERVAL=6))
    assert done.status.state is State.SUCCESS and learned(done) == learned(trained)
    shown = [line for line in done.lines().splitlines() if line.startswith("WARN")]
    assert len(shown) == 2 and "iteration 6: " in shown[0] and "STATISTICS_ROWS=" in shown[0]


@pytest.mark.slow
def test_collapsed_gates_reach_the_alarms(configure, train):
    config = configure(**NSA, LEARNING_RATE="1e-6", MIN_LEARNING_RATE="1e-7", MAX_ITERS=3)
    initialize = GPT.init_weights

    def collapsed(model, *seed):
        """Open only the window branch in all gates of the second block."""
        initialize(model, *seed)
        bias = model.h[1].attn.pattern.gates.bias.data.view(3, -1)
        bias[:2], bias[2] = -9.0, 9.0

    def alarms(done):
        """Return the alarms of make watch for the run's files."""
        records = read_watched_records(done.files, time.time())
        return raised_alarms(records, config.telemetry.stall_seconds)

    assert not alarms(train(config, "well")).keys() & {"gate-entropy", "gate-max", "fallbacks"}
    with mock.patch.object(GPT, "init_weights", collapsed):
        done = train(config, "collapsed")
    ill = alarms(done)
    assert ill["gate-entropy"].startswith("mean gate entropy 0.0")
    assert "1.000" in ill["gate-max"] and "0.9" in ill["gate-max"]
    (beat,) = (b for b in read_rows(done.files.heartbeat(0)) if b["msg"] == "statistics")
    # Over all layers, and of the worst layer for the alarms.
    assert beat["statistics"]["nsa/gate_collapsed"] == 0.5
    assert beat["gate_entropy"] < 0.01 < 0.5 < beat["statistics"]["nsa/gate_entropy"]
