"""What each factor of a design does, averaged over the others.

Levels of a factor are compared inside groups: cells that are alike in every other factor. Only
groups in which every level has a result count, so that a combination that is left out, or failed,
shifts no mean. Over all subsets of n features a group is a pair and there are 2^(n−1); in a design
that leaves one feature out there is one.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lib.analysis.table import Row, Stat


@dataclass(frozen=True)
class Marginal:
    """One level of one factor. Losses in nats per token."""

    factor: str
    level: str
    val_loss: float
    # Against the factor's first level, over the groups; None for that level itself, and where no
    # group has all levels: ``val_loss`` is then the mean of unlike cells.
    difference: Stat | None
    # Complete groups; 0 where there is none.
    groups: int


def marginals(rows: Sequence[Row]) -> list[Marginal]:
    """Every level of every factor that has more than one, in the order of the rows."""
    cells = [
        (row.variant.levels, row.val_loss.mean)
        for row in rows
        if row.variant.levels is not None and row.val_loss is not None
    ]
    factors: dict[str, dict[str, None]] = {}
    for levels, _ in cells:
        for factor, level in levels.items():
            factors.setdefault(factor, {})[level] = None
    found: list[Marginal] = []
    for factor, levels_of in factors.items():
        if len(levels_of) > 1:
            found += _of_factor(factor, list(levels_of), cells)
    return found


def _of_factor(
    factor: str, names: Sequence[str], cells: Sequence[tuple[Mapping[str, str], float]]
) -> list[Marginal]:
    groups: dict[tuple, dict[str, float]] = {}
    for levels, loss in cells:
        if factor in levels:
            rest = tuple(item for item in levels.items() if item[0] != factor)
            groups.setdefault(rest, {})[levels[factor]] = loss
    complete = [group for group in groups.values() if len(group) == len(names)]
    used = complete or list(groups.values())
    marginal = []
    for name in names:
        mean = statistics.fmean(group[name] for group in used if name in group)
        differences = [group[name] - group[names[0]] for group in complete]
        difference = Stat.of(differences) if name != names[0] else None
        marginal.append(Marginal(factor, name, mean, difference, len(complete)))
    return marginal
