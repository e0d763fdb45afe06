"""Verdicts: what the losses of several steps over several seeds allow one to claim.

A contrast is a weighted sum of the losses of runs with the same seed, such as step minus baseline;
each seed (a block) gives one number, in nats, and negative is better. The contrasts of a study form
one family: their number is planned before the first run, and failures do not reduce it. Two errors
are each limited to ``alpha`` per study: a false BETTER or WORSE, and a false EQUIVALENT.

The rules differ in the variance of a contrast. ``own`` uses the contrast's own variance and Holm's
correction (Holm 1979). ``shared`` uses the larger of the own and the mean variance of k contrasts
with (n−1)·3k/(k+2) degrees of freedom and Bonferroni's correction; a word also requires that the
contrast's own 95 % interval excludes 0 (or lies in the band). ``factorial`` uses the mean variance
of the effects of a factorial design, and gives no word if one run is much noisier than the others.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from lib.report.contrast_tests import (
    INTERVAL_ERROR,
    SPREAD_VARIANCES,
    WHOLE_ALPHA,
    ContrastSample,
    ContrastTest,
    ErrorLevel,
    VerdictRule,
    contrast_tests,
    deviation_of,
    has_outlier,
    interval_of,
    interval_of_noise,
    mean_of,
    mean_run_sd,
    more_seeds,
    noisy_runs,
)
from lib.report.contrasts import Contrast
from lib.report.options import MIN_SEEDS
from lib.report.significance import sign_flip_p, smallest_p
from lib.units import format_difference, format_interval

# Differences below this many nats are rounding; no step is better because of them.
_ROUNDING_NATS = 1e-5
_SMALLEST_BAND = 1e-4
# Differences that agree in all but the last bits of the losses.
_CONSTANT_ULPS = 8


class VerdictWord(StrEnum):
    """Result of a study for one contrast."""

    BETTER = "BETTER"
    WORSE = "WORSE"
    EQUIVALENT = "EQUIVALENT"
    INCONCLUSIVE = "INCONCLUSIVE"
    UNFAIR = "UNFAIR"
    DIVERGED = "DIVERGED"


# Beginning of the remark on unstable runs.
UNSTABLE_REMARK = "UNSTABLE: "


@dataclass(frozen=True)
class SeedOutcome:
    """Outcome of one run: a loss in nats per token, a divergence, or a missing result."""

    seed: int
    # None if the run diverged or has no result.
    loss: float | None
    diverged: bool = False
    # Reason for the missing loss.
    reason: str = ""
    # Whether loss or gradient norm jumped during training (lib/tracking/stability.py).
    unstable: bool = False
    # Digest of the losses of all evaluation items; "" if unknown.
    items: str = ""
    # Loss of each evaluation document, in the order of the evaluation set; empty if unknown.
    documents: tuple[float, ...] = ()
    # Fields in which the run differs from the study without a declaration.
    undeclared: tuple[str, ...] = ()
    # Seconds since the epoch; None if unknown.
    started_at: float | None = None
    ended_at: float | None = None
    # Whether the run is one of another study, reused by this one.
    reused: bool = False
    # Tokens per second of training, and the device; None and "" if unknown.
    speed: float | None = None
    device: str = ""
    # False if the run waits or is running: its outcome is not known yet.
    ended: bool = True


@dataclass(frozen=True)
class ContrastVerdict:
    """The word on one contrast, with all that it rests on. Losses are in nats per token."""

    contrast: Contrast
    word: VerdictWord
    # Number of planned comparisons.
    planned: int
    rule: VerdictRule
    # Why the word is UNFAIR, DIVERGED or INCONCLUSIVE.
    reason: str = ""
    remarks: tuple[str, ...] = ()
    # Complete blocks: seeds, losses of each arm and differences.
    seeds: tuple[int, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    differences: tuple[float, ...] = ()
    # Mean difference; None if the word is UNFAIR or DIVERGED, or no block is complete.
    difference: float | None = None
    # Sample standard deviation of the differences.
    sd: float | None = None
    test: ContrastTest | None = None
    # Standard error of the difference over the documents of the evaluation set; None if unknown.
    document_error: float | None = None
    # p of the own t-test, exact p of the sign-flip test, and its smallest possible value.
    p_own: float | None = None
    p_sign_flip: float | None = None
    p_smallest: float | None = None
    # About this many further seeds give a word; None if none or too many are needed.
    more_seeds: int | None = None
    # The word and p under the other rule.
    other: Mapping[str, Any] = field(default_factory=dict)
    # Runs that do not count, with reasons.
    excluded: tuple[str, ...] = ()
    # Number of the look that judged the contrast, and its share of alpha: 0 if no look was due.
    look: int | None = None
    share: float = 1.0
    # Interval that is valid at all looks together.
    interval_of_look: tuple[float, float] | None = None

    @property
    def n(self) -> int:
        """Return the number of complete blocks."""
        return len(self.seeds)

    @property
    def p_of_word(self) -> float | None:
        """Return the corrected p: of the band if EQUIVALENT, else of the difference."""
        if self.test is None:
            return None
        equal = self.word is VerdictWord.EQUIVALENT
        return self.test.p_equivalent_adjusted if equal else self.test.p_adjusted

    @property
    def is_rounding(self) -> bool:
        """Return whether the models differ by rounding only, which more seeds cannot resolve."""
        return self.n >= self.rule.min_seeds and max(map(abs, self.differences)) < _ROUNDING_NATS

    @property
    def is_given(self) -> bool:
        """Return whether there is a word: too few seeds give none, nor do seeds between looks."""
        judged = self.n >= self.rule.min_seeds and self.share > 0
        return judged or self.word is not VerdictWord.INCONCLUSIVE

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain JSON types; a value that was not computed is null."""
        test = self.test
        return {
            "step": self.contrast.step,
            "reference": self.contrast.reference,
            "role": self.contrast.role,
            "weights": dict(self.contrast.weights),
            "verdict": self.word.value if self.is_given else None,
            "reason": self.reason or None,
            "remarks": list(self.remarks),
            "seeds": list(self.seeds),
            "n": self.n,
            "values": {arm: list(losses) for arm, losses in self.values.items()},
            "differences": list(self.differences),
            "difference": self.difference,
            "sd": self.sd,
            "document_error": self.document_error,
            "interval_95": list(test.interval) if test else None,
            "interval_of_look": list(self.interval_of_look) if self.interval_of_look else None,
            "sd_of_rule": test and test.sd,
            "degrees_of_freedom": test and test.degrees,
            "p": test and test.p,
            "p_adjusted": test and test.p_adjusted,
            "p_equivalent": test and test.p_equivalent,
            "p_equivalent_adjusted": test and test.p_equivalent_adjusted,
            "p_own": self.p_own,
            "gated": test and test.is_gated,
            "p_sign_flip": self.p_sign_flip,
            "p_smallest_sign_flip": self.p_smallest,
            "planned_comparisons": self.planned,
            "alpha": self.rule.alpha,
            "look": self.look,
            "share": self.share,
            "alpha_of_look": self.rule.alpha * self.share,
            "band": self.rule.band,
            "variance": self.rule.variance,
            "more_seeds": self.more_seeds,
            "other_rule": dict(self.other) or None,
            "excluded": list(self.excluded),
            "name": self.contrast.name,
            "p_of_word": self.p_of_word,
            "rounding_only": self.is_rounding,
        }


