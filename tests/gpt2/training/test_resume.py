"""Interrupted, killed or damaged runs end with the bytes of an uninterrupted run."""

import multiprocessing
import os
import pkgutil
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.running.backend import train_in_worker
from lib.errors import RunError
from lib.runner.worker import ParentConnection, train_worker
from lib.runs import checkpoint
from lib.runs.lease import Lease, LeaseLost, read_lease
from lib.runs.run_dir import RunDir, State, read_status

DISK_FULL = OSError(28, "No space left on device")
# Function at whose call the process dies, number of calls before, newest checkpoint left.
DEATHS = {
    "between steps": ("gpt2.training.loop.optimizer_step", 6, "step-00000005"),
    "before a checkpoint is renamed": ("os.rename", 1, "step-00000005"),
    "while an old one is deleted": ("shutil.rmtree", 1, "step-00000012"),
    "between the final files": ("gpt2.training.records.write_atomic", 1, "step-00000012"),
    "before the manifest is done": ("gpt2.training.loop.finalize_run", 0, "step-00000012"),
    "before SUCCESS": ("lib.runs.manifest.write_status", 0, "step-00000012"),
}


def _fails(error: Exception) -> Callable[..., None]:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("moment", DEATHS)
def test_killed_and_resumed_is_uninterrupted(
    configure, train, uninterrupted, tmp_path, monkeypatch, moment
):
    """An evaluation is due with the checkpoint, and is done before it."""
    target, calls, newest = DEATHS[moment]
    config = configure(CHECKPOINT_INTERVAL=5)
    child = os.fork()
    if child == 0:
        original, seen = pkgutil.resolve_name(target), []

        def deadly(*arguments: Any, **named: Any) -> Any:
            if len(seen) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(1)
            return original(*arguments, **named)

        monkeypatch.setattr(target, deadly)
        train(config)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    found = sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step-*"))
    assert found[-1] == newest
    resumed = train(config)
    assert f"resumes at iteration {int(newest[-2:])}" in resumed.lines()
    assert resumed.core() == uninterrupted
    assert resumed.status.state is State.SUCCESS


@pytest.mark.parametrize(
    "moment", ["between steps", "before a checkpoint is renamed", "between the final files"]
)
def test_a_run_taken_over_is_not_written_any_more(
    configure, train, uninterrupted, tmp_path, monkeypatch, moment
):
    target, calls, _ = DEATHS[moment]
    run, original, seen = RunDir(tmp_path / "run"), pkgutil.resolve_name(target), []
    run.path.mkdir()
    lease = Lease.take(run, 60, None)
    assert lease

    def files() -> dict[Path, bytes]:
        paths = (path for path in run.path.rglob("*") if path.is_file())
        # A checkpoint takes effect once it is renamed.
        return {path: path.read_bytes() for path in paths if "/.tmp-" not in str(path)}

    def after_takeover(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if len(seen) == calls:
            Lease.take(run, 60, read_lease(run))
        seen.append(files())
        return result

    with monkeypatch.context() as patch, pytest.raises(LeaseLost):
        patch.setattr(target, after_takeover)
        train(configure(), guard=lease.require)
    assert files() == seen[calls]
    assert train(configure()).core() == uninterrupted


def test_a_truncated_last_line_is_removed(configure, train, stopped_at, uninterrupted):
    stopped = stopped_at(9)
    for path in (stopped.files.metrics, stopped.files.timing):
        with open(path, "a") as stream:
            stream.write('{"kind":"train","iter')
    done = train(configure())
    assert done.core() == uninterrupted
    assert '"iter{' not in done.files.timing.read_text()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_a_digit_of_the_last_row(path: Path) -> None:
    rest, last, _ = path.read_bytes().rsplit(b"\n", 2)
    changed = re.sub(rb"\d(?=\D*\Z)", lambda digit: b"%d" % (int(digit[0]) % 9 + 1), last)
    path.write_bytes(b"\n".join([rest, changed, b""]))


def remove_the_last_row(path: Path) -> None:
    path.write_bytes(path.read_bytes().rsplit(b"\n", 2)[0] + b"\n")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("checkpoints/step-00000009/model.safetensors", flip_a_bit),
        # The records fit the checkpoint before.
        ("metrics.jsonl", change_a_digit_of_the_last_row),
        ("timing.jsonl", remove_the_last_row),
    ],
)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    configure, train, stopped_at, uninterrupted, name, damage
):
    path = stopped_at(9).files.path / name
    damage(path)
    resumed = train(configure())
    assert re.search(rf"WARN checkpoint step-00000009 is damaged .*{path.name}", resumed.lines())
    assert "resumes at iteration 8" in resumed.lines()
    assert resumed.core() == uninterrupted


