"""Pace, time left, and frequency of plain lines, with a fake clock."""

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lib.runner.display import SessionProgress, live_table, plain_lines
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunStatus, State


class Session:
    """Runs that have begun at time 0 of a clock."""

    def __init__(self, count: int, begun: int | None = None) -> None:
        config = SimpleNamespace(hash8="f")
        self.now = 0.0
        self.runs = [
            Run("demo", RunVariant(f"r{i}", number=i), 1, config, Path(f"r{i}"))
            for i in range(count)
        ]
        self.progress = SessionProgress(count, lambda: self.now)
        for run in self.runs[:begun]:
            self.progress.begin(run)

    def at(self, seconds: float, *iterations: int, resumed: Sequence[int] = (0, 0)) -> None:
        """Advance the clock, and report the iterations of the first runs, which began at others."""
        self.now = seconds
        for run, iteration, first in zip(self.runs, iterations, resumed, strict=False):
            place = {"iteration": iteration, "iterations": 100}
            shares = {"progress": iteration / 100, "first_progress": first / 100}
            event = {**place, **shares, "loss": 2.5, "eta_seconds": 61}
            self.progress.active[run.label].update(event)


def test_time_left_follows_from_the_pace_of_this_session():
    session = Session(4, begun=2)
    assert session.progress.describe() == "0/4"
    # What an earlier session did is no pace.
    session.at(10.0, 60, 10, resumed=(40, 0))
    # Thirty iterations took 10 seconds.
    assert session.progress.describe() == "0/4, eta 01:50"
    session.at(30.0, 80, 60, resumed=(40, 0))
    # A whole run took 30 seconds; 2.6 runs are left.
    assert session.progress.describe() == "0/4, eta 01:18"
    session.progress.end(session.runs[0], RunStatus(State.SUCCESS))
    assert session.progress.describe() == "1/4, eta 01:00"
    # The other run ended early, with 0.6 of a run; what a stopped run left is no work done either.
    session.progress.end(session.runs[1], RunStatus(State.FAILED))
    assert session.progress.describe() == "1/4, 1 failed, eta 00:50"
    session.progress.begin(session.runs[2])
    session.progress.end(session.runs[2], RunStatus(State.INTERRUPTED))
    assert session.progress.describe() == "1/4, 1 failed, eta 00:25"


def test_one_estimate_is_printed_if_no_run_waits():
    """After a resume, the pace of this session has its start-up, and a run's own estimate has not."""
    session = Session(2)
    session.at(20.0, 85, 95, resumed=(80, 90))
    assert session.progress.describe() == "0/2"
    assert session.progress.active[session.runs[0].label].describe().endswith("eta 01:01")


def test_between_two_steps_the_work_is_named():
    """At 100 % of its steps, a run is still evaluated and writes a sample."""
    session = Session(1)
    session.at(1.0, 100)
    (active,) = session.progress.active.values()
    active.doing = "evaluating 40 %"
    assert active.describe() == "loss 2.500   100/100 it   evaluating 40 %"
    assert active.describe(room=25) == "evaluating 40 %"
    session.at(2.0, 100)
    assert "evaluating" not in active.describe() and "eta" in active.describe()


def test_plain_lines_come_at_most_every_thirty_seconds_for_a_run(capsys):
    session = Session(2)
    news = plain_lines(session.progress, lambda: session.now)
    for seconds in range(0, 61, 10):
        session.at(float(seconds), 1, 1)
        for run in session.runs:
            news(run)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0] == "TRAIN   demo/00-r0 s1   loss 2.500   1/100 it   eta 01:01"


@pytest.mark.parametrize(
    ("columns", "label", "has_speed"),
    [
        (60, "study/00-a s1", False),
        (80, "study/00-a s1", True),
        (80, "ratio/12-ra-mla-golden-mech s1", False),
        (132, "ratio/12-ra-mla-golden-mech s1", True),
    ],
)
def test_every_run_is_one_line_of_a_terminal(monkeypatch, columns, label, has_speed):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(Run, "label", label)
    session = Session(1)
    event = {"loss": 2.5, "iterations": 10400, "tokens_per_second": 123456.0, "eta_seconds": 5000}
    session.progress.active[label].update(
        {"progress": 0.5, "first_progress": 0.0, "iteration": 10390, **event}
    )
    console = Console(file=io.StringIO(), width=columns)
    console.print(live_table(session.progress, columns))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= columns
    assert label in lines[0] and lines[0].rstrip().endswith("eta 1:23:20")
    assert ("tok/s" in lines[0]) == has_speed
