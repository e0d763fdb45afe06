"""Combinations of settings as runs: test matrices, sweeps, and designs over features."""

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpt2.config import Config, refuse_unpaired_compile
from gpt2.memory.micro_batch import (
    MicroBatch,
    is_automatic,
    largest_micro_batch,
    with_one_sequence,
)
from gpt2.study.designs import (
    DESIGNS,
    ResolvedSweep,
    SweepAxis,
    SweepCell,
    axis_layer,
    grid,
    grid_size,
    parse_axes,
    parse_features,
    resolve_design,
    resolve_grid,
    sample_cells,
)
from gpt2.study.judgeable import grouped_by_text, unit_of, unjudgeable
from gpt2.study.looks import AUTO_SEEDS, AutoSeeds, auto_seeds, verdict_plan
from gpt2.study.resolve import resolve_config, resolve_study
from gpt2.study.step import Study
from gpt2.study.study_file import AA, AGAIN, study_of
from gpt2.training.budget import run_budget
from lib.config.dotconfig import ConfigWorkspace, constants_layer, defconfig_layers
from lib.config.field import WHOLE_NUMBER, SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import confirm
from lib.errors import ConfigError, Problem
from lib.files import regular_file
from lib.project import ROOT
from lib.report.declarations import VerdictPlan
from lib.report.options import NATS, LookPlan
from lib.runs.run import Run, RunVariant, build_runs, parse_seeds, run_path

# Require a confirmation above this number of combinations: more is usually a mistake.
_CONFIRM_ABOVE = 500
_BATCH = ("GLOBAL_BATCH", "BATCH_SIZE", "GPUS")


@dataclass(frozen=True)
class Sweep:
    """Axes of a sweep as typed by the user, or the path of a file with axes.

    ``samples`` is the number of randomly drawn cells; 0 means all cells.
    """

    text: str
    samples: int = 0

    @property
    def axes(self) -> str:
        """Return the axes as ``NAME=value,value NAME=…``.

        Raises ConfigError if the file cannot be read.
        """
        if "=" in self.text:
            return self.text
        try:
            with open(self.text, encoding="utf-8", opener=regular_file) as stream:
                lines = stream.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            what = f"expected NAME=value,value or a readable file, got {self.text!r}: {reason}"
            advice = 'type: make plan SWEEP="LEARNING_RATE=1e-3,2e-3"'
            raise ConfigError(Problem(what, "SWEEP", advice, code="usage.invalid-axis")) from None
        return " ".join(line.split("#")[0].strip() for line in lines)


def plan_sweep(
    tree: KconfigTree,
    layers: Sequence[ConfigLayer],
    base: Config,
    asked: Sweep,
    *,
    yes: bool | None = False,
) -> ResolvedSweep[Config]:
    """Return the cells of a sweep over ``base``, one single training per cell."""
    axes = parse_axes(tree, asked.axes, "SWEEP")
    if asked.samples:
        cells = sample_cells(axes, asked.samples, base.seed)
    else:
        cells = _all(axes, "SWEEP", yes)
    single = ConfigLayer.of("command line", "SWEEP", {"SINGLE_TRAINING": True})
    layers = [*layers, single]
    resolve = partial(_resolve, tree, layers, "SWEEP")
    resolved = resolve_grid(tree, layers, cells, resolve, "SWEEP")
    return replace(resolved, block=grouped_by_text(resolved.block))


def matrix(
    tree: KconfigTree, layers: Sequence[ConfigLayer], base: Config, *, yes: bool | None = False
) -> ResolvedSweep[Config]:
    """Return the cells of the configured test matrix: a grid of axes, or a design over features."""
    design = base.study.design
    if design == "grid":
        where = "TEST_MATRIX_AXES"
        axes = parse_axes(tree, base.study.axes, where)
        cells = _all(axes, where, yes)
        resolve = partial(_resolve, tree, layers, where)
        resolved = resolve_grid(tree, layers, cells, resolve, where)
        return replace(resolved, block=grouped_by_text(resolved.block))
    where = "ABLATION_FEATURES"
    features = parse_features(tree, layers, base.study.features, where)
    if design == "factorial":
        _confirm(2 ** len(features), yes)
    resolved = resolve_design(DESIGNS[design](features), partial(_resolve, tree, layers, where))
    steps = [(variant.slug, variant.parent, config) for variant, config in resolved.block]
    if problems := [problem for _, problem in unjudgeable(steps, None)]:
        raise ConfigError(*problems)
    return resolved


