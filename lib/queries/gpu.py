"""How well a run used its GPUs, from whatever keeps the run."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from lib.errors import PreflightError, Problem
from lib.files import indented_json
from lib.queries.contract import History, RunName, Source, metric_names, series

SCHEMA_VERSION = 1
# Percent; below, a GPU is paid for and not used.
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
# W&B's names for the same counters, in its own stream.
_SYSTEM = {
    "gpu": "compute_util",
    "memoryAllocated": "memory_util",
    "powerWatts": "power_watts",
    "temp": "temperature_celsius",
}


@dataclass(frozen=True)
class Reading:
    """A counter over the whole run."""

    name: str
    unit: str
    n: int
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class GpuUse:
    """All readings of a run, and what is to be said of them."""

    run: str
    readings: list[Reading]
    remarks: list[str]


def read_gpu(source: Source, run: RunName, *, full: bool = False) -> GpuUse:
    """Over all GPUs; with ``full`` of each, with power and temperature.

    PreflightError where the run has no such metric.
    """
    history = source.history(run)
    found = [_reading(name, unit, _values(history, name)) for name, unit in _OVER_ALL]
    if full:
        found += _each(history) or _from_system(source.system(run))
    readings = [reading for reading in found if reading.n]
    if not readings:
        what = f"{run.name} has no metric of a GPU"
        advice = "runs on a CPU have none; scripts/inspect_wandb_keys.py lists what there is"
        raise PreflightError(Problem(what, next=advice))
    return GpuUse(run.name, readings, _remarks(readings))


def gpu_to_json(use: GpuUse) -> str:
    """One document with sorted keys."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(use)}
    return indented_json(document)


def gpu_to_text(use: GpuUse) -> str:
    """A line for each counter, then the remarks."""
    width = max(len(reading.name) for reading in use.readings)
    lines = [f"run  {use.run}", "", f"{'':<{width}}         mean       lowest      highest"]
    lines += [
        f"{r.name:<{width}} {r.mean:>12.2f} {r.lowest:>12.2f} {r.highest:>12.2f} {r.unit}"
        for r in use.readings
    ]
    return "\n".join([*lines, "", *use.remarks]) + "\n"


def _each(history: History) -> list[Reading]:
    """Of each GPU, as this tree's telemetry names them."""
    names = [name for name in metric_names(history) if re.fullmatch(r"gpu/\d+/\w+", name)]
    return [_reading(n, _UNITS.get(n.split("/")[2], ""), _values(history, n)) for n in names]


def _from_system(rows: Sequence[dict[str, float]]) -> list[Reading]:
    """Of each GPU, from W&B's own stream: what runs of other programs have."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            match = re.fullmatch(r"gpu\.(\d+)\.(\w+)", name)
            if match and match[2] in _SYSTEM:
                found.setdefault(f"gpu/{match[1]}/{_SYSTEM[match[2]]}", []).append(value)
    return [_reading(n, _UNITS[n.split("/")[2]], values) for n, values in sorted(found.items())]


def _values(history: History, metric: str) -> list[float]:
    return [value for _, value in series(history, metric)]


def _reading(name: str, unit: str, values: Sequence[float]) -> Reading:
    if not values:
        return Reading(name, unit, 0, 0.0, 0.0, 0.0)
    return Reading(name, unit, len(values), fmean(values), min(values), max(values))


def _remarks(readings: Sequence[Reading]) -> list[str]:
    mean = {reading.name: reading.mean for reading in readings}
    said = []
    if (compute := mean.get("gpu/compute_util_avg", LOW_COMPUTE)) < LOW_COMPUTE:
        said.append(
            f"LOW     compute {compute:.0f} % of the time, less than {LOW_COMPUTE:.0f} %: "
            "the GPU waits; try COMPILE=y, a larger BATCH_SIZE, more LOADER_WORKERS"
        )
    if (memory := mean.get("gpu/memory_util_avg", LOW_MEMORY)) < LOW_MEMORY:
        said.append(
            f"LOW     memory {memory:.0f} %, less than {LOW_MEMORY:.0f} %: "
            "a larger BATCH_SIZE (with less GRAD_ACCUMULATION) fits"
        )
    return said or ["OK      nothing to remark"]
