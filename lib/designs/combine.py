"""Resolution of a design's cells into variants, with the reason for each skipped cell."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lib.designs.cell import Cell, Level
from lib.designs.grid import cell
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree
from lib.plan import Variant

C = TypeVar("C")
# File names are limited to 255 bytes, and seed, hash and time are appended to the slug.
_MAX_SLUG_LENGTH = 120


@dataclass(frozen=True)
class Combined(Generic[C]):
    """Trainable cells as variants with their configurations, and problems of the skipped cells."""

    block: Sequence[tuple[Variant, C]]
    left_out: Sequence[Problem]


# Returns the configuration of a cell's settings; raises ConfigError if they are invalid.
Resolve = Callable[[Cell], C]


def combine(cells: Sequence[Cell], resolve: Resolve[C]) -> Combined[C]:
    """Resolve every cell; if a cell's parent fails, compare with the nearest valid ancestor.

    Raises ConfigError if every cell fails, or if a failed baseline leaves no ancestor to compare
    with.
    """
    resolved: dict[str, tuple[int, C]] = {}
    refused: dict[str, ConfigError] = {}
    for number, each in enumerate(cells):
        try:
            resolved[each.slug] = (number, resolve(each))
        except ConfigError as error:
            refused[each.slug] = error
    if not resolved:
        raise ConfigError(*dict.fromkeys(p for e in refused.values() for p in e.problems))
    parents = {each.slug: each.parent for each in cells}
    block = []
    for slug, (number, config) in resolved.items():
        parent = parents[slug]
        while parent in refused:
            if not parents[parent]:
                what = f"{refused[parent].problems[0].what}; {parent} is the baseline of the design"
                raise ConfigError(Problem(what, parent, code="design.invalid-baseline"))
            parent = parents[parent]
        block.append((_variant(replace(cells[number], parent=parent), number), config))
    left_out = [_skipped(slug, error) for slug, error in refused.items()]
    return Combined(block, left_out)


def combine_grid(
    tree: Tree, base: Sequence[Layer], cells: Sequence[Cell], resolve: Resolve[C], where: str
) -> Combined[C]:
    """Resolve every cell; cells that differ only in an inapplicable axis become one cell.

    ``where`` is the location shown in errors, before the cell's name.

    Example: a sparsity does not apply to a run without pruning, so all its values result in a
    single run. Raises ConfigError, with the reason, for a value that is valid in no cell.
    """
    block: list[tuple[Variant, C]] = []
    left_out: list[Problem] = []
    refused: list[tuple[Cell, ConfigError]] = []
    inapplicable: list[tuple[Cell, ConfigError]] = []
    seen: set[str] = set()
    valid: set[tuple[str, str]] = set()
    for each in cells:
        reduced, error = _applicable(tree, base, each, where)
        dropped = [factor for factor in each.texts if factor not in reduced.texts]
        if dropped and error is not None:
            inapplicable.append((each, error))
        if reduced.slug in seen:
            continue
        seen.add(reduced.slug)
        try:
            block.append((_variant(reduced, len(block)), resolve(reduced)))
        except ConfigError as error:
            left_out.append(_skipped(reduced.slug, error))
            refused.append((reduced, error))
            continue
        if dropped:
            what = f"{reduced.slug or 'base'}: one run, {', '.join(dropped)} does not apply"
            left_out.append(Problem(what, code="design.not-applicable"))
        valid |= {(level.factor, level.slug) for level in reduced.levels}
    # An invalid value is a better explanation than an axis that does not apply, so it is first.
    _refuse_unused(cells, valid, [*refused, *inapplicable])
    return Combined(block, left_out)


def _applicable(
    tree: Tree, base: Sequence[Layer], each: Cell, where: str
) -> tuple[Cell, ConfigError | None]:
    """Return the cell without inapplicable levels, and the error of the full cell if any.

    A level is inapplicable if the other levels make its symbol unavailable.
    """
    name = f"{where} {each.slug}"
    try:
        tree.resolve([*base, Layer.of("axis", name, each.delta)])
        return each, None
    except ConfigError as error:
        full_cell_error = error
    applied: list[Level] = []
    pending = list(each.levels)
    while True:
        delta = {name: value for level in applied for name, value in level.delta.items()}
        try:
            tree.resolve([*base, Layer.of("axis", name, delta)])
        except ConfigError:
            # Not a matter of availability; the error of the full cell explains it.
            return each, full_cell_error
        available = [level for level in pending if _is_available(tree, level.factor)]
        if not available:
            return cell(applied), full_cell_error
        applied = [level for level in each.levels if level in applied or level is available[0]]
        pending.remove(available[0])


def _is_available(tree: Tree, name: str) -> bool:
    """Return whether the symbol or choice is settable in the configuration resolved last."""
    item = tree.find(name)
    return item is not None and bool(item.visibility)


def _refuse_unused(
    cells: Sequence[Cell],
    valid: set[tuple[str, str]],
    refused: Sequence[tuple[Cell, ConfigError]],
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


def _skipped(slug: str, error: ConfigError) -> Problem:
    problem = error.problems[0]
    return Problem(f"{slug}: {problem.what}", code=problem.code)


def _variant(each: Cell, number: int) -> Variant:
    title = " ".join(f"{factor}={text}" for factor, text in each.texts.items())
    slug, parent = _short(each.slug), _short(each.parent)
    return Variant(slug, title, number, parent, each.delta, each.texts)


def _short(slug: str) -> str:
    """Return the slug, or a prefix with a digest if the slug is too long for a folder name."""
    if len(slug) <= _MAX_SLUG_LENGTH:
        return slug
    digest = hashlib.sha256(slug.encode()).hexdigest()[:8]
    return f"{slug[:_MAX_SLUG_LENGTH]}-{digest}"
