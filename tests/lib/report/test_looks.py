"""Looks at a study: what is judged when, what each look spends, and what is declared."""

import random
import time
from dataclasses import replace
from functools import partial

import pytest

from lib.report.contrasts import Contrast
from lib.report.declarations import (
    DECLARATIONS_FILE,
    Look,
    VerdictPlan,
    due_look,
    read_declarations,
    reserve_share,
    share_at,
)
from lib.report.judge import AA_FAILED, declare, judge
from lib.report.options import LookPlan
from lib.report.statistics import PART_FACTOR, ErrorLevel, VerdictRule
from lib.report.text import seeds_notes, verdicts_exit_code
from lib.report.verdicts import SeedOutcome, VerdictWord, verdicts_at
from tests.lib.report.documents import document_of, family_of

BETTER, WORSE, EQUIVALENT, INCONCLUSIVE, UNFAIR, DIVERGED = VerdictWord
LOOKS = LookPlan((3, 5, 8), (0.2, 0.3, 0.4))
RULE = VerdictRule()
# Effects in standard deviations of a run: the first step is decided at the first look.
EFFECTS = {"base": 0.0, "large": -40.0, "small": -0.9, "none": 0.0}


def losses(arm):
    draw = random.Random(f"{arm}None")
    return [3 + 0.01 * (EFFECTS[arm] + draw.gauss(0, 1)) for _ in range(12)]


LOSSES = {arm: losses(arm) for arm in EFFECTS}


def outcomes(seeds, changes=None, arms=EFFECTS):
    """Return the outcomes of the first ``seeds`` seeds; ``changes`` maps (arm, seed) to others."""
    numbers = range(1, seeds + 1) if isinstance(seeds, int) else seeds
    return {
        arm: [(changes or {}).get((arm, s), SeedOutcome(s, LOSSES[arm][s - 1])) for s in numbers]
        for arm in arms
    }


def waiting(*arms, seeds):
    """Return outcomes that are not known yet."""
    open_ = {"reason": "new", "ended": False}
    return {(arm, seed): SeedOutcome(seed, None, **open_) for arm in arms for seed in seeds}


def diverged(arm, seed):
    return {(arm, seed): SeedOutcome(seed, None, diverged=True, reason="failed")}


def contrasts(arms=EFFECTS):
    return family_of({arm: "" if arm == "base" else "base" for arm in arms})


def report(
    folder, seeds, changes=None, *, arms=EFFECTS, declared=EFFECTS, rule=RULE, looks=LOOKS, **plan
):
    """Declare and judge the study of the ``declared`` arms, as make report does."""
    family = contrasts(declared)
    known = read_declarations(folder)
    plan = VerdictPlan(
        rule, looks=looks, declared=family, declarations=known, folder=folder, **plan
    )
    return judged(contrasts(arms), outcomes(seeds, changes, arms), plan)


def judged(comparisons, runs, plan):
    plan = declare(plan, comparisons, runs)
    return {**judge(comparisons, runs, plan), "plan": plan}


def words(study):
    return {v["step"]: v["verdict"] for v in study["verdicts"]}


def by_step(study):
    return {v["step"]: v for v in study["verdicts"]}


def shares(study):
    return [look.share for look in study["looks"]]


def declared_lines(folder):
    return (folder / DECLARATIONS_FILE).read_text().splitlines()


# The plan and its spending.


@pytest.mark.parametrize(
    ("seeds", "spend"),
    [
        ((), ()),
        *(((first, 5), (0.5, 0.5)) for first in (2, 5, 6)),
        *(((3, 5), spend) for spend in ((0.5, 0.6), (0.5, 0.0), (0.5,))),
    ],
)
def test_a_plan_of_looks_that_cannot_hold_its_promise_is_refused(seeds, spend):
    code = "config.out-of-range" if len(seeds) == len(spend) else "config.conflict"
    assert [problem.code for problem in LookPlan(seeds, spend).problems] == [code]
    assert LookPlan((3, 5, 8), (0.2, 0.3, 0.5)).problems == []


