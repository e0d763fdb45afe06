"""Records of a run as metrics for trackers, each exactly once across restarts.

When a run resumes, ``metrics.jsonl`` is truncated and the same rows are written again: rows are
counted so that rows already sent are skipped. Statistics are reduced over layers, telemetry samples
over a log interval. In metric names, 1 GB is 2^30 bytes.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from lib.files import write_json
from lib.runs.record import JsonRecord, RunRecord
from lib.runs.rows import EvalRow, MetricsRow, RowTail, StatisticsRow, TelemetrySample, TimingRow
from lib.runs.run_dir import RunDir, State, read_status

_MIB_PER_GB = 1024
_GPU_COUNTERS = (
    *("compute_util", "memory_util", "memory_used_mib", "power_watts", "temperature_celsius"),
)
# By the end of the name.
_EXTREMES: Mapping[str, Callable[[Sequence[float]], float]] = {"_min": min, "_max": max}


def reduce_over_layers(values: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Return one value per name over all layers: the minimum of ``*_min``, the maximum of
    ``*_max``, else the mean. A name without a value in any layer is left out.
    """
    reduced = {}
    for name, layers in values.items():
        if present := [value for value in layers if value is not None]:
            reduced[name] = _EXTREMES.get(name[-4:], fmean)(present)
    return reduced


def mean_metrics(samples: Sequence[TelemetrySample]) -> dict[str, float]:
    """Return means over the samples of one log interval; a counter that a GPU lacks is left out."""
    if not samples:
        return {}
    metrics = {"process/rss_gb": fmean(s.rss_mib for s in samples) / _MIB_PER_GB}
    seconds = samples[-1].ts - samples[0].ts
    if seconds > 0:
        used = samples[-1].cpu_seconds - samples[0].cpu_seconds
        metrics["process/cpu_cores"] = used / seconds
    capacity = sum(gpu["memory_total_mib"] or 0 for gpu in samples[-1].gpus)
    if capacity:
        metrics["gpu/memory_total_gb"] = capacity / _MIB_PER_GB
    values: dict[str, list[float]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            used, total = gpu["memory_used_mib"], gpu["memory_total_mib"]
            percent = None if used is None or total is None else 100 * used / total
            reading = {**gpu, "memory_util": percent}
            named = {f"gpu/{gpu['index']}/{name}": reading[name] for name in _GPU_COUNTERS}
            named |= {f"gpu/{name}_avg": reading[name] for name in ("compute_util", "memory_util")}
            named["gpu/memory_used_avg_gb"] = None if used is None else used / _MIB_PER_GB
            for name, value in named.items():
                if value is not None:
                    values.setdefault(name, []).append(value)
        known = [used for gpu in sample.gpus if (used := gpu["memory_used_mib"]) is not None]
        if known:
            values.setdefault("gpu/memory_used_total_gb", []).append(sum(known) / _MIB_PER_GB)
    return metrics | {name: fmean(each) for name, each in values.items()}


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
        return JsonRecord.read(path).section(cls) if path.exists() else cls()

    def back_to(self, iteration: int, run: RunDir) -> None:
        """Rewind to ``iteration``; later rows of the run's records count as not sent."""
        if iteration < self.iteration:
            rows = RunRecord(run).metrics
            self.rows = sum(row.iteration <= iteration for row in rows)
            self.iteration, self.timed = iteration, min(self.timed, iteration)

    def write(self, path: Path) -> None:
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
        settled = math.inf if ended else time.time() - _SAMPLE_DELAY_SECONDS
        unsettled = (t.iteration for t in timings if t.written_at > settled)
        first_unsettled = min(unsettled, default=math.inf)
        self._pending_rows = [row for row in rows if row.iteration >= first_unsettled]
        del rows[len(rows) - len(self._pending_rows) :]
        newest = max((row.iteration for row in rows), default=position.iteration)
        metrics: dict[int, dict[str, float]] = {}
        for row in rows:
            metrics.setdefault(row.iteration, {}).update(_metrics(row))
        last = min(newest, first_unsettled - 1)
        self._pending_timings = [t for t in timings if t.iteration > last]
        timed = position.timed
        for timing in (t for t in timings if t.iteration <= last):
            count = sum(sample.ts <= timing.written_at for sample in self._samples)
            machine, self._samples = mean_metrics(self._samples[:count]), self._samples[count:]
            if timing.iteration >= position.iteration and timing.iteration > position.timed:
                speed = {"tokens_per_second": timing.tokens_per_second, "mfu": timing.mfu}
                present = {name: value for name, value in speed.items() if value is not None}
                of_step = metrics.setdefault(timing.iteration, {"iteration": timing.iteration})
                of_step.update(present | machine)
                timed = max(timed, timing.iteration)
        for iteration in sorted(metrics):
            yield iteration, metrics[iteration]
        position.rows += len(rows)
        position.iteration, position.timed = newest, timed


def succeeded(run: RunDir) -> bool:
    """Return whether the run has the entries of a successful end."""
    status = read_status(run)
    return status is not None and status.state is State.SUCCESS


def best_validation_metrics(run: RunDir) -> dict[str, float]:
    """Return the best validation loss and perplexity of a finished run."""
    best = min(row.val_loss for row in RunRecord(run).eval_rows)
    return {"final/best_val_loss": best, **_perplexity("final/best_val_perplexity", best)}


def _metrics(row: MetricsRow) -> dict[str, float]:
    metrics: dict[str, float] = {"iteration": row.iteration}
    if isinstance(row, EvalRow):
        losses = {"val_loss": row.val_loss, **_perplexity("val_perplexity", row.val_loss)}
        return {**metrics, **losses, "sparsity": row.sparsity}
    if isinstance(row, StatisticsRow):
        each = {
            f"layer/{i}/{name}": value
            for name, layers in row.values.items()
            for i, value in enumerate(layers)
            if value is not None
        }
        return {**metrics, **reduce_over_layers(row.values), **each}
    # After an fp16 overflow the step is skipped and has no gradient norm.
    norm = {} if row.grad_norm is None else {"grad_norm": row.grad_norm}
    perplexity = _perplexity("train_perplexity", row.loss)
    return {**metrics, "train_loss": row.loss, **perplexity, "learning_rate": row.lr, **norm}


def _perplexity(name: str, loss: float) -> dict[str, float]:
    """Return exp(loss); nothing if the result overflows."""
    try:
        return {name: math.exp(loss)}
    except OverflowError:
        return {}
