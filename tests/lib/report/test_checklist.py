"""Rows of the checklist that repeat what the study's table says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.files import write_json
from lib.report.checklist import word_rows
from lib.report.columns import write_tables
from lib.report.study import read_study
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import seal
from tests.lib.report.documents import document_of

SPIKED = (5.5, 5.0, 4.5, 4.0, 3.5, 3.2, 7.9, 3.1)
Rows = Callable[..., dict[str, tuple[str, str]]]


@pytest.fixture
def runs(make_study: Any) -> list[Run[Any]]:
    """Return two steps with four seeds, of which the second is better by 0.1."""
    return make_study({"base": [3.01, 3.02, 3.03, 3.04], "wide": [2.91, 2.921, 2.93, 2.942]})


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Return a function that returns the rows by name: verdict and reason."""

    def found(
        runs: list[Run[Any]], *, written: bool = True, **changes: Any
    ) -> dict[str, tuple[str, str]]:
        document = {**document_of(read_study("demo", runs)), **changes}
        if written:
            write_tables(document, tmp_path)
        names = {run.path.name for run in runs}
        return {r.check: (r.verdict, r.what) for r in word_rows(document, names, tmp_path)}

    return found


def test_a_study_with_words_passes(runs: list[Run[Any]], rows: Rows) -> None:
    assert rows(runs) == {
        "stability": ("PASS", "no jump of loss or gradient"),
        "divergence": ("PASS", "no seed diverged"),
        "verdicts": ("PASS", "1 BETTER"),
        "A/A step": ("PASS", "no run of one"),
        "document": ("PASS", "verdicts.json is about these runs"),
    }


def test_unstable_and_diverged_runs_are_named(
    runs: list[Run[Any]], rows: Rows, make_run: Any
) -> None:
    for i in (0, 2):
        make_run("base", 3.0, seed=i + 1, losses=SPIKED)
    make_run("wide", 19.95, seed=1, number=1)
    shown = rows(runs)
    unstable = "demo/00-base s1 is unstable; demo/00-base s3 is unstable"
    assert shown["stability"] == ("FAIL", unstable)
    assert shown["divergence"] == ("FAIL", "demo/01-wide s1 diverged")


def test_a_comparison_without_a_word_does_not_pass(
    runs: list[Run[Any]], rows: Rows, make_run: Any
) -> None:
    few = [run for run in runs if run.seed < 3]
    assert rows(few)["verdicts"] == ("UNKNOWN", "wide vs base: no word, 2 of at least 3 seeds")
    for seed in range(1, 5):
        make_run("wide", 3.0 + seed / 100 + (-1) ** seed / 10, seed=seed, number=1)
    verdict, what = rows(runs)["verdicts"]
    assert verdict == "UNKNOWN" and what.startswith("wide vs base: INCONCLUSIVE")
    make_run("wide", 2.9, seed=1, number=1, manifest={"origin__torch": "2.12.0"})
    verdict, what = rows(runs)["verdicts"]
    assert (verdict, what) == ("FAIL", "wide vs base: UNFAIR, torch")


def test_a_failed_aa_step_says_what_to_do(runs: list[Run[Any]], tmp_path: Path) -> None:
    document = document_of(read_study("demo", runs))
    step = {**document["verdicts"][0], "name": "base-aa vs base"}
    for word, failed in (("BETTER", True), ("WORSE", True), ("INCONCLUSIVE", False)):
        changed = {**document, "aa_steps": [{**step, "verdict": word}], "aa_failed": failed}
        names = {run.path.name for run in runs}
        (row,) = (r for r in word_rows(changed, names, tmp_path) if r.check == "A/A step")
        assert row.verdict == ("FAIL" if failed else "PASS")
        assert (f"base-aa vs base: {word}" == row.what) == failed
        assert ("make SEEDS=5-8" in row.next and "by chance" in row.next) == failed
    changed = {**document, "aa_failed": True}
    (row,) = (r for r in word_rows(changed, names, tmp_path) if r.check == "A/A step")
    assert row.what == "an A/A step failed at an earlier look"
    changed = {**document, "aa_steps": [{**step, "verdict": None}]}
    (row,) = (r for r in word_rows(changed, names, tmp_path) if r.check == "A/A step")
    assert (row.verdict, row.what) == ("UNKNOWN", "base-aa vs base: no word")


def test_only_the_runs_to_publish_are_judged(
    runs: list[Run[Any]], tmp_path: Path, make_run: Any
) -> None:
    make_run("wide", 3.0, seed=1, number=1, losses=SPIKED)
    document = document_of(read_study("demo", runs))
    for arms, unstable, words in (({"base", "wide"}, "FAIL", 1), ({"base"}, "PASS", 0)):
        names = {run.path.name for run in runs if run.variant.slug in arms}
        rows = {row.check: row for row in word_rows(document, names, tmp_path)}
        assert rows["stability"].verdict == unstable
        assert (rows["verdicts"].what != "no comparison") == words


def trained_again(run: RunDir) -> None:
    """Change what a second training changes: the id of the run."""
    record = json.loads(run.manifest.read_text(encoding="utf-8"))
    seal(run, {**{k: v for k, v in record.items() if k != "artifacts"}, "run": {"run_id": "2"}})


def test_a_document_about_other_runs_does_not_pass(
    runs: list[Run[Any]], rows: Rows, tmp_path: Path, make_run: Any
) -> None:
    verdict, what = rows(runs, written=False)["document"]
    assert verdict == "UNKNOWN" and "verdicts.json: " in what
    assert rows(runs)["document"][0] == "PASS"
    trained_again(RunDir(runs[0].path))
    assert rows(runs, written=False)["document"] == (
        "FAIL",
        "demo/00-base s1: another result in verdicts.json",
    )
    assert rows(runs)["document"][0] == "PASS"
    write_status(RunDir(runs[4].path), RunStatus(State.FAILED, 1, "a full disk"))
    verdict, what = rows(runs, written=False)["document"]
    name = runs[4].path.name
    assert verdict == "FAIL" and f"rests on {name}, which has no result" in what
    assert "wide vs base: another result in verdicts.json" in what


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: {**document, "schema_version": 3},
        lambda document: {**document, "runs": {"a": 1}, "verdicts": 7},
        lambda document: {**document, "runs": [None, 5, {"folder": 3}, []]},
        lambda document: [document],
    ],
)
def test_a_damaged_or_older_document_does_not_pass(
    damage: Callable[[Any], Any], runs: list[Run[Any]], rows: Rows, tmp_path: Path
) -> None:
    rows(runs)
    file = tmp_path / "verdicts.json"
    write_json(file, damage(json.loads(file.read_text(encoding="utf-8"))))
    assert rows(runs, written=False)["document"][0] in ("UNKNOWN", "FAIL")
