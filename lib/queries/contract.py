"""The common interface of all sources of runs, and helpers for their rows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lib.errors import ConfigError, Problem

# One row per step, in order: metric → value, including "step".
History = list[dict[str, float]]
# Prefix of the fields that trackers add to a row.
_INTERNAL_PREFIX = "_"
# Advice for an empty folder, and for a damaged store.
FOLDER_ADVICE = "choose another folder or project: --folder DIR, --project NAME"
ANOTHER_COPY = "query another copy: --source local, offline, trackio or wandb"


@dataclass(frozen=True)
class RunName:
    """Identification of a run within a source."""

    project: str
    name: str
    # Assigned by the tracker; names are not unique.
    id: str
    # Handle that the source uses to read the run.
    key: Any = field(default=None, compare=False, repr=False)


class Source(Protocol):
    """A store of runs. Errors are PreflightError (exit code 3)."""

    # Description of the location, and advice if it is the wrong one.
    place: str
    advice: str

    def names(self, project: str) -> Sequence[RunName]:
        """Return the runs of ``project``, or of all projects if it is empty."""

    def config(self, run: RunName) -> dict[str, Any]:
        """Return the configuration that was sent to trackers."""

    def history(self, run: RunName) -> History:
        """Return every row at full resolution."""

    def system(self, run: RunName) -> list[dict[str, float]]:
        """Return the rows of the source's own system metrics; empty if it has none."""


def runs_of(source: Source, project: str) -> Sequence[RunName]:
    """Return the runs of ``project`` (all projects if empty), sorted by name.

    Raises ConfigError if there is none.
    """
    runs = sorted(source.names(project), key=lambda run: run.name)
    if not runs:
        what = f"no run of {f'project {project}' if project else 'any project'} found"
        raise ConfigError(Problem(what, source.place, source.advice, code="run.not-found"))
    return runs


def find(source: Source, project: str, name: str) -> RunName:
    """Return the run with the name or id ``name``.

    Raises ConfigError if no run or more than one run matches; the message lists the candidates.
    """
    runs = runs_of(source, project)
    matches = [run for run in runs if name in (run.name, run.id)]
    if len(matches) == 1:
        return matches[0]
    scope = f"project {project}" if project else "all projects"
    if not matches:
        names = ", ".join(dict.fromkeys(run.name for run in runs))
        what = f"no run named {name} in {scope} (available: {names})"
        advice = "choose one of them: --run-name NAME"
        raise ConfigError(Problem(what, next=advice, code="run.not-found"))
    candidates = ", ".join(f"{run.id} ({run.project})" for run in matches)
    what = f"{len(matches)} runs are named {name} in {scope}: {candidates}"
    advice = "select one by its id: --run-name ID"
    raise ConfigError(Problem(what, next=advice, code="run.ambiguous"))


def merged(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> History:
    """Join the rows of each step, sorted by step; skip non-numeric and tracker-internal values."""
    by_step: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        row = by_step.setdefault(step, {"step": step})
        # Some stores write 0.0 as the integer 0.
        row |= {name: float(value) for name, value in metrics.items() if _is_metric(name, value)}
    return [by_step[step] for step in sorted(by_step)]


def series(history: History, metric: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of the metric, for rows that contain the metric."""
    return [(int(row["step"]), row[metric]) for row in history if metric in row]


def metric_names(history: History) -> list[str]:
    """Return all metric names, sorted."""
    return sorted({name for row in history for name in row} - {"step"})


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the fields added by the tracker."""
    return {name: value for name, value in config.items() if not name.startswith(_INTERNAL_PREFIX)}


def _is_metric(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and not name.startswith(_INTERNAL_PREFIX)
