"""Verdicts of a study from its run directories, and their record beside the runs."""

import json
import random
from dataclasses import replace

import pytest

from lib.report.columns import to_markdown, verdicts_to_terminal
from lib.report.contrasts import Contrast
from lib.report.declarations import DECLARATIONS_FILE, VerdictPlan, plans_of, read_declarations
from lib.report.judge import declare, judge
from lib.report.options import LookPlan
from lib.report.plots import study_series
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from lib.report.text import format_p, legend, verdicts_exit_code
from lib.report.verdicts import SeedOutcome, VerdictWord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.report.documents import document_of

BETTER, WORSE, EQUIVALENT, INCONCLUSIVE, UNFAIR, DIVERGED = VerdictWord
BASE = (3.0, 3.25, 2.875, 3.125, 3.0625)
BAND = VerdictPlan(VerdictRule(band=0.05))


@pytest.fixture
def study(make_run):
    """Return a factory of a study of three runs: a baseline, a real step, and one without effect."""

    def make(seeds=5, **changes):
        draw, runs = random.Random(3), []
        for seed, base in enumerate(BASE[:seeds], 1):
            noise = [draw.gauss(0, 0.002) for _ in range(2)]
            runs.append(make_run("base", base, seed=seed, number=0))
            runs.append(make_run("wide", base - 0.1 + noise[0], seed=seed, parent="base", number=1))
            gate = {"seed": seed, "parent": "wide", "number": 2}
            runs.append(make_run("gate", base + noise[1], **gate, **changes))
        return runs

    return make


def words(table):
    return {(v["step"], v["reference"]): v["verdict"] for v in table.judged["verdicts"]}


def test_every_comparison_has_a_verdict(study):
    table = read_study("demo", study(), plan=BAND)
    assert words(table) == {
        ("wide", "base"): BETTER,
        ("gate", "base"): EQUIVALENT,
        ("gate", "wide"): WORSE,
    }
    gate = document_of(table)["rows"][2]
    assert (gate["baseline_verdict"], gate["parent_verdict"]) == (EQUIVALENT, WORSE)
    section = to_markdown(document_of(table)).partition("## Verdicts")[2]
    assert "3 comparisons" in section.replace("\n", " ") and "BETTER" in section
    assert all(len(line) <= 80 for line in section.splitlines() if line.startswith("|"))
    assert verdicts_exit_code(document_of(table)) == 0
    # It is JSON, and its references resolve.
    document = document_of(table)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    names = {verdict["name"] for verdict in document["verdicts"]}
    assert names == set(document["family"])
    assert {row["against"]["baseline"] for row in document["rows"][1:]} <= names
    assert document["rows"][0]["against"] == {"baseline": None, "parent": None}
    assert [series["name"] for series in study_series(table)] == ["base", "wide", "gate"]


def declared(folder, plan=BAND):
    """Return the plan of one look at five seeds, with the declarations of the folder."""
    known = read_declarations(folder)
    return replace(plan, looks=LookPlan.fixed(5), declarations=known, folder=folder)


def test_other_studies_on_the_same_documents_are_counted(study, tmp_path):
    here = tmp_path / "here"
    table = read_study("demo", study(), plan=declared(here))
    evaluation_set = table.evaluation_set
    assert len(evaluation_set) == 64 and "other study" not in " ".join(legend(document_of(table)))
    line = (here / DECLARATIONS_FILE).read_text()
    for name, content in {
        "same": line,
        "damaged": "{\n",
        "elsewhere": line.replace(evaluation_set, "0" * 64),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / DECLARATIONS_FILE).write_text(content)
    table = read_study("demo", study(), plan=declared(here))
    others = ["damaged (unreadable declarations)", "same"]
    assert table.same_documents == others
    assert "2 other studies" in " ".join(legend(document_of(table)))
    # Another configuration in the same folder is another study.
    for arms in plans_of(read_declarations(here))[0].family.values():
        for digest in arms.values():
            line = line.replace(digest, "0" * 16)
    (here / DECLARATIONS_FILE).write_text(line)
    table = read_study("demo", study(), plan=declared(here))
    assert table.same_documents[1] == "here (another configuration)"


