"""``resolved_config.yaml`` of a run: its content, what of it may reach this machine, and its run.

The folder of a run may be a stranger's. A symbol has the recorded value only if the identity of runs
contains its field, or ``_ALSO_ALLOWED`` names it. Every other symbol, such as a folder, a command, an
account or one that is new, has the value of this machine's ``.config``, or its default.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from gpt2.attention.config import REGISTRIES as ATTENTION
from gpt2.config import Config
from gpt2.mlp.options import ACTIVATIONS, MECHANISMS
from gpt2.model_config import NORMS
from gpt2.study.arguments import RunLookup
from gpt2.weights.options import ADAPTERS
from lib.config.dotconfig import ConfigWorkspace, ExplicitSetting, read_constants
from lib.config.field import SymbolValue, missing_symbol
from lib.config.layers import ConfigLayer, to_kconfig_text
from lib.config.private import private_digests, without_private
from lib.config.registry import Registry
from lib.config.tree import KconfigTree, member_values
from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.gone import is_without_effect, removed_symbols
from lib.json_files import RecordError
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS
from lib.project import ROOT
from lib.pruning.options import PRUNERS
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.units import first_of

SCHEMA_VERSION = 2
_SHIPPED = ("defconfig", "fragment")


def write_resolved_config(
    run: RunDir, config: Config, settings: Mapping[str, ExplicitSetting] | None = None
) -> None:
    """Write symbols, identity and sources of settings as JSON, which is valid YAML.

    Private values are empty, beside their digests. Raises ConfigError if the directory belongs to a
    different run.
    """
    recorded = config.hash8
    with contextlib.suppress(RecordError):
        recorded = RunRecord(run).hash8
    if recorded != config.hash8:
        what = f"directory belongs to a different run (expected {config.hash8}, got {recorded})"
        advice = "move the directory aside, then type: make"
        raise ConfigError(Problem(what, str(run.path), advice, code="run.foreign-directory"))
    settings = settings or {}
    values = without_private({name: each["value"] for name, each in settings.items()})
    record = {
        "schema_version": SCHEMA_VERSION,
        "hash8": config.hash8,
        "identity": config.identity(),
        "settings": {name: {**each, "value": values[name]} for name, each in settings.items()},
        "symbols": without_private(config.values),
        "private_sha256": private_digests(config.values),
    }
    write_json(run.resolved_config, record)


def read_settings(run: RunDir) -> dict[str, Any]:
    """Return the non-default settings of a run, and those of their sources that this tree ships."""
    settings = RunRecord(run).settings
    files = {s["where"].partition(":")[0] for s in settings.values() if s["label"] in _SHIPPED}
    return {"defconfig": sorted(files), "overrides": settings}


def read_planned_config(run: RunDir) -> Config:
    """Load the configuration, with all symbols, that the plan of this machine wrote."""
    record = RunRecord(run)
    config = Config.from_values(record.symbols)
    require_identity(config, record)
    return config


def read_resolved_config(run: RunDir, build_dir: Path | None = None) -> Config:
    """Load a stranger's configuration, other symbols from ``.config``. Raises ConfigError."""
    record = RunRecord(run)
    config = recorded_config(record, own_values(build_dir) if build_dir else None)
    require_identity(config, record)
    return config


# Every registry of components that the identity of a run names.
REGISTRIES: tuple[Registry[Any], ...] = (
    *(*ATTENTION, ACTIVATIONS, MECHANISMS, NORMS, ADAPTERS),
    *(OPTIMIZERS, ADAMWPRUNE_BASES, PRUNERS),
)
# Outside of the identity: what selects the rows, flags and texts that a run records, and what sets or
# justifies symbols that are allowed.
_ALSO_ALLOWED = {
    *("EVAL_INTERVAL", "STATISTICS_INTERVAL", "STATISTICS_ROWS", "SAMPLE_TOKENS", "SAMPLE_PROMPT"),
    *("CHECK_NUMERICS", "CHECK_NUMERICS_EVERY", "DETECT_ANOMALY"),
    *("MODEL_SIZE", "DATASET_STAND_IN", "PRECISION_WHY", "MATMUL_WHY"),
}


def allowed_symbols() -> frozenset[str]:
    return identity_symbols() | _ALSO_ALLOWED


@cache
def identity_symbols() -> frozenset[str]:
    """Return the symbols of the identity, with those that select a component, such as ``RECIPROCAL``."""
    classes: list[type] = [Config, *(r.options(name) for r in REGISTRIES for name in r)]
    bound = {symbol for cls in classes for symbol in _identity_symbols(cls)}
    return frozenset(bound.union(*(registry.symbols() for registry in REGISTRIES)))


def _identity_symbols(cls: type) -> Iterator[str]:
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.metadata.get("identity", True):
            continue
        if "symbol" in field.metadata:
            yield field.metadata["symbol"]
        elif dataclasses.is_dataclass(kind := kinds[field.name]):
            yield from _identity_symbols(typing.cast(type, kind))


def own_values(build_dir: Path) -> Mapping[str, SymbolValue]:
    """Return the values of ``.config``, or the defaults if there is none."""
    place = ConfigWorkspace(ROOT, build_dir)
    return read_constants(place) if place.config.exists() else _tree().resolve([]).values


