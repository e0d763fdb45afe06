"""Series of a study's report, over the seeds of each row of the result table.

Curves and differences of documents describe the runs; none of them is a verdict. A difference is
taken between runs of the same seed, the row minus the baseline of its part.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub
from statistics import fmean
from typing import Any

from lib.report.run_curves import Curve, bin_width, binned
from lib.report.run_results import RunResult
from lib.report.table import ResultTable, TableRow
from lib.runs.record import RunRecord
from lib.tracking.reader import present_values


@dataclass(frozen=True)
class SeedBand:
    """A series over training: mean, smallest and largest value over the seeds."""

    at: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class RowRuns:
    """One row of the table with its finished runs, sorted by seed, and those of its baseline."""

    row: TableRow
    results: Sequence[RunResult]
    # Empty for the baseline.
    baseline: Sequence[RunResult] = ()

    @property
    def pairs(self) -> list[tuple[RunResult, RunResult]]:
        """Return the runs of the row, each with the baseline's run of the same seed."""
        by_seed = {result.run.seed: result for result in self.baseline}
        return [(r, by_seed[r.run.seed]) for r in self.results if r.run.seed in by_seed]


def runs_of_rows(table: ResultTable) -> list[RowRuns]:
    """Return the rows of the table with their finished runs, in order."""
    found: dict[tuple[tuple[tuple[str, str], ...], str], list[RunResult]] = {}
    baselines: dict[tuple[Any, ...], str] = {}
    for part in table.parts:
        for item in part.items:
            if isinstance(item, RunResult):
                key = (tuple(part.labels.items()), item.run.variant.slug)
                found.setdefault(key, []).append(item)
    rows = []
    for row in table.rows:
        labels = tuple(row.labels.items())
        if not row.variant.parent:
            baselines.setdefault((labels, row.variant.text), row.variant.slug)
        slug, baseline = row.variant.slug, baselines.get((labels, row.variant.text), "")
        own = sorted(found.get((labels, slug), []), key=lambda r: r.run.seed)
        others = found.get((labels, baseline), []) if slug != baseline else []
        rows.append(RowRuns(row, own, others))
    return rows


def training_curves(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the training loss of each row over tokens; None for a row without runs."""
    losses = _binned(rows)
    return [_band([losses(result) for result in row.results]) for row in rows]


def training_differences(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the training loss of each row minus the baseline's, over tokens.

    Training texts are not compared in bits per byte, because runs do not record their bytes.
    """
    losses = _binned(rows)
    pairs = [[(a, b) for a, b in row.pairs if a.scale == b.scale == 1.0] for row in rows]
    # Once, although all rows of a part have the same baseline.
    runs = {id(run): run for each in pairs for pair in each for run in pair}
    curves = {key: losses(run) for key, run in runs.items()}
    return [_band([_minus(curves[id(a)], curves[id(b)]) for a, b in each]) for each in pairs]


def evaluation_curves(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the validation loss of each row over tokens."""
    return [_band([_evaluations(result) for result in row.results]) for row in rows]


def evaluation_differences(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the validation loss of each row minus the baseline's, over tokens."""
    return [_band([_minus(_evaluations(a), _evaluations(b)) for a, b in row.pairs]) for row in rows]


def statistics_curves(row: RowRuns) -> dict[str, SeedBand]:
    """Return the statistics of the row's mechanisms over iterations, reduced over layers."""
    by_name: dict[str, list[Curve]] = {}
    for result in row.results:
        for name, curve in result.curves.statistics.items():
            by_name.setdefault(name, []).append(curve)
    bands = {name: _band(seeds) for name, seeds in by_name.items()}
    return {name: band for name, band in bands.items() if band is not None}


def final_statistics(row: RowRuns) -> dict[str, list[float | None]]:
    """Return the last statistics of the row's mechanisms: per layer, the mean over the seeds."""
    last = [result.curves.last_statistics for result in row.results]
    names = dict.fromkeys(name for values in last for name in values)
    return {
        name: _layer_means([values[name] for values in last if name in values]) for name in names
    }


def document_differences(row: RowRuns) -> list[tuple[str, float]]:
    """Return the loss of each document minus the baseline's, in nats per token: seed mean.

    Of each document the name and the difference, in the order of per_query.csv: names may be equal.
    There are none if the compared runs evaluated other documents.
    """
    names = {tuple(result.curves.documents) for pair in row.pairs for result in pair}
    if len(names) != 1:
        return []
    by_seed = [map(sub, a.outcome.documents, b.outcome.documents) for a, b in row.pairs]
    return list(zip(names.pop(), map(fmean, zip(*by_seed, strict=True)), strict=True))


def _layer_means(by_seed: Sequence[Sequence[float | None]]) -> list[float | None]:
    longest = max(map(len, by_seed))
    columns = [present_values([s[i] for s in by_seed if i < len(s)]) for i in range(longest)]
    return [fmean(values) if values else None for values in columns]


def _binned(rows: Sequence[RowRuns]) -> Callable[[RunResult], Curve]:
    """Return the function that gives the training loss of a run, in the bins of the longest one.

    All runs have the same bins, so that bins of two rows are paired.
    """
    longest = max((r.final.tokens for row in rows for r in row.results), default=0)
    width = bin_width(longest)

    def of(result: RunResult) -> Curve:
        if result.curves.width == width:
            return result.curves.train
        # Another record, which does not keep the rows.
        return binned(RunRecord(result.facts.run).train_rows, width)

    return of


def _evaluations(result: RunResult) -> Curve:
    curve, scale = result.curves.evaluations, result.scale
    if scale == 1.0:
        return curve
    return Curve(curve.at, array("d", (value * scale for value in curve.values)))


def _minus(a: Curve, b: Curve) -> Curve:
    """Return the difference at the points that both curves have."""
    if a.at == b.at:
        return Curve(a.at, array("d", map(sub, a.values, b.values)))
    others = dict(zip(*b, strict=True))
    return Curve.of({at: value - others[at] for at, value in zip(*a, strict=True) if at in others})


def _band(seeds: Sequence[Curve]) -> SeedBand | None:
    """Return the band over the points that all seeds have; None without such a point."""
    if not seeds:
        return None
    shared = seeds[0].at
    if any(seed.at != shared for seed in seeds):
        common = set.intersection(*(set(seed.at) for seed in seeds))
        shared = array("d", sorted(common))
        chosen = [dict(zip(*seed, strict=True)) for seed in seeds]
        seeds = [Curve(shared, array("d", map(points.__getitem__, shared))) for points in chosen]
    if not shared:
        return None
    columns = list(zip(*(seed.values for seed in seeds), strict=True))
    mean = list(map(fmean, columns))
    return SeedBand(list(shared), mean, list(map(min, columns)), list(map(max, columns)))
