"""Runs in trackio's store: one SQLite file for each project."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lib.errors import PreflightError, Problem
from lib.queries.contract import ANOTHER_COPY, FOLDER_ADVICE, History, RunName, merged, plain


class TrackioSource:
    """Keeps ``lib.queries.contract.Source``; reads the tables that ``trackio query`` shows."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Any folder that holds ``<project>.db``, however deep."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``, or all."""
        paths = sorted(self._folder.glob(f"**/{project or '*'}.db"))
        return [
            RunName(path.stem, name, run_id, path)
            for path in paths
            for run_id, name in _ask(path, "SELECT DISTINCT run_id, run_name FROM metrics")
        ]

    def config(self, run: RunName) -> dict[str, Any]:
        """As it was told, and what the last row adds."""
        found: dict[str, Any] = {}
        for (text,) in _ask(run.key, "SELECT config FROM configs WHERE run_id = ?", run.id):
            found = json.loads(text)
        for _, metrics in self._rows(run):
            found |= {name: value for name, value in metrics.items() if isinstance(value, str)}
        return plain(found)

    def history(self, run: RunName) -> History:
        """Every row."""
        return merged(self._rows(run))

    def system(self, run: RunName) -> list[dict[str, float]]:
        """trackio's own samples; this tree takes none with it."""
        rows = _ask(run.key, "SELECT metrics FROM system_metrics WHERE run_id = ?", run.id)
        return [json.loads(text) for (text,) in rows]

    def _rows(self, run: RunName) -> list[tuple[int, dict[str, Any]]]:
        query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
        return [(step, json.loads(text)) for step, text in _ask(run.key, query, run.id)]


def _ask(path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    """The rows. PreflightError where the file is no store of trackio's."""
    try:
        # Read only: a tracker may be writing.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as store:
            return store.execute(query, values).fetchall()
    except sqlite3.Error as error:
        what = f"not a store of trackio: {error}"
        raise PreflightError(Problem(what, str(path), ANOTHER_COPY)) from error
