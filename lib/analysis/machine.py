"""Speed, memory and utilisation of a finished run, from its telemetry and timing records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lib.files import read_json_lines
from lib.rundir import RunDir
from lib.telemetry.metrics import averages

_MIB_PER_GB = 1024
# Name → (heading, number format), in table order. 1 GB is 2^30 bytes.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "tokens_per_second": ("tok/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "gpu/compute_util_avg": ("GPU %", ".0f"),
    "gpu/memory_util_avg": ("GPU memory %", ".0f"),
    "gpu/memory_used_peak_gb": ("GPU GB, peak", ".2f"),
    "process/cpu_cores": ("cores", ".2f"),
    "process/rss_peak_gb": ("RSS GB, peak", ".2f"),
}


def machine_figures(run: RunDir, tokens_per_second: float) -> dict[str, float]:
    """Return the known figures of ``COLUMNS`` by name, over all GPUs of the run.

    The first telemetry sample is skipped: the sampler takes it before the first step. A damaged
    telemetry file counts as empty, because a killed sampler must not prevent the table.
    """
    mfu = [row["mfu"] for row in _records(run.timing) if row.get("mfu") is not None]
    figures = {"tokens_per_second": tokens_per_second}
    figures |= {"mfu": median(mfu)} if mfu else {}
    if samples := _records(run.telemetry)[1:]:
        figures |= averages(samples) | _peaks(samples)
    return {name: figures[name] for name in COLUMNS if name in figures}


def over_seeds(by_seed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the seeds of the figures that every run has."""
    names = [name for name in COLUMNS if by_seed and all(name in figures for figures in by_seed)]
    return {name: fmean(figures[name] for figures in by_seed) for name in names}


def _peaks(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    used = [[gpu["memory_used_mib"] for gpu in sample["gpus"]] for sample in samples]
    totals = [sum(gpus) for gpus in used if gpus and None not in gpus]
    peaks = {"process/rss_peak_gb": max(s["rss_mib"] for s in samples) / _MIB_PER_GB}
    return peaks | ({"gpu/memory_used_peak_gb": max(totals) / _MIB_PER_GB} if totals else {})


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return [*read_json_lines(path)]
    except (OSError, ValueError):
        return []
