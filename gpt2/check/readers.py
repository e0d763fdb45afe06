"""Configuration fields by symbol, with types and bounds; imports no torch."""

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache

from gpt2.attention import GATES, PATTERNS, PROJECTIONS, TERMS
from gpt2.config import Config
from gpt2.mlp import MECHANISMS
from gpt2.positions import POSITIONS
from lib.binding import bound_fields
from lib.optim import BASES, OPTIMIZERS
from lib.pruning import PRUNERS
from lib.tracking import TRACKERS

REGISTRIES = (PROJECTIONS, PATTERNS, POSITIONS, TERMS, GATES, MECHANISMS)
REGISTRIES += (OPTIMIZERS, BASES, PRUNERS)


@dataclass(frozen=True)
class Reader:
    """A bound field: its class, its type, and the bounds of a float.

    ``identity``: the field is part of a run's identity. ``form``: the field only selects a backend
    of the same function.
    """

    owner: type
    kind: type
    low: float | None
    high: float | None
    identity: bool
    form: bool


@cache
def readers() -> dict[str, Reader]:
    """Return the reader of each symbol; choices and bools that select components have none."""
    by_symbol: dict[str, Reader] = {}
    for owner in _classes():
        kinds = typing.get_type_hints(owner)
        for field in bound_fields(owner):
            metadata = {key: field.metadata[key] for key in ("low", "high", "identity", "form")}
            by_symbol[field.metadata["symbol"]] = Reader(owner, kinds[field.name], **metadata)
    return by_symbol


def _classes() -> list[type]:
    """Return Config, every dataclass below it, and the options of every component."""
    classes: list[type] = []
    registries = (*REGISTRIES, TRACKERS)
    pending = [Config, *(registry.options(name) for registry in registries for name in registry)]
    while pending:
        if (owner := pending.pop()) not in classes:
            classes.append(owner)
            hints = typing.get_type_hints(owner).values()
            pending += [hint for hint in hints if dataclasses.is_dataclass(hint)]
    return classes
