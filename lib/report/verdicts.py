"""Verdicts: what the losses of several steps over several seeds allow one to claim (docs/verdicts.md).

A contrast gives one number per seed (a block), and negative is better. The contrasts of a study are
one family, whose number is planned before the first run; failures do not reduce it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lib.report.contrasts import Contrast, scale_of
from lib.report.statistics import (
    INTERVAL_ERROR,
    SPREAD_VARIANCES,
    WHOLE_ALPHA,
    ContrastSample,
    ErrorLevel,
    VerdictRule,
    contrast_tests,
    deviation_of,
    has_outlier,
    interval_of,
    mean_of,
    mean_run_sd,
    more_seeds,
    noisy_runs,
    sign_flip_p,
    smallest_p,
)
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.units import count, format_difference

# Differences below this many nats are rounding; no step is better because of them.
_ROUNDING_NATS = 1e-5
_SMALLEST_BAND = 1e-4
_ROUNDING = "differs by rounding only"
# Differences that agree in all but the last bits of the losses.
_CONSTANT_ULPS = 8


# Arm → outcomes of its runs.
Outcomes = Mapping[str, Sequence["SeedOutcome"]]


class VerdictWord(StrEnum):
    """Result of a study for one contrast."""

    BETTER = "BETTER"
    WORSE = "WORSE"
    EQUIVALENT = "EQUIVALENT"
    INCONCLUSIVE = "INCONCLUSIVE"
    UNFAIR = "UNFAIR"
    DIVERGED = "DIVERGED"


@dataclass(frozen=True)
class SeedOutcome:
    """Outcome of one run: a loss in the unit of the study, a divergence, or a missing result."""

    seed: int
    # None if the run diverged or has no result.
    loss: float | None
    diverged: bool = False
    # Why there is no loss, or that it diverged; and the details of it.
    reason: str = ""
    details: str = ""
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
    # False if the run waits or is running: its outcome is not known yet.
    ended: bool = True
    # None in a study of plain losses.
    record: RunRecord = field(default=None, compare=False, repr=False)  # type: ignore[assignment]
    # Field → value shared by the results of a part of the study; empty without labels. Parts are
    # not compared with each other, and each has its own baselines.
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Run[Any]:
        assert isinstance(self.record.planned, Run)
        return self.record.planned


def estimates(
    contrasts: Sequence[Contrast], outcomes: Outcomes, rule: VerdictRule, planned: int
) -> list[dict[str, Any]]:
    """Return what the runs show of each contrast between looks: differences, and no words of a test."""
    verdicts = [_untested(c, outcomes, rule, max(len(contrasts), planned)) for c in contrasts]
    for verdict in verdicts:
        if verdict["verdict"] not in (None, VerdictWord.UNFAIR, VerdictWord.DIVERGED):
            verdict |= {"verdict": None, "share": 0.0, "alpha_of_look": 0.0}
        verdict["remarks"] += _instability(verdict, outcomes)
    return verdicts


def verdicts_at(
    contrasts: Sequence[Contrast],
    outcomes: Outcomes,
    rule: VerdictRule,
    planned: int = 0,
    level: ErrorLevel = WHOLE_ALPHA,
    decided: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the verdict on each contrast, of a family of ``planned`` comparisons, at the level of a
    look; the variances of the verdicts that earlier looks ``decided`` count.
    """
    m = max(len(contrasts), planned)
    verdicts = [_untested(contrast, outcomes, rule, m) for contrast in contrasts]
    open_ones = [v for v in verdicts if v["verdict"] is VerdictWord.INCONCLUSIVE]
    if testable := [verdict for verdict in open_ones if not verdict["rounding_only"]]:
        earlier = [_sample(verdict) for verdict in decided if verdict["p"] is not None]
        _test(testable, rule, m, level, earlier)
    for verdict in verdicts:
        verdict["remarks"] += _instability(verdict, outcomes)
    return verdicts


