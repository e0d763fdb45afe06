"""Faults planted in the engine of verdicts, each noticed by a named test of this folder."""

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lib.report import declarations, judge, study, verdicts
from lib.report import statistics as engine
from lib.report.contrasts import Contrast
from lib.report.judge import _Study
from lib.report.statistics import ContrastSample, bonferroni, holm
from lib.report.verdicts import VerdictWord
from tests.lib.report import test_looks, test_simulated, test_verdicts


@dataclass(frozen=True)
class EngineMutant:
    """A fault, and the test that fails with it."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    caught_by: Callable[[], None]


def _function(module, name, change):
    """Return a plant that replaces a function by ``change`` of it."""
    original = getattr(module, name)
    return lambda patch: patch.setattr(module, name, change(original))


def _method(name, change):
    original = ContrastSample.__dict__[name]
    return lambda patch: patch.setattr(ContrastSample, name, change(original))


def _tail(change):
    """Return a plant that changes standard deviation and degrees of freedom of every tail."""
    return _method(
        "tail",
        lambda tail: lambda self, distance, sd, df: tail(self, *change(self, distance, sd, df)),
    )


def _raw(change):
    """Return a plant that changes the arguments of every test."""
    return _function(engine, "_raw_test", lambda test: lambda *a: test(*change(*a)))


def _population_sd(values):
    return statistics.pstdev(values)


def _unpaired(verdicts_at):
    """Return a judge with the variance of two separate groups."""

    def changed(contrasts, outcomes, rule, planned=None):
        def sd(differences):
            groups = [[r.loss for r in runs] for runs in outcomes.values()]
            return math.sqrt(sum(statistics.variance(group) for group in groups[:2]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verdicts, "deviation_of", sd)
            patch.setattr(engine, "deviation_of", sd)
            return verdicts_at(contrasts, outcomes, rule, planned)

    return changed


def _renumbered(order):
    """Return a change of the outcomes that pairs runs in another order."""

    def change(verdicts_at):
        def changed(contrasts, outcomes, rule, planned=None):
            mixed = {
                arm: [replace(r, seed=seed) for seed, r in enumerate(order(arm, runs))]
                for arm, runs in outcomes.items()
            }
            return verdicts_at(contrasts, mixed, rule, planned)

        return changed

    return change


def _position(arm, runs):
    return runs


def _sorted(arm, runs):
    return sorted(runs, key=lambda run: run.loss)


def _shifted(arm, runs):
    return runs if arm == "base" else [*runs[1:], runs[0]]


def _dropped(verdicts_at):
    """Return a judge that forgets diverged seeds."""

    def changed(contrasts, outcomes, rule, planned=None):
        left = {arm: [r for r in runs if not r.diverged] for arm, runs in outcomes.items()}
        return verdicts_at(contrasts, left, rule, planned)

    return changed


def _one_way(test):
    return lambda sample, *a: (lambda t: {**t, "p": t["p"] / 2})(test(sample, *a))  # one-sided


def _ungated(test):
    def changed(sample, variance, band, live, mean_sd):
        found = test(sample, variance, band, live, mean_sd)
        if variance != "shared":
            return found
        p = 2 * sample.tail(abs(sample.mean), found["sd_of_rule"], found["degrees_of_freedom"])
        margin = band - abs(sample.mean)
        equal = (
            sample.tail(margin, found["sd_of_rule"], found["degrees_of_freedom"])
            if band > 0
            else None
        )
        return {**found, "p": p, "p_equivalent": equal}

    return changed


def _quieter(sample, variance, band, live, mean_sd):
    quiet = mean_sd and min(sample.run_sd, mean_sd)
    if quiet is None or variance != "shared":
        return sample, variance, band, live, mean_sd
    return sample._replace(sd=quiet * math.sqrt(sample.scale)), variance, band, live, quiet


def _patched_judge(change):
    """Return a plant of a changed ``judge``, in the product and in the tests that imported it."""

    def plant(patch):
        changed = change(verdicts.verdicts_at)
        for module in (verdicts, test_verdicts, test_simulated):
            patch.setattr(module, "verdicts_at", changed)

    return plant


def _arrays(name):
    return lambda: test_simulated.test_the_arrays_give_the_same_words_as_the_product(name, "shared")


def _family(change):
    original = test_verdicts.family_of
    return lambda patch: patch.setattr(test_verdicts, "family_of", lambda *a: change(original(*a)))


def _folder(test):
    """Return a test of a folder's reports without its fixture."""

    def run():
        with tempfile.TemporaryDirectory() as folder:
            test(Path(folder))

    return run


