"""From a configuration to its runs: a study, a test matrix, a sweep or a single training."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.config import Config, refuse_adapters_without_base, refuse_unpaired_compile
from gpt2.memory.micro_batch import (
    MicroBatch,
    is_automatic,
    largest_micro_batch,
    micro_batch_layer,
    with_one_sequence,
)
from gpt2.study.designs import combinations
from gpt2.study.judgeable import unit_of
from gpt2.study.resolve import resolve_config, resolve_study
from gpt2.study.step import Study
from gpt2.study.study_file import AA, AGAIN, study_of
from lib.config.dotconfig import ConfigWorkspace
from lib.config.field import WHOLE_NUMBER, SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.project import ROOT
from lib.report.declarations import VerdictPlan, judged_seeds, read_declarations, share_at
from lib.report.judge import judge
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study import planned_contrasts, read_study
from lib.runs.identity import configuration_digest
from lib.runs.run import Run, RunVariant, build_runs, parse_seeds, run_name

# The value of SEEDS that trains until every comparison has a word.
AUTO_SEEDS = "auto"

Block = Sequence[tuple[RunVariant, Config]]


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


@dataclass(frozen=True)
class Plan:
    """All runs of a configuration, in the order of the study."""

    study: str
    # Folder of the study's run directories and tables.
    folder: Path
    build_dir: Path
    # The configuration without the changes of any step.
    base: Config
    runs: Sequence[Run[Config]]
    # Every variant that resolves, independent of STEPS, with the seed of ``base``.
    every: Block = ()
    # The part of ``every`` that the configured study has, with its controls.
    whole: Block = ()
    # Steps, and combinations of a matrix or sweep, that break a rule of the configuration.
    left_out: Sequence[Problem] = ()
    # The axes of a sweep that replaces the configured runs, else "".
    sweep: str = ""
    # The study whose steps are planned.
    ablation: Study | None = None
    # The seeds of SEEDS=auto; None with a list of seeds.
    auto: AutoSeeds | None = None
    # The looks at which verdicts are planned; None for one, after the seeds of ``runs``.
    looks: LookPlan | None = None
    # In place of BATCH_SIZE=0; None if the configuration sets the micro-batch.
    micro_batch: MicroBatch | None = None
    # What the table of the study says first.
    note: str = ""
    # The command that trains COUNT= further runs, if it is not make SEEDS=.
    command: str = ""

    @property
    def judged(self) -> bool:
        """Return whether verdicts are given on the study."""
        return self.ablation is None or self.ablation.judge

    @property
    def unit(self) -> str:
        """Return the unit of the losses."""
        return unit_of(self.ablation, self.base)

    @property
    def variants(self) -> list[RunVariant]:
        return [variant for variant, _ in self.whole]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of the runs, in order."""
        return list(dict.fromkeys(run.seed for run in self.runs))

    def only(self, patterns: str) -> "Plan":
        """Return this plan reduced to the runs that match ``patterns``; unchanged if empty."""
        return replace(self, runs=self.matching(patterns)) if patterns else self

    def matching(self, patterns: str, variable: str = "RUNS") -> list[Run[Config]]:
        """Return the runs that match comma-separated shell patterns.

        Raises ConfigError if a pattern matches no run, or there is no pattern.
        """
        words = patterns.replace(",", " ").split()
        advice = "type: make plan, to list the runs"
        if not words:
            raise ConfigError(
                Problem("no run given", variable, advice, code="usage.missing-argument")
            )
        unmatched = [word for word in words if not any(run.matches(word) for run in self.runs)]
        if unmatched:
            what = f"no run of {self.study} matches {' '.join(unmatched)!r}"
            raise ConfigError(Problem(what, variable, advice, code="run.not-found"))
        return [run for run in self.runs if any(run.matches(word) for word in words)]


def planned_looks(plan: Plan) -> LookPlan:
    """Return the looks at which verdicts are planned: a list of seeds has one, at its end."""
    return plan.looks or LookPlan.fixed(len(plan.seeds))


