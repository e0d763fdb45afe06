"""Verdicts of a study from its run directories, its A/A steps and repeats, and what is declared."""

import json
import random
from dataclasses import replace

import pytest

from lib.report.columns import to_markdown, verdicts_to_terminal, write_tables
from lib.report.contrasts import Contrast
from lib.report.declarations import DECLARATIONS_FILE, VerdictPlan, plans_of, read_declarations
from lib.report.judge import AA_FAILED, declare, judge
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study import VERDICTS_FILE, read_study
from lib.report.text import legend, verdicts_exit_code
from lib.report.verdicts import SeedOutcome, VerdictWord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.report.documents import document_of

BETTER, WORSE, EQUIVALENT, INCONCLUSIVE, UNFAIR, DIVERGED = VerdictWord
BASE = (3.0, 3.25, 2.875, 3.125, 3.0625)
BAND = VerdictPlan(VerdictRule(band=0.05))
OTHER_TORCH = {"origin__torch": "2.12.0"}


def losses(shift, seed):
    draw = random.Random(seed)
    return [base + shift + draw.gauss(0, 0.002) for base in BASE]


@pytest.fixture
def runs(make_study):
    """Return five seeds of a baseline, a real step, and one on it that takes its effect back."""
    steps = {"base": BASE, "wide": losses(-0.1, 3), "gate": losses(0.0, 4)}
    return make_study(steps, {"gate": "wide"})


def fail(run, message):
    write_status(RunDir(run.path), RunStatus(State.FAILED, 1, message))


def words(table):
    return {(v["step"], v["reference"]): v["verdict"] for v in table.judged["verdicts"]}


def texts(document):
    return verdicts_to_terminal(document), to_markdown(document)


def test_every_comparison_has_a_verdict(runs):
    table = read_study("demo", runs, plan=BAND)
    pairs = {("wide", "base"): BETTER, ("gate", "base"): EQUIVALENT, ("gate", "wide"): WORSE}
    assert words(table) == pairs
    document = document_of(table)
    base, _, gate = document["rows"]
    assert (gate["baseline_verdict"], gate["parent_verdict"]) == (EQUIVALENT, WORSE)
    section = to_markdown(document).partition("## Verdicts")[2]
    assert "3 comparisons" in section.replace("\n", " ") and "BETTER" in section
    assert all(len(line) <= 80 for line in section.splitlines() if line.startswith("|"))
    # It is JSON, and its references resolve.
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    names = {verdict["name"] for verdict in document["verdicts"]}
    assert names == set(document["family"])
    assert {row["against"]["baseline"] for row in document["rows"][1:]} <= names
    assert base["against"] == {"baseline": None, "parent": None}


def declared(folder):
    """Return the plan of one look at five seeds, with the declarations of the folder."""
    known = read_declarations(folder)
    return replace(BAND, looks=LookPlan.fixed(5), declarations=known, folder=folder)


