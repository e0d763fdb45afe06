"""Cross product of axes, and random samples of it."""

import itertools
import math
import random
from collections.abc import Sequence

from lib.designs.axes import Axis
from lib.designs.cell import Cell, Level
from lib.errors import ConfigError, Problem

# Sampling stops after this many consecutive duplicate draws.
_MAX_DUPLICATE_DRAWS = 1000


def size(axes: Sequence[Axis]) -> int:
    """Return the number of cells of the grid, before any are skipped."""
    return math.prod(len(axis.levels) for axis in axes)


def grid(axes: Sequence[Axis], where: str) -> list[Cell]:
    """Return the cross product, the last axis fastest.

    Raises ConfigError for a range without a count.
    """
    continuous = [axis.name for axis in axes if axis.continuum and not axis.levels]
    if continuous:
        what = f"{continuous[0]}: range without a count"
        advice = "add a count, such as log:1e-4:1e-2:5, or set SAMPLES=n"
        raise ConfigError(Problem(what, where, advice, code="design.continuous-axis"))
    return [cell(levels) for levels in itertools.product(*(axis.levels for axis in axes))]


def sample(axes: Sequence[Axis], count: int, seed: int) -> list[Cell]:
    """Return ``count`` distinct random cells, or fewer if the grid is smaller.

    A sample of n is a prefix of any longer sample with the same seed, so a sweep can be extended.
    """
    source = random.Random(seed)
    cells: dict[str, Cell] = {}
    duplicates = 0
    while len(cells) < count and duplicates < _MAX_DUPLICATE_DRAWS:
        drawn = cell([axis.draw(source) for axis in axes])
        duplicates = duplicates + 1 if drawn.slug in cells else 0
        cells.setdefault(drawn.slug, drawn)
    return list(cells.values())


def cell(levels: Sequence[Level]) -> Cell:
    """Return the cell of ``levels``."""
    return Cell("-".join(level.slug for level in levels), tuple(levels))
