"""Runner of a plan: skips finished runs, resumes interrupted runs and continues after a failure.

A second runner in the same folder is refused while the first one is active.
"""

import itertools
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from lib.console import is_verbose, log
from lib.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    ConfigError,
    KablateError,
    PreflightError,
    Problem,
    RunError,
)
from lib.files import canonical_json, no_follow, remove_leftovers
from lib.json_files import RecordError
from lib.plan.run import PlannedRun
from lib.runner import locks
from lib.runner.display import ProgressDisplay, SessionProgress, choose_display, print_outcome
from lib.runner.hooks import start_command
from lib.runner.job import DeviceSlot, Executor, Job, JobEvent, JobLimits, JobTimer
from lib.runner.locks import SignalCounter
from lib.runs.finalize import finalize_run
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State, read_status

# Decide what to do with each planned run, based only on the contents of its run directory.


_MAX_CHANGES_SHOWN = 3


class RunAction(StrEnum):
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


@dataclass(frozen=True)
class RunDecision:
    """A run, the action to take, and the changes since the run was made."""

    run: PlannedRun[Any]
    action: RunAction
    changes: Sequence[str] = ()


def decide(
    run: PlannedRun[Any], drift: Callable[[RunDir], Sequence[str]], stale: str
) -> RunDecision:
    """Return the action for ``run``, based on its directory.

    ``drift`` returns what changed since a run was made, such as source files or the torch version.
    ``stale`` is the user's choice for results of other code: stop, rerun or keep. A run
    that failed with other code is restarted in any case, since no result is lost.
    """
    directory = RunDir(run.path)
    status = read_status(directory)
    if status is None:
        return RunDecision(run, RunAction.START)
    changes = drift(directory)
    failed = status.state in (State.FAILED, State.INVALID)
    if changes and (failed or stale == "rerun"):
        return RunDecision(run, RunAction.RESTART, changes)
    if changes and stale != "keep":
        return RunDecision(run, RunAction.STALE, changes)
    if status.state is State.SUCCESS:
        return RunDecision(run, RunAction.KEEP if changes else RunAction.SKIP, changes)
    return RunDecision(run, RunAction.RETRY if failed else RunAction.RESUME, changes)


def require_matching_directories(runs: Sequence[PlannedRun[Any]]) -> None:
    """Raise ConfigError listing the run directories with a damaged status or another run."""
    problems = [
        Problem(
            status.message,
            str(run.path),
            f"to train the run again (the old folder is kept), type: make rerun RUNS={run.variant.slug}",
            code="run.damaged",
        )
        for run in runs
        if (status := read_status(RunDir(run.path))) and status.state is State.DAMAGED
    ]
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


def require_fresh(decisions: Sequence[RunDecision]) -> None:
    """Raise ConfigError if runs were made by other code, with the make commands."""
    stale = {d.run.label: d.changes for d in decisions if d.action is RunAction.STALE}
    if stale:
        raise ConfigError(Problem(stale_text(stale), next=STALE_ADVICE, code="run.other-code"))


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
        for change, count in counts.most_common(_MAX_CHANGES_SHOWN)
    ]
    hidden = len(counts) - len(shown)
    more = f" and {len(changes) - 1} more runs" if len(changes) > 1 else ""
    text = f"{next(iter(changes))}{more}: changed since: {', '.join(shown)}"
    return text + (f" and {hidden} more" if hidden else "")


def belongs_to_different_run(run: PlannedRun[Any]) -> bool:
    """Return whether the run directory was made with a different configuration."""
    try:
        identity = RunRecord(RunDir(run.path)).config.identity
    except RecordError:
        # A run that was killed before it started, or a damaged one: decide() reports its state.
        return False
    return canonical_json(identity) != canonical_json(run.config.identity())


def archive_run(run: RunDir) -> Path:
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


