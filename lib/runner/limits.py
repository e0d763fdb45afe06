"""Limits of a job in seconds: of its whole time, and of the time in which it reports nothing."""

import faulthandler
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobLimits:
    """Limits of a job that are enforced from outside its processes; 0 is none."""

    # RUN_TIME_LIMIT_SECONDS: the run itself stops at this limit if it can.
    total_seconds: int = 0
    # STALL_LIMIT_SECONDS: time without an event; a job with long steps has more.
    silent_seconds: int = 0


@dataclass(frozen=True)
class ExceededLimit:
    """A limit that a job has exceeded: text for the status, and whether a second attempt may help."""

    cause: str
    stalled: bool


# Time that a run has for its last step and its checkpoint after RUN_TIME_LIMIT_SECONDS.
LIMIT_GRACE_SECONDS = 300
# A longer time between two polls means that this process did not run, and often the job neither:
# Ctrl-Z stops both.
_MAX_COUNTED_SECONDS = 5.0
# A run may be silent for the time of this many steps, although STALL_LIMIT_SECONDS is shorter.
_SILENT_STEPS = 10


class JobTimer:
    """Timer of a job since its start and since its last event, without the time of a suspension."""

    def __init__(self, limits: JobLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._looked_at = clock()
        self._total = self._silent = self._step = 0.0
        # Iteration and time of the last progress.
        self._progress: tuple[int, float] | None = None

    def record(self, event: Mapping[str, Any]) -> None:
        """Record an event of the job, and measure the longest step between two reports of progress."""
        self._silent = 0.0
        if event["kind"] != "progress":
            return
        if self._progress and (steps := event["iteration"] - self._progress[0]) > 0:
            self._step = max(self._step, (self._total - self._progress[1]) / steps)
        self._progress = event["iteration"], self._total

    def exceeded(self) -> ExceededLimit | None:
        """Return the limit that the job has exceeded."""
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, _MAX_COUNTED_SECONDS), now
        self._total += passed
        self._silent += passed
        limits = self._limits
        allowed = max(limits.silent_seconds, _SILENT_STEPS * self._step)
        if limits.silent_seconds and self._silent > allowed:
            limit = f"STALL_LIMIT_SECONDS={limits.silent_seconds}"
            if allowed > limits.silent_seconds:
                limit = f"{_SILENT_STEPS} steps of {self._step:.0f} s, more than {limit}"
            return ExceededLimit(f"no sign of life for {limit}; ended", stalled=True)
        if limits.total_seconds and self._total > limits.total_seconds + LIMIT_GRACE_SECONDS:
            exceeded = f"RUN_TIME_LIMIT_SECONDS={limits.total_seconds} exceeded"
            return ExceededLimit(f"{exceeded} by {LIMIT_GRACE_SECONDS} s; ended", stalled=False)
        return None


@contextmanager
def watchdog(seconds: float) -> Iterator[Callable[[], None]]:
    """End this process unless it calls the function of the context every ``seconds`` (0: no limit).

    As for a job, long steps extend the limit: to ten times the longest time between two calls. The
    stacks of the threads are written to stderr. For a process that no runner watches.
    """
    called, longest = time.monotonic(), 0.0

    def alive() -> None:
        nonlocal called, longest
        now = time.monotonic()
        called, longest = now, max(longest, now - called)
        if seconds:
            # A thread of its own, which needs no lock of a hanging interpreter.
            faulthandler.dump_traceback_later(max(seconds, _SILENT_STEPS * longest), exit=True)

    alive()
    try:
        yield alive
    finally:
        faulthandler.cancel_dump_traceback_later()
