"""Trainings that continue a finished run, its forks: the command ``make prolong``.

Forks of one run with equally many iterations are a study: one is the run unchanged, each of the others
is named after the settings that it changes. What each run continues is in its INIT_FROM.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kconfiglib import Symbol

from gpt2.config import Config
from gpt2.records.files import (
    RunLookup,
    allowed_values,
    find_finished,
    identity_symbols,
    own_values,
    recorded_config,
)
from gpt2.records.listing import RUN_NAME
from gpt2.running.reproduce import require_recorded_inputs
from gpt2.study.designs import find_symbol, short_slug, slug
from gpt2.study.plan import Plan
from gpt2.study.resolve import resolve_config
from gpt2.weights.source import require_kept
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.errors import ConfigError
from lib.json_files import DamagedRecord, RecordError
from lib.runs.record import RunRecord
from lib.runs.run import Run, RunVariant, build_runs
from lib.runs.run_dir import RunDir

# The order of the data is drawn from the seed: the same seed would repeat the run's first batches.
SEED_STEP = 1000
# Beginning of the names of the studies.
STUDY = "prolonged"
UNCHANGED = "unchanged"
_NOTE = (
    "forks of one run: they differ in its continuation alone, so their noise is less than that of "
    "seeds of a whole training, and no other run need show the same difference"
)


def plan_prolonged(
    named: str,
    build_dir: Path,
    iterations: int,
    settings: Sequence[ConfigLayer],
    *,
    seeds: str = "",
    count: int = 1,
    at: int | None = None,
) -> Plan:
    """Plan ``iterations`` more of the finished run ``named``, as ``count`` runs of their own.

    The runs have the recorded settings that ``allowed_symbols`` lists, the others of ``.config``, and
    ``settings`` on top, but each its own seed. ``seeds`` selects among the planned runs of a name,
    ``at`` an iteration whose checkpoint the run kept. Raises ConfigError or RecordError.
    """
    run = find_finished(named, build_dir, RunLookup(seeds=seeds))
    record = RunRecord(run)
    values = allowed_values(record)
    seed = values["SEED"]
    if type(seed) is not int:
        raise DamagedRecord(run.resolved_config, "SEED, a whole number", repr(seed)[:40])
    if at is not None:
        require_kept(run, at, "FROM")
    own = own_values(build_dir)
    output = build_dir / str(own["OUTPUT_DIR"])
    path = run.path.absolute()
    # A run below the output folder is named, another one by its path.
    source = path.name if path.parent.parent == output.absolute() else str(path)
    changes: dict[str, SymbolValue] = {
        "SINGLE_TRAINING": True,
        "BUDGET_ITERATIONS": True,
        "MAX_ITERS": iterations,
        "INIT_FROM": f"run:{source}" + ("" if at is None else f"@{at}"),
        "SEED": seed + SEED_STEP,
    }
    if values["INIT_STREAM"]:
        changes["INIT_STREAM"] = 0
    layers = [
        ConfigLayer.of("constants", str(build_dir), own),
        ConfigLayer.of("constants", str(run.resolved_config), values),
        ConfigLayer.of("command line", "ITERS", changes),
    ]
    tree = KconfigTree()
    config = resolve_config(tree, [*layers, *settings])
    require_recorded_inputs(config, record, build_dir)
    changed = _changes(tree, settings, resolve_config(tree, layers), config)
    all_seeds = [config.seed + SEED_STEP * number for number in range(count)]
    last = ConfigLayer.of("command line", "COUNT", {"SEED": all_seeds[-1]})
    resolve_config(tree, [*layers, *settings, last])
    done = record.summary.value(int, "final", "iterations") if at is None else at
    study = f"{STUDY}-{slug(run.path.name)}-{done}-{config.train.max_iters}"
    variant = RunVariant(_name(changed), " ".join(f"{n}={v}" for n, v in changed.items()))
    runs = build_runs(study, output, {s: [(variant, config.with_seed(s))] for s in all_seeds})
    log("PROLONG", f"{run.path.name}: {done:,} it done; {_stated(config)}")
    command = f"make prolong RUN={shlex.quote(named)} ITERS={iterations}"
    command += "" if at is None else f" FROM={at}"
    return Plan(study, output / study, build_dir, config, runs, note=_NOTE, command=command)


def with_other_forks(plan: Plan) -> Plan:
    """Return the plan with all runs in its folder: the forks of one run, the unchanged ones first."""
    planned = {run.path.name for run in plan.runs}
    runs = [*plan.runs, *(run for run in _recorded(plan) if run.path.name not in planned)]
    runs.sort(key=lambda run: (run.variant.slug != UNCHANGED, run.variant.slug, run.seed))
    first = runs[0].variant.slug
    variants = {
        run.variant.slug: replace(run.variant, parent="" if run.variant.slug == first else first)
        for run in runs
    }
    if UNCHANGED not in variants:
        log("NEXT", "without SET=, make prolong trains the continuation without a change")
    runs = [replace(run, variant=variants[run.variant.slug]) for run in runs]
    whole = {run.variant.slug: (run.variant, run.config) for run in runs}
    return replace(plan, runs=runs, whole=list(whole.values()))


def _recorded(plan: Plan) -> Iterator[Run[Config]]:
    """Yield the runs in the folder of the plan whose configurations can be read."""
    own = own_values(plan.build_dir)
    for path in sorted(plan.folder.iterdir()) if plan.folder.is_dir() else ():
        # A directory whose run was replaced has another name.
        name, run = RUN_NAME.fullmatch(path.name), RunDir(path)
        if name is None or not run.resolved_config.exists():
            continue
        try:
            config = recorded_config(RunRecord(run), own)
        except (ConfigError, RecordError) as error:
            log("OMIT", f"{path.name}: {error.problems[0].what}")
            continue
        if config.hash8 == name["hash"] and config.init.init_from == plan.base.init.init_from:
            yield Run(plan.study, RunVariant(name["step"]), config.seed, config, path)


def _changes(
    tree: KconfigTree, settings: Sequence[ConfigLayer], plain: Config, config: Config
) -> dict[str, str]:
    """Return the settings on top, except for the seed, that make another run of ``plain``."""
    changed = {}
    for assignment in (a for layer in settings for a in layer.assignments):
        symbol = find_symbol(tree, assignment.name)
        value = symbol.choice.name if isinstance(symbol, Symbol) and symbol.choice else symbol.name
        names = {symbol.name, value} & identity_symbols() - {"SEED"}
        if names and plain.values[value] != config.values[value]:
            changed[assignment.name] = assignment.value
    return changed


def _name(changed: Mapping[str, str]) -> str:
    """Return the slug of a fork with these settings."""
    words = [
        slug(name) if value == "y" else slug(f"no-{name}" if value == "n" else f"{name}-{value}")
        for name, value in sorted(changed.items())
    ]
    return short_slug("-".join(words)) or UNCHANGED


def _stated(config: Config) -> str:
    """Return the schedule of the new run in words."""
    schedule, count = config.schedule, config.train.max_iters
    return (
        f"{count:,} more with a schedule of their own: {schedule.warmup_steps:,} it warm-up, "
        f"{schedule.kind} from {schedule.learning_rate:g}; "
        f"{'new optimizer state, ' if config.init.iteration is None else ''}"
        f"data order of SEED={config.seed}"
    )
