"""Marginal effect of each factor of a sweep, averaged over the other factors.

Each level is compared with the factor's reference level over pairs of cells that agree in every
other factor. A missing or failed combination removes its pair and does not bias the difference. All
subsets of n features give 2^(n−1) pairs; a leave-one-out design gives one. A level without any such
pair has no difference.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lib.analysis.table import Row, Stat


@dataclass(frozen=True)
class Marginal:
    """One level of one factor. Losses are in nats per token."""

    factor: str
    level: str
    # Mean over all cells of the level, whatever their other factors are.
    val_loss: float
    cells: int
    # The reference level; equal to ``level`` for the reference itself.
    reference: str
    # Loss minus reference loss over the pairs; None without pairs and for the reference.
    difference: Stat | None


def marginals(rows: Sequence[Row]) -> list[Marginal]:
    """Return every level of every factor with more than one level, in the order of the rows."""
    cells = [
        (row.variant.levels, row.val_loss.mean)
        for row in rows
        if row.variant.levels is not None and row.val_loss is not None
    ]
    factors: dict[str, dict[str, None]] = {}
    for levels, _ in cells:
        for factor, level in levels.items():
            factors.setdefault(factor, {})[level] = None
    effects: list[Marginal] = []
    for factor, levels_of in factors.items():
        if len(levels_of) > 1:
            effects += _factor_marginals(factor, list(levels_of), cells)
    return effects


def _factor_marginals(
    factor: str, names: Sequence[str], cells: Sequence[tuple[Mapping[str, str], float]]
) -> list[Marginal]:
    # Settings of the other factors → level of this factor → loss.
    by_rest: dict[tuple, dict[str, float]] = {}
    for levels, loss in cells:
        if factor in levels:
            rest = tuple(item for item in levels.items() if item[0] != factor)
            by_rest.setdefault(rest, {})[levels[factor]] = loss
    groups = list(by_rest.values())
    # The level paired with the most other levels; the first one on a tie.
    reference = max(names, key=lambda name: len({n for g in groups if name in g for n in g}))
    marginal = []
    for name in names:
        losses = [group[name] for group in groups if name in group]
        pairs = [g[name] - g[reference] for g in groups if {name, reference} <= g.keys()]
        difference = Stat.of(pairs) if name != reference else None
        mean = statistics.fmean(losses)
        marginal.append(Marginal(factor, name, mean, len(losses), reference, difference))
    return marginal
