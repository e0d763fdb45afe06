"""Sources of runs for queries: run directories, and the stores of trackers.

W&B's offline files are read with wandb's own reader, trackio's store is one SQLite file per
project, and a W&B server is wandb.ai or the server in WANDB_BASE_URL.
"""

import json
import math
import sqlite3
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lib.console import log
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import sha256_file
from lib.json_files import RecordError
from lib.project import python_module_command
from lib.runs.run_dir import RunDir, State, read_status
from lib.tracking.reader import ReadCursor, RecordReader, best_validation_metrics
from lib.tracking.tracker import TrackerMetadata

# One row per step, in order: metric → value, including "step".
History = list[dict[str, float]]
# Prefix of the fields that trackers add to a row.
_INTERNAL_PREFIX = "_"
# Advice for an empty folder, and for a damaged store.
FOLDER_ADVICE = "choose another folder or project: --folder DIR, --project NAME"
DAMAGED_STORE_ADVICE = "query another copy: --source local, offline, trackio or wandb"


@dataclass(frozen=True)
class RunRef:
    """Identification of a run within a source."""

    project: str
    name: str
    # Assigned by the tracker; names are not unique.
    id: str
    # Handle that the source uses to read the run.
    key: Any = field(default=None, compare=False, repr=False)


class RunSource(Protocol):
    """A store of runs. Errors are PreflightError (exit code 3)."""

    # Description of the location, and advice if it is the wrong one.
    place: str
    advice: str

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``, or of all projects if it is empty."""

    def config(self, run: RunRef) -> dict[str, Any]:
        """Return the configuration that was sent to trackers."""

    def history(self, run: RunRef) -> History:
        """Return every row at full resolution."""

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return the rows of the source's own system metrics; empty if it has none."""


def list_runs(source: RunSource, project: str) -> Sequence[RunRef]:
    """Return the runs of ``project`` (all projects if empty), sorted by name.

    Raises ConfigError if there is none.
    """
    runs = sorted(source.names(project), key=lambda run: run.name)
    if not runs:
        what = f"no run of {f'project {project}' if project else 'any project'} found"
        raise ConfigError(Problem(what, source.place, source.advice, code="run.not-found"))
    return runs


def find_run(source: RunSource, project: str, name: str) -> RunRef:
    """Return the run with the name or id ``name``.

    Raises ConfigError if no run or more than one run matches; the message lists the candidates.
    """
    runs = list_runs(source, project)
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


