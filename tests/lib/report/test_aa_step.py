"""The verdict on an A/A step: tested alone, and a remark on every other verdict if it fails."""

import json
import random
from dataclasses import replace

import pytest

from lib.report.columns import to_markdown, verdicts_to_terminal, write_tables
from lib.report.declarations import VerdictPlan
from lib.report.judge import AA_FAILED
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study import VERDICTS_FILE, read_study
from lib.report.text import verdicts_exit_code
from lib.report.verdicts import VerdictWord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.report.documents import document_of

BASE = (3.0, 3.25, 2.875, 3.125, 3.0625)
PLAN = VerdictPlan(VerdictRule(band=0.05))


@pytest.fixture
def study(make_run):
    """Return a factory of a baseline, a real step, and an A/A step ``shift`` apart."""

    def make(shift=0.0):
        draw, runs = random.Random(3), []
        for seed, base in enumerate(BASE, 1):
            noise = [draw.gauss(0, 0.002) for _ in range(2)]
            runs.append(make_run("base", base, seed=seed, number=0))
            runs.append(make_run("wide", base - 0.1 + noise[0], seed=seed, parent="base", number=1))
            aa = make_run("base-aa", base + shift + noise[1], seed=seed, parent="base", number=None)
            runs.append(replace(aa, variant=replace(aa.variant, is_aa=True)))
        return runs

    return make


def test_it_belongs_to_no_family_and_changes_no_other_verdict(study, tmp_path):
    table = read_study("demo", study(), plan=PLAN)
    without = read_study("demo", [r for r in study() if not r.variant.is_aa], plan=PLAN)
    (wide,) = table.judged["verdicts"]
    assert [wide] == list(without.judged["verdicts"])
    assert table.judged["planned"] == 1
    gain = document_of(table)["pairing_gain"]
    assert gain == document_of(without)["pairing_gain"]
    (aa,) = table.judged["aa_steps"]
    assert (aa["planned_comparisons"], aa["variance"], aa["n"]) == (1, "own", 5)
    # It stands in the table, with its verdict.
    assert document_of(table)["rows"][2]["slug"] == "base-aa"
    assert document_of(table)["rows"][2]["against"]["baseline"] == aa["name"]
    assert document_of(table)["rows"][2]["baseline_p_own"] == aa["p_own"] is not None
    assert "A/A step passed" in verdicts_to_terminal(document_of(table))
    assert "A/A step passed" in to_markdown(document_of(table))
    assert verdicts_exit_code(document_of(table)) == 0
    write_tables(document_of(table), tmp_path)
    record = json.loads((tmp_path / VERDICTS_FILE).read_text())
    assert [v["step"] for v in record["aa_steps"]] == ["base-aa"]
    assert record["family"] == ["wide vs base"]


def test_a_difference_is_a_remark_on_every_verdict_and_exit_4(study):
    table = read_study("demo", study(shift=0.03), plan=PLAN)
    (wide,), (aa,) = table.judged["verdicts"], table.judged["aa_steps"]
    # In the band and real: the band wins, and the step is not a failure.
    assert aa["verdict"] is VerdictWord.EQUIVALENT and verdicts_exit_code(document_of(table)) == 0
    table = read_study("demo", study(shift=0.03), plan=VerdictPlan())
    (wide,), (aa,) = table.judged["verdicts"], table.judged["aa_steps"]
    assert aa["verdict"] is VerdictWord.WORSE and wide["verdict"] is VerdictWord.BETTER
    assert AA_FAILED in wide["remarks"]
    assert AA_FAILED in verdicts_to_terminal(document_of(table)) and AA_FAILED in to_markdown(
        document_of(table)
    )
    assert verdicts_exit_code(document_of(table)) == 4


def test_a_diverged_step_is_named(study):
    runs = study()
    write_status(RunDir(runs[2].path), RunStatus(State.FAILED, 1, "loss is NaN at it 7"))
    table = read_study("demo", runs, plan=PLAN)
    assert table.judged["aa_steps"][0]["verdict"] is VerdictWord.DIVERGED
    assert "A/A step DIVERGED" in verdicts_to_terminal(document_of(table))
    assert verdicts_exit_code(document_of(table)) == 1
    assert AA_FAILED not in table.judged["verdicts"][0]["remarks"]


def test_a_failure_at_a_look_stays_at_the_next_one(study, make_run):
    """As words do: a later look at more seeds does not take it back."""
    looks = LookPlan((3, 5), (0.5, 0.4))
    # A shift of 0.03 at three seeds, and none on the whole.
    runs = study(shift=0.03)
    plan, first = VerdictPlan(looks=looks), [run for run in runs if run.seed < 4]
    at_three = read_study("demo", first, plan=plan)
    assert at_three.judged["aa_failed"]
    for seed, base in enumerate(BASE[3:], 4):
        run = make_run("base-aa", base - 0.05, seed=seed, parent="base", number=None)
        runs[3 * seed - 1] = replace(run, variant=replace(run.variant, is_aa=True))
    later = read_study("demo", runs, plan=at_three.plan)
    assert [look.n for look in later.judged["looks"]] == [3] and later.judged["closed"][0]
    (aa,) = later.judged["aa_steps"]
    assert (
        aa["verdict"] is None
        and later.judged["aa_failed"]
        and verdicts_exit_code(document_of(later)) == 4
    )
    assert AA_FAILED in later.judged["verdicts"][0]["remarks"]


def test_between_looks_it_is_not_tested(study):
    plan = VerdictPlan(looks=LookPlan((8,), (0.9,)))
    table = read_study("demo", study(shift=0.03), plan=plan)
    (aa,) = table.judged["aa_steps"]
    assert aa["verdict"] is None and verdicts_exit_code(document_of(table)) == 0
    assert "passed" not in verdicts_to_terminal(document_of(table))


def test_a_repeat_is_the_noise_of_one_seed_and_has_no_verdict(study, make_run, tmp_path):
    def again(shift):
        runs = []
        for seed, base in enumerate(BASE, 1):
            run = make_run("base-again", base + shift * seed, seed=seed, parent="base", number=None)
            runs.append(replace(run, variant=replace(run.variant, is_repeat=True)))
        return runs

    without = read_study("demo", study(), plan=PLAN)
    for shift, shown in ((0.0, "is equal"), (0.001, "differs by up to 5.0e-03 nats")):
        table = read_study("demo", [*study(), *again(shift)], plan=PLAN)
        assert table.judged["verdicts"] == without.judged["verdicts"]
        assert table.judged["aa_steps"] == without.judged["aa_steps"]
        assert f"REPEAT base-again {shown} (5 seeds)" in verdicts_to_terminal(document_of(table))
        assert f"REPEAT base-again {shown}" in to_markdown(document_of(table))
    write_tables(document_of(table), tmp_path)
    record = json.loads((tmp_path / VERDICTS_FILE).read_text())
    assert record["repeats"]["base-again"]["5"] == pytest.approx(0.005)
    assert record["family"] == ["wide vs base"]