def _test(
    verdicts: Sequence[dict[str, Any]],
    rule: VerdictRule,
    m: int,
    level: ErrorLevel,
    earlier: Sequence[ContrastSample],
) -> None:
    """Set figures, words and remarks of the tests under the rule and, for comparison, another one."""
    samples, is_factorial = [_sample(verdict) for verdict in verdicts], rule.variance == "factorial"
    alternative = "shared" if rule.variance == "own" else "own"
    tests, others = (
        contrast_tests(samples, variance, rule.band, m, level, earlier)
        for variance in (rule.variance, alternative)
    )
    mean_sd, _ = mean_run_sd([*samples, *earlier])
    noisy = noisy_runs([verdict["values"] for verdict in verdicts]) if is_factorial else []
    noise = [f"SPREAD: {arm} is much noisier than the other runs" for arm in noisy]
    for verdict, sample, test, other in zip(verdicts, samples, tests, others, strict=True):
        other_word = _word(sample, other, rule.alpha)
        adjusted = {name: other[name] for name in ("p_adjusted", "p_equivalent_adjusted")}
        verdict |= test
        verdict["other_rule"] = {"variance": alternative, "verdict": other_word, **adjusted}
        _decide(verdict, sample, rule, level, bool(noisy))
        verdict["remarks"] += noise if is_factorial else _spread(verdict, sample, mean_sd)
        if (verdict["document_error"] or 0.0) > sample.sd / math.sqrt(sample.n):
            verdict["remarks"].append("limited by the evaluation set, not by seeds")
        if other_word is not verdict["verdict"] and not is_factorial:
            verdict["remarks"].append(f"the rule {alternative} gives {other_word}")


def _instability(verdict: Mapping[str, Any], outcomes: Outcomes) -> list[str]:
    """Return remarks on the runs with unstable steps: by arm, or their number for an effect."""
    judged, arms = verdict["seeds"], dict[str, list[int]]()
    for arm in verdict["weights"]:
        unstable = {run.seed for run in outcomes.get(arm, ()) if run.unstable}
        if shown := sorted(s for s in unstable if not judged or s in judged):
            arms[arm] = shown
    if arms and not verdict["reference"]:
        return [f"UNSTABLE: {sum(map(len, arms.values()))} runs"]
    return [f"UNSTABLE: {arm}, {_seeds(seeds)}" for arm, seeds in arms.items()]


def _sample(verdict: Mapping[str, Any]) -> ContrastSample:
    scale = scale_of(verdict["weights"])
    return ContrastSample(verdict["n"], verdict["difference"], verdict["sd"], scale)


def _new_verdict(contrast: Contrast, rule: VerdictRule, m: int) -> dict[str, Any]:
    """Return the verdict on a contrast of which nothing is known."""
    return {
        **{name: getattr(contrast, name) for name in ("name", "step", "reference", "role")},
        "weights": dict(contrast.weights),
        # None without a word: with too few seeds, and between looks.
        "verdict": None,
        # Why the word is UNFAIR, DIVERGED or INCONCLUSIVE.
        "reason": None,
        "remarks": [],
        # Runs that do not count, with reasons.
        "excluded": [],
        # Complete blocks: seeds, losses of each arm and differences.
        "seeds": [],
        "n": 0,
        "values": {},
        "differences": [],
        # Mean and deviation of the differences; standard error of the mean over the documents.
        **dict.fromkeys(("difference", "sd", "document_error")),
        # Of the contrast, and valid at all looks together.
        **dict.fromkeys(("interval_95", "interval_of_look", "sd_of_rule", "degrees_of_freedom")),
        **dict.fromkeys(("p", "p_adjusted", "p_equivalent", "p_equivalent_adjusted", "gated")),
        # p of the own t-test, exact p of the sign-flip test, and its smallest possible value.
        **dict.fromkeys(("p_own", "p_sign_flip", "p_smallest_sign_flip", "other_rule")),
        # The corrected p: of the band if the word is EQUIVALENT, else of the difference.
        "p_of_word": None,
        "planned_comparisons": m,
        **{name: getattr(rule, name) for name in ("alpha", "band", "variance")},
        # Number of the look that judged the contrast, and its share of alpha: 0 between looks.
        "look": None,
        "share": 1.0,
        "alpha_of_look": rule.alpha,
        # About this many further seeds give a word; None if none or too many are needed.
        "more_seeds": None,
        # Whether the models differ by rounding only, which more seeds cannot resolve.
        "rounding_only": False,
    }


