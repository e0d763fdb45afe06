"""Runs in W&B's own offline files, read by wandb's own reader."""

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
    """Keeps ``lib.queries.contract.Source``. A resumed run has a file for each start."""

    advice = FOLDER_ADVICE

    def __init__(self, folder: Path) -> None:
        """Any folder that holds ``offline-run-*`` folders, however deep."""
        self._folder = folder
        self.place = str(folder)

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``, or all."""
        found: dict[tuple[str, str, str], list[Path]] = {}
        for path in sorted(self._folder.glob("**/offline-run-*/*.wandb")):
            records, remark = _read(path)
            if remark:
                say("WARN", f"{path}: {remark}")
            told = next((r["run"] for r in records if r["type"] == "run"), None)
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
            yield from _read(path)[0]


def _read(path: Path) -> tuple[Iterator[dict[str, Any]], str]:
    """The file's records, and what wandb remarks: that it ends early, as after an interruption.

    PreflightError where wandb cannot read it, or leaves out what is damaged.
    """
    command = module_command("wandb", "leet", "inspect", "--json", str(path))
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("wandb leet inspect: ")
    if done.returncode or "corrupt" in said:
        what = f"wandb cannot read it: {said or 'no message'}"
        raise PreflightError(Problem(what, str(path), ANOTHER_COPY))
    return map(json.loads, done.stdout.splitlines()), said
