"""Series over seeds: means, ranges, and differences between runs of the same seed."""

import json
from dataclasses import replace

import pytest

from lib.report.options import NATS
from lib.report.series import (
    document_differences,
    evaluation_differences,
    final_statistics,
    statistics_curves,
    training_curves,
    training_differences,
)
from lib.report.table import build_table
from lib.runs.documents import to_csv
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, seal


@pytest.fixture
def rows(make_run):
    """A baseline with the seeds 1 and 2, a step with the seeds 2 and 3, and a run apart."""

    def write(run, losses, statistics=(), manifest=MANIFEST):
        lines = []
        for i, loss in enumerate(losses, 1):
            at = {"iteration": i, "tokens": 60 * i}
            lines.append({"kind": "train", **at, "lr": 0.1, "loss": loss, "grad_norm": 1.0})
            lines.append({"kind": "eval", **at, "val_loss": loss + 1, "sparsity": 0.0})
        for i, values in enumerate(statistics, 1):
            lines.append({"kind": "statistics", "iteration": i, "tokens": i, "values": values})
        directory = RunDir(run.path)
        directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        seal(directory, manifest)
        return run

    def planned():
        size = {"tokens": 120}
        first = {"gate": [0.0, 1.0, None], "top_max": [1.0]}
        last = {"gate": [0.5, 1.0, None], "top_max": [2.0, 4.0]}
        runs = [
            write(make_run("base", 3.0, seed=1, **size), [9.0, 7.0]),
            write(make_run("base", 3.1, seed=2, **size), [8.0, 6.0]),
            write(make_run("wide", 2.9, seed=3, parent="base", **size), [5.0, 5.0], [first, last]),
            write(make_run("wide", 2.8, seed=2, parent="base", **size), [7.0, 4.0], [last]),
        ]
        other = changed(MANIFEST, origin__torch="2.12.0")
        return [*runs, write(make_run("base", 4.0, seed=3, **size), [2.0, 2.0], manifest=other)]

    return build_table("demo", planned(), label_by=["torch"]).runs


def test_rows_have_the_baseline_of_their_own_part(rows):
    assert [row.name for row in rows] == ["2.13.0:base", "2.13.0:wide", "2.12.0:base"]
    assert [list(row.losses) for row in rows] == [[1, 2], [2, 3], [3]]
    assert [row.baseline and len(row.baseline.records) for row in rows] == [None, 2, None]
    assert [(a.planned.seed, b.planned.seed) for a, b in rows[1].pairs] == [(2, 2)]


def test_curves_are_means_and_ranges_over_seeds(rows):
    base, wide, apart = training_curves(rows)
    assert (base["at"], base["mean"], base["low"], base["high"]) == (
        [60, 120],
        [8.5, 6.5],
        [8, 6],
        [9, 7],
    )
    assert (wide["low"], wide["high"]) == ([5, 4], [7, 5]) and apart["mean"] == [2, 2]


def test_differences_are_those_of_equal_seeds(rows):
    none, wide, lone = training_differences(rows, NATS)
    assert none is None and lone is None
    assert (wide["at"], wide["mean"]) == ([60, 120], [-1.0, -2.0])
    assert evaluation_differences(rows, NATS)[1]["mean"] == [-1.0, -2.0]


def test_statistics_are_reduced_over_layers_and_seeds(rows):
    assert final_statistics(rows[1]) == {"gate": [0.5, 1.0, None], "top_max": [2.0, 4.0]}
    curves = statistics_curves(rows[1])
    # Both seeds have the first iteration only.
    assert curves["gate"]["at"] == [1] and curves["gate"]["mean"] == [pytest.approx(0.625)]
    assert curves["top_max"]["mean"] == [2.5] and curves["top_max"]["high"] == [4.0]
    assert final_statistics(rows[0]) == statistics_curves(rows[0]) == {}


def test_documents_are_compared_by_name(make_run):
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    rows = build_table("demo", runs).runs
    assert document_differences(rows[0], NATS) == []
    assert document_differences(rows[1], NATS) == [["x", 0.0], ["y", 0.0]]


def test_documents_of_one_name_are_compared_by_their_place(make_run):
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    for run, losses in zip(runs, ((2.0, 8.0), (3.0, 6.0)), strict=True):
        directory = RunDir(run.path)
        first, second = RunRecord(directory).documents
        rows = [replace(first, nll_sum=losses[0]), replace(second, item_id="x", nll_sum=losses[1])]
        directory.per_query.write_text(to_csv(rows))
        seal(directory, MANIFEST)
    _, wide = build_table("demo", runs).runs
    first, second = RunRecord(RunDir(runs[0].path)).documents
    gaps = [("x", 1.0 / first.n_tokens), ("x", -2.0 / second.n_tokens)]
    assert document_differences(wide, NATS) == [[n, pytest.approx(gap)] for n, gap in gaps]