def merge_rows(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> History:
    """Join the rows of each step, sorted by step; skip non-numeric and tracker-internal values."""
    by_step: dict[int, dict[str, float]] = {}
    for step, metrics in rows:
        row = by_step.setdefault(step, {"step": step})
        # Some stores write 0.0 as the integer 0.
        row |= {name: float(value) for name, value in metrics.items() if _is_metric(name, value)}
    return [by_step[step] for step in sorted(by_step)]


def metric_series(history: History, metric: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of the metric, for rows that contain the metric."""
    return [(int(row["step"]), row[metric]) for row in history if metric in row]


def metric_names(history: History) -> list[str]:
    """Return all metric names, sorted."""
    return sorted({name for row in history for name in row} - {"step"})


def without_internal_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the fields added by the tracker."""
    return {name: value for name, value in config.items() if not name.startswith(_INTERNAL_PREFIX)}


def _is_metric(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and not name.startswith(_INTERNAL_PREFIX)


class RunDirSource:
    """Implementation of ``lib.tracking.sources.RunSource`` for run directories."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Read from ``folder``, which contains study folders with run directories."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``, or all runs."""
        runs = [RunDir(path) for path in sorted(self._folder.glob("*/*-s*-*"))]
        facts = [(run, _facts(run)) for run in runs if run.tracker_facts.exists()]
        return [
            RunRef(run_facts.project, run_facts.name, run_facts.id, run)
            for run, run_facts in facts
            if project in ("", run_facts.project)
        ]

    def config(self, run: RunRef) -> dict[str, Any]:
        """Return the configuration sent to trackers, including the entries added at the end."""
        config = _facts(run.key).config
        if _has_ended(run.key):
            config["manifest_sha256"] = sha256_file(run.key.manifest)
        return config

    def history(self, run: RunRef) -> History:
        """Return every row that a tracker receives."""
        position = ReadCursor()
        with _readable(run.key):
            rows = list(RecordReader(run.key, position).new())
            if _has_ended(run.key):
                rows.append((position.iteration, best_validation_metrics(run.key)))
            return merge_rows(rows)

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return an empty list: the history contains the machine metrics."""
        return []


def _has_ended(run: RunDir) -> bool:
    """Return whether the entries of the end were sent."""
    status = read_status(run)
    return status is not None and status.state is State.SUCCESS


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


# Path of a W&B file, and its records of the run and its configuration.
_WandbFile = tuple[Path, list[dict[str, Any]]]


class WandbOfflineSource:
    """Implementation of ``lib.tracking.sources.RunSource`` for W&B offline files.

    A resumed run has one file per start.
    """

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Read from ``folder``, which contains ``offline-run-*`` folders at any depth."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``, or all runs."""
        # config() does not read the files again: each time starts a process.
        files_by_run: dict[tuple[str, str, str], list[_WandbFile]] = {}
        for path in sorted(self._folder.glob("**/offline-run-*/*.wandb")):
            records, warning = _read(path)
            if warning:
                log("WARN", f"{path}: {warning}")
            settings = [record for record in records if record["type"] in ("run", "config")]
            run_record = next((r["run"] for r in settings if r["type"] == "run"), None)
            if run_record and project in ("", run_record["project"]):
                name = run_record.get("display_name", run_record["run_id"])
                files_by_run.setdefault(
                    (run_record["project"], name, run_record["run_id"]), []
                ).append((path, settings))
        return [RunRef(*names, key=files) for names, files in files_by_run.items()]

    def config(self, run: RunRef) -> dict[str, Any]:
        """Return the configuration, including later updates."""
        config: dict[str, Any] = {}
        for _, settings in run.key:
            for record in settings:
                change = record["run"].get("config", {}) if record["type"] == "run" else {}
                change = record["config"] if record["type"] == "config" else change
                config.update(change.get("update", {}))
        return without_internal_fields(config)

    def history(self, run: RunRef) -> History:
        """Return every row."""
        rows = (record["history"] for record in self._all(run) if record["type"] == "history")
        return merge_rows((row["step"]["num"], row["item"]) for row in rows)

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return W&B's system samples."""
        return [record["stats"]["item"] for record in self._all(run) if record["type"] == "stats"]

    def _all(self, run: RunRef) -> Iterator[dict[str, Any]]:
        for path, _ in run.key:
            yield from _read(path)[0]


def _read(path: Path) -> tuple[Iterator[dict[str, Any]], str]:
    """Return the file's records, and wandb's warning if the file ends early, as after an
    interruption.

    Raises PreflightError if wandb cannot read the file or skips damaged records.
    """
    command = python_module_command("wandb", "leet", "inspect", "--json", str(path))
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    message = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("wandb leet inspect: ")
    if done.returncode or "corrupt" in message:
        what = f"wandb cannot read the file: {message or 'no message'}"
        raise PreflightError(
            Problem(what, str(path), DAMAGED_STORE_ADVICE, code="tracker.damaged-store")
        )
    return map(json.loads, done.stdout.splitlines()), message


class TrackioSource:
    """Implementation of ``lib.tracking.sources.RunSource`` for trackio's SQLite tables."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Read from ``folder``, which contains ``<project>.db`` files at any depth."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``, or all runs."""
        paths = sorted(self._folder.glob(f"**/{project or '*'}.db"))
        return [
            RunRef(path.stem, name, run_id, path)
            for path in paths
            for run_id, name in _query(path, "SELECT DISTINCT run_id, run_name FROM metrics")
        ]

    def config(self, run: RunRef) -> dict[str, Any]:
        """Return the stored configuration, with the text values of the last rows added."""
        config: dict[str, Any] = {}
        for (text,) in _query(run.key, "SELECT config FROM configs WHERE run_id = ?", run.id):
            config = json.loads(text)
        for _, metrics in self._rows(run):
            config |= {name: value for name, value in metrics.items() if isinstance(value, str)}
        return without_internal_fields(config)

    def history(self, run: RunRef) -> History:
        """Return every row."""
        return merge_rows(self._rows(run))

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return trackio's system samples; runs of this project have none."""
        rows = _query(run.key, "SELECT metrics FROM system_metrics WHERE run_id = ?", run.id)
        return [json.loads(text) for (text,) in rows]

    def _rows(self, run: RunRef) -> list[tuple[int, dict[str, Any]]]:
        query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
        return [(step, json.loads(text)) for step, text in _query(run.key, query, run.id)]


def _query(path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query. Raises PreflightError if the file is not a trackio store."""
    try:
        # Read only, because a tracker may be writing.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as store:
            return store.execute(query, values).fetchall()
    except sqlite3.Error as error:
        what = f"not a trackio store: {error}"
        raise PreflightError(
            Problem(what, str(path), DAMAGED_STORE_ADVICE, code="tracker.damaged-store")
        ) from error


# The server downsamples longer streams; this is ten days at one sample per ten seconds.
_MAX_SYSTEM_SAMPLES = 100_000


class WandbServerSource:
    """Implementation of ``lib.tracking.sources.RunSource`` for W&B servers.

    The API key is read from WANDB_API_KEY or from the file that ``wandb login`` writes.
    """

    advice = "choose another project: --project NAME, --entity NAME"

    def __init__(self, entity: str) -> None:
        """Connect as ``entity``, a user or team; "" selects the account's default entity.

        Raises PreflightError if the server is unreachable.
        """
        # Importing wandb takes half a second and only this source needs it.
        import wandb

        self._errors = (wandb.errors.Error, wandb.errors.CommError, ValueError)
        try:
            self._api = wandb.Api()
            self._entity = entity or self._api.default_entity
            self.place = f"{self._entity} at {self._api.settings['base_url']}"
        except self._errors as error:
            raise _unreachable(error) from error

    def names(self, project: str) -> Sequence[RunRef]:
        """Return the runs of ``project``. Raises ConfigError if ``project`` is empty."""
        if not project:
            raise ConfigError(
                Problem(
                    "a server query needs a project",
                    next="add --project NAME",
                    code="usage.missing-argument",
                )
            )
        path = f"{self._entity}/{project}"
        try:
            return [RunRef(project, run.name, run.id, run) for run in self._api.runs(path)]
        except self._errors as error:
            raise _unreachable(error) from error

    def config(self, run: RunRef) -> dict[str, Any]:
        """Return the configuration stored on the server."""
        return without_internal_fields(run.key.config)

    def history(self, run: RunRef) -> History:
        """Return every row, scanned without downsampling."""
        rows = ((row["_step"], row) for row in run.key.scan_history())
        return merge_rows(rows)

    def system(self, run: RunRef) -> list[dict[str, float]]:
        """Return W&B's system samples from the server, with the names of the offline files."""
        rows = run.key.history(samples=_MAX_SYSTEM_SAMPLES, stream="system", pandas=False)
        return [
            {
                name.removeprefix("system."): value
                for name, value in without_internal_fields(row).items()
            }
            for row in rows
        ]


def _unreachable(error: Exception) -> PreflightError:
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PreflightError(
        Problem(
            f"W&B is unreachable: {what}",
            next="set WANDB_API_KEY, or WANDB_BASE_URL",
            code="tracker.unreachable",
        )
    )