def _untested(contrast: Contrast, outcomes: Outcomes, rule: VerdictRule, m: int) -> dict[str, Any]:
    """Return the verdict before any test: UNFAIR, DIVERGED, or INCONCLUSIVE with the differences."""
    verdict = _new_verdict(contrast, rule, m)
    arms = {
        arm: sorted(outcomes.get(arm, ()), key=lambda o: (o.seed, o.reason, o.items))
        for arm in contrast.weights
    }
    if reason := _unfairness(arms):
        return verdict | {"verdict": VerdictWord.UNFAIR, "reason": reason}
    by_seed = {arm: {o.seed: o for o in runs} for arm, runs in arms.items()}
    losses = {
        arm: {s: o.loss for s, o in runs.items() if o.loss is not None and not o.diverged}
        for arm, runs in by_seed.items()
    }
    seeds = sorted({seed for runs in by_seed.values() for seed in runs})
    complete = [s for s in seeds if all(s in runs for runs in losses.values())]
    values = {arm: [runs[s] for s in complete] for arm, runs in losses.items()}
    differences = [
        math.fsum(weight * values[arm][block] for arm, weight in contrast.weights.items())
        for block in range(len(complete))
    ]
    for arm, runs in by_seed.items():
        for s in (s for s in seeds if s not in losses[arm]):
            absence = (runs[s].reason or "diverged") if s in runs else "not planned"
            verdict["excluded"].append(f"{arm} s{s}: {absence}")
    if reason := _divergence(contrast, by_seed):
        if differences:
            rest = f"over the other {len(differences)}: {format_difference(mean_of(differences))}"
            verdict["remarks"].append(f"{rest}, not a verdict")
        return verdict | {"verdict": VerdictWord.DIVERGED, "reason": reason}
    if reason := _implausible(contrast, by_seed, complete, differences, values):
        return verdict | {"verdict": VerdictWord.UNFAIR, "reason": reason}
    n = len(complete)
    verdict |= {"seeds": complete, "n": n, "values": values, "differences": differences}
    if not complete:
        return verdict | {"reason": "no result"}
    verdict |= {
        "difference": mean_of(differences),
        "sd": deviation_of(differences) if n > 1 else None,
        "document_error": _document_error(contrast, by_seed, complete),
        "p_smallest_sign_flip": smallest_p(n),
    }
    if n < rule.min_seeds:
        reason = f"{count(n, 'seed')}; no verdict below {rule.min_seeds}"
        return verdict | {"reason": reason, "more_seeds": rule.min_seeds - n}
    if max(map(abs, differences)) < _ROUNDING_NATS:
        verdict |= {"rounding_only": True, "remarks": [_ROUNDING]}
        if rule.band >= _SMALLEST_BAND:
            return verdict | {"verdict": VerdictWord.EQUIVALENT}
        verdict["reason"] = _ROUNDING
    return verdict | {"verdict": VerdictWord.INCONCLUSIVE}


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


