"""Ablation designs over features: groups of settings that are toggled together.

``RECIPROCAL MLP_SIZING_RATIO+MLP_RATIO=2.5`` defines two features; a name alone is ``=y``.

    leave_one_out   all features, and all but each one
    add_one_in      no feature, and each one alone
    cumulative      none, the first, the first two, …, all
    factorial       every subset: 2^n cells
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lib.binding import Value
from lib.designs.axes import find_symbol, slug
from lib.designs.cell import Cell, Level
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree

ON, OFF = "on", "off"


def parse_features(tree: Tree, base: Sequence[Layer], text: str, where: str) -> list[Level]:
    """Parse the features in ``text``, each as its level "on"; ``where`` is shown in errors.

    Raises ConfigError for an unknown symbol, a duplicate feature, or a feature that the base
    already enables (leaving it out would change nothing).
    """
    features, problems = [], []
    values = tree.resolve(base).values
    for word in text.split():
        try:
            features.append(_feature(tree, word))
        except ConfigError as error:
            problems += [replace(problem, where=where) for problem in error.problems]
    for feature in features:
        if _holds(tree, feature.delta, values):
            what = f"{feature.factor}: already on in the base configuration"
            problems.append(Problem(what, where, code="design.no-effect"))
    counts = Counter(f.factor for f in features)
    duplicates = [f"duplicate feature {name}" for name, n in counts.items() if n > 1]
    problems += [Problem(what, where, code="design.duplicate") for what in duplicates]
    if not features and not problems:
        problems.append(Problem("no feature given", where, code="design.empty"))
    if problems:
        raise ConfigError(*problems)
    return features


def leave_one_out(features: Sequence[Level]) -> list[Cell]:
    """Return n + 1 cells; the cell with all features is the baseline."""
    baseline = Cell("all", tuple(features))
    names = {f.factor for f in features}
    cells = (_subset(features, names - {f.factor}, f"no-{f.slug}", "all") for f in features)
    return [baseline, *cells]


def add_one_in(features: Sequence[Level]) -> list[Cell]:
    """Return n + 1 cells; the cell without features is the baseline."""
    none = _subset(features, set(), "none", "")
    return [none, *(_subset(features, {f.factor}, f.slug, "none") for f in features)]


def cumulative(features: Sequence[Level]) -> list[Cell]:
    """Return n + 1 cells, each with one more feature than its parent."""
    cells = [_subset(features, set(), "none", "")]
    for count, feature in enumerate(features, 1):
        on = {f.factor for f in features[:count]}
        cells.append(_subset(features, on, f"plus-{feature.slug}", cells[-1].slug))
    return cells


def factorial(features: Sequence[Level]) -> list[Cell]:
    """Return 2^n cells; the cell without features is the baseline."""
    cells = []
    for pattern in itertools.product((False, True), repeat=len(features)):
        on = [f for f, present in zip(features, pattern, strict=True) if present]
        name = "-".join(f.slug for f in on) or "none"
        cells.append(_subset(features, {f.factor for f in on}, name, "none" if on else ""))
    return cells


DESIGNS: Mapping[str, Callable[[Sequence[Level]], list[Cell]]] = {
    "leave_one_out": leave_one_out,
    "add_one_in": add_one_in,
    "cumulative": cumulative,
    "factorial": factorial,
}


def _feature(tree: Tree, word: str) -> Level:
    delta: dict[str, Value] = {}
    for part in word.split("+"):
        name, equals, value = part.partition("=")
        name = name.removeprefix("CONFIG_")
        if not name or (equals and not value):
            what = f"malformed feature {word!r} (expected NAME or NAME=value, joined by +)"
            raise ConfigError(Problem(what, code="design.malformed-feature"))
        info = find_symbol(tree, name)
        if info.type == "choice":
            what = f"{name}: is a choice (expected one of {', '.join(info.members)})"
            raise ConfigError(Problem(what, code="config.not-settable"))
        delta[name] = value if equals else True
    first = next(iter(delta))
    return Level(first, ON, slug(first), delta)


def _holds(tree: Tree, delta: Mapping[str, Value], values: Mapping[str, Value]) -> bool:
    """Return whether the base has all settings of a feature."""
    return all(_value(tree, name, values) == _text(value) for name, value in delta.items())


def _value(tree: Tree, name: str, values: Mapping[str, Value]) -> str:
    info = find_symbol(tree, name)
    if not info.choice:
        return _text(values[name])
    selected = str(values[info.choice])
    return _text(info.name == f"{info.choice}_{selected.upper()}" or info.name.lower() == selected)


def _text(value: Value) -> str:
    return ("y" if value else "n") if isinstance(value, bool) else str(value)


def _subset(features: Sequence[Level], on: set[str], name: str, parent: str) -> Cell:
    levels = (f if f.factor in on else Level(f.factor, OFF, f"no-{f.slug}", {}) for f in features)
    return Cell(name, tuple(levels), parent)
