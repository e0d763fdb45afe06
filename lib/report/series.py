"""Series of a study's report, over the seeds of each row of the result table.

Curves and differences of documents describe the runs; none of them is a verdict. A difference is
taken between runs of the same seed, the row minus the baseline of its part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from lib.report.run_results import RunResult
from lib.report.table import ResultTable, TableRow
from lib.runs.record import StatisticsRow
from lib.tracking.reader import present_values, reduce_over_layers

K = TypeVar("K")

# Points of a training curve; each is a mean over equally many tokens.
_BINS = 60


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
    baselines: dict[tuple[tuple[str, str], ...], str] = {}
    for part in table.parts:
        for item in part.items:
            if isinstance(item, RunResult):
                key = (tuple(part.labels.items()), item.run.variant.slug)
                found.setdefault(key, []).append(item)
    rows = []
    for row in table.rows:
        labels = tuple(row.labels.items())
        if not row.variant.parent:
            baselines.setdefault(labels, row.variant.slug)
        slug, baseline = row.variant.slug, baselines.get(labels, "")
        own = sorted(found.get((labels, slug), []), key=lambda r: r.run.seed)
        others = found.get((labels, baseline), []) if slug != baseline else []
        rows.append(RowRuns(row, own, others))
    return rows


def training_curves(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the training loss of each row over tokens; None for a row without runs."""
    width = _bin_width(rows)
    return [_band([_binned(r, width) for r in row.results]) for row in rows]


def training_differences(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the training loss of each row minus the baseline's, over tokens."""
    width = _bin_width(rows)
    pairs = [row.pairs for row in rows]
    # Once, although all rows of a part have the same baseline.
    runs = {id(run): run for each in pairs for pair in each for run in pair}
    binned = {key: _binned(run, width) for key, run in runs.items()}
    return [_band([_minus(binned[id(a)], binned[id(b)]) for a, b in each]) for each in pairs]


def evaluation_curves(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the validation loss of each row over tokens."""
    return [_band([_evaluations(result) for result in row.results]) for row in rows]


def evaluation_differences(rows: Sequence[RowRuns]) -> list[SeedBand | None]:
    """Return the validation loss of each row minus the baseline's, over tokens."""
    return [_band([_minus(_evaluations(a), _evaluations(b)) for a, b in row.pairs]) for row in rows]


def statistics_curves(row: RowRuns) -> dict[str, SeedBand]:
    """Return the statistics of the row's mechanisms over iterations, reduced over layers."""
    by_name: dict[str, list[dict[float, float]]] = {}
    for result in row.results:
        series: dict[str, dict[float, float]] = {}
        for logged in _statistics(result):
            for name, value in reduce_over_layers(logged.values).items():
                series.setdefault(name, {})[logged.iteration] = value
        for name, points in series.items():
            by_name.setdefault(name, []).append(points)
    bands = {name: _band(seeds) for name, seeds in by_name.items()}
    return {name: band for name, band in bands.items() if band is not None}


def final_statistics(row: RowRuns) -> dict[str, list[float | None]]:
    """Return the last statistics of the row's mechanisms: per layer, the mean over the seeds."""
    last = [logged[-1].values for result in row.results if (logged := _statistics(result))]
    names = dict.fromkeys(name for values in last for name in values)
    return {
        name: _layer_means([values[name] for values in last if name in values]) for name in names
    }


def document_differences(row: RowRuns) -> dict[str, float]:
    """Return the loss of each document minus the baseline's, in nats per token: seed mean.

    Only documents that every compared run evaluated are listed.
    """
    by_seed = [_minus(_documents(a), _documents(b)) for a, b in row.pairs]
    if not by_seed:
        return {}
    shared = [name for name in by_seed[0] if all(name in each for each in by_seed)]
    return {name: fmean(each[name] for each in by_seed) for name in shared}


def _documents(result: RunResult) -> dict[str, float]:
    return {item.item_id: item.nll_mean for item in result.facts.record.documents}


def _statistics(result: RunResult) -> list[StatisticsRow]:
    return [row for row in result.facts.record.metrics if isinstance(row, StatisticsRow)]


def _layer_means(by_seed: Sequence[Sequence[float | None]]) -> list[float | None]:
    longest = max(map(len, by_seed))
    columns = [present_values([s[i] for s in by_seed if i < len(s)]) for i in range(longest)]
    return [fmean(values) if values else None for values in columns]


def _evaluations(result: RunResult) -> dict[float, float]:
    return {row.tokens: row.val_loss for row in result.facts.record.eval_rows}


def _bin_width(rows: Sequence[RowRuns]) -> float:
    """Return the tokens of one bin, the same for all rows, so that bins of two rows are paired."""
    results = [result for row in rows for result in row.results]
    return max((result.final.tokens for result in results), default=0) / _BINS or 1.0


def _binned(result: RunResult, width: float) -> dict[float, float]:
    """Return the mean training loss of each bin of tokens, at the end of the bin."""
    bins: dict[float, list[float]] = {}
    for row in result.facts.record.train_rows:
        bins.setdefault(-(-row.tokens // width) * width, []).append(row.loss)
    return {at: fmean(losses) if losses[1:] else losses[0] for at, losses in bins.items()}


def _minus(a: Mapping[K, float], b: Mapping[K, float]) -> dict[K, float]:
    return {key: value - b[key] for key, value in a.items() if key in b}


def _band(seeds: Sequence[Mapping[float, float]]) -> SeedBand | None:
    """Return the band over the points that all seeds have; None without such a point."""
    if not seeds:
        return None
    shared = sorted(set.intersection(*(set(seed) for seed in seeds)))
    if not shared:
        return None

    def over(reduce: Callable[[list[float]], float]) -> list[float]:
        return [reduce([seed[at] for seed in seeds]) for at in shared]

    return SeedBand(shared, over(fmean), over(min), over(max))
