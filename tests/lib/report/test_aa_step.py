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
            runs.append(control(make_run, "base-aa", base + shift + noise[1], seed, is_aa=True))
        return runs

    return make


def control(make_run, slug, loss, seed, **kind):
    run = make_run(slug, loss, seed=seed, parent="base", number=None)
    return replace(run, variant=replace(run.variant, **kind))


def judged(runs, plan=PLAN):
    """Return the study, its A/A step, its exit code and its texts."""
    table = read_study("demo", runs, plan=plan)
    document = document_of(table)
    texts = verdicts_to_terminal(document), to_markdown(document)
    return table, table.judged["aa_steps"][0], verdicts_exit_code(document), texts


def test_it_belongs_to_no_family_and_changes_no_other_verdict(study, tmp_path):
    runs = study()
    table, aa, code, texts = judged(runs)
    without = read_study("demo", [run for run in runs if not run.variant.is_aa], plan=PLAN)
    assert table.judged["verdicts"] == without.judged["verdicts"] and table.judged["planned"] == 1
    document = document_of(table)
    assert document["pairing_gain"] == document_of(without)["pairing_gain"]
    assert (aa["planned_comparisons"], aa["variance"], aa["n"], code) == (1, "own", 5, 0)
    # It stands in the table, with its verdict.
    row = document["rows"][2]
    assert (row["slug"], row["against"]["baseline"]) == ("base-aa", aa["name"])
    assert row["baseline_p_own"] == aa["p_own"] is not None
    assert all("A/A step passed" in text for text in texts)
    write_tables(document, tmp_path)
    record = json.loads((tmp_path / VERDICTS_FILE).read_text())
    assert [v["step"] for v in record["aa_steps"]] == ["base-aa"]
    assert record["family"] == ["wide vs base"]


def test_a_difference_is_a_remark_on_every_verdict_and_exit_4(study):
    runs = study(shift=0.03)
    # In the band and real: the band wins, and the step is not a failure.
    _, aa, code, _ = judged(runs)
    assert (aa["verdict"], code) == (VerdictWord.EQUIVALENT, 0)
    table, aa, code, texts = judged(runs, VerdictPlan())
    (wide,) = table.judged["verdicts"]
    assert (aa["verdict"], wide["verdict"], code) == (VerdictWord.WORSE, VerdictWord.BETTER, 4)
    assert AA_FAILED in wide["remarks"] and all(AA_FAILED in text for text in texts)
    # Between looks it is not tested.
    _, aa, code, (text, _) = judged(runs, VerdictPlan(looks=LookPlan((8,), (0.9,))))
    assert (aa["verdict"], code) == (None, 0) and "passed" not in text
    write_status(RunDir(runs[2].path), RunStatus(State.FAILED, 1, "loss is NaN at it 7"))
    table, aa, code, (text, _) = judged(runs)
    assert (aa["verdict"], code) == (VerdictWord.DIVERGED, 1) and "A/A step DIVERGED" in text
    assert AA_FAILED not in table.judged["verdicts"][0]["remarks"]


def test_a_failure_at_a_look_stays_at_the_next_one(study, make_run):
    """As words do: a later look at more seeds does not take it back."""
    # A shift of 0.03 at three seeds, and none on the whole.
    runs, plan = study(shift=0.03), VerdictPlan(looks=LookPlan((3, 5), (0.5, 0.4)))
    at_three = read_study("demo", [run for run in runs if run.seed < 4], plan=plan)
    assert at_three.judged["aa_failed"]
    for seed, base in enumerate(BASE[3:], 4):
        runs[3 * seed - 1] = control(make_run, "base-aa", base - 0.05, seed, is_aa=True)
    later, aa, code, _ = judged(runs, at_three.plan)
    assert [look.n for look in later.judged["looks"]] == [3] and later.judged["closed"][0]
    assert (aa["verdict"], later.judged["aa_failed"], code) == (None, True, 4)
    assert AA_FAILED in later.judged["verdicts"][0]["remarks"]


def test_a_repeat_is_the_noise_of_one_seed_and_has_no_verdict(study, make_run):
    runs = study()
    without, *_ = judged(runs)
    for shift, shown in ((0.0, "is equal"), (0.001, "differs by up to 5.0e-03 nats")):
        again = [
            control(make_run, "base-again", base + shift * seed, seed, is_repeat=True)
            for seed, base in enumerate(BASE, 1)
        ]
        table, _, _, texts = judged([*runs, *again])
        assert table.judged["verdicts"] == without.judged["verdicts"]
        assert table.judged["aa_steps"] == without.judged["aa_steps"]
        assert all(f"REPEAT base-again {shown} (5 seeds)" in text for text in texts)
    document = document_of(table)
    assert document["repeats"]["base-again"][5] == pytest.approx(0.005)
    assert document["family"] == ["wide vs base"]
