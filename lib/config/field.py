"""Bindings of dataclass fields to Kconfig symbols.

``kconfig_field("N_LAYER")`` marks a field; ``from_symbols(cls, values)`` fills the class from a
mapping of symbol names to values. Kconfig has no float type, so a ``float`` field is bound to a
string symbol, which is converted and range-checked here; every other value keeps its Kconfig type.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from lib.config.small_form import SmallRule, SymbolValue
from lib.errors import ConfigError, Problem

T = TypeVar("T")

# Numbers in the digits of ASCII, without leading zeros: one spelling for each value.
WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")
_DECIMAL = re.compile(r"[+-]?(?:0|[1-9][0-9]*)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")


def kconfig_field(
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    identity: bool = True,
    form: bool = False,
    off: SymbolValue | float | None = None,
    small: SmallRule | None = None,
) -> Any:
    """Return a dataclass field bound to the Kconfig symbol or choice ``name``.

    ``low`` and ``high`` bound a float (inclusive). ``identity=False`` marks a setting that cannot
    change a bit of a run's result (folders, intervals) and is therefore excluded from the run's
    hash. ``form=True`` marks a setting that selects an implementation of the same function: it
    affects rounding, memory and time only. ``off`` is the value at which the setting changes
    nothing: at it, the setting is not in the hash, so that adding or removing it changes no hash.

    ``small`` computes the value in a small form, for checks.
    """
    metadata: dict[str, Any] = {
        "symbol": name,
        "low": low,
        "high": high,
        "identity": identity,
        "form": form,
        "off": off,
        "small": small,
    }
    return dataclasses.field(metadata=metadata)


def component_field(registry: Any, *, off: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field for the options of the one part that ``registry`` selects.

    ``off`` are the options that are not in the hash, and the default of the field.
    """
    if off is dataclasses.MISSING:
        return dataclasses.field(metadata={"part": registry})
    return dataclasses.field(default=off, metadata={"part": registry, "off": off})


def kconfig_fields(cls: type) -> Iterator[dataclasses.Field]:
    """Yield the fields of ``cls`` that are bound to a symbol."""
    return _fields(cls, "symbol")


def from_symbols(cls: type[T], values: Mapping[str, SymbolValue], /, **unbound: Any) -> T:
    """Build ``cls`` from symbol values; ``unbound`` supplies the unbound fields.

    Raises ConfigError with every invalid symbol at once.
    """
    hints = _type_hints(typing.cast(type, cls))
    filled: dict[str, Any] = dict(unbound)
    problems = []
    for field in kconfig_fields(cls):
        if (symbol := field.metadata["symbol"]) not in values:
            problems.append(missing_symbol(symbol))
            continue
        try:
            filled[field.name] = _convert(field, hints[field.name], values[symbol])
        except ConfigError as error:
            problems.extend(error.problems)
    for field in _fields(cls, "part"):
        try:
            (filled[field.name],) = field.metadata["part"].bind(values)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return cls(**filled)


MISSING_SYMBOL = "config.missing-symbol"


def missing_symbol(symbol: str) -> Problem:
    """Return the problem of a configuration without ``symbol``."""
    what = f"{symbol}: missing in the configuration (expected a symbol of the Kconfig files)"
    advice = "type: make olddefconfig, for an old .config"
    return Problem(what, next=advice, code=MISSING_SYMBOL)


@cache
def _type_hints(cls: type) -> Mapping[str, Any]:
    """Return the types of all fields of ``cls``, which takes longer than to fill the fields."""
    return typing.get_type_hints(cls)


def _fields(cls: type, key: str) -> Iterator[dataclasses.Field]:
    """Yield the fields of ``cls`` whose metadata have ``key``."""
    return (f for f in dataclasses.fields(cls) if key in f.metadata)


def _convert(field: dataclasses.Field, kind: Any, value: SymbolValue) -> Any:
    symbol, low, high = (field.metadata[key] for key in ("symbol", "low", "high"))
    if kind is float:
        return _to_float(symbol, str(value), low, high)
    if isinstance(kind, types.GenericAlias) and typing.get_origin(kind) is tuple:
        words = str(value).replace(",", " ").split()
        if typing.get_args(kind)[0] is float:
            return tuple(_to_float(symbol, word, None, None) for word in words)
        return tuple(_to_int(symbol, word) for word in words)
    if type(value) is not kind:
        raise _invalid(symbol, f"expected {kind.__name__}, got {value!r}", "wrong-type")
    return value


def _invalid(symbol: str, what: str, kind: str) -> ConfigError:
    advice = f"type: make why SYM={symbol}"
    return ConfigError(Problem(f"{symbol}: {what}", next=advice, code=f"config.{kind}"))


def _to_float(symbol: str, text: str, low: float | None, high: float | None) -> float:
    try:
        number = float(text)
    except ValueError:
        number = None
    # Python reads 1_000 and the digits of every script, and configurations are read by others too.
    if number is None or (math.isfinite(number) and not _DECIMAL.fullmatch(text)):
        what = f"wrong type (expected a number, got {text!r})"
        raise _invalid(symbol, what, "wrong-type")
    if not math.isfinite(number):
        raise _invalid(symbol, f"expected a finite number, got {text!r}", "non-finite")
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = [f"at least {low:g}"] * (low is not None)
        bounds += [f"at most {high:g}"] * (high is not None)
        what = f"out of range (expected {' and '.join(bounds)}, got {text})"
        raise _invalid(symbol, what, "out-of-range")
    return number


def _to_int(symbol: str, text: str) -> int:
    if not WHOLE_NUMBER.fullmatch(text):
        what = f"wrong type (expected an integer of at least 0, got {text!r})"
        raise _invalid(symbol, what, "wrong-type")
    return int(text)
