"""Symbol ↔ field: a dataclass whose fields name the Kconfig symbols they hold.

``symbol("N_LAYER")`` marks a field; ``bind(cls, values)`` fills the class from a mapping of symbol
names to values. Kconfig has no float, so such symbols are strings that a ``float`` field converts
and bounds here; everything else keeps the type that Kconfig gave it.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

from lib.errors import ConfigError, Problem

T = TypeVar("T")
Value = bool | int | str


def symbol(
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    identity: bool = True,
    form: bool = False,
) -> Any:
    """A field bound to the Kconfig symbol or choice ``name``.

    ``low`` and ``high`` bound a float (inclusive). ``identity=False`` marks a setting that cannot
    change a bit of a run's result (folders, intervals), and so stays out of the run's hash.
    ``form=True`` marks one that chooses how a function is computed, not which: last bits, memory
    and time.
    """
    metadata = {"symbol": name, "low": low, "high": high, "identity": identity, "form": form}
    return dataclasses.field(metadata=metadata)


class Parts(Protocol):
    """What ``part`` selects from: a registry."""

    def bind(self, values: Mapping[str, Value]) -> tuple:
        """The options of every selected part."""


def part(registry: Parts) -> Any:
    """A field that holds the options of the one part that ``registry`` selects."""
    return dataclasses.field(metadata={"part": registry})


def bound_fields(cls: type) -> Iterator[dataclasses.Field]:
    """The fields of ``cls`` that are bound to a symbol."""
    return (f for f in dataclasses.fields(cls) if "symbol" in f.metadata)


def bind(cls: type[T], values: Mapping[str, Value], /, **given: Any) -> T:
    """Build ``cls`` from symbol values; ``given`` supplies the unbound fields.

    Raises ConfigError with every bad symbol at once.
    """
    hints = typing.get_type_hints(cls)
    filled: dict[str, Any] = dict(given)
    problems = []
    for field in bound_fields(cls):
        try:
            filled[field.name] = _convert(field, hints[field.name], values)
        except ValueError as error:
            problems.append(Problem(f"{field.metadata['symbol']}: {error}"))
    for field in (f for f in dataclasses.fields(cls) if "part" in f.metadata):
        try:
            (filled[field.name],) = field.metadata["part"].bind(values)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return cls(**filled)


def _convert(field: dataclasses.Field, kind: Any, values: Mapping[str, Value]) -> Any:
    name = field.metadata["symbol"]
    if name not in values:
        raise ValueError("the configuration has no such symbol; run make olddefconfig")
    value = values[name]
    if kind is float:
        return _to_float(str(value), field.metadata["low"], field.metadata["high"])
    if isinstance(kind, types.GenericAlias) and typing.get_origin(kind) is tuple:
        return tuple(_to_int(word) for word in str(value).replace(",", " ").split())
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {value!r}")
    return value


def _to_float(text: str, low: float | None, high: float | None) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    if low is not None and number < low or high is not None and number > high:
        raise ValueError(f"{text} is out of range [{low}, {high}]")
    return number


def _to_int(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number ≥ 0")
    return int(text)
