"""Runs in W&B's own offline files, read by wandb's own reader."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.errors import PreflightError, Problem
from lib.queries.contract import History, RunName, merged, plain


class OfflineSource:
    """Keeps ``lib.queries.contract.Source``. A resumed run has a file for each start."""

    def __init__(self, folder: Path) -> None:
        """Any folder that holds ``offline-run-*`` folders, however deep."""
        self._folder = folder

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``, or all."""
        found: dict[tuple[str, str, str], list[Path]] = {}
        for path in sorted(self._folder.glob("**/offline-run-*/*.wandb")):
            told = next((r["run"] for r in _records(path) if r["type"] == "run"), None)
            if told and project in ("", told["project"]):
                name = told.get("display_name", told["run_id"])
                found.setdefault((told["project"], name, told["run_id"]), []).append(path)
        return [RunName(*names, key=paths) for names, paths in found.items()]

    def config(self, run: RunName) -> dict[str, Any]:
        """With what was added later."""
        found: dict[str, Any] = {}
        for record in self._all(run):
            told = record["run"].get("config", {}) if record["type"] == "run" else {}
            told = record["config"] if record["type"] == "config" else told
            found.update(told.get("update", {}))
        return plain(found)

    def history(self, run: RunName) -> History:
        """Every row."""
        rows = (record["history"] for record in self._all(run) if record["type"] == "history")
        return merged((row["step"]["num"], row["item"]) for row in rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """W&B's own samples."""
        return [record["stats"]["item"] for record in self._all(run) if record["type"] == "stats"]

    def _all(self, run: RunName) -> Iterator[dict[str, Any]]:
        for path in run.key:
            yield from _records(path)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The file's records. PreflightError where wandb cannot read it."""
    command = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PreflightError(Problem(f"wandb cannot read it: {last}", str(path)))
    return map(json.loads, done.stdout.splitlines())
