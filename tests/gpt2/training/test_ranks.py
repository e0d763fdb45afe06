"""One run in several processes: forked, gloo on the CPU, file rendezvous."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from itertools import count, islice
from typing import Any
from unittest import mock

import pytest
import torch

# Imported by DistributedDataParallel: once here instead of in every forked process.
import torch._dynamo

from gpt2.config import Config
from gpt2.data.dataset import (
    MANIFEST,
    content_digest,
    dataset_folder,
    manifest_digest,
    read_manifest,
)
from gpt2.data.sampler import order_digest_from_manifest
from gpt2.model import GPT
from gpt2.training.budget import TrainingClock
from gpt2.training.loop import open_session, optimizer_step
from gpt2.training.records import RecordWriter
from gpt2.training.state import TrainingSession
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process
from lib.runs.run_dir import RunDir
from tests.gpt2.training.conftest import BARE, BARE_ITERATIONS, SPLITS, losses, moved
from tests.json_rows import read_rows

Configure = Callable[..., Config]


@pytest.fixture
def open_rank(configure, build_dir, tmp_path) -> Callable[..., TrainingSession]:
    """Open this rank's session of the base configuration with changed symbols."""

    def build(**changes: Any) -> TrainingSession:
        group = ProcessGroup.join(current_process())
        records = RecordWriter(RunDir(tmp_path), opened=False)
        return open_session(configure(**changes), build_dir, records, group=group)

    return build


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_order_of_the_data_is_that_of_one_process(open_rank, ranks, size):
    """Over more steps than are gathered at once."""
    changes = {**SPLITS[size], "LOADER_WORKERS": size % 2}

    def digest(rank: int) -> list[Any]:
        opened = open_rank(**changes)
        for _ in islice(opened.batches(), 70):
            opened.order.consumed()
        return [opened.order.state_dict(), opened.dataset.train.n_tokens]

    first, *others = ranks(size, digest)
    manifest = {
        "seeds": {"seed": 1},
        "batch": {"global_sequences": 4, "tokens_per_iteration": 4 * 16},
        "data": {"splits": {"train": {"tokens": first[1]}}},
    }
    assert first[0] == order_digest_from_manifest(manifest, 70)
    assert others == [first] * (size - 1)


@pytest.mark.slow
def test_an_evaluation_is_the_same_in_any_number_of_processes(open_rank, ranks):
    def documents(**changes: Any) -> list[Any]:
        opened = open_rank(**changes)
        found = opened.evaluate(opened.model)
        return [[d.document, d.n_tokens, d.n_correct, d.nll_sum] for d in found.documents]

    alone = json.loads(json.dumps(documents(**SPLITS[1])))
    assert len(alone) == 4
    for size in (2, 4):
        assert ranks(size, lambda rank: documents(**SPLITS[size])) == [alone] * size


def test_ranks_that_start_from_other_weights_are_named(open_rank, ranks):
    def body(rank: int) -> str:
        initialize = GPT.init_weights

        def drifting(model: GPT, seed: int, stream: int) -> None:
            initialize(model, seed, stream)
            if rank % 2:
                model.wte.weight.data[3, 2] += 1e-6

        with mock.patch("gpt2.model.GPT.init_weights", drifting):
            return open_rank(**SPLITS[4]).label

    for error in ranks(4, body):
        assert error.startswith("RunError: ") and "[run.rank-mismatch]" in error
        assert "rank 1, 3 " in error


def test_ranks_that_read_another_vocabulary_are_named(
    configure, open_rank, ranks, build_dir, tmp_path
):
    """Rank 1 finds an intact data set of another vocabulary, as on the disk of another machine."""
    folder = dataset_folder(configure(**SPLITS[2]).data, build_dir)
    elsewhere = shutil.copytree(folder, tmp_path / folder.name)
    manifest = read_manifest(folder)
    manifest["tokenizer"]["digest"] = "0" * 64
    manifest["digest"] = content_digest(manifest)
    manifest["seal"] = manifest_digest(manifest)
    (elsewhere / MANIFEST).write_text(json.dumps(manifest))

    def body(rank: int) -> str:
        found = (folder, elsewhere)[rank]
        with mock.patch("gpt2.data.dataset.dataset_folder", lambda *arguments: found):
            return open_rank(**SPLITS[2]).dataset.digest

    for error in ranks(2, body):
        assert "data and vocabulary of rank 1 differ from rank 0 [run.rank-mismatch]" in error


