"""Drift of the losses over a study: do runs that start later end higher, or lower?

Runs of one seed are trained in random order, so a drift adds noise to the differences and favours no
step. The test is an alarm: it corrects nothing. It regresses the residuals of the losses, after the
means of steps and seeds, on the residuals of the rank of each run by its start (analysis of
covariance; Fisher 1932).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from lib.report.statistics import t_sf
from lib.report.verdicts import SeedOutcome

# p below this limit is reported.
_ALARM = 0.01
# Residuals are converged, or nothing is left of the ranks, at these shares of the values.
_CONVERGED = 1e-13
_EXPLAINED = 1e-9
_MAX_PASSES = 1000


class TimedValue(NamedTuple):
    """The loss of one run, or another value, and its start in seconds since any epoch."""

    step: str
    seed: int
    started_at: float
    value: float


def study_drifts(outcomes: Mapping[str, Sequence[SeedOutcome]]) -> dict[str, Any]:
    """Return the drift of the losses, and that of the speed of each device that can be tested.

    The speed is tested as its logarithm: steps differ in speed by a factor, so their logarithms
    differ by a mean.
    """
    losses: list[TimedValue] = []
    speeds: dict[str, list[TimedValue]] = {}
    for arm, run in ((arm, run) for arm, runs in outcomes.items() for run in runs):
        if run.started_at is None:
            continue
        if run.loss is not None and not run.diverged:
            losses.append(TimedValue(arm, run.seed, run.started_at, run.loss))
        if run.speed:
            value = TimedValue(arm, run.seed, run.started_at, math.log(run.speed))
            speeds.setdefault(run.device, []).append(value)
    tests = {device: drift_test(values) for device, values in sorted(speeds.items())}
    return {
        "drift": drift_test(losses),
        "speed_drifts": {device: test for device, test in tests.items() if test is not None},
    }


def drift_test(runs: Sequence[TimedValue]) -> dict[str, Any] | None:
    """Return the test of a linear drift of the values.

    ``trend`` is in units of the values, over the whole study; ``alarms`` is whether the drift is
    reported. Returns None if the order of the runs follows from steps and seeds, or if too few runs
    are left.
    """
    ordered = sorted(runs, key=lambda run: (run.started_at, run.step, run.seed))
    degrees = len(ordered) - _means(ordered) - 1
    if degrees < 1:
        return None
    ranks = _residuals(ordered, [float(rank) for rank in range(len(ordered))])
    losses = _residuals(ordered, [run.value for run in ordered])
    spread = math.fsum(rank * rank for rank in ranks)
    if spread <= _EXPLAINED * len(ordered) ** 3:
        return None
    slope = math.fsum(x * y for x, y in zip(ranks, losses, strict=True)) / spread
    rest = math.fsum((y - slope * x) ** 2 for x, y in zip(ranks, losses, strict=True))
    if rest == 0:
        return None
    t = slope / math.sqrt(rest / degrees / spread)
    p, count = 2 * t_sf(abs(t), degrees), len(ordered)
    trend = slope * (count - 1)
    return {"p": p, "degrees": degrees, "trend": trend, "runs": count, "alarms": p < _ALARM}


def _means(runs: Sequence[TimedValue]) -> int:
    """Return the number of independent means: steps + seeds − groups that share neither."""
    by_seed: dict[int, set[str]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, set()).add(run.step)
    groups: list[set[str]] = []
    for steps in by_seed.values():
        apart = [group for group in groups if group.isdisjoint(steps)]
        joined = steps.union(*(group for group in groups if not group.isdisjoint(steps)))
        groups = [*apart, joined]
    return len({run.step for run in runs}) + len(by_seed) - len(groups)


def _residuals(runs: Sequence[TimedValue], values: Sequence[float]) -> list[float]:
    """Return the residuals of ``values`` after the means of steps and seeds.

    The means are subtracted in turn until nothing changes: with missing runs, steps and seeds are
    not orthogonal.
    """
    left = list(values)
    limit = _CONVERGED * max(map(abs, values), default=0.0)
    groupings = [_members([run.step for run in runs]), _members([run.seed for run in runs])]
    for _ in range(_MAX_PASSES):
        change = 0.0
        for members in groupings:
            for numbers in members:
                mean = math.fsum(left[i] for i in numbers) / len(numbers)
                change = max(change, abs(mean))
                for i in numbers:
                    left[i] -= mean
        if change <= limit:
            break
    return left


def _members(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the positions of each distinct key."""
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    return list(members.values())
