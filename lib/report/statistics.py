"""Tests of the contrasts of a study under one rule for their variance (``lib.report.verdicts``).

Numbers are standard deviations instead of variances, so that extreme losses cannot overflow.
"""

import functools
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import mul
from typing import Any, NamedTuple

from lib.report.options import MIN_SEEDS

VARIANCE_RULES = ("shared", "own", "factorial")
# Number of seeds, up to the next one → robust standard deviations from the median, beyond which a
# run is an outlier. 99 % quantiles of the largest of n normal values, from 400,000 samples each
# (test_simulated.py repeats them): few seeds have a median absolute deviation near 0 by chance.
_OUTLIERS = {5: 18.8, 6: 10.7, 8: 8.3, 10: 7.0, 12: 6.4, 14: 6.0, 16: 5.7, 20: 5.3, 24: 5.1}
# Standard deviation of a normal distribution / median absolute deviation.
_MAD_SCALE = 1.4826
# Error of the printed interval, and of a contrast's own test under the shared rule.
INTERVAL_ERROR = 0.05
# A contrast with a smaller share of the median variance does not lower the mean variance.
_LIVE_SHARE = 1e-6
_MAX_SEEDS = 60
# Ratio of variances above which one is not common to the study.
SPREAD_VARIANCES = 9
# While comparisons wait for their runs, the mean variance changes with each that arrives: the words
# of all stages together would be false in up to 7 % of studies (docs/verdicts.md). p is multiplied.
PART_FACTOR = 5
# With fewer runs or comparisons there are too few others to compare with.
_MIN_COMPARED = 4
# Limit of the sign-flip test: more seeds give too many sign patterns to enumerate.
_MAX_PAIRS = 20
# Sums of the same numbers in another order can differ in their last bits.
_TOLERANCE = 1e-12
# Limits of the continued fraction and of the search for a quantile.
_TINY = 1e-300
_EPSILON = 1e-16
_MAX_TERMS = 100_000
_MAX_STEPS = 200


@dataclass(frozen=True)
class VerdictRule:
    """The declared rule of a study."""

    # One of VARIANCE_RULES.
    variance: str = "shared"
    # Probability of a false word per study.
    alpha: float = 0.05
    # Largest difference that counts as none; 0 allows no EQUIVALENT.
    band: float = 0.0
    # Probability of a word for which the number of further seeds is computed.
    power: float = 0.8
    min_seeds: int = MIN_SEEDS


@dataclass(frozen=True)
class ErrorLevel:
    """The part of alpha that a look spends, and the comparisons that earlier looks decided."""

    share: float = 1.0
    # Whether every comparison of the look has its runs: else, none steps down (see PART_FACTOR).
    is_complete: bool = True
    # Comparisons of the study with BETTER or WORSE, and with EQUIVALENT.
    differing: int = 0
    equivalent: int = 0
    # Number of seeds → share of the look that decides about them.
    share_at: Callable[[int], float] = field(default=lambda n: 1.0)


# Error level of a single look.
WHOLE_ALPHA = ErrorLevel()


class ContrastSample(NamedTuple):
    """Number, mean and standard deviation of the differences of one contrast."""

    n: int
    mean: float
    sd: float
    # Sum of the squared weights.
    scale: float

    @property
    def run_sd(self) -> float:
        """Return the standard deviation of the difference per unit of weight."""
        return self.sd / math.sqrt(self.scale)

    def tail(self, distance: float, sd: float, degrees: float) -> float:
        return t_sf(distance / (sd / math.sqrt(self.n)), degrees)


def contrast_tests(
    samples: Sequence[ContrastSample],
    variance: str,
    band: float,
    m: int,
    level: ErrorLevel,
    decided: Sequence[ContrastSample],
) -> list[dict[str, Any]]:
    """Return the tests of all contrasts under one rule, each a part of a verdict.

    The correction for ``m`` comparisons includes the share of the look, so a corrected p is compared
    with alpha. The contrasts that earlier looks ``decided`` are not tested; their variances count.
    """
    mean_sd, live = mean_run_sd([*samples, *decided])
    tests = [
        _test(sample, variance, band, sum(live), mean_sd if is_live else None)
        for sample, is_live in zip(samples, live, strict=False)
    ]

    def correct(values: Sequence[float], rejected: int) -> list[float]:
        # A comparison decided by the other family of hypotheses still counts in this one.
        steps_down = variance == "own" and level.is_complete
        adjusted = holm(values, m - rejected) if steps_down else [m * p for p in values]
        factor = 1 if variance == "own" or level.is_complete else PART_FACTOR
        return [min(1.0, factor * p / level.share) for p in adjusted]

    differ = correct([test["p"] for test in tests], level.differing)
    for test, p in zip(tests, differ, strict=True):
        test |= {"p_adjusted": p, "p_equivalent_adjusted": None}
    if band > 0:
        equal = correct([test["p_equivalent"] for test in tests], level.equivalent)
        for test, p in zip(tests, equal, strict=True):
            test["p_equivalent_adjusted"] = p
    return tests


