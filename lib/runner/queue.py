"""Queue of a command's runs: what each one needs, and which one this process trains next.

Several commands may work on the same runs, on one machine or on several that share the folder. Each
takes the next run that is neither done nor held by another (``lib.runs.lease``).
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from lib.console import log
from lib.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIME_LIMIT, ConfigError, Problem
from lib.files import canonical_json
from lib.json_files import RecordError
from lib.runs.lease import Lease, LeaseObserver, LeaseRecord, Observed
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, RunStatus, State, read_status
from lib.units import first_of, format_runs


class RunAction(Enum):
    """Action for one planned run, decided by the contents of its directory alone."""

    # Also by other code, if the user keeps its results.
    DONE = auto()
    # Started, resumed, or tried again.
    TRAIN = auto()
    # Old directory renamed, then trained from scratch.
    RESTART = auto()
    # Made by other code: the user decides.
    STALE = auto()


@dataclass(frozen=True)
class RunDecision:
    """A run, the action to take, and the changes since the run was made."""

    run: Run[Any]
    action: RunAction
    changes: Sequence[str] = ()
    # The status on which the decision is based.
    status: RunStatus | None = None


def decide(run: Run[Any], drift: Callable[[RunRecord], Sequence[str]], stale: str) -> RunDecision:
    """Return the action for ``run``; ``stale`` is stop, rerun or keep, for results of other code.

    A run that failed with other code is restarted in any case, since no result is lost.
    """
    record = RunRecord(RunDir(run.path))
    status = record.status
    if status is None:
        return RunDecision(run, RunAction.TRAIN)
    changes = drift(record)
    failed = status.state in (State.FAILED, State.INVALID)
    if changes and (failed or stale == "rerun"):
        action = RunAction.RESTART
    elif changes and stale != "keep":
        action = RunAction.STALE
    elif status.state is State.SUCCESS:
        action = RunAction.DONE
    else:
        action = RunAction.TRAIN
    return RunDecision(run, action, changes, status)


def require_matching_directories(runs: Sequence[Run[Any]]) -> None:
    """Raise ConfigError listing the run directories that are damaged or of another run."""
    records = [RunRecord(RunDir(run.path)) for run in runs]
    problems = [p for each in records if each.damage and (p := each.unfinished)]
    problems += [
        Problem(
            f"directory belongs to a different run (expected {run.label})",
            str(run.path),
            "move it away, or set OUTPUT_DIR to another folder",
            code="run.foreign-directory",
        )
        for run in runs
        if belongs_to_different_run(run)
    ]
    if problems:
        raise ConfigError(*problems)


STALE_ADVICE = (
    "type: make ON_STALE=rerun to train them again (old folders are kept), or\n"
    "        make ON_STALE=keep to keep and mark them (always: ON_STALE_KEEP=y)"
)


def stale_text(changes: Mapping[str, Sequence[str]]) -> str:
    """Return which runs are stale and what changed since, once for all runs.

    ``changes`` maps run labels to changes.
    """
    counts = Counter(change for each in changes.values() for change in each)
    shown = [
        change if count == len(changes) else f"{change} ({count} run{'s' * (count > 1)})"
        for change, count in counts.most_common()
    ]
    return f"{format_runs(list(changes))}: changed since: {first_of(shown)}"


def belongs_to_different_run(run: Run[Any]) -> bool:
    """Return whether the run directory was made with a different configuration."""
    try:
        identity = RunRecord(RunDir(run.path)).identity
    except RecordError:
        # A run that was killed before it started, or a damaged one: decide() reports its state.
        return False
    return canonical_json(identity) != canonical_json(run.config.identity())


def set_aside(run: RunDir) -> Path:
    """Rename the directory of a run to train again to ``….old-<time>`` and return the new path.

    Results are never deleted.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target, count = run.replaced(stamp), 1
    while target.exists():
        count += 1
        target = run.replaced(f"{stamp}-{count}")
    return run.path.rename(target)


