"""Runs read from their own directories, the records that trackers mirror."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.errors import PreflightError, Problem
from lib.files import sha256
from lib.queries.contract import FOLDER_ADVICE, History, RunName, merged
from lib.rundir import RunDir
from lib.status import is_done
from lib.tracking.contract import Facts
from lib.tracking.feed import Feed, Position, final_metrics


class LocalSource:
    """Implementation of ``lib.queries.contract.Source`` for run directories."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Read from ``folder``, which contains study folders with run directories."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunName]:
        """Return the runs of ``project``, or all runs."""
        runs = [RunDir(path) for path in sorted(self._folder.glob("*/*-s*-*"))]
        facts = [(run, _facts(run)) for run in runs if run.tracker_facts.exists()]
        return [
            RunName(run_facts.project, run_facts.name, run_facts.id, run)
            for run, run_facts in facts
            if project in ("", run_facts.project)
        ]

    def config(self, run: RunName) -> dict[str, Any]:
        """Return the configuration sent to trackers, including the entries added at the end."""
        config = _facts(run.key).config
        if is_done(run.key):
            config["manifest_sha256"] = sha256(run.key.manifest)
        return config

    def history(self, run: RunName) -> History:
        """Return every row that a tracker receives."""
        position = Position()
        with _readable(run.key, run.key.metrics, run.key.timing, run.key.telemetry):
            rows = list(Feed(run.key, position).new())
            if is_done(run.key):
                rows.append((position.iteration, final_metrics(run.key)))
            return merged(rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """Return an empty list: the history contains the machine metrics."""
        return []


def _facts(run: RunDir) -> Facts:
    with _readable(run, run.tracker_facts):
        return Facts.read(run.tracker_facts)


@contextmanager
def _readable(run: RunDir, *records: Path) -> Iterator[None]:
    """Raise PreflightError if one of ``records`` is damaged, with the first invalid line."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        where = next(
            (location for path in records if (location := _invalid_json_line(path))), str(run.path)
        )
        what = f"unreadable record: {type(error).__name__}: {error}"
        advice = f"type: make audit RUN={run.path}"
        raise PreflightError(Problem(what, where, advice, code="run.damaged")) from error


def _invalid_json_line(path: Path) -> str:
    """Return ``path:line`` of the first line that is not valid JSON; "" if all lines are valid."""
    if path.suffix != ".jsonl":
        return str(path)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)
        except ValueError:
            return f"{path}:{number}"
    return ""