def test_without_a_good_checkpoint_a_run_starts_over(configure, train, stopped_at, uninterrupted):
    stopped = stopped_at(2)
    flip_a_bit(stopped.files.checkpoints / "step-00000002" / "state.pt")
    resumed = train(configure())
    assert "resumes at" not in resumed.lines()
    assert resumed.lines().count("WARN") == 2
    assert resumed.core() == uninterrupted


def test_a_checkpoint_of_other_code_is_rejected(configure, train, monkeypatch):
    with monkeypatch.context() as patch:
        sources = {"gpt2/model.py": "0" * 64, "lib/absent.py": "1" * 64}
        patch.setattr("gpt2.training.loop.loaded_source", lambda: sources)
        patch.setattr("torch.__version__", "1.0")
        patch.setattr("gpt2.training.loop.device_name", lambda device: "abacus")
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
    found = checkpoint.load_latest_checkpoint(folder, print)
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

    def content() -> dict[Path, bytes]:
        files = [victim, *victim.rglob("*")]
        return {file: file.read_bytes() for file in files if file.is_file()}

    before = content()
    try:
        message = train(configure()).status.message
    except RunError as error:
        message = str(error)
    assert re.search("symbolic.link", message)
    assert content() == before


def test_a_full_disk_fails_the_run_and_loses_nothing(
    configure, train, stopped_at, uninterrupted, monkeypatch
):
    stopped_at(5)
    with monkeypatch.context() as patch:
        patch.setattr("torch.save", _fails(RuntimeError("unexpected pos 64 vs 0")))
        failed = train(configure())
    assert failed.status.state is State.FAILED
    assert failed.status.exit_code == 1
    assert "cannot save the checkpoint of step 8" in failed.status.message
    assert read_status(failed.files).state is State.FAILED
    kept = sorted(path.name for path in failed.files.checkpoints.iterdir())
    assert kept == ["step-00000004", "step-00000005"]
    assert train(configure()).core() == uninterrupted


def test_an_unwritable_disk_is_one_error(configure, train, monkeypatch):
    monkeypatch.setattr("gpt2.training.loop.write_status", _fails(DISK_FULL))
    with pytest.raises(RunError) as caught:
        train(configure())
    assert caught.value.codes == ["run.io-error"] and "No space left" in str(caught.value)


def test_a_clock_that_is_set_back_changes_no_result(configure, train, uninterrupted, monkeypatch):
    clock = time.time
    seconds = iter(range(10**9))
    monkeypatch.setattr("time.time", lambda: clock() - 86400 * next(seconds))
    train(configure(), stop_at=5)
    assert train(configure()).core() == uninterrupted


def test_a_lost_gpu_fails_the_run_which_goes_on_later(
    configure, train, stopped_at, uninterrupted, monkeypatch
):
    """In a worker, as under make: the error of the driver is the cause."""
    stopped_at(5)
    _ours, theirs = multiprocessing.Pipe()
    if (child := os.fork()) == 0:
        # As torch raises for an error of the driver.
        lost = RuntimeError("CUDA error: unspecified launch failure")
        monkeypatch.setattr("gpt2.training.loop.optimizer_step", _fails(lost))
        function = partial(train_in_worker, build_dir=train.build_dir, allow_stale=False, order={})
        assert Lease.take(RunDir(train.folder / "run"), 60, None)
        train_worker(function, train.folder / "run", 1, ParentConnection(theirs))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    failed = train.found("run").status
    assert failed.state is State.FAILED and failed.iteration == 5
    assert failed.message == "RuntimeError: CUDA error: unspecified launch failure"
    assert train(configure()).core() == uninterrupted


def test_the_scale_of_losses_in_fp16_is_resumed(session):
    """Use a scaler of the CPU: without a GPU, no run has one."""
    states = [session(), session()]
    for state, scale in zip(states, (2.0**7, 2.0**16), strict=True):
        state.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    states[1].load_state_dict(states[0].state_dict())
    assert states[1].scaler.get_scale() == 2.0**7