def judge(
    contrasts: Sequence[Contrast],
    outcomes: Mapping[str, Sequence[SeedOutcome]],
    rule: VerdictRule,
    planned: int | None = None,
    level: ErrorLevel | None = WHOLE_ALPHA,
    decided: Sequence[ContrastVerdict] = (),
) -> list[ContrastVerdict]:
    """Return the verdict on each contrast.

    ``outcomes`` lists the runs of each arm in any order; ``planned`` is the number of comparisons of
    the family, at least and by default that of the ``contrasts``. ``level`` is the level of the look,
    None between looks: then there are differences and no words. The variances of the verdicts that
    earlier looks ``decided`` count.
    """
    m = max(len(contrasts), planned or 0)
    verdicts = [_blocks(contrast, outcomes, rule, m) for contrast in contrasts]
    testable = [i for i, verdict in enumerate(verdicts) if _is_testable(verdict)]
    if level is None:
        verdicts = [_without_word(verdict) for verdict in verdicts]
    elif testable:
        samples = [_sample(verdicts[i]) for i in testable]
        earlier = [_sample(verdict) for verdict in decided if verdict.test]
        tests = contrast_tests(samples, rule.variance, rule.band, m, level, earlier)
        alternative = "shared" if rule.variance == "own" else "own"
        others = contrast_tests(samples, alternative, rule.band, m, level, earlier)
        mean_sd = mean_run_sd([*samples, *earlier])
        is_factorial = rule.variance == "factorial"
        noisy = noisy_runs([verdicts[i].values for i in testable]) if is_factorial else []
        for i, sample, test, other in zip(testable, samples, tests, others, strict=True):
            both = test, alternative, other
            verdicts[i] = _decided(verdicts[i], sample, both, mean_sd, level, noisy)
    return [_with_instability(verdict, outcomes) for verdict in verdicts]


