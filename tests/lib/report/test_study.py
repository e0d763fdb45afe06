"""The document of a study: plain values, each from the runs behind it."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from lib.report.plots import study_series
from lib.report.study import JudgedStudy, read_study
from lib.runs.run import Run
from tests.lib.report.documents import document_of
from tests.lib.report.fabricated_study import steps, write_study

SEEDS = 3


@pytest.fixture
def runs(tmp_path: Path) -> list[Run[Any]]:
    return write_study(tmp_path, steps(4), SEEDS)


@pytest.fixture
def table(runs: list[Run[Any]]) -> JudgedStudy:
    return read_study("demo", runs)


def recorded_loss(run: Run[Any]) -> float:
    return json.loads((run.path / "summary.json").read_text())["final"]["val_loss"]


def test_the_document_is_json_and_its_references_resolve(table: JudgedStudy) -> None:
    document = document_of(table)
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document
    names = {verdict["name"] for verdict in document["verdicts"]}
    assert names == set(document["family"])
    assert {row["against"]["baseline"] for row in document["rows"][1:]} <= names
    assert document["rows"][0]["against"] == {"baseline": None, "parent": None}
    assert document["rows"][0]["flops_per_token"] == 6.0e6
    assert document["unit"] == "nats per token"


def test_losses_and_differences_of_rows_are_those_of_their_runs(
    table: JudgedStudy, runs: list[Run[Any]]
) -> None:
    document = document_of(table)
    by_name = {(run.variant.slug, run.seed): recorded_loss(run) for run in runs}
    for row in document["rows"]:
        losses = [by_name[row["slug"], seed] for seed in range(1, SEEDS + 1)]
        assert row["val_loss"] == pytest.approx(statistics.fmean(losses), abs=1e-15)
        assert row["val_loss_sd"] == pytest.approx(statistics.stdev(losses), abs=1e-15)
        assert row["perplexity"] == pytest.approx(math.exp(statistics.fmean(losses)))
        assert row["n"] == len(row["runs"]) == SEEDS
    for run in document["runs"]:
        assert run["val_loss"] == by_name[run["variant"], run["seed"]]
        assert run["state"] == "done"


def test_a_run_without_a_result_has_a_reason_and_no_loss(
    runs: list[Run[Any]],
) -> None:
    (runs[-1].path / "summary.json").write_text("{")
    document = document_of(read_study("demo", runs))
    [damaged] = [run for run in document["runs"] if run["state"] != "done"]
    assert (damaged["folder"], damaged["state"]) == (runs[-1].path.name, "damaged")
    assert damaged["val_loss"] is None
    assert "summary.json" in damaged["reason"]


def test_series_have_one_entry_per_row_and_the_points_of_all_seeds(table: JudgedStudy) -> None:
    series = study_series(table)
    assert [each["name"] for each in series] == [row["name"] for row in document_of(table)["rows"]]
    band = series[1]["training"]
    assert len(band["at"]) == len(band["mean"]) > 10
    assert all(
        low <= mean <= high
        for low, mean, high in zip(band["low"], band["mean"], band["high"], strict=True)
    )
