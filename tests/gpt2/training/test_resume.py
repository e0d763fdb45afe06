"""Interrupted, killed or damaged runs end with the bytes of an uninterrupted run, or are refused."""

import multiprocessing
import os
import re
import shutil
import signal
import time
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch

# Imported by DistributedDataParallel: once here instead of in every forked process.
import torch._dynamo

from gpt2.data.prepare import prepare_dataset
from gpt2.running.backend import train_in_worker
from lib.errors import RunError
from lib.runner.worker import ParentConnection, train_worker
from lib.runs import checkpoint
from lib.runs.lease import Lease, LeaseLost, read_lease
from lib.runs.run_dir import State
from tests.gpt2.training.conftest import SPLITS, at_call, moved

DISK_FULL = OSError(28, "No space left on device")
# Statistics, an evaluation and a checkpoint after two steps and after four; statistics, the last
# checkpoint and the final evaluation after five. An evaluation has two batches of one window.
SHORT = {
    "MAX_ITERS": 5,
    "EVAL_TOKENS": 32,
    "EVAL_INTERVAL": 2,
    "CHECKPOINT_INTERVAL": 2,
    "STATISTICS_INTERVAL": 2,
}
LOOP = "gpt2.training.loop."
# Fault, function at whose call it happens, number of calls before, ranks, iteration from which the
# next process goes on; None if the run is finished.
MOMENTS = {
    "killed between steps": ("KILL", LOOP + "optimizer_step", 3, 1, 2),
    "killed before a checkpoint is renamed": ("KILL", "os.rename", 1, 1, 2),
    "killed while an old one is deleted": ("KILL", "shutil.rmtree", 0, 1, 5),
    "killed between the final files": ("KILL", "gpt2.training.records.write_atomic", 1, 1, 5),
    "killed before the manifest is done": ("KILL", LOOP + "finalize_run", 0, 1, 5),
    "killed before SUCCESS": ("KILL", "lib.runs.manifest.write_status", 0, 1, 5),
    "the driver fails": ("FAIL", LOOP + "optimizer_step", 3, 1, 2),
    "stopped while it starts": ("TERM", LOOP + "warm_up", 0, 1, 0),
    "stopped in the first step": ("TERM", LOOP + "optimizer_step", 0, 2, 1),
    "stopped in statistics": ("TERM", LOOP + "record_statistics", 0, 1, 2),
    "stopped in an evaluation": ("TERM", "gpt2.model.GPT.token_losses", 0, 1, 2),
    "stopped in a checkpoint": ("TERM", LOOP + "save_checkpoint", 0, 1, 3),
    "stopped in the final checkpoint": ("TERM", LOOP + "save_checkpoint", 2, 2, 5),
    # Nothing is left to train.
    "stopped in the results": ("TERM", LOOP + "write_results", 0, 1, None),
    "stopped at the final status": ("TERM", LOOP + "finalize_run", 0, 2, None),
}


@pytest.fixture(scope="module")
def whole():
    """Results of uninterrupted runs by the number of ranks, trained by the first test of each."""
    return {}


