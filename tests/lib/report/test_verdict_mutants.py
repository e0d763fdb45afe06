"""Faults planted in the source of the verdicts, each noticed by a named test of this folder."""

import inspect
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from lib.report import contrasts, declarations, judge, study, verdicts
from lib.report import statistics as engine
from tests.lib.report import test_looks, test_simulated, test_verdicts


def plant(patch, owner, name, old, new):
    """Replace ``old`` by ``new`` in the source of a function, in every module that imported it."""
    right = vars(owner)[name]
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{name} does not contain {old!r}"
    scope = {}
    exec(source.replace(old, new), function.__globals__, scope)
    patch.setattr(owner, name, scope[name])
    for module in [m for m in sys.modules.values() if "lib.report" in m.__name__]:
        if vars(module).get(name) is right:
            patch.setattr(module, name, scope[name])


def folder(test, *arguments):
    """Return a test of a folder's reports without its fixture."""

    def run():
        with tempfile.TemporaryDirectory() as path:
            test(Path(path), *arguments)

    return run


REPORTS = folder(
    test_looks.test_a_hundred_reports_cost_nothing_and_an_extra_block_half_of_the_reserve
)
ARRIVES = folder(test_looks.test_a_missing_run_is_judged_once_when_it_arrives)
STAYS = folder(test_looks.test_a_word_stays_as_it_was_given)
OWN = folder(test_looks.test_the_own_rule_steps_down_over_the_open_comparisons)
WAITS = folder(test_looks.test_a_comparison_waits_for_its_own_runs_only, "none", {"large", "small"})
PARTS = folder(
    test_looks.test_words_of_a_part_are_corrected_at_once_and_the_whole_is_as_without_it, "shared"
)
GOLDEN = test_verdicts.test_a_single_contrast_is_the_paired_t_test
FOUR = test_verdicts.test_four_contrasts_share_their_variance
EQUAL = test_verdicts.test_equivalence_is_two_one_sided_tests
MISSING = test_verdicts.test_a_missing_run_reduces_n_but_not_the_family
UNFAIR = test_verdicts.test_losses_that_cannot_be_separate_trainings_are_unfair
QUIET = test_verdicts.test_a_step_of_nearly_no_variance_does_not_lower_that_of_the_others
OF_STUDY = judge._Study

