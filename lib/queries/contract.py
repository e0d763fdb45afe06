"""What every source of runs tells, in one form, so that one question has one answer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lib.errors import ConfigError, Problem

# One row for each step, in their order: metric → number, "step" among them.
History = list[dict[str, float]]
# What trackers add to a row by themselves.
_THEIRS = "_"
# What to type of a folder that holds nothing, and of a copy that is damaged.
FOLDER_ADVICE = "name another folder or project: --folder DIR, --project NAME"
ANOTHER_COPY = "ask another copy: --source local, offline, trackio or wandb"


@dataclass(frozen=True)
class RunName:
    """How a source knows a run."""

    project: str
    name: str
    # The tracker's own; two runs may have one name.
    id: str
    # What the source needs to find it again.
    key: Any = field(default=None, compare=False, repr=False)


class Source(Protocol):
    """A place where runs are kept. Errors are PreflightError (exit 3)."""

    # In words, and what to type where it is another one.
    place: str
    advice: str

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``, or of all where it is empty."""

    def config(self, run: RunName) -> dict[str, Any]:
        """The configuration as it was told to trackers."""

    def history(self, run: RunName) -> History:
        """Every row, at full resolution."""

    def system(self, run: RunName) -> list[dict[str, float]]:
        """The source's own stream of the machine, row by row; empty where it has none."""


def runs_of(source: Source, project: str) -> Sequence[RunName]:
    """The runs of ``project``, or of all where it is empty, by name. ConfigError where none is."""
    found = sorted(source.names(project), key=lambda run: run.name)
    if not found:
        what = f"no run of {f'project {project}' if project else 'any project'} is there"
        raise ConfigError(Problem(what, source.place, source.advice))
    return found


def find(source: Source, project: str, name: str) -> RunName:
    """The run called ``name``, or whose id that is.

    ConfigError with the names that there are, or with the candidates where several have it.
    """
    known = runs_of(source, project)
    found = [run for run in known if name in (run.name, run.id)]
    if len(found) == 1:
        return found[0]
    where = f"project {project}" if project else "all projects"
    if not found:
        names = ", ".join(dict.fromkeys(run.name for run in known))
        what = f"no run is called {name} in {where}; there are: {names}"
        raise ConfigError(Problem(what, next="name one of them: --run-name NAME"))
    candidates = ", ".join(f"{run.id} ({run.project})" for run in found)
    what = f"{len(found)} runs are called {name} in {where}: {candidates}"
    raise ConfigError(Problem(what, next="name one by its id: --run-name ID"))


def merged(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> History:
    """Rows of one step joined, in the order of steps; what is no number, or the tracker's, left out."""
    found: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        row = found.setdefault(step, {"step": step})
        # Some stores write 0.0 as 0.
        row |= {name: float(value) for name, value in metrics.items() if _is_metric(name, value)}
    return [found[step] for step in sorted(found)]


def series(history: History, metric: str) -> list[tuple[int, float]]:
    """(step, value) wherever the metric stands."""
    return [(int(row["step"]), row[metric]) for row in history if metric in row]


def metric_names(history: History) -> list[str]:
    """All of them, sorted."""
    return sorted({name for row in history for name in row} - {"step"})


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what the tracker added."""
    return {name: value for name, value in config.items() if not name.startswith(_THEIRS)}


def _is_metric(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and not name.startswith(_THEIRS)
