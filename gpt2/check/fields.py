"""Configuration fields by symbol, with what they declare for checks; imports no torch."""

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpt2.config import Config
from gpt2.records.files import REGISTRIES
from lib.config.field import kconfig_fields
from lib.config.small_form import SmallRule
from lib.tracking.options import TRACKERS


@dataclass(frozen=True)
class BoundField:
    """A bound field: its class, its type, and metadata of ``kconfig_field``."""

    owner: type
    kind: type
    low: float | None
    high: float | None
    form: bool
    small: SmallRule | None


@cache
def fields_by_symbol() -> dict[str, BoundField]:
    """Return the field bound to each symbol; choices and bools that select components have none."""
    by_symbol: dict[str, BoundField] = {}
    for owner in _classes():
        kinds = typing.get_type_hints(owner)
        for field in kconfig_fields(owner):
            metadata = {name: field.metadata[name] for name in ("low", "high", "form", "small")}
            bound = BoundField(owner, kinds[field.name], **metadata)
            by_symbol[field.metadata["symbol"]] = bound
    return by_symbol


def _classes() -> list[type]:
    """Return Config, every dataclass below it, and the options of every component."""
    classes: list[type[Any]] = []
    registries = (*REGISTRIES, TRACKERS)
    pending: list[Any] = [
        Config,
        *(registry.options(name) for registry in registries for name in registry),
    ]
    while pending:
        if (owner := pending.pop()) not in classes:
            classes.append(owner)
            hints = typing.get_type_hints(owner).values()
            pending += [hint for hint in hints if dataclasses.is_dataclass(hint)]
    return classes
