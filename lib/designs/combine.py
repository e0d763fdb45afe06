"""Which cells of a design the configuration allows, and why the others are left out."""

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
# A file name has at most 255 bytes, and seed, hash and time come behind the slug.
_LONGEST_SLUG = 120


@dataclass(frozen=True)
class Combined(Generic[C]):
    """The cells that can be trained, each as a variant with its configuration."""

    block: Sequence[tuple[Variant, C]]
    left_out: Sequence[Problem]


# The configuration that a cell's settings come to; ConfigError where they do not hold.
Resolve = Callable[[Cell], C]


def combine(cells: Sequence[Cell], resolve: Resolve[C]) -> Combined[C]:
    """Every cell that resolves; one whose parent does not is compared with that one's parent.

    ConfigError when none does, or there is nothing left that a cell could be compared with.
    """
    found: dict[str, tuple[int, C]] = {}
    refused: dict[str, ConfigError] = {}
    for number, each in enumerate(cells):
        try:
            found[each.slug] = (number, resolve(each))
        except ConfigError as error:
            refused[each.slug] = error
    if not found:
        raise ConfigError(*dict.fromkeys(p for e in refused.values() for p in e.problems))
    parents = {each.slug: each.parent for each in cells}
    block = []
    for slug, (number, config) in found.items():
        parent = parents[slug]
        while parent in refused:
            if not parents[parent]:
                what = f"{refused[parent].problems[0].what}; all others are compared with {parent}"
                raise ConfigError(Problem(what, parent))
            parent = parents[parent]
        block.append((_variant(replace(cells[number], parent=parent), number), config))
    left_out = [Problem(f"{slug}: {error.problems[0].what}") for slug, error in refused.items()]
    return Combined(block, left_out)


def combine_grid(
    tree: Tree, base: Sequence[Layer], cells: Sequence[Cell], resolve: Resolve[C], where: str
) -> Combined[C]:
    """Every cell that resolves; where an axis does not apply, one cell without it.

    ``where`` is what errors point at, before the cell's name.

    A sparsity does not apply to a run that prunes nothing: its values then give one run, not one
    each. A value that fits in no cell at all is a ConfigError, with its reason.
    """
    block: list[tuple[Variant, C]] = []
    left_out: list[Problem] = []
    refused: list[tuple[Cell, ConfigError]] = []
    inapplicable: list[tuple[Cell, ConfigError]] = []
    seen: set[str] = set()
    fitting: set[tuple[str, str]] = set()
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
            left_out.append(Problem(f"{reduced.slug}: {error.problems[0].what}"))
            refused.append((reduced, error))
            continue
        if dropped:
            what = f"{reduced.slug or 'base'}: one run, {', '.join(dropped)} does not apply"
            left_out.append(Problem(what))
        fitting |= {(level.factor, level.slug) for level in reduced.levels}
    # What is wrong with a value itself says more than where it does not apply.
    _refuse_unused(cells, fitting, [*refused, *inapplicable])
    return Combined(block, left_out)


def _applicable(
    tree: Tree, base: Sequence[Layer], each: Cell, where: str
) -> tuple[Cell, ConfigError | None]:
    """The cell without the levels of symbols that its other levels make unavailable, and what is
    wrong with it as it was asked for."""
    name = f"{where} {each.slug}"
    try:
        tree.resolve([*base, Layer.of("axis", name, each.delta)])
        return each, None
    except ConfigError as error:
        wrong = error
    kept: list[Level] = []
    waiting = list(each.levels)
    while True:
        known = {name: value for level in kept for name, value in level.delta.items()}
        try:
            tree.resolve([*base, Layer.of("axis", name, known)])
        except ConfigError:
            # Something else is wrong with it, and the whole cell says what.
            return each, wrong
        ready = [level for level in waiting if _is_available(tree, level.factor)]
        if not ready:
            return cell(kept), wrong
        kept = [level for level in each.levels if level in kept or level is ready[0]]
        waiting.remove(ready[0])


def _is_available(tree: Tree, name: str) -> bool:
    """Whether the symbol or choice can be set in the configuration that was resolved last."""
    item = tree.find(name)
    return item is not None and bool(item.visibility)


def _refuse_unused(
    cells: Sequence[Cell],
    fitting: set[tuple[str, str]],
    refused: Sequence[tuple[Cell, ConfigError]],
) -> None:
    """ConfigError for every level that stands in no cell that fits."""
    asked = {(level.factor, level.slug): level for each in cells for level in each.levels}
    problems: dict[Problem, None] = {}
    for level in (level for key, level in asked.items() if key not in fitting):
        reasons = next(error.problems for each, error in refused if level in each.levels)
        own = [p for p in reasons if p.what.startswith(f"{level.factor}=")]
        problems |= dict.fromkeys(own or reasons)
    if problems:
        raise ConfigError(*problems)


def _variant(each: Cell, number: int) -> Variant:
    title = " ".join(f"{factor}={text}" for factor, text in each.texts.items())
    slug, parent = _short(each.slug), _short(each.parent)
    return Variant(slug, title, number, parent, each.delta, each.texts)


def _short(slug: str) -> str:
    """The slug, or its beginning and a digest where a folder's name could not hold it."""
    if len(slug) <= _LONGEST_SLUG:
        return slug
    digest = hashlib.sha256(slug.encode()).hexdigest()[:8]
    return f"{slug[:_LONGEST_SLUG]}-{digest}"