def declared_verdicts(plan: Plan) -> VerdictPlan:
    """Return rule, looks, seeds and comparisons of the plan, and what its study declared earlier.

    A study that is not judged declares no comparison. Raises ConfigError if the declarations in its
    folder are damaged.
    """
    options, study = plan.base.verdicts, plan.base.study
    is_factorial = study.mode == "test_matrix_mode" and study.design == "factorial"
    declared = VerdictPlan(
        VerdictRule(
            options.variance,
            options.alpha,
            options.band,
            options.power,
            plan.base.repro.finalist_min_seeds,
        ),
        options.against,
        options.interactions if is_factorial else None,
        looks=planned_looks(plan),
        seeds=tuple(sorted(set(plan.seeds))),
        configurations={v.slug: configuration_digest(c.identity()) for v, c in plan.whole},
        declarations=read_declarations(plan.folder),
        folder=plan.folder,
        judged=plan.judged,
        unit=plan.unit,
    )
    return replace(declared, declared=planned_contrasts(plan.variants, declared))


def config_layers(build_dir: Path) -> list[ConfigLayer]:
    """Return the base layers of the build folder, which are the values of its ``config.py``.

    Raises ConfigError if ``.config`` or ``config.py`` is missing, or ``config.py`` is stale or edited.
    """
    return [ConfigWorkspace(ROOT, build_dir).layer]


def make_plan(
    layers: Sequence[ConfigLayer],
    build_dir: Path,
    *,
    steps: str = "",
    seeds: str = "",
    sweep: str = "",
    yes: bool | None = False,
    optional: bool = False,
) -> Plan:
    """Plan the runs of a configuration; ``steps``, ``seeds`` and ``sweep`` override its values.

    ``sweep`` are axes, all combinations of which are planned.

    Raises ConfigError with the problems of the selected steps; if ``optional``, steps that do not
    resolve are left out. Asks for confirmation of a large plan, unless ``yes``; refuses it if ``yes``
    is None. Writes nothing; reads from the results only which runs are done, and for the seeds "auto"
    the runs of the looks.
    """
    tree = KconfigTree()

    def resolved(layers: Sequence[ConfigLayer], *required: str) -> Plan:
        base = resolve_config(tree, layers)
        name, study = "single", None
        every: Block = [(RunVariant("run"), base)]
        left_out: Sequence[Problem] = ()
        if sweep or base.study.mode == "test_matrix_mode":
            name = "sweep" if sweep else "matrix"
            every, left_out = combinations(tree, layers, base, sweep, yes=yes)
        elif base.study.mode == "ra_mla_ablation_mode":
            study = study_of(base.study, build_dir)
            name = study.name
            selected = [
                step for text in required for step in study.select(text or base.study.steps)
            ]
            every, left_out = resolve_study(tree, layers, study, selected)
            if len(left_out) > 1:
                what = f"{left_out[0].what}; {len(left_out) - 1} more steps do not fit"
                left_out = [replace(left_out[0], what=what)]
        folder = build_dir / base.study.output_dir / name
        return Plan(
            name, folder, build_dir, base, (), every, left_out=left_out, sweep=sweep, ablation=study
        )

    micro_batch = None
    # It depends neither on the selected steps nor on the seeds, so that these runs are comparable.
    if is_automatic(layers):
        whole = resolved(with_one_sequence(tree, layers))
        configs = {variant.slug: config for variant, config in whole.every}
        micro_batch = largest_micro_batch(whole.base, configs, whole.folder)
        layers = [*layers, micro_batch_layer(micro_batch.size, micro_batch.accumulation)]
    plan = resolved(layers, *(() if optional else (steps,)))
    return with_runs(replace(plan, micro_batch=micro_batch), steps, seeds)