# Interval between checks for Ctrl-C.
_TICK_SECONDS = 0.2
# Lock file in a study's folder, locked while its runs are active.
LOCK_FILE = ".lock"


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a runner invocation; none of them affects results."""

    # Concurrent runs; 0 uses every slot returned by preflight.
    jobs: int = 0
    # Handling of results of other code: stop, rerun or keep.
    stale: str = "stop"
    # Continue after a failed run.
    keep_going: bool = True
    # Train with uncommitted code.
    dirty: bool = False
    limits: JobLimits = field(default_factory=JobLimits)
    # Program and arguments to start after a run that ended in a state.
    commands: Mapping[State, Sequence[str]] = field(default_factory=dict)


class TrainingBackend(Protocol):
    """Interface of the training program, as the runner requires it."""

    def preflight(self, runs: Sequence[PlannedRun[Any]], jobs: int) -> Sequence[DeviceSlot]:
        """Check that ``runs`` can be trained here; return one slot per run that fits at a time.

        ``jobs`` is the requested number of concurrent runs, 0 for every slot. Raises PreflightError
        with all problems at once. Writes nothing to the output folder.
        """

    def drift(self, run: RunDir) -> Sequence[str]:
        """Return what changed since ``run`` was made: code, library versions, device."""

    def submit(self, run: PlannedRun[Any], slot: DeviceSlot, executor: Executor) -> Job:
        """Write the inputs of a run to its existing directory, and start the run on ``slot``."""


def run_all(
    runs: Sequence[PlannedRun[Any]],
    folder: Path,
    backend: TrainingBackend,
    executor: Executor,
    options: RunnerOptions,
) -> int:
    """Train ``runs``, all of them below ``folder``, to completion and return the exit code.

    Nothing is created before every check has passed. Raises ConfigError if another process is
    active in ``folder`` or if results are stale, PreflightError if this machine cannot train the
    runs, and RunError if a disk error stops a run that has started.
    """
    if options.stale not in ("stop", "rerun", "keep"):
        what = f"invalid value (expected stop, rerun or keep, got {options.stale!r})"
        raise ConfigError(Problem(what, "ON_STALE", code="usage.invalid-value"))
    locks.require_unlocked(folder / LOCK_FILE)
    todo = _decide(runs, backend, options)
    if not todo:
        log("DONE", f"nothing to run: {len(runs)} of {len(runs)} done")
        return EXIT_DONE
    slots = backend.preflight([decision.run for decision in todo], options.jobs)
    jobs = options.jobs or max(1, len(slots))
    slots = list(itertools.islice(itertools.cycle(slots), jobs))
    # Class of a disk error: PreflightError before the first run starts, RunError afterwards.
    failure: type[KablateError] = PreflightError
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locks.acquire_lock(folder / LOCK_FILE):
            remove_leftovers(folder)
            # Another process may have finished runs since the first check.
            todo = _decide(runs, backend, options, quiet=True)
            failure = RunError
            return RunScheduler(todo, slots, backend, executor, options).run()
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        advice = "free some space or fix the permissions; to resume, type: make"
        problem = Problem(what, str(error.filename or folder), advice, code="disk.write-failed")
        raise failure(problem) from error


def _decide(
    runs: Sequence[PlannedRun[Any]],
    backend: TrainingBackend,
    options: RunnerOptions,
    quiet: bool = False,
) -> list[RunDecision]:
    """Return the decisions that require work; print the skipped runs."""
    require_matching_directories(runs)
    decisions = [decide(run, backend.drift, options.stale) for run in runs]
    require_fresh(decisions)
    for decision in decisions if not quiet else ():
        if decision.action is RunAction.SKIP:
            log("SKIP", f"{decision.run.label}   done")
        elif decision.action is RunAction.KEEP:
            log("SKIP", f"{decision.run.label}   stale, kept")
    kept = {d.run.label: d.changes for d in decisions if d.action is RunAction.KEEP}
    if kept and not quiet:
        log("STALE", stale_text(kept))
    return [d for d in decisions if d.action not in (RunAction.SKIP, RunAction.KEEP)]


class RunScheduler:
    """Scheduler that submits runs as slots become free and reports the outcome of each run."""

    def __init__(
        self,
        todo: Sequence[RunDecision],
        slots: Sequence[DeviceSlot],
        backend: TrainingBackend,
        executor: Executor,
        options: RunnerOptions,
    ) -> None:
        self._pending = deque(todo)
        self._backend = backend
        self._executor = executor
        self._options = options
        self._free = list(slots)
        # Run and slot of each active job.
        self._active: dict[Job, tuple[PlannedRun[Any], DeviceSlot]] = {}
        # Timers of the active jobs within their limits, and the limits that the others exceeded.
        self._timers: dict[Job, JobTimer] = {}
        self._exceeded: dict[Job, str] = {}
        # Facts about machine and configuration, which most runs have in common.
        self._reported: set[str] = set()
        self._progress = SessionProgress([decision.run for decision in todo])
        self._results: dict[str, RunStatus] = {}
        # Final message of each run, printed in the line that reports its outcome.
        self._final_messages: dict[str, str] = {}

    def run(self) -> int:
        """Run until nothing is pending or the user stops the runner; return the exit code."""
        try:
            with SignalCounter() as interrupts, choose_display(self._progress) as display:
                while self._active or (self._pending and self._may_start(interrupts)):
                    while self._free and self._pending and self._may_start(interrupts):
                        self._start(self._pending.popleft())
                    for job, event in self._executor.events(_TICK_SECONDS):
                        self._handle(job, event, display, interrupts)
                    self._end_overdue()
                    self._forward_interrupts(interrupts)
        finally:
            # No job is left unless an error ended this loop.
            self._cancel()
        return self._conclude(interrupts)

    def _may_start(self, interrupts: SignalCounter) -> bool:
        failed = self._progress.states[State.FAILED] > 0
        return not interrupts.stopped and (self._options.keep_going or not failed)

    def _start(self, decision: RunDecision) -> None:
        run = decision.run
        self._progress.begin(run)
        slot = self._free.pop(0)
        try:
            if decision.action is RunAction.RESTART:
                archive_run(RunDir(run.path))
                log("RERUN", stale_text({run.label: decision.changes}))
            run.path.mkdir(exist_ok=True)
            job = self._backend.submit(run, slot, self._executor)
        # A disk that has filled up since preflight fails this run, not the other active runs.
        except OSError as error:
            self._free.insert(0, slot)
            message = f"cannot write: {error.strerror}: {error.filename}"
            self._record_end(run, RunStatus(State.FAILED, EXIT_FAILED, message))
            return
        self._active[job] = run, slot
        self._timers[job] = JobTimer(self._options.limits)

    def _end_overdue(self) -> None:
        """End the jobs that have exceeded a limit; each is a failed run that can be resumed."""
        for job, timer in tuple(self._timers.items()):
            if cause := timer.exceeded():
                del self._timers[job]
                self._exceeded[job] = cause
                job.end_overdue()

    def _handle(
        self,
        job: Job,
        event: JobEvent | None,
        display: ProgressDisplay,
        interrupts: SignalCounter,
    ) -> None:
        run, _ = self._active[job]
        if job in self._timers:
            self._timers[job].reset_silence()
        if event is None:
            self._end(job, interrupts)
        elif event["kind"] == "progress":
            self._progress.active[run.label].update(event)
            display.news(run)
        elif event["kind"] == "line" and event["tag"] == "DONE":
            self._final_messages[run.label] = event["text"]
        elif event["kind"] == "line":
            if text := self._news(event["text"]):
                log(event["tag"], f"{run.label}   {text}")
        elif event["kind"] == "traceback" and is_verbose():
            log("TRACE", event["text"])

    def _news(self, text: str) -> str:
        """Return the facts of a line ``fact | fact`` that no earlier run has reported."""
        facts = text.split(" | ")
        if len(facts) == 1:
            return text
        new = [fact for fact in facts if fact not in self._reported]
        self._reported.update(facts)
        return " | ".join(new)

    def _end(self, job: Job, interrupts: SignalCounter) -> None:
        run, slot = self._active.pop(job)
        self._timers.pop(job, None)
        self._free.append(slot)
        directory = RunDir(run.path)
        status = read_status(directory) or RunStatus(State.RUNNING)
        exceeded = self._exceeded.pop(job, "") if status.state is not State.SUCCESS else ""
        if cause := exceeded or job.failure_cause(status):
            status = self._status_after_death(directory, status, cause, interrupts)
        self._record_end(run, status)

    def _record_end(self, run: PlannedRun[Any], status: RunStatus) -> None:
        self._results[run.label] = status
        self._progress.end(run, status)
        message = self._final_messages.pop(run.label, status.message)
        print_outcome(run, status, message, self._progress, RunDir(run.path).logs)
        ended = State.FAILED if status.state is State.INVALID else status.state
        if command := self._options.commands.get(ended):
            start_command(command, run, status)

    def _status_after_death(
        self, directory: RunDir, status: RunStatus, cause: str, interrupts: SignalCounter
    ) -> RunStatus:
        """Return the status of a run whose workers died or that failed before it started."""
        progress = (status.iteration, status.iterations)
        if interrupts.stopped:
            # The last checkpoint is valid; status.json still contains RUNNING.
            return RunStatus(
                State.INTERRUPTED, interrupts.exit_code, "stopped immediately", *progress
            )
        failed = RunStatus(State.FAILED, EXIT_FAILED, cause, *progress)
        finalize_run(directory, failed)
        return failed

    def _forward_interrupts(self, interrupts: SignalCounter) -> None:
        """Forward interrupts to the jobs: the first saves and stops, the second kills."""
        for count in interrupts.news():
            if count == 1:
                if self._active:
                    log("STOP", "saving checkpoints; interrupt again to stop immediately")
                self._cancel()
            else:
                self._cancel(immediately=True)

    def _cancel(self, *, immediately: bool = False) -> None:
        for job in self._active:
            job.cancel(immediately=immediately)

    def _conclude(self, interrupts: SignalCounter) -> int:
        states = [status.state for status in self._results.values()]
        failed = states.count(State.FAILED) + states.count(State.INVALID)
        unfinished = len(self._pending) + states.count(State.INTERRUPTED)
        summary = f"{states.count(State.SUCCESS)} done, {failed} failed, {unfinished} left"
        if unfinished or failed:
            purpose = "to resume" if unfinished else "to retry"
            log("STOP" if unfinished else "FAIL", f"{summary}; {purpose}, type: make")
        if interrupts.stopped:
            return interrupts.exit_code
        if failed:
            return EXIT_FAILED
        codes = [s.exit_code for s in self._results.values() if s.state is State.INTERRUPTED]
        return max(codes, default=EXIT_DONE)


# Stopping active runs from another process; the runs save a checkpoint first.


def request_stop(runs: Sequence[PlannedRun[Any]]) -> int:
    """Create a stop request in the directory of each active run.

    Raises ConfigError if none of ``runs`` is active.
    """
    active = [run for run in runs if locks.lock_owner(RunDir(run.path).lock)]
    if not active:
        raise ConfigError(
            Problem("no matching run is active", "RUNS", "type: make status", code="run.not-active")
        )
    for run in active:
        os.close(no_follow(RunDir(run.path).stop_request, os.O_WRONLY | os.O_CREAT))
        log("STOP", f"{run.label}   stop requested; make resumes it")
    return EXIT_DONE


def interrupt_study(folder: Path) -> int:
    """Interrupt the process that trains in the study folder ``folder``.

    Raises ConfigError if there is no such process.
    """
    pid = locks.lock_owner(folder / LOCK_FILE)
    if not pid.isdecimal():
        what, advice = "no process is training in this folder", "type: make status"
        raise ConfigError(Problem(what, str(folder), advice, code="run.not-active"))
    os.kill(int(pid), signal.SIGINT)
    log("STOP", f"process {pid} stops after saving its runs; make resumes them")
    return EXIT_DONE
