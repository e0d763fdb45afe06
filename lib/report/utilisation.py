"""Speed, memory and utilisation of runs, as columns of tables."""

import contextlib
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from lib.json_files import RecordError
from lib.runs.record import RunRecord, TelemetrySample
from lib.tracking.reader import mean_metrics

_MIB_PER_GB = 1024
# Name → (heading, number format), in table order. 1 GB is 2^30 bytes.
UTILISATION_COLUMNS: Mapping[str, tuple[str, str]] = {
    "tokens_per_second": ("tok/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "gpu/compute_util_avg": ("GPU %", ".0f"),
    "gpu/memory_util_avg": ("GPU memory %", ".0f"),
    "gpu/memory_used_peak_gb": ("GPU GB, peak", ".2f"),
    "process/cpu_cores": ("cores", ".2f"),
    "process/rss_peak_gb": ("RSS GB, peak", ".2f"),
}


def run_utilisation(record: RunRecord) -> dict[str, float]:
    """Return the known figures of ``UTILISATION_COLUMNS`` by name, over all GPUs of the run.

    The first telemetry sample is skipped: the sampler takes it before the first step. A damaged
    telemetry file counts as empty, because a killed sampler must not prevent the table.
    """
    mfu: list[float] = []
    samples: Sequence[TelemetrySample] = ()
    with contextlib.suppress(RecordError):
        mfu = [row.mfu for row in record.timings if row.mfu is not None]
    with contextlib.suppress(RecordError):
        samples = record.telemetry[1:]
    figures = {"tokens_per_second": record.summary.timing.tokens_per_second}
    figures |= {"mfu": median(mfu)} if mfu else {}
    figures |= mean_metrics(samples) | _peaks(samples) if samples else {}
    return {name: figures[name] for name in UTILISATION_COLUMNS if name in figures}


def mean_over_seeds(by_seed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the seeds of the figures that every run has."""
    names = [
        name
        for name in UTILISATION_COLUMNS
        if by_seed and all(name in figures for figures in by_seed)
    ]
    return {name: fmean(figures[name] for figures in by_seed) for name in names}


def _peaks(samples: Sequence[TelemetrySample]) -> dict[str, float]:
    used = [[gpu["memory_used_mib"] for gpu in sample.gpus] for sample in samples]
    totals = [sum(gpus) for gpus in used if gpus and None not in gpus]
    peaks = {"process/rss_peak_gb": max(s.rss_mib for s in samples) / _MIB_PER_GB}
    return peaks | ({"gpu/memory_used_peak_gb": max(totals) / _MIB_PER_GB} if totals else {})