@pytest.fixture
def expected(configure, together, whole):
    """Return a function that returns the results of the short run on so many ranks."""

    def trained(size):
        if size not in whole:
            uninterrupted, _ = together(configure(**SHORT, **SPLITS[size]), "whole")
            for kind in ("eval", "statistics"):
                assert [row["iteration"] for row in uninterrupted.rows(kind)] == [2, 4, 5]
            whole[size] = uninterrupted.core()
        return whole[size]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_fault_at_any_call_loses_nothing(configure, train, ranks, together, expected, moment):
    """SIGTERM reaches every worker, as a batch system sends it; an error is that of a GPU's driver."""
    fault, target, calls, size, iteration = MOMENTS[moment]
    config = configure(**SHORT, **SPLITS[size])
    run = train.prepare(config, "run")
    assert Lease.take(run, 60, None)
    function = partial(train_in_worker, build_dir=train.build_dir, allow_stale=False, order={})

    def act():
        if fault == "FAIL":
            raise RuntimeError("CUDA error: unspecified launch failure")
        os.kill(os.getpid(), signal.Signals[f"SIG{fault}"])

    def body(rank):
        _ours, theirs = multiprocessing.Pipe()
        with at_call(target, calls, act):
            train_worker(function, run.path, 1, ParentConnection(theirs))

    assert ranks(size, body) == [-signal.SIGKILL if fault == "KILL" else None] * size
    ended = train.found("run")
    left = {"KILL": State.RUNNING, "TERM": State.INTERRUPTED, "FAIL": State.FAILED}[fault]
    assert ended.status.state is (State.SUCCESS if iteration is None else left)
    assert ("RuntimeError: CUDA error: " in ended.status.message) is (fault == "FAIL")
    if iteration is not None:
        ended, _ = together(config, "run")
        words = f"resumes at iteration {iteration}"
        assert (words in ended.files.logs.read_text()) is (iteration > 0)
    assert ended.core() == expected(size)


@pytest.mark.slow
def test_a_run_that_is_stopped_again_and_again_loses_nothing(
    configure, train, expected, monkeypatch
):
    """Between steps and before any batch of an evaluation, while the clock is set back by days."""
    clock, days = time.time, count()
    monkeypatch.setattr("time.time", lambda: clock() - 86400 * next(days))
    config = configure(**SHORT, **SPLITS[1])
    # As ``make stop`` requests it, before the worker has loaded torch.
    request = train.prepare(config, "run").stop_request
    request.touch()
    assert (train(config).status.iteration, request.unlink()) == (0, None)
    for poll, iteration in ((4, 2), (4, 3), (4, 4), (4, 5), (3, 5)):
        polls = count(1)
        stopped = train(config, stop=lambda: next(polls) == poll).status
        assert (stopped.state, stopped.iteration) == (State.INTERRUPTED, iteration)
    assert train(config).core() == expected(1)


@pytest.mark.parametrize(
    ("target", "calls"),
    [(LOOP + "optimizer_step", 6), ("lib.runs.checkpoint._write", 1), (LOOP + "write_results", 0)],
)
def test_a_run_taken_over_is_not_written_any_more(configure, train, uninterrupted, target, calls):
    run = train.prepare(configure(), "run")
    lease, left = Lease.take(run, 60, None), {}

    def files():
        paths = (path for path in run.path.rglob("*") if path.is_file())
        # A checkpoint takes effect once it is renamed.
        return {path: path.read_bytes() for path in paths if "/.tmp-" not in str(path)}

    def take_over():
        Lease.take(run, 60, read_lease(run))
        left.update(files())

    with at_call(target, calls, take_over), pytest.raises(LeaseLost):
        train(configure(), guard=lease.require)
    assert files() == left
    assert train(configure()).core() == uninterrupted


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_a_digit_of_the_last_row(path):
    rest, last, _ = path.read_bytes().rsplit(b"\n", 2)
    changed = re.sub(rb"\d(?=\D*\Z)", lambda digit: b"%d" % (int(digit[0]) % 9 + 1), last)
    path.write_bytes(b"\n".join([rest, changed, b""]))


def remove_the_last_row(path):
    path.write_bytes(path.read_bytes().rsplit(b"\n", 2)[0] + b"\n")


def tear(path):
    with open(path, "a") as stream:
        stream.write('{"kind":"train","iter')


