"""Series of a study's report, over the seeds of each row of the result table.

Curves describe the runs; none of them is a verdict.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lib.json_files import MissingRecord, RecordError
from lib.report.options import NATS
from lib.report.run_results import Curve, bin_width, binned, planned_run, read_curves, run_outcome
from lib.report.study import JudgedStudy, finished_of
from lib.runs.record import RunRecord, derived

# A series over training: ``at`` (tokens), and mean, smallest (``low``) and largest value (``high``)
# over the seeds; None without runs.
Band = Mapping[str, list[float]] | None


def study_series(study: JudgedStudy) -> list[dict[str, Any]]:
    """Return the curves of each row over its seeds, and its sample: what only figures show."""
    rows, unit = {arm: finished_of(runs) for arm, runs in study.outcomes.items()}, study.plan.unit
    width = bin_width(max((r.final.tokens for row in rows.values() for r in row), default=0))
    series = []
    for arm, records in rows.items():
        series.append(
            {
                "name": arm,
                "training": _band([_training(record, width) for record in records]),
                "evaluation": _band([_evaluations(record, unit) for record in records]),
                "spikes": [list(point) for r in records for point in read_curves(r).spikes],
                "sample": _sample(records),
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
    return {at: value * scale for at, value in curve.items()}


def _band(seeds: Sequence[Curve]) -> Band:
    """Return the band over the points that all seeds have; None without such a point."""
    shared = [at for at in seeds[0] if all(at in seed for seed in seeds)] if seeds else []
    if not shared:
        return None
    columns = [[seed[at] for seed in seeds] for at in shared]
    mean, low, high = ([form(column) for column in columns] for form in (fmean, min, max))
    return {"at": shared, "mean": mean, "low": low, "high": high}


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