def test_runs_without_a_divergence_leave_its_rate_open(study, make_run):
    table = read_study("demo", study(), plan=BAND)
    assert "0 of 5 seeds" in " ".join(legend(document_of(table))) and "45%" in " ".join(
        legend(document_of(table))
    )
    stuck = study()
    write_status(RunDir(stuck[2].path), RunStatus(State.FAILED, 1, "loss is NaN at it 7"))
    assert "0 of" not in " ".join(legend(document_of(read_study("demo", stuck, plan=BAND))))


def test_a_failed_or_foreign_run_changes_the_word_and_not_the_family(study, make_run):
    runs = study()
    write_status(RunDir(runs[2].path), RunStatus(State.FAILED, 1, "loss is NaN at it 7"))
    table = read_study("demo", runs, plan=BAND)
    assert words(table)[("gate", "base")] is DIVERGED and table.judged["planned"] == 3
    assert words(table)[("wide", "base")] is BETTER
    gate = document_of(table)["rows"][2]
    # The other four seeds say nothing about the step.
    assert gate["val_loss"] is gate["delta_baseline"] is gate["delta_parent"] is None
    assert verdicts_exit_code(document_of(table)) == 1
    write_status(RunDir(runs[2].path), RunStatus(State.FAILED, 1, "out of memory"))
    (lost,) = (v for v in read_study("demo", runs).judged["verdicts"] if v["role"] == "parent")
    assert lost["n"] == 4 and lost["planned_comparisons"] == 3
    runs[5] = make_run(
        "gate", 3.2, seed=2, parent="wide", number=2, manifest={"origin__torch": "2.12.0"}
    )
    table = read_study("demo", runs, plan=BAND)
    (unfair,) = (v for v in table.judged["verdicts"] if v["role"] == "parent")
    assert (unfair["verdict"], unfair["reason"]) == (UNFAIR, "torch")
    assert verdicts_exit_code(document_of(table)) == 4


def test_a_finished_run_that_did_not_learn_has_diverged(make_run):
    runs = [make_run("base", base, seed=s) for s, base in enumerate(BASE, 1)]
    runs += [
        make_run("w", base - 0.1, seed=s, parent="base", number=1, losses=(20.0, 3.2))
        for s, base in enumerate(BASE[:4], 1)
    ]
    stuck = make_run("w", 19.95, seed=5, parent="base", number=1)
    (verdict,) = read_study("demo", [*runs, stuck]).judged["verdicts"]
    assert (verdict["verdict"], verdict["reason"]) == (DIVERGED, "1/5 (seed 5)")
    # Pretrained weights begin below the unigram entropy of 3.145, and improve by little.
    tuned = [
        make_run(v, 3.0 + x, seed=1, losses=(3.1, 3.0), number=0)
        for v, x in (("a", 0), ("b", 0.05))
    ]
    assert [row["n"] for row in document_of(read_study("demo", tuned))["rows"]] == [1, 1]


def test_the_parts_of_a_labelled_table_are_one_family(study, make_run):
    other = {"origin__torch": "2.12.0"}
    runs = study()
    runs += [make_run("base", 4.0, seed=9, number=0, manifest=other)]
    table = read_study("demo", runs, label_by=["torch"], plan=BAND)
    assert table.judged["planned"] == 6
    assert table.judged["verdicts"][0]["step"] == "2.13.0:wide"


def test_p_is_never_zero():
    assert (format_p(1e-300), format_p(0.0123), format_p(None)) == ("<1e-12", "0.012", "-")


def test_a_step_that_hides_the_others_is_named():
    draw = random.Random(8)
    arms = {f"s{i}": [3 + draw.gauss(0, 0.005) for _ in range(5)] for i in range(6)}
    contrasts = [Contrast.pair(f"s{i}", "s0") for i in range(1, 6)]
    shown = {}
    for factor in (1, 30):
        losses = {**arms, "s5": [3 + factor * (y - 3) for y in arms["s5"]]}
        outcomes = {a: [SeedOutcome(s, y) for s, y in enumerate(ys)] for a, ys in losses.items()}
        for variance in ("shared", "own"):
            plan = VerdictPlan(VerdictRule(variance))
            plan = declare(plan, contrasts, outcomes)
            text = verdicts_to_terminal(
                document_of({**judge(contrasts, outcomes, plan), "plan": plan})
            )
            noise = [line for line in text.splitlines() if line.startswith("NOISE ")]
            shown[factor, variance] = [line.split(":")[0] for line in noise]
            assert all(len(line) <= 80 for line in text.splitlines())
    named = shown.pop((30, "shared"))
    assert named == ["NOISE s5 vs s0"] and not any(shown.values())
