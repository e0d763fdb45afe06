"""Records of a run as metrics for trackers, each exactly once across restarts.

When a run resumes, ``metrics.jsonl`` is truncated and the same rows are written again: rows are
counted so that rows already sent are skipped. Statistics are reduced over layers, telemetry samples
over a log interval. In metric names, 1 GB is 2^30 bytes.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from lib.files import write_json
from lib.json_files import read_json_object
from lib.runs.record import JsonRecord, RunRecord
from lib.runs.rows import EvalRow, MetricsRow, RowTail, StatisticsRow, TelemetrySample, TimingRow
from lib.runs.run_dir import RunDir

# Name → one value per layer; None if the layer has none.
Layers = Mapping[str, Sequence[float | None]]


def reduce_over_layers(values: Layers) -> dict[str, float]:
    """Return one value per name over all layers: the minimum of ``*_min``, the maximum of
    ``*_max``, else the mean.

    A name without a value in any layer is left out.
    """
    values_by_name = {name: present_values(layers) for name, layers in values.items()}
    return {name: _reduce(name, present) for name, present in values_by_name.items() if present}


def per_layer_metrics(values: Layers) -> dict[str, float]:
    """Return ``layer/<i>/<name>`` for every layer with a value, counted from 0."""
    return {
        f"layer/{i}/{name}": value
        for name, layers in values.items()
        for i, value in enumerate(layers)
        if value is not None
    }


def present_values(layers: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in layers if value is not None]


def _reduce(name: str, values: Sequence[float]) -> float:
    if name.endswith("_min"):
        return min(values)
    return max(values) if name.endswith("_max") else fmean(values)


_MIB_PER_GB = 1024
_COUNTERS = (
    "compute_util",
    "memory_util",
    "memory_used_mib",
    "power_watts",
    "temperature_celsius",
)


def mean_metrics(samples: Sequence[TelemetrySample]) -> dict[str, float]:
    """Return means over ``samples``, the telemetry.jsonl records of one log interval.

    The result is empty without samples. A counter that a GPU lacks is left out.
    """
    if not samples:
        return {}
    metrics = {"process/rss_gb": fmean(s.rss_mib for s in samples) / _MIB_PER_GB}
    seconds = samples[-1].ts - samples[0].ts
    if seconds > 0:
        used = samples[-1].cpu_seconds - samples[0].cpu_seconds
        metrics["process/cpu_cores"] = used / seconds
    return {**metrics, **_all_gpus(samples), **_each_gpu(samples)}


def _all_gpus(samples: Sequence[TelemetrySample]) -> dict[str, float]:
    """Return means over all GPUs of the run."""
    gpus = [_with_memory_util(gpu) for sample in samples for gpu in sample.gpus]
    totals = [sum(_known(sample.gpus, "memory_used_mib")) for sample in samples]
    capacity = sum(_known(samples[-1].gpus, "memory_total_mib"))
    used = list(_known(gpus, "memory_used_mib"))
    return {
        **_mean("gpu/compute_util_avg", _known(gpus, "compute_util")),
        **_mean("gpu/memory_util_avg", _known(gpus, "memory_util")),
        **_mean("gpu/memory_used_avg_gb", [mib / _MIB_PER_GB for mib in used]),
        **_mean("gpu/memory_used_total_gb", [mib / _MIB_PER_GB for mib in totals if used]),
        **({"gpu/memory_total_gb": capacity / _MIB_PER_GB} if capacity else {}),
    }


def _each_gpu(samples: Sequence[TelemetrySample]) -> dict[str, float]:
    """Return ``gpu/<index>/<counter>``: the mean of each counter of each GPU."""
    metrics: dict[str, float] = {}
    for index in sorted({gpu["index"] for sample in samples for gpu in sample.gpus}):
        readings = [
            _with_memory_util(gpu)
            for sample in samples
            for gpu in sample.gpus
            if gpu["index"] == index
        ]
        for counter in _COUNTERS:
            metrics |= _mean(f"gpu/{index}/{counter}", _known(readings, counter))
    return metrics


def _with_memory_util(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reading with its memory utilisation in percent added."""
    used, total = gpu["memory_used_mib"], gpu["memory_total_mib"]
    return {**gpu, "memory_util": 100 * used / total if used is not None and total else None}


def _known(readings: Iterable[Mapping[str, Any]], counter: str) -> list[float]:
    return [reading[counter] for reading in readings if reading[counter] is not None]


def _mean(name: str, values: Iterable[float]) -> dict[str, float]:
    present = list(values)
    return {name: fmean(present)} if present else {}


# Maximum delay between taking a telemetry sample and its appearance on disk.
_SAMPLE_DELAY_SECONDS = 0.5

SCHEMA_VERSION = 1


