"""Queries for the metrics, settings and GPU utilisation of a run, from any source."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.console import CommandLine
from lib.errors import PreflightError, Problem
from lib.report.render import json_document, text_lines
from lib.tracking.sources import History, RunRef, RunSource, find_run, metric_names, metric_series

SOURCES = ("wandb", "offline", "trackio", "local")


def query_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with ``--source`` and the arguments that select a run.

    ``text`` is the description in the help.
    """
    parser = CommandLine(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--entity", default="", help="W&B user or team (default: the account's default entity)"
    )
    parser.add_argument(
        "--project", default="", help="project name in the tracker: kablate-<study>"
    )
    parser.add_argument(
        "--source",
        choices=SOURCES,
        default="wandb",
        help="W&B server, W&B offline files, trackio store, or run directories",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the last three sources (default: results; for trackio TRACKIO_DIR if set)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    return parser


def open_source(args: argparse.Namespace, results: Path = Path("results")) -> RunSource:
    """Return the selected source; without ``--folder``, files are searched below ``results``."""
    folder = args.folder or results
    if args.source == "wandb":
        from lib.tracking.sources import WandbServerSource

        return WandbServerSource(args.entity)
    if args.source == "offline":
        from lib.tracking.sources import WandbOfflineSource

        return WandbOfflineSource(folder)
    if args.source == "trackio":
        from lib.tracking.sources import TrackioSource

        # The folder that the tracker wrote to.
        env_folder = os.environ.get("TRACKIO_DIR")
        return TrackioSource(Path(env_folder) if env_folder and not args.folder else folder)
    from lib.tracking.sources import RunDirSource

    return RunDirSource(folder)


def run_from_args(args: argparse.Namespace) -> tuple[RunSource, RunRef]:
    """Return the source and the run of ``--run-name``. Raises ConfigError unless exactly one
    matches.
    """
    source = open_source(args)
    return source, find_run(source, args.project, args.run_name)


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MetricKey:
    """One metric: number of rows, first and last value."""

    name: str
    count: int
    first: float
    last: float


@dataclass(frozen=True)
class RunKeys:
    """All metrics, settings and system counters of a run."""

    run: str
    metrics: list[MetricKey]
    config: dict[str, Any]
    # Names in the source's own system stream.
    system: list[str]


def read_keys(source: RunSource, run: RunRef) -> RunKeys:
    """Return the keys of a run, read from its whole history."""
    history = source.history(run)
    metrics = []
    for name in metric_names(history):
        values = [value for _, value in metric_series(history, name)]
        metrics.append(MetricKey(name, len(values), values[0], values[-1]))
    system = sorted({name for row in source.system(run) for name in row})
    return RunKeys(run.name, metrics, dict(sorted(source.config(run).items())), system)


def keys_to_json(keys: RunKeys) -> str:
    """Return the keys as one JSON document with sorted keys."""
    return json_document(SCHEMA_VERSION, asdict(keys))


def keys_to_text(keys: RunKeys) -> str:
    """Return one line per metric, setting and system counter."""
    metrics = [(m.name, f"{m.count:,}", f"{m.first:.6g}", f"{m.last:.6g}") for m in keys.metrics]
    lines = [f"run  {keys.run}", "", f"{len(keys.metrics)} metrics (rows, first, last)"]
    lines += [f"  {line}" for line in text_lines(metrics, right=(1, 2, 3))]
    settings = [(name, str(value)) for name, value in keys.config.items()]
    lines += ["", f"{len(settings)} settings"]
    lines += [f"  {line}" for line in text_lines(settings)]
    if keys.system:
        lines += ["", f"{len(keys.system)} counters of the source's own system stream"]
        lines += [f"  {name}" for name in keys.system]
    return "\n".join(lines) + "\n"


GPU_SCHEMA_VERSION = 1
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
class CounterStats:
    """Statistics of a counter over the whole run."""

    name: str
    unit: str
    n: int
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class GpuUtilisation:
    """All readings of a run, and remarks on low utilisation."""

    run: str
    readings: list[CounterStats]
    remarks: list[str]


def read_gpu_utilisation(source: RunSource, run: RunRef, *, full: bool = False) -> GpuUtilisation:
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
    return GpuUtilisation(run.name, readings, _remarks(readings))


def query_gpu_usage(description: str | None, *, full: bool) -> str:
    """Parse the command line and return the GPU usage of the named run; ``full``: of each GPU."""
    parser = query_parser(description or "")
    parser.add_argument("--run-name", required=True, help="name or tracker id of the run")
    args = parser.parse_args()
    usage = read_gpu_utilisation(*run_from_args(args), full=full)
    return gpu_to_json(usage) if args.json else gpu_to_text(usage)


def gpu_to_json(use: GpuUtilisation) -> str:
    """Return the readings as one JSON document with sorted keys."""
    return json_document(GPU_SCHEMA_VERSION, asdict(use))


def gpu_to_text(use: GpuUtilisation) -> str:
    """Return one line per counter, then the remarks."""
    rows = [
        (r.name, f"{r.mean:.2f}", f"{r.lowest:.2f}", f"{r.highest:.2f}", r.unit)
        for r in use.readings
    ]
    lines = text_lines([("", "mean", "lowest", "highest", ""), *rows], right=(1, 2, 3))
    return "\n".join([f"run  {use.run}", "", *lines, "", *use.remarks]) + "\n"


def _each(history: History) -> list[CounterStats]:
    """Return readings of each GPU from this project's telemetry metrics."""
    names = [name for name in metric_names(history) if re.fullmatch(r"gpu/\d+/\w+", name)]
    return [_reading(n, _UNITS.get(n.split("/")[2], ""), _values(history, n)) for n in names]


def _from_system(rows: Sequence[dict[str, float]]) -> list[CounterStats]:
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
    return [value for _, value in metric_series(history, metric)]


def _reading(name: str, unit: str, values: Sequence[float]) -> CounterStats:
    if not values:
        return CounterStats(name, unit, 0, 0.0, 0.0, 0.0)
    return CounterStats(name, unit, len(values), fmean(values), min(values), max(values))


def _remarks(readings: Sequence[CounterStats]) -> list[str]:
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
