"""Speed, memory and utilisation of each table row, from telemetry beside the runs.

All figures of a whole record are in test_columns.py.
"""

import json
from dataclasses import asdict

from lib.report.columns import to_markdown
from lib.report.render import TableSection
from lib.report.run_results import run_utilisation
from lib.report.study import read_study
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, seal
from tests.lib.report.documents import document_of
from tests.lib.report.test_columns import sample


def beside(run, *samples):
    files = RunDir(run.path)
    files.telemetry.write_text("".join(json.dumps(s) + "\n" for s in samples))
    seal(files, MANIFEST)


def on_two(first, used):
    """Return the sample with a second GPU."""
    second = {**first["gpus"][0], "index": 1, "memory_used_mib": used and used * 1024}
    return {**first, "gpus": [*first["gpus"], second]}


def test_a_card_that_lacks_a_counter_has_the_other_figures(make_study):
    base, wide = runs = make_study({"base": [3.0], "wide": [2.9]})
    start = on_two(sample(0.0, 90.0, 0.0, 0.1, 0.0), 0.0)
    later = on_two(sample(10.0, 90.0, 8.0, 1.0, 20.0), 8.0)
    beside(base, start, later, on_two(sample(20.0, 90.0, 24.0, 1.0, 40.0), 8.0))
    beside(wide, start, on_two(sample(10.0, 90.0, 40.0, 2.0, 20.0), None))
    document = document_of(read_study("demo", runs))
    whole, lacking = (row["machine"] for row in document["rows"])
    # The sum over both GPUs: 24 and 8.
    assert whole["gpu/memory_used_peak_gb"] == 32.0 and whole["process/cpu_cores"] == 2.0
    # One sample, and no peak that is known.
    assert whole.keys() - lacking.keys() == {"gpu/memory_used_peak_gb", "process/cpu_cores"}
    assert "-" in to_markdown(document).partition("## Machine")[2].splitlines()[5]


def test_speed_stands_once_in_a_table(make_run):
    run = make_run("base", 3.0)
    beside(run, sample(0.0, 0.0, 0.0, 0.1, 0.0), sample(9.0, 0.0, 0.0, 1.0, 1.0))
    speed = TableSection("Speed", ("run", "tok/s"), [("base s1", "34")], "")
    document = document_of(read_study("demo", [run]), sections=[asdict(speed)])
    before, _, machine = to_markdown(document).partition("## Machine")
    assert "tok/s" in before and "tok/s" not in machine and "RSS GB, peak" in machine
    assert document["rows"][0]["machine"]["tokens_per_second"] == 33.6


def test_without_samples_the_speed_is_known_and_damage_costs_no_figure_of_another_file(make_run):
    run = make_run("base", 3.0)
    machine = to_markdown(document_of(read_study("demo", [run]))).partition("## Machine")[2]
    assert machine.split("\n")[2:5:2] == ["| run  | tok/s |", "| base |    34 |"]
    files = RunDir(run.path)
    files.timing.write_text(json.dumps({**json.loads(files.timing.read_text()), "mfu": 0.4}) + "\n")
    files.telemetry.write_text('{"ts": 1, "rss_{"ts": 2}\n{"ts": 3}\n')
    seal(files, MANIFEST)
    figures, damage = run_utilisation(RunRecord(files))
    assert figures == {"tokens_per_second": 33.6, "mfu": 0.4}
    assert damage.startswith("telemetry.jsonl:1: ")
    document = document_of(read_study("demo", [run]))
    assert document["rows"][0]["state"] == "done"
    assert document["notes"][-1].startswith(f"{run.label}: {damage}")
