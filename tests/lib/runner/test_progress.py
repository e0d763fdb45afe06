"""Pace, time left, and frequency of plain lines, with a fake clock."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lib.runner.display import PlainLines, SessionProgress, live_table
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunStatus, State


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Clock:
    return Clock()


def _runs(count):
    config = SimpleNamespace(hash8="f")
    return [
        Run("demo", RunVariant(f"r{i}", number=i), 1, config, Path(f"r{i}")) for i in range(count)
    ]


def _at(iteration):
    news = {"progress": iteration / 100, "iteration": iteration, "iterations": 100}
    return {**news, "loss": 2.5, "eta_seconds": 61}


def test_time_left_follows_from_the_pace_of_this_session(now):
    runs = _runs(4)
    progress = SessionProgress(runs, now)
    assert progress.seconds_left() is None
    progress.begin(runs[0])
    progress.begin(runs[1])
    now.seconds = 10.0
    progress.active[runs[0].label].update(_at(0))
    progress.active[runs[1].label].update(_at(0))
    now.seconds = 30.0
    progress.active[runs[0].label].update(_at(50))
    progress.active[runs[1].label].update(_at(25))
    # Three quarters of a run took 30 seconds; 3.25 runs are left.
    assert progress.seconds_left() == pytest.approx(30 / 0.75 * 3.25)
    progress.end(runs[0], RunStatus(State.SUCCESS))
    assert progress.describe().startswith("1/4, eta ")


def test_between_two_steps_the_work_is_named(now):
    """At 100 % of its steps, a run is still evaluated and writes a sample."""
    (run,) = _runs(1)
    progress = SessionProgress([run], now)
    progress.begin(run)
    active = progress.active[run.label]
    active.update(_at(100))
    active.doing = "evaluating 40 %"
    assert active.describe() == "loss 2.500   100/100 it   evaluating 40 %"
    assert active.describe(room=25) == "evaluating 40 %"
    active.update(_at(100))
    assert "evaluating" not in active.describe() and "eta" in active.describe()


def test_what_an_earlier_session_did_is_no_pace(now):
    runs = _runs(1)
    progress = SessionProgress(runs, now)
    progress.begin(runs[0])
    progress.active[runs[0].label].update({**_at(80), "eta_seconds": None})
    now.seconds = 10.0
    progress.active[runs[0].label].update({**_at(90), "eta_seconds": None})
    assert progress.seconds_left() == pytest.approx(10.0)


def test_one_estimate_is_printed_if_no_run_waits(now):
    """After a resume, the pace of this session has its start-up, and a run's own estimate has not."""
    runs = _runs(2)
    progress = SessionProgress(runs, now)
    for run in runs:
        progress.begin(run)
    now.seconds = 10.0
    progress.active[runs[0].label].update({**_at(80), "eta_seconds": 61})
    progress.active[runs[1].label].update({**_at(90), "eta_seconds": 20})
    assert progress.describe() == "0/2, eta 01:01"
    progress.end(runs[0], RunStatus(State.SUCCESS))
    assert progress.describe() == "1/2" and progress.seconds_left() == 20


def test_an_interrupted_run_is_not_done(now):
    runs = _runs(3)
    progress = SessionProgress(runs, now)
    for run, state in zip(runs, (State.SUCCESS, State.INTERRUPTED), strict=False):
        progress.begin(run)
        progress.end(run, RunStatus(state))
    assert progress.describe().startswith("1/3, eta ")


def test_failed_runs_are_counted(now):
    runs = _runs(2)
    progress = SessionProgress(runs, now)
    progress.begin(runs[0])
    progress.end(runs[0], RunStatus(State.FAILED))
    assert progress.describe().startswith("0/2, 1 failed")


def test_plain_lines_come_at_most_every_thirty_seconds_for_a_run(now, capsys):
    runs = _runs(2)
    progress = SessionProgress(runs, now)
    display = PlainLines(progress, now)
    for run in runs:
        progress.begin(run)
        progress.active[run.label].update(_at(1))
    for seconds in range(0, 61, 10):
        now.seconds = float(seconds)
        for run in runs:
            display.news(run)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0] == "TRAIN   demo/00-r0 s1   loss 2.500   1/100 it   eta 01:01"


@pytest.mark.parametrize("columns", [60, 80, 132])
@pytest.mark.parametrize("label", ["study/00-a s1", "ratio/12-ra-mla-golden-mech s1"])
def test_every_run_is_one_line_of_a_terminal(now, monkeypatch, columns, label):
    monkeypatch.setenv("COLUMNS", str(columns))
    (run,) = _runs(1)
    monkeypatch.setattr(type(run), "label", label)
    progress = SessionProgress([run], now)
    progress.begin(run)
    event = {"loss": 2.5, "iterations": 10400, "tokens_per_second": 123456.0, "eta_seconds": 5000}
    progress.active[label].update({**_at(50), **event, "iteration": 10390})
    console = Console(file=io.StringIO(), width=columns)
    console.print(live_table(progress, columns))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= columns
    assert label in lines[0] and lines[0].rstrip().endswith("eta 1:23:20")
    assert ("tok/s" in lines[0]) == (
        columns == 132 or (columns == 80 and label.startswith("study"))
    )
