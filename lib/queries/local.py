"""Runs in their own directories: the record that trackers mirror."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.queries.contract import History, RunName, merged
from lib.rundir import RunDir
from lib.files import sha256
from lib.status import State, read_status
from lib.tracking.contract import Facts
from lib.tracking.feed import Feed, Position, final_metrics


class LocalSource:
    """Keeps ``lib.queries.contract.Source``."""

    def __init__(self, folder: Path) -> None:
        """``folder`` holds studies, and they their runs."""
        self._folder = folder

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``, or all."""
        runs = [RunDir(path) for path in sorted(self._folder.glob("*/*-s*-*"))]
        facts = [(run, Facts.read(run.tracker_facts)) for run in runs if run.tracker_facts.exists()]
        return [
            RunName(told.project, told.name, told.id, run)
            for run, told in facts
            if project in ("", told.project)
        ]

    def config(self, run: RunName) -> dict[str, Any]:
        """As trackers are told it, at the end too."""
        config = Facts.read(run.key.tracker_facts).config
        if _is_done(run.key):
            config["manifest_sha256"] = sha256(run.key.manifest)
        return config

    def history(self, run: RunName) -> History:
        """Every row that a tracker would be told."""
        position = Position()
        rows = list(Feed(run.key, position).new())
        if _is_done(run.key):
            rows.append((position.iteration, final_metrics(run.key)))
        return merged(rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """None: what the machine did stands in the history."""
        return []


def _is_done(run: RunDir) -> bool:
    status = read_status(run)
    return status is not None and status.state is State.SUCCESS
