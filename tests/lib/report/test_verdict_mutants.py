"""Faults planted in the source of the verdicts, each noticed by a named test of this folder."""

import inspect
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from lib.report import declarations, judge, verdicts
from lib.report import statistics as engine
from tests.lib.report import test_looks, test_verdicts


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


REPORTS = folder(test_looks.test_reports_cost_nothing_and_an_extra_block_half_of_the_reserve)
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
    "unpaired test": (
        *(verdicts, "_untested", '"sd": deviation_of(differences)'),
        *('"sd": math.hypot(*map(deviation_of, values.values()))', GOLDEN),
    ),
    "losses sorted before pairing": (
        *(verdicts, "_untested", "[runs[s] for s in complete]"),
        *("sorted(runs[s] for s in complete)", test_verdicts.test_pairs_are_runs_of_one_seed),
    ),
    "no correction": (engine, "contrast_tests", "[m * p for", "[p for", FOUR),
    "degrees of freedom of the planned contrasts": (
        *(engine, "_test", "(variance, sample.n, live)", "(variance, sample.n, 35)"),
        MISSING,
    ),
    "no gate": (
        engine,
        "_test",
        'gated = variance == "shared" and live > 1',
        "gated = 0",
        FOUR,
    ),
    "dead settings in the mean variance": (engine, "mean_run_sd", "if v > limit]", "]", QUIET),
    "family of the finished contrasts": (
        *(verdicts, "verdicts_at", "max(len(contrasts), planned)", "len(contrasts)", MISSING),
    ),
    "diverged seeds dropped": (
        *(verdicts, "_divergence", "if runs[s].diverged", "if False"),
        test_verdicts.test_a_diverged_seed_leaves_no_number,
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
    "seed replaced after a failure": (
        *(OF_STUDY, "_due", "not set(look.seeds) <= set(seeds)", "False"),
        folder(test_looks.test_a_seed_that_a_look_has_seen_cannot_be_replaced),
    ),
    "added comparisons judged at the last look": (
        *(declarations, "is_declared", "known = family.get(name)", "return True"),
        folder(test_looks.test_comparisons_added_after_a_look_have_a_look_of_their_own),
    ),
    "m of the tested contrasts": (
        *(verdicts, "_test", "rule.band, m, level", "rule.band, len(samples), level"),
        ARRIVES,
    ),
    "every look spends all of alpha": (OF_STUDY, "_level", "look.share,", "1.0,", ARRIVES),
    "variances of decided contrasts dropped": (
        *(verdicts, "verdicts_at", "in decided if", "in () if"),
        folder(test_looks.test_a_decided_step_keeps_its_variance_in_the_mean),
    ),
    "decided contrasts corrected for": (
        *(OF_STUDY, "_level", "differing = len(words) - equivalent", "differing = 0", OWN),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_noticed(name, monkeypatch):
    *fault, caught_by = MUTANTS[name]
    plant(monkeypatch, *fault)
    with pytest.raises((AssertionError, TypeError, ValueError, IndexError)) as caught:
        caught_by()
    assert caught.type is AssertionError, caught.value