def with_runs(plan: Plan, steps: str = "", seeds: str = "") -> Plan:
    """Return the plan with the runs of these steps and seeds, by default the configured ones.

    The seeds "auto" are those up to the next look. Raises ConfigError if a step or seed is invalid.
    """
    automatic = seeds.strip() == AUTO_SEEDS
    if steps and automatic:
        what = "SEEDS=auto judges the whole study (expected no STEPS=)"
        advice = "set RA_MLA_ABLATION_STEPS to declare a smaller study"
        raise ConfigError(Problem(what, "STEPS", advice, code="config.conflict"))
    if steps and plan.ablation is None:
        what = "only a study has steps (expected no STEPS=)"
        advice = (
            "a design, matrix or sweep trains the runs of its axes; for a study, set "
            "RA_MLA_ABLATION_MODE=y"
        )
        raise ConfigError(Problem(what, "STEPS", advice, code="config.conflict"))
    numbers = parse_seeds("" if automatic else seeds) or _configured_seeds(plan)
    has_controls = automatic or len(numbers) >= plan.base.repro.finalist_min_seeds
    plan = replace(plan, runs=(), whole=_chosen(plan, "", has_controls), auto=None)
    auto = _auto_seeds(plan) if automatic else None
    numbers = tuple(auto.variants) if auto else numbers
    tree = KconfigTree()
    for seed in {min(numbers), max(numbers)} if numbers else ():
        tree.resolve([ConfigLayer.of("command line", "SEEDS", {"SEED": seed})])
    block = _chosen(plan, steps, has_controls)
    refuse_unpaired_compile([config for _, config in block])
    refuse_adapters_without_base([config for _, config in block])
    runs = _runs_of(plan.folder, block, numbers, auto.variants if auto else None)
    looks = plan.base.verdicts.look_plan if auto else LookPlan.fixed(len(numbers))
    return replace(plan, runs=runs, auto=auto, looks=looks)


def _runs_of(
    folder: Path,
    block: Block,
    seeds: Sequence[int],
    variants: Mapping[int, frozenset[str]] | None = None,
) -> list[Run[Config]]:
    """Return the runs of a block with each of the seeds; ``variants`` are the slugs of each seed."""
    blocks = {
        seed: [
            (variant, config.with_seed(seed))
            for variant, config in block
            if variants is None or variant.slug in variants[seed]
        ]
        for seed in seeds
    }
    return build_runs(folder.name, folder.parent, blocks)


def _configured_seeds(plan: Plan) -> tuple[int, ...]:
    """Return the seeds of the configuration, of the study's file, or SEED."""
    of_study = plan.ablation.seeds if plan.ablation else ()
    seeds = plan.base.study.seed_list or of_study or (plan.base.seed,)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(Problem("duplicate seed", "SEED_LIST", code="usage.duplicate-seed"))
    return seeds


def _chosen(plan: Plan, steps: str, has_controls: bool) -> Block:
    """Return the selected steps of the study and its controls, or all variants of another plan."""
    if plan.ablation is None:
        return plan.every
    slugs = [step.slug for step in plan.ablation.select(steps or plan.base.study.steps)]
    block = [(variant, config) for variant, config in plan.every if variant.slug in slugs]
    if has_controls and plan.judged and steps in ("", "all"):
        return _with_controls(block)
    return block


def _with_controls(block: Block) -> Block:
    """Return ``block`` followed by an A/A step, if the configuration enables it.

    A study without the baseline, or with pretrained initial weights, has none. If the same run need
    not give the same bits, the baseline is trained a second time.
    """
    variant, config = block[0]
    if variant.parent or len(block) == 1 or config.init.init_from or not config.verdicts.aa:
        return block
    change: dict[str, SymbolValue] = {"INIT_STREAM": config.init.init_stream + 1}
    aa_step = RunVariant(
        f"{variant.slug}-{AA}",
        f"A/A: {variant.slug}, other initial weights",
        parent=variant.slug,
        delta=change,
        is_aa=True,
    )
    block = [*block, (aa_step, Config.from_values({**config.values, **change}))]
    if config.machine.repeats and config.train.budget != "time":
        return block
    title = f"{variant.slug} again: the noise of one seed"
    repeat = RunVariant(f"{variant.slug}-{AGAIN}", title, parent=variant.slug, is_repeat=True)
    return [*block, (repeat, config)]


