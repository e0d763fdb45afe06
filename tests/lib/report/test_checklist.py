"""Rows of the checklist that repeat what the study's table says."""

import json

import pytest

from lib.files import write_json
from lib.report.checklist import word_rows
from lib.report.columns import write_tables
from lib.report.study import read_study
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import seal
from tests.lib.report.documents import document_of

SPIKED = (5.5, 5.0, 4.5, 4.0, 3.5, 3.2, 7.9, 3.1)


@pytest.fixture
def runs(make_study):
    """Return two steps with four seeds, of which the second is better by 0.1."""
    return make_study({"base": [3.01, 3.02, 3.03, 3.04], "wide": [2.91, 2.921, 2.93, 2.942]})


@pytest.fixture
def rows(tmp_path):
    """Return a function that returns the rows by name: verdict and reason."""

    def found(runs, *, written=True, arms=""):
        document = document_of(read_study("demo", runs))
        if written:
            write_tables(document, tmp_path)
        names = {run.path.name for run in runs if not arms or run.variant.slug == arms}
        return {r.check: (r.verdict, r.what) for r in word_rows(document, names, tmp_path)}

    return found


def test_a_study_with_words_passes(runs, rows):
    assert rows(runs) == {
        "stability": ("PASS", "no jump of loss or gradient"),
        "divergence": ("PASS", "no seed diverged"),
        "verdicts": ("PASS", "1 BETTER"),
        "A/A step": ("PASS", "no run of one"),
        "document": ("PASS", "verdicts.json is about these runs"),
    }


def test_unstable_and_diverged_runs_are_named_if_they_are_published(runs, rows, make_run):
    for seed in (1, 3):
        make_run("base", 3.0, seed=seed, losses=SPIKED)
    make_run("wide", 19.95, seed=1, number=1)
    shown = rows(runs)
    unstable = "demo/00-base s1 is unstable; demo/00-base s3 is unstable"
    assert shown["stability"] == ("FAIL", unstable)
    assert shown["divergence"] == ("FAIL", "demo/01-wide s1 diverged")
    base, wide = rows(runs, arms="base"), rows(runs, arms="wide")
    assert (base["stability"][0], base["divergence"][0]) == ("FAIL", "PASS")
    assert (wide["stability"][0], wide["divergence"][0]) == ("PASS", "FAIL")
    assert base["verdicts"] == ("PASS", "no comparison")


@pytest.mark.parametrize(
    ("losses", "changes", "verdict", "what"),
    [
        ([2.91, 2.921], {}, "UNKNOWN", "no word, 2 of at least 3 seeds"),
        ([2.91, 3.12, 2.93, 3.14], {}, "UNKNOWN", "INCONCLUSIVE"),
        ([2.91, 2.921, 2.93], {"origin__torch": "2.12.0"}, "FAIL", "UNFAIR, torch"),
    ],
)
def test_a_comparison_without_a_word_does_not_pass(
    make_study, make_run, rows, losses, changes, verdict, what
):
    runs = make_study({"base": [3.01, 3.02, 3.03, 3.04][: len(losses)], "wide": losses})
    make_run("wide", losses[0], seed=1, parent="base", number=1, manifest=changes)
    found, said = rows(runs)["verdicts"]
    assert found == verdict and said.startswith(f"wide vs base: {what}")


@pytest.mark.parametrize(
    ("words", "failed", "verdict", "what"),
    [
        (["BETTER"], True, "FAIL", "base-aa vs base: BETTER"),
        (["INCONCLUSIVE"], False, "PASS", "no effect where there is none"),
        ([], True, "FAIL", "an A/A step failed at an earlier look"),
        ([None], False, "UNKNOWN", "base-aa vs base: no word"),
    ],
)
def test_an_aa_step_passes_without_an_effect(runs, tmp_path, words, failed, verdict, what):
    document = document_of(read_study("demo", runs))
    step = {**document["verdicts"][0], "name": "base-aa vs base"}
    document |= {"aa_steps": [{**step, "verdict": word} for word in words], "aa_failed": failed}
    checked = word_rows(document, {run.path.name for run in runs}, tmp_path)
    (row,) = (row for row in checked if row.check == "A/A step")
    assert (row.verdict, row.what) == (verdict, what)
    # What to do.
    assert ("make SEEDS=5-8" in row.next and "by chance" in row.next) is (verdict != "PASS")


def test_a_document_about_other_runs_does_not_pass(runs, rows):
    verdict, what = rows(runs, written=False)["document"]
    assert verdict == "UNKNOWN" and "verdicts.json: " in what
    assert rows(runs)["document"][0] == "PASS"
    # A second training changes the id of the run.
    run = RunDir(runs[0].path)
    record = json.loads(run.manifest.read_text(encoding="utf-8"))
    seal(run, {**{k: v for k, v in record.items() if k != "artifacts"}, "run": {"run_id": "2"}})
    other = ("FAIL", "demo/00-base s1: another result in verdicts.json")
    assert rows(runs, written=False)["document"] == other
    assert rows(runs)["document"][0] == "PASS"
    write_status(RunDir(runs[4].path), RunStatus(State.FAILED, 1, "a full disk"))
    verdict, what = rows(runs, written=False)["document"]
    assert verdict == "FAIL" and f"rests on {runs[4].path.name}, which has no result" in what
    assert "wide vs base: another result in verdicts.json" in what


@pytest.mark.parametrize(
    "damage",
    [
        {"schema_version": 3},
        {"runs": {"a": 1}, "verdicts": 7},
        {"runs": [None, 5, {"folder": 3}, []]},
        [],
    ],
)
def test_a_damaged_or_older_document_does_not_pass(damage, runs, rows, tmp_path):
    rows(runs)
    file = tmp_path / "verdicts.json"
    write_json(file, damage and json.loads(file.read_text(encoding="utf-8")) | damage)
    assert rows(runs, written=False)["document"][0] in ("UNKNOWN", "FAIL")
