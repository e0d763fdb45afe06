"""Curves of one run that a report draws: losses over training; last statistics.

They are small however long the run is, so a report need not keep the rows of all runs.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from lib.json_files import DamagedRecord
from lib.runs.record import RunRecord, derived
from lib.runs.rows import StatisticsRow, TrainRow
from lib.tracking.reader import reduce_over_layers
from lib.tracking.stability import unstable_points

# Points of a training curve; each is a mean over equally many tokens.
_BINS = 60


class Curve(NamedTuple):
    """Values at ascending tokens or iterations; each point has another."""

    at: "array[float]"
    values: "array[float]"

    @classmethod
    def of(cls, points: Mapping[float, float]) -> "Curve":
        """Return the curve through ``points``."""
        at = sorted(points)
        return cls(array("d", at), array("d", map(points.__getitem__, at)))


@dataclass(frozen=True)
class RunCurves:
    """Curves of a finished run."""

    # Tokens of one bin of the training loss.
    width: float
    # Mean training loss of each bin, at its end; validation loss over tokens.
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
            Curve.of({row.tokens: row.val_loss for row in record.eval_rows}),
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
    return Curve.of({at: fmean(losses) if losses[1:] else losses[0] for at, losses in bins.items()})
