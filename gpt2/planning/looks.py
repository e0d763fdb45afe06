"""The rule and the looks of a study's verdicts, and the seeds that SEEDS=auto trains next."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import Config
from lib.errors import ConfigError, Problem
from lib.plan.run import RunVariant
from lib.report.contrast_tests import VerdictRule
from lib.report.contrasts import contrasts_of
from lib.report.looks import LookSchedule
from lib.report.options import NATS, LookPlan
from lib.report.study_verdicts import VerdictPlan, contrast_name
from lib.report.verdict_record import with_record

# The value of SEEDS that trains until every comparison has a word.
AUTO_SEEDS = "auto"


def verdict_plan(
    config: Config,
    looks: LookPlan,
    variants: Sequence[RunVariant] = (),
    *,
    judged: bool = True,
    unit: str = NATS,
) -> VerdictPlan:
    """Return the declared rule of the verdicts on ``variants``, and the planned looks.

    A study that is not ``judged`` declares no comparison.
    """
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
    declared = {"": contrasts_of(variants, options.against, interactions)} if variants else {}
    return VerdictPlan(
        rule,
        options.against,
        interactions,
        schedule=LookSchedule(looks),
        declared=declared if judged else {},
        judged=judged,
        unit=unit,
    )


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
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds up to the next look."""
        return tuple(self.variants)

    @property
    def most_later_runs(self) -> int:
        """Return how many runs the looks after the next one need at most."""
        return (self.looks[-1] - self.looks[0]) * self.open_variants if self.looks else 0

    def trains(self, seed: int, variant: RunVariant) -> bool:
        """Return whether ``variant`` is trained with ``seed``."""
        return variant.slug in self.variants[seed]


def auto_seeds(
    config: Config,
    folder: Path,
    variants: Sequence[RunVariant],
    judged: bool,
    unit: str,
) -> AutoSeeds:
    """Return the seeds of SEEDS=auto for the study in ``folder``, according to its record.

    Raises ConfigError if there is nothing to compare, or the record cannot be read.
    """
    plan = verdict_plan(config, config.verdicts.look_plan, variants, judged=judged, unit=unit)
    plan = with_record(plan, folder)
    schedule = plan.schedule
    assert schedule is not None
    if not any(plan.declared.values()):
        what = "nothing to compare (expected a study, a test matrix or a sweep)"
        advice = "type: make defconfig-gpt2-ratio-ablation, or make SEEDS=1,2,3"
        raise ConfigError(Problem(what, "SEEDS=auto", advice, code="config.conflict"))
    taken, last = schedule.taken, schedule.last
    seen = last.n if last else 0
    first = config.verdicts.looks[0]
    if first < plan.rule.min_seeds:
        what = f"VERDICT_LOOKS: first look at {first} seeds (expected FINALIST_MIN_SEEDS="
        raise ConfigError(Problem(f"{what}{plan.rule.min_seeds})", code="config.conflict"))
    looks = _looks_left(schedule, config.verdicts.looks)
    everything = frozenset(variant.slug for variant in variants)
    trained = [everything, *(_open_variants(plan, look.closed, variants) for look in taken)]
    if not trained[-1]:
        looks = ()
    seeds = {s: trained[k] for k, look in reversed([*enumerate(taken)]) for s in look.seeds}
    seeds = dict(sorted(seeds.items()))
    fresh = (seed for seed in itertools.count(config.seed) if seed not in seeds)
    for _ in range((looks[0] if looks else seen) - seen):
        seeds[next(fresh)] = trained[-1]
    return AutoSeeds(seeds, len(taken) + 1, looks, seen, len(trained[-1]))


def _looks_left(schedule: LookSchedule, configured: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of seeds at the looks to come: planned, then configured since."""
    judged = schedule.last.n if schedule.last else 0
    planned = [n for n in schedule.plan.seeds if n > judged]
    end = max(judged, schedule.plan.seeds[-1])
    extended = [n for n in configured if n > end and schedule.share_at(n) > 0]
    return (*planned, *extended)


def _open_variants(
    plan: VerdictPlan, closed: frozenset[str], variants: Sequence[RunVariant]
) -> frozenset[str]:
    """Return the variants of the open comparisons, and their baselines and A/A steps."""
    names: set[str] = set()
    for prefix, contrasts in plan.declared.items():
        waiting = [c for c in contrasts if contrast_name(prefix, c) not in closed]
        names.update(arm for contrast in waiting for arm in contrast.weights)
        if waiting:
            names.update(v.slug for v in [v for v in variants if not v.parent][:1])
            names.update(variant.slug for variant in variants if variant.is_control)
    return frozenset(names)