# Least time between two searches of the queue that find nothing.
_SEARCH_SECONDS = 1.0


class RunQueue:
    """Runs of a command that wait, in their order; each is tried once, by whichever command."""

    def __init__(
        self,
        todo: Sequence[RunDecision],
        decide_again: Callable[[Run[Any]], RunDecision],
        lease_seconds: int,
    ) -> None:
        self._waiting = {decision.run.path: decision for decision in todo}
        self._decide = decide_again
        self._lease_seconds = lease_seconds
        self._observer = LeaseObserver()
        self._stops = {d.run.path: file_version(RunDir(d.run.path).stop_request) for d in todo}
        self._search_at = 0.0
        # Whether the last search found a run, so that there may be another.
        self._found = True
        # Runs in the queue that were not free at the last search, and their leases.
        self._held: list[tuple[LeaseRecord | None, Observed]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def holders(self) -> list[str]:
        return sorted({str(lease) for lease, _ in self._held})

    def may_become_free(self) -> bool:
        """Return whether a run waits that is free, or whose holder has not been seen alive yet."""
        unknown = any(known == "unknown" for _, known in self._held)
        return bool(self._waiting) and (self._found or unknown)

    def take(self) -> tuple[RunDecision, Lease | RunStatus] | None:
        """Take the next run that is free, under its lease, or that has ended without this process.

        None if there is neither at this moment.
        """
        if time.monotonic() < self._search_at:
            return None
        started, self._held = time.monotonic(), []
        for path, decision in tuple(self._waiting.items()):
            try:
                taken = self._take(decision)
            # A disk that has filled up since preflight fails this run, not the other active runs.
            except OSError as error:
                taken = decision, cannot_write(error)
            if taken is not None:
                del self._waiting[path]
                self._found = True
                return taken
        self._found = False
        self._search_at = time.monotonic() + max(_SEARCH_SECONDS, 10 * (time.monotonic() - started))
        return None

    def put_back(self, decision: RunDecision) -> None:
        self._waiting[decision.run.path] = decision

    def _take(self, decision: RunDecision) -> tuple[RunDecision, Lease | RunStatus] | None:
        run = RunDir(decision.run.path)
        lease, known = self._observer.look(run)
        # Read after the lease: whoever trains the run after this look has a higher one.
        status = read_status(run)
        if status is not None and status != decision.status:
            tried = status.state in (State.FAILED, State.INVALID, State.DAMAGED, State.SUCCESS)
            if tried or status.exit_code == EXIT_TIME_LIMIT:
                return decision, status
        if file_version(run.stop_request) not in (None, self._stops[run.path]):
            return decision, RunStatus(State.INTERRUPTED, EXIT_INTERRUPTED, "stop requested")
        if known != "free":
            self._held.append((lease, known))
            return None
        if status != decision.status:
            decision = self._decide(decision.run)
            if decision.action is RunAction.STALE:
                text = stale_text({decision.run.label: decision.changes})
                return decision, RunStatus(State.FAILED, EXIT_FAILED, text)
        run.path.mkdir(exist_ok=True)
        taken = Lease.take(run, self._lease_seconds, lease)
        if taken and decision.action is RunAction.RESTART:
            set_aside(run)
            log("RERUN", stale_text({decision.run.label: decision.changes}))
            run.path.mkdir()
            taken = Lease.take(run, self._lease_seconds, None)
        return (decision, taken) if taken else None


def cannot_write(error: OSError) -> RunStatus:
    """Return the status of a run whose directory cannot be written."""
    what = f"cannot write: {error.strerror}: {error.filename}"
    return RunStatus(State.FAILED, EXIT_FAILED, what)


def file_version(path: Path) -> tuple[int, int] | None:
    """Return a value that differs if ``path`` was written again; None if it does not exist.

    Detects a request since an earlier moment without comparing clocks.
    """
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns
