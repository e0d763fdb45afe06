"""One run in several processes: forked, gloo on the CPU, file rendezvous."""

import os
import signal
from itertools import count
from unittest import mock

import pytest
import torch

# Imported by DistributedDataParallel: once here instead of in every forked process.
import torch._dynamo

from gpt2.data.sampler import order_digest_from_manifest
from gpt2.model import GPT
from gpt2.training.budget import TrainingClock
from gpt2.training.loop import optimizer_step
from tests.gpt2.training.conftest import BARE, BARE_ITERATIONS, SPLITS, losses, moved
from tests.json_rows import read_rows


@pytest.mark.slow
def test_1_2_and_4_processes_train_equally_and_continue_each_others_checkpoints(
    configure, together
):
    """Equal up to summation order: four micro-batches are added one by one, or in pairs."""
    trained, _ = together(configure(**BARE, **SPLITS[1]), "whole")
    expected = losses(trained, BARE_ITERATIONS)
    order = trained.summary()["final"]["data_order_digest"]
    assert order == order_digest_from_manifest(trained.manifest(), BARE_ITERATIONS)
    begun, _ = together(configure(**BARE, **SPLITS[2]), "begun", stop_at=4)
    for size, name in ((2, "begun"), (1, moved(begun, "one")), (4, moved(begun, "four"))):
        continued, ended = together(configure(**BARE, **SPLITS[size]), name)
        assert ended == [["SUCCESS", BARE_ITERATIONS, ""]] * size
        assert "resumes at iteration 4" in continued.files.logs.read_text()
        assert continued.summary()["final"]["data_order_digest"] == order
        found = losses(continued, BARE_ITERATIONS)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("what", ["data and vocabulary", "initial weights"])
def test_ranks_that_start_from_something_else_are_named(configure, train, ranks, what):
    initialize = GPT.init_weights

    def body(rank):
        def drifting(model, *seed):
            initialize(model, *seed)
            model.wte.weight.data[3, 2] += rank * 1e-6

        changes = {
            "initial weights": ("gpt2.model.GPT.init_weights", drifting),
            # An intact data set, as on the disk of another machine.
            "data and vocabulary": ("gpt2.data.dataset.PreparedDataset.digest", "xy"[rank]),
        }
        with mock.patch(*changes[what]):
            return train(configure(**SPLITS[2])).status.message

    for error in ranks(2, body):
        assert error.startswith("RunError: ")
        assert f"{what} of rank 1 differ from rank 0 [run.rank-mismatch]" in error


@pytest.mark.slow
def test_ranks_whose_clocks_differ_stop_at_the_same_step(configure, train, ranks):
    config = configure(
        **SPLITS[2], BUDGET_TIME=True, GPT2_MAX_TIME=20, MAX_ITERS=None, EVAL_INTERVAL=0
    )

    def body(rank):
        ticks = count()
        clock = TrainingClock(lambda: next(ticks) * (1.0, 0.3)[rank])
        with mock.patch("gpt2.training.loop.TrainingClock", lambda: clock):
            status = train(config).status
        return [status.state, status.iteration]

    first, second = ranks(2, body)
    assert first == second
    assert first[0] == "SUCCESS" and 1 < first[1] < 20
    rows = train.found("run").rows("train")
    assert rows[-1]["progress"] == 1.0 and len(rows) == first[1]


@pytest.mark.slow
def test_rank_0_decides_when_to_stop_and_a_killed_rank_ends_the_others(configure, train, ranks):
    """Dropout is on, so the stream of each rank must be restored."""
    config = configure(**SPLITS[2], MAX_ITERS=BARE_ITERATIONS)

    def stopped(rank):
        # Rank 1 alone would have stopped at once.
        status = train(config, "whole", stop_at=(5, 0)[rank]).status
        return [status.state, status.exit_code, status.iteration]

    def deadly(session, *rest):
        if session.group.rank == 1 and session.iteration == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimizer_step(session, *rest)

    def killed(rank):
        with mock.patch("gpt2.training.loop.optimizer_step", deadly):
            train(config)

    assert ranks(2, stopped) == [["INTERRUPTED", 130, 5]] * 2
    assert train.found("whole").files.checkpoint_steps == [4, 5]
    main, other = ranks(2, killed)
    assert "[run.lost-process]" in main and other == -signal.SIGKILL
    for name in ("whole", "run"):
        assert ranks(2, lambda rank: train(config, name).status.state) == ["SUCCESS"] * 2
    assert "resumes at iteration 4" in train.found("run").files.logs.read_text()
    assert train.found("run").core() == train.found("whole").core()


@pytest.mark.slow
def test_the_manifest_describes_every_rank_and_its_exchange(configure, together):
    """Sums of two ranks have a single order; by default the manifest has torch's bucket size."""
    changes = {**SPLITS[2], "MAX_ITERS": 2, "STATISTICS_INTERVAL": 1}
    plain, _ = together(configure(**changes))
    manifest = plain.manifest()
    assert (manifest["processes"]["world_size"], manifest["processes"]["backend"]) == (2, "gloo")
    first, second = manifest["init_weights_digest"]
    assert first == second and len(first) == 64
    assert manifest["knobs"]["world_size"]["observed"] == 2
    assert len(set(manifest["rng"]["streams"]["dropout"])) == 2
    for moment in ("rng_state_at_start", "rng_state_at_end"):
        assert [len(set(found)) for found in manifest[moment].values()] == [1, 1, 2]
    assert len(set(manifest["volatile"]["pids"])) == 2
    # Statistics are measured on rank 0 only.
    beats = [read_rows(plain.files.heartbeat(rank)) for rank in (0, 1)]
    assert [sum(b["msg"] == "statistics" for b in found) for found in beats] == [2, 0]
    safe, ended = together(configure(**changes, DDP_SAFE=True), "safe")
    assert ended == [["SUCCESS", 2, ""]] * 2
    assert safe.rows("train") == plain.rows("train")
    for trained, requested, mib in ((plain, False, 25), (safe, True, 2)):
        knobs = trained.manifest()["knobs"]
        size = {"requested": requested, "resolved": mib, "observed": mib}
        assert knobs["ddp_bucket_cap_mib"] == size
        assert knobs["ddp_gradients_copied"]["observed"] is True
        assert trained.manifest()["deviations"] == []
