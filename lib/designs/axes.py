"""Axes of a matrix or a sweep: ``NAME=value,value``, or a numeric range.

    OPTIMIZER=adamw,sgd         a choice, by the names of its members
    LEARNING_RATE=1e-4,3e-4     values of any symbol
    LEARNING_RATE=log:1e-4:1e-2:5   five values, evenly spaced in the logarithm
    DROPOUT=lin:0:0.3:4         four values, evenly spaced

A range without the last number is continuous and can only be sampled.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lib.binding import Value
from lib.designs.cell import Level
from lib.errors import ConfigError, Problem
from lib.kconfig import SymbolInfo, Tree

_RANGE = re.compile(r"(lin|log):([^:]+):([^:]+)(?::([0-9]+))?")
# Enough to distinguish points of a sweep, and short enough for a folder name.
_DIGITS = 3


@dataclass(frozen=True)
class Continuum:
    """Numeric interval from ``low`` to ``high``, sampled uniformly or log-uniformly."""

    low: float
    high: float
    logarithmic: bool
    whole: bool

    def at(self, share: float) -> str:
        """Return the number at fraction ``share`` (0 to 1) of the interval, with three digits."""
        if self.logarithmic:
            number = self.low * (self.high / self.low) ** share
        else:
            number = self.low + (self.high - self.low) * share
        return str(round(number)) if self.whole else f"{number:.{_DIGITS}g}"


@dataclass(frozen=True)
class Axis:
    """Symbol or choice with its levels, or with the continuum to sample levels from."""

    name: str
    levels: Sequence[Level]
    continuum: Continuum | None = None

    def draw(self, source: random.Random) -> Level:
        """Return one random level."""
        if self.continuum is None:
            return source.choice(self.levels)
        return _level(self.name, self.continuum.at(source.random()))


def parse_axes(tree: Tree, text: str, where: str) -> list[Axis]:
    """Parse the axes in ``text``; ``where`` is the location shown in errors.

    Raises ConfigError with every unknown name, malformed value and duplicate.
    """
    axes, problems = [], []
    for word in text.split():
        try:
            axes.append(_axis(tree, word))
        except ConfigError as error:
            problems += [replace(problem, where=where) for problem in error.problems]
    if not axes and not problems:
        problems.append(Problem("no axis given", where, code="design.empty"))
    names = Counter(axis.name for axis in axes)
    duplicates = [f"duplicate axis {name}" for name, count in names.items() if count > 1]
    for axis in axes:
        slugs = Counter(level.slug for level in axis.levels)
        repeated = [slug for slug, count in slugs.items() if count > 1]
        duplicates += [f"{axis.name}: duplicate value {slug}" for slug in repeated]
    problems += [Problem(what, where, code="design.duplicate") for what in duplicates]
    if problems:
        raise ConfigError(*problems)
    return axes


def slug(text: str) -> str:
    """Return ``text`` in lower case, other characters replaced by hyphens: safe in folder names."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def find_symbol(tree: Tree, name: str) -> SymbolInfo:
    """Return the settable symbol or choice. Raises ConfigError if there is none."""
    info = next((info for info in tree.symbols() if info.name == name), None)
    if info is None:
        what = f"{name}: no settable symbol or choice{tree.nearest(name)}"
        raise ConfigError(Problem(what, code="config.unknown-symbol"))
    return info


def member(info: SymbolInfo, value: str) -> str:
    """Return the member of a choice called ``value``. Raises ConfigError with the member names."""
    members = {m.removeprefix(f"{info.name}_").lower(): m for m in info.members}
    if value not in members:
        what = f"{info.name}: {value!r} is not one of {', '.join(members)}"
        raise ConfigError(Problem(what, code="config.unknown-value"))
    return members[value]


def _axis(tree: Tree, word: str) -> Axis:
    name, equals, text = word.partition("=")
    name = name.removeprefix("CONFIG_")
    values = text.split(",")
    if not equals or "" in values:
        what = f"malformed axis {word!r} (expected NAME=value,value)"
        raise ConfigError(Problem(what, code="design.malformed-axis"))
    if name == "SEED":
        what = "SEED: not supported as an axis"
        raise ConfigError(Problem(what, next="make SEEDS=1,2,3", code="design.seed-axis"))
    info = find_symbol(tree, name)
    if info.type == "choice":
        return Axis(name, [Level(name, v, slug(v), {member(info, v): True}) for v in values])
    if text.startswith(("lin:", "log:")):
        return _range(name, text, info.type == "int")
    return Axis(name, [_level(name, value) for value in values])


def _range(name: str, text: str, whole: bool) -> Axis:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise _invalid_range(name, text, "lin:LOW:HIGH:COUNT or log:LOW:HIGH:COUNT")
    low, high = (_number(name, match[i]) for i in (2, 3))
    if not low < high or (match[1] == "log" and low <= 0):
        raise _invalid_range(name, text, "LOW < HIGH" + " and LOW > 0" * (low <= 0))
    continuum = Continuum(low, high, match[1] == "log", whole)
    if match[4] is None:
        return Axis(name, (), continuum)
    count = int(match[4])
    if count < 2:
        raise _invalid_range(name, text, "COUNT of at least 2")
    return Axis(name, [_level(name, continuum.at(i / (count - 1))) for i in range(count)])


def _invalid_range(name: str, text: str, expected: str) -> ConfigError:
    what = f"{name}: invalid range {text!r} (expected {expected})"
    return ConfigError(Problem(what, code="design.invalid-range"))


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        what = f"{name}: {text!r} is not a finite number"
        raise ConfigError(Problem(what, code="design.invalid-range"))
    return number


def _level(name: str, value: str) -> Level:
    delta: Mapping[str, Value] = {name: value}
    return Level(name, value, slug(f"{name}-{value}"), delta)