def recorded_config(record: RunRecord, own: Mapping[str, SymbolValue] | None = None) -> Config:
    """Return the allowed part of a recorded configuration on ``own`` values, or on defaults."""
    values = allowed_values(record)
    config = Config.from_values({**(own or _tree().resolve([]).values), **values})
    newer = sorted(values.keys() - record.symbols.keys())
    if newer and config.hash8 != record.hash8:
        raise ConfigError(*map(missing_symbol, newer))
    return config


def allowed_values(record: RunRecord) -> dict[str, SymbolValue]:
    """Return the recorded values of the allowed symbols; one that is newer has its default."""
    if former := list(_former_settings(record)):
        advice = "use the version that trained the run"
        with contextlib.suppress(RecordError):
            sha = str(record.manifest.find("code", "git_sha"))
            tree = f"../kablate-{sha[:8]}"
            advice = f"to restore the code of the run, type: git worktree add {tree} {sha}"
        where, code = str(record.run.resolved_config), "run.former-setting"
        raise ConfigError(*(Problem(what, where, advice, code=code) for what in former))
    allowed = allowed_symbols()
    values = {name: value for name, value in record.symbols.items() if name in allowed}
    if newer := allowed - values.keys():
        layer = ConfigLayer.of("constants", str(record.run.resolved_config), values)
        resolved = _tree().resolve([layer]).values
        values |= {name: resolved[name] for name in newer}
    return values


def _former_settings(record: RunRecord) -> Iterator[str]:
    """Yield the symbols that went and were not off, and the choices whose recorded member went."""
    symbols = {name: to_kconfig_text(value) for name, value in record.symbols.items()}
    expected = {
        name: off or "no such symbol"
        for name, off in removed_symbols().items()
        if name in symbols and not is_without_effect(name, symbols[name])
    }
    for choice in _tree().kconf.unique_choices:
        members = member_values(choice)
        value = symbols.get(choice.name) if choice.name in allowed_symbols() else None
        if value and value not in members:
            expected[choice.name] = f"one of {', '.join(members)}"
    for name, others in expected.items():
        what = "which this version does not have"
        yield f"{name}: recorded value {symbols[name]}, {what} (expected {others})"


def require_identity(config: Config, record: RunRecord) -> None:
    """Raise ConfigError unless ``config`` has the identity that the code of the run recorded."""
    if config.hash8 == record.hash8:
        return
    what = f"made by other code (recorded identity {record.hash8}, now {config.hash8})"
    advice = "type: make, to plan the runs of this code"
    raise ConfigError(Problem(what, str(record.run.resolved_config), advice, code="run.other-code"))


@cache
def _tree() -> KconfigTree:
    return KconfigTree()


_LIST_RUNS = "type: make plan, to list the runs"


def find_finished(
    named: str, build_dir: Path, lookup: RunLookup | None = None, *, variable: str = "RUN"
) -> RunDir:
    """Return the one finished run ``named``: a directory, or a name in the plan of ``.config``."""
    if not named:
        what = "no run given"
        raise ConfigError(Problem(what, variable, _LIST_RUNS, code="usage.missing-argument"))
    run = RunDir(Path(named))
    if not run.resolved_config.exists():
        plan = (lookup or RunLookup()).plan(build_dir)
        # A label contains a blank, which would split it into two patterns.
        runs = [each for each in plan.runs if named == each.label or each.matches(named)]
        if not runs:
            what = f"{named!r} is neither a run directory nor a run of {plan.study}"
            raise ConfigError(Problem(what, variable, _LIST_RUNS, code="run.not-found"))
        if len(runs) > 1:
            what = f"{named!r} matches {len(runs)} runs: {first_of([each.label for each in runs])}"
            advice = f"type: {variable}='{runs[0].label}'"
            raise ConfigError(Problem(what, variable, advice, code="run.ambiguous"))
        run = RunDir(runs[0].path)
    if problem := RunRecord(run).unfinished:
        raise ConfigError(problem)
    return run


def find_started(
    named: str, build_dir: Path, lookup: RunLookup, *, variable: str = "RUNS"
) -> list[RunDir]:
    """Return all started runs that match the words of ``named``. Raises ConfigError."""
    words = [named] if Path(named).is_dir() else named.replace(",", " ").split()
    runs, patterns = [], []
    for word in words:
        # Names in the plan have no slash.
        paths = [word] if Path(word).is_dir() else sorted(glob(word)) if "/" in word else []
        # A run without some of these files is damaged.
        found = [
            run
            for run in map(RunDir, map(Path, paths))
            if any(path.exists() for path in (run.status, run.resolved_config, run.manifest))
        ]
        if Path(word).is_dir() and not found:
            what = f"{word!r} is not a run directory"
            raise ConfigError(Problem(what, variable, _LIST_RUNS, code="run.not-found"))
        runs += found
        patterns += [] if found else [word]
    if patterns:
        plan = lookup.plan(build_dir)
        runs += [RunDir(run.path) for run in plan.matching(",".join(patterns), variable)]
    started = [run for run in runs if run.path.is_dir()]
    if not started:
        what = f"no started run matches {named!r}"
        raise ConfigError(Problem(what, variable, _LIST_RUNS, code="run.not-found"))
    return started
