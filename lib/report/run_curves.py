"""Curves of one run that a report draws, small however long the run is: a record keeps them, no rows."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from lib.json_files import DamagedRecord
from lib.runs.record import RunRecord, derived
from lib.runs.rows import StatisticsRow, TrainRow
from lib.tracking.reader import reduce_over_layers
from lib.tracking.stability import unstable_points

# Points of a training curve; each is a mean over equally many tokens.
_BINS = 60
# Training tokens → value, in ascending order.
Curve = Mapping[float, float]


class RunCurves(NamedTuple):
    """Curves of a finished run."""

    # Tokens of one bin of the training loss.
    width: float
    # Mean training loss of each bin, at its end; validation loss.
    train: Curve
    evaluations: Curve
    # Training tokens and loss of each unstable step.
    spikes: Sequence[tuple[int, float]]
    # Name → last statistic, reduced over layers.
    last_statistics: Mapping[str, float]


@derived
def read_curves(record: RunRecord) -> RunCurves:
    """Return the curves of a finished run. Raises RecordError."""
    statistics = [row.values for row in record.metrics if isinstance(row, StatisticsRow)]
    try:
        width = bin_width(record.final.tokens)
        return RunCurves(
            width,
            binned(record.train_rows, width),
            dict(sorted((float(row.tokens), row.val_loss) for row in record.eval_rows)),
            unstable_points(record),
            reduce_over_layers(statistics[-1]) if statistics else {},
        )
    except OverflowError as error:
        raise DamagedRecord(record.run.metrics, "numbers of 64 bits", str(error)) from None


def bin_width(tokens: int) -> float:
    """Return the tokens of one bin of a training curve of that many tokens."""
    return tokens / _BINS or 1.0


def binned(rows: Iterable[TrainRow], width: float) -> Curve:
    """Return the mean training loss of each bin of tokens, at the end of the bin."""
    bins: dict[float, list[float]] = {}
    for row in rows:
        bins.setdefault(-(-row.tokens // width) * width, []).append(row.loss)
    return {at: fmean(bins[at]) for at in sorted(bins)}
