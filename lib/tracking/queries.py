"""Queries for the metrics, settings and GPU utilisation of a run, from any source."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.console import CommandLine
from lib.errors import PreflightError, Problem
from lib.report.render import json_document, text_lines
from lib.tracking.sources import (
    History,
    RunDirSource,
    RunRef,
    RunSource,
    WandbServerSource,
    find_run,
)

SOURCES = ("wandb", "local")
SCHEMA_VERSION = 2


def query_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser, described by ``text``, with the arguments that select a source."""
    parser = CommandLine(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--entity", default="", help="W&B user or team (default: the account's default entity)")
    add("--project", default="", help="project name in the tracker: kablate-<study>")
    add("--source", choices=SOURCES, default="wandb", help="W&B server, or run directories")
    add("--folder", type=Path, default=Path("results"), help="local runs (default: results)")
    add("--json", action="store_true", help="print one JSON document to stdout")
    return parser


def open_source(args: argparse.Namespace) -> RunSource:
    """Return the source that the arguments of ``query_parser`` select."""
    return RunDirSource(args.folder) if args.source == "local" else WandbServerSource(args.entity)


def query_run(description: str | None) -> tuple[RunSource, RunRef, bool]:
    """Parse the command line; return source, run and whether to print JSON. Raises ConfigError."""
    parser = query_parser(description)
    parser.add_argument("--run-name", required=True, help="name or tracker id of the run")
    args = parser.parse_args()
    source = open_source(args)
    return source, find_run(source, args.project, args.run_name), args.json


def query_keys(description: str | None) -> str:
    """Return all metrics, settings and system counters of the run of the command line."""
    source, run, as_json = query_run(description)
    metrics = {}
    for name, values in _series(source.history(run)).items():
        metrics[name] = {"count": len(values), "first": values[0], "last": values[-1]}
    config = dict(sorted(source.config(run).items()))
    # The source's own system stream.
    system = sorted({name for row in source.system(run) for name in row})
    if as_json:
        listed = [{"name": name, **values} for name, values in metrics.items()]
        document = {"run": run.name, "metrics": listed, "config": config, "system": system}
        return json_document(SCHEMA_VERSION, document)
    rows = [
        (name, f"{m['count']:,}", f"{m['first']:.6g}", f"{m['last']:.6g}")
        for name, m in metrics.items()
    ]
    parts = [
        (f"{len(metrics)} metrics (rows, first, last)", text_lines(rows, right=(1, 2, 3))),
        (f"{len(config)} settings", text_lines([(n, str(value)) for n, value in config.items()])),
    ]
    parts += [(f"{len(system)} counters of the source's own system stream", system)] * bool(system)
    lines = [f"run  {run.name}"]
    for heading, part in parts:
        lines += ["", heading, *(f"  {line}" for line in part)]
    return "\n".join(lines) + "\n"


_OVER_ALL = {
    "gpu/compute_util_avg": "%",
    "gpu/memory_util_avg": "%",
    "gpu/memory_used_avg_gb": "GB",
    "gpu/memory_used_total_gb": "GB",
    "gpu/memory_total_gb": "GB",
}
# Of each GPU.
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


def query_gpu_usage(description: str | None, *, full: bool) -> str:
    """Return the GPU usage of the run, ``full``: of each GPU too. Raises PreflightError if it has none."""
    source, run, as_json = query_run(description)
    series = _series(source.history(run))
    values = {name: series[name] for name in _OVER_ALL if name in series}
    if full:
        each = {name: v for name, v in series.items() if re.fullmatch(r"gpu/\d+/\w+", name)}
        values |= each or _from_system(source.system(run))
    units = {name: _UNITS.get(name.split("/")[-1], "") for name in values} | _OVER_ALL
    readings: list[dict[str, Any]] = [
        {"name": name, "unit": units[name], "n": len(v)}
        | {"mean": fmean(v), "lowest": min(v), "highest": max(v)}
        for name, v in values.items()
    ]
    if not readings:
        what = f"{run.name} has no GPU metric"
        advice = "CPU runs have none; scripts/inspect_wandb_keys.py lists the metrics of a run"
        raise PreflightError(Problem(what, next=advice, code="run.missing-metric"))
    if as_json:
        return json_document(SCHEMA_VERSION, {"run": run.name, "readings": readings})
    figures = ("mean", "lowest", "highest")
    rows = [(r["name"], *(f"{r[name]:.2f}" for name in figures), r["unit"]) for r in readings]
    lines = text_lines([("", *figures, ""), *rows], right=(1, 2, 3))
    return "\n".join([f"run  {run.name}", "", *lines]) + "\n"


def _series(history: History) -> dict[str, list[float]]:
    """Return metric → values in order of steps, sorted by metric."""
    names = sorted({name for row in history for name in row} - {"step"})
    return {name: [row[name] for row in history if name in row] for name in names}


def _from_system(rows: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the values of each GPU from W&B's system stream, for runs of other programs."""
    by_counter: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            match = re.fullmatch(r"gpu\.(\d+)\.(\w+)", name)
            if match and match[2] in _SYSTEM:
                by_counter.setdefault(f"gpu/{match[1]}/{_SYSTEM[match[2]]}", []).append(value)
    return dict(sorted(by_counter.items()))
