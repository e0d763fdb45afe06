"""The table's arithmetic, and what it refuses to put side by side."""

import csv
import io
import json
import math

import pytest

from lib.analysis.report import to_csv, to_json, to_markdown, write_table
from lib.analysis.table import build_table
from lib.rundir import RunDir
from lib.status import State, Status, write_status
from tests.lib.analysis.conftest import seal


def _row(table, slug):
    return next(row for row in table.rows if row.variant.slug == slug)


def test_differences_are_to_the_baseline_and_to_the_parent(make_run):
    runs = [
        make_run("base", 3.0),
        make_run("wide", 2.9, parent="base", number=1),
        make_run("wide-gate", 2.95, parent="wide", number=2),
    ]
    table = build_table("demo", runs)
    base, gate = _row(table, "base"), _row(table, "wide-gate")
    assert base.delta_baseline is None and base.delta_parent is None
    assert gate.delta_baseline.mean == pytest.approx(-0.05)
    assert gate.delta_parent.mean == pytest.approx(0.05)
    assert gate.perplexity == pytest.approx(math.exp(2.95))
    assert table.unigram_entropy == 3.145


def test_one_seed_is_marked_and_has_no_spread(make_run):
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    text = to_markdown(build_table("demo", runs))
    assert "-0.1000 n=1" in text and "±" not in text and "p=" not in text and "p:" not in text
    assert "one seed tells nothing of the spread" in text


def test_several_seeds_give_mean_spread_and_number_of_paired_differences(make_run):
    losses = {1: (3.0, 2.8), 2: (3.2, 3.1), 3: (3.1, 2.7)}
    runs = [make_run("base", base, seed=s) for s, (base, _) in losses.items()]
    runs += [make_run("wide", wide, seed=s, parent="base") for s, (_, wide) in losses.items()]
    table = build_table("demo", runs)
    wide = _row(table, "wide")
    assert wide.val_loss.mean == pytest.approx(8.6 / 3)
    # Differences -0.2, -0.1, -0.4: their own spread, not that of the losses.
    assert wide.delta_baseline.mean == pytest.approx(-0.7 / 3)
    assert wide.delta_baseline.sd == pytest.approx(0.152753, abs=1e-6)
    text = to_markdown(table)
    # Three of the same sign: one pattern of four is as extreme.
    assert "-0.2333 ± 0.1528 n=3 p=0.25" in text and "one seed" not in text
    assert "0.25 at n=3; six seeds reach 0.031" in text
    _, row = csv.DictReader(io.StringIO(to_csv(table)))
    assert float(row["delta_baseline_p"]) == 0.25


def test_a_seed_that_one_side_lacks_does_not_count_in_the_difference(make_run):
    runs = [make_run("base", 3.0), make_run("base", seed=2)]
    runs += [make_run("wide", 2.9, parent="base"), make_run("wide", 2.0, seed=2, parent="base")]
    table = build_table("demo", runs)
    assert _row(table, "wide").delta_baseline.n == 1
    assert _row(table, "wide").delta_baseline.mean == pytest.approx(-0.1)
    assert _row(table, "base").state == "1 of 2 done, not started"


def test_holes_are_rows_with_their_reason(make_run):
    failed = make_run("wide", 2.9, parent="base")
    write_status(RunDir(failed.path), Status(State.FAILED, 1, "loss is NaN at it 7\nmore"))
    table = build_table("demo", [make_run("base", 3.0), failed, make_run("late", parent="base")])
    assert _row(table, "wide").state == "failed" and _row(table, "wide").val_loss is None
    assert _row(table, "late").state == "not started"
    assert table.notes == ["demo/00-wide s1: failed: loss is NaN at it 7"]


@pytest.mark.parametrize("other", [{"data": "d2"}, {"documents": ("x", "z")}])
def test_runs_on_other_data_are_not_compared(make_run, other):
    runs = [make_run("base", 3.0), make_run("wide", 2.0, parent="base", **other)]
    wide = _row(build_table("demo", runs), "wide")
    assert wide.state == "not comparable" and wide.val_loss is None


def test_a_directory_of_another_configuration_is_not_compared(make_run):
    run = make_run("wide", 2.0, parent="base")
    RunDir(run.path).resolved_config.write_text('{"identity": {"name": "other"}}')
    seal(RunDir(run.path), {"data": {"digest": "d1"}})
    wide = _row(build_table("demo", [make_run("base", 3.0), run]), "wide")
    assert wide.state == "not comparable"


@pytest.mark.parametrize("file", ["summary", "per_query", "metrics", "logs", "manifest"])
def test_a_run_that_breaks_its_contract_is_no_result(make_run, file):
    run = make_run("base", 3.0)
    path = vars(RunDir)[file].fget(RunDir(run.path))
    text = path.read_text()
    path.write_text({"logs": "", "manifest": text.replace("d1", "d2")}.get(file, text + "\n"))
    table = build_table("demo", [run])
    assert table.rows[0].state == "invalid" and table.unigram_entropy is None
    assert path.name in table.notes[0]


def test_a_summary_of_other_fields_is_no_result(make_run):
    run = make_run("base", 3.0)
    RunDir(run.path).summary.write_text('{"final": {}, "timing": {}}')
    seal(RunDir(run.path), {"data": {"digest": "d1"}})
    assert build_table("demo", [run]).rows[0].state == "invalid"


def test_runs_of_other_code_are_marked(make_run):
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    table = build_table("demo", runs, kept=["demo/00-wide s1"])
    assert _row(table, "wide").state == "done, other code" and _row(table, "base").state == "done"
    assert table.notes == ["demo/00-wide s1: made by other code"]


def test_sparsity_is_a_column_where_something_is_pruned(make_run):
    plain = build_table("demo", [make_run("base", 3.0)])
    assert "sparsity" not in to_markdown(plain)
    runs = [make_run("pruned", 3.1, parent="base", sparsity=0.5)]
    assert "50.0%" in to_markdown(build_table("demo", runs))


def test_columns_line_up(make_run):
    runs = [make_run("base", 3.0), make_run("a-much-longer-name", 12.25, parent="base", number=10)]
    grid = [line for line in to_markdown(build_table("demo", runs)).split("\n") if line[:1] == "|"]
    bars = [[i for i, c in enumerate(line) if c == "|"] for line in grid]
    assert len(grid) == 4 and all(found == bars[0] for found in bars)


def test_csv_and_json_hold_the_same_figures(make_run):
    runs = [make_run("base", 3.0), make_run("late", parent="base")]
    table = build_table("demo", runs)
    base, late = csv.DictReader(io.StringIO(to_csv(table)))
    document = json.loads(to_json(table))
    assert float(base["val_loss"]) == document["rows"][0]["val_loss"] == 3.0
    assert late["val_loss"] == "" and document["rows"][1]["val_loss"] is None
    assert document["schema_version"] == 1
    text = to_json(table)
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=2) + "\n"


def test_writes_beside_the_runs(make_run, tmp_path):
    table = build_table("demo", [make_run("base", 3.0)])
    paths = write_table(table, tmp_path)
    assert [path.name for path in paths] == ["table.md", "table.csv"]
    assert paths[0].read_text() == to_markdown(table)
    assert not list(tmp_path.glob(".*.tmp"))
