"""Test matrices, sweeps and designs: combinations of levels of their factors, each one configuration.

A combination that is not configurable is left out, with the reason.
"""

import contextlib
import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from kconfiglib import INT, Choice, Symbol

from gpt2.config import Config
from gpt2.study.judgeable import grouped_by_text, unjudgeable
from gpt2.study.resolve import resolve_config
from lib.config.check import FIND_SYMBOL, is_settable
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree, member_values
from lib.console import confirm
from lib.errors import ConfigError, Problem
from lib.runs.run import OFF, ON, RunVariant

# Require a confirmation above this number of combinations: more is usually a mistake.
_CONFIRM_ABOVE = 500
_BATCH = ("GLOBAL_BATCH", "BATCH_SIZE", "GPUS")


class FactorLevel(NamedTuple):
    """One value of one factor: its name and its settings."""

    factor: str
    text: str
    slug: str
    delta: Mapping[str, SymbolValue]


# The levels of one factor of a grid.
Axis = Sequence[FactorLevel]


class SweepCell(NamedTuple):
    """One level of every factor. ``parent`` is the comparison cell's slug, "" for a baseline."""

    slug: str
    levels: tuple[FactorLevel, ...]
    parent: str = ""

    @property
    def delta(self) -> dict[str, SymbolValue]:
        """Return the settings of all levels."""
        return {name: value for level in self.levels for name, value in level.delta.items()}


class ResolvedSweep(NamedTuple):
    """Trainable cells as variants with their configurations, and problems of the skipped cells."""

    block: Sequence[tuple[RunVariant, Any]]
    left_out: Sequence[Problem]


# Returns the configuration of a cell's settings; raises ConfigError if they are invalid.
Resolve = Callable[[SweepCell], Any]


def combinations(
    tree: KconfigTree,
    layers: Sequence[ConfigLayer],
    base: Config,
    sweep: str = "",
    samples: int = 0,
    *,
    yes: bool | None = False,
) -> ResolvedSweep:
    """Return the cells of the axes ``sweep``, or of the configured test matrix: a grid, or a design.

    ``samples`` is the number of cells to draw at random; 0 means all cells. Many cells require a
    confirmation before they are resolved.
    """
    where = "SWEEP" if sweep else "TEST_MATRIX_AXES"
    design = "grid" if sweep else base.study.design
    if design != "grid":
        where = "ABLATION_FEATURES"
        features = parse_features(tree, layers, base.study.features, where)
        if design == "factorial":
            _confirm(2 ** len(features), yes)
        cells = design_cells(design, features)
        resolved = resolve_design(cells, partial(_resolve, tree, layers, where))
        steps = [(variant.slug, variant.parent, config) for variant, config in resolved.block]
        if problems := [problem for _, problem in unjudgeable(steps, None)]:
            raise ConfigError(*problems)
        return resolved
    if sweep:
        # One single training per cell.
        layers = [*layers, ConfigLayer.of("command line", where, {"SINGLE_TRAINING": True})]
    axes = parse_axes(tree, sweep or base.study.axes, where)
    if samples:
        cells = sample_cells(axes, samples, base.seed)
    else:
        _confirm(math.prod(map(len, axes)), yes)
        cells = grid(axes)
    resolved = resolve_grid(tree, layers, cells, partial(_resolve, tree, layers, where), where)
    return resolved._replace(block=grouped_by_text(resolved.block))


def _confirm(count: int, yes: bool | None) -> None:
    if count > _CONFIRM_ABOVE:
        confirm(f"plan {count:,} combinations?", yes)