# Function, its right text, the fault, and the test that notices it.
MUTANTS = {
    "population variance": (engine, "deviation_of", "len(values) - 1", "len(values)", GOLDEN),
    "normal instead of t": (engine.ContrastSample, "tail", "), degrees)", "), 1e6)", GOLDEN),
    "unpaired test": (
        *(verdicts, "_untested", '"sd": deviation_of(differences)'),
        *('"sd": math.hypot(*map(deviation_of, values.values()))', GOLDEN),
    ),
    "pairs misaligned": (
        *(verdicts, "_untested", "values[arm][block]"),
        *("values[arm][block - (arm != contrast.reference)]", GOLDEN),
    ),
    "losses sorted before pairing": (
        *(verdicts, "_untested", "[runs[s] for s in complete]"),
        *("sorted(runs[s] for s in complete)", test_verdicts.test_pairs_are_runs_of_one_seed),
    ),
    "pairs by position": (
        *(
            verdicts,
            "_untested",
            "sorted(outcomes.get(arm, ()), key=lambda o: (o.seed, o.reason, o.items))",
        ),
        "[SeedOutcome(i, o.loss) for i, o in enumerate(outcomes.get(arm, ()))]",
        test_verdicts.test_the_order_of_runs_and_arms_changes_no_byte,
    ),
    "the smaller variance": (engine, "_test", "max(sample.run_sd", "min(sample.run_sd", FOUR),
    "no correction": (engine, "contrast_tests", "[m * p for", "[p for", FOUR),
    "degrees of freedom of all steps": (
        *(engine, "mean_degrees", "3 * live / (live + 2)", "live", FOUR),
    ),
    "degrees of freedom of the planned contrasts": (
        *(engine, "_test", "(variance, sample.n, live)", "(variance, sample.n, 35)"),
        MISSING,
    ),
    "Holm with the shared variance": (
        *(engine, "contrast_tests", "else [m * p for p in values]", "else holm(values, m)", FOUR),
    ),
    "Bonferroni with the own variance": (
        *(engine, "contrast_tests", "holm(values, m - rejected)", "[m * p for p in values]"),
        test_verdicts.test_the_own_rule_steps_down,
    ),
    "no gate": (
        engine,
        "_test",
        'gated = variance == "shared" and live > 1',
        "gated = 0",
        FOUR,
    ),
    "dead settings in the mean variance": (engine, "mean_run_sd", "if v > limit]", "]", QUIET),
    "rounding tested": (
        *(verdicts, "_untested", "< _ROUNDING_NATS", "< 0"),
        test_verdicts.test_rounding_is_never_better_and_changes_no_other_verdict,
    ),
    "family of the finished contrasts": (
        *(verdicts, "verdicts_at", "max(len(contrasts), planned)", "len(contrasts)", MISSING),
    ),
    "parents left out of the family": (
        *(contrasts, "_contrasts", "if parent != baseline and", "if False and"),
        test_verdicts.test_the_family_of_a_study,
    ),
    "one-sided p": (engine, "_test", "else 2 * sample", "else sample", FOUR),
    "sign of the band": (engine, "_test", "band - abs", "-band - abs", EQUAL),
    "difference's p as the p of equivalence": (
        *(engine, "_test", "equivalent = sample.tail(margin, sd, degrees)"),
        *("equivalent = 1 - p", EQUAL),
    ),
    "equivalence at half the error": (
        *(engine, "_test", "equivalent = sample", "equivalent = 2 * sample", EQUAL),
    ),
    "diverged seeds dropped": (
        *(verdicts, "_divergence", "if runs[s].diverged", "if False"),
        test_verdicts.test_a_diverged_seed_leaves_no_number,
    ),
    "duplicate seeds accepted": (verdicts, "_unfairness", "count > 1", "count > 9", UNFAIR),
    "an equal model accepted": (
        *(verdicts, "_implausible", "if len(contrast.weights) == 2:", "if False:", UNFAIR),
    ),
    "reference minus step": (
        *(contrasts.Contrast, "pair", "{step: 1.0, reference: -1.0}"),
        *("{step: -1.0, reference: 1.0}", FOUR),
    ),
    "two seeds suffice": (
        *(verdicts, "_untested", "if n < rule.min_seeds:", "if n < 2:"),
        test_verdicts.test_one_or_two_seeds_give_the_difference_and_no_word,
    ),
    "forecast without the correction": (
        *(engine, "more_seeds", 'test["planned_comparisons"]', "1", FOUR),
    ),
    "spending reset at each report": (
        *(judge, "declare", "append_declarations(plan.folder, missing)", "tuple(missing(()))"),
        STAYS,
    ),
    "unplanned looks for nothing": (
        *(declarations, "reserve_share", "left / 2", "left / 10**9", REPORTS),
    ),
    "a comparison judged as soon as one run has ended": (
        *(OF_STUDY, "_has_ended", "all(", "any(", WAITS),
    ),
    "words of a part as those of the whole": (
        *(OF_STUDY, "_level", "is_complete, differing", "True, differing", PARTS),
    ),
    "a word without the A/A step as with it": (
        *(OF_STUDY, "_marked", "c.role == AA_ROLE]", 'c.role == ""]'),
        test_looks.test_a_word_without_its_a_a_step_has_a_remark_and_a_later_failure_marks_all,
    ),
    "pairing of one step as a fact": (
        *(study, "pairing_gain", "in verdicts:", "in verdicts[:1]:"),
        test_verdicts.test_pairing_is_reported_for_the_study,
    ),
    "outliers at five deviations for every n": (
        *(engine, "outlier_limit", "return min(", "return 5.0 or min("),
        lambda: test_simulated.test_one_percent_of_normal_steps_have_an_outlying_run(5),
    ),
    "seed replaced after a failure": (
        *(OF_STUDY, "_due", "not set(look.seeds) <= set(seeds)", "False"),
        folder(test_looks.test_a_seed_that_a_look_has_seen_cannot_be_replaced),
    ),
    "added comparisons judged at the last look": (
        *(declarations, "is_declared", "known = family.get(name)", "return True"),
        folder(test_looks.test_comparisons_added_after_a_look_have_a_look_of_their_own),
    ),
    "a look at another configuration counts": (
        *(declarations, "concerning", "arm in arms and _same_digest(digest, arms[arm])", "True"),
        folder(test_looks.test_a_study_without_common_runs_has_looks_and_a_family_of_its_own),
    ),
    "m of the tested contrasts": (
        *(verdicts, "_test", "rule.band, m, level", "rule.band, len(samples), level"),
        ARRIVES,
    ),
    "every look spends all of alpha": (OF_STUDY, "_level", "look.share,", "1.0,", ARRIVES),
    "words judged again": (OF_STUDY, "_shown", 'now["name"] in decided', "False", STAYS),
    "variances of decided contrasts dropped": (
        *(verdicts, "verdicts_at", "in decided if", "in () if"),
        folder(test_looks.test_a_decided_step_keeps_its_variance_in_the_mean),
    ),
    "decided contrasts corrected for": (
        *(OF_STUDY, "_level", "differing = len(words) - equivalent", "differing = 0", OWN),
    ),
    "nobody is better": (
        *(verdicts, "_word", 'test["p_adjusted"] <= alpha', "False"),
        lambda: test_simulated.test_the_arrays_give_the_same_words_as_the_product(
            "14 real, 4 x3", "shared"
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_noticed(name, monkeypatch):
    *fault, caught_by = MUTANTS[name]
    plant(monkeypatch, *fault)
    with pytest.raises((AssertionError, TypeError, ValueError, IndexError)) as caught:
        caught_by()
    assert caught.type is AssertionError, caught.value
