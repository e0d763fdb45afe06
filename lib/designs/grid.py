"""Every combination of some axes, or a sample of them."""

import itertools
import math
import random
from collections.abc import Sequence

from lib.designs.axes import Axis
from lib.designs.cell import Cell, Level
from lib.errors import ConfigError, Problem

# A sample gives up after so many draws in a row that were there already.
_VAIN_DRAWS = 1000


def size(axes: Sequence[Axis]) -> int:
    """Cells of the grid, before anything is left out."""
    return math.prod(len(axis.levels) for axis in axes)


def grid(axes: Sequence[Axis], where: str) -> list[Cell]:
    """The cross product, the last axis fastest. ConfigError for a range without a count."""
    endless = [axis.name for axis in axes if axis.continuum and not axis.levels]
    if endless:
        what = f"{endless[0]} is a range without a count"
        raise ConfigError(Problem(what, where, "add one, as in log:1e-4:1e-2:5, or set SAMPLES=n"))
    return [cell(levels) for levels in itertools.product(*(axis.levels for axis in axes))]


def sample(axes: Sequence[Axis], count: int, seed: int) -> list[Cell]:
    """``count`` different cells drawn at random, fewer where there are no more.

    The first n of a longer sample are the sample of n: a sweep can be extended.
    """
    source = random.Random(seed)
    found: dict[str, Cell] = {}
    vain = 0
    while len(found) < count and vain < _VAIN_DRAWS:
        drawn = cell([axis.draw(source) for axis in axes])
        vain = vain + 1 if drawn.slug in found else 0
        found.setdefault(drawn.slug, drawn)
    return list(found.values())


def cell(levels: Sequence[Level]) -> Cell:
    """The cell of some levels."""
    return Cell("-".join(level.slug for level in levels), tuple(levels))
