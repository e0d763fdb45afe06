"""Runner of a plan: skips finished runs, resumes interrupted runs and continues after a failure.

Several runners may work on the runs of one folder: each trains those that are free, and waits for the
others.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from lib.console import is_verbose, log
from lib.env.gpu import VISIBLE
from lib.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    ConfigError,
    KablateError,
    PreflightError,
    Problem,
    RunError,
)
from lib.files import no_follow, remove_leftovers
from lib.runner import slurm
from lib.runner.display import SessionProgress, displayed
from lib.runner.hooks import start_command
from lib.runner.limits import JobTimer
from lib.runner.local import DeviceSlot, Job, JobEvent, LocalExecutor
from lib.runner.queue import (
    STALE_ADVICE,
    RunAction,
    RunDecision,
    RunQueue,
    cannot_write,
    decide,
    file_version,
    require_matching_directories,
    stale_text,
)
from lib.runner.signals import SignalCounter
from lib.runner.worker import append
from lib.runs.lease import DEFAULT_SECONDS, Lease, LeaseLost, current_holder
from lib.runs.manifest import finalize_run
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, RunStatus, State, read_status
from lib.units import format_runs

# Interval between checks for Ctrl-C.
_TICK_SECONDS = 0.2
# File in a study's folder: whoever trains the runs stops if it is written.
STOP_FILE = "stop"


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
    # RUN_TIME_LIMIT_SECONDS, STALL_LIMIT_SECONDS and LEASE_SECONDS.
    time_limit: int = 0
    stall_limit: int = 0
    lease_seconds: int = DEFAULT_SECONDS
    # Wait for the runs that other processes train; else end once nothing is left to take.
    wait: bool = True
    # Program and arguments to start after a run that ended in a state.
    commands: Mapping[State, Sequence[str]] = field(default_factory=dict)
    # The same to start once, when the study ends.
    study_command: Sequence[str] = ()
    # What to type to resume.
    command_line: str = "make"


class TrainingBackend(Protocol):
    """The training program, as the runner requires it."""

    executor: LocalExecutor

    def preflight(self, runs: Sequence[Run[Any]], jobs: int) -> Sequence[DeviceSlot]:
        """Return one slot per run that fits at a time; ``jobs`` of them are used, all if it is 0.

        Raises PreflightError with all problems at once. Writes nothing to the output folder.
        """

    def drift(self, record: RunRecord) -> Sequence[str]:
        """Return what changed since a run was made: code, library versions, device."""

    def lost_gpu(self, slot: DeviceSlot) -> str:
        """Return why a GPU of ``slot`` is unusable, after a run has failed on it; else ""."""

    def submit(self, run: Run[Any], slot: DeviceSlot, token: int) -> Job:
        """Write the inputs of a run to its directory, and start it; it adopts the lease ``token``."""


def run_all(
    runs: Sequence[Run[Any]], folder: Path, backend: TrainingBackend, options: RunnerOptions
) -> int:
    """Train ``runs``, all of them below ``folder``, to completion and return the exit code.

    Nothing is created before every check has passed. Raises ConfigError if results are stale,
    PreflightError if this machine cannot train the runs, and RunError if a disk error stops a run
    that has started.
    """
    stop = file_version(folder / STOP_FILE)
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
        remove_leftovers(folder)
        failure = RunError
        scheduler = RunScheduler(todo, slots, backend, options)
        return scheduler.run(lambda: file_version(folder / STOP_FILE) not in (None, stop))
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        advice = f"free some space or fix the permissions; to resume, type: {options.command_line}"
        problem = Problem(what, str(error.filename or folder), advice, code="disk.write-failed")
        raise failure(problem) from error


def _decide(
    runs: Sequence[Run[Any]], backend: TrainingBackend, options: RunnerOptions
) -> list[RunDecision]:
    """Return the decisions that require work; print the skipped runs. Raises ConfigError."""
    require_matching_directories(runs)
    decisions = [decide(run, backend.drift, options.stale) for run in runs]
    if stale := {d.run.label: d.changes for d in decisions if d.action is RunAction.STALE}:
        raise ConfigError(Problem(stale_text(stale), next=STALE_ADVICE, code="run.other-code"))
    done = {d.run.label: d.changes for d in decisions if d.action is RunAction.DONE}
    kept = {label: changes for label, changes in done.items() if changes}
    if current := [label for label in done if label not in kept]:
        log("SKIP", f"{format_runs(current)}   done")
    if kept:
        log("SKIP", f"{format_runs([*kept])}   stale, kept")
        log("STALE", stale_text(kept))
    return [d for d in decisions if d.action is not RunAction.DONE]


@dataclass
class _ActiveRun:
    """A run that is being trained here: its lease, its GPUs, its limits."""

    decision: RunDecision
    lease: Lease
    slot: DeviceSlot
    timer: JobTimer

    @property
    def run(self) -> Run[Any]:
        return self.decision.run


class RunScheduler:
    """Scheduler that submits runs as slots become free and reports the outcome of each run."""

    def __init__(
        self,
        todo: Sequence[RunDecision],
        slots: Sequence[DeviceSlot],
        backend: TrainingBackend,
        options: RunnerOptions,
    ) -> None:
        self._queue = RunQueue(
            todo, lambda run: decide(run, backend.drift, options.stale), options.lease_seconds
        )
        self._backend = backend
        self._options = options
        self._free = list(slots)
        self._active: dict[Job, _ActiveRun] = {}
        # Runs that have stalled once.
        self._stalled: set[Path] = set()
        # Facts about machine and configuration, which most runs have in common.
        self._reported: set[str] = set()
        self._progress = SessionProgress(len(todo))
        # Whether the wait for other processes has been logged.
        self._waiting_logged = False
        self._interrupts = SignalCounter()

    def run(self, stop_requested: Callable[[], bool]) -> int:
        """Run until nothing is left or the user stops the runner; return the exit code."""
        handled = 0
        try:
            with self._interrupts as interrupts, displayed(self._progress) as news:
                while self._active or (self._may_start() and self._waits()):
                    while self._free and self._may_start() and self._start_next():
                        pass
                    for job, event in self._backend.executor.events(_TICK_SECONDS):
                        if event is None:
                            self._end(self._active.pop(job), job)
                        else:
                            self._handle(self._active[job], event, news)
                    self._end_overdue()
                    if not interrupts.count and stop_requested():
                        interrupts.request()
                    # The first interrupt saves and stops, the second kills.
                    if interrupts.count > handled:
                        if not handled and self._active:
                            log("STOP", "saving checkpoints; interrupt again to stop immediately")
                        handled = interrupts.count
                        self._cancel(immediately=handled > 1)
        finally:
            # No job is left unless an error ended this loop.
            self._cancel()
        return self._conclude()

    def _may_start(self) -> bool:
        failed = self._progress.count(State.FAILED) and not self._options.keep_going
        return not self._interrupts.count and not failed and bool(self._free or self._active)

    def _waits(self) -> bool:
        """Return whether a run of the queue may still become free for this runner."""
        return bool(self._queue) and (self._options.wait or self._queue.may_become_free())

    def _cancel(self, *, immediately: bool = False) -> None:
        for job in self._active:
            job.cancel(immediately=immediately)

    def _start_next(self) -> bool:
        """Start the next free run of the queue; return whether one was started or had ended."""
        taken = self._queue.take()
        if taken is None:
            if self._queue.holders and not self._active and not self._waiting_logged:
                self._waiting_logged = True
                log("WAIT", f"{len(self._queue)} runs of {', '.join(self._queue.holders)}")
            return False
        decision, outcome = taken
        self._progress.begin(decision.run, _place(self._free[0]))
        if isinstance(outcome, RunStatus):
            self._record_end(decision.run, outcome, elsewhere=True)
        else:
            self._submit(decision, outcome)
        return True

    def _submit(self, decision: RunDecision, lease: Lease) -> None:
        """Start a run, whose lease is held, on a free slot."""
        try:
            job = self._backend.submit(decision.run, self._free[0], lease.token)
        # A disk that has filled up since preflight fails this run, not the other active runs.
        except OSError as error:
            lease.release()
            self._record_end(decision.run, cannot_write(error))
            return
        timer = JobTimer(self._options.time_limit, self._options.stall_limit)
        self._active[job] = _ActiveRun(decision, lease, self._free.pop(0), timer)

    def _end_overdue(self) -> None:
        """End the jobs that have exceeded a limit, with the reason and all stacks in their logs."""
        for job, active in self._active.items():
            if active.timer.poll():
                # A disk that is full is no reason to let a job go on.
                with contextlib.suppress(LeaseLost, OSError):
                    active.lease.require()
                    text = f"{active.timer.exceeded}; stacks from rank 0 on:\n"
                    append(RunDir(active.run.path).logs, text)
                job.end_overdue()

    def _handle(
        self, active: _ActiveRun, event: JobEvent, news: Callable[[Run[Any]], None]
    ) -> None:
        run = active.run
        active.timer.record(event)
        progress = self._progress.active[run.label]
        match event["kind"]:
            case "progress":
                progress.update(event)
                news(run)
            case "doing":
                progress.doing = event["text"]
            case "line" if event["tag"] == "DONE":
                # Printed in the line that reports the outcome.
                progress.result = event["text"]
            case "line":
                # The facts of a line ``fact | fact`` that no earlier run has reported.
                facts = event["text"].split(" | ")
                new = [fact for fact in facts if len(facts) == 1 or fact not in self._reported]
                self._reported.update(facts)
                if new:
                    log(event["tag"], f"{run.label}   {' | '.join(new)}")
            case "traceback" if is_verbose():
                log("TRACE", event["text"])

    def _end(self, active: _ActiveRun, job: Job) -> None:
        run, timer, interrupts = active.run, active.timer, self._interrupts
        self._free.append(active.slot)
        try:
            active.lease.require()
        except LeaseLost as error:
            self._put_back(active)
            log("STOP", f"{run.label}   {error.problems[0].what}")
            return
        status = read_status(RunDir(run.path)) or RunStatus(State.RUNNING)
        cause = timer.exceeded if status.state is not State.SUCCESS else ""
        first = run.path not in self._stalled and not interrupts.count
        if cause and timer.stalled and first:
            # Continued from its last checkpoint, under the same lease.
            self._stalled.add(run.path)
            _write_end(run, status, State.INTERRUPTED, cause)
            log("RETRY", f"{run.label}   {cause}; continued from its last checkpoint")
            self._submit(active.decision, active.lease)
            return
        cause = cause or job.failure_cause(status)
        if cause and interrupts.count:
            # The last checkpoint is valid; status.json still contains RUNNING.
            code, what = interrupts.exit_code, "stopped immediately"
            status = replace(status, state=State.INTERRUPTED, exit_code=code, message=what)
        elif cause:
            status = _write_end(run, status, State.FAILED, cause)
        if status.state is State.FAILED and (lost := self._backend.lost_gpu(active.slot)):
            # The run goes on on other GPUs. If it were FAILED, other processes would give it up.
            _write_end(run, status, State.INTERRUPTED, lost)
            active.lease.release()
            self._put_back(active)
            self._free = [free for free in self._free if free != active.slot]
            log("GPU", f"{_place(active.slot)} is not used any more: {lost}")
            return
        active.lease.release()
        self._record_end(run, status)

    def _put_back(self, active: _ActiveRun) -> None:
        self._progress.drop(active.run)
        self._queue.put_back(active.decision)

    def _record_end(self, run: Run[Any], status: RunStatus, *, elsewhere: bool = False) -> None:
        """Record and print the outcome of a run; ``elsewhere`` if another process trained it."""
        result = self._progress.active[run.label].result
        self._progress.end(run, status)
        ended = State.FAILED if status.state is State.INVALID else status.state
        what, *more = status.message.strip().split("\n")
        if ended is State.SUCCESS:
            done = "by another process" if elsewhere else result or what
            log("DONE", f"{run.label}   {done}   ({self._progress.describe()})")
        elif ended is State.INTERRUPTED:
            log("STOP", f"{run.label}   {what}")
        else:
            # The command that helps, if the error has one, is an indented line of its own.
            advice = "".join(f"; {line.strip()}" for line in more[:1] if line[:1].isspace())
            log("FAIL", f"{run.label}   {what}{advice}   log: {RunDir(run.path).logs}")
        if not elsewhere and (command := self._options.commands.get(ended)):
            start_command(command, run, status)

    def _conclude(self) -> int:
        progress, interrupts = self._progress, self._interrupts
        done, failed = progress.count(State.SUCCESS), progress.count(State.FAILED, State.INVALID)
        unfinished = len(self._queue) + progress.count(State.INTERRUPTED)
        if unfinished or failed:
            purpose = "to resume" if unfinished else "to retry"
            summary = f"{done} done, {failed} failed, {unfinished} left; {purpose}, type: "
            log("STOP" if unfinished else "FAIL", summary + self._options.command_line)
        if interrupts.count:
            return interrupts.exit_code
        # Without a slot, every GPU is lost.
        if failed or not self._free:
            return EXIT_FAILED
        codes = [s.exit_code for s in progress.ended if s.state is State.INTERRUPTED]
        return max(codes, default=EXIT_DONE)


def _write_end(run: Run[Any], status: RunStatus, state: State, cause: str) -> RunStatus:
    """Write the status of a run that its workers did not end themselves, and return it."""
    ended = replace(status, state=state, exit_code=EXIT_FAILED, message=cause)
    finalize_run(RunDir(run.path), ended)
    return ended


def _place(slot: DeviceSlot) -> str:
    """Return the GPUs of a slot, such as ``GPU 2,3``; "" on a CPU."""
    return "".join(f"GPU {slot[name]}" for name in VISIBLE & slot.keys())


def request_stop(runs: Collection[Run[Any]], folder: Path | None = None) -> int:
    """Request that other processes save and stop the active ones of ``runs``.

    With the study's ``folder``, every process that trains in it stops, on any machine, and its waiting
    SLURM jobs are cancelled. Raises ConfigError if no run is active and no job waits.
    """
    active = {
        run.label: (run, lease) for run in runs if (lease := current_holder(RunDir(run.path)))
    }
    requests = [RunDir(run.path).stop_request for run, _ in active.values()]
    if folder and active:
        requests = [folder / STOP_FILE]
    for path in requests:
        # Written again, so that its ``file_version`` changes.
        path.unlink(missing_ok=True)
        os.close(no_follow(path, os.O_WRONLY | os.O_CREAT))
    for label, (_, lease) in active.items():
        log("STOP", f"{label}   stop requested of {lease}; make resumes it")
    cancelled = slurm.cancel_waiting(folder) if folder else 0
    if cancelled:
        log("STOP", f"waiting SLURM jobs cancelled: {cancelled}")
    elif not active:
        what, where = "no matching run is active", str(folder or "RUNS")
        raise ConfigError(Problem(what, where, "type: make status", code="run.not-active"))
    return EXIT_DONE