def test_other_studies_on_the_same_documents_are_counted(runs, tmp_path):
    here = tmp_path / "here"
    table = read_study("demo", runs, plan=declared(here))
    assert len(table.evaluation_set) == 64 and not table.same_documents
    line = (here / DECLARATIONS_FILE).read_text()
    other = line.replace(table.evaluation_set, "0" * 64)
    for name, content in (("same", line), ("damaged", "{\n"), ("elsewhere", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / DECLARATIONS_FILE).write_text(content)
    table = read_study("demo", runs, plan=declared(here))
    assert table.same_documents == ["damaged (unreadable declarations)", "same"]
    assert "2 other studies" in " ".join(legend(document_of(table)))
    # Another configuration in the same folder is another study.
    for arms in plans_of(read_declarations(here))[0].family.values():
        for digest in arms.values():
            line = line.replace(digest, "0" * 16)
    (here / DECLARATIONS_FILE).write_text(line)
    table = read_study("demo", runs, plan=declared(here))
    assert table.same_documents[1] == "here (another configuration)"


def test_runs_that_were_trained_again_have_the_word_of_their_losses(runs, make_run, tmp_path):
    assert words(read_study("demo", runs, plan=declared(tmp_path)))["wide", "base"] is BETTER
    later = {"volatile": {"attempts": [{"state": "SUCCESS", "started_at": 4e9}]}}
    for seed, loss in enumerate(losses(0.001, 5), 1):
        make_run("wide", loss, seed=seed, parent="base", number=1, manifest=later)
    wide, *_ = read_study("demo", runs, plan=declared(tmp_path)).judged["verdicts"]
    assert wide["verdict"] is EQUIVALENT
    assert wide["remarks"][-1] == "its runs were trained again since"


def test_a_failed_or_foreign_run_changes_the_word_and_not_the_family(runs, make_run):
    document = document_of(read_study("demo", runs, plan=BAND))
    assert "0 of 5 seeds" in " ".join(legend(document)) and "45%" in " ".join(legend(document))
    fail(runs[10], "loss is NaN at it 7")
    table = read_study("demo", runs, plan=BAND)
    assert words(table)[("gate", "base")] is DIVERGED and table.judged["planned"] == 3
    assert words(table)[("wide", "base")] is BETTER
    document = document_of(table)
    gate = document["rows"][2]
    # The other four seeds say nothing about the step.
    assert gate["val_loss"] is gate["delta_baseline"] is gate["delta_parent"] is None
    assert verdicts_exit_code(document) == 1 and "0 of" not in " ".join(legend(document))
    fail(runs[10], "out of memory")
    (lost,) = (v for v in read_study("demo", runs).judged["verdicts"] if v["role"] == "parent")
    assert lost["n"] == 4 and lost["planned_comparisons"] == 3
    make_run("gate", 3.2, seed=2, parent="wide", number=2, manifest=OTHER_TORCH)
    table = read_study("demo", runs, plan=BAND)
    (unfair,) = (v for v in table.judged["verdicts"] if v["role"] == "parent")
    assert (unfair["verdict"], unfair["reason"]) == (UNFAIR, "torch")
    assert verdicts_exit_code(document_of(table)) == 4


def test_a_finished_run_that_did_not_learn_has_diverged(make_study):
    step = [*(base - 0.1 for base in BASE[:4]), 19.95]
    runs = make_study({"base": BASE, "wide": step})
    (verdict,) = read_study("demo", runs).judged["verdicts"]
    assert (verdict["verdict"], verdict["reason"]) == (DIVERGED, "1/5 (seed 5)")
    # Pretrained weights begin below the unigram entropy of 3.145, and improve by little.
    tuned = make_study({"a": [3.0], "b": [3.05]}, losses=(3.1, 3.0))
    assert [row["n"] for row in document_of(read_study("demo", tuned))["rows"]] == [1, 1]


def test_the_parts_of_a_labelled_table_are_one_family(runs, make_run):
    runs.append(make_run("base", 4.0, seed=9, number=0, manifest=OTHER_TORCH))
    table = read_study("demo", runs, label_by=["torch"], plan=BAND)
    assert table.judged["planned"] == 6
    assert table.judged["verdicts"][0]["step"] == "2.13.0:wide"


@pytest.mark.parametrize(
    ("factor", "variance", "named"),
    [(1, "shared", []), (30, "shared", ["NOISE s5 vs s0"]), (30, "own", [])],
)
def test_a_step_that_hides_the_others_is_named(factor, variance, named):
    draw = random.Random(8)
    arms = {f"s{i}": [draw.gauss(0, 0.005) for _ in range(5)] for i in range(6)}
    arms["s5"] = [factor * y for y in arms["s5"]]
    contrasts = [Contrast.pair(f"s{i}", "s0") for i in range(1, 6)]
    outcomes = {a: [SeedOutcome(s, 3 + y) for s, y in enumerate(ys)] for a, ys in arms.items()}
    plan = declare(VerdictPlan(VerdictRule(variance)), contrasts, outcomes)
    document = document_of({**judge(contrasts, outcomes, plan), "plan": plan})
    lines = verdicts_to_terminal(document).splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("NOISE ")] == named
    assert all(len(line) <= 80 for line in lines)


# A/A steps are tested alone, and repeats not at all.


@pytest.fixture
def controlled(make_study):
    """Return a factory of a baseline, a real step, and a control ``shift`` apart, with any words."""

    def make(shift=0.0, slug="base-aa", kind="is_aa"):
        runs = make_study({"base": BASE, "wide": losses(-0.1, 3), slug: losses(shift, 4)})
        for run in runs[-len(BASE) :]:
            runs.remove(run)
            runs.append(replace(run, variant=replace(run.variant, number=None, **{kind: True})))
        return runs

    return make