def test_planned_looks_spend_their_shares_and_later_ones_half_of_the_rest():
    """A planned look that was passed over is lost."""
    taken, n = [], 3
    while look := due_look(LOOKS, taken, n):
        taken.append(look)
        assert due_look(LOOKS, taken, n) is None and look.planned is (n <= 8)
        n = {3: 5, 5: 8}.get(n, n + 1)
    assert [look.share for look in taken[:5]] == [0.2, 0.3, 0.4, 0.05, 0.025]
    assert n > 30 and 0.999 < sum(look.share for look in taken) <= 1
    assert due_look(LOOKS, (), 6).share == 0.3
    assert due_look(LOOKS, [Look(1, 8, 0.4, True)], 9).share == pytest.approx(0.05)
    whole = LookPlan((3,), (1.0,)), [Look(1, 3, 1.0, True)]
    assert due_look(*whole, 4) is None and share_at(*whole, 4) == 0


def test_a_fixed_list_has_one_look_and_keeps_a_reserve(tmp_path):
    study = report(tmp_path, 4, looks=LookPlan.fixed(5))
    assert shares(study) == [] and words(study)["large"] is None
    study = report(tmp_path, 5, looks=LookPlan.fixed(5))
    assert shares(study) == [0.9] and words(study)["large"] is BETTER
    # Another list later is an extension: the plan of the first look stays.
    study = report(tmp_path, 8, looks=LookPlan.fixed(8))
    assert shares(study) == [0.9, 0.05]
    assert "unplanned look" in by_step(study)["none"]["remarks"]
    assert report(tmp_path, 2, looks=LookPlan.fixed(2))["plan"].taken is None


# Words.


def test_a_corrected_p_and_the_interval_include_the_share_of_the_look():
    levels = ErrorLevel(), ErrorLevel(0.2)
    plain, look = (verdicts_at(contrasts(), outcomes(5), RULE, 3, level) for level in levels)
    for one, other in zip(plain, look, strict=True):
        assert other["p"] == one["p"]
        assert other["p_adjusted"] == min(1, one["p_adjusted"] / 0.2)
        assert other["interval_95"] == one["interval_95"] == pytest.approx(one["interval_of_look"])
        low, high = other["interval_95"]
        assert other["interval_of_look"][0] < low < high < other["interval_of_look"][1]


def test_a_word_stays_as_it_was_given(tmp_path):
    first = report(tmp_path, 3)
    assert words(first) == {"large": BETTER, "small": INCONCLUSIVE, "none": INCONCLUSIVE}
    large = by_step(first)["large"]
    assert (large["look"], large["n"], large["share"]) == (1, 3, 0.2)
    assert any(remark.startswith("stopped early") for remark in large["remarks"])
    # The seeds that follow would say the contrary.
    worse = {("large", s): SeedOutcome(s, 9.0 + s / 100) for s in range(4, 9)}
    between = report(tmp_path, 4, worse)
    for study in (between, report(tmp_path, 5, worse), report(tmp_path, 8, worse)):
        assert by_step(study)["large"] == large
    # Between looks, the others have estimates, and the next look is announced.
    small = by_step(between)["small"]
    assert small["n"] == 4 and small["difference"] is not None and between["plan"].taken is None
    assert small["p"] is small["verdict"] is small["p_of_word"] is None
    assert small["reason"] == "next look at 5 seeds"
    assert "next look at 5 seeds" in " ".join(seeds_notes(document_of(between)))
    # A divergence after the word is named.
    large = by_step(report(tmp_path, 8, worse | diverged("large", 4)))["large"]
    assert large["verdict"] is BETTER and large["remarks"][-1].startswith("diverged since: 1/8")


def test_reports_cost_nothing_and_an_extra_block_half_of_the_reserve(tmp_path):
    for n in (3, 5, 8):
        study = report(tmp_path, n)
    before, expected = declared_lines(tmp_path), document_of(study)
    assert document_of(study)["alpha_spent"] == pytest.approx(0.045)
    for _ in range(9):
        study = report(tmp_path, 8)
        assert study["plan"].taken is None and document_of(study) == expected
    assert declared_lines(tmp_path) == before
    study = report(tmp_path, 9)
    assert study["plan"].taken is not None and not study["plan"].taken.planned
    assert document_of(study)["alpha_spent"] == pytest.approx(0.0475)
    open_ones = [v for v in study["verdicts"] if v["look"] == 4]
    assert open_ones and all("unplanned look" in v["remarks"] for v in open_ones)


@pytest.mark.parametrize(
    "arm, judged", [("base", set()), ("none", {"large", "small"}), ("large", {"small", "none"})]
)
def test_a_comparison_waits_for_its_own_runs_only(tmp_path, arm, judged):
    study = report(tmp_path, 3, waiting(arm, seeds=[3]))
    assert {v["step"] for v in study["verdicts"] if v["look"] == 1} == judged
    others = [v for v in study["verdicts"] if v["step"] not in judged]
    assert all(v["n"] == 2 and v["verdict"] is None for v in others)
    # The others are judged at the same look.
    study = report(tmp_path, 3)
    assert shares(study) == [0.2] and {v["look"] for v in study["verdicts"]} == {1}
    assert bool(study["plan"].taken) is not bool(judged)
    assert not any("since" in remark for v in study["verdicts"] for remark in v["remarks"])