def _with_instability(
    verdict: ContrastVerdict, outcomes: Mapping[str, Sequence[SeedOutcome]]
) -> ContrastVerdict:
    """Return the verdict with a remark on its runs with unstable steps: by arm, or for an effect of
    a design, whose arms are those of all effects, their number.
    """
    judged = set(verdict.seeds)
    arms = {
        arm: sorted(
            {
                run.seed
                for run in outcomes.get(arm, ())
                if run.unstable and (not judged or run.seed in judged)
            }
        )
        for arm in verdict.contrast.weights
    }
    remarks = [f"{UNSTABLE_REMARK}{arm}, {_seeds(seeds)}" for arm, seeds in arms.items() if seeds]
    if remarks and not verdict.contrast.reference:
        remarks = [f"{UNSTABLE_REMARK}{sum(map(len, arms.values()))} runs"]
    return replace(verdict, remarks=tuple(dict.fromkeys((*verdict.remarks, *remarks))))


def _sample(verdict: ContrastVerdict) -> ContrastSample:
    return ContrastSample.of(verdict.differences, verdict.contrast.scale)


def _without_word(verdict: ContrastVerdict) -> ContrastVerdict:
    """Return the verdict of a contrast between looks: DIVERGED and UNFAIR remain."""
    if verdict.word in (VerdictWord.UNFAIR, VerdictWord.DIVERGED) or not verdict.is_given:
        return verdict
    return replace(verdict, word=VerdictWord.INCONCLUSIVE, share=0.0)


# Complete blocks, and the words UNFAIR and DIVERGED, which need no test.


def _blocks(
    contrast: Contrast, outcomes: Mapping[str, Sequence[SeedOutcome]], rule: VerdictRule, m: int
) -> ContrastVerdict:
    """Return the verdict before any test: UNFAIR, DIVERGED, or INCONCLUSIVE with the differences."""
    arms = {
        arm: sorted(outcomes.get(arm, ()), key=lambda o: (o.seed, o.reason, o.items))
        for arm in contrast.weights
    }
    if reason := _unfairness(arms):
        return ContrastVerdict(contrast, VerdictWord.UNFAIR, m, rule, reason)
    by_seed = {arm: {o.seed: o for o in runs} for arm, runs in arms.items()}
    seeds = sorted({seed for runs in by_seed.values() for seed in runs})
    complete = [s for s in seeds if all(_finished(runs.get(s)) for runs in by_seed.values())]
    values = {arm: tuple(_loss(runs[s]) for s in complete) for arm, runs in by_seed.items()}
    weights = list(contrast.weights.items())
    differences = tuple(
        math.fsum(weight * values[arm][block] for arm, weight in weights)
        for block in range(len(complete))
    )
    excluded = tuple(
        f"{arm} s{s}: {_absence(runs.get(s))}"
        for arm, runs in by_seed.items()
        for s in seeds
        if not _finished(runs.get(s))
    )
    verdict = ContrastVerdict(contrast, VerdictWord.INCONCLUSIVE, m, rule, excluded=excluded)
    if reason := _divergence(contrast, by_seed):
        verdict = replace(verdict, word=VerdictWord.DIVERGED, reason=reason)
        if not differences:
            return verdict
        rest = f"over the other {len(differences)}: {format_difference(mean_of(differences))}"
        return replace(verdict, remarks=(f"{rest}, not a verdict",))
    if reason := _implausible(contrast, by_seed, complete, differences, values):
        return replace(verdict, word=VerdictWord.UNFAIR, reason=reason)
    verdict = replace(
        verdict, seeds=tuple(complete), values=values, differences=differences, reason="no result"
    )
    if not complete:
        return verdict
    n, mean = len(complete), mean_of(differences)
    verdict = replace(
        verdict,
        difference=mean,
        sd=deviation_of(differences) if n > 1 else None,
        document_error=_document_error(contrast, by_seed, complete),
        p_smallest=smallest_p(n),
    )
    if n < rule.min_seeds:
        reason = f"{n} seed{'s' * (n > 1)}; no verdict below {rule.min_seeds}"
        reason += _interval_of_reference(contrast, by_seed, n, mean)
        return replace(verdict, reason=reason, more_seeds=rule.min_seeds - n)
    if max(map(abs, differences)) < _ROUNDING_NATS:
        equal = rule.band >= _SMALLEST_BAND
        word = VerdictWord.EQUIVALENT if equal else VerdictWord.INCONCLUSIVE
        reason = "" if equal else "differs by rounding only"
        return replace(verdict, word=word, reason=reason, remarks=("differs by rounding only",))
    return replace(verdict, reason="")


