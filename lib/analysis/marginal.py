"""What each factor of a design does, averaged over the others.

A level is compared with the factor's reference pair by pair: cells that are alike in every other
factor. So a combination that is left out, or failed, takes its pair away and shifts no difference.
Over all subsets of n features there are 2^(n−1) pairs; in a design that leaves one feature out there
is one. A level that stands beside the reference nowhere, because the rest always differs too, has
no difference.
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
    # Mean over all cells of the level, whatever the rest of them is.
    val_loss: float
    cells: int
    # The level that this one is compared with; its own name for the reference.
    reference: str
    # Loss minus the reference's, over the pairs; None without a pair, and for the reference.
    difference: Stat | None


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
    # Cells that are alike in the rest: level of the factor → loss.
    alike: dict[tuple, dict[str, float]] = {}
    for levels, loss in cells:
        if factor in levels:
            rest = tuple(item for item in levels.items() if item[0] != factor)
            alike.setdefault(rest, {})[levels[factor]] = loss
    groups = list(alike.values())
    # The first of those that stand beside the most others.
    reference = max(names, key=lambda name: len({n for g in groups if name in g for n in g}))
    marginal = []
    for name in names:
        losses = [group[name] for group in groups if name in group]
        pairs = [g[name] - g[reference] for g in groups if {name, reference} <= g.keys()]
        difference = Stat.of(pairs) if name != reference else None
        mean = statistics.fmean(losses)
        marginal.append(Marginal(factor, name, mean, len(losses), reference, difference))
    return marginal
