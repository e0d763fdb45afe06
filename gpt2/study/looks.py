"""The rule and the looks of a study's verdicts, and the seeds that SEEDS=auto trains next."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.config import Config
from lib.errors import ConfigError, Problem
from lib.report.contrasts import contrasts_of, control_contrasts
from lib.report.declarations import (
    LookSchedule,
    VerdictPlan,
    configuration_digest,
    read_declarations,
)
from lib.report.options import NATS, LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study_verdicts import StudyVerdicts
from lib.report.table import build_table
from lib.runs.run import Run, RunVariant

# The value of SEEDS that trains until every comparison has a word.
AUTO_SEEDS = "auto"


def verdict_plan(
    config: Config,
    looks: LookPlan,
    block: Sequence[tuple[RunVariant, Config]] = (),
    *,
    folder: Path | None = None,
    seeds: Sequence[int] = (),
    judged: bool = True,
    unit: str = NATS,
) -> VerdictPlan:
    """Return the declared rule of the verdicts on the variants of ``block``, and the planned looks.

    A study that is not ``judged`` declares no comparison. Raises ConfigError if the declarations in
    the study's ``folder`` are damaged.
    """
    variants = [variant for variant, _ in block]
    options = config.verdicts
    rule = VerdictRule(
        options.variance,
        options.alpha,
        options.band,
        options.power,
        config.repro.finalist_min_seeds,
    )
    is_matrix = config.study.mode == "test_matrix_mode"
    is_factorial = is_matrix and config.study.design == "factorial"
    interactions = options.interactions if is_factorial else None
    declared = contrasts_of(variants, options.against, interactions)
    plan = VerdictPlan(
        rule,
        options.against,
        interactions,
        looks=looks,
        seeds=tuple(sorted(set(seeds))),
        declared=declared if judged else (),
        controls=control_contrasts(variants) if judged else (),
        configurations={v.slug: configuration_digest(c.identity()) for v, c in block},
        folder=folder,
        judged=judged,
        unit=unit,
    )
    return replace(plan, declarations=read_declarations(folder)) if folder else plan


@dataclass(frozen=True)
class AutoSeeds:
    """The seeds of SEEDS=auto up to the next look, and the variants that each seed trains."""

    # Seed → names of its variants.
    variants: Mapping[int, frozenset[str]]
    # Number of the next look, and of seeds at each look that is left; empty if no look is.
    number: int
    looks: tuple[int, ...]
    # Number of seeds at the last look, and of variants that the next seeds train.
    last: int
    open_variants: int

    @property
    def most_later_runs(self) -> int:
        """Return how many runs the looks after the next one need at most."""
        return (self.looks[-1] - self.looks[0]) * self.open_variants if self.looks else 0


def auto_seeds(
    config: Config,
    folder: Path,
    block: Sequence[tuple[RunVariant, Config]],
    runs_of: Callable[[Sequence[int]], Sequence[Run[Config]]],
    judged: bool,
    unit: str,
) -> AutoSeeds:
    """Return the seeds of SEEDS=auto for the study in ``folder``: its looks are judged on its runs.

    ``runs_of`` plans the runs of all variants with these seeds. Raises ConfigError if there is
    nothing to compare, or the declarations cannot be read.
    """
    looks = config.verdicts.look_plan
    plan = verdict_plan(config, looks, block, folder=folder, judged=judged, unit=unit)
    if not plan.declared:
        what = "nothing to compare (expected a study, a test matrix or a sweep)"
        advice = "type: make defconfig-gpt2-ratio-ablation, or make SEEDS=1,2,3"
        if not judged:
            what, advice = "the file of the study has judge = false", "type: make SEEDS=1,2,3"
        raise ConfigError(Problem(what, "SEEDS=auto", advice, code="config.conflict"))
    first = config.verdicts.looks[0]
    if first < plan.rule.min_seeds:
        what = f"VERDICT_LOOKS: first look at {first} seeds (expected FINALIST_MIN_SEEDS="
        raise ConfigError(Problem(f"{what}{plan.rule.min_seeds})", code="config.conflict"))
    study = StudyVerdicts([], plan)
    if study.looks:
        seen = sorted({seed for look in study.looks for seed in look.seeds})
        # No look is taken: these are the words at the looks declared so far.
        judged_now = replace(plan, exploratory=True)
        study = build_table("", runs_of(seen), verdict_plan=judged_now).verdicts
    return _next_seeds(config, study, [variant for variant, _ in block])


def _next_seeds(config: Config, study: StudyVerdicts, variants: Sequence[RunVariant]) -> AutoSeeds:
    schedule = study.schedule
    assert schedule is not None
    everything = frozenset(variant.slug for variant in variants)
    trained = [everything, *(_open_variants(study, closed, variants) for closed in study.closed)]
    looks = _looks_left(schedule, config.verdicts.looks)
    if study.waiting:
        # Its comparisons are judged before further seeds are trained.
        trained.pop()
        looks = (schedule.judged, *looks)
    elif not trained[-1]:
        looks = ()
    seeds = {
        s: trained[min(k, len(trained) - 1)]
        for k, look in reversed([*enumerate(study.looks)])
        for s in look.seeds
    }
    seeds = dict(sorted(seeds.items()))
    fresh = (seed for seed in itertools.count(config.seed) if seed not in seeds)
    for _ in range((looks[0] if looks else schedule.judged) - schedule.judged):
        seeds[next(fresh)] = trained[-1]
    number = len(study.looks) + (not study.waiting)
    return AutoSeeds(seeds, number, looks, schedule.judged, len(trained[-1]))


def _looks_left(schedule: LookSchedule, configured: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of seeds at the looks to come: planned, then configured since."""
    planned = [n for n in schedule.plan.seeds if n > schedule.judged]
    end = max(schedule.judged, schedule.plan.seeds[-1])
    extended = [n for n in configured if n > end and schedule.share_at(n) > 0]
    return (*planned, *extended)


def _open_variants(
    study: StudyVerdicts, closed: frozenset[str], variants: Sequence[RunVariant]
) -> frozenset[str]:
    """Return the variants of the open comparisons, and their baselines and A/A steps."""
    contrasts = study.plan.contrasts.items()
    names = {arm for name, contrast in contrasts if name not in closed for arm in contrast.weights}
    if names:
        names.update(v.slug for v in [v for v in variants if not v.parent][:1])
        names.update(variant.slug for variant in variants if variant.is_control)
    return frozenset(names)
