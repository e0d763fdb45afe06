"""Alarm rules, the lines of a screen, and the live screen on a pseudo-terminal."""

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lib.runs.rows import HeartbeatRow, TrainRow
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from lib.tracking import watch
from lib.tracking.stability import UnstableStep
from lib.tracking.watch import (
    BLOCKS,
    RunLine,
    WatchedRecords,
    WatchedRuns,
    lines_to_table,
    raised_alarms,
    sparkline,
)
from tests.lib.fabricated import write_run

NOW = 10_000.0
STALL = 180


def train_row(loss, norm):
    return TrainRow(iteration=1, tokens=8, loss=loss, lr=0.1, grad_norm=norm)


def healthy(**changes):
    """Return twelve heartbeats of a running run, the newest ten seconds old, with a falling loss."""
    beats = [
        HeartbeatRow(
            ts=NOW - 10 * (12 - i),
            step=i,
            toks_per_s=(100.0 if i < 2 else 1000.0) + i,
            mem_reserved_mib=4000.0 if i else 500.0,
            fallbacks=1,
            gate_entropy=0.9,
            gate_max=0.5,
        )
        for i in range(12)
    ]
    train = [train_row(5.0 - 0.01 * i, 0.4) for i in range(40)]
    facts = {
        "status": RunStatus(State.RUNNING, 0, "", 40, 100),
        "now": NOW,
        "heartbeats": {0: beats, 1: [*beats]},
        "train": train,
        "evals": [],
    }
    return WatchedRecords(**(facts | changes))


def beating(rank, change):
    """Return a healthy run but for the heartbeats of one rank."""
    facts = healthy()
    beats = facts.heartbeats[rank]
    beats[:] = [change(i, beat) for i, beat in enumerate(beats)]
    return facts


def with_newest(**changes):
    return beating(0, lambda i, beat: replace(beat, **changes) if i == 11 else beat)


FLAT = healthy(train=[train_row(3.0 + 0.001 * (i % 2), 1.0) for i in range(50)])
# Rule → facts that trigger it, and values that its text must contain.
CASES = {
    "stall": (beating(1, lambda i, beat: replace(beat, ts=beat.ts - 200)), ["rank 1", "03:30"]),
    "zero-throughput": (with_newest(toks_per_s=0.0), ["0 tokens per second"]),
    "plateau": (FLAT, ["3.0005", "25 iterations"]),
    "unstable": (
        healthy(unstable=[UnstableStep(17, 6.9, "loss 3.100 to 6.900")]),
        ["it 17", "6.900"],
    ),
    "throughput": (with_newest(toks_per_s=850.0), ["850 tok/s", "-15 %", "1,006"]),
    "memory-creep": (
        beating(1, lambda i, beat: replace(beat, mem_reserved_mib=4000.0 + 100 * i)),
        ["rank 1", "5,000 MiB", "4,400"],
    ),
    "zero-gradient": (
        healthy(train=[train_row(5.0, 1.0), train_row(5.0, 0.0)]),
        ["gradient", "0"],
    ),
    "fallbacks": (with_newest(fallbacks=7), ["7 fallbacks", "1 "]),
    "gate-entropy": (with_newest(gate_entropy=0.31), ["0.310 nats", "0.5"]),
    "gate-max": (with_newest(gate_max=0.95), ["0.950", "0.9"]),
}


OVER = RunStatus(State.SUCCESS, 0, "", 100, 100)


@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_nothing_else_does(name):
    facts, expected = CASES[name]
    texts = raised_alarms(facts, STALL)
    assert list(texts) == [name]
    assert all(value in texts[name] for value in expected)


@pytest.mark.parametrize(
    "facts",
    [
        healthy(),
        # A plateau scales with the length of the run, and a run that is over has no alarm of its end.
        replace(FLAT, status=RunStatus(State.RUNNING, 0, "", 50, 10_000)),
        *(replace(CASES[name][0], status=OVER) for name in ("stall", "throughput")),
        healthy(status=None, heartbeats={}, train=[]),
    ],
    ids=["healthy", "long", "over", "over and slow", "empty"],
)
def test_no_alarm(facts):
    assert raised_alarms(facts, STALL) == {}


def planned(path):
    return Run("demo", RunVariant("base"), 1, None, path)


def test_the_files_of_a_run_that_has_ended_are_read_once(tmp_path, monkeypatch):
    run = write_run(tmp_path / "base-s1-00000000", losses=(3.0, 2.0))
    watched = WatchedRuns([planned(run.path)], STALL)
    (line,) = watched.lines(now=4.0)
    with monkeypatch.context() as patch:
        patch.setattr("lib.tracking.watch.read_watched_records", None)
        assert line.loss == 2.0 and watched.lines(now=5.0) == [line]
    run.metrics.write_text("")
    # Continued, such as after an interruption.
    write_status(run, RunStatus(State.RUNNING, 0, "", 1, 100))
    assert watched.lines(now=6.0)[0].loss is None