def _interval_of_reference(
    contrast: Contrast, by_seed: Mapping[str, Mapping[int, SeedOutcome]], seeds: int, mean: float
) -> str:
    """Return the interval from the noise of the reference as text; "" below 3 seeds of it."""
    runs = by_seed.get(contrast.reference, {}).values()
    losses = [_loss(run) for run in runs if _finished(run)]
    if len(losses) < MIN_SEEDS or len(by_seed) != 2:
        return ""
    interval = interval_of_noise(losses, seeds, mean)
    return f"; {format_interval(interval)} by {len(losses)} seeds of {contrast.reference}"


def _document_error(
    contrast: Contrast, by_seed: Mapping[str, Mapping[int, SeedOutcome]], seeds: Sequence[int]
) -> float | None:
    """Return the standard error, over documents, of the mean difference of ``seeds``."""
    losses = {arm: [runs[s].documents for s in seeds] for arm, runs in by_seed.items()}
    counts = {len(documents) for each in losses.values() for documents in each}
    if len(counts) != 1 or max(counts) < 2:
        return None
    weighted = [
        [contrast.weights[arm] * mean_of(document) for document in zip(*each, strict=True)]
        for arm, each in losses.items()
    ]
    differences = [math.fsum(document) for document in zip(*weighted, strict=True)]
    return deviation_of(differences) / math.sqrt(len(differences))


def _is_testable(verdict: ContrastVerdict) -> bool:
    return (
        verdict.word is VerdictWord.INCONCLUSIVE
        and verdict.n >= verdict.rule.min_seeds
        and not verdict.is_rounding
    )


def _unfairness(arms: Mapping[str, Sequence[SeedOutcome]]) -> str:
    """Return why the runs may not be compared, before their losses are looked at; else ""."""
    if keys := sorted({key for runs in arms.values() for run in runs for key in run.undeclared}):
        return ", ".join(keys)
    for arm, runs in arms.items():
        counts = Counter(run.seed for run in runs)
        if repeated := [str(seed) for seed, count in sorted(counts.items()) if count > 1]:
            return f"seed {', '.join(repeated)} of {arm} is listed twice"
        results: dict[tuple[float, str], int] = {}
        for run in runs:
            if run.loss is None:
                continue
            first = results.setdefault((run.loss, run.items), run.seed)
            if first != run.seed:
                return f"seed has no effect: seeds {first} and {run.seed} of {arm} are equal"
    return ""


def _implausible(
    contrast: Contrast,
    by_seed: Mapping[str, Mapping[int, SeedOutcome]],
    complete: Sequence[int],
    differences: Sequence[float],
    values: Mapping[str, Sequence[float]],
) -> str:
    """Return why the losses cannot be those of separate runs of two models; else ""."""
    if not complete:
        return ""
    if len(contrast.weights) == 2:
        left, right = by_seed.values()
        if all((left[s].loss, left[s].items) == (right[s].loss, right[s].items) for s in complete):
            return "same model: the change had no effect"
    largest = max(abs(loss) for losses in values.values() for loss in losses)
    spread = max(differences) - min(differences)
    rounding = max(map(abs, differences)) < _ROUNDING_NATS
    if len(complete) > 1 and not rounding and spread <= _CONSTANT_ULPS * math.ulp(largest):
        return "every seed gives the same difference"
    return ""


def _divergence(contrast: Contrast, by_seed: Mapping[str, Mapping[int, SeedOutcome]]) -> str:
    """Return which seeds diverged; "" if none. The reference is named first: it spoils the rest."""
    diverged = {arm: [s for s in sorted(runs) if runs[s].diverged] for arm, runs in by_seed.items()}
    reference = diverged.get(contrast.reference, [])
    if reference:
        return f"{contrast.reference}, {_seeds(reference)}"
    arms = {arm: seeds for arm, seeds in diverged.items() if seeds}
    if set(arms) <= {contrast.step}:
        runs = by_seed.get(contrast.step, {}).values()
        ended = sum(run.diverged or run.loss is not None for run in runs)
        return "".join(f"{len(s)}/{ended} ({_seeds(s)})" for s in arms.values())
    return "; ".join(f"{arm}, {_seeds(seeds)}" for arm, seeds in arms.items())


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _finished(run: SeedOutcome | None) -> bool:
    return run is not None and run.loss is not None and not run.diverged


def _loss(run: SeedOutcome) -> float:
    assert run.loss is not None
    return run.loss


def _absence(run: SeedOutcome | None) -> str:
    if run is None:
        return "not planned"
    return run.reason or ("diverged" if run.diverged else "no result")


