"""How far the runs are, and how long the rest takes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib.plan import Run
from lib.status import State, Status
from lib.units import clock, short


@dataclass
class RunProgress:
    """One run's latest news; ``fraction`` is the part of its budget that is used."""

    run: Run[Any]
    fraction: float = 0.0
    # Where this session found it, when it resumed.
    first_fraction: float | None = None
    news: Mapping[str, Any] = field(default_factory=dict)

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in a progress event of the run's worker."""
        self.news = event
        self.fraction = float(event["progress"])
        if self.first_fraction is None:
            self.first_fraction = self.fraction

    def describe(self) -> str:
        """Loss, iterations, speed and time left, as far as known."""
        news = self.news
        parts = []
        if news.get("loss") is not None:
            parts.append(f"loss {news['loss']:.3f}")
        if news.get("iteration") is not None:
            total = f"/{short(news['iterations'])}" if news.get("iterations") else ""
            parts.append(f"{short(news['iteration'])}{total} it")
        if news.get("tokens_per_second"):
            parts.append(f"{short(news['tokens_per_second'])} tok/s")
        if news.get("eta_seconds") is not None:
            parts.append(f"eta {clock(news['eta_seconds'])}")
        return "   ".join(parts)


class StudyProgress:
    """All runs of this session: which are active, how many are done, when the last one will be."""

    def __init__(self, runs: Sequence[Run[Any]], now: Callable[[], float] = time.monotonic) -> None:
        self.total = len(runs)
        self.states: dict[State, int] = {state: 0 for state in State}
        self.active: dict[str, RunProgress] = {}
        self._now = now
        self._started = now()
        # Budgets used up in this session, in runs.
        self._worked = 0.0

    @property
    def finished(self) -> int:
        """Runs that have ended, well or not."""
        return sum(self.states.values())

    def begin(self, run: Run[Any]) -> None:
        """A worker has started on the run."""
        self.active[run.label] = RunProgress(run)

    def end(self, run: Run[Any], status: Status) -> None:
        """The run's worker has ended."""
        ended = self.active.pop(run.label)
        self._worked += 1.0 - (ended.first_fraction or 0.0)
        self.states[status.state] += 1

    def seconds_left(self) -> float | None:
        """Until all runs are done, at this session's pace; None before there is one."""
        running = self.active.values()
        worked = self._worked + sum(p.fraction - (p.first_fraction or 0.0) for p in running)
        if worked <= 0.0:
            return None
        left = self.total - self.finished - sum(p.fraction for p in running)
        return (self._now() - self._started) / worked * left

    def seconds_passed(self) -> float:
        """Since the session began."""
        return self._now() - self._started

    def describe(self) -> str:
        """``7/19 done, eta 01:20``."""
        failed = self.states[State.FAILED]
        text = f"{self.finished}/{self.total}" + (f", {failed} failed" if failed else "")
        left = self.seconds_left()
        return text if left is None or self.finished == self.total else f"{text}, eta {clock(left)}"
