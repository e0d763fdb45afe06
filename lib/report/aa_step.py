"""A/A steps: the baseline with other initial weights, a step without an effect by construction.

The step is outside the family of comparisons and outside their mean variance. It is tested alone by a
paired t-test of its own variance, at the alpha of the look. A difference shows that the study claims
differences where none exist, and marks every verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lib.plan.run import RunVariant
from lib.report.contrast_tests import ErrorLevel, VerdictRule
from lib.report.verdicts import Contrast, ContrastVerdict, SeedOutcome, VerdictWord, judge

# Role of the comparison, and the remark on every verdict of the study.
AA_ROLE = "a/a"
AA_FAILED = "A/A step failed"


def aa_contrasts(variants: Sequence[RunVariant]) -> list[Contrast]:
    """Return the comparison of each A/A step with its parent, if the parent is planned."""
    names = {variant.slug for variant in variants}
    steps = [variant for variant in variants if variant.is_aa and variant.parent in names]
    return [Contrast.pair(step.slug, step.parent, AA_ROLE) for step in steps]


def judge_aa_steps(
    contrasts: Sequence[Contrast],
    outcomes: Mapping[str, Sequence[SeedOutcome]],
    rule: VerdictRule,
    level: ErrorLevel | None,
) -> list[ContrastVerdict]:
    """Return the verdict on each comparison, tested alone; ``level`` is that of the look."""
    alone = replace(rule, variance="own")
    share = level and ErrorLevel(level.share)
    return [judge([contrast], outcomes, alone, 1, share)[0] for contrast in contrasts]


def is_failed(verdict: ContrastVerdict) -> bool:
    """Return whether the A/A step differs from its parent."""
    return verdict.word in (VerdictWord.BETTER, VerdictWord.WORSE)


def aa_word(verdict: ContrastVerdict) -> str:
    """Return the result of an A/A step as text."""
    if is_failed(verdict):
        return AA_FAILED
    unknown = verdict.word in (VerdictWord.UNFAIR, VerdictWord.DIVERGED)
    return f"A/A step {verdict.word if unknown else 'passed'}"