def test_an_aa_step_belongs_to_no_family_and_changes_no_other_verdict(controlled, tmp_path):
    runs = controlled()
    table = read_study("demo", runs, plan=BAND)
    without = read_study("demo", [run for run in runs if not run.variant.is_aa], plan=BAND)
    assert table.judged["verdicts"] == without.judged["verdicts"] and table.judged["planned"] == 1
    document, (aa,) = document_of(table), table.judged["aa_steps"]
    assert document["pairing_gain"] == document_of(without)["pairing_gain"]
    assert (aa["planned_comparisons"], aa["variance"], aa["n"]) == (1, "own", 5)
    # It stands in the table, with its verdict.
    row = document["rows"][2]
    assert (row["slug"], row["against"]["baseline"]) == ("base-aa", aa["name"])
    assert row["baseline_p_own"] == aa["p_own"] is not None
    write_tables(document, tmp_path)
    record = json.loads((tmp_path / VERDICTS_FILE).read_text())
    assert [v["step"] for v in record["aa_steps"]] == ["base-aa"]
    assert record["family"] == ["wide vs base"]


@pytest.mark.parametrize(
    ("plan", "message", "word", "code", "text"),
    [
        # In the band and real: the band wins, and the step is not a failure.
        (BAND, "", EQUIVALENT, 0, "A/A step passed"),
        (VerdictPlan(), "", WORSE, 4, AA_FAILED),
        # Between looks it is not tested.
        (VerdictPlan(looks=LookPlan((8,), (0.9,))), "", None, 0, "next look at 8 seeds"),
        (BAND, "loss is NaN at it 7", DIVERGED, 1, "A/A step DIVERGED"),
    ],
)
def test_an_aa_step_that_differs_is_a_remark_on_every_verdict(
    controlled, plan, message, word, code, text
):
    runs = controlled(shift=0.03)
    if message:
        fail(runs[-1], message)
    table = read_study("demo", runs, plan=plan)
    document = document_of(table)
    assert table.judged["aa_steps"][0]["verdict"] is word and verdicts_exit_code(document) == code
    assert all(text in " ".join(each.split()) for each in texts(document))
    assert ("passed" in texts(document)[0]) is (word is EQUIVALENT)
    (wide,) = table.judged["verdicts"]
    assert (AA_FAILED in wide["remarks"]) is (word is WORSE)


def test_a_failure_at_a_look_stays_at_the_next_one(controlled, make_run):
    """As words do: a later look at more seeds does not take it back."""
    # A shift of 0.03 at three seeds, and none on the whole.
    runs, plan = controlled(shift=0.03), VerdictPlan(looks=LookPlan((3, 5), (0.5, 0.4)))
    at_three = read_study("demo", [run for run in runs if run.seed < 4], plan=plan)
    assert at_three.judged["aa_failed"]
    for seed, base in enumerate(BASE[3:], 4):
        make_run("base-aa", base - 0.05, seed=seed, parent="base")
    later = read_study("demo", runs, plan=at_three.plan)
    assert [look.n for look in later.judged["looks"]] == [3] and later.judged["closed"][0]
    (aa,) = later.judged["aa_steps"]
    assert aa["verdict"] is None and later.judged["aa_failed"]
    assert verdicts_exit_code(document_of(later)) == 4
    assert AA_FAILED in later.judged["verdicts"][0]["remarks"]


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_repeat_is_the_noise_of_one_seed_and_has_no_verdict(controlled, make_run, is_equal):
    runs = controlled(slug="base-again", kind="is_repeat")
    without = read_study("demo", runs[: -len(BASE)], plan=BAND)
    for seed, base in enumerate(BASE, 1):
        make_run("base-again", base + (0 if is_equal else 0.001 * seed), seed=seed)
    table = read_study("demo", runs, plan=BAND)
    assert table.judged["verdicts"] == without.judged["verdicts"]
    assert not table.judged["aa_steps"]
    document = document_of(table)
    shown = "is equal" if is_equal else "differs by up to 5.0e-03 nats"
    assert all(f"REPEAT base-again {shown} (5 seeds)" in text for text in texts(document))
    assert document["repeats"]["base-again"][5] == pytest.approx(0 if is_equal else 0.005)
    assert document["family"] == ["wide vs base"]
