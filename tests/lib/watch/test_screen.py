"""The lines of ``make watch``, from the files of a run."""

import json

import pytest
from rich.console import Console

from lib.plan.run import PlannedRun, RunVariant
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from lib.tracking.watch import RunLine, collect_lines, lines_to_table
from tests.lib.fabricated import write_run
from tests.lib.watch.test_rules import OPTIONS


def test_the_newest_of_each_figure_is_shown_whichever_heartbeat_has_it(tmp_path) -> None:
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
    (line,) = collect_lines(
        [PlannedRun("demo", RunVariant("base"), 1, None, path)], OPTIONS, now=4.0
    )
    assert (line.tokens_per_second, line.eta_seconds, line.iteration) == (200.0, 8.0, 20)
    assert line.memory_mib == 7.0 and line.alarms.keys() == {"gate-entropy"}


@pytest.mark.parametrize(("width", "left_out"), [(200, []), (80, ["MiB"]), (60, ["MiB", "tok/s"])])
def test_a_narrow_terminal_still_shows_the_run_and_its_alarms(
    width: int, left_out: list[str]
) -> None:
    name = "ratio/07-ra-golden-mech s1"
    line = RunLine(
        name, "running", 200, 10400, 2.5, 2.4, 1500.0, 500.0, 400.0, [3.0] * 24, {"stall": "x"}
    )
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(lines_to_table([line], width))
    headings, row = captured.get().splitlines()
    assert [name for name in ("MiB", "tok/s") if name not in headings] == left_out
    assert row.startswith(f"{line.run} ") and "200/10,400" in row and "stall: x" in row
