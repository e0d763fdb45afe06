"""What a study can notice, and what it costs, before it is trained. Imports no torch."""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gpt2.planning.plan import Plan, declared_verdicts, planned_looks
from lib.console import confirm
from lib.json_files import RecordError
from lib.report.contrast_tests import deviation_of
from lib.report.contrasts import EFFECT, Contrast
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
from lib.report.study_verdicts import judge_study
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, is_done

# A verdict with a smaller probability is not worth a study.
_SELDOM = 0.05
_UNKNOWN = "noise unknown; for the smallest effect, "
_PILOT = "type: make SEEDS=1-5 STEPS=0 (a pilot),\nor "
_DECLARE = "set VERDICT_NOISE (standard deviation of a run over seeds)\n"


@dataclass(frozen=True)
class NoiseEstimate:
    """Standard deviation of a paired difference, and its source."""

    sd: float
    source: str


@dataclass(frozen=True)
class StudyPower:
    """Effects that a study can detect, in the unit of its losses; None if unknown."""

    seeds: int
    comparisons: int
    # Of the look at ``seeds``.
    alpha: float
    power: float
    noise: NoiseEstimate | None
    effect: float | None
    # Smallest band that a step without effect fills, and seeds that the declared band needs.
    band: float | None
    band_seeds: int | None
    # The declared effect and band; 0 if none.
    wanted_effect: float
    wanted_band: float
    # Mean number of seeds of a comparison under SEEDS=auto: without an effect, and with the declared
    # effect (``effect`` if none is declared).
    seeds_without: float | None
    seeds_with: float | None
    # Probability that a step without an effect is EQUIVALENT.
    band_probability: float | None
    # Whether the comparisons are the effects of a factorial design, or those of a study's steps.
    of_design: bool
    unit: str
    has_steps: bool

    @property
    def misses(self) -> list[str]:
        """Return the declarations that the study probably cannot fulfil."""
        misses = []
        if self.effect is not None and 0 < self.wanted_effect < self.effect:
            misses.append(
                f"VERDICT_EFFECT={self.wanted_effect:g} is smaller than the {self.effect:.4f} "
                f"{self.unit} that {self.seeds} seeds notice"
            )
        if self.band_probability is not None and self.band_probability < _SELDOM:
            misses.append(
                f"VERDICT_BAND={self.wanted_band:g} is so narrow that {self.seeds} seeds hardly "
                "ever give EQUIVALENT"
            )
        return misses


@dataclass(frozen=True)
class StudyCost:
    """The cost of all runs of a plan, finished ones included; None if unknown."""

    runs: int
    gpu_hours: float | None


