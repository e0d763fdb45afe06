"""Series of a study's report, over the seeds of each row of the result table.

Curves describe the runs; none of them is a verdict. A difference is
taken between runs of the same seed, the row minus the baseline of its part.
"""

from array import array
from collections.abc import Mapping, Sequence
from operator import sub
from statistics import fmean
from typing import Any

from lib.json_files import MissingRecord, RecordError
from lib.report.options import NATS
from lib.report.run_curves import Curve, bin_width, binned, read_curves
from lib.report.run_results import planned_run, run_outcome
from lib.report.table import ResultTable
from lib.runs.record import RunRecord, derived

# A series over training: ``at``, and mean, smallest (``low``) and largest value (``high``) over the
# seeds; None without runs.
Band = Mapping[str, list[float]] | None


def study_series(table: ResultTable) -> list[dict[str, Any]]:
    """Return the curves of each row over its seeds, and its sample: what only figures show.

    A band has ``at`` (tokens), ``mean``, ``low`` and ``high``, or is null. Training texts are not
    compared in bits per byte, because runs do not record their bytes.
    """
    rows, unit = table.runs, table.verdicts.plan.unit
    # The bins of the longest run, so that bins of two rows are paired.
    width = bin_width(max((r.final.tokens for row in rows for r in row.records), default=0))
    series = []
    for row in rows:
        training = [_training(record, width) for record in row.records]
        evaluations = [_evaluations(record, unit) for record in row.records]
        training_gaps = [
            _minus(_training(a, width), _training(b, width)) for a, b in row.pairs if unit == NATS
        ]
        gaps = [_minus(_evaluations(a, unit), _evaluations(b, unit)) for a, b in row.pairs]
        curves = [read_curves(record) for record in row.records]
        series.append(
            {
                "name": row.name,
                "training": _band(training),
                "evaluation": _band(evaluations),
                "training_difference": _band(training_gaps),
                "evaluation_difference": _band(gaps),
                "spikes": [list(point) for each in curves for point in each.spikes],
                "sample": _sample(row.records),
            }
        )
    return series


@derived
def _training(record: RunRecord, width: float) -> Curve:
    """Return the training loss of a run in bins of ``width`` tokens."""
    curves = read_curves(record)
    if curves.width == width:
        return curves.train
    # Another record, which does not keep the rows.
    return binned(RunRecord(record.run).train_rows, width)


def _evaluations(record: RunRecord, unit: str) -> Curve:
    curve, loss = read_curves(record).evaluations, run_outcome(record, unit).loss
    if unit == NATS:
        return curve
    assert loss is not None
    # Nats per token of the evaluation to the unit of the study.
    scale = loss / record.final.val_loss
    return Curve(curve.at, array("d", (value * scale for value in curve.values)))


def _minus(a: Curve, b: Curve) -> Curve:
    """Return the difference at the points that both curves have."""
    if a.at == b.at:
        return Curve(a.at, array("d", map(sub, a.values, b.values)))
    others = dict(zip(*b, strict=True))
    return Curve.of({at: value - others[at] for at, value in zip(*a, strict=True) if at in others})


def _band(seeds: Sequence[Curve]) -> Band:
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
    return {
        "at": list(shared),
        "mean": list(map(fmean, columns)),
        "low": list(map(min, columns)),
        "high": list(map(max, columns)),
    }


def _sample(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the text sample of the first seed; None if the run wrote none."""
    if not records:
        return None
    try:
        text = records[0].sample
    except MissingRecord:
        return None
    except RecordError as error:
        text = f"({error.problems[0].what})"
    return {"seed": planned_run(records[0]).seed, "text": text}