@pytest.mark.parametrize(
    ("stop_at", "name", "damage", "iteration"),
    [
        (9, "checkpoints/step-00000009/model.safetensors", flip_a_bit, 8),
        # The records fit the checkpoint before.
        (9, "metrics.jsonl", change_a_digit_of_the_last_row, 8),
        (9, "timing.jsonl", remove_the_last_row, 8),
        (9, "metrics.jsonl", tear, 9),
        (9, "timing.jsonl", tear, 9),
        # Starts over.
        (2, "checkpoints/step-00000002/state.pt", flip_a_bit, 0),
    ],
)
def test_damage_costs_a_checkpoint_at_most(
    configure, train, stopped_at, uninterrupted, stop_at, name, damage, iteration
):
    path = stopped_at(stop_at).files.path / name
    damage(path)
    resumed = train(configure())
    words = rf"WARN checkpoint step-0000000{stop_at} is damaged .*{path.name}"
    assert bool(re.search(words, resumed.lines())) is (iteration != stop_at)
    assert (f"resumes at iteration {iteration}" in resumed.lines()) is (iteration > 0)
    firsts = {e["first_progress"] for e in resumed.events if e["kind"] == "progress"}
    assert firsts == {iteration / 12}
    assert resumed.core() == uninterrupted
    assert '"iter{' not in resumed.files.timing.read_text()


def test_a_checkpoint_of_other_code_is_rejected(configure, train):
    sources = {"gpt2/model.py": "0" * 64, "lib/absent.py": "1" * 64}
    with (
        mock.patch(LOOP + "loaded_source", lambda: sources),
        mock.patch("torch.__version__", "1.0"),
        mock.patch(LOOP + "device_name", lambda device: "abacus"),
    ):
        stopped = train(configure(), stop_at=2)
    before = stopped.files.metrics.read_bytes()
    with pytest.raises(RunError) as refusal:
        train(configure())
    assert refusal.value.codes == ["checkpoint.other-code"]
    named = ("gpt2/model.py, lib/absent.py", "torch (was 1.0", "abacus", "make rerun RUNS=run")
    assert [words for words in named if words not in str(refusal.value)] == []
    assert stopped.files.metrics.read_bytes() == before
    resumed = train(configure(), allow_stale=True)
    assert resumed.status.state is State.SUCCESS
    assert "WARN the checkpoint of step 2 " in resumed.lines()


def test_another_configuration_is_rejected_by_name(configure, train, stopped_at):
    name = moved(stopped_at(5), "elsewhere")
    before = train.found(name).files.metrics.read_bytes()
    with pytest.raises(RunError) as refusal:
        train(configure(N_EMBD=24, LEARNING_RATE="2e-2", SEED=7), name, allow_stale=True)
    assert refusal.value.codes == ["checkpoint.mismatch"]
    words = "step 5 belongs to another run: config.model.shape.n_embd (was 16, is 24), "
    words += "config.schedule.learning_rate (was 0.01, is 0.02), config.seed (was 1, is 7)"
    assert words in str(refusal.value) and "make rerun RUNS=elsewhere" in str(refusal.value)
    assert train.found(name).files.metrics.read_bytes() == before


def test_edited_text_is_rejected(configure, train, stopped_at, build_dir):
    """Neither configuration nor run directory contains the text."""
    stopped_at(5)
    added = build_dir / "texts" / "added.txt"
    added.write_text("One more document. " * 9)
    try:
        prepare_dataset(configure().data, build_dir)
        with pytest.raises(RunError, match=r" data \(was [0-9a-f]{64}, is [0-9a-f]") as refusal:
            train(configure())
        assert refusal.value.codes == ["checkpoint.mismatch"]
    finally:
        added.unlink()
    assert train(configure()).status.iteration == 12


