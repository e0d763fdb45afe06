"""Test matrices, sweeps and designs: combinations of levels of their factors, each one configuration.

A combination that is not configurable is left out, with the reason.

    OPTIMIZER=adamw,sgd  LEARNING_RATE=1e-4,3e-4    axes of a grid: the values of choices and symbols
    RECIPROCAL  MLP_SIZING_RATIO+MLP_RATIO=2.5      features of a design; a name alone is y

    grid            the cross product of the axes, the last one fastest
    leave_one_out   all features, and all but each one
    add_one_in      no feature, and each one alone
    cumulative      none, the first, the first two, …, all
    factorial       every subset: 2^n cells
"""

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kconfiglib import Choice, Symbol

from gpt2.config import Config
from gpt2.study.judgeable import grouped_by_text, unjudgeable
from gpt2.study.resolve import Resolved, resolve_config
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
# File names are limited to 255 bytes, and seed, hash and time are appended to the slug.
_MAX_SLUG_LENGTH = 120


class Level(NamedTuple):
    """One value of one factor: its name and its settings."""

    factor: str
    text: str
    slug: str
    delta: Mapping[str, SymbolValue]


# Returns the configuration of a combination; raises ConfigError if its settings are invalid.
Resolve = Callable[[RunVariant], Any]
# Trainable combinations with their configurations, and problems of the skipped ones.
Combinations = tuple[Sequence[Resolved], Sequence[Problem]]


