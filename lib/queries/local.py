"""Runs in their own directories: the record that trackers mirror."""

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
    """Keeps ``lib.queries.contract.Source``."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """``folder`` holds studies, and they their runs."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``, or all."""
        runs = [RunDir(path) for path in sorted(self._folder.glob("*/*-s*-*"))]
        facts = [(run, _facts(run)) for run in runs if run.tracker_facts.exists()]
        return [
            RunName(told.project, told.name, told.id, run)
            for run, told in facts
            if project in ("", told.project)
        ]

    def config(self, run: RunName) -> dict[str, Any]:
        """As trackers are told it, at the end too."""
        config = _facts(run.key).config
        if is_done(run.key):
            config["manifest_sha256"] = sha256(run.key.manifest)
        return config

    def history(self, run: RunName) -> History:
        """Every row that a tracker would be told."""
        position = Position()
        with _readable(run.key, run.key.metrics, run.key.timing, run.key.telemetry):
            rows = list(Feed(run.key, position).new())
            if is_done(run.key):
                rows.append((position.iteration, final_metrics(run.key)))
            return merged(rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """None: what the machine did stands in the history."""
        return []


def _facts(run: RunDir) -> Facts:
    with _readable(run, run.tracker_facts):
        return Facts.read(run.tracker_facts)


@contextmanager
def _readable(run: RunDir, *records: Path) -> Iterator[None]:
    """PreflightError where one of ``records`` is damaged, with the line if it is no JSON at all."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        where = next((found for path in records if (found := _no_json(path))), str(run.path))
        what = f"its records cannot be read: {type(error).__name__}: {error}"
        advice = f"type: make audit RUN={run.path}"
        raise PreflightError(Problem(what, where, advice)) from error


def _no_json(path: Path) -> str:
    """``path:line`` of the first line that is no JSON; "" without one."""
    if path.suffix != ".jsonl":
        return str(path)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)
        except ValueError:
            return f"{path}:{number}"
    return ""
