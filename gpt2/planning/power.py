"""What a study can notice, and what it costs, before it is trained. Imports no torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gpt2.planning.looks import verdict_plan
from gpt2.planning.plan import Plan, planned_looks
from lib.console import confirm
from lib.json_files import RecordError
from lib.report.contrast_tests import MIN_SEEDS
from lib.report.power import (
    MAX_SEEDS,
    detectable_effect,
    expected_seeds,
    fillable_band,
    pilot_factor,
    seeds_for,
)
from lib.report.study_verdicts import VerdictPlan, with_record
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, is_done

_UNKNOWN = (
    "noise unknown; for the smallest effect, type: make SEEDS=1-5 STEPS=0 (a pilot),\n"
    "or set VERDICT_NOISE (standard deviation of a run over seeds, such as 0.0013)\n"
)


@dataclass(frozen=True)
class NoiseEstimate:
    """Standard deviation of a paired difference in nats per token, and its source."""

    sd: float
    source: str


@dataclass(frozen=True)
class StudyPower:
    """Effects that a study can detect, in nats per token; None if unknown."""

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
    seeds_without: float | None = None
    seeds_with: float | None = None

    @property
    def misses(self) -> bool:
        """Return whether the declared effect is smaller than the smallest detectable one."""
        return self.effect is not None and 0 < self.wanted_effect < self.effect


@dataclass(frozen=True)
class StudyCost:
    """The cost of all runs of a plan, finished ones included; None if unknown."""

    runs: int
    gpu_hours: float | None
    kwh: float | None
    price: float | None


def study_power(plan: Plan) -> StudyPower | None:
    """Return the effects that the study of ``plan`` can detect; None if it has no verdicts, or is a
    factorial design.

    Raises ConfigError if its record of verdicts cannot be read.
    """
    options, looks = plan.base.verdicts, planned_looks(plan)
    planned = len({run.seed for run in plan.runs})
    declared = with_record(verdict_plan(plan.base, looks, plan.variants), plan.folder)
    if declared.design is not None:
        # An effect of a design has another variance than a difference of two runs.
        return None
    current = {c.name for contrasts in declared.declared.values() for c in contrasts}
    comparisons = max(len(declared.family | current), len(current))
    n = looks.seeds[-1] if plan.auto is not None else planned
    if not current or plan.sweep is not None or n < MIN_SEEDS:
        return None
    rule, alpha = declared.rule, options.alpha * looks.shares[-1]
    noise = _noise(plan, declared)
    seen = partial(detectable_effect, m=comparisons, rule=rule, alpha=alpha)
    fills = partial(fillable_band, m=comparisons, rule=rule, alpha=alpha)
    seeds = seeds_for(options.band / noise.sd, fills) if noise and options.band else None
    effect = noise.sd * seen(n) if noise else None
    without, with_effect = None, None
    if noise and effect and plan.auto is not None:
        ends = (0.0, (options.effect or effect) / noise.sd)
        band = options.band / noise.sd
        without, with_effect = (expected_seeds(e, band, looks, comparisons, rule) for e in ends)
    return StudyPower(
        seeds=n,
        comparisons=comparisons,
        alpha=alpha,
        power=options.power,
        noise=noise,
        effect=effect,
        band=noise.sd * fills(n) if noise else None,
        band_seeds=seeds,
        wanted_effect=options.effect,
        wanted_band=options.band,
        seeds_without=without,
        seeds_with=with_effect,
    )


def study_cost(plan: Plan, seconds: Sequence[float | None]) -> StudyCost:
    """Return the cost of the runs of ``plan``, which train for ``seconds``."""
    options = plan.base.verdicts
    hours = None
    if seconds and None not in seconds:
        gpus = [run.config.train.gpus for run in plan.runs]
        hours = math.fsum(g * (s or 0.0) for g, s in zip(gpus, seconds, strict=True)) / 3600
    watts, price = options.gpu_watts, options.gpu_hour_price
    return StudyCost(
        len(plan.runs),
        hours,
        hours * watts / 1000 if hours is not None and watts else None,
        hours * price if hours is not None and price else None,
    )


def power_text(power: StudyPower | None, cost: StudyCost) -> str:
    """Format the detectable effects and the cost of a study; "" without verdicts."""
    if power is None:
        return ""
    head = f"{power.seeds} seeds, {power.comparisons} comparisons"
    if power.noise is None or power.effect is None or power.band is None:
        return f"{head}\n{_UNKNOWN}{_cost_text(cost)}"
    text = (
        f"{head}: notices {power.effect:.4f} nats (probability {power.power:g})\n"
        f"noise of a difference {power.noise.sd:.4f} nats, {power.noise.source}\n"
    )
    if power.seeds_without is not None and power.seeds_with is not None:
        size = power.wanted_effect or power.effect
        text += (
            f"expected seeds of a comparison: {power.seeds_without:.1f} without an effect, "
            f"{power.seeds_with:.1f} at {size:.4f}\n"
        )
    if power.misses:
        text += f"VERDICT_EFFECT={power.wanted_effect:g} is smaller: more seeds are needed\n"
    if power.wanted_band:
        needed = power.band_seeds or f"more than {MAX_SEEDS}"
        text += f"VERDICT_BAND={power.wanted_band:g} needs {needed} seeds for EQUIVALENT\n"
    else:
        text += f"a band (VERDICT_BAND) for EQUIVALENT would be at least {power.band:.4f} nats\n"
    return text + _cost_text(cost)


def power_record(power: StudyPower | None, cost: StudyCost) -> dict[str, Any]:
    """Return power and cost as plain JSON types."""
    return {"power": power and asdict(power), "cost": asdict(cost)}


def confirm_power(plan: Plan, yes: bool) -> None:
    """Require a confirmation to train a study that misses VERDICT_EFFECT.

    Raises ConfigError if the answer is not yes.
    """
    power = study_power(plan) if plan.base.verdicts.effect else None
    if power is None or not power.misses or all(is_done(RunDir(run.path)) for run in plan.runs):
        return
    confirm(
        f"VERDICT_EFFECT={power.wanted_effect:g} is smaller than the {power.effect:.4f} nats that "
        f"{power.seeds} seeds notice; train anyway?",
        yes,
    )


def _cost_text(cost: StudyCost) -> str:
    if cost.gpu_hours is None:
        return f"{cost.runs} runs; cost unknown until a run has been timed\n"
    parts = [f"{cost.runs} runs", f"{cost.gpu_hours:,.1f} device hours"]
    parts.append("kWh: set GPU_WATTS" if cost.kwh is None else f"{cost.kwh:,.1f} kWh")
    parts.append("price: set GPU_HOUR_PRICE" if cost.price is None else f"price {cost.price:,.2f}")
    return ", ".join(parts) + "\n"


def _noise(plan: Plan, declared: VerdictPlan) -> NoiseEstimate | None:
    """Return the noise from verdicts of this folder, finished baseline seeds, or VERDICT_NOISE."""
    judged = [v for v in declared.recorded.values() if v["n"] >= MIN_SEEDS and v["sd"]]
    if judged:
        sd = math.sqrt(statistics.fmean(v["sd"] ** 2 for v in judged))
        return NoiseEstimate(sd, f"from {len(judged)} comparisons of this study")
    losses = _baseline_losses(plan)
    if len(losses) >= MIN_SEEDS:
        sd = statistics.stdev(losses) * math.sqrt(2) * pilot_factor(len(losses))
        source = f"from {len(losses)} baseline seeds (upper 80 % limit, without pairing)"
        return NoiseEstimate(sd, source)
    if plan.base.verdicts.noise:
        return NoiseEstimate(
            plan.base.verdicts.noise * math.sqrt(2), "from VERDICT_NOISE, without pairing"
        )
    return None


def _baseline_losses(plan: Plan) -> list[float]:
    """Return the losses of the finished baseline runs; a damaged run is reported by the plan."""
    losses = []
    for run in plan.runs:
        if run.variant.parent or not is_done(RunDir(run.path)):
            continue
        try:
            losses.append(RunRecord(RunDir(run.path)).summary.final.val_loss)
        except RecordError:
            continue
    return losses