def _test(
    sample: ContrastSample, variance: str, band: float, live: int, mean_sd: float | None
) -> dict[str, Any]:
    """Return the test of one contrast, not corrected; ``mean_sd`` is the root of the mean variance of
    ``live`` contrasts, None if this one is not live.
    """
    own_degrees = sample.n - 1
    sd, degrees = sample.sd, float(own_degrees)
    if variance != "own" and mean_sd is not None:
        run_sd = mean_sd if variance == "factorial" else max(sample.run_sd, mean_sd)
        sd, degrees = run_sd * math.sqrt(sample.scale), mean_degrees(variance, sample.n, live)
    # One contrast alone has its own variance: the rule is the paired t-test.
    gated = variance == "shared" and live > 1
    distance, margin = abs(sample.mean), band - abs(sample.mean)
    # An own interval that contains 0, or ends outside of the band, sets p to 1.
    is_gated = gated and 2 * sample.tail(distance, sample.sd, own_degrees) > INTERVAL_ERROR
    p = 1.0 if is_gated else 2 * sample.tail(distance, sd, degrees)
    equivalent = sample.tail(margin, sd, degrees)
    if gated and sample.tail(margin, sample.sd, own_degrees) > INTERVAL_ERROR:
        equivalent = 1.0
    return {
        "interval_95": interval_of(sample, variance, sd, degrees, INTERVAL_ERROR),
        "sd_of_rule": sd,
        "degrees_of_freedom": degrees,
        "p": p,
        "p_equivalent": equivalent if band > 0 else None,
        "gated": is_gated,
    }


def interval_of(
    sample: ContrastSample, variance: str, sd: float, degrees: float, error: float
) -> list[float]:
    """Return the interval at the level 1 - ``error``: the contrast's own except under ``factorial``."""
    if variance != "factorial":
        sd, degrees = sample.sd, sample.n - 1
    half = t_isf(error / 2, degrees) * sd / math.sqrt(sample.n)
    return [sample.mean - half, sample.mean + half]


def mean_degrees(variance: str, n: int, live: int) -> float:
    """Return the degrees of freedom of the mean variance of ``live`` contrasts over ``n`` seeds."""
    return (n - 1) * live / 2 if variance == "factorial" else (n - 1) * 3 * live / (live + 2)


def mean_run_sd(samples: Sequence[ContrastSample]) -> tuple[float, list[bool]]:
    """Return the root of the mean variance per unit of weight over the live contrasts, and which are."""
    largest = max(sample.run_sd for sample in samples)
    variances = [(sample.run_sd / largest) ** 2 for sample in samples]
    limit = _LIVE_SHARE * statistics.median(variances)
    live = [(s.n - 1, v) for s, v in zip(samples, variances, strict=True) if v > limit]
    mean = math.fsum(weight * v for weight, v in live) / sum(weight for weight, _ in live)
    return largest * math.sqrt(mean), [v > limit for v in variances]


def noisy_runs(contrasts: Sequence[Mapping[str, Sequence[float]]]) -> list[str]:
    """Return the arms whose losses, by contrast, vary much more than those of the other arms after
    the mean of each seed is subtracted; an arm without all seeds is not compared.
    """
    losses = {arm: values for contrast in contrasts for arm, values in contrast.items()}
    seeds = max(map(len, losses.values()), default=0)
    losses = {arm: values for arm, values in losses.items() if len(values) == seeds}
    means = [mean_of(block) for block in zip(*losses.values(), strict=True)]
    deviations = {
        arm: deviation_of([y - mean for y, mean in zip(values, means, strict=True)])
        for arm, values in losses.items()
    }
    return list(noisier_than_others(deviations))


def noisier_than_others(deviations: Mapping[str, float]) -> dict[str, float]:
    """Return the names whose variance is not common to the others, which are 3 or more, with the
    ratio of their deviation to the root of the mean variance of the others.
    """
    noisy = {}
    for name, deviation in deviations.items() if len(deviations) >= _MIN_COMPARED else ():
        others = [sd for other, sd in deviations.items() if other != name]
        # Squares of ratios, which cannot overflow.
        share = mean_of([(sd / deviation) ** 2 for sd in others]) if deviation else math.inf
        if share < 1 / SPREAD_VARIANCES:
            noisy[name] = 1 / math.sqrt(share) if share else math.inf
    return noisy


def more_seeds(
    sample: ContrastSample,
    test: Mapping[str, Any],
    rule: VerdictRule,
    share_at: Callable[[int], float],
) -> int | None:
    """Return how many further seeds give a word with the probability ``power``, if few enough."""
    distance, m = abs(sample.mean), test["planned_comparisons"]
    for n in range(sample.n + 1, _MAX_SEEDS + 1):
        degrees = (n - 1) * test["degrees_of_freedom"] / (sample.n - 1)
        error, margin = test["sd_of_rule"] / math.sqrt(n), t_isf(1 - rule.power, degrees)
        alpha = rule.alpha * share_at(n)
        if alpha == 0:
            return None
        if (t_isf(alpha / (2 * m), degrees) + margin) * error <= distance:
            return n - sample.n
        reach = (t_isf(alpha / m, degrees) + margin) * error
        if rule.band > 0 and reach <= rule.band - distance:
            return n - sample.n
    return None


