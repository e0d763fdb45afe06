"""How many seeds a study needs to see an effect, before it is trained. Imports no torch."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt2.study.plan import Plan, declared_verdicts, planned_looks
from lib.console import confirm, log
from lib.json_files import RecordError
from lib.report.contrasts import EFFECT, Contrast, scale_of
from lib.report.judge import judge
from lib.report.options import MIN_SEEDS, UNITS, short_unit
from lib.report.run_results import evaluated_loss
from lib.report.statistics import (
    VerdictRule,
    deviation_of,
    mean_degrees,
    t_isf,
)
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.units import count

MAX_SEEDS = 60
# From this number of seeds on → smallest effect of the rule ``shared`` / its closed form, from
# simulations of the whole rule with 18 comparisons (docs/verdicts.md).
_SIMULATED = {3: 1.17, 4: 1.14, 5: 1.12, 6: 1.10, 8: 1.09, 10: 1.08, 11: 1.05}
_PILOT = "type: make SEEDS=1-5 STEPS=0 (a pilot),\nor "


def study_power(plan: Plan, seconds: Sequence[float | None] = ()) -> dict[str, Any] | None:
    """Return what the study of ``plan`` can detect, and its cost; None if it has no verdicts.

    ``effect`` is the smallest one that ``seeds`` notice, ``needs`` maps VERDICT_EFFECT and
    VERDICT_BAND to the seeds that they need (null: more than 60), all in the unit of the losses;
    null without ``noise``, the standard deviation of a paired difference and its source.
    ``device_hours`` is null unless all runs have a time in ``seconds``. Raises ConfigError if the
    declarations cannot be read.
    """
    options, looks, declared = plan.base.verdicts, planned_looks(plan), declared_verdicts(plan)
    n = looks.seeds[-1] if plan.auto is not None else len({run.seed for run in plan.runs})
    family, rule = declared.contrasts, declared.rule
    if not family or n < MIN_SEEDS:
        return None
    alpha = options.alpha * looks.shares[-1]
    effects = [c for c in family.values() if c.role == EFFECT]
    if rule.variance == "factorial" and not effects:
        rule = replace(rule, variance="shared")
    m = judge([], {}, declared)["planned"]
    live = len(effects) if rule.variance == "factorial" else m
    # Of a design with missing cells, the effect with the largest variance.
    noise = _noise(
        plan, family.values(), max(scale_of(c.weights) for c in effects or family.values())
    )
    wanted = {"VERDICT_EFFECT": options.effect, "VERDICT_BAND": options.band}

    def smallest(seeds: int, name: str = "VERDICT_EFFECT") -> float:
        sd = noise["sd"] if noise else math.inf
        return sd * detectable(seeds, m, rule, alpha, live, name == "VERDICT_BAND")

    counts = range(MIN_SEEDS, MAX_SEEDS + 1)
    needs = {
        name: next((k for k in counts if smallest(k, name) <= size), None)
        for name, size in wanted.items()
        if noise and size
    }
    hours = None
    if seconds and None not in seconds:
        gpus = (run.config.train.gpus for run in plan.runs)
        hours = math.fsum(g * (s or 0.0) for g, s in zip(gpus, seconds, strict=True)) / 3600
    return {
        "seeds": n,
        "comparisons": m,
        "alpha": alpha,
        "power": options.power,
        "noise": noise,
        "effect": smallest(n) if noise else None,
        "needs": needs,
        "wanted": wanted,
        "of_design": bool(effects),
        "unit": short_unit(UNITS[plan.unit]),
        "has_steps": plan.ablation is not None,
        "runs": len(plan.runs),
        "device_hours": hours,
    }


def power_text(power: Mapping[str, Any] | None) -> str:
    """Format the detectable effect and the cost of a study; "" without verdicts."""
    if power is None:
        return ""
    text = f"{count(power['seeds'], 'seed')}, {count(power['comparisons'], 'comparison')}"
    unit = power["unit"]
    if noise := power["noise"]:
        what = "an effect" if power["of_design"] else "a difference"
        text += (
            f": notices {power['effect']:.4f} {unit} (probability {power['power']:g})\n"
            f"noise of {what} {noise['sd']:.4f} {unit}, {noise['source']}\n"
        )
        text += "".join(f"{_need(power, name)}\n" for name in power["needs"])
    else:
        text += f"\nnoise unknown; for the smallest effect, {_PILOT * power['has_steps']}"
        text += "set VERDICT_NOISE (standard deviation of a run over seeds)\n"
    if power["device_hours"] is None:
        return f"{text}{power['runs']} runs; cost unknown until a run has been timed\n"
    return f"{text}{power['runs']} runs, {power['device_hours']:,.1f} device hours\n"


def _need(power: Mapping[str, Any], name: str) -> str:
    """Return the seeds that a declared size needs, in words."""
    seeds = power["needs"][name] or f"more than {MAX_SEEDS}"
    return f"{name}={power['wanted'][name]:g} needs {seeds} seeds"


def confirm_power(plan: Plan, yes: bool) -> None:
    """Log if the seeds of a study are too few for VERDICT_BAND; if for VERDICT_EFFECT, confirm it.

    Raises ConfigError if the answer is not yes.
    """
    options = plan.base.verdicts
    power = study_power(plan) if options.effect or options.band else None
    if power is None or all(RunRecord(RunDir(run.path)).is_done for run in plan.runs):
        return
    for name, needed in power["needs"].items():
        if needed is None or needed > power["seeds"]:
            text = f"{_need(power, name)}, {power['seeds']} planned"
            if name == "VERDICT_BAND":
                log("NOTE", f"{text}: a step without an effect is seldom EQUIVALENT")
            else:
                confirm(f"{text}; train anyway?", yes)


def _noise(plan: Plan, family: Collection[Contrast], scale: float) -> dict[str, Any] | None:
    """Return the noise of a comparison with the sum of squared weights ``scale``, and its source."""
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
    if sd := plan.base.verdicts.noise * root:
        return {"sd": sd, "source": "from VERDICT_NOISE, without pairing"}
    return None


def _finished_losses(plan: Plan) -> dict[str, dict[int, float]]:
    """Return arm → seed → loss of the finished runs, without those that have probably diverged."""
    losses: dict[str, dict[int, float]] = {}
    for run in plan.runs:
        record = RunRecord(RunDir(run.path))
        if not record.is_done:
            continue
        try:
            loss = evaluated_loss(record, plan.unit)
        except RecordError:
            continue
        # It predicts better than the frequencies of tokens.
        if record.final.val_loss < record.final.unigram_entropy:
            losses.setdefault(run.variant.slug, {})[run.seed] = loss
    return losses


def detectable(
    n: int, m: int, rule: VerdictRule, alpha: float, variances: int, is_band: bool = False
) -> float:
    """Return the smallest effect that gets BETTER or WORSE with the probability ``rule.power``, or
    the smallest band in which a step without an effect is EQUIVALENT.

    In standard deviations of a difference, after ``n`` seeds at a look with ``alpha``, among ``m``
    comparisons of which ``variances`` count in a mean variance. From the quantile of the noncentral t
    distribution (Johnson and Welch 1940): 2 % too large with 3 seeds, under 1 % from 5 on.
    """
    sides = 1 if is_band else 2
    missed = (1 - rule.power) * sides / 2
    if m > 1 and rule.variance == "shared":
        degrees = mean_degrees(rule.variance, n, variances)
        factor = next(f for seeds, f in reversed(_SIMULATED.items()) if seeds <= n)
        return (
            factor * (t_isf(alpha / (sides * m), degrees) + t_isf(missed, degrees)) / math.sqrt(n)
        )
    is_factorial = rule.variance == "factorial"
    degrees = mean_degrees(rule.variance, n, variances) if is_factorial else n - 1
    limit, z = t_isf(alpha / (sides * m), degrees), statistics.NormalDist().inv_cdf(1 - missed)
    noncentrality = limit * (1 - 1 / (4 * degrees)) + z * math.sqrt(1 + limit**2 / (2 * degrees))
    return noncentrality / math.sqrt(n)


def pilot_factor(k: int) -> float:
    """Return the factor from the standard deviation of ``k`` runs to its upper 80 % limit.

    A study planned with the estimate itself is too small half of the time (Browne 1995). The
    quantile of chi-square is that of Wilson and Hilferty (1931).
    """
    spread = 2 / (9 * (k - 1))
    return (1 - spread + statistics.NormalDist().inv_cdf(0.2) * math.sqrt(spread)) ** -1.5
