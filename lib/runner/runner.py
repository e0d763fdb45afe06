"""Runner of a plan: skips finished runs, resumes interrupted runs and continues after a failure.

A second runner in the same folder is refused while the first one is active.
"""

import itertools
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.console import say, verbose
from lib.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    ConfigError,
    KablateError,
    PreflightError,
    Problem,
    RunError,
)
from lib.plan import Run
from lib.repro.seal import end_run
from lib.rundir import RunDir
from lib.runner import locks
from lib.runner.decide import (
    Action,
    Decision,
    decide,
    describe_changes,
    move_aside,
    refuse_foreign,
    refuse_stale,
)
from lib.runner.display import Display, choose_display, say_end
from lib.runner.interrupts import Interrupts
from lib.runner.pool import Pool, Worker
from lib.runner.preflight import output_problems
from lib.runner.progress import StudyProgress
from lib.runner.target import Slot, Target
from lib.runner.team import Team
from lib.status import State, Status, read_status

# Interval between checks for Ctrl-C.
_TICK_SECONDS = 0.2
# Lock file in a study's folder, locked while its runs are active.
LOCK = ".lock"


@dataclass(frozen=True)
class Options:
    """Options of a runner invocation; none of them affects results."""

    # Concurrent runs; 0 uses every slot returned by preflight.
    jobs: int = 0
    # Handling of results of other code: "" stops, "rerun" or "keep".
    stale: str = ""
    # Continue after a failed run.
    keep_going: bool = True
    # Train with uncommitted code.
    dirty: bool = False


def run_all(
    runs: Sequence[Run[Any]], folder: Path, target: Target, pool: Pool, options: Options
) -> int:
    """Train ``runs``, all of them below ``folder``, to completion and return the exit code.

    Nothing is created before every check has passed. Raises ConfigError if another process is
    active in ``folder`` or if results are stale, PreflightError if this machine cannot train the
    runs, and RunError if a disk error stops a run that has started.
    """
    if options.stale not in ("", "rerun", "keep"):
        what = f"invalid value (expected rerun or keep, got {options.stale!r})"
        raise ConfigError(Problem(what, "STALE", code="usage.invalid-value"))
    locks.refuse_if_held(folder / LOCK)
    todo = _decide(runs, target, options)
    if not todo:
        say("DONE", f"nothing to run: {len(runs)} of {len(runs)} done")
        return EXIT_DONE
    pool.warm_up()
    slots = _preflight([decision.run for decision in todo], folder, target, pool, options)
    # Class of a disk error: PreflightError before the first run starts, RunError afterwards.
    failure: type[KablateError] = PreflightError
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locks.exclusive(folder / LOCK):
            # Another process may have finished runs since the first check.
            todo = _decide(runs, target, options, quiet=True)
            failure = RunError
            return Runner(todo, slots, target, pool, options.keep_going).run()
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        advice = "free some space or fix the permissions; to resume, type: make"
        problem = Problem(what, str(error.filename or folder), advice, code="disk.write-failed")
        raise failure(problem) from error


def _preflight(
    runs: Sequence[Run[Any]], folder: Path, target: Target, pool: Pool, options: Options
) -> Sequence[Slot]:
    """Return one slot per concurrent run.

    Raises PreflightError with all problems at once.
    """
    problems: list[Problem] = []
    slots: Sequence[Slot] = ()
    try:
        slots = target.preflight(pool, runs)
    except PreflightError as error:
        problems += error.problems
    jobs = options.jobs or max(1, len(slots))
    problems += output_problems(folder, target.bytes_needed(runs, jobs))
    if problems:
        raise PreflightError(*problems)
    return [slot for slot, _ in zip(itertools.cycle(slots), range(jobs))]


def _decide(
    runs: Sequence[Run[Any]], target: Target, options: Options, quiet: bool = False
) -> list[Decision]:
    """Return the decisions that require work; print the skipped runs."""
    refuse_foreign(runs)
    decisions = [decide(run, target.differences, options.stale) for run in runs]
    refuse_stale(decisions)
    for decision in decisions if not quiet else ():
        if decision.action is Action.SKIP:
            say("SKIP", f"{decision.run.label}   done")
        elif decision.action is Action.KEEP:
            changes = describe_changes(decision.changes)
            say("SKIP", f"{decision.run.label}   kept, {changes}")
    return [d for d in decisions if d.action not in (Action.SKIP, Action.KEEP)]