# SEEDS=auto.


def _auto_seeds(plan: Plan) -> AutoSeeds:
    """Return the seeds of the next look, after the looks that are judged on the runs in the folder.

    Raises ConfigError if there is nothing to compare, or the declarations cannot be read.
    """
    config = plan.base
    declared = declared_verdicts(replace(plan, looks=config.verdicts.look_plan))
    if not declared.contrasts:
        what = "nothing to compare (expected a study, a test matrix or a sweep)"
        advice = "type: make defconfig-gpt2-ratio-ablation, or make SEEDS=1,2,3"
        if not plan.judged:
            what, advice = "the file of the study has judge = false", "type: make SEEDS=1,2,3"
        raise ConfigError(Problem(what, "SEEDS=auto", advice, code="config.conflict"))
    first = config.verdicts.looks[0]
    if first < declared.rule.min_seeds:
        what = f"VERDICT_LOOKS: first look at {first} seeds (expected FINALIST_MIN_SEEDS="
        raise ConfigError(Problem(f"{what}{declared.rule.min_seeds})", code="config.conflict"))
    judged: Mapping[str, Any] = judge([], {}, declared)
    if looked := judged["looks"]:
        runs = _runs_of(plan.folder, plan.whole, sorted({s for look in looked for s in look.seeds}))
        # No look is taken: these are the words at the looks declared so far.
        judged = read_study("", runs, replace(declared, exploratory=True)).judged
    taken, look_plan = judged["looks"], judged["look_plan"]
    last = judged_seeds(taken)
    everything = frozenset(variant.slug for variant in plan.variants)
    trained = [everything, *(_open(declared, closed, plan.variants) for closed in judged["closed"])]
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


def _open(
    declared: VerdictPlan, closed: frozenset[str], variants: Sequence[RunVariant]
) -> frozenset[str]:
    """Return the variants of the open comparisons, and their baselines and A/A steps."""
    contrasts = declared.contrasts.items()
    names = {arm for name, contrast in contrasts if name not in closed for arm in contrast.weights}
    if names:
        names.update([v.slug for v in variants if not v.parent][:1])
        names.update(variant.slug for variant in variants if variant.is_control)
    return frozenset(names)


# The runs of a table.


def table_plan(plan: Plan) -> Plan:
    """Return the runs to show in the table of ``plan``: its runs and all started runs of its study.

    A table of the selected steps or seeds only would replace the table of the whole study.
    """
    # The looks of SEEDS=auto determine its seeds.
    started = set[int]() if plan.auto else _started_seeds(plan)
    seeds = ",".join(map(str, sorted({*_configured_seeds(plan), *plan.seeds} | started)))
    whole = with_runs(plan, "all" if plan.ablation else "", seeds)
    planned = {run.path for run in plan.runs}
    runs = [run for run in whole.runs if run.path in planned or run.path.exists()]
    return replace(plan, runs=runs, looks=planned_looks(plan))


def _started_seeds(plan: Plan) -> set[int]:
    """Return the seeds of the run directories in the plan's folder that have a configuration of it."""
    configs = {variant.slug: config for variant, config in plan.every}
    seeds: set[int] = set()
    for name in os.listdir(plan.folder) if plan.folder.is_dir() else ():
        slug, _, key = name.rpartition("-s")
        seed = key.partition("-")[0]
        if slug in configs and WHOLE_NUMBER.fullmatch(seed):
            config = configs[slug].with_seed(int(seed))
            if run_name(slug, int(seed), config) == name:
                seeds.add(int(seed))
    return seeds