def _judged_by_study(change):
    """Return a plant that changes how the looks are judged; ``change`` gets the arguments."""
    return _function(judge, "verdicts_at", lambda at: lambda *a: at(*change(*a)))


def _any_seeds(patch):
    """Plant a look that does not require the seeds of earlier looks."""
    due = _Study._due

    def changed(self):
        self.looks = [replace(look, seeds=()) for look in self.looks]
        return due(self)

    patch.setattr(_Study, "_due", changed)


REPORTS = _folder(
    test_looks.test_a_hundred_reports_cost_nothing_and_an_extra_block_half_of_the_reserve
)
ARRIVES = _folder(test_looks.test_a_missing_run_is_judged_once_when_it_arrives)
STAYS = _folder(test_looks.test_a_word_stays_as_it_was_given)
OWN = _folder(test_looks.test_the_own_rule_steps_down_over_the_open_comparisons)

GOLDEN = test_verdicts.test_a_single_contrast_is_the_paired_t_test
FOUR = test_verdicts.test_four_contrasts_share_their_variance
EQUAL = test_verdicts.test_equivalence_is_two_one_sided_tests
MISSING = test_verdicts.test_a_missing_run_reduces_n_but_not_the_family


def _normal(self, distance, sd, degrees):
    return distance, sd, 1e6


INCONCLUSIVE = VerdictWord.INCONCLUSIVE