@pytest.mark.parametrize("variance", ["shared", "own"])
def test_words_of_a_part_are_corrected_at_once_and_the_whole_is_as_without_it(tmp_path, variance):
    rule = VerdictRule(variance)
    better = {("small", s): SeedOutcome(s, LOSSES["small"][s - 1] - 0.1) for s in (1, 2, 3)}
    part = by_step(report(tmp_path, 3, better | waiting("none", seeds=[3]), rule=rule))
    for verdict in (part["large"], part["small"]):
        # The mean variance of a part changes with each comparison that arrives.
        factor = 3 * (PART_FACTOR if variance == "shared" else 1)
        assert verdict["planned_comparisons"] == 3
        assert verdict["p_adjusted"] == pytest.approx(min(1, factor * verdict["p"] / 0.2))
        assert any("until 1 comparison has" in remark for remark in verdict["remarks"])
    assert part["none"]["n"] == 2
    whole = report(tmp_path / "whole", 3, better, rule=rule)
    later = report(tmp_path, 3, better, rule=rule)
    assert document_of(later)["verdicts"] == document_of(whole)["verdicts"]
    assert not any("until" in remark for v in later["verdicts"] for remark in v["remarks"])
    step = "large" if variance == "shared" else "small"
    assert by_step(later)[step]["p_adjusted"] < part[step]["p_adjusted"]


def test_a_decided_step_needs_no_runs(tmp_path):
    report(tmp_path, 3)
    absent = waiting("large", seeds=[4, 5])
    study = report(tmp_path, 5, absent)
    assert study["plan"].taken.seeds == (1, 2, 3, 4, 5) and words(study)["large"] is BETTER
    assert not study["waiting"]
    # The large step is the only one of this study that is decided.
    absent |= waiting("small", "none", seeds=[8])
    assert report(tmp_path, 8, absent)["plan"].taken is None


@pytest.mark.parametrize("arm", ["small", "base"])
def test_a_diverged_step_needs_no_further_runs_and_no_look(tmp_path, arm):
    bad = diverged(arm, 2)
    report(tmp_path, 3, bad)
    steps = ("small",) if arm == "small" else ("large", "small", "none")
    study = report(tmp_path, 5, bad | waiting(*steps, seeds=[4, 5]))
    assert not study["waiting"] and shares(study) == ([0.2, 0.3] if arm == "small" else [0.2])
    assert words(study)["small"] is DIVERGED
    # The others are judged as a whole.
    assert not any("until" in remark for v in study["verdicts"] for remark in v["remarks"])
    # More seeds of nothing but diverged steps need no look.
    assert shares(report(tmp_path, 8, bad)) == ([0.2, 0.3, 0.4] if arm == "small" else [0.2])


def test_the_own_rule_steps_down_over_the_open_comparisons(tmp_path):
    rule, looks = VerdictRule("own"), LookPlan((3, 8), (0.5, 0.4))
    report(tmp_path, 3, rule=rule, looks=looks)
    study = report(tmp_path, 8, rule=rule, looks=looks)
    assert [v["look"] for v in study["verdicts"]] == [1, 2, 2] and words(study)["large"] is BETTER
    smallest = min(study["verdicts"][1:], key=lambda verdict: verdict["p"])
    assert smallest["p_adjusted"] == pytest.approx(min(1, 2 * smallest["p"] / 0.4))


def test_further_seeds_are_counted_at_the_level_of_their_look():
    wide = [SeedOutcome(s, LOSSES["base"][s - 1] - 0.01 - 0.004 * s) for s in (1, 2, 3)]
    runs, family = outcomes(3) | {"none": wide}, [Contrast.pair("none", "base")]
    counts = []
    for plan in (LookPlan((3, 8), (1e-4, 0.9)), LookPlan((3, 4, 5, 60), (1e-4, 1e-5, 1e-6, 1e-9))):
        shares = partial(share_at, plan, [Look(1, 3, 1e-4, True)])
        (verdict,) = verdicts_at(family, runs, RULE, 3, ErrorLevel(1e-4, share_at=shares))
        counts.append(verdict["more_seeds"])
    assert 0 < counts[0] < counts[1]
    assert [shares(n) for n in (4, 5, 6)] == [1e-5, 1e-6, 1e-9]


