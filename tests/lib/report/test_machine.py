"""Speed, memory and utilisation of each table row, from telemetry beside the runs."""

import json
from dataclasses import asdict
from typing import Any

from lib.report.columns import to_markdown
from lib.report.render import TableSection
from lib.report.run_results import run_utilisation
from lib.report.study import read_study
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, seal
from tests.lib.report.documents import document_of

GIB = 1024.0


def sample(moment: float, rss: float, *gpus: float | None) -> dict[str, Any]:
    """Return one record of telemetry.jsonl: GPUs of 80 GiB with the given memory in use."""
    readings = [
        {
            "index": i,
            "compute_util": 90.0 + i,
            "memory_used_mib": used,
            "memory_total_mib": 80 * GIB,
            "power_watts": None,
            "temperature_celsius": None,
        }
        for i, used in enumerate(gpus)
    ]
    return {"ts": moment, "rss_mib": rss, "cpu_seconds": 2 * moment, "gpus": readings}


def beside(run, *samples: dict[str, Any], mfu: tuple[float | None, ...] = ()) -> None:
    files = RunDir(run.path)
    files.telemetry.write_text("".join(json.dumps(s) + "\n" for s in samples))
    speed = {"iteration": 1, "tokens_per_second": 33.6, "written_at": 1.0}
    files.timing.write_text("".join(json.dumps({**speed, "mfu": m}) + "\n" for m in mfu or [None]))
    seal(files, changed(MANIFEST, data__digest="d1"))


def test_a_card_that_lacks_a_counter_has_the_other_figures(make_run):
    """All figures of a whole record are in test_columns.py."""
    base, wide = make_run("base", 3.0), make_run("wide", 2.9, parent="base")
    first = sample(0.0, 100.0, 0.0, 0.0)
    beside(base, first, sample(10.0, GIB, 8 * GIB, 8 * GIB), sample(20.0, GIB, 24 * GIB, 8 * GIB))
    beside(wide, first, sample(10.0, 2 * GIB, 40 * GIB, None))
    document = document_of(read_study("demo", [base, wide]))
    whole, lacking = (row["machine"] for row in document["rows"])
    # The sum over both GPUs: 24 and 8.
    assert whole["gpu/memory_used_peak_gb"] == 32.0 and whole["process/cpu_cores"] == 2.0
    # One sample, and no peak that is known.
    assert whole.keys() - lacking.keys() == {"gpu/memory_used_peak_gb", "process/cpu_cores"}
    assert "-" in to_markdown(document).partition("## Machine")[2].splitlines()[5]


def test_speed_stands_once_in_a_table(make_run):
    run = make_run("base", 3.0)
    beside(run, sample(0.0, 1.0), sample(9.0, GIB))
    speed = TableSection("Speed", ("run", "tok/s"), [("base s1", "34")], "")
    document = document_of(read_study("demo", [run]), sections=[asdict(speed)])
    before, _, machine = to_markdown(document).partition("## Machine")
    assert "tok/s" in before and "tok/s" not in machine and "RSS GB, peak" in machine
    (row,) = document["rows"]
    assert row["machine"]["tokens_per_second"] == 33.6


def test_without_samples_the_speed_is_known_and_damage_costs_no_table(make_run):
    run = make_run("base", 3.0)
    text = to_markdown(document_of(read_study("demo", [run])))
    assert text.partition("## Machine")[2].split("\n")[2:5:2] == [
        "| run  | tok/s |",
        "| base |    34 |",
    ]
    files = RunDir(run.path)
    assert run_utilisation(RunRecord(files)) == ({"tokens_per_second": 33.6}, "")
    files.telemetry.write_text('{"ts": 1, "rss_{"ts": 2}\n{"ts": 3}\n')
    figures, damage = run_utilisation(RunRecord(files))
    assert figures == {"tokens_per_second": 33.6} and damage.startswith("telemetry.jsonl:1: ")
    table = read_study("demo", [run])
    assert document_of(table)["rows"][0]["state"] == "done" and document_of(table)["notes"][
        -1
    ].startswith(f"{run.label}: {damage}")


def test_damaged_telemetry_costs_no_figure_of_another_file(make_run):
    run = make_run("base", 3.0)
    beside(run, sample(0.0, 100.0), sample(10.0, GIB), mfu=(0.1, 0.4, 0.42))
    files = RunDir(run.path)
    assert run_utilisation(RunRecord(files))[0].keys() >= {"mfu", "process/rss_peak_gb"}
    files.telemetry.write_text("[]\n")
    figures, damage = run_utilisation(RunRecord(files))
    assert figures["mfu"] == 0.4 and "process/rss_peak_gb" not in figures and damage
