"""Sides of a benchmark that take turns: rounds, ratios and tables. Imports no torch.

A drift in machine speed favours no side (A B A B); figures are medians over the rounds, and ratios are
taken within a round.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Side = TypeVar("Side")
Figure = TypeVar("Figure")


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    measure: Callable[[Side], Figure],
    report: Callable[[int], None] = lambda count: None,
) -> dict[str, list[Figure]]:
    """Measure every side once in each of ``rounds`` rounds; return the figures by side.

    ``report`` gets the number of finished rounds.
    """
    figures: dict[str, list[Figure]] = {name: [] for name in sides}
    for count in range(1, rounds + 1):
        for name, side in sides.items():
            figures[name].append(measure(side))
        report(count)
    return figures


def within_rounds(numerators: Iterable[float], denominators: Iterable[float]) -> tuple[float, ...]:
    """Return the ratio of each round."""
    return tuple(a / b for a, b in zip(numerators, denominators, strict=True))


def median_and_range(ratios: Sequence[float]) -> str:
    """Format ratios of rounds as ``1.20 (1.10 to 1.30)``."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
