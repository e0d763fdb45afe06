"""Speed, memory and utilisation of each table row, from telemetry beside the runs."""

import json
from dataclasses import asdict
from typing import Any

import pytest

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


def test_memory_and_utilisation_of_each_step(make_run):
    base, wide = make_run("base", 3.0), make_run("wide", 2.9, parent="base")
    first = sample(0.0, 100.0, 0.0, 0.0)
    beside(
        base,
        first,
        sample(10.0, GIB, 8 * GIB, 8 * GIB),
        sample(20.0, 3 * GIB, 24 * GIB, 8 * GIB),
        mfu=(0.1, 0.4, 0.42),
    )
    beside(wide, first, sample(10.0, 2 * GIB, 40 * GIB, None))
    table = read_study("demo", [base, wide])
    expected = {
        "tokens_per_second": 33.6,
        "mfu": 0.4,
        "gpu/compute_util_avg": 90.5,
        # Of 80 GiB: 8, 8, 24 and 8.
        "gpu/memory_util_avg": 15.0,
        "gpu/memory_used_peak_gb": 32.0,
        "process/cpu_cores": 2.0,
        "process/rss_peak_gb": 3.0,
    }
    rows = document_of(table)["rows"]
    assert rows[0]["machine"] == pytest.approx(expected)
    # A card that lacks the counter, one sample, and no peak that is known.
    lacking = {"mfu", "gpu/memory_used_peak_gb", "process/cpu_cores"}
    assert rows[1]["machine"].keys() == expected.keys() - lacking
    text = to_markdown(document_of(table))
    section = text[text.index("## Machine") :].splitlines()
    assert section[2].split("|")[2].strip() == "tok/s" and "RSS GB, peak" in section[2]
    assert [cell.strip() for cell in section[4].split("|")[1:-1]] == [
        *("base", "34", "40.0%", "90", "15", "32.00", "2.00", "3.00")
    ]
    assert "-" in section[5]


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