@pytest.mark.slow
def test_ranks_whose_clocks_differ_stop_at_the_same_step(configure, train, ranks):
    config = configure(
        **SPLITS[2], BUDGET_TIME=True, GPT2_MAX_TIME=20, MAX_ITERS=None, EVAL_INTERVAL=0
    )

    def body(rank: int) -> list[Any]:
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


def test_rank_0_decides_when_to_stop(configure, train, ranks):
    config = configure(**SPLITS[2])

    def body(rank: int) -> list[Any]:
        # Rank 1 alone would have stopped at once.
        status = train(config, stop_at=(5, 0)[rank]).status
        return [status.state, status.exit_code, status.iteration]

    assert ranks(2, body) == [["INTERRUPTED", 130, 5]] * 2
    assert (train.found("run").files.checkpoints / "step-00000005").is_dir()


@pytest.mark.slow
def test_a_run_with_a_killed_rank_resumes_to_the_same_bytes(configure, together):
    """Dropout is on, so the stream of each rank must be restored."""
    config = configure(**SPLITS[2], MAX_ITERS=BARE_ITERATIONS)
    whole, _ = together(config, "whole")

    def deadly(session: TrainingSession, *rest: Any) -> Any:
        if session.group.rank == 1 and session.iteration == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimizer_step(session, *rest)

    with mock.patch("gpt2.training.loop.optimizer_step", deadly):
        _, (main, other) = together(config, "killed")
    assert "[run.lost-process]" in main and other == -signal.SIGKILL
    resumed, ended = together(config, "killed")
    assert ended == [["SUCCESS", BARE_ITERATIONS, ""]] * 2
    assert "resumes at iteration 4" in resumed.files.logs.read_text()
    assert resumed.core() == whole.core()


def test_the_manifest_describes_every_rank(configure, together):
    trained, _ = together(configure(**SPLITS[2], MAX_ITERS=1, STATISTICS_INTERVAL=1))
    manifest = trained.manifest()
    processes = manifest["processes"]
    assert (processes["world_size"], processes["backend"]) == (2, "gloo")
    first, second = manifest["init_weights_digest"]
    assert first == second and len(first) == 64
    assert manifest["knobs"]["world_size"]["observed"] == 2
    assert len(set(manifest["rng"]["streams"]["dropout"])) == 2
    for moment in ("rng_state_at_start", "rng_state_at_end"):
        assert [len(set(found)) for found in manifest[moment].values()] == [1, 1, 2]
    assert len(set(manifest["volatile"]["pids"])) == 2
    # Statistics are measured on rank 0 only.
    beats = [read_rows(trained.files.heartbeat(rank)) for rank in (0, 1)]
    assert [sum(b["msg"] == "statistics" for b in found) for found in beats] == [1, 0]


@pytest.mark.slow
def test_a_safe_exchange_has_small_buckets_and_the_same_gradients(configure, together):
    """Sums of two ranks have a single order; by default the manifest has torch's bucket size."""
    plain, _ = together(configure(**SPLITS[2], MAX_ITERS=3))
    safe, ended = together(configure(**SPLITS[2], MAX_ITERS=3, DDP_SAFE=True), "safe")
    assert ended == [["SUCCESS", 3, ""]] * 2
    assert safe.rows("train") == plain.rows("train")
    for trained, requested, mib in ((plain, False, 25), (safe, True, 2)):
        knobs = trained.manifest()["knobs"]
        size = {"requested": requested, "resolved": mib, "observed": mib}
        assert knobs["ddp_bucket_cap_mib"] == size
        assert knobs["ddp_gradients_copied"]["observed"] is True
        assert trained.manifest()["deviations"] == []