def _all(axes: Sequence[SweepAxis], where: str, yes: bool | None) -> list[SweepCell]:
    _confirm(grid_size(axes), yes)
    return grid(axes, where)


def _confirm(count: int, yes: bool | None) -> None:
    """Require a confirmation of many combinations before planning resolves them."""
    if count > _CONFIRM_ABOVE:
        confirm(f"plan {count:,} combinations?", yes)


def _resolve(
    tree: KconfigTree, layers: Sequence[ConfigLayer], where: str, each: SweepCell
) -> Config:
    """Return the cell's configuration, with GRAD_ACCUMULATION adapted to a swept batch size.

    The result depends on GLOBAL_BATCH, so a cell that changes the micro-batch keeps GLOBAL_BATCH.
    """
    name = f"{where} {each.slug}"
    layer = axis_layer(name, each.delta)
    if "GRAD_ACCUMULATION" in each.delta or not each.delta.keys() & set(_BATCH):
        return resolve_config(tree, [*layers, layer])
    values = tree.resolve([*layers, layer]).values
    batch, micro, gpus = (int(values[name]) for name in _BATCH)
    settings = {**each.delta, "GRAD_ACCUMULATION": max(1, batch // max(1, micro * gpus))}
    return resolve_config(tree, [*layers, axis_layer(name, settings)])


# Planning: the runs of a configuration (single training, ablation study, test matrix, sweep).


# Default configuration of train_ra_mla.py and of checks if there is no .config.
STUDY_DEFCONFIG = "gpt2-ratio-ablation"

Block = Sequence[tuple[RunVariant, Config]]


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
    # Combinations of a matrix or sweep that break a rule of the configuration.
    left_out: Sequence[Problem] = ()
    # The sweep that replaces the configured runs.
    sweep: Sweep | None = None
    # All variants of the configured study, independent of STEPS.
    variants: Sequence[RunVariant] = ()
    # The seeds of SEEDS=auto; None with a list of seeds.
    auto: AutoSeeds | None = None
    # The looks at which verdicts are planned; None for one, after the seeds of ``runs``.
    looks: LookPlan | None = None
    # Every variant that resolves, independent of STEPS, and the seed of these configurations.
    resolved: Block = ()
    resolved_seed: int = 0
    # In place of BATCH_SIZE=0; None if the configuration sets the micro-batch.
    micro_batch: MicroBatch | None = None
    # Whether verdicts are given on the study, and the unit of its losses.
    judged: bool = True
    unit: str = NATS
    # What the table of the study says first.
    note: str = ""

    def only(self, patterns: str) -> "Plan":
        """Return this plan reduced to the runs that match ``patterns``; unchanged if empty."""
        return replace(self, runs=self.matching(patterns)) if patterns else self

    def matching(self, patterns: str) -> list[Run[Config]]:
        """Return the runs that match comma-separated shell patterns.

        Raises ConfigError if a pattern matches no run, or there is no pattern.
        """
        words = patterns.replace(",", " ").split()
        advice = "type: make plan, to list the runs"
        if not words:
            raise ConfigError(
                Problem("no run given", "RUNS", advice, code="usage.missing-argument")
            )
        unmatched = [word for word in words if not any(run.matches(word) for run in self.runs)]
        if unmatched:
            what = f"no run of {self.study} matches {' '.join(unmatched)!r}"
            raise ConfigError(Problem(what, "RUNS", advice, code="run.not-found"))
        return [run for run in self.runs if any(run.matches(word) for word in words)]


def declared_verdicts(plan: Plan) -> VerdictPlan:
    """Return rule, looks, seeds and comparisons of the plan, and what its study declared earlier.

    Raises ConfigError if the declarations in its folder are damaged.
    """
    configs = {variant.slug: config for variant, config in plan.resolved}
    configs |= {run.variant.slug: run.config for run in plan.runs}
    block = [(v, configs.get(v.slug, plan.base)) for v in plan.variants]
    seeds = {run.seed for run in plan.runs}
    return verdict_plan(
        plan.base,
        planned_looks(plan),
        block,
        folder=plan.folder,
        seeds=[*seeds],
        judged=plan.judged,
        unit=plan.unit,
    )


def planned_looks(plan: Plan) -> LookPlan:
    """Return the looks at which verdicts are planned: a list of seeds has one, at its end."""
    return plan.looks or LookPlan.fixed(len({run.seed for run in plan.runs}))


def config_layers(build_dir: Path) -> list[ConfigLayer]:
    """Return the base layers of the build folder, which are the values of its ``config.py``.

    Raises ConfigError if ``.config`` or ``config.py`` is missing, or ``config.py`` is stale or edited.
    """
    return [constants_layer(ConfigWorkspace(ROOT, build_dir))]


def step_layers(build_dir: Path, settings: Sequence[ConfigLayer]) -> list[ConfigLayer]:
    """Return the base layers (of the study's defconfig without a ``.config``), in study mode."""
    exists = ConfigWorkspace(ROOT, build_dir).config.exists()
    base = config_layers(build_dir) if exists else defconfig_layers(ROOT, STUDY_DEFCONFIG)
    study = ConfigLayer.of("command line", "--ra-mla-ablation-step", {"RA_MLA_ABLATION_MODE": True})
    return [*base, study, *settings]


def make_plan(
    layers: Sequence[ConfigLayer],
    build_dir: Path,
    *,
    steps: str = "",
    seeds: str = "",
    sweep: Sweep | None = None,
    yes: bool | None = False,
    optional: bool = False,
    known: Plan | None = None,
) -> Plan:
    """Plan the runs of a configuration; ``steps``, ``seeds`` and ``sweep`` override its values.

    ``known`` is a plan of the same layers and sweep, whose configurations are used again. The seeds
    "auto" are those up to the next look. Raises ConfigError with the problems of the
    selected steps; if ``optional``, steps that do not resolve are left out. Asks for confirmation of
    a large plan, unless ``yes``; refuses it if ``yes`` is None. Writes nothing; reads from the results only which runs are done, and
    for "auto" the runs of the looks.
    """
    tree = KconfigTree()
    micro_batch = known.micro_batch if known else _micro_batch(tree, layers, build_dir, sweep, yes)
    layers = [*layers, micro_batch.layer] if micro_batch else layers
    base = known.base if known else resolve_config(tree, layers)
    automatic = seeds.strip() == AUTO_SEEDS
    study = _planned_study(base, sweep, build_dir)
    seed_list = _seed_list(base, study, "" if automatic else seeds)
    if steps:
        _require_steps(study, automatic)
    has_controls = automatic or len(seed_list) >= base.repro.finalist_min_seeds
    if known is None:
        first = base.seed if automatic else seed_list[0]
        seeded = [*layers, ConfigLayer.of("command line", "SEEDS", {"SEED": first})]
        required = "" if optional else steps or base.study.steps
        name, every, left_out = _first_block(tree, seeded, base, study, sweep, yes, required)
    else:
        first = known.resolved_seed
        name, every, left_out = known.study, known.resolved, known.left_out
    chosen = partial(_chosen, every, base, study, has_controls)
    folder = build_dir / base.study.output_dir / name
    judged, unit = study is None or study.judge, unit_of(study, base)
    whole = chosen("")
    runs_of = partial(_runs_of, folder, whole, first)
    auto = auto_seeds(base, folder, whole, runs_of, judged, unit) if automatic else None
    seed_list = tuple(auto.variants) if auto else seed_list
    checked = {run.seed for run in known.runs} if known else set()
    _require_seeds_in_range(tree, layers, set(seed_list) - checked)
    planned = _with_seeds(chosen(steps), seed_list, first, auto)
    seeds_of = ((seed, config.seed) for seed, block in planned.items() for _, config in block)
    assert study is None or all(a == b for a, b in seeds_of), "a step without the planned seed"
    refuse_unpaired_compile([config for block in planned.values() for _, config in block])
    runs = _known_runs(known, planned) or build_runs(name, folder.parent, planned)
    looks = base.verdicts.look_plan if automatic else LookPlan.fixed(len(seed_list))
    return Plan(
        *(name, folder, build_dir, base, runs, left_out, sweep, [v for v, _ in whole], auto, looks),
        resolved=every,
        resolved_seed=first,
        micro_batch=micro_batch,
        judged=judged,
        unit=unit,
    )


def _micro_batch(
    tree: KconfigTree,
    layers: Sequence[ConfigLayer],
    build_dir: Path,
    sweep: Sweep | None,
    yes: bool | None,
) -> MicroBatch | None:
    """Return the micro-batch of all runs of the configuration, if it is automatic.

    It depends neither on the selected steps nor on the seeds, so that these runs are comparable.
    """
    if not is_automatic(layers):
        return None
    layers = with_one_sequence(tree, layers)
    whole = make_plan(layers, build_dir, sweep=sweep, yes=yes, optional=True)
    configs = {variant.slug: config for variant, config in whole.resolved}
    return largest_micro_batch(whole.base, configs, whole.folder)


def _with_seeds(
    block: Sequence[tuple[RunVariant, Config]],
    seeds: Sequence[int],
    resolved_seed: int,
    auto: AutoSeeds | None,
) -> dict[int, list[tuple[RunVariant, Config]]]:
    """Return the block with each seed; the settings of a variant may fix its seed."""
    return {
        seed: [
            (variant, config.with_seed(seed) if config.seed == resolved_seed else config)
            for variant, config in block
            if auto is None or variant.slug in auto.variants[seed]
        ]
        for seed in seeds
    }


def _runs_of(
    folder: Path, block: Block, resolved_seed: int, seeds: Sequence[int]
) -> Sequence[Run[Config]]:
    """Return the runs of a block with each of ``seeds``."""
    planned = _with_seeds(block, seeds, resolved_seed, None)
    return build_runs(folder.name, folder.parent, planned)


def _known_runs(
    known: Plan | None, planned: Mapping[int, Sequence[tuple[RunVariant, Config]]]
) -> Sequence[Run[Config]]:
    """Return the runs of ``known`` if they are those of the ``planned`` blocks, else none."""
    items = [(seed, *item) for seed, block in planned.items() for item in block]
    runs = known.runs if known else ()
    return runs if items == [(run.seed, run.variant, run.config) for run in runs] else ()


def _require_steps(study: Study | None, automatic: bool) -> None:
    """Raise ConfigError if the steps of a plan cannot be selected."""
    if automatic:
        what = "SEEDS=auto judges the whole study (expected no STEPS=)"
        advice = "set RA_MLA_ABLATION_STEPS to declare a smaller study"
        raise ConfigError(Problem(what, "STEPS", advice, code="config.conflict"))
    if study is None:
        what = "STEPS requires an ablation study"
        advice = "type: make defconfig-gpt2-ratio-ablation, or set RA_MLA_ABLATION_MODE=y"
        raise ConfigError(Problem(what, "STEPS", advice, code="config.conflict"))


def _planned_study(base: Config, sweep: Sweep | None, build_dir: Path) -> Study | None:
    """Return the study that ``base`` plans; None for a sweep, a matrix or a single training."""
    if sweep is not None or base.study.mode != "ra_mla_ablation_mode":
        return None
    return study_of(base.study, build_dir)


def _first_block(
    tree: KconfigTree,
    seeded: Sequence[ConfigLayer],
    base: Config,
    study: Study | None,
    sweep: Sweep | None,
    yes: bool | None,
    required: str,
) -> tuple[str, Block, Sequence[Problem]]:
    """Return the study's name, its variants with one seed, and those left out.

    Of a study, the ``required`` steps must resolve.
    """
    if sweep is not None:
        combined = plan_sweep(tree, seeded, base, sweep, yes=yes)
        return "sweep", combined.block, combined.left_out
    if study is not None:
        return study.name, *_steps(tree, seeded, study, required)
    if base.study.mode == "test_matrix_mode":
        combined = matrix(tree, seeded, base, yes=yes)
        return "matrix", combined.block, combined.left_out
    return "single", [(RunVariant("run"), resolve_config(tree, seeded))], ()


def _chosen(
    every: Block,
    base: Config,
    study: Study | None,
    has_controls: bool,
    steps: str,
) -> Block:
    """Return the variants of ``every`` to train: the selected steps and controls."""
    if study is not None:
        selected = study.select(steps or base.study.steps)
        slugs = [step.slug for step in selected]
        every = [(variant, config) for variant, config in every if variant.slug in slugs]
        if has_controls and study.judge and steps in ("", "all"):
            every = _with_controls(every)
    return every


def _require_seeds_in_range(
    tree: KconfigTree, layers: Sequence[ConfigLayer], seeds: Set[int]
) -> None:
    """Raise ConfigError if SEED does not accept the smallest or the largest seed."""
    for seed in {min(seeds), max(seeds)} if seeds else ():
        resolve_config(tree, [*layers, ConfigLayer.of("command line", "SEEDS", {"SEED": seed})])


def _seed_list(base: Config, study: Study | None, seeds: str = "") -> tuple[int, ...]:
    """Return the seeds of SEEDS=, of the configuration, of the study's file, or SEED."""
    of_study = study.seeds if study else ()
    seed_list = parse_seeds(seeds) or base.study.seed_list or of_study or (base.seed,)
    if len(set(seed_list)) < len(seed_list):
        raise ConfigError(Problem("duplicate seed", "SEED_LIST", code="usage.duplicate-seed"))
    return seed_list


def table_plan(plan: Plan, layers: Sequence[ConfigLayer]) -> Plan:
    """Return the runs to show in the table of ``plan``: its runs and all started runs of its study.

    A table of the selected steps or seeds only would replace the table of the whole study.
    """
    study = _planned_study(plan.base, plan.sweep, plan.build_dir)
    configured = _seed_list(plan.base, study)
    seeds = list(dict.fromkeys((*configured, *(run.seed for run in plan.runs))))
    steps = "all" if study else ""
    every = partial(make_plan, layers, plan.build_dir, steps=steps, sweep=plan.sweep, known=plan)
    # The looks of SEEDS=auto determine its seeds.
    if plan.auto is None:
        seeds.sort()
    whole = every(seeds=",".join(map(str, seeds)))
    if plan.auto is None and (more := _started_seeds(whole) - set(seeds)):
        whole = every(seeds=",".join(map(str, sorted({*seeds, *more}))))
    planned = {run.path for run in plan.runs}
    runs = [run for run in whole.runs if run.path in planned or run.path.exists()]
    return replace(plan, runs=runs, looks=planned_looks(plan))


def _started_seeds(plan: Plan) -> set[int]:
    """Return the seeds of the run directories in the plan's folder that have a configuration of it.

    The directories of the plan's runs are left out.
    """
    configs = {run.variant.slug: run.config for run in plan.runs}
    planned = {run.path.name for run in plan.runs if run.path.parent == plan.folder}
    seeds: set[int] = set()
    names = os.listdir(plan.folder) if plan.folder.is_dir() else ()
    for name in set(names) - planned:
        slug, seed, _ = name.rsplit("-", 2) if name.count("-") > 1 else ("", "", "")
        if slug not in configs or not WHOLE_NUMBER.fullmatch(seed[1:]):
            continue
        number = int(seed[1:])
        path = run_path(plan.folder, slug, number, configs[slug].with_seed(number))
        if path.name == name:
            seeds.add(number)
    return seeds


def _steps(
    tree: KconfigTree, layers: Sequence[ConfigLayer], study: Study, required: str
) -> tuple[Block, Sequence[Problem]]:
    """Return all steps that resolve, among them the required ones, and one problem of the others."""
    steps, problems = resolve_study(tree, layers, study, study.select(required) if required else ())
    block = [
        (
            RunVariant(s.step.slug, s.title, study.number(s.step), s.step.parent, s.step.set),
            s.config,
        )
        for s in steps
    ]
    if len(problems) > 1:
        what = f"{problems[0].what}; {len(problems) - 1} more steps do not fit"
        problems = [replace(problems[0], what=what)]
    return block, problems


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
    if config.machine.repeats and not run_budget(config).is_time:
        return block
    title = f"{variant.slug} again: the noise of one seed"
    repeat = RunVariant(f"{variant.slug}-{AGAIN}", title, parent=variant.slug, is_repeat=True)
    return [*block, (repeat, config)]
