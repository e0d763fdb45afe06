"""Does what is missing of a plan: skips what is done, continues what was stopped, goes on after a
failure. A second runner in the same folder is refused while the first is at work."""

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

# How often a Ctrl-C is looked for.
_TICK_SECONDS = 0.2
# In a study's folder, held while its runs are at work.
LOCK = ".lock"


@dataclass(frozen=True)
class Options:
    """How to run: changes no result."""

    # Runs at a time; 0 takes as many as preflight gives slots.
    jobs: int = 0
    # What to do about results of other code: "" stops, "rerun" or "keep".
    stale: str = ""
    # Go on after a failed run.
    keep_going: bool = True
    # Train code that no commit names.
    dirty: bool = False


def run_all(
    runs: Sequence[Run[Any]], folder: Path, target: Target, pool: Pool, options: Options
) -> int:
    """Bring ``runs``, which all lie in ``folder``, to their end; the exit code.

    Nothing is created before every check has passed. Raises ConfigError when another process is at
    work in ``folder`` or results are stale, PreflightError when this machine cannot do it, RunError
    when the disk refuses a run that has begun.
    """
    if options.stale not in ("", "rerun", "keep"):
        raise ConfigError(Problem(f"{options.stale!r} is neither rerun nor keep", "STALE"))
    locks.refuse_if_held(folder / LOCK)
    todo = _decide(runs, target, options)
    if not todo:
        say("DONE", f"nothing to run: {len(runs)} of {len(runs)} done")
        return EXIT_DONE
    pool.warm_up()
    slots = _preflight([decision.run for decision in todo], folder, target, pool, options)
    # What the error of a disk that refuses is called: before the first run starts, and after.
    failure: type[KablateError] = PreflightError
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locks.exclusive(folder / LOCK):
            # Another process may have been at work until a moment ago.
            todo = _decide(runs, target, options, quiet=True)
            failure = RunError
            return Runner(todo, slots, target, pool, options.keep_going).run()
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        advice = "free some space or mend the permissions; to go on, type: make"
        raise failure(Problem(what, str(error.filename or folder), advice)) from error


def _preflight(
    runs: Sequence[Run[Any]], folder: Path, target: Target, pool: Pool, options: Options
) -> Sequence[Slot]:
    """A slot for each run that may train at a time. PreflightError with all that is in the way."""
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
    """What is left to do; says what is not."""
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
    """Starts workers as slots become free, and tells what became of each run."""

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
        # What a run said of its own end, to be shown in the line that ends it.
        self._last_words: dict[str, str] = {}

    def run(self) -> int:
        """Work until nothing is left or the user stops it; the exit code."""
        try:
            with Interrupts() as interrupts, choose_display(self._progress) as display:
                while self._active or (self._pending and self._may_start(interrupts)):
                    while self._free and self._pending and self._may_start(interrupts):
                        self._start(self._pending.popleft())
                    for worker, event in self._pool.events(_TICK_SECONDS):
                        self._handle(worker, event, display, interrupts)
                    for team in set(self._active.values()):
                        self._pool.signal(signal.SIGKILL, team.overdue())
                    self._pass_on(interrupts)
        finally:
            # Nobody is left at work unless an error ended this loop.
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
        # A disk that has filled up since preflight fails this run, not the others at work.
        except OSError as error:
            message = f"cannot write: {error.strerror}: {error.filename}"
            self._note_end(run, Status(State.FAILED, EXIT_FAILED, message))
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
            self._last_words[run.label] = event["text"]
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
            status = self._after_death(directory, status, cause, interrupts)
        self._note_end(team.run, status)

    def _note_end(self, run: Run[Any], status: Status) -> None:
        self._results[run.label] = status
        self._progress.end(run, status)
        words = self._last_words.pop(run.label, status.message)
        say_end(run, status, words, self._progress, RunDir(run.path).logs)

    def _after_death(
        self, directory: RunDir, status: Status, cause: str, interrupts: Interrupts
    ) -> Status:
        """The status of a run whose workers did not end orderly, or before it began."""
        came_to = (status.iteration, status.iterations)
        if interrupts.stopped:
            # Its last checkpoint is good; status.json still says RUNNING.
            return Status(State.INTERRUPTED, interrupts.exit_code, "stopped at once", *came_to)
        failed = Status(State.FAILED, EXIT_FAILED, cause, *came_to)
        end_run(directory, failed)
        return failed

    def _pass_on(self, interrupts: Interrupts) -> None:
        """Forward the user's wish to the workers: first to save and stop, then to stop at once."""
        for count in interrupts.news():
            if count == 1:
                if self._active:
                    say("STOP", "saving; once more stops at once")
                self._pool.signal(signal.SIGTERM)
            else:
                self._pool.signal(signal.SIGKILL)

    def _conclude(self, interrupts: Interrupts) -> int:
        states = [status.state for status in self._results.values()]
        failed = states.count(State.FAILED) + states.count(State.INVALID)
        left = len(self._pending) + states.count(State.INTERRUPTED)
        passed = f"{states.count(State.SUCCESS)} done, {failed} failed, {left} left"
        if left or failed:
            again = "to go on" if left else "to try again"
            say("STOP" if left else "FAIL", f"{passed}; {again}, type: make")
        if interrupts.stopped:
            return interrupts.exit_code
        if failed:
            return EXIT_FAILED
        codes = [s.exit_code for s in self._results.values() if s.state is State.INTERRUPTED]
        return max(codes, default=EXIT_DONE)