# Words.


def _decided(
    verdict: ContrastVerdict,
    sample: ContrastSample,
    tests: tuple[ContrastTest, str, ContrastTest],
    mean_sd: float,
    level: ErrorLevel,
    noisy: Sequence[str],
) -> ContrastVerdict:
    """Return the verdict with its word, tests, remarks and the number of further seeds.

    Under the rule factorial, ``noisy`` runs stop every word: their variance is part of each effect.
    """
    rule, (test, alternative, other_test) = verdict.rule, tests
    word = _word(sample, test, rule.alpha)
    reason, more = "", None
    if rule.variance == "factorial":
        spread = [f"SPREAD: {arm} is much noisier than the other runs" for arm in noisy]
    else:
        spread = list(_spread(verdict, sample, mean_sd))
    if noisy:
        word, reason = VerdictWord.INCONCLUSIVE, "the variance is not common to all runs"
    elif word is VerdictWord.INCONCLUSIVE:
        more = more_seeds(sample, test, rule, verdict.planned, level.share_at)
        reason = "needs more than 50 more seeds: widen the band or drop the step"
        if more is not None:
            # Rounded up to fives, because the prediction of many seeds is wide.
            more = more if more < 10 else 5 * math.ceil(more / 5)
            reason = f"needs about {more} more seed{'s' * (more > 1)}"
    other_word = _word(sample, other_test, rule.alpha)
    remarks = [*_remarks(verdict, sample, test, word, level.share), *spread]
    if (verdict.document_error or 0.0) > sample.sd / math.sqrt(sample.n):
        remarks.append("limited by the evaluation set, not by seeds")
    if other_word is not word and rule.variance != "factorial":
        remarks.append(f"the rule {alternative} gives {other_word}")
    return replace(
        verdict,
        word=word,
        reason=reason,
        remarks=tuple(remarks),
        test=test,
        interval_of_look=interval_of(
            sample, rule.variance, test.sd, test.degrees, INTERVAL_ERROR * level.share
        ),
        p_own=2 * sample.tail(abs(sample.mean), sample.sd, sample.n - 1),
        p_sign_flip=sign_flip_p(verdict.differences),
        more_seeds=more,
        other={
            "variance": alternative,
            "verdict": other_word.value,
            "p_adjusted": other_test.p_adjusted,
            "p_equivalent_adjusted": other_test.p_equivalent_adjusted,
        },
    )


def _word(sample: ContrastSample, test: ContrastTest, alpha: float) -> VerdictWord:
    equal = test.p_equivalent_adjusted
    if equal is not None and equal <= alpha:
        return VerdictWord.EQUIVALENT
    if test.p_adjusted <= alpha:
        return VerdictWord.BETTER if sample.mean < 0 else VerdictWord.WORSE
    return VerdictWord.INCONCLUSIVE


def _remarks(
    verdict: ContrastVerdict,
    sample: ContrastSample,
    test: ContrastTest,
    word: VerdictWord,
    share: float,
) -> Iterator[str]:
    rule, n = verdict.rule, sample.n
    if word is VerdictWord.EQUIVALENT and test.p_adjusted <= rule.alpha:
        yield "real, but under the band"
    if word not in (VerdictWord.BETTER, VerdictWord.WORSE):
        return
    if abs(sample.mean) < rule.band:
        yield "under the band"
    exact = sign_flip_p(verdict.differences)
    if n < 6:
        yield (
            f"rests on the normal model: without it {n} seeds cannot give p below {smallest_p(n):g}"
        )
    elif exact is not None and exact > INTERVAL_ERROR:
        yield f"not confirmed without the normal model (p={exact:.2g})"
    elif exact is not None and exact * verdict.planned <= rule.alpha * share:
        yield "confirmed without the normal model"


def _spread(verdict: ContrastVerdict, sample: ContrastSample, mean_sd: float) -> Iterator[str]:
    """Yield remarks on a contrast much noisier than the study, and on outlying runs."""
    median = statistics.median(verdict.differences)
    opposite = "; mean and median disagree" if median * sample.mean < 0 else ""
    if sample.run_sd > math.sqrt(SPREAD_VARIANCES) * mean_sd:
        low, high = min(verdict.differences), max(verdict.differences)
        shown = ", ".join(map(format_difference, (low, median, high)))
        yield f"SPREAD: differences {shown}{opposite}"
    for arm, losses in verdict.values.items():
        centre = statistics.median(losses)
        if has_outlier(losses):
            yield (
                f"SPREAD: losses of {arm} {min(losses):.4f}, {centre:.4f}, {max(losses):.4f}"
                f"{opposite}"
            )
