"""Sources of runs for queries: run directories, and a W&B server (wandb.ai, or WANDB_BASE_URL)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, PreflightError, Problem
from lib.files import sha256_file
from lib.json_files import RecordError
from lib.runs.run_dir import RunDir
from lib.tracking.reader import ReadCursor, RecordReader, best_validation_metrics, succeeded
from lib.tracking.trackers import TrackerMetadata

# One row per step, in order: metric → value, including "step".
History = list[dict[str, float]]


@dataclass(frozen=True)
class RunRef:
    """Identification of a run within a source."""

    project: str
    name: str
    # Assigned by the tracker; names are not unique.
    id: str
    # Handle that the source uses to read the run.
    key: Any = field(default=None, compare=False, repr=False)


class RunDirSource:
    """Run directories, in the folders of studies below ``folder``. Damage is a PreflightError."""

    advice = "choose another folder or project: --folder DIR, --project NAME"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``, or all runs if it is empty."""
        runs = map(RunDir, sorted(self._folder.glob("*/*-s*-*")))
        facts = [(run, _facts(run)) for run in runs if run.tracker_facts.exists()]
        found = [RunRef(each.project, each.name, each.id, run) for run, each in facts]
        return [run for run in found if project in ("", run.project)]

    def config(self, run: RunRef) -> dict[str, Any]:
        return sent_config(run.key)

    def history(self, run: RunRef) -> History:
        """Return every row that a tracker receives."""
        position = ReadCursor()
        with _readable(run.key):
            rows = list(RecordReader(run.key, position).new())
            if succeeded(run.key):
                rows.append((position.iteration, best_validation_metrics(run.key)))
            return _merged(rows)

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return an empty list: the history contains the machine metrics."""
        return []


# The server downsamples longer streams; this is ten days at one sample per ten seconds.
_MAX_SYSTEM_SAMPLES = 100_000


class WandbServerSource:
    """Runs on a W&B server; the API key is that of WANDB_API_KEY or of ``wandb login``."""

    advice = "choose another project: --project NAME, --entity NAME"

    def __init__(self, entity: str) -> None:
        """Connect as ``entity``; "" is the account's default. Raises PreflightError if unreachable."""
        # Importing wandb takes half a second and only this source needs it.
        import wandb

        self._errors = (wandb.errors.Error, wandb.errors.CommError, ValueError)
        with self._reachable():
            self._api = wandb.Api()
            self._entity = entity or self._api.default_entity
            self.place = f"{self._entity} at {self._api.settings['base_url']}"

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``. Raises ConfigError if it is empty."""
        if not project:
            what, advice = "a server query needs a project", "add --project NAME"
            raise ConfigError(Problem(what, next=advice, code="usage.missing-argument"))
        with self._reachable():
            runs = self._api.runs(f"{self._entity}/{project}")
            return [RunRef(project, run.name, run.id, run) for run in runs]

    def config(self, run: RunRef) -> dict[str, Any]:
        return _without_internal_fields(run.key.config)

    def history(self, run: RunRef) -> History:
        """Return every row, scanned without downsampling."""
        return _merged((row["_step"], row) for row in run.key.scan_history())

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return the samples of W&B's own system monitor."""
        rows = run.key.history(samples=_MAX_SYSTEM_SAMPLES, stream="system", pandas=False)
        rows = map(_without_internal_fields, rows)
        return [{name.removeprefix("system."): row[name] for name in row} for row in rows]

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            what, advice = f"W&B is unreachable: {reason}", "set WANDB_API_KEY, or WANDB_BASE_URL"
            raise PreflightError(Problem(what, next=advice, code="tracker.unreachable")) from error


RunSource = RunDirSource | WandbServerSource


def list_runs(source: RunSource, project: str) -> Sequence[RunRef]:
    """Return the runs of ``project`` ("": of all), sorted by name. Raises ConfigError if there is none."""
    runs = sorted(source.names(project), key=lambda run: run.name)
    if not runs:
        what = f"no run of {f'project {project}' if project else 'any project'} found"
        raise ConfigError(Problem(what, source.place, source.advice, code="run.not-found"))
    return runs


def find_run(source: RunSource, project: str, name: str) -> RunRef:
    """Return the run with the name or id ``name``. Raises ConfigError, with candidates, unless one matches."""
    runs = list_runs(source, project)
    matches = [run for run in runs if name in (run.name, run.id)]
    scope = f"project {project}" if project else "all projects"
    if not matches:
        names = ", ".join(dict.fromkeys(run.name for run in runs))
        what = f"no run named {name} in {scope} (available: {names})"
        advice = "choose one of them: --run-name NAME"
        raise ConfigError(Problem(what, next=advice, code="run.not-found"))
    if len(matches) > 1:
        candidates = ", ".join(f"{run.id} ({run.project})" for run in matches)
        what = f"{len(matches)} runs are named {name} in {scope}: {candidates}"
        advice = "select one by its id: --run-name ID"
        raise ConfigError(Problem(what, next=advice, code="run.ambiguous"))
    return matches[0]


def sent_config(run: RunDir) -> dict[str, Any]:
    """Return the configuration that trackers receive, with the entry of the end if it was sent."""
    config = _facts(run).config
    return config | ({"manifest_sha256": sha256_file(run.manifest)} if succeeded(run) else {})


def metric_series(history: History, metric: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of the metric, for rows that contain the metric."""
    return [(int(row["step"]), row[metric]) for row in history if metric in row]


def _merged(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> History:
    """Join the rows of each step, sorted by step; skip non-numeric and tracker-internal values."""
    by_step: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        row = by_step.setdefault(step, {"step": step})
        for name, value in _without_internal_fields(metrics).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and math.isfinite(value):
                # The server stores 0.0 as the integer 0.
                row[name] = float(value)
    return [by_step[step] for step in sorted(by_step)]


def _without_internal_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _facts(run: RunDir) -> TrackerMetadata:
    with _readable(run):
        return TrackerMetadata.read(run.tracker_facts)


@contextmanager
def _readable(run: RunDir) -> Iterator[None]:
    """Raise PreflightError if a record of the run is damaged."""
    try:
        yield
    except RecordError as error:
        what, where = error.problems[0].what, error.problems[0].where
        advice = f"type: make audit RUNS={run.path}"
        raise PreflightError(Problem(what, where, advice, code="run.damaged")) from error