MUTANTS = [
    EngineMutant(
        "population variance",
        lambda patch: [
            patch.setattr(module, "deviation_of", _population_sd) for module in (engine, verdicts)
        ],
        GOLDEN,
    ),
    EngineMutant("normal instead of t", _tail(_normal), GOLDEN),
    EngineMutant("unpaired test", _patched_judge(_unpaired), GOLDEN),
    EngineMutant("pairs misaligned", _patched_judge(_renumbered(_shifted)), GOLDEN),
    EngineMutant(
        "losses sorted before pairing",
        _patched_judge(_renumbered(_sorted)),
        test_verdicts.test_pairs_are_runs_of_one_seed,
    ),
    EngineMutant(
        "pairs by position",
        _patched_judge(_renumbered(_position)),
        test_verdicts.test_the_order_of_runs_and_arms_changes_no_byte,
    ),
    EngineMutant("the smaller variance", _raw(_quieter), FOUR),
    EngineMutant(
        "no correction",
        _function(engine, "bonferroni", lambda f: lambda values, m: f(values, 1)),
        FOUR,
    ),
    EngineMutant(
        "degrees of freedom of all steps",
        _function(engine, "shared_degrees", lambda f: lambda n, live: (n - 1) * live),
        FOUR,
    ),
    EngineMutant(
        "degrees of freedom of the planned contrasts",
        _raw(lambda sample, variance, band, live, sd: (sample, variance, band, 35, sd)),
        MISSING,
    ),
    EngineMutant(
        "Holm with the shared variance",
        lambda patch: patch.setattr(engine, "bonferroni", holm),
        FOUR,
    ),
    EngineMutant(
        "Bonferroni with the own variance",
        lambda patch: patch.setattr(engine, "holm", bonferroni),
        test_verdicts.test_the_own_rule_steps_down,
    ),
    EngineMutant("no gate", _function(engine, "_raw_test", _ungated), FOUR),
    EngineMutant(
        "dead settings in the mean variance",
        _function(engine, "_live", lambda f: lambda samples: [True] * len(samples)),
        test_verdicts.test_a_step_of_nearly_no_variance_does_not_lower_that_of_the_others,
    ),
    EngineMutant(
        "rounding tested",
        lambda patch: patch.setattr(verdicts, "_ROUNDING_NATS", 0.0),
        test_verdicts.test_rounding_is_never_better_and_changes_no_other_verdict,
    ),
    EngineMutant(
        "family of the finished contrasts",
        _patched_judge(
            lambda verdicts_at: lambda c, o, rule, planned=None: verdicts_at(c, o, rule)
        ),
        MISSING,
    ),
    EngineMutant(
        "parents left out of the family",
        _family(lambda family: [c for c in family if c.role != "parent"]),
        test_verdicts.test_the_family_of_a_study,
    ),
    EngineMutant("one-sided p", _function(engine, "_raw_test", _one_way), FOUR),
    EngineMutant(
        "sign of the band",
        _raw(lambda sample, variance, band, *rest: (sample, variance, -band, *rest)),
        EQUAL,
    ),
    EngineMutant(
        "difference's p as the p of equivalence",
        _function(
            engine,
            "_raw_test",
            lambda test: lambda *a: (lambda t: {**t, "p_equivalent": 1 - t["p"]})(test(*a)),
        ),
        EQUAL,
    ),
    EngineMutant(
        "equivalence at half the error",
        _function(
            engine,
            "_raw_test",
            lambda test: lambda *a: (
                lambda t: {**t, "p_equivalent": t["p_equivalent"] and 2 * t["p_equivalent"]}
            )(test(*a)),
        ),
        EQUAL,
    ),
    EngineMutant(
        "diverged seeds dropped",
        _patched_judge(_dropped),
        test_verdicts.test_a_diverged_seed_leaves_no_number,
    ),
    EngineMutant(
        "duplicate seeds accepted",
        lambda patch: patch.setattr(verdicts, "_unfairness", lambda arms: ""),
        test_verdicts.test_losses_that_cannot_be_separate_trainings_are_unfair,
    ),
    EngineMutant(
        "an equal model accepted",
        lambda patch: patch.setattr(verdicts, "_implausible", lambda *a: ""),
        test_verdicts.test_losses_that_cannot_be_separate_trainings_are_unfair,
    ),
    EngineMutant(
        "reference minus step",
        lambda patch: patch.setattr(
            Contrast,
            "pair",
            classmethod(lambda cls, s, r, role="baseline": cls(s, r, role, {s: -1.0, r: 1.0})),
        ),
        FOUR,
    ),
    EngineMutant(
        "two seeds suffice",
        lambda patch: patch.setattr(
            verdicts, "_is_testable", lambda v: v["verdict"] in (None, INCONCLUSIVE) and v["n"] > 1
        ),
        test_verdicts.test_one_or_two_seeds_give_the_difference_and_no_word,
    ),
    EngineMutant(
        "forecast without the correction",
        _function(
            verdicts,
            "more_seeds",
            lambda f: lambda sample, test, *rest: f(
                sample, {**test, "planned_comparisons": 1}, *rest
            ),
        ),
        FOUR,
    ),
    EngineMutant(
        "spending reset at each report",
        lambda patch: patch.setattr(
            judge,
            "append_declarations",
            lambda folder, missing: tuple(missing(())),
        ),
        STAYS,
    ),
    EngineMutant(
        "unplanned looks for nothing",
        _function(declarations, "reserve_share", lambda f: lambda *a: 1e-9),
        REPORTS,
    ),
    EngineMutant(
        "a comparison judged as soon as one run has ended",
        lambda patch: patch.setattr(_Study, "_has_ended", lambda *a: True),
        _folder(
            lambda folder: test_looks.test_a_comparison_waits_for_its_own_runs_only(
                folder, "none", {"large", "small"}
            )
        ),
    ),
    EngineMutant(
        "words of a part as those of the whole",
        _function(
            judge,
            "ErrorLevel",
            lambda level: lambda share, _=1, *a: level(share, True, *a),
        ),
        _folder(
            lambda folder: test_looks.test_words_of_a_part_are_corrected_at_once_and_the_whole_is_as_without_it(
                folder, "shared"
            )
        ),
    ),
    EngineMutant(
        "a word without the A/A step as with it",
        lambda patch: patch.setattr(judge, "AA_ROLE", ""),
        test_looks.test_a_word_without_its_a_a_step_has_a_remark_and_a_later_failure_marks_all,
    ),
    EngineMutant(
        "pairing of one step as a fact",
        lambda patch: patch.setattr(
            test_verdicts,
            "pairing_gain",
            lambda verdicts: study.pairing_gain(verdicts[:1]),
        ),
        test_verdicts.test_pairing_is_reported_for_the_study,
    ),
    EngineMutant(
        "outliers at five deviations for every n",
        lambda patch: patch.setattr(test_simulated, "outlier_limit", lambda n: 5.0),
        lambda: test_simulated.test_one_percent_of_normal_steps_have_an_outlying_run(5),
    ),
    EngineMutant(
        "seed replaced after a failure",
        _any_seeds,
        _folder(test_looks.test_a_seed_that_a_look_has_seen_cannot_be_replaced),
    ),
    EngineMutant(
        "added comparisons judged at the last look",
        _function(judge, "is_declared", lambda f: lambda name, arms, family: True),
        _folder(test_looks.test_comparisons_added_after_a_look_have_a_look_of_their_own),
    ),
    EngineMutant(
        "a look at another configuration counts",
        lambda patch: patch.setattr(judge, "concerning", lambda lines, arms: lines),
        _folder(test_looks.test_a_study_without_common_runs_has_looks_and_a_family_of_its_own),
    ),
    EngineMutant(
        "m of the tested contrasts",
        _function(
            verdicts,
            "contrast_tests",
            lambda f: lambda samples, variance, band, m, *rest: f(
                samples, variance, band, len(samples), *rest
            ),
        ),
        ARRIVES,
    ),
    EngineMutant(
        "every look spends all of alpha",
        _judged_by_study(
            lambda c, o, rule, m, level, former: (
                c,
                o,
                rule,
                m,
                level and replace(level, share=1.0),
                former,
            )
        ),
        ARRIVES,
    ),
    EngineMutant(
        "words judged again",
        lambda patch: patch.setattr(judge, "LASTING_WORDS", ()),
        STAYS,
    ),
    EngineMutant(
        "variances of decided contrasts dropped",
        _function(
            verdicts,
            "contrast_tests",
            lambda f: lambda samples, variance, band, m, level, decided: f(
                samples, variance, band, m, level
            ),
        ),
        _folder(test_looks.test_a_decided_step_keeps_its_variance_in_the_mean),
    ),
    EngineMutant(
        "decided contrasts corrected for",
        _judged_by_study(
            lambda c, o, rule, m, level, former: (
                c,
                o,
                rule,
                m,
                level and replace(level, differing=0),
                former,
            )
        ),
        OWN,
    ),
    EngineMutant(
        "nobody is better",
        lambda patch: patch.setattr(verdicts, "_word", lambda *a: VerdictWord.INCONCLUSIVE),
        _arrays("14 real, 4 x3"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fault_is_noticed(mutant, monkeypatch):
    mutant.caught_by()
    mutant.plant(monkeypatch)
    with pytest.raises(
        (AssertionError, TypeError, ValueError, IndexError, ZeroDivisionError)
    ) as caught:
        mutant.caught_by()
    assert caught.type is AssertionError, caught.value