def _unfairness(arms: Mapping[str, Sequence[SeedOutcome]]) -> str:
    """Return why the runs may not be compared, before their losses are looked at; else ""."""
    if keys := sorted({key for runs in arms.values() for run in runs for key in run.undeclared}):
        return ", ".join(keys)
    for arm, runs in arms.items():
        counts = Counter(run.seed for run in runs)
        if repeated := [str(seed) for seed, times in sorted(counts.items()) if times > 1]:
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
    arms = {arm: _seeds(seeds) for arm, seeds in diverged.items() if seeds}
    if contrast.reference in arms:
        return f"{contrast.reference}, {arms[contrast.reference]}"
    if arms.keys() == {contrast.step}:
        runs = by_seed[contrast.step].values()
        ended = sum(run.diverged or run.loss is not None for run in runs)
        return f"{len(diverged[contrast.step])}/{ended} ({arms[contrast.step]})"
    return "; ".join(f"{arm}, {seeds}" for arm, seeds in arms.items())


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _decide(
    verdict: dict[str, Any],
    sample: ContrastSample,
    rule: VerdictRule,
    level: ErrorLevel,
    is_noisy: bool,
) -> None:
    """Set the word of a tested verdict, its remarks and the number of further seeds."""
    word, more = _word(sample, verdict, rule.alpha), None
    # Under the rule factorial, their variance is part of each effect.
    if is_noisy:
        word = VerdictWord.INCONCLUSIVE
        verdict["reason"] = "the variance is not common to all runs"
    elif word is VerdictWord.INCONCLUSIVE:
        more = more_seeds(sample, verdict, rule, level.share_at)
        verdict["reason"] = "needs more than 50 more seeds: widen the band or drop the step"
        if more is not None:
            # Rounded up to fives, because the prediction of many seeds is wide.
            more = more if more < 10 else 5 * math.ceil(more / 5)
            verdict["reason"] = f"needs about {count(more, 'more seed')}"
    is_equal = word is VerdictWord.EQUIVALENT
    error = INTERVAL_ERROR * level.share
    verdict |= {
        "verdict": word,
        "p_of_word": verdict["p_equivalent_adjusted" if is_equal else "p_adjusted"],
        "interval_of_look": interval_of(
            sample, rule.variance, verdict["sd_of_rule"], verdict["degrees_of_freedom"], error
        ),
        "p_own": 2 * sample.tail(abs(sample.mean), sample.sd, sample.n - 1),
        "p_sign_flip": sign_flip_p(verdict["differences"]),
        "more_seeds": more,
    }
    verdict["remarks"] += _remarks(verdict, rule.alpha * level.share)


def _word(sample: ContrastSample, test: Mapping[str, Any], alpha: float) -> VerdictWord:
    equal = test["p_equivalent_adjusted"]
    if equal is not None and equal <= alpha:
        return VerdictWord.EQUIVALENT
    if test["p_adjusted"] <= alpha:
        return VerdictWord.BETTER if sample.mean < 0 else VerdictWord.WORSE
    return VerdictWord.INCONCLUSIVE


def _remarks(verdict: Mapping[str, Any], alpha_of_look: float) -> Iterator[str]:
    word, n, exact = verdict["verdict"], verdict["n"], verdict["p_sign_flip"]
    if word is VerdictWord.EQUIVALENT and verdict["p_adjusted"] <= verdict["alpha"]:
        yield "real, but under the band"
    if word not in (VerdictWord.BETTER, VerdictWord.WORSE):
        return
    if abs(verdict["difference"]) < verdict["band"]:
        yield "under the band"
    if n < 6:
        yield (
            f"rests on the normal model: without it {n} seeds cannot give p below {smallest_p(n):g}"
        )
    elif exact is not None and exact > INTERVAL_ERROR:
        yield f"not confirmed without the normal model (p={exact:.2g})"
    elif exact is not None and exact * verdict["planned_comparisons"] <= alpha_of_look:
        yield "confirmed without the normal model"


def _spread(verdict: Mapping[str, Any], sample: ContrastSample, mean_sd: float) -> Iterator[str]:
    """Yield remarks on a contrast much noisier than the study, and on outlying runs."""
    median = statistics.median(verdict["differences"])
    opposite = "; mean and median disagree" if median * sample.mean < 0 else ""
    if sample.run_sd > math.sqrt(SPREAD_VARIANCES) * mean_sd:
        low, high = min(verdict["differences"]), max(verdict["differences"])
        shown = ", ".join(map(format_difference, (low, median, high)))
        yield f"SPREAD: differences {shown}{opposite}"
    for arm, losses in verdict["values"].items():
        centre = statistics.median(losses)
        if has_outlier(losses):
            yield (
                f"SPREAD: losses of {arm} {min(losses):.4f}, {centre:.4f}, {max(losses):.4f}"
                f"{opposite}"
            )
