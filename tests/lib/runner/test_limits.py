"""Limits of a job that are enforced from outside, by a fake clock."""

import pytest

from lib.runner.job import LIMIT_GRACE_SECONDS, JobLimits, JobTimer


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
        timer.reset_silence()
    assert wait(timer, clock, 60) == ""
    assert "STALL_LIMIT_SECONDS=60" in wait(timer, clock, 1)


def test_a_job_that_reports_is_ended_after_the_time_limit_and_its_grace() -> None:
    clock = Clock()
    timer = JobTimer(JobLimits(total_seconds=10, silent_seconds=60), clock)
    for _ in range(10 + LIMIT_GRACE_SECONDS):
        assert wait(timer, clock, 1) == ""
        timer.reset_silence()
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