def has_outlier(losses: Sequence[float]) -> bool:
    """Return whether a loss is far from the median, in robust standard deviations."""
    centre = statistics.median(losses)
    distances = [abs(loss - centre) for loss in losses]
    deviation = _MAD_SCALE * statistics.median(distances)
    return max(distances) > outlier_limit(len(losses)) * deviation


def outlier_limit(seeds: int) -> float:
    # Too few seeds have none: 1 % of normal samples exceed every limit.
    return min((limit for n, limit in _OUTLIERS.items() if n <= seeds), default=math.inf)


# Sums that do not depend on the order of the runs.


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def deviation_of(values: Sequence[float]) -> float:
    """Return the sample standard deviation; scaled, so that squares cannot overflow."""
    mean = mean_of(values)
    deviations = [value - mean for value in values]
    largest = max(map(abs, deviations))
    if largest == 0:
        return 0.0
    total = math.fsum((deviation / largest) ** 2 for deviation in deviations)
    return largest * math.sqrt(total / (len(values) - 1))


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of the sign-flip test (Fisher 1935), which assumes no distribution: the
    share of the 2^n sign patterns whose sum is at least as far from zero. None unless 1 < n <= 20.
    """
    n = len(differences)
    if not 1 < n <= _MAX_PAIRS:
        return None
    # Every pattern is a sum of one signed sum from each half of the differences.
    left, right = (
        sorted(math.fsum(map(mul, signs, half)) for signs in product((1, -1), repeat=len(half)))
        for half in (differences[: n // 2], differences[n // 2 :])
    )
    limit = abs(math.fsum(differences)) * (1 - _TOLERANCE)
    # A pattern and its negation have the same distance from zero: count one side.
    extreme = sum(len(left) - bisect_left(left, limit - value) for value in right)
    return min(1.0, 2 * extreme / 2**n)


def smallest_p(n: int) -> float:
    """Return the smallest possible p of ``n`` ≥ 1 pairs: 2 of 2^n sign patterns."""
    return 2.0 ** (1 - n)


# Student's t distribution. The tail is half a regularised incomplete beta function (Abramowitz and
# Stegun 1964, 26.5.27), evaluated as a continued fraction by Lentz's method (Press et al., Numerical
# Recipes, 6.4). The relative error is below 1e-12 for 1 to 1000 degrees of freedom.


def t_sf(t: float, degrees: float) -> float:
    """Return P(T > t) with ``degrees`` degrees of freedom, which need not be an integer."""
    if t < 0:
        return 1 - t_sf(-t, degrees)
    # t² overflows beyond 1e154, and the tail of a single degree of freedom is 1e-154 there.
    square = min(t, 1e150) ** 2 / degrees
    a = degrees / 2
    log_front = math.lgamma(a + 0.5) - math.lgamma(a) - math.lgamma(0.5) - a * math.log1p(square)
    if square == 0:
        return 0.5
    log_front += 0.5 * (math.log(square) - math.log1p(square))
    x, complement = 1 / (1 + square), square / (1 + square)
    if x < (a + 1) / (a + 2.5):
        return 0.5 * math.exp(log_front) * _fraction(a, 0.5, x) / a
    return 0.5 - 0.5 * math.exp(log_front) * _fraction(0.5, a, complement) / 0.5


@functools.lru_cache(maxsize=4096)
def t_isf(p: float, degrees: float) -> float:
    """Return the t with P(T > t) = ``p``, for 0 < p < 1."""
    if p > 0.5:
        return -t_isf(1 - p, degrees)
    low, high = 0.0, 1.0
    while t_sf(high, degrees) > p:
        low, high = high, 2 * high
    t = (low + high) / 2
    for _ in range(_MAX_STEPS):
        tail = t_sf(t, degrees)
        low, high = (t, high) if tail > p else (low, t)
        # Newton's method on the logarithm of the tail, which is nearly linear in log t.
        half = (degrees + 1) / 2
        log_scale = math.lgamma(half) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
        density = math.exp(log_scale - half * math.log1p(t * t / degrees))
        step = tail * (math.log(tail) - math.log(p)) / density
        following = t + step if low < t + step < high else (low + high) / 2
        if abs(following - t) <= 4 * _EPSILON * abs(t):
            return following
        t = following
    return t


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function."""
    numerator = 1.0
    denominator = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = denominator
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / _nonzero(1 + term * denominator)
            numerator = _nonzero(1 + term / numerator)
            factor = denominator * numerator
            value *= factor
        if abs(factor - 1) <= _EPSILON:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def holm(values: Sequence[float], m: int) -> list[float]:
    """Return the p-values corrected for ``m`` comparisons, those not in ``values`` being 1."""
    adjusted, running = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        running = max(running, min(1.0, (m - rank) * values[i]))
        adjusted[i] = running
    return adjusted