@pytest.mark.parametrize(
    ("name", "damage"), [("metrics.jsonl", "[" * 100_000 + "\n"), ("status.json", None)]
)
def test_a_damaged_run_is_one_line_and_the_others_are_shown(tmp_path, name, damage):
    runs = [planned(write_run(tmp_path / slug).path) for slug in ("a", "b")]
    file = runs[0].path / name
    file.unlink()
    if damage:
        file.write_text(damage)
    damaged, intact = WatchedRuns(runs, STALL).lines(9.0)
    assert damaged.state == "damaged" and damaged.loss is None and damaged.eta_seconds is None
    assert damaged.alarms["damaged"].startswith(f"{name}:")
    assert intact.state == "done" and intact.loss is not None and not intact.alarms


def test_the_newest_of_each_figure_is_shown_whichever_heartbeat_has_it(tmp_path):
    path = tmp_path / "base-s1-00000000"
    write_run(path)
    write_status(RunDir(path), RunStatus(State.RUNNING, 0, "", 1, 100))
    beats = [
        {"ts": 1.0, "step": 10, "mem_reserved_mib": 5.0, "toks_per_s": 100.0, "eta_s": 9.0},
        {"ts": 2.0, "step": 20, "mem_reserved_mib": 6.0, "toks_per_s": 200.0, "eta_s": 8.0},
        {"ts": 3.0, "step": 20, "mem_reserved_mib": 7.0, "gate_entropy": 0.1, "eta_s": None},
    ]
    text = "".join(json.dumps(beat) + "\n" for beat in beats)
    RunDir(path).heartbeat(0).write_text(text)
    (line,) = WatchedRuns([planned(path)], STALL).lines(now=4.0)
    assert (line.tokens_per_second, line.eta_seconds, line.iteration) == (200.0, 8.0, 20)
    assert line.memory_mib == 7.0 and line.alarms.keys() == {"gate-entropy"}


def run_line(run, state="running", **changes):
    numbers = {"loss": 2.5, "val_loss": 2.5, "tokens_per_second": 1.2e3, "eta_seconds": 60.0}
    numbers |= {"memory_mib": 300.0, "curve": [2.5], "alarms": {}}
    return RunLine(
        **({"run": run, "state": state, "iteration": 40, "iterations": 120} | numbers | changes)
    )


def screen(line, width, **settings):
    console = Console(width=width, **({"color_system": None} | settings))
    with console.capture() as captured:
        console.print(lines_to_table([line], width))
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("width", "left_out", "curve"),
    [
        (200, [], 24),
        (98, ["MiB"], 12),
        (80, ["MiB", "tok/s", "eta"], 12),
        (60, ["MiB", "tok/s", "eta"], 0),
    ],
)
def test_a_narrow_terminal_still_shows_the_run_and_its_alarms(width, left_out, curve):
    numbers = {"iteration": 200, "iterations": 10400, "curve": [3.0] * 24, "eta_seconds": 500.0}
    line = run_line("ratio/07-ra-golden-mech s1", alarms={"stall": "x"}, **numbers)
    headings, *rows = screen(line, width)
    assert [name for name in ("MiB", "tok/s", "eta") if name not in headings] == left_out
    assert rows[0].startswith(f"{line.run} ") and "200/10,400" in rows[0] and "stall: x" in rows[0]
    assert rows[0].count(BLOCKS[0]) == curve and max(map(len, (headings, *rows))) <= width


def test_health_texts_break_between_words_and_are_shown_as_they_are():
    text = "3,333 tok/s, -75 % from the median 13,332"
    lines = screen(run_line("ratio/17-ract-weights s1", alarms={"throughput": text}), 80)
    assert all(len(line) <= 80 and line.count("13,332") in (0, 1) for line in lines)
    assert any("13,332" in line for line in lines) and any("3,333" in line for line in lines)
    line = run_line("ratio/17 s1", alarms={"damaged": "[red]x[/] [link=file:/]\x1b[2J"})
    rows = screen(line, 132, force_terminal=True, color_system="standard")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(rows))
    assert (
        "[red]x[/]" in shown
        and "[link=file:/]" in shown
        and "\\x1b[2J" in shown
        and "\x1b" not in shown
    )


def test_running_runs_are_first_in_characters_that_the_terminal_has(monkeypatch, capsys):
    monkeypatch.setattr(watch, "_REFRESH_SECONDS", 0)
    monkeypatch.setattr(watch, "is_ascii_only", lambda: True)
    # Every refresh is written, not only the last one.
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    looks = iter(["running", "success"])
    early = run_line("early", "success", curve=[2.0, 1.0])
    watch.watch(lambda: [early, run_line("late", next(looks))])
    shown = capsys.readouterr().out
    assert "@_" in shown and BLOCKS[-1] not in shown
    names = re.findall("early|late", shown)
    assert names[:2] == ["late", "early"] and names[-2:] == ["early", "late"]


def test_the_start_of_a_loss_does_not_flatten_the_rest():
    losses = [9.0, 5.0, 3.0, *(2.8 - 0.1 * i for i in range(13))]
    assert sparkline(losses, "01234567") == "7776555443222110"