@dataclass
class ReadCursor:
    """The records that a tracker has received so far."""

    # Number of rows of metrics.jsonl.
    rows: int = 0
    # The newest iteration, and the newest iteration with a timing.
    iteration: int = 0
    timed: int = 0
    # All records and the end of the run were sent.
    complete: bool = False
    # The sending process has not closed the tracker: some records may be lost.
    open: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the saved position, or the start if there is no file."""
        if not path.exists():
            return cls()
        return JsonRecord(path, read_json_object(path)).section(cls)

    def back_to(self, iteration: int, run: RunDir) -> None:
        """Rewind to ``iteration``; later rows of the run's records count as not sent."""
        if iteration < self.iteration:
            rows = RunRecord(run).metrics
            self.rows = sum(row.iteration <= iteration for row in rows)
            self.iteration, self.timed = iteration, min(self.timed, iteration)

    def write(self, path: Path) -> None:
        """Replace the file."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})


class RecordReader:
    """Incremental reader of a run's records."""

    def __init__(self, run: RunDir, position: ReadCursor) -> None:
        self._position = position
        self._metrics = RowTail(run.metrics, position.rows)
        self._timing = RowTail(run.timing)
        self._telemetry = RowTail(run.telemetry)
        # Samples of the current log interval.
        self._samples: list[TelemetrySample] = []
        # Rows and timings read but not yet yielded: the last telemetry sample of their interval, or
        # the row of a timing, may not be written yet.
        self._pending_rows: list[MetricsRow] = []
        self._pending_timings: list[TimingRow] = []

    def new(self, *, ended: bool = True) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (iteration, metrics) in order, and advance the position once exhausted.

        While the run has not ``ended``, the newest timings wait for the last sample of their
        interval.
        """
        position = self._position
        rows = [*self._pending_rows, *self._metrics.metrics()]
        # Read timings after rows: a timing is written after its row, so its row is known.
        timings = [*self._pending_timings, *self._timing.rows(TimingRow)]
        # Read samples last: all samples before a settled timing are on disk by now.
        self._samples += self._telemetry.rows(TelemetrySample)
        first_unsettled = math.inf if ended else _first_unsettled(timings)
        self._pending_rows = [row for row in rows if row.iteration >= first_unsettled]
        del rows[len(rows) - len(self._pending_rows) :]
        newest = max((row.iteration for row in rows), default=position.iteration)
        metrics: dict[int, dict[str, float]] = {}
        for row in rows:
            metrics.setdefault(row.iteration, {}).update(_metrics(row))
        self._pending_timings = [
            t for t in timings if t.iteration > newest or t.iteration >= first_unsettled
        ]
        timed = position.timed
        for timing in timings:
            if timing in self._pending_timings:
                continue
            iteration = timing.iteration
            machine = mean_metrics(self._sampled_before(timing.written_at))
            if position.iteration <= iteration <= newest and iteration > position.timed:
                metrics.setdefault(iteration, {"iteration": iteration})
                metrics[iteration].update(_speed(timing) | machine)
                timed = max(timed, iteration)
        for iteration in sorted(metrics):
            yield iteration, metrics[iteration]
        position.rows += len(rows)
        position.iteration, position.timed = newest, timed

    def _sampled_before(self, moment: float) -> list[TelemetrySample]:
        """Return the samples up to ``moment`` and remove them from the queue."""
        samples = [sample for sample in self._samples if sample.ts <= moment]
        self._samples = self._samples[len(samples) :]
        return samples


def best_validation_metrics(run: RunDir) -> dict[str, float]:
    """Return the best validation loss and perplexity of a finished run."""
    best = min(row.val_loss for row in RunRecord(run).eval_rows)
    return {"final/best_val_loss": best, **_perplexity("final/best_val_perplexity", best)}


def _first_unsettled(timings: Sequence[TimingRow]) -> float:
    """Return the first iteration whose timing is so new that a sample before it may still be
    missing.
    """
    settled = time.time() - _SAMPLE_DELAY_SECONDS
    return min((t.iteration for t in timings if t.written_at > settled), default=math.inf)


def _metrics(row: MetricsRow) -> dict[str, float]:
    metrics: dict[str, float] = {"iteration": row.iteration}
    if isinstance(row, EvalRow):
        losses = {"val_loss": row.val_loss, **_perplexity("val_perplexity", row.val_loss)}
        return {**metrics, **losses, "sparsity": row.sparsity}
    if isinstance(row, StatisticsRow):
        return {**metrics, **reduce_over_layers(row.values), **per_layer_metrics(row.values)}
    # After an fp16 overflow the step is skipped and has no gradient norm.
    norm = {} if row.grad_norm is None else {"grad_norm": row.grad_norm}
    return {
        **metrics,
        "train_loss": row.loss,
        **_perplexity("train_perplexity", row.loss),
        "learning_rate": row.lr,
        **norm,
    }


def _speed(timing: TimingRow) -> dict[str, float]:
    """Return tokens per second, and MFU if the device's peak is known."""
    mfu = {} if timing.mfu is None else {"mfu": timing.mfu}
    return {"tokens_per_second": timing.tokens_per_second, **mfu}


def _perplexity(name: str, loss: float) -> dict[str, float]:
    """Return exp(loss); nothing if the result overflows."""
    try:
        return {name: math.exp(loss)}
    except OverflowError:
        return {}