def combinations(
    tree: KconfigTree,
    layers: Sequence[ConfigLayer],
    base: Config,
    sweep: str = "",
    *,
    yes: bool | None = False,
) -> Combinations:
    """Return the cells of the axes ``sweep``, or of the configured test matrix: a grid, or a design.

    Many cells require a confirmation before they are resolved.
    """
    design = "grid" if sweep else base.study.design
    where = "SWEEP" if sweep else "TEST_MATRIX_AXES" if design == "grid" else "ABLATION_FEATURES"
    if sweep:
        # One single training per cell.
        layers = [*layers, ConfigLayer.of("command line", where, {"SINGLE_TRAINING": True})]
    if design == "grid":
        axes = parse_factors(tree, sweep or base.study.axes, where, axis_levels)
        count = math.prod(map(len, axes))
    else:
        features = [on for (on,) in parse_factors(tree, base.study.features, where, feature_levels)]
        count = 2 ** len(features) if design == "factorial" else 0
    if count > _CONFIRM_ABOVE:
        confirm(f"plan {count:,} combinations?", yes)

    def resolve(cell: RunVariant) -> Config:
        """Return the cell's configuration, with GRAD_ACCUMULATION adapted to a swept batch size.

        The result depends on GLOBAL_BATCH, so a cell that changes the micro-batch keeps GLOBAL_BATCH.
        """
        name, settings = f"{where} {cell.slug}", dict(cell.delta or {})
        if settings.keys() & {*_BATCH} and "GRAD_ACCUMULATION" not in settings:
            values = tree.resolve([*layers, _cell_layer(name, settings)]).values
            batch, micro, gpus = (int(values[name]) for name in _BATCH)
            settings["GRAD_ACCUMULATION"] = max(1, batch // max(1, micro * gpus))
        return resolve_config(tree, [*layers, _cell_layer(name, settings)])

    if design == "grid":
        block, left_out = resolve_grid(tree, axes, resolve)
        return grouped_by_text(block), left_out
    block, left_out = resolve_design(design_cells(design, features), resolve)
    configs = {variant.slug: config for variant, config in block}
    if problems := [problem for _, problem in unjudgeable(configs, block[0][0].slug)]:
        raise ConfigError(*problems)
    return block, left_out


def _cell_layer(where: str, delta: Mapping[str, SymbolValue]) -> ConfigLayer:
    """Return the layer of a cell's settings, which defaults of the configuration follow."""
    return ConfigLayer.of("axis", where, delta, moves_defaults=True)


def slug(text: str) -> str:
    """Return ``text`` in lower case, other characters replaced by hyphens: safe in folder names."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def short_slug(name: str) -> str:
    """Return the slug, or a prefix with a digest if the slug is too long for a folder name."""
    if len(name) <= _MAX_SLUG_LENGTH:
        return name
    return f"{name[:_MAX_SLUG_LENGTH]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def find_symbol(tree: KconfigTree, name: str) -> Symbol | Choice:
    """Return the settable symbol or choice. Raises ConfigError if there is none."""
    item = tree.find(name)
    if item is not None and is_settable(item):
        return item
    what, code = "is derived and cannot be set", "config.not-settable"
    if item is None:
        what, code = tree.unknown_symbol(name)
    raise ConfigError(Problem(f"{name}: {what}", next=FIND_SYMBOL, code=code))


def parse_factors(
    tree: KconfigTree, text: str, where: str, parse: Callable[[KconfigTree, str], Sequence[Level]]
) -> list[Sequence[Level]]:
    """Return the levels of each axis or feature in ``text``.

    Raises ConfigError, located at ``where``, with every malformed or unknown word and duplicate.
    """
    factors, problems = list[Sequence[Level]](), []
    for word in text.split():
        try:
            factors.append(parse(tree, word))
        except ConfigError as error:
            problems += [replace(problem, where=where) for problem in error.problems]
    if not factors and not problems:
        problems.append(Problem("expected at least one NAME", where, code="design.empty"))
    names = Counter(levels[0].factor for levels in factors)
    repeated = [name for name, count in names.items() if count > 1]
    problems += [Problem(f"duplicate {name}", where, code="design.duplicate") for name in repeated]
    if problems:
        raise ConfigError(*problems)
    return factors


def _find_factor(tree: KconfigTree, name: str) -> Symbol | Choice:
    """Return the symbol or choice of an axis or a feature: every variant is trained with each seed."""
    if name == "SEED":
        what = "SEED: not supported as an axis or a feature"
        raise ConfigError(Problem(what, next="type: make SEEDS=1,2,3", code="design.seed-axis"))
    return find_symbol(tree, name)


def axis_levels(tree: KconfigTree, word: str) -> Sequence[Level]:
    name, equals, text = word.partition("=")
    name = name.removeprefix("CONFIG_")
    values = text.split(",")
    if not equals or "" in values:
        what = f"malformed axis {word!r} (expected NAME=value,value)"
        raise ConfigError(Problem(what, code="design.malformed-axis"))
    item = _find_factor(tree, name)
    if not isinstance(item, Choice):
        levels = [Level(name, v, slug(f"{name}-{v}"), {name: v}) for v in values]
    else:
        members = member_values(item)
        if unknown := [value for value in values if value not in members]:
            what = f"{name}: {unknown[0]!r} is not one of {', '.join(members)}"
            raise ConfigError(Problem(what, code="config.invalid-value"))
        levels = [Level(name, v, slug(v), {members[v].name: True}) for v in values]
    slugs = Counter(level.slug for level in levels)
    if repeated := [value for value, count in slugs.items() if count > 1]:
        what = f"duplicate {name}: value {repeated[0]}"
        raise ConfigError(Problem(what, code="design.duplicate"))
    return levels


def feature_levels(tree: KconfigTree, word: str) -> Sequence[Level]:
    """Return the level "on" of a feature: "off" is the base configuration."""
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
    return [Level(first, ON, slug(first), delta)]


def _cell(
    name: str, title: str, levels: Sequence[Level], number: int, parent: str = ""
) -> RunVariant:
    """Return the combination of one level of each factor."""
    delta = {symbol: value for level in levels for symbol, value in level.delta.items()}
    texts = {level.factor: level.text for level in levels}
    return RunVariant(short_slug(name), title, number, short_slug(parent), delta, texts)


def design_cells(design: str, features: Sequence[Level]) -> list[RunVariant]:
    """Return the cells of a design, parents first; those without a parent are its baseline."""
    # Name, features that are on, parent.
    cells: list[tuple[str, Sequence[Level], str]] = [("none", [], "")]
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
    block = []
    for number, (name, enabled, parent) in enumerate(cells):
        title = " + ".join(feature.factor for feature in enabled) or "no feature"
        levels = [f if f in enabled else Level(f.factor, OFF, "", {}) for f in features]
        block.append(_cell(name, title, levels, number, parent))
    return block


def resolve_design(cells: Sequence[RunVariant], resolve: Resolve) -> Combinations:
    """Resolve every cell; if a cell's parent fails, compare with the nearest valid ancestor.

    Raises ConfigError if two cells have one name, the baseline fails, or a cell changes nothing: its
    feature is already on in the base configuration.
    """
    names = Counter(cell.slug for cell in cells)
    if repeated := [name for name, count in names.items() if count > 1]:
        what = f"{names[repeated[0]]} combinations of features have one name"
        raise ConfigError(Problem(what, repeated[0], code="run.duplicate-name"))
    block: list[Resolved] = []
    left_out: list[Problem] = []
    configs: dict[str, Any] = {}
    # Of a cell or, if it fails, of its ancestor: the cell that its children are compared with.
    compared: dict[str, str] = {}
    for cell in cells:
        # A parent precedes its children.
        parent = compared.get(cell.parent, "")
        try:
            config = resolve(cell)
        except ConfigError as error:
            if not cell.parent:
                what = f"{error.problems[0].what}; {cell.slug} is the baseline of the design"
                problem = Problem(what, cell.slug, code="design.invalid-baseline")
                raise ConfigError(problem) from None
            left_out.append(_skipped(cell.slug, error))
            compared[cell.slug] = parent
            continue
        if parent and config == configs[parent]:
            what = f"the same configuration as {parent} (expected a feature that is off there)"
            raise ConfigError(Problem(what, cell.slug, code="design.no-effect"))
        configs[cell.slug] = config
        compared[cell.slug] = cell.slug
        block.append((replace(cell, parent=parent), config))
    return block, left_out


def resolve_grid(
    tree: KconfigTree, axes: Sequence[Sequence[Level]], resolve: Resolve
) -> Combinations:
    """Resolve the cross product, the last axis fastest; cells that differ only in an inapplicable axis
    become one cell.

    Example: a sparsity does not apply to a run without pruning, so all its values result in a
    single run. Raises ConfigError, with the reason, for a value that is valid in no cell.
    """
    block: list[Resolved] = []
    left_out: list[Problem] = []
    # Levels and error of the cells to which every axis applies, and of the others.
    refused: list[tuple[Sequence[Level], ConfigError]] = []
    inapplicable: list[tuple[Sequence[Level], ConfigError]] = []
    seen: set[str] = set()
    valid: set[tuple[str, str]] = set()

    def resolved(cell: RunVariant) -> Any:
        try:
            return resolve(cell)
        except ConfigError as error:
            return error

    for levels in itertools.product(*axes):
        kept, cell = levels, _grid_cell(levels, len(block))
        config = resolved(cell)
        if isinstance(config, ConfigError):
            items = [tree.find(level.factor) for level in levels]
            applies = [item is not None and bool(item.visibility) for item in items]
            if not all(applies):
                inapplicable.append((levels, config))
                kept = tuple(itertools.compress(levels, applies))
                cell = _grid_cell(kept, len(block))
        if cell.slug in seen:
            continue
        seen.add(cell.slug)
        if kept is not levels:
            config = resolved(cell)
        if isinstance(config, ConfigError):
            left_out.append(_skipped(cell.slug, config))
            refused.append((kept, config))
            continue
        block.append((cell, config))
        if dropped := [level.factor for level in levels if level not in kept]:
            what = f"{cell.slug or 'base'}: one run, {', '.join(dropped)} does not apply"
            left_out.append(Problem(what, code="design.not-applicable"))
        valid |= {(level.factor, level.slug) for level in kept}
    # An invalid value is a better explanation than an axis that does not apply, so it is first.
    reasons = [*refused, *inapplicable]
    problems: dict[Problem, None] = {}
    for level in itertools.chain(*axes):
        if (level.factor, level.slug) in valid:
            continue
        reason = next(reason for found, reason in reasons if level in found)
        of_level = [p for p in reason.problems if p.what.startswith(f"{level.factor}=")]
        problems |= dict.fromkeys(of_level or reason.problems)
    if problems:
        raise ConfigError(*problems)
    return block, left_out


def _grid_cell(levels: Sequence[Level], number: int) -> RunVariant:
    title = " ".join(f"{level.factor}={level.text}" for level in levels)
    return _cell("-".join(level.slug for level in levels), title, levels, number)


def _skipped(name: str, error: ConfigError) -> Problem:
    problem = error.problems[0]
    return Problem(f"{name}: {problem.what}", code=problem.code)