# What may not be looked at twice, and what may not be left out.


def test_a_seed_that_a_look_has_seen_cannot_be_replaced(tmp_path):
    study = report(tmp_path, 3, diverged("small", 2))
    assert words(study)["small"] is DIVERGED
    for seeds in ((1, 3, 4), (1, 3, 4, 5, 6)):
        later = report(tmp_path, seeds)
        assert later["plan"].taken is None and shares(later) == [0.2]
        assert words(later)["small"] is None


def test_a_missing_run_is_judged_once_when_it_arrives(tmp_path):
    study = report(tmp_path, 3, {("small", 2): SeedOutcome(2, None, reason="out of memory")})
    large, small = by_step(study)["large"], by_step(study)["small"]
    assert (study["plan"].taken.n, small["n"], study["planned"]) == (3, 2, 3)
    assert large["p_adjusted"] == pytest.approx(3 * large["p"] / 0.2)
    study = report(tmp_path, 3)
    small = by_step(study)["small"]
    assert study["plan"].taken is None and shares(study) == [0.2]
    assert (small["n"], small["look"]) == (3, 1)
    # Its word is that of the runs that are there.
    again = dict(started_at=time.time() + 9)
    changed = {("small", s): SeedOutcome(s, 2.0 + s / 100, **again) for s in (1, 2, 3)}
    small = by_step(report(tmp_path, 3, changed))["small"]
    assert (small["verdict"], small["look"]) == (BETTER, 1) and small["difference"] < -0.9
    assert small["remarks"][-1] == "its runs were trained again since"


@pytest.mark.parametrize(
    ("lost", "word", "n", "code"),
    [({"undeclared": ("torch",)}, UNFAIR, 0, 4), ({"reason": "damaged"}, None, 2, 0)],
)
def test_a_run_that_turns_out_unfair_or_damaged_costs_its_word(tmp_path, lost, word, n, code):
    report(tmp_path, 3)
    study = report(tmp_path, 3, {("large", 2): SeedOutcome(2, None, **lost)})
    large = by_step(study)["large"]
    assert (large["verdict"], large["n"]) == (word, n)
    assert large["excluded"] == ["large s2: damaged"] * (word is None)
    assert verdicts_exit_code(document_of(study)) == code
    assert words(report(tmp_path, 3))["large"] is BETTER


def test_a_word_names_unstable_runs_of_its_own_seeds_once(tmp_path):
    changes = {("base", s): SeedOutcome(s, LOSSES["base"][s - 1], unstable=True) for s in (1, 5)}
    for seeds in (3, 5, 5):
        remarks = by_step(report(tmp_path, seeds, changes))["large"]["remarks"]
        unstable = [remark for remark in remarks if remark.startswith("UNSTABLE")]
        assert unstable == ["UNSTABLE: base, seed 1"]


def test_a_diverged_baseline_ends_the_study(tmp_path):
    report(tmp_path, 3)
    study = report(tmp_path, 5, diverged("base", 5))
    assert study["baseline_diverged"] and verdicts_exit_code(document_of(study)) == 1
    assert study["closed"][-1] == set(study["family"])
    assert words(study) == {"large": BETTER, "small": DIVERGED, "none": DIVERGED}


def test_comparisons_added_after_a_look_have_a_look_of_their_own(tmp_path):
    """Judged at the last look, they would exceed its part of alpha: they spend half of the reserve."""
    few = ("base", "large", "small")
    before = report(tmp_path, 3, arms=few, declared=few)
    study = report(tmp_path, 3)
    none, taken = by_step(study)["none"], study["plan"].taken
    assert shares(study) == [0.2, 0.05] and (taken.n, taken.planned) == (3, False)
    assert (none["look"], none["planned_comparisons"], study["planned"]) == (2, 1, 3)
    assert none["p_adjusted"] == pytest.approx(min(1, none["p"] / 0.05))
    assert none["remarks"][-1] == "unplanned look"
    for step in ("large", "small"):
        assert by_step(study)[step] == by_step(before)[step]
    written = declared_lines(tmp_path)
    assert report(tmp_path, 3)["plan"].taken is None and declared_lines(tmp_path) == written
    # Planned before a look, they take part in it.
    later = report(tmp_path, 5)
    assert shares(later) == [0.2, 0.05, 0.3] and by_step(later)["none"]["planned_comparisons"] == 3
    # The reserve left is 0.05: half of it for the next addition.
    assert reserve_share(later["look_plan"], later["looks"]) == 0.025


