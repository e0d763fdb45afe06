"""Power: the smallest effect that a study notices, the band that it can fill, and its cost, before it
is trained.

Effects are in units of sd_d, the standard deviation of the difference of one seed. One comparison, and
the rules ``own`` and ``factorial``, use the exact power of the t-test, from the noncentral t
distribution. ``shared`` uses the quantiles of its t distribution times a factor from simulations of
the whole rule with 18 comparisons (docs/verdicts.md). Imports no torch.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpt2.study.plan import Plan, declared_verdicts, planned_looks
from lib.console import confirm
from lib.json_files import RecordError
from lib.report.contrasts import EFFECT, Contrast, scale_of
from lib.report.options import MIN_SEEDS, UNITS, short_unit
from lib.report.run_results import evaluated_loss
from lib.report.statistics import (
    INTERVAL_ERROR,
    VerdictRule,
    deviation_of,
    factorial_degrees,
    shared_degrees,
    t_isf,
)
from lib.report.study_verdicts import StudyVerdicts
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

MAX_SEEDS = 60
# Seeds → smallest effect of the simulated rule / closed form.
_SIMULATED = {3: 1.17, 4: 1.14, 5: 1.12, 6: 1.10, 8: 1.09, 10: 1.08}
_BEYOND = 1.05
_STEPS = 400
_PRECISION = 1e-6
# A verdict with a smaller probability is not worth a study.
_SELDOM = 0.05
_UNKNOWN = "noise unknown; for the smallest effect, "
_PILOT = "type: make SEEDS=1-5 STEPS=0 (a pilot),\nor "
_DECLARE = "set VERDICT_NOISE (standard deviation of a run over seeds)\n"


def study_power(plan: Plan) -> dict[str, Any] | None:
    """Return the effects that the study of ``plan`` can detect; None if it has no verdicts.

    They are in the unit of its losses, and null if the noise is unknown: ``noise`` is the standard
    deviation of a paired difference and its source, ``alpha`` that of the look at ``seeds``, ``band``
    the smallest one that a step without effect fills, ``band_seeds`` the seeds that the declared band
    needs, and ``band_probability`` how often such a step is EQUIVALENT in it. ``of_design``: the comparisons are the effects
    of a factorial design. Raises ConfigError if the declarations cannot be read.
    """
    options, looks = plan.base.verdicts, planned_looks(plan)
    planned = len({run.seed for run in plan.runs})
    declared = declared_verdicts(plan)
    family = declared.contrasts
    n = looks.seeds[-1] if plan.auto is not None else planned
    if not family or n < MIN_SEEDS:
        return None
    alpha = options.alpha * looks.shares[-1]
    effects = [c for c in family.values() if c.role == EFFECT]
    rule = declared.rule
    if rule.variance == "factorial" and not effects:
        rule = replace(rule, variance="shared")
    m = StudyVerdicts([], declared).planned
    live = len(effects) if rule.variance == "factorial" else m
    # Of a design with missing cells, the effect with the largest variance.
    scale = max(scale_of(c.weights) for c in effects or family.values())
    noise = _noise(plan, family.values(), scale)
    fills = partial(fillable_band, m=m, rule=rule, alpha=alpha, variances=live)
    effect = smallest = needed = fits = None
    if noise:
        sd = noise["sd"]
        effect, smallest = sd * detectable_effect(n, m, rule, alpha, live), sd * fills(n)
        if band := options.band / sd:
            needed = seeds_for(band, fills)
            fits = band_probability(band, n, m, rule, alpha, live)
    return {
        "seeds": n,
        "comparisons": m,
        "alpha": alpha,
        "power": options.power,
        "noise": noise,
        "effect": effect,
        "band": smallest,
        "band_seeds": needed,
        "band_probability": fits,
        "wanted_effect": options.effect,
        "wanted_band": options.band,
        "of_design": bool(effects),
        "unit": short_unit(UNITS[plan.unit]),
        "has_steps": plan.ablation is not None,
    }


def study_cost(plan: Plan, seconds: Sequence[float | None]) -> dict[str, Any]:
    """Return the cost of all runs of ``plan``, which train for ``seconds``, finished ones included.

    ``gpu_hours`` is null if a time is unknown.
    """
    hours = None
    if seconds and None not in seconds:
        gpus = [run.config.train.gpus for run in plan.runs]
        hours = math.fsum(g * (s or 0.0) for g, s in zip(gpus, seconds, strict=True)) / 3600
    return {"runs": len(plan.runs), "gpu_hours": hours}


def power_text(power: Mapping[str, Any] | None, cost: Mapping[str, Any]) -> str:
    """Format the detectable effects and the cost of a study; "" without verdicts."""
    if power is None:
        return ""
    text, unit = f"{power['seeds']} seeds, {power['comparisons']} comparisons", power["unit"]
    if power["noise"] is None:
        advice = _UNKNOWN + _PILOT * power["has_steps"] + _DECLARE
        return f"{text}\n{advice}{_cost_text(cost)}"
    effect, noise, wanted = power["effect"], power["noise"], power["wanted_effect"]
    what = "an effect" if power["of_design"] else "a difference"
    text += (
        f": notices {effect:.4f} {unit} (probability {power['power']:g})\n"
        f"noise of {what} {noise['sd']:.4f} {unit}, {noise['source']}\n"
    )
    if 0 < wanted < effect:
        text += f"VERDICT_EFFECT={wanted:g} is smaller: more seeds are needed\n"
    if power["wanted_band"]:
        needed = power["band_seeds"] or f"more than {MAX_SEEDS}"
        text += f"VERDICT_BAND={power['wanted_band']:g} needs {needed} seeds for EQUIVALENT\n"
    else:
        least = f"{power['band']:.4f} {unit}"
        text += f"a band (VERDICT_BAND) for EQUIVALENT would be at least {least}\n"
    return text + _cost_text(cost)


def _cost_text(cost: Mapping[str, Any]) -> str:
    if cost["gpu_hours"] is None:
        return f"{cost['runs']} runs; cost unknown until a run has been timed\n"
    return f"{cost['runs']} runs, {cost['gpu_hours']:,.1f} device hours\n"


def confirm_power(plan: Plan, yes: bool) -> None:
    """Require a confirmation to train a study that misses VERDICT_EFFECT or VERDICT_BAND.

    Raises ConfigError if the answer is not yes.
    """
    options = plan.base.verdicts
    power = study_power(plan) if options.effect or options.band else None
    misses = _misses(power) if power else []
    if misses and not all(RunRecord(RunDir(run.path)).is_done for run in plan.runs):
        confirm(f"{'; '.join(misses)}; train anyway?", yes)


def _misses(power: Mapping[str, Any]) -> list[str]:
    """Return the declarations that the study probably cannot fulfil."""
    misses = []
    effect, wanted, seeds = power["effect"], power["wanted_effect"], power["seeds"]
    if effect is not None and 0 < wanted < effect:
        misses.append(
            f"VERDICT_EFFECT={wanted:g} is smaller than the {effect:.4f} {power['unit']} that "
            f"{seeds} seeds notice"
        )
    if power["band_probability"] is not None and power["band_probability"] < _SELDOM:
        misses.append(
            f"VERDICT_BAND={power['wanted_band']:g} is so narrow that {seeds} seeds hardly ever "
            "give EQUIVALENT"
        )
    return misses


def _noise(plan: Plan, family: Collection[Contrast], scale: float) -> dict[str, Any] | None:
    """Return the noise from finished runs of this study, from baseline seeds, or VERDICT_NOISE.

    It is that of a comparison with the sum of squared weights ``scale``.
    """
    losses, root = _finished_losses(plan), math.sqrt(scale)
    variances = []
    for contrast in family:
        runs = [losses.get(arm, {}) for arm in contrast.weights]
        seeds = set.intersection(*map(set, runs))
        if len(seeds) >= MIN_SEEDS:
            weighted = list(zip(contrast.weights.values(), runs, strict=True))
            differences = [math.fsum(w * run[seed] for w, run in weighted) for seed in seeds]
            variances.append(deviation_of(differences) ** 2 / scale_of(contrast.weights))
    if any(variances):
        sd = math.sqrt(statistics.fmean(variances)) * root
        return {"sd": sd, "source": f"from {len(variances)} comparisons of this study"}
    # The combinations of a sweep have no parent: the first one is their baseline.
    baseline = next((run.variant.slug for run in plan.runs if not run.variant.parent), "")
    pilot = list(losses.get(baseline, {}).values())
    if len(pilot) >= MIN_SEEDS:
        sd = statistics.stdev(pilot) * root * pilot_factor(len(pilot))
        source = f"from {len(pilot)} baseline seeds (upper 80 % limit, without pairing)"
        return {"sd": sd, "source": source}
    if plan.base.verdicts.noise:
        return {
            "sd": plan.base.verdicts.noise * root,
            "source": "from VERDICT_NOISE, without pairing",
        }
    return None


def _finished_losses(plan: Plan) -> dict[str, dict[int, float]]:
    """Return arm → seed → loss of the finished runs; a damaged run is reported by the plan.

    A run that predicts no better than the frequencies of tokens has probably diverged, and is left
    out.
    """
    losses: dict[str, dict[int, float]] = {}
    for run in plan.runs:
        record = RunRecord(RunDir(run.path))
        if not record.is_done:
            continue
        try:
            loss = evaluated_loss(record, plan.unit)
        except RecordError:
            continue
        if record.final.val_loss < record.final.unigram_entropy:
            losses.setdefault(run.variant.slug, {})[run.seed] = loss
    return losses


# The power of a rule.
#
# ``n`` ≥ 2 is a number of seeds, ``m`` the number of comparisons of the family, and ``variances`` how many
# of them have a variance that counts in the mean; by default all.


def detectable_effect(
    n: int, m: int, rule: VerdictRule, alpha: float | None = None, variances: int | None = None
) -> float:
    """Return the smallest effect that gets BETTER or WORSE with the probability ``rule.power``.

    In units of sd_d; ``alpha`` is that of the look, by default that of the rule.
    """
    error, degrees = (alpha or rule.alpha) / (2 * m), _degrees(n, m, rule, variances)
    limit, root = t_isf(error, degrees), math.sqrt(n)
    if _is_shared(m, rule):
        return _simulated(n, limit + t_isf(1 - rule.power, degrees))

    def power(effect: float) -> float:
        return _mean_over_sd(lambda s: _normal(effect * root - limit * s), degrees)

    return _smallest(power, rule.power)


def fillable_band(
    n: int, m: int, rule: VerdictRule, alpha: float | None = None, variances: int | None = None
) -> float:
    """Return the smallest band in which a step without effect is EQUIVALENT with ``rule.power``."""
    error, degrees = (alpha or rule.alpha) / m, _degrees(n, m, rule, variances)
    limit, root = t_isf(error, degrees), math.sqrt(n)
    if _is_shared(m, rule):
        return _simulated(n, limit + t_isf((1 - rule.power) / 2, degrees))

    def power(band: float) -> float:
        return _mean_over_sd(lambda s: max(0.0, 2 * _normal(band * root - limit * s) - 1), degrees)

    return _smallest(power, rule.power)


def band_probability(
    band: float, n: int, m: int, rule: VerdictRule, alpha: float, variances: int | None = None
) -> float:
    """Return the probability that a step without an effect is EQUIVALENT after ``n`` seeds.

    ``band`` is in units of sd_d; ``alpha`` is that of the look.
    """
    shares, root = _is_shared(m, rule), math.sqrt(n)
    degrees = _degrees(n, m, rule, variances)
    limit, gate = t_isf(alpha / m, degrees), t_isf(INTERVAL_ERROR, n - 1)

    def given(s: float) -> float:
        # The mean variance of the study is near 1; the own sample has the standard deviation s.
        reach = max(limit * max(s, 1.0), gate * s) if shares else limit * s
        return max(0.0, 2 * _normal(band * root - reach) - 1)

    return _mean_over_sd(given, n - 1 if shares else degrees)


def seeds_for(size: float, needed: Callable[[int], float]) -> int | None:
    """Return the smallest number of seeds with ``needed(n)`` ≤ ``size``; None if more than 60."""
    low, high = MIN_SEEDS, MAX_SEEDS
    if needed(high) > size:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needed(middle) <= size else (middle + 1, high)
    return low


def pilot_factor(k: int) -> float:
    """Return the factor from the standard deviation of ``k`` runs to its upper 80 % limit.

    A study planned with the estimate itself is too small half of the time (Browne 1995).
    """
    degrees, low, high = k - 1, 0.0, float(k)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_cdf(middle, degrees) < 0.2 else (low, middle)
    return math.sqrt(degrees / high)


def _is_shared(m: int, rule: VerdictRule) -> bool:
    return m > 1 and rule.variance == "shared"


def _degrees(n: int, m: int, rule: VerdictRule, variances: int | None) -> float:
    """Return the degrees of freedom of the variance that the rule uses."""
    count = m if variances is None else variances
    if rule.variance == "factorial":
        return factorial_degrees(n, count)
    return shared_degrees(n, count) if _is_shared(m, rule) else n - 1


def _simulated(n: int, quantiles: float) -> float:
    known = sorted(_SIMULATED)
    if n > known[-1]:
        factor = _BEYOND
    else:
        below = max((k for k in known if k <= n), default=known[0])
        above = min(k for k in known if k >= n)
        share = (n - below) / (above - below) if above > below else 0.0
        factor = _SIMULATED[below] + share * (_SIMULATED[above] - _SIMULATED[below])
    return factor * quantiles / math.sqrt(n)


def _smallest(power: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    while power(high) < wanted:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < wanted else (low, middle)
    return high


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _mean_over_sd(function: Callable[[float], float], degrees: float) -> float:
    """Return the mean of ``function`` of a sample standard deviation, by Simpson's rule."""
    log_scale = math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
    width = (3 + 12 / math.sqrt(2 * degrees)) / _STEPS
    total = 0.0
    for i in range(1, _STEPS):
        s = i * width
        density = math.exp(log_scale + (degrees - 1) * math.log(s) - degrees * s * s / 2)
        total += (4 if i % 2 else 2) * function(s) * density
    return total * width / 3


def _chi_square_cdf(x: float, degrees: int) -> float:
    """Return the series of the incomplete gamma function (Abramowitz and Stegun 1964, 6.5.29)."""
    if x <= 0:
        return 0.0
    a, half = degrees / 2, x / 2
    term = total = 1.0
    k = 0
    while term > 1e-16 * total:
        k += 1
        term *= half / (a + k)
        total += term
    return total * math.exp(a * math.log(half) - half - math.lgamma(a + 1))