def study_power(plan: Plan) -> StudyPower | None:
    """Return the effects that the study of ``plan`` can detect; None if it has no verdicts.

    Raises ConfigError if its declarations cannot be read.
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
    m = judge_study([], declared).document["planned_comparisons"]
    live = len(effects) if rule.variance == "factorial" else m
    # Of a design with missing cells, the effect with the largest variance.
    scale = max(c.scale for c in effects or family.values())
    noise = _noise(plan, family.values(), scale)
    fills = partial(fillable_band, m=m, rule=rule, alpha=alpha, variances=live)
    effect = smallest = without = with_effect = fits = None
    if noise:
        effect = noise.sd * detectable_effect(n, m, rule, alpha, live)
        smallest, band = noise.sd * fills(n), options.band / noise.sd
        fits = word_probability(0.0, band, n, m, rule, alpha, live) if band else None
        if plan.auto is not None:
            ends = (0.0, (options.effect or effect) / noise.sd)
            without, with_effect = (expected_seeds(e, band, looks, m, rule, live) for e in ends)
    return StudyPower(
        seeds=n,
        comparisons=m,
        alpha=alpha,
        power=options.power,
        noise=noise,
        effect=effect,
        band=smallest,
        band_seeds=seeds_for(options.band / noise.sd, fills) if noise and options.band else None,
        band_probability=fits,
        wanted_effect=options.effect,
        wanted_band=options.band,
        seeds_without=without,
        seeds_with=with_effect,
        of_design=bool(effects),
        unit=short_unit(UNITS[plan.unit]),
        has_steps=plan.sweep is None and plan.base.study.mode == "ra_mla_ablation_mode",
    )


def study_cost(plan: Plan, seconds: Sequence[float | None]) -> StudyCost:
    """Return the cost of the runs of ``plan``, which train for ``seconds``."""
    hours = None
    if seconds and None not in seconds:
        gpus = [run.config.train.gpus for run in plan.runs]
        hours = math.fsum(g * (s or 0.0) for g, s in zip(gpus, seconds, strict=True)) / 3600
    return StudyCost(len(plan.runs), hours)


def power_text(power: StudyPower | None, cost: StudyCost) -> str:
    """Format the detectable effects and the cost of a study; "" without verdicts."""
    if power is None:
        return ""
    head = f"{power.seeds} seeds, {power.comparisons} comparisons"
    if power.noise is None or power.effect is None or power.band is None:
        advice = _UNKNOWN + _PILOT * power.has_steps + _DECLARE
        return f"{head}\n{advice}{_cost_text(cost)}"
    what = "an effect" if power.of_design else "a difference"
    text = (
        f"{head}: notices {power.effect:.4f} {power.unit} (probability {power.power:g})\n"
        f"noise of {what} {power.noise.sd:.4f} {power.unit}, {power.noise.source}\n"
    )
    if power.seeds_without is not None and power.seeds_with is not None:
        size = power.wanted_effect or power.effect
        text += (
            f"expected seeds of a comparison: {power.seeds_without:.1f} without an effect, "
            f"{power.seeds_with:.1f} at {size:.4f}\n"
        )
    if 0 < power.wanted_effect < power.effect:
        text += f"VERDICT_EFFECT={power.wanted_effect:g} is smaller: more seeds are needed\n"
    if power.wanted_band:
        needed = power.band_seeds or f"more than {MAX_SEEDS}"
        text += f"VERDICT_BAND={power.wanted_band:g} needs {needed} seeds for EQUIVALENT\n"
    else:
        least = f"{power.band:.4f} {power.unit}"
        text += f"a band (VERDICT_BAND) for EQUIVALENT would be at least {least}\n"
    return text + _cost_text(cost)


def power_record(power: StudyPower | None, cost: StudyCost) -> dict[str, Any]:
    """Return power and cost as plain JSON types."""
    return {"power": power and asdict(power), "cost": asdict(cost)}


def confirm_power(plan: Plan, yes: bool) -> None:
    """Require a confirmation to train a study that misses VERDICT_EFFECT or VERDICT_BAND.

    Raises ConfigError if the answer is not yes.
    """
    options = plan.base.verdicts
    power = study_power(plan) if options.effect or options.band else None
    if power is None or not power.misses or all(is_done(RunDir(run.path)) for run in plan.runs):
        return
    confirm(f"{'; '.join(power.misses)}; train anyway?", yes)


def _cost_text(cost: StudyCost) -> str:
    if cost.gpu_hours is None:
        return f"{cost.runs} runs; cost unknown until a run has been timed\n"
    return f"{cost.runs} runs, {cost.gpu_hours:,.1f} device hours\n"


def _noise(plan: Plan, family: Collection[Contrast], scale: float) -> NoiseEstimate | None:
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
            variances.append(deviation_of(differences) ** 2 / contrast.scale)
    if any(variances):
        sd = math.sqrt(statistics.fmean(variances)) * root
        return NoiseEstimate(sd, f"from {len(variances)} comparisons of this study")
    # The combinations of a sweep have no parent: the first one is their baseline.
    baseline = next((run.variant.slug for run in plan.runs if not run.variant.parent), "")
    pilot = list(losses.get(baseline, {}).values())
    if len(pilot) >= MIN_SEEDS:
        sd = statistics.stdev(pilot) * root * pilot_factor(len(pilot))
        source = f"from {len(pilot)} baseline seeds (upper 80 % limit, without pairing)"
        return NoiseEstimate(sd, source)
    if plan.base.verdicts.noise:
        return NoiseEstimate(plan.base.verdicts.noise * root, "from VERDICT_NOISE, without pairing")
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