def test_a_study_without_common_runs_has_looks_and_a_family_of_its_own(tmp_path):
    """Such as another sweep in the same folder."""
    first = report(tmp_path, 3)
    other = family_of({"other-base": "", "other-large": "other-base"})
    runs = {f"other-{arm}": outcomes(5)[arm] for arm in ("base", "large")}
    for _ in range(2):
        known = read_declarations(tmp_path)
        plan = VerdictPlan(RULE, looks=LookPlan((5,), (0.9,)), declared=other, folder=tmp_path)
        study = judged(other, runs, replace(plan, declarations=known))
        assert shares(study) == [0.9] and study["planned"] == 1
        assert by_step(study)["other-large"]["planned_comparisons"] == 1
    # The first study still has its look, and the next one is at five seeds.
    again = report(tmp_path, 3)
    assert again["plan"].taken is None and shares(again) == [0.2] and words(again) == words(first)
    assert shares(report(tmp_path, 5)) == [0.2, 0.3]


def test_a_changed_configuration_of_one_step_is_a_comparison_of_its_own(tmp_path):
    """The baseline is the same: the looks count, and the new comparison has one at the reserve."""
    configurations = dict.fromkeys(EFFECTS, "a")
    report(tmp_path, 3, configurations=configurations)
    changed = report(tmp_path, 3, configurations={**configurations, "small": "b"})
    assert shares(changed) == [0.2, 0.05] and changed["planned"] == 4
    assert [v["look"] for v in changed["verdicts"]] == [1, 2, 1]
    other = report(tmp_path, 3, configurations=dict.fromkeys(EFFECTS, "c"))
    assert shares(other) == [0.2] and other["planned"] == 3


def test_a_changed_rule_is_judged_at_the_same_cost_and_marked(tmp_path):
    rule = VerdictRule(band=0.05)
    report(tmp_path, 3, rule=rule)
    study = report(tmp_path, 5, rule=rule)
    assert words(study)["none"] is EQUIVALENT and words(study)["large"] is BETTER
    wider = report(tmp_path, 5, rule=replace(rule, band=1.0))
    assert shares(wider) == [0.2] and set(words(wider).values()) == {EQUIVALENT}
    for verdict in wider["verdicts"]:
        assert verdict["remarks"][-1] == "rule changed after results: band"
    again = report(tmp_path, 5, rule=replace(rule, band=1.0))
    assert document_of(again) == document_of(wider)
    back = report(tmp_path, 5, rule=rule)
    assert back["verdicts"][0]["remarks"][-1] == "rule changed after results: now as before"
    assert words(back) == words(study)


def test_strict_asks_for_a_word_on_every_comparison_and_rounding_for_no_seeds(tmp_path):
    same = {("none", s): SeedOutcome(s, LOSSES["base"][s - 1] + 1e-7 * s) for s in range(1, 4)}
    study = report(tmp_path, 3, same)
    assert "none vs base" in study["closed"][-1] and words(study)["none"] is INCONCLUSIVE
    codes = [verdicts_exit_code(document_of(study), strict=strict) for strict in (False, True)]
    assert codes == [0, 5]
    decided = judge([Contrast.pair("large", "base")], outcomes(5), VerdictPlan())
    assert verdicts_exit_code(document_of(decided), strict=True) == 0


def test_a_word_without_its_a_a_step_has_a_remark_and_a_later_failure_marks_all():
    missing, pair = "its A/A step has not ended", [Contrast.pair("none", "base", "a/a")]
    steps = contrasts([arm for arm in EFFECTS if arm != "none"])
    plan, runs = VerdictPlan(RULE, looks=LOOKS, declared=[*steps, *pair]), outcomes(3)
    failed = [replace(run, loss=run.loss - 0.3 + 1e-3 * run.seed) for run in runs["base"]]
    for aa, remarks, code in (
        ([], {missing}, 0),
        (runs["none"][:2], {missing}, 0),
        (runs["none"], set(), 0),
        (failed, {AA_FAILED}, 4),
    ):
        study = judged([*steps, *pair], {**runs, "none": aa}, plan)
        large = by_step(study)["large"]
        assert large["verdict"] is BETTER and large["look"] == 1
        assert {missing, AA_FAILED} & {*large["remarks"]} == remarks
        assert verdicts_exit_code(document_of(study)) == code
