"""Limits of a job in seconds: of its whole time, and of the time in which it reports nothing."""

import time
from collections.abc import Callable, Mapping
from typing import Any

# Time that a run has for its last step and its checkpoint after RUN_TIME_LIMIT_SECONDS.
LIMIT_GRACE_SECONDS = 300
# A longer time between two polls means that this process did not run, and often the job neither:
# Ctrl-Z stops both.
_MAX_COUNTED_SECONDS = 5.0
# A run may be silent for the time of this many steps, although STALL_LIMIT_SECONDS is shorter.
_SILENT_STEPS = 10


class JobTimer:
    """Timer of a job since its start and since its last event, without the time of a suspension.

    ``time_limit`` is RUN_TIME_LIMIT_SECONDS, at which a run stops itself if it can, ``stall_limit`` is
    STALL_LIMIT_SECONDS; 0 is none.
    """

    def __init__(
        self, time_limit: int, stall_limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._time_limit, self._stall_limit, self._clock = time_limit, stall_limit, clock
        self._looked_at = clock()
        self._total = self._silent = self._step = 0.0
        # Iteration and time of the last progress.
        self._progress: tuple[int, float] | None = None
        # The limit that the job has exceeded; "" if none.
        self.exceeded = ""
        # Whether it is the limit of silence: a second attempt may help.
        self.stalled = False

    def record(self, event: Mapping[str, Any]) -> None:
        """Record an event of the job, and measure the longest step between two reports of progress."""
        self._silent = 0.0
        if event["kind"] != "progress":
            return
        if self._progress and (steps := event["iteration"] - self._progress[0]) > 0:
            self._step = max(self._step, (self._total - self._progress[1]) / steps)
        self._progress = event["iteration"], self._total

    def poll(self) -> bool:
        """Return whether the job has exceeded a limit now, for the first time."""
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, _MAX_COUNTED_SECONDS), now
        self._total += passed
        self._silent += passed
        if self.exceeded:
            return False
        allowed = max(self._stall_limit, _SILENT_STEPS * self._step)
        if self._stall_limit and self._silent > allowed:
            limit = f"STALL_LIMIT_SECONDS={self._stall_limit}"
            if allowed > self._stall_limit:
                limit = f"{_SILENT_STEPS} steps of {self._step:.0f} s, more than {limit}"
            self.exceeded, self.stalled = f"no sign of life for {limit}; ended", True
        elif self._time_limit and self._total > self._time_limit + LIMIT_GRACE_SECONDS:
            limit = f"RUN_TIME_LIMIT_SECONDS={self._time_limit}"
            self.exceeded = f"{limit} exceeded by {LIMIT_GRACE_SECONDS} s; ended"
        return bool(self.exceeded)
