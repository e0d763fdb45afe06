"""GPU utilisation and memory of a run, from any source."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from lib.errors import PreflightError, Problem
from lib.files import indented_json
from lib.queries.contract import History, RunName, Source, metric_names, series

SCHEMA_VERSION = 1
# Percent; lower means are reported as underused GPUs.
LOW_COMPUTE = 50.0
LOW_MEMORY = 20.0
_OVER_ALL = (
    ("gpu/compute_util_avg", "%"),
    ("gpu/memory_util_avg", "%"),
    ("gpu/memory_used_avg_gb", "GB"),
    ("gpu/memory_used_total_gb", "GB"),
    ("gpu/memory_total_gb", "GB"),
)
_UNITS = {
    "compute_util": "%",
    "memory_util": "%",
    "memory_used_mib": "MiB",
    "power_watts": "W",
    "temperature_celsius": "°C",
}
# W&B's system stream names → the same counters.
_SYSTEM = {
    "gpu": "compute_util",
    "memoryAllocated": "memory_util",
    "powerWatts": "power_watts",
    "temp": "temperature_celsius",
}


@dataclass(frozen=True)
class Reading:
    """Statistics of a counter over the whole run."""

    name: str
    unit: str
    n: int
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class GpuUse:
    """All readings of a run, and remarks on low utilisation."""

    run: str
    readings: list[Reading]
    remarks: list[str]


def read_gpu(source: Source, run: RunName, *, full: bool = False) -> GpuUse:
    """Return readings over all GPUs; with ``full`` also per GPU, with power and temperature.

    Raises PreflightError if the run has no GPU metric.
    """
    history = source.history(run)
    candidates = [_reading(name, unit, _values(history, name)) for name, unit in _OVER_ALL]
    if full:
        candidates += _each(history) or _from_system(source.system(run))
    readings = [reading for reading in candidates if reading.n]
    if not readings:
        what = f"{run.name} has no GPU metric"
        advice = "CPU runs have none; scripts/inspect_wandb_keys.py lists the metrics of a run"
        raise PreflightError(Problem(what, next=advice, code="run.missing-metric"))
    return GpuUse(run.name, readings, _remarks(readings))


def gpu_to_json(use: GpuUse) -> str:
    """Return the readings as one JSON document with sorted keys."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(use)}
    return indented_json(document)


def gpu_to_text(use: GpuUse) -> str:
    """Return one line per counter, then the remarks."""
    width = max(len(reading.name) for reading in use.readings)
    lines = [f"run  {use.run}", "", f"{'':<{width}}         mean       lowest      highest"]
    lines += [
        f"{r.name:<{width}} {r.mean:>12.2f} {r.lowest:>12.2f} {r.highest:>12.2f} {r.unit}"
        for r in use.readings
    ]
    return "\n".join([*lines, "", *use.remarks]) + "\n"


def _each(history: History) -> list[Reading]:
    """Return readings of each GPU from this project's telemetry metrics."""
    names = [name for name in metric_names(history) if re.fullmatch(r"gpu/\d+/\w+", name)]
    return [_reading(n, _UNITS.get(n.split("/")[2], ""), _values(history, n)) for n in names]


def _from_system(rows: Sequence[dict[str, float]]) -> list[Reading]:
    """Return readings of each GPU from W&B's system stream, for runs of other programs."""
    by_counter: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            match = re.fullmatch(r"gpu\.(\d+)\.(\w+)", name)
            if match and match[2] in _SYSTEM:
                by_counter.setdefault(f"gpu/{match[1]}/{_SYSTEM[match[2]]}", []).append(value)
    return [
        _reading(n, _UNITS[n.split("/")[2]], values) for n, values in sorted(by_counter.items())
    ]


def _values(history: History, metric: str) -> list[float]:
    return [value for _, value in series(history, metric)]


def _reading(name: str, unit: str, values: Sequence[float]) -> Reading:
    if not values:
        return Reading(name, unit, 0, 0.0, 0.0, 0.0)
    return Reading(name, unit, len(values), fmean(values), min(values), max(values))


def _remarks(readings: Sequence[Reading]) -> list[str]:
    mean = {reading.name: reading.mean for reading in readings}
    remarks = []
    if (compute := mean.get("gpu/compute_util_avg", LOW_COMPUTE)) < LOW_COMPUTE:
        remarks.append(
            f"LOW     compute {compute:.0f} % of the time (below {LOW_COMPUTE:.0f} %): "
            "the GPU is idle; try COMPILE=y, a larger BATCH_SIZE, more LOADER_WORKERS"
        )
    if (memory := mean.get("gpu/memory_util_avg", LOW_MEMORY)) < LOW_MEMORY:
        remarks.append(
            f"LOW     memory {memory:.0f} % (below {LOW_MEMORY:.0f} %): "
            "a larger BATCH_SIZE (with less GRAD_ACCUMULATION) fits"
        )
    return remarks or ["OK      utilisation is not low"]
