"""Removal of run directories (``make clean-runs``). Imports no torch."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from gpt2.records.listing import Row, list_runs, select
from lib.console import confirm, log
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from lib.files import size_bytes
from lib.report.render import json_document
from lib.runs.lease import DEFAULT_SECONDS, take_lease
from lib.runs.run_dir import RunDir
from lib.units import format_size

SCHEMA_VERSION = 1
_REMOVED = ".removed-"


def remove_runs(runs: Sequence[Row], folder: Path) -> list[str]:
    """Remove run directories below ``folder``; return a reason for each one that stays.

    A directory gets a hidden name first, so an interrupted removal never leaves a part of a run. The
    next removal removes such leftovers.
    """
    for leftover in folder.glob(f"*/{_REMOVED}*"):
        shutil.rmtree(leftover)
    reasons = []
    for run in runs:
        path = folder / run["run"]
        if path.is_symlink():
            reasons.append(f"{run['run']}: a symbolic link; remove it by hand")
            continue
        try:
            with take_lease(RunDir(path), DEFAULT_SECONDS):
                hidden = path.with_name(f"{_REMOVED}{path.name}")
                path.rename(hidden)
        except ConfigError as error:
            reasons.append(f"{run['run']}: {error.problems[0].what}")
            continue
        shutil.rmtree(hidden)
    return reasons


def clean(folder: Path, where: str, *, yes: bool, json: bool) -> tuple[int, str]:
    """Log the runs that satisfy ``where`` with their sizes, and remove them after a confirmation.

    Returns the exit code and the text for stdout.
    """
    listed = select(list_runs(folder, replaced=True), where)
    sizes = {run["run"]: size_bytes(folder / run["run"]) for run in listed.runs}
    for run in listed.runs:
        name = run["run"]
        log("RUN", f"{format_size(sizes[name]):>12}  {run['state']:11}  {name}")
    total = f"{len(sizes)} run{'s' * (len(sizes) != 1)}, {format_size(sum(sizes.values()))}"
    reasons: list[str] = []
    if listed.runs:
        confirm(f"remove {total} below {folder}?", yes)
        reasons = remove_runs(listed.runs, folder)
    text = f"removed: {total}; left out: {len(reasons)}\n"
    if json:
        text = json_document(SCHEMA_VERSION, {"runs": sizes, "kept": reasons})
    for reason in reasons:
        log("WARN", f"left out: {reason}")
    return EXIT_FAILED if reasons else EXIT_DONE, text
