"""Telemetry samples as metrics for trackers.

In metric names, 1 GB is 2^30 bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

_MIB_PER_GB = 1024
_COUNTERS = (
    "compute_util",
    "memory_util",
    "memory_used_mib",
    "power_watts",
    "temperature_celsius",
)


def averages(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over ``samples``, the telemetry.jsonl records of one log interval.

    The result is empty without samples. A counter that a GPU lacks is left out.
    """
    if not samples:
        return {}
    metrics = {"process/rss_gb": fmean(s["rss_mib"] for s in samples) / _MIB_PER_GB}
    seconds = samples[-1]["ts"] - samples[0]["ts"]
    if seconds > 0:
        used = samples[-1]["cpu_seconds"] - samples[0]["cpu_seconds"]
        metrics["process/cpu_cores"] = used / seconds
    return {**metrics, **_all_gpus(samples), **_each_gpu(samples)}


def _all_gpus(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over all GPUs of the run."""
    gpus = [_with_memory_util(gpu) for sample in samples for gpu in sample["gpus"]]
    totals = [sum(_known(sample["gpus"], "memory_used_mib")) for sample in samples]
    capacity = sum(_known(samples[-1]["gpus"], "memory_total_mib"))
    used = list(_known(gpus, "memory_used_mib"))
    return {
        **_mean("gpu/compute_util_avg", _known(gpus, "compute_util")),
        **_mean("gpu/memory_util_avg", _known(gpus, "memory_util")),
        **_mean("gpu/memory_used_avg_gb", [mib / _MIB_PER_GB for mib in used]),
        **_mean("gpu/memory_used_total_gb", [mib / _MIB_PER_GB for mib in totals if used]),
        **({"gpu/memory_total_gb": capacity / _MIB_PER_GB} if capacity else {}),
    }


def _each_gpu(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``gpu/<index>/<counter>``: the mean of each counter of each GPU."""
    metrics: dict[str, float] = {}
    for index in sorted({gpu["index"] for sample in samples for gpu in sample["gpus"]}):
        readings = [
            _with_memory_util(gpu)
            for sample in samples
            for gpu in sample["gpus"]
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