def test_another_division_of_the_batch_resumes_and_is_recorded(configure, train, stopped_at):
    begun = stopped_at(5)
    fallback = {
        "action": "micro-batch",
        "iteration": 2,
        "to": {"micro_batch": 1, "accumulation": 4},
    }
    saved = checkpoint.read_checkpoint(begun.files.checkpoint(5))
    saved.state["session"]["oom_fallbacks"] = [fallback]
    checkpoint.save_checkpoint(begun.files.checkpoints, 5, saved.weights, saved.state, keep=1)
    divided = configure(BATCH_SIZE=4, GRAD_ACCUMULATION=1)
    half = train(divided, moved(begun, "elsewhere"), stop_at=8)
    assert "WARN another division from step 5 on: " in half.lines()
    done = train(divided, "elsewhere")
    assert done.status.iteration == 12
    manifest = done.manifest()
    (earlier,) = manifest["earlier_divisions"]
    assert (earlier["iterations"], earlier["batch_size"]) == (5, 2)
    # The micro-batch of the first division does not fit the second.
    assert earlier["oom_fallbacks"] == [fallback] and manifest["oom_fallbacks"] == []
    assert manifest["batch"]["micro_batch"] == 4


def test_records_shorter_than_the_checkpoint_are_an_error(configure, train, stopped_at):
    stopped = stopped_at(5)
    stopped.files.metrics.write_text("")
    with pytest.raises(RunError) as caught:
        train(configure())
    assert caught.value.codes == ["run.damaged"]
    (problem,) = caught.value.problems
    assert problem.where == str(stopped.files.metrics) and "got 0" in problem.what
    # Nothing is moved if no checkpoint fits.
    assert not any(stopped.files.checkpoints.glob("damaged-*"))


@pytest.mark.parametrize("change", ["no session", "other weights"])
def test_a_checkpoint_of_other_content_is_set_aside(
    configure, train, stopped_at, uninterrupted, change
):
    folder = stopped_at(5).files.checkpoints
    found = checkpoint.read_checkpoint(folder / "step-00000005")
    weights, state = found.weights, found.state
    if change == "no session":
        del state["session"]
    else:
        weights = {name: tensor[:1] for name, tensor in weights.items()}
    # Writes digests that match.
    checkpoint.save_checkpoint(folder, found.step, weights, state, keep=9)
    with pytest.raises(RunError) as caught:
        train(configure())
    assert caught.value.codes == ["checkpoint.damaged"]
    assert (folder / "damaged-step-00000005").exists()
    assert train(configure()).core() == uninterrupted


@pytest.mark.parametrize("name", ["metrics.jsonl", "heartbeat_rank0.jsonl", "checkpoints"])
def test_nothing_is_written_through_a_symbolic_link(configure, train, stopped_at, tmp_path, name):
    stopped = stopped_at(2)
    path, victim = stopped.files.path / name, tmp_path / "victim"
    shutil.move(path, victim)
    path.symlink_to(victim)

    def content():
        files = [victim, *victim.rglob("*")]
        return {file: file.read_bytes() for file in files if file.is_file()}

    before = content()
    try:
        message = train(configure()).status.message
    except RunError as error:
        message = str(error)
    assert re.search("symbolic.link", message)
    assert content() == before


def test_a_full_disk_fails_the_run_and_loses_nothing(configure, train, stopped_at, uninterrupted):
    stopped_at(5)
    with mock.patch("torch.save", side_effect=RuntimeError("unexpected pos 64 vs 0")):
        failed = train(configure())
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    assert "cannot save the checkpoint of step 8" in failed.status.message
    assert train.found("run").status.state is State.FAILED
    assert failed.files.checkpoint_steps == [4, 5]
    assert train(configure()).core() == uninterrupted
    with (
        mock.patch(LOOP + "write_status", side_effect=DISK_FULL),
        pytest.raises(RunError, match="No space left") as caught,
    ):
        train(configure(), "anew")
    assert caught.value.codes == ["run.io-error"]


def test_the_scale_of_losses_in_fp16_is_resumed(session):
    """Use a scaler of the CPU: without a GPU, no run has one."""
    states = [session(), session()]
    for state, scale in zip(states, (2.0**7, 2.0**16), strict=True):
        state.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    states[1].load_state_dict(states[0].state_dict())
    assert states[1].scaler.get_scale() == 2.0**7
