"""Progress display of the runner: a live table on a terminal, plain lines everywhere else."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lib.console import ascii_only, say
from lib.plan import Run
from lib.runner.progress import StudyProgress
from lib.status import State, Status
from lib.units import clock

_PLAIN_INTERVAL_SECONDS = 30.0
_LIVE_REFRESHES_PER_SECOND = 4


class Display(Protocol):
    """Protocol of a progress display, used as a context manager."""

    def __enter__(self) -> Self:
        """Start the display."""

    def __exit__(self, *exception: object) -> None:
        """Restore the terminal."""

    def news(self, run: Run[Any]) -> None:
        """Report that ``run`` has made progress."""


class PlainDisplay:
    """Plain output: one line when a run starts training, then at most one every 30 seconds."""

    def __init__(self, progress: StudyProgress, now: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._now = now
        self._printed_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def news(self, run: Run[Any]) -> None:
        """Print the progress of ``run`` unless a line was printed less than 30 seconds ago."""
        last = self._printed_at.get(run.label)
        if last is not None and self._now() - last < _PLAIN_INTERVAL_SECONDS:
            return
        self._printed_at[run.label] = self._now()
        say("TRAIN", f"{run.label}   {self._progress.active[run.label].describe()}")


class LiveDisplay:
    """Live table of the active runs below the log lines."""

    def __init__(self, progress: StudyProgress) -> None:
        # Imported here because plain output does not need rich.
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        console = Console(stderr=True, highlight=False, safe_box=ascii_only())
        self._live = Live(
            get_renderable=self._table,
            console=console,
            transient=True,
            refresh_per_second=_LIVE_REFRESHES_PER_SECOND,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def news(self, run: Run[Any]) -> None:
        """Do nothing: the next refresh reads the progress."""

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for active in list(self._progress.active.values()):
            bar = ProgressBar(total=1.0, completed=active.fraction, width=20)
            table.add_row("TRAIN", active.run.label, bar, active.describe())
        passed = clock(self._progress.seconds_passed())
        table.add_row("RUNS", self._progress.describe(), "", f"passed {passed}")
        return table


def choose_display(progress: StudyProgress) -> Display:
    """Return a live display if stderr is a terminal and neither ``CI`` nor ``TERM=dumb`` is set."""
    plain = os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    if sys.stderr.isatty() and not plain:
        return LiveDisplay(progress)
    return PlainDisplay(progress)


def say_end(
    run: Run[Any], status: Status, message: str, progress: StudyProgress, log: Path
) -> None:
    """Print one line with the outcome of a run.

    ``message`` is the final message of the run.
    """
    lines = message.strip().split("\n")
    match status.state:
        case State.SUCCESS:
            say("DONE", f"{run.label}   {lines[0]}   ({progress.describe()})")
        case State.INTERRUPTED:
            say("STOP", f"{run.label}   {lines[0]}")
        case _:
            say("FAIL", f"{run.label}   {lines[0]}   log: {log}")
