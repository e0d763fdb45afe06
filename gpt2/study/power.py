"""What a study can notice, and what it costs, before it is trained. Imports no torch."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpt2.study.plan import Plan, declared_verdicts, planned_looks
from lib.console import confirm
from lib.json_files import RecordError
from lib.report.contrasts import EFFECT, Contrast, scale_of
from lib.report.options import MIN_SEEDS, UNITS, short_unit
from lib.report.power import (
    MAX_SEEDS,
    detectable_effect,
    expected_seeds,
    fillable_band,
    pilot_factor,
    seeds_for,
    word_probability,
)
from lib.report.run_results import evaluated_loss
from lib.report.statistics import deviation_of
from lib.report.study_verdicts import StudyVerdicts
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, is_done

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
    needs, and ``band_probability`` how often such a step is EQUIVALENT in it. ``seeds_without`` and
    ``seeds_with`` are the mean number of seeds of a comparison under SEEDS=auto: without an effect,
    and with the declared one (``effect`` if none is). ``of_design``: the comparisons are the effects
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
    effect = smallest = needed = without = with_effect = fits = None
    if noise:
        sd = noise["sd"]
        effect, smallest = sd * detectable_effect(n, m, rule, alpha, live), sd * fills(n)
        if band := options.band / sd:
            needed = seeds_for(band, fills)
            fits = word_probability(0.0, band, n, m, rule, alpha, live)
        if plan.auto is not None:
            ends = (0.0, (options.effect or effect) / sd)
            without, with_effect = (expected_seeds(e, band, looks, m, rule, live) for e in ends)
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
        "seeds_without": without,
        "seeds_with": with_effect,
        "of_design": bool(effects),
        "unit": short_unit(UNITS[plan.unit]),
        "has_steps": plan.sweep is None and plan.base.study.mode == "ra_mla_ablation_mode",
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
    if power["seeds_with"] is not None:
        text += (
            f"expected seeds of a comparison: {power['seeds_without']:.1f} without an effect, "
            f"{power['seeds_with']:.1f} at {wanted or effect:.4f}\n"
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
    if misses and not all(is_done(RunDir(run.path)) for run in plan.runs):
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
        if not is_done(RunDir(run.path)):
            continue
        try:
            record = RunRecord(RunDir(run.path))
            loss = evaluated_loss(record, plan.unit)
        except RecordError:
            continue
        if record.final.val_loss < record.final.unigram_entropy:
            losses.setdefault(run.variant.slug, {})[run.seed] = loss
    return losses
