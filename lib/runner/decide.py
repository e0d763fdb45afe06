"""Decide what to do with each planned run, based only on the contents of its run directory."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.plan import Run
from lib.rundir import RunDir
from lib.status import State, read_status

_MAX_CHANGES_SHOWN = 3


class Action(StrEnum):
    """Action of the runner for one planned run."""

    # Finished with the current code: nothing to do.
    SKIP = "done"
    # Finished, kept although code, torch version or device changed.
    KEEP = "done by other code"
    START = "new"
    RESUME = "to be continued"
    RETRY = "failed, to be tried again"
    # Old directory renamed, then trained from scratch.
    RESTART = "to be trained again"
    # Started or finished with other code, and STALE is not set.
    STALE = "made by other code"


# Returns what changed since a run was made, such as source files or the torch version.
Differences = Callable[[RunDir], Sequence[str]]


@dataclass(frozen=True)
class Decision:
    """A run, the action to take, and the changes since the run was made."""

    run: Run[Any]
    action: Action
    changes: Sequence[str] = ()


def decide(run: Run[Any], differences: Differences, stale: str) -> Decision:
    """Return the action for ``run``, based on its directory.

    ``stale`` is the user's choice for results of other code: "rerun" or "keep" ("" stops). A run
    that failed with other code is restarted in any case, since no result is lost.
    """
    directory = RunDir(run.path)
    status = read_status(directory)
    if status is None:
        return Decision(run, Action.START)
    changes = differences(directory)
    failed = status.state in (State.FAILED, State.INVALID)
    if changes and (failed or stale == "rerun"):
        return Decision(run, Action.RESTART, changes)
    if changes and stale != "keep":
        return Decision(run, Action.STALE, changes)
    if status.state is State.SUCCESS:
        return Decision(run, Action.KEEP if changes else Action.SKIP, changes)
    return Decision(run, Action.RETRY if failed else Action.RESUME, changes)


def refuse_foreign(runs: Sequence[Run[Any]]) -> None:
    """Raise ConfigError listing the run directories that contain a different run than planned."""
    problems = [
        Problem(
            f"directory belongs to a different run (expected {run.label})",
            str(run.path),
            "move it away, or set OUTPUT_DIR to another folder",
            code="run.foreign-directory",
        )
        for run in runs
        if holds_another(run)
    ]
    if problems:
        raise ConfigError(*problems)


def refuse_stale(decisions: Sequence[Decision]) -> None:
    """Raise ConfigError listing the runs that were made by other code, with the make commands."""
    stale = [d for d in decisions if d.action is Action.STALE]
    if not stale:
        return
    problems = [
        Problem(f"{d.run.label}: {describe_changes(d.changes)}", code="run.stale") for d in stale
    ]
    advice = (
        "type: make STALE=rerun to train these runs again (old directories are kept),\n"
        "        or make STALE=keep to keep the results and mark them in the table"
    )
    raise ConfigError(*problems[:-1], replace(problems[-1], next=advice))


def describe_changes(changes: Sequence[str]) -> str:
    """Return the first few changes as text, with the number of the remaining changes."""
    shown = ", ".join(changes[:_MAX_CHANGES_SHOWN])
    hidden = len(changes) - _MAX_CHANGES_SHOWN
    return f"changed since: {shown}" + (f" and {hidden} more" if hidden > 0 else "")


def holds_another(run: Run[Any]) -> bool:
    """Return whether the run directory was made with a different configuration."""
    try:
        identity = json.loads(RunDir(run.path).resolved_config.read_text())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        # A run that was killed before it started, or a damaged one: decide() reports its state.
        return False
    return canonical_json(identity) != canonical_json(run.config.identity())


def move_aside(run: RunDir) -> Path:
    """Rename the run directory to ``….old-<time>`` and return the new path.

    Results are never deleted.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = run.path.with_name(f"{run.path.name}.old-{stamp}")
    count = 1
    while target.exists():
        count += 1
        target = run.path.with_name(f"{run.path.name}.old-{stamp}-{count}")
    return run.path.rename(target)
