"""Which field of a configuration holds a symbol, and what it may be; imports no torch."""

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
    """A field: the class that has it, its type, the bounds of a float, whether it is identity, and
    whether it only chooses among forms of one function."""

    owner: type
    kind: type
    low: float | None
    high: float | None
    identity: bool
    form: bool


@cache
def readers() -> dict[str, Reader]:
    """By symbol. A choice that selects parts has none, nor has a bool that does."""
    found: dict[str, Reader] = {}
    for owner in _classes():
        kinds = typing.get_type_hints(owner)
        for field in bound_fields(owner):
            given = {key: field.metadata[key] for key in ("low", "high", "identity", "form")}
            found[field.metadata["symbol"]] = Reader(owner, kinds[field.name], **given)
    return found


def _classes() -> list[type]:
    """Config, every dataclass below it, and the options of every part."""
    found: list[type] = []
    registries = (*REGISTRIES, TRACKERS)
    waiting = [Config, *(registry.options(name) for registry in registries for name in registry)]
    while waiting:
        if (owner := waiting.pop()) not in found:
            found.append(owner)
            hints = typing.get_type_hints(owner).values()
            waiting += [hint for hint in hints if dataclasses.is_dataclass(hint)]
    return found
