"""Runs in W&B's offline files, read with wandb's own reader."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.console import say
from lib.errors import PreflightError, Problem
from lib.modules import module_command
from lib.queries.contract import ANOTHER_COPY, FOLDER_ADVICE, History, RunName, merged, plain


class OfflineSource:
    """Implementation of ``lib.queries.contract.Source`` for W&B offline files.

    A resumed run has one file per start.
    """

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Read from ``folder``, which contains ``offline-run-*`` folders at any depth."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunName]:
        """Return the runs of ``project``, or all runs."""
        paths_by_run: dict[tuple[str, str, str], list[Path]] = {}
        for path in sorted(self._folder.glob("**/offline-run-*/*.wandb")):
            records, warning = _read(path)
            if warning:
                say("WARN", f"{path}: {warning}")
            run_record = next((r["run"] for r in records if r["type"] == "run"), None)
            if run_record and project in ("", run_record["project"]):
                name = run_record.get("display_name", run_record["run_id"])
                paths_by_run.setdefault(
                    (run_record["project"], name, run_record["run_id"]), []
                ).append(path)
        return [RunName(*names, key=paths) for names, paths in paths_by_run.items()]

    def config(self, run: RunName) -> dict[str, Any]:
        """Return the configuration, including later updates."""
        config: dict[str, Any] = {}
        for record in self._all(run):
            change = record["run"].get("config", {}) if record["type"] == "run" else {}
            change = record["config"] if record["type"] == "config" else change
            config.update(change.get("update", {}))
        return plain(config)

    def history(self, run: RunName) -> History:
        """Return every row."""
        rows = (record["history"] for record in self._all(run) if record["type"] == "history")
        return merged((row["step"]["num"], row["item"]) for row in rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """Return W&B's system samples."""
        return [record["stats"]["item"] for record in self._all(run) if record["type"] == "stats"]

    def _all(self, run: RunName) -> Iterator[dict[str, Any]]:
        for path in run.key:
            yield from _read(path)[0]


def _read(path: Path) -> tuple[Iterator[dict[str, Any]], str]:
    """Return the file's records, and wandb's warning if the file ends early, as after an
    interruption.

    Raises PreflightError if wandb cannot read the file or skips damaged records.
    """
    command = module_command("wandb", "leet", "inspect", "--json", str(path))
    done = subprocess.run(command, capture_output=True, text=True)
    message = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("wandb leet inspect: ")
    if done.returncode or "corrupt" in message:
        what = f"wandb cannot read the file: {message or 'no message'}"
        raise PreflightError(Problem(what, str(path), ANOTHER_COPY, code="tracker.damaged-store"))
    return map(json.loads, done.stdout.splitlines()), message
