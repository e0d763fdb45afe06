"""Axes of a matrix or a sweep: ``NAME=value,value``, or a range of numbers.

    OPTIMIZER=adamw,sgd         a choice takes the names of its members
    LEARNING_RATE=1e-4,3e-4     any symbol takes values
    LEARNING_RATE=log:1e-4:1e-2:5   five values, equal factors between them
    DROPOUT=lin:0:0.3:4         four values, equal steps between them

Without the last number a range is a continuum, of which a sample can be drawn.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lib.binding import Value
from lib.designs.cell import Level
from lib.errors import ConfigError, Problem
from lib.kconfig import SymbolInfo, Tree

_RANGE = re.compile(r"(lin|log):([^:]+):([^:]+)(?::([0-9]+))?")
# Enough to tell points of a sweep apart, and short enough for a folder's name.
_DIGITS = 3


@dataclass(frozen=True)
class Continuum:
    """All numbers from ``low`` to ``high``, drawn evenly, or evenly in their logarithm."""

    low: float
    high: float
    logarithmic: bool
    whole: bool

    def at(self, share: float) -> str:
        """The number at ``share`` (0 to 1) of the way, with three digits."""
        if self.logarithmic:
            number = self.low * (self.high / self.low) ** share
        else:
            number = self.low + (self.high - self.low) * share
        return str(round(number)) if self.whole else f"{number:.{_DIGITS}g}"


@dataclass(frozen=True)
class Axis:
    """A symbol or a choice, and the levels it takes; or the continuum that they are drawn from."""

    name: str
    levels: Sequence[Level]
    continuum: Continuum | None = None

    def draw(self, source: random.Random) -> Level:
        """One level."""
        if self.continuum is None:
            return source.choice(self.levels)
        return _level(self.name, self.continuum.at(source.random()))


def parse_axes(tree: Tree, text: str, where: str) -> list[Axis]:
    """The axes that ``text`` names; ``where`` is what errors point at.

    ConfigError lists every unknown name, unreadable value, and what stands twice.
    """
    axes, problems = [], []
    for word in text.split():
        try:
            axes.append(_axis(tree, word))
        except ConfigError as error:
            problems += [Problem(p.what, where, p.next) for p in error.problems]
    if not axes and not problems:
        problems.append(Problem("names no axis", where))
    names = Counter(axis.name for axis in axes)
    problems += [Problem(f"{n} stands twice", where) for n, count in names.items() if count > 1]
    for axis in axes:
        slugs = Counter(level.slug for level in axis.levels)
        twice = [slug for slug, count in slugs.items() if count > 1]
        problems += [Problem(f"{axis.name}: {slug} stands twice", where) for slug in twice]
    if problems:
        raise ConfigError(*problems)
    return axes


def slug(text: str) -> str:
    """Lower case, and hyphens for what a folder's name or a shell would stumble over."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def find_symbol(tree: Tree, name: str) -> SymbolInfo:
    """The symbol or choice that can be set. ConfigError when there is none."""
    found = next((info for info in tree.symbols() if info.name == name), None)
    if found is None:
        raise ConfigError(f"{name}: no such symbol or choice that can be set{tree.nearest(name)}")
    return found


def member(info: SymbolInfo, value: str) -> str:
    """The member of a choice that ``value`` names. ConfigError lists those that there are."""
    members = {m.removeprefix(f"{info.name}_").lower(): m for m in info.members}
    if value not in members:
        raise ConfigError(f"{info.name}: {value!r} is not one of {', '.join(members)}")
    return members[value]


def _axis(tree: Tree, word: str) -> Axis:
    name, equals, listed = word.partition("=")
    name = name.removeprefix("CONFIG_")
    values = listed.split(",")
    if not equals or "" in values:
        raise ConfigError(f"{word!r} is not NAME=value,value")
    if name == "SEED":
        raise ConfigError(Problem("SEED is no axis", next="type: make SEEDS=1,2,3"))
    info = find_symbol(tree, name)
    if info.type == "choice":
        return Axis(name, [Level(name, v, slug(v), {member(info, v): True}) for v in values])
    if listed.startswith(("lin:", "log:")):
        return _range(name, listed, info.type == "int")
    return Axis(name, [_level(name, value) for value in values])


def _range(name: str, text: str, whole: bool) -> Axis:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name}: {text!r} is not lin:LOW:HIGH:COUNT or log:LOW:HIGH:COUNT")
    low, high = (_number(name, match[i]) for i in (2, 3))
    if not low < high or (match[1] == "log" and low <= 0):
        raise ConfigError(f"{name}: {text!r} needs LOW < HIGH" + ", and LOW > 0" * (low <= 0))
    continuum = Continuum(low, high, match[1] == "log", whole)
    if match[4] is None:
        return Axis(name, (), continuum)
    count = int(match[4])
    if count < 2:
        raise ConfigError(f"{name}: {text!r} needs at least 2 values")
    return Axis(name, [_level(name, continuum.at(i / (count - 1))) for i in range(count)])


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: {text!r} is not a number")
    return number


def _level(name: str, value: str) -> Level:
    delta: Mapping[str, Value] = {name: value}
    return Level(name, value, slug(f"{name}-{value}"), delta)
