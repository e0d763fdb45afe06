"""Interface of jobs and executors: a function called in one or more processes, here or elsewhere.

``lib.runner.local`` forks the processes on this machine. Other machines run a runner of their own.
"""

import faulthandler
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lib.runs.run_dir import RunStatus

# Event of a job: ``kind`` and the fields of that kind, see ``lib.runner.worker``.
JobEvent = Mapping[str, Any]
# Environment variables that select the device of a job, such as a GPU.
DeviceSlot = Mapping[str, str]


class JobState(StrEnum):
    """State of the processes of a job; whether its run succeeded is in the run's status."""

    RUNNING = "running"
    # Every process has exited cleanly.
    EXITED = "exited"
    # A process has died or raised an error, and no process is left.
    FAILED = "failed"


class Job(ABC):
    """Processes, one per rank, that work together and end together."""

    @property
    @abstractmethod
    def state(self) -> JobState:
        """Return the state, without waiting."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> JobState:
        """Wait for the end of the job, at most ``timeout`` seconds, and return the state."""

    @abstractmethod
    def cancel(self, *, immediately: bool = False) -> None:
        """Request a stop, before which a run is saved; ``immediately`` kills the processes."""

    @abstractmethod
    def end_overdue(self) -> None:
        """Write the stacks of all threads to the log, rank by rank, and request a stop.

        Processes that have not ended after a while are killed.
        """

    @abstractmethod
    def failure_cause(self, status: RunStatus) -> str:
        """Return the cause of a failure if ``status``, written by rank 0, lacks it, else ""."""


@dataclass(frozen=True)
class JobLimits:
    """Limits of a job that are enforced from outside its processes; 0 is none."""

    # RUN_TIME_LIMIT_SECONDS: the run itself stops at this limit if it can.
    total_seconds: int = 0
    # STALL_LIMIT_SECONDS: time without an event; a job with long steps has more.
    silent_seconds: int = 0


@dataclass(frozen=True)
class ExceededLimit:
    """A limit that a job has exceeded."""

    # Text for the status of the run.
    cause: str
    # Whether the cause may be gone in a second attempt.
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

    def record(self, event: JobEvent | None) -> None:
        """Record an event of the job, and measure the longest step between two reports of progress."""
        self._silent = 0.0
        if event is None or event["kind"] != "progress":
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
            cause = f"{exceeded} by {LIMIT_GRACE_SECONDS} s; ended"
            return ExceededLimit(cause, stalled=False)
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


class Executor(ABC):
    """Starts jobs and collects their events. Not thread-safe."""

    @abstractmethod
    def submit(
        self,
        function: Callable[..., None],
        *arguments: Any,
        world_size: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Start ``function(*arguments, parent)`` in ``world_size`` processes.

        ``function`` is a top-level function, ``parent`` a ``lib.runner.worker.ParentConnection``.
        ``environment`` has variables for the processes, in addition to rank and world size.
        """

    @abstractmethod
    def events(self, timeout: float | None) -> Iterator[tuple[Job, JobEvent | None]]:
        """Yield (job, event) pairs after waiting at most ``timeout`` seconds for the first.

        Event None marks the end of a job; all other events of the job precede it.
        """


def describe_death(exit_code: int, who: str = "worker") -> str:
    """Describe the exit code of a process that did not exit cleanly."""
    if exit_code >= 0:
        return f"{who} died with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; out of memory?" if -exit_code == signal.SIGKILL else ""
    return f"{who} died with signal {-exit_code} ({name}{hint})"
