"""Drift of the losses over a study: do runs that start later end higher, or lower?

Runs of one seed are trained in random order, so a drift adds noise to the differences and favours no
step. The test is an alarm: it corrects nothing. It regresses the residuals of the losses, after the
means of steps and seeds, on the residuals of the rank of each run by its start (analysis of
covariance; Fisher 1932).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.report.significance import t_sf

# p below this limit is reported.
_ALARM = 0.01
# Residuals are converged, or nothing is left of the ranks, at these shares of the values.
_CONVERGED = 1e-13
_EXPLAINED = 1e-9
_MAX_PASSES = 1000


@dataclass(frozen=True)
class TimedLoss:
    """The loss of one run in nats per token, and its start in seconds since any epoch."""

    step: str
    seed: int
    started_at: float
    loss: float


@dataclass(frozen=True)
class DriftTest:
    """Result of the drift test."""

    p: float
    degrees: int
    # Nats per token, over the whole study.
    trend: float
    runs: int

    @property
    def alarms(self) -> bool:
        """Return whether the drift is reported."""
        return self.p < _ALARM


def drift_test(runs: Sequence[TimedLoss]) -> DriftTest | None:
    """Return the test of a linear drift of the losses.

    Returns None if the order of the runs follows from steps and seeds, or if too few runs are left.
    """
    ordered = sorted(runs, key=lambda run: (run.started_at, run.step, run.seed))
    degrees = len(ordered) - _means(ordered) - 1
    if degrees < 1:
        return None
    ranks = _residuals(ordered, [float(rank) for rank in range(len(ordered))])
    losses = _residuals(ordered, [run.loss for run in ordered])
    spread = math.fsum(rank * rank for rank in ranks)
    if spread <= _EXPLAINED * len(ordered) ** 3:
        return None
    slope = math.fsum(x * y for x, y in zip(ranks, losses, strict=True)) / spread
    rest = math.fsum((y - slope * x) ** 2 for x, y in zip(ranks, losses, strict=True))
    if rest == 0:
        return None
    t = slope / math.sqrt(rest / degrees / spread)
    return DriftTest(2 * t_sf(abs(t), degrees), degrees, slope * (len(ordered) - 1), len(ordered))


def _means(runs: Sequence[TimedLoss]) -> int:
    """Return the number of independent means: steps + seeds − groups that share neither."""
    nodes = {("step", run.step) for run in runs} | {("seed", str(run.seed)) for run in runs}
    group = {node: node for node in nodes}
    for run in runs:
        a, b = group[("step", run.step)], group[("seed", str(run.seed))]
        group = {node: a if member == b else member for node, member in group.items()}
    return len(nodes) - len(set(group.values()))


def _residuals(runs: Sequence[TimedLoss], values: Sequence[float]) -> list[float]:
    """Return what is left of ``values`` after the means of steps and seeds.

    The means are subtracted in turn until nothing changes: with missing runs, steps and seeds are
    not orthogonal.
    """
    left = list(values)
    limit = _CONVERGED * max(map(abs, values), default=0.0)
    for _ in range(_MAX_PASSES):
        change = 0.0
        for keys in ([run.step for run in runs], [str(run.seed) for run in runs]):
            members: dict[str, list[float]] = {}
            for key, value in zip(keys, left, strict=True):
                members.setdefault(key, []).append(value)
            means = {key: math.fsum(group) / len(group) for key, group in members.items()}
            left = [value - means[key] for key, value in zip(keys, left, strict=True)]
            change = max(change, *map(abs, means.values()))
        if change <= limit:
            break
    return left
