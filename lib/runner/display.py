"""Progress display of the runner: a live table on a terminal, plain lines everywhere else."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lib.console import is_ascii_only, log
from lib.runs.run import Run
from lib.runs.run_dir import RunStatus, State
from lib.units import format_duration, format_si


@dataclass
class RunProgress:
    """Latest progress of one run; ``fraction`` is the used part of its budget."""

    run: Run[Any]
    # Its GPUs, such as ``GPU 2,3``; "" on a CPU.
    place: str = ""
    fraction: float = 0.0
    # Fraction at which this session began; above 0 for a resumed run.
    first_fraction: float = 0.0
    news: Mapping[str, Any] = field(default_factory=dict)
    # What the run does since its last step, such as an evaluation.
    doing: str = ""
    # The result that it reported.
    result: str = ""

    def update(self, event: Mapping[str, Any]) -> None:
        self.news, self.doing = event, ""
        self.fraction = float(event["progress"])
        self.first_fraction = float(event["first_progress"])

    def describe(self, room: int | None = None) -> str:
        """Return loss, iterations, speed and time left as text; unknown values are omitted.

        GPUs, then speed, loss and iterations are omitted too if the text has more than ``room`` columns.
        """
        event, parts = self.news, dict[str, str]()
        if event.get("loss") is not None:
            parts["loss"] = f"loss {event['loss']:.3f}"
        if event.get("iteration") is not None:
            total = f"/{format_si(event['iterations'])}" if event.get("iterations") else ""
            parts["iteration"] = f"{format_si(event['iteration'])}{total} it"
        if self.doing:
            parts["doing"] = self.doing
        elif event.get("tokens_per_second"):
            parts["speed"] = f"{format_si(event['tokens_per_second'])} tok/s"
        if event.get("eta_seconds") is not None and not self.doing:
            parts["eta"] = f"eta {format_duration(event['eta_seconds'])}"
        if self.place:
            parts["place"] = self.place
        for name in ("place", "speed", "loss", "iteration"):
            if room is not None and len("   ".join(parts.values())) > room:
                parts.pop(name, None)
        return "   ".join(parts.values())


class SessionProgress:
    """Progress of all runs of a session: active runs, finished runs and time left."""

    def __init__(self, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.ended: list[RunStatus] = []
        self.active: dict[str, RunProgress] = {}
        self.now = now
        self.started = now()
        # Work done by ended runs in this session, in units of whole runs.
        self._worked = 0.0

    def count(self, *states: State) -> int:
        return sum(status.state in states for status in self.ended)

    def begin(self, run: Run[Any], place: str = "") -> None:
        """Record that a worker has started ``run`` on the GPUs of ``place``."""
        self.active[run.label] = RunProgress(run, place)

    def end(self, run: Run[Any], status: RunStatus) -> None:
        active = self.active.pop(run.label)
        reached = 1.0 if status.state is State.SUCCESS else active.fraction
        self._worked += reached - active.first_fraction
        self.ended.append(status)

    def drop(self, run: Run[Any]) -> None:
        """Record that ``run`` is trained by another process."""
        del self.active[run.label]

    def describe(self) -> str:
        """Return a summary such as ``7/19, 1 failed, eta 01:20``: of 19 runs, 7 are done.

        The time left is that at the pace of this session, without progress of earlier ones. If no run
        waits, the lines of the runs have their own.
        """
        failed, running = self.count(State.FAILED), self.active.values()
        text = f"{self.count(State.SUCCESS)}/{self.total}"
        text += f", {failed} failed" if failed else ""
        left = self.total - len(self.ended)
        worked = self._worked + sum(p.fraction - p.first_fraction for p in running)
        if left == len(running) or worked <= 0.0:
            return text
        left_work = left - sum(p.fraction for p in running)
        return f"{text}, eta {format_duration((self.now() - self.started) / worked * left_work)}"


_PLAIN_INTERVAL_SECONDS = 30.0
_LIVE_REFRESHES_PER_SECOND = 4


def plain_lines(
    progress: SessionProgress, now: Callable[[], float] = time.monotonic
) -> Callable[[Run[Any]], None]:
    """Return a function that prints a run's progress at its start, then at most every 30 seconds."""
    printed_at: dict[str, float] = {}

    def news(run: Run[Any]) -> None:
        if now() - printed_at.get(run.label, float("-inf")) >= _PLAIN_INTERVAL_SECONDS:
            printed_at[run.label] = now()
            log("TRAIN", f"{run.label}   {progress.active[run.label].describe()}")

    return news


# Columns of a progress bar, and between the columns of the live table.
_BAR_COLUMNS, _MIN_BAR_COLUMNS, _GAP = 20, 5, 2


def live_table(progress: SessionProgress, width: int) -> Any:
    """Return the table of the active runs, each one line of ``width`` columns."""
    # Imported here because plain output does not need rich.
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, _GAP))
    for _ in range(4):
        table.add_column(no_wrap=True)
    runs = list(progress.active.values())
    summary = progress.describe()
    labels = max(map(len, [summary, *(active.run.label for active in runs)]))
    room = width - len("TRAIN") - labels - 3 * _GAP
    news = [active.describe(room) for active in runs]
    elapsed = f"elapsed {format_duration(progress.now() - progress.started)}"
    # The bar takes what the texts leave.
    bar_width = min(_BAR_COLUMNS, room - max(map(len, [*news, elapsed])))
    for active, text in zip(runs, news, strict=True):
        bar = ProgressBar(total=1.0, completed=active.fraction, width=max(1, bar_width))
        wide = bar_width >= _MIN_BAR_COLUMNS
        table.add_row("TRAIN", active.run.label, bar if wide else "", text)
    table.add_row("RUNS", summary, "", elapsed)
    return table


@contextmanager
def displayed(progress: SessionProgress) -> Iterator[Callable[[Run[Any]], None]]:
    """Display the progress; the function of the context is called with each run that has news.

    A live table below the log lines if stderr is a terminal and neither ``CI`` nor ``TERM=dumb`` is
    set, else plain lines.
    """
    if os.environ.get("CI") or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty():
        yield plain_lines(progress)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, safe_box=is_ascii_only())
    with Live(
        get_renderable=lambda: live_table(progress, console.width),
        console=console,
        transient=True,
        refresh_per_second=_LIVE_REFRESHES_PER_SECOND,
        redirect_stdout=False,
    ):
        # The next refresh reads the progress.
        yield lambda run: None
