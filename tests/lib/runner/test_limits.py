"""Limits of a job and of its processes."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.env.ranks import ProcessRank
from lib.project import ROOT
from lib.runner import worker
from lib.runner.limits import LIMIT_GRACE_SECONDS, JobLimits, JobTimer
from lib.runs.lease import Lease, LeaseLost, read_lease
from lib.runs.run_dir import RunDir


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wait(timer: JobTimer, clock: Clock, seconds: int) -> str:
    """Look every second, as the scheduler does; return the first cause."""
    for _ in range(seconds):
        clock.now += 1.0
        if limit := timer.exceeded():
            return limit.cause
    return ""


def test_silence_beyond_the_limit_ends_a_job_and_events_do_not() -> None:
    clock = Clock()
    timer = JobTimer(JobLimits(silent_seconds=60), clock)
    for _ in range(5):
        assert wait(timer, clock, 60) == ""
        timer.record({"kind": "alive"})
    assert wait(timer, clock, 60) == ""
    assert "STALL_LIMIT_SECONDS=60" in wait(timer, clock, 1)


def test_a_run_of_long_steps_may_be_silent_for_ten_of_them() -> None:
    """Measured between reports of progress: neither the start nor a micro-batch is a step."""
    clock = Clock()
    timer = JobTimer(JobLimits(silent_seconds=60), clock)
    assert wait(timer, clock, 59) == ""
    timer.record({"kind": "progress", "iteration": 1})
    assert wait(timer, clock, 50) == ""
    timer.record({"kind": "alive"})
    assert wait(timer, clock, 50) == ""
    timer.record({"kind": "progress", "iteration": 3})
    assert wait(timer, clock, 500) == ""
    cause = wait(timer, clock, 1)
    assert "10 steps of 50 s" in cause and "STALL_LIMIT_SECONDS=60" in cause


def test_a_job_that_reports_is_ended_after_the_time_limit_and_its_grace() -> None:
    clock = Clock()
    timer = JobTimer(JobLimits(total_seconds=10, silent_seconds=60), clock)
    for _ in range(10 + LIMIT_GRACE_SECONDS):
        assert wait(timer, clock, 1) == ""
        timer.record({"kind": "alive"})
    assert "RUN_TIME_LIMIT_SECONDS=10" in wait(timer, clock, 1)


def test_limits_of_zero_are_none() -> None:
    clock = Clock()
    assert wait(JobTimer(JobLimits(), clock), clock, 100_000) == ""


@pytest.mark.parametrize("limits", [JobLimits(silent_seconds=60), JobLimits(total_seconds=60)])
def test_the_time_of_a_suspension_does_not_count(limits: JobLimits) -> None:
    """Ctrl-Z stops this process and the workers."""
    clock = Clock()
    timer = JobTimer(limits, clock)
    clock.now += 100_000.0
    assert timer.exceeded() is None


def test_a_watchdog_ends_a_process_that_hangs_with_its_stacks() -> None:
    script = """if True:
        import time
        from lib.runner.limits import watchdog

        def blocked_loader():
            time.sleep(60)

        with watchdog(0):
            time.sleep(0.1)
        with watchdog(0.4) as alive:
            for _ in range(12):
                time.sleep(0.05)
                alive()
            # A step, whose length extends the limit.
            time.sleep(0.1)
            alive()
            time.sleep(0.6)
            alive()
            print("alive", flush=True)
            blocked_loader()
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=30
    )
    assert (done.returncode, done.stdout) == (1, "alive\n")
    assert "Timeout" in done.stderr and "in blocked_loader" in done.stderr


def test_warnings_of_a_run_in_this_process_are_in_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs.txt"
    log.write_text("TRAIN\n")
    with worker.warnings_in(log):
        warnings.warn("flash attention kernel not used", stacklevel=1)
    assert log.read_text().startswith("TRAIN\n") and "kernel not used" in log.read_text()
    assert capsys.readouterr().err == ""


def test_no_rank_writes_to_a_run_that_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, guards = RunDir(tmp_path), []
    Lease.take(run, 60, None)
    monkeypatch.setattr(worker, "_train", lambda *arguments: guards.append(arguments[-1]))
    monkeypatch.setattr(worker, "current_process", lambda: ProcessRank(1, 2))
    parent: Any = SimpleNamespace(stop_requested=bool)
    worker.train_worker(lambda *arguments: None, tmp_path, 1, parent)
    (guard,) = guards
    guard()
    Lease.take(run, 60, read_lease(run))
    with pytest.raises(LeaseLost):
        guard()
