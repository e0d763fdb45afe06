"""Series over seeds: means and ranges."""

import json

import pytest

from lib.report.plots import study_series
from lib.report.run_results import read_curves
from lib.report.study import finished_of, read_study
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, seal


@pytest.fixture
def table(make_run):
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

    return read_study("demo", planned(), label_by=["torch"])


def test_rows_have_the_baseline_of_their_own_part(table):
    rows = {arm: [run.seed for run in runs] for arm, runs in table.outcomes.items()}
    assert rows == {"2.13.0:base": [1, 2], "2.13.0:wide": [2, 3], "2.12.0:base": [3]}
    assert [table.references(arm)[0] for arm in rows] == ["", "2.13.0:base", ""]


def test_curves_are_means_and_ranges_over_seeds(table):
    base, wide, apart = (row["training"] for row in study_series(table))
    assert (base["at"], base["mean"], base["low"], base["high"]) == (
        [60, 120],
        [8.5, 6.5],
        [8, 6],
        [9, 7],
    )
    assert (wide["low"], wide["high"]) == ([5, 4], [7, 5]) and apart["mean"] == [2, 2]


def test_the_last_statistics_are_reduced_over_layers(table):
    base, wide, _ = map(finished_of, table.outcomes.values())
    # The other seed logged more than one.
    expected = {"gate": 0.75, "top_max": 4.0}
    assert [read_curves(r).last_statistics for r in wide] == [expected, expected]
    assert read_curves(base[0]).last_statistics == {}