def _resolve(
    tree: KconfigTree, layers: Sequence[ConfigLayer], where: str, each: SweepCell
) -> Config:
    """Return the cell's configuration, with GRAD_ACCUMULATION adapted to a swept batch size.

    The result depends on GLOBAL_BATCH, so a cell that changes the micro-batch keeps GLOBAL_BATCH.
    """
    name, settings = f"{where} {each.slug}", each.delta
    if settings.keys() & {*_BATCH} and "GRAD_ACCUMULATION" not in settings:
        values = tree.resolve([*layers, _cell_layer(name, settings)]).values
        batch, micro, gpus = (int(values[name]) for name in _BATCH)
        settings["GRAD_ACCUMULATION"] = max(1, batch // max(1, micro * gpus))
    return resolve_config(tree, [*layers, _cell_layer(name, settings)])


def _cell_layer(where: str, delta: Mapping[str, SymbolValue]) -> ConfigLayer:
    """Return the layer of a cell's settings, which defaults of the configuration follow."""
    return ConfigLayer.of("axis", where, delta, moves_defaults=True)


def slug(text: str) -> str:
    """Return ``text`` in lower case, other characters replaced by hyphens: safe in folder names."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def find_symbol(tree: KconfigTree, name: str) -> Symbol | Choice:
    """Return the settable symbol or choice. Raises ConfigError if there is none."""
    item = tree.find(name)
    if item is not None and is_settable(item):
        return item
    what, code = "is derived and cannot be set", "config.not-settable"
    if item is None:
        what, code = tree.unknown_symbol(name)
    raise ConfigError(Problem(f"{name}: {what}", next=FIND_SYMBOL, code=code))


def _factors(
    tree: KconfigTree, text: str, where: str, parse: Callable[[KconfigTree, str], Axis]
) -> tuple[list[Axis], list[Problem]]:
    """Return the levels of each axis or feature in ``text``, and the problems, at ``where``."""
    factors, problems = list[Axis](), []
    for word in text.split():
        try:
            factors.append(parse(tree, word))
        except ConfigError as error:
            problems += [replace(problem, where=where) for problem in error.problems]
    if not factors and not problems:
        problems.append(Problem("expected at least one NAME", where, code="design.empty"))
    names = dict(Counter(levels[0].factor for levels in factors))
    for levels in factors:
        slugs = Counter(level.slug for level in levels)
        names |= {f"{levels[0].factor}: value {slug}": count for slug, count in slugs.items()}
    repeated = [name for name, count in names.items() if count > 1]
    problems += [Problem(f"duplicate {name}", where, code="design.duplicate") for name in repeated]
    return factors, problems


def _find_factor(tree: KconfigTree, name: str) -> Symbol | Choice:
    """Return the symbol or choice of an axis or a feature: every variant is trained with each seed."""
    if name == "SEED":
        what = "SEED: not supported as an axis or a feature"
        raise ConfigError(Problem(what, next="type: make SEEDS=1,2,3", code="design.seed-axis"))
    return find_symbol(tree, name)


# Axes of a matrix or a sweep: ``NAME=value,value``, or a numeric range.
#
#     OPTIMIZER=adamw,sgd         a choice, by the names of its members
#     LEARNING_RATE=1e-4,3e-4     values of any symbol
#     LEARNING_RATE=log:1e-4:1e-2:5   five values, evenly spaced in the logarithm
#     DROPOUT=lin:0:0.3:4         four values, evenly spaced

_RANGE = re.compile(r"(lin|log):([^:]+):([^:]+):([0-9]+)")
# Enough to distinguish points of a sweep, and short enough for a folder name.
_DIGITS = 3


def parse_axes(tree: KconfigTree, text: str, where: str) -> list[Axis]:
    """Return the levels of each axis in ``text``; ``where`` is the location shown in errors.

    Raises ConfigError with every unknown name, malformed value and duplicate.
    """
    axes, problems = _factors(tree, text, where, _axis)
    if problems:
        raise ConfigError(*problems)
    return axes


def _axis(tree: KconfigTree, word: str) -> Axis:
    name, equals, text = word.partition("=")
    name = name.removeprefix("CONFIG_")
    values = text.split(",")
    if not equals or "" in values:
        what = f"malformed axis {word!r} (expected NAME=value,value)"
        raise ConfigError(Problem(what, code="design.malformed-axis"))
    item = _find_factor(tree, name)
    if isinstance(item, Choice):
        members = member_values(item)
        if unknown := [value for value in values if value not in members]:
            what = f"{name}: {unknown[0]!r} is not one of {', '.join(members)}"
            raise ConfigError(Problem(what, code="config.invalid-value"))
        return [FactorLevel(name, v, slug(v), {members[v].name: True}) for v in values]
    if text.startswith(("lin:", "log:")):
        values = _range(name, text, item.orig_type is INT)
    return [FactorLevel(name, v, slug(f"{name}-{v}"), {name: v}) for v in values]


def _range(name: str, text: str, whole: bool) -> list[str]:
    """Return the values of a range. Raises ConfigError if it is invalid."""
    match = _RANGE.fullmatch(text)
    low = high = math.nan
    with contextlib.suppress(ValueError):
        low, high = map(float, match.group(2, 3)) if match else (low, high)
    count = int(match[4]) if match else 0
    for valid, expected in (
        (match, "lin:LOW:HIGH:COUNT or log:LOW:HIGH:COUNT"),
        (math.isfinite(low) and math.isfinite(high), "finite numbers"),
        (low < high, "LOW < HIGH"),
        (low > 0 or text.startswith("lin"), "LOW > 0"),
        (count >= 2, "COUNT of at least 2"),
    ):
        if not valid:
            what = f"{name}: invalid range {text!r} (expected {expected})"
            raise ConfigError(Problem(what, code="design.invalid-range"))
    shares = (i / (count - 1) for i in range(count))
    numbers = [
        low + (high - low) * share if text.startswith("lin") else low * (high / low) ** share
        for share in shares
    ]
    return [str(round(number)) if whole else f"{number:.{_DIGITS}g}" for number in numbers]


def grid(axes: Sequence[Axis]) -> list[SweepCell]:
    """Return the cross product, the last axis fastest."""
    return [_grid_cell(levels) for levels in itertools.product(*axes)]


def sample_cells(axes: Sequence[Axis], count: int, seed: int) -> list[SweepCell]:
    """Return ``count`` distinct random cells, or all cells if there are fewer.

    A sample of n is a prefix of any longer sample with the same seed, so a sweep can be extended.
    """
    source = random.Random(seed)
    cells: dict[str, SweepCell] = {}
    count = min(count, math.prod(map(len, axes)))
    while len(cells) < count:
        drawn = _grid_cell([source.choice(levels) for levels in axes])
        cells.setdefault(drawn.slug, drawn)
    return list(cells.values())


def _grid_cell(levels: Sequence[FactorLevel]) -> SweepCell:
    return SweepCell("-".join(level.slug for level in levels), tuple(levels))


# Ablation designs over features: groups of settings that are toggled together.
#
# ``RECIPROCAL MLP_SIZING_RATIO+MLP_RATIO=2.5`` defines two features; a name alone is ``=y``.
#
#     leave_one_out   all features, and all but each one
#     add_one_in      no feature, and each one alone
#     cumulative      none, the first, the first two, …, all
#     factorial       every subset: 2^n cells


def parse_features(
    tree: KconfigTree, base: Sequence[ConfigLayer], text: str, where: str
) -> list[FactorLevel]:
    """Parse the features in ``text``, each as its level "on"; ``where`` is shown in errors.

    Raises ConfigError for an unknown symbol, a duplicate feature, or a feature that the base
    already enables (leaving it out would change nothing).
    """
    factors, problems = _factors(tree, text, where, _feature)
    features = [level for levels in factors for level in levels]
    values = tree.resolve(base).values
    for feature in features:
        try:
            changed = tree.resolve([*base, _cell_layer(where, feature.delta)]).values != values
        # It needs another feature, or fails in every cell.
        except ConfigError:
            continue
        if not changed:
            what = f"{feature.factor}: already on in the base configuration"
            problems.append(Problem(what, where, code="design.no-effect"))
    if problems:
        raise ConfigError(*problems)
    return features


def _feature(tree: KconfigTree, word: str) -> Axis:
    delta: dict[str, SymbolValue] = {}
    for part in word.split("+"):
        name, equals, value = part.partition("=")
        name = name.removeprefix("CONFIG_")
        if not name or (equals and not value):
            what = f"malformed feature {word!r} (expected NAME or NAME=value, joined by +)"
            raise ConfigError(Problem(what, code="design.malformed-feature"))
        item = _find_factor(tree, name)
        if isinstance(item, Choice):
            members = ", ".join(member.name for member in item.syms)
            what = f"{name}: is a choice (expected one of {members})"
            raise ConfigError(Problem(what, code="config.not-settable"))
        delta[name] = value if equals else True
    first = next(iter(delta))
    return [FactorLevel(first, ON, slug(first), delta)]


def design_cells(design: str, features: Sequence[FactorLevel]) -> list[SweepCell]:
    """Return the cells of a design, parents first; those without a parent are its baseline."""
    # Name, features that are on, parent.
    cells: list[tuple[str, Sequence[FactorLevel], str]] = [("none", [], "")]
    match design:
        case "leave_one_out":
            cells = [("all", features, "")]
            for feature in features:
                others = [each for each in features if each is not feature]
                cells.append((f"no-{feature.slug}", others, "all"))
        case "add_one_in":
            cells += ((feature.slug, [feature], "none") for feature in features)
        case "cumulative":
            for count, feature in enumerate(features, 1):
                cells.append((f"plus-{feature.slug}", features[:count], cells[-1][0]))
        case "factorial":
            for pattern in [*itertools.product((False, True), repeat=len(features))][1:]:
                on = [*itertools.compress(features, pattern)]
                cells.append(("-".join(f.slug for f in on), on, "none"))
    off = {f.factor: FactorLevel(f.factor, OFF, f"no-{f.slug}", {}) for f in features}
    return [
        SweepCell(name, tuple(f if f in on else off[f.factor] for f in features), parent)
        for name, on, parent in cells
    ]


# Resolution of cells into variants, with the reason for each skipped cell.

# File names are limited to 255 bytes, and seed, hash and time are appended to the slug.
_MAX_SLUG_LENGTH = 120


def resolve_design(cells: Sequence[SweepCell], resolve: Resolve) -> ResolvedSweep:
    """Resolve every cell; if a cell's parent fails, compare with the nearest valid ancestor.

    Raises ConfigError if two cells have one name, if every cell fails, or if a failed baseline leaves
    no ancestor to compare with.
    """
    names = Counter(each.slug for each in cells)
    if repeated := [name for name, count in names.items() if count > 1]:
        what = f"{names[repeated[0]]} combinations of features have one name"
        raise ConfigError(Problem(what, repeated[0], code="run.duplicate-name"))
    block: list[tuple[RunVariant, Any]] = []
    refused: dict[str, ConfigError] = {}
    parents = {each.slug: each.parent for each in cells}
    for number, each in enumerate(cells):
        parent = each.parent
        try:
            config = resolve(each)
        except ConfigError as error:
            refused[each.slug] = error
            continue
        # A parent precedes its children.
        while parent in refused:
            if not parents[parent]:
                what = f"{refused[parent].problems[0].what}; {parent} is the baseline of the design"
                raise ConfigError(Problem(what, parent, code="design.invalid-baseline"))
            parent = parents[parent]
        features = [level.factor for level in each.levels if level.text == ON]
        title = " + ".join(features) or "no feature"
        block.append((_variant(each, number, title, parent), config))
    if not block:
        raise ConfigError(*dict.fromkeys(p for e in refused.values() for p in e.problems))
    return ResolvedSweep(block, [_skipped(name, error) for name, error in refused.items()])


def resolve_grid(
    tree: KconfigTree,
    base: Sequence[ConfigLayer],
    cells: Sequence[SweepCell],
    resolve: Resolve,
    where: str,
) -> ResolvedSweep:
    """Resolve every cell; cells that differ only in an inapplicable axis become one cell.

    ``where`` is the location shown in errors, before the cell's name.

    Example: a sparsity does not apply to a run without pruning, so all its values result in a
    single run. Raises ConfigError, with the reason, for a value that is valid in no cell.
    """
    block: list[tuple[RunVariant, Any]] = []
    left_out: list[Problem] = []
    refused: list[tuple[SweepCell, ConfigError]] = []
    inapplicable: list[tuple[SweepCell, ConfigError]] = []
    seen: set[str] = set()
    valid: set[tuple[str, str]] = set()
    for each in cells:
        levels: Sequence[FactorLevel] = each.levels
        try:
            tree.resolve([*base, _cell_layer(f"{where} {each.slug}", each.delta)])
        except ConfigError as error:
            # Those that the other levels leave available.
            pairs = [(level, tree.find(level.factor)) for level in levels]
            levels = [level for level, item in pairs if item is not None and item.visibility]
            if len(levels) < len(pairs):
                inapplicable.append((each, error))
        cell = _grid_cell(levels)
        if cell.slug in seen:
            continue
        seen.add(cell.slug)
        try:
            title = " ".join(f"{level.factor}={level.text}" for level in levels)
            block.append((_variant(cell, len(block), title), resolve(cell)))
        except ConfigError as failure:
            left_out.append(_skipped(cell.slug, failure))
            refused.append((cell, failure))
            continue
        if dropped := [level.factor for level in each.levels if level not in levels]:
            what = f"{cell.slug or 'base'}: one run, {', '.join(dropped)} does not apply"
            left_out.append(Problem(what, code="design.not-applicable"))
        valid |= {(level.factor, level.slug) for level in levels}
    # An invalid value is a better explanation than an axis that does not apply, so it is first.
    _refuse_unused(cells, valid, [*refused, *inapplicable])
    return ResolvedSweep(block, left_out)


def _refuse_unused(
    cells: Sequence[SweepCell],
    valid: Set[tuple[str, str]],
    refused: Sequence[tuple[SweepCell, ConfigError]],
) -> None:
    """Raise ConfigError for every level that occurs in no valid cell."""
    levels = {(level.factor, level.slug): level for each in cells for level in each.levels}
    problems: dict[Problem, None] = {}
    for level in (level for key, level in levels.items() if key not in valid):
        reasons = next(error.problems for each, error in refused if level in each.levels)
        level_problems = [p for p in reasons if p.what.startswith(f"{level.factor}=")]
        problems |= dict.fromkeys(level_problems or reasons)
    if problems:
        raise ConfigError(*problems)


def _skipped(name: str, error: ConfigError) -> Problem:
    problem = error.problems[0]
    return Problem(f"{name}: {problem.what}", code=problem.code)


def _variant(each: SweepCell, number: int, title: str, parent: str = "") -> RunVariant:
    texts = {level.factor: level.text for level in each.levels}
    name, parent = short_slug(each.slug), short_slug(parent)
    return RunVariant(name, title, number, parent, each.delta, texts)


def short_slug(name: str) -> str:
    """Return the slug, or a prefix with a digest if the slug is too long for a folder name."""
    if len(name) <= _MAX_SLUG_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[:_MAX_SLUG_LENGTH]}-{digest}"
