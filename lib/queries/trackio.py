"""Runs in trackio's store, one SQLite file per project."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lib.errors import PreflightError, Problem
from lib.queries.contract import ANOTHER_COPY, FOLDER_ADVICE, History, RunName, merged, plain


class TrackioSource:
    """Implementation of ``lib.queries.contract.Source`` for trackio's SQLite tables."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Read from ``folder``, which contains ``<project>.db`` files at any depth."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunName]:
        """Return the runs of ``project``, or all runs."""
        paths = sorted(self._folder.glob(f"**/{project or '*'}.db"))
        return [
            RunName(path.stem, name, run_id, path)
            for path in paths
            for run_id, name in _query(path, "SELECT DISTINCT run_id, run_name FROM metrics")
        ]

    def config(self, run: RunName) -> dict[str, Any]:
        """Return the stored configuration, with the text values of the last rows added."""
        config: dict[str, Any] = {}
        for (text,) in _query(run.key, "SELECT config FROM configs WHERE run_id = ?", run.id):
            config = json.loads(text)
        for _, metrics in self._rows(run):
            config |= {name: value for name, value in metrics.items() if isinstance(value, str)}
        return plain(config)

    def history(self, run: RunName) -> History:
        """Return every row."""
        return merged(self._rows(run))

    def system(self, run: RunName) -> list[dict[str, float]]:
        """Return trackio's system samples; runs of this project have none."""
        rows = _query(run.key, "SELECT metrics FROM system_metrics WHERE run_id = ?", run.id)
        return [json.loads(text) for (text,) in rows]

    def _rows(self, run: RunName) -> list[tuple[int, dict[str, Any]]]:
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
            Problem(what, str(path), ANOTHER_COPY, code="tracker.damaged-store")
        ) from error
