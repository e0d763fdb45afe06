"""The rule and the looks of a study's verdicts, and the seeds that SEEDS=auto trains next."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.config import Config
from lib.errors import ConfigError, Problem
from lib.report.declarations import (
    VerdictPlan,
    judged_seeds,
    read_declarations,
    share_at,
)
from lib.report.judge import judge
from lib.report.options import NATS, LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study import planned_contrasts, read_study
from lib.runs.identity import configuration_digest
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
    options, study = config.verdicts, config.study
    is_factorial = study.mode == "test_matrix_mode" and study.design == "factorial"
    plan = VerdictPlan(
        VerdictRule(
            options.variance,
            options.alpha,
            options.band,
            options.power,
            config.repro.finalist_min_seeds,
        ),
        options.against,
        options.interactions if is_factorial else None,
        looks=looks,
        seeds=tuple(sorted(set(seeds))),
        configurations={v.slug: configuration_digest(c.identity()) for v, c in block},
        declarations=read_declarations(folder) if folder else (),
        folder=folder,
        judged=judged,
        unit=unit,
    )
    return replace(plan, declared=planned_contrasts([variant for variant, _ in block], plan))


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
    if not plan.contrasts:
        what = "nothing to compare (expected a study, a test matrix or a sweep)"
        advice = "type: make defconfig-gpt2-ratio-ablation, or make SEEDS=1,2,3"
        if not judged:
            what, advice = "the file of the study has judge = false", "type: make SEEDS=1,2,3"
        raise ConfigError(Problem(what, "SEEDS=auto", advice, code="config.conflict"))
    first = config.verdicts.looks[0]
    if first < plan.rule.min_seeds:
        what = f"VERDICT_LOOKS: first look at {first} seeds (expected FINALIST_MIN_SEEDS="
        raise ConfigError(Problem(f"{what}{plan.rule.min_seeds})", code="config.conflict"))
    judged_now: Mapping[str, Any] = judge([], {}, plan)
    if looked := judged_now["looks"]:
        seen = sorted({seed for look in looked for seed in look.seeds})
        # No look is taken: these are the words at the looks declared so far.
        judged_now = read_study("", runs_of(seen), replace(plan, exploratory=True)).judged
    return _next_seeds(config, plan, judged_now, [variant for variant, _ in block])


def _next_seeds(
    config: Config, plan: VerdictPlan, judged: Mapping[str, Any], variants: Sequence[RunVariant]
) -> AutoSeeds:
    taken, look_plan = judged["looks"], judged["look_plan"]
    last = judged_seeds(taken)
    everything = frozenset(variant.slug for variant in variants)
    trained = [everything, *(_open_variants(plan, closed, variants) for closed in judged["closed"])]
    # The numbers of seeds at the looks to come: planned, then configured since.
    end = max(last, look_plan.seeds[-1])
    extended = (n for n in config.verdicts.looks if n > end and share_at(look_plan, taken, n) > 0)
    looks = (*(n for n in look_plan.seeds if n > last), *extended)
    if judged["waiting"]:
        # Its comparisons are judged before further seeds are trained.
        trained.pop()
        looks = (last, *looks)
    elif not trained[-1]:
        looks = ()
    seeds = {
        s: trained[min(k, len(trained) - 1)]
        for k, look in reversed([*enumerate(taken)])
        for s in look.seeds
    }
    seeds = dict(sorted(seeds.items()))
    fresh = (seed for seed in itertools.count(config.seed) if seed not in seeds)
    for _ in range((looks[0] if looks else last) - last):
        seeds[next(fresh)] = trained[-1]
    number = len(taken) + (not judged["waiting"])
    return AutoSeeds(seeds, number, looks, last, len(trained[-1]))


def _open_variants(
    plan: VerdictPlan, closed: frozenset[str], variants: Sequence[RunVariant]
) -> frozenset[str]:
    """Return the variants of the open comparisons, and their baselines and A/A steps."""
    contrasts = plan.contrasts.items()
    names = {arm for name, contrast in contrasts if name not in closed for arm in contrast.weights}
    if names:
        names.update(v.slug for v in [v for v in variants if not v.parent][:1])
        names.update(variant.slug for variant in variants if variant.is_control)
    return frozenset(names)
