"""What a finished run took of its machine, from the samples and timings beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lib.files import read_json_lines
from lib.rundir import RunDir
from lib.telemetry.metrics import averages

_MIB_PER_GB = 1024
# Name → heading and form, in the order of the table. GB are 2^30 bytes.
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
    """Name of ``COLUMNS`` → figure, of all GPUs of the run together; what is not known is absent.

    Of the samples after the first, which is taken before the first step. A sampler that was killed
    may have left a damaged file, for which nobody should lose a table: it counts as none.
    """
    speeds = [row["mfu"] for row in _records(run.timing) if row.get("mfu") is not None]
    found = {"tokens_per_second": tokens_per_second}
    found |= {"mfu": median(speeds)} if speeds else {}
    if samples := _records(run.telemetry)[1:]:
        found |= averages(samples) | _peaks(samples)
    return {name: found[name] for name in COLUMNS if name in found}


def over_seeds(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the figures that every run has."""
    names = [name for name in COLUMNS if found and all(name in each for each in found)]
    return {name: fmean(each[name] for each in found) for name in names}


def _peaks(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    used = [[gpu["memory_used_mib"] for gpu in sample["gpus"]] for sample in samples]
    known = [sum(gpus) for gpus in used if gpus and None not in gpus]
    peaks = {"process/rss_peak_gb": max(s["rss_mib"] for s in samples) / _MIB_PER_GB}
    return peaks | ({"gpu/memory_used_peak_gb": max(known) / _MIB_PER_GB} if known else {})


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return [*read_json_lines(path)]
    except (OSError, ValueError):
        return []