class Runner:
    """Scheduler that starts workers as slots become free and reports the outcome of each run."""

    def __init__(
        self,
        todo: Sequence[Decision],
        slots: Sequence[Slot],
        target: Target,
        pool: Pool,
        keep_going: bool,
    ) -> None:
        self._pending = deque(todo)
        self._target = target
        self._pool = pool
        self._keep_going = keep_going
        self._free = list(slots)
        self._active: dict[Worker, Team] = {}
        self._progress = StudyProgress([decision.run for decision in todo])
        self._results: dict[str, Status] = {}
        # Final message of each run, printed in the line that reports its outcome.
        self._final_messages: dict[str, str] = {}

    def run(self) -> int:
        """Run until nothing is pending or the user stops the runner; return the exit code."""
        try:
            with Interrupts() as interrupts, choose_display(self._progress) as display:
                while self._active or (self._pending and self._may_start(interrupts)):
                    while self._free and self._pending and self._may_start(interrupts):
                        self._start(self._pending.popleft())
                    for worker, event in self._pool.events(_TICK_SECONDS):
                        self._handle(worker, event, display, interrupts)
                    for team in set(self._active.values()):
                        self._pool.signal(signal.SIGKILL, team.overdue())
                    self._forward_interrupts(interrupts)
        finally:
            # No worker is left unless an error ended this loop.
            self._pool.signal(signal.SIGTERM)
        return self._conclude(interrupts)

    def _may_start(self, interrupts: Interrupts) -> bool:
        failed = self._progress.states[State.FAILED] > 0
        return not interrupts.stopped and (self._keep_going or not failed)

    def _start(self, decision: Decision) -> None:
        run = decision.run
        self._progress.begin(run)
        try:
            if decision.action is Action.RESTART:
                move_aside(RunDir(run.path))
                say("RERUN", f"{run.label}   {describe_changes(decision.changes)}")
            run.path.mkdir(exist_ok=True)
            self._target.prepare(run)
        # A disk that has filled up since preflight fails this run, not the other active runs.
        except OSError as error:
            message = f"cannot write: {error.strerror}: {error.filename}"
            self._record_end(run, Status(State.FAILED, EXIT_FAILED, message))
            return
        team = Team(run, self._free.pop(0), self._target, self._pool)
        self._active |= dict.fromkeys(team.workers, team)

    def _handle(
        self,
        worker: Worker,
        event: dict[str, Any] | None,
        display: Display,
        interrupts: Interrupts,
    ) -> None:
        run = self._active[worker].run
        if event is None:
            self._end(worker, interrupts)
        elif event["kind"] == "progress":
            self._progress.active[run.label].update(event)
            display.news(run)
        elif event["kind"] == "line" and event["tag"] == "DONE":
            self._final_messages[run.label] = event["text"]
        elif event["kind"] == "line":
            say(event["tag"], f"{run.label}   {event['text']}")
        elif event["kind"] == "failure":
            self._active[worker].failed(worker, event)
        elif event["kind"] == "traceback" and verbose():
            say("TRACE", event["text"])

    def _end(self, worker: Worker, interrupts: Interrupts) -> None:
        team = self._active.pop(worker)
        if not team.ended(worker):
            return
        self._free.append(team.slot)
        directory = RunDir(team.run.path)
        status = read_status(directory) or Status(State.RUNNING)
        if cause := team.cause(status):
            status = self._status_after_death(directory, status, cause, interrupts)
        self._record_end(team.run, status)

    def _record_end(self, run: Run[Any], status: Status) -> None:
        self._results[run.label] = status
        self._progress.end(run, status)
        message = self._final_messages.pop(run.label, status.message)
        say_end(run, status, message, self._progress, RunDir(run.path).logs)

    def _status_after_death(
        self, directory: RunDir, status: Status, cause: str, interrupts: Interrupts
    ) -> Status:
        """Return the status of a run whose workers died or that failed before it started."""
        progress = (status.iteration, status.iterations)
        if interrupts.stopped:
            # The last checkpoint is valid; status.json still contains RUNNING.
            return Status(State.INTERRUPTED, interrupts.exit_code, "stopped immediately", *progress)
        failed = Status(State.FAILED, EXIT_FAILED, cause, *progress)
        end_run(directory, failed)
        return failed

    def _forward_interrupts(self, interrupts: Interrupts) -> None:
        """Forward interrupts to the workers: the first saves and stops, the second kills."""
        for count in interrupts.news():
            if count == 1:
                if self._active:
                    say("STOP", "saving checkpoints; interrupt again to stop immediately")
                self._pool.signal(signal.SIGTERM)
            else:
                self._pool.signal(signal.SIGKILL)

    def _conclude(self, interrupts: Interrupts) -> int:
        states = [status.state for status in self._results.values()]
        failed = states.count(State.FAILED) + states.count(State.INVALID)
        unfinished = len(self._pending) + states.count(State.INTERRUPTED)
        summary = f"{states.count(State.SUCCESS)} done, {failed} failed, {unfinished} left"
        if unfinished or failed:
            purpose = "to resume" if unfinished else "to retry"
            say("STOP" if unfinished else "FAIL", f"{summary}; {purpose}, type: make")
        if interrupts.stopped:
            return interrupts.exit_code
        if failed:
            return EXIT_FAILED
        codes = [s.exit_code for s in self._results.values() if s.state is State.INTERRUPTED]
        return max(codes, default=EXIT_DONE)
