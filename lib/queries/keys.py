"""Metrics and settings recorded for a run."""

from dataclasses import asdict, dataclass
from typing import Any

from lib.files import indented_json
from lib.queries.contract import RunName, Source, metric_names, series

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MetricKey:
    """One metric: number of rows, first and last value."""

    name: str
    count: int
    first: float
    last: float


@dataclass(frozen=True)
class Keys:
    """All metrics, settings and system counters of a run."""

    run: str
    metrics: list[MetricKey]
    config: dict[str, Any]
    # Names in the source's own system stream.
    system: list[str]


def read_keys(source: Source, run: RunName) -> Keys:
    """Return the keys of a run, read from its whole history."""
    history = source.history(run)
    metrics = []
    for name in metric_names(history):
        values = [value for _, value in series(history, name)]
        metrics.append(MetricKey(name, len(values), values[0], values[-1]))
    system = sorted({name for row in source.system(run) for name in row})
    return Keys(run.name, metrics, dict(sorted(source.config(run).items())), system)


def keys_to_json(keys: Keys) -> str:
    """Return the keys as one JSON document with sorted keys."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(keys)}
    return indented_json(document)


def keys_to_text(keys: Keys) -> str:
    """Return one line per metric, setting and system counter."""
    width = max((len(metric.name) for metric in keys.metrics), default=0)
    lines = [f"run  {keys.run}", "", f"{len(keys.metrics)} metrics (rows, first, last)"]
    lines += [
        f"  {m.name:<{width}}  {m.count:>7,}  {m.first:>12.6g}  {m.last:>12.6g}"
        for m in keys.metrics
    ]
    width = max((len(name) for name in keys.config), default=0)
    lines += ["", f"{len(keys.config)} settings"]
    lines += [f"  {name:<{width}}  {value}" for name, value in keys.config.items()]
    if keys.system:
        lines += ["", f"{len(keys.system)} counters of the source's own system stream"]
        lines += [f"  {name}" for name in keys.system]
    return "\n".join(lines) + "\n"
