"""What is to be done about each planned run: its own directory says, and nothing else does."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.plan import Run
from lib.rundir import RunDir
from lib.status import State, read_status

_NAMED_REASONS = 3


class Action(StrEnum):
    """What the runner does with a run."""

    # Finished by this code: nothing.
    SKIP = "done"
    # Finished, kept although code, torch or device are others now.
    KEEP = "done by other code"
    START = "new"
    RESUME = "to be continued"
    RETRY = "failed, to be tried again"
    # Moved aside, and started anew.
    RESTART = "to be trained again"
    # Begun or finished by other code, and nobody has said what to do about it.
    STALE = "made by other code"


# What differs between then and now, such as a source file or the torch version.
Differences = Callable[[RunDir], Sequence[str]]


@dataclass(frozen=True)
class Decision:
    """A run, what to do with it, and what has changed since it was made."""

    run: Run[Any]
    action: Action
    changes: Sequence[str] = ()


def decide(run: Run[Any], differences: Differences, stale: str) -> Decision:
    """Look at the run's directory. ``stale`` is what the user wants of old results: rerun or keep.

    A run that failed under other code is started anew without asking: there is nothing to lose.
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
    """ConfigError listing the directories that hold another run than the one that is planned."""
    problems = [
        Problem(
            f"holds another run than {run.label}",
            str(run.path),
            "move it away, or set OUTPUT_DIR to another folder",
        )
        for run in runs
        if holds_another(run)
    ]
    if problems:
        raise ConfigError(*problems)


def refuse_stale(decisions: Sequence[Decision]) -> None:
    """ConfigError listing the runs that were made by other code, and what to type."""
    stale = [d for d in decisions if d.action is Action.STALE]
    if not stale:
        return
    problems = [Problem(f"{d.run.label}: {describe_changes(d.changes)}") for d in stale]
    last = problems.pop()
    advice = (
        "type: make STALE=rerun, which trains them again and keeps the old directories,\n"
        "        or make STALE=keep, which keeps them and marks them in the table"
    )
    raise ConfigError(*problems, Problem(last.what, next=advice))


def describe_changes(changes: Sequence[str]) -> str:
    """The first few changes, and how many more there are."""
    named = ", ".join(changes[:_NAMED_REASONS])
    more = len(changes) - _NAMED_REASONS
    return f"changed since: {named}" + (f" and {more} more" if more > 0 else "")


def holds_another(run: Run[Any]) -> bool:
    """Whether the directory says that it was made with another configuration."""
    try:
        made = json.loads(RunDir(run.path).resolved_config.read_text())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        # A run that was killed before it began, or a damaged one: its state is told elsewhere.
        return False
    return canonical_json(made) != canonical_json(run.config.identity())


def move_aside(run: RunDir) -> Path:
    """Rename the run's directory to ``….old-<time>``, its new path; results are never deleted."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = run.path.with_name(f"{run.path.name}.old-{stamp}")
    count = 1
    while target.exists():
        count += 1
        target = run.path.with_name(f"{run.path.name}.old-{stamp}-{count}")
    return run.path.rename(target)
