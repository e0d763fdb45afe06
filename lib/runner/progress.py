"""Progress of the active runs and the estimated time left."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib.plan import Run
from lib.status import State, Status
from lib.units import clock, short


@dataclass
class RunProgress:
    """Latest progress of one run; ``fraction`` is the used part of its budget."""

    run: Run[Any]
    fraction: float = 0.0
    # Fraction at the first event of this session; above 0 for a resumed run.
    first_fraction: float | None = None
    news: Mapping[str, Any] = field(default_factory=dict)

    def update(self, event: Mapping[str, Any]) -> None:
        """Apply a progress event of the run's worker."""
        self.news = event
        self.fraction = float(event["progress"])
        if self.first_fraction is None:
            self.first_fraction = self.fraction

    def describe(self) -> str:
        """Return loss, iterations, speed and time left as text; unknown values are omitted."""
        event = self.news
        parts = []
        if event.get("loss") is not None:
            parts.append(f"loss {event['loss']:.3f}")
        if event.get("iteration") is not None:
            total = f"/{short(event['iterations'])}" if event.get("iterations") else ""
            parts.append(f"{short(event['iteration'])}{total} it")
        if event.get("tokens_per_second"):
            parts.append(f"{short(event['tokens_per_second'])} tok/s")
        if event.get("eta_seconds") is not None:
            parts.append(f"eta {clock(event['eta_seconds'])}")
        return "   ".join(parts)


class StudyProgress:
    """Progress of all runs of a session: active runs, finished runs and time left."""

    def __init__(self, runs: Sequence[Run[Any]], now: Callable[[], float] = time.monotonic) -> None:
        self.total = len(runs)
        self.states: dict[State, int] = {state: 0 for state in State}
        self.active: dict[str, RunProgress] = {}
        self._now = now
        self._started = now()
        # Work done in this session, in units of whole runs.
        self._worked = 0.0

    @property
    def finished(self) -> int:
        """Return the number of runs that have ended, successful or not."""
        return sum(self.states.values())

    def begin(self, run: Run[Any]) -> None:
        """Record that a worker has started ``run``."""
        self.active[run.label] = RunProgress(run)

    def end(self, run: Run[Any], status: Status) -> None:
        """Record that the worker of ``run`` has ended."""
        ended = self.active.pop(run.label)
        self._worked += 1.0 - (ended.first_fraction or 0.0)
        self.states[status.state] += 1

    def seconds_left(self) -> float | None:
        """Return the seconds until all runs are done at the pace of this session.

        Returns None before any progress has been made.
        """
        running = self.active.values()
        worked = self._worked + sum(p.fraction - (p.first_fraction or 0.0) for p in running)
        if worked <= 0.0:
            return None
        remaining = self.total - self.finished - sum(p.fraction for p in running)
        return (self._now() - self._started) / worked * remaining

    def seconds_passed(self) -> float:
        """Return the seconds since the session started."""
        return self._now() - self._started

    def describe(self) -> str:
        """Return a summary such as ``7/19 done, eta 01:20``."""
        failed = self.states[State.FAILED]
        text = f"{self.finished}/{self.total}" + (f", {failed} failed" if failed else "")
        seconds = self.seconds_left()
        return (
            text
            if seconds is None or self.finished == self.total
            else f"{text}, eta {clock(seconds)}"
        )
