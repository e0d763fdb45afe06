"""What of a recorded configuration may reach this machine: the one list of what is allowed.

The folder of a run may be a stranger's. A symbol has the recorded value only if the identity of runs
contains its field, or ``_ALSO_ALLOWED`` names it. Every other symbol, such as a folder, a command, an
account or one that is new, has the value of this machine's ``.config``, or its default.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gpt2.attention.config import GATES, PATTERNS, POSITIONS, PROJECTIONS, TERMS, TRANSFORMS
from gpt2.config import Config
from gpt2.mlp.options import ACTIVATIONS, MECHANISMS
from gpt2.study.resolve import configured_values
from lib.config.dotconfig import ConfigWorkspace
from lib.config.field import SymbolValue, missing_symbol
from lib.config.layers import ConfigLayer, to_kconfig_text
from lib.config.registry import Registry
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.gone import is_without_effect, removed_symbols
from lib.json_files import RecordError
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS
from lib.project import ROOT
from lib.pruning.options import PRUNERS
from lib.runs.record import RunRecord

# Every registry of components that the identity of a run names.
REGISTRIES: tuple[Registry[Any], ...] = (
    *(PROJECTIONS, PATTERNS, POSITIONS, TRANSFORMS, TERMS, GATES, ACTIVATIONS, MECHANISMS),
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
    """Return the symbols whose recorded values may reach this machine."""
    return identity_symbols() | _ALSO_ALLOWED


@cache
def identity_symbols() -> frozenset[str]:
    """Return the symbols that the identity of a run contains."""
    classes: list[type] = [Config, *(r.options(name) for r in REGISTRIES for name in r)]
    bound = [symbol for cls in classes for symbol in _identity_symbols(cls)]
    selecting = [symbol for registry in REGISTRIES for symbol in registry.symbols()]
    return frozenset((*bound, *selecting))


def _identity_symbols(cls: type) -> Iterator[str]:
    """Yield the symbols of the fields of ``cls`` and of the classes below that the identity has."""
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.metadata.get("identity", True):
            continue
        if "symbol" in field.metadata:
            yield field.metadata["symbol"]
        elif dataclasses.is_dataclass(kind := kinds[field.name]):
            yield from _identity_symbols(typing.cast(type, kind))


def own_values(build_dir: Path) -> Mapping[str, SymbolValue]:
    """Return this machine's values: those of ``.config``, or the defaults if there is none."""
    return configured_values(ConfigWorkspace(ROOT, build_dir))


def recorded_config(record: RunRecord, own: Mapping[str, SymbolValue] | None = None) -> Config:
    """Return the allowed part of a recorded configuration on top of ``own`` values, or of defaults.

    Raises ConfigError if the values are rejected, or if symbols that are newer make it another run.
    """
    values = allowed_values(record)
    config = Config.from_values({**(own or _defaults()), **values})
    newer = sorted(values.keys() - record.symbols.keys())
    if newer and config.hash8 != record.hash8:
        raise ConfigError(*map(missing_symbol, newer))
    return config


def allowed_values(record: RunRecord) -> dict[str, SymbolValue]:
    """Return the recorded values of the allowed symbols; one that is newer has its default.

    Raises ConfigError if the run has a setting that this version does not have.
    """
    if problems := list(_former_settings(record)):
        raise ConfigError(*problems)
    allowed = allowed_symbols()
    values = {name: value for name, value in record.symbols.items() if name in allowed}
    if newer := allowed - values.keys():
        layer = ConfigLayer.of("constants", str(record.run.resolved_config), values)
        resolved = _tree().resolve([layer]).values
        values |= {name: resolved[name] for name in newer}
    return values


def _former_settings(record: RunRecord) -> Iterator[Problem]:
    """Yield the symbols that went and were not off, and the choices whose recorded member went."""
    symbols = {name: to_kconfig_text(value) for name, value in record.symbols.items()}
    for name, off in removed_symbols().items():
        if name in symbols and not is_without_effect(name, symbols[name]):
            yield _former_setting(record, name, symbols[name], off or "no such symbol")
    for info in _tree().symbols():
        members = [member.removeprefix(f"{info.name}_").lower() for member in info.members]
        value = symbols.get(info.name) if info.name in allowed_symbols() else None
        if members and value and value not in members:
            yield _former_setting(record, info.name, value, f"one of {', '.join(members)}")


def _former_setting(record: RunRecord, name: str, value: str, expected: str) -> Problem:
    what = f"{name}: recorded value {value}, which this version does not have (expected {expected})"
    advice = "use the version that trained the run"
    with contextlib.suppress(RecordError):
        sha = str(record.manifest.find("code", "git_sha"))
        advice = (
            f"to restore the code of the run, type: git worktree add ../kablate-{sha[:8]} {sha}"
        )
    return Problem(what, str(record.run.resolved_config), advice, code="run.former-setting")


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


@cache
def _defaults() -> Mapping[str, SymbolValue]:
    return _tree().resolve([]).values
