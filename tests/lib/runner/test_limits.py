"""Limits of a job and of its processes."""

import warnings
from typing import Any

import pytest

from lib.runner import worker
from lib.runner.limits import LIMIT_GRACE_SECONDS, JobTimer

ALIVE = {"kind": "alive"}
GRACE = 10 + LIMIT_GRACE_SECONDS


def step(iteration: int) -> dict[str, Any]:
    return {"kind": "progress", "iteration": iteration}


@pytest.mark.parametrize(
    ("limits", "script", "cause"),
    [
        # Seconds of silence, and events.
        ((0, 60), [60, ALIVE, 60, ALIVE, 60], ""),
        ((0, 60), [60, ALIVE, 61], "STALL_LIMIT_SECONDS=60"),
        # Ten steps, measured between reports of progress: neither the start nor a micro-batch is one.
        ((0, 60), [59, step(1), 50, ALIVE, 50, step(3), 500], ""),
        ((0, 60), [step(1), 50, ALIVE, 50, step(3), 501], "10 steps of 50 s"),
        # A job that reports has the time of its last step and checkpoint.
        ((10, 60), [ALIVE, *[10, ALIVE] * (GRACE // 10)], ""),
        ((10, 60), [ALIVE, *[10, ALIVE] * (GRACE // 10), 1], "RUN_TIME_LIMIT_SECONDS=10"),
        ((0, 0), [100_000], ""),
        # Ctrl-Z stops this process and the workers: that time does not count.
        ((0, 60), [1e5], ""),
        ((60, 0), [1e5], ""),
    ],
)
def test_the_limit_that_ends_a_job(limits, script, cause):
    now = 100.0
    timer, exceeded = JobTimer(*limits, lambda: now), 0
    for entry in script:
        if isinstance(entry, dict):
            timer.record(entry)
            continue
        # The scheduler looks every second, or, after a float, once.
        steps = [entry] if isinstance(entry, float) else [1.0] * entry
        for seconds in steps:
            now += seconds
            exceeded += timer.poll()
    assert exceeded == bool(cause) and cause in timer.exceeded
    assert timer.stalled == (bool(cause) and "RUN_TIME" not in cause)


def test_warnings_of_a_run_in_this_process_are_in_its_log(tmp_path, capsys):
    log = tmp_path / "logs.txt"
    log.write_text("TRAIN\n")
    with worker.warnings_in(log):
        warnings.warn("flash attention kernel not used", stacklevel=1)
    assert log.read_text().startswith("TRAIN\n") and "kernel not used" in log.read_text()
    assert capsys.readouterr().err == ""
