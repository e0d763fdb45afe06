"""Worker process: trains one run in a fresh process forked from a server with torch loaded.

A worker exits cleanly (exit code 0) after writing the run status, whether or not the run succeeded.
Any other exit means that the worker died. If the parent disappears, the worker saves and stops.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from lib.errors import EXIT_FAILED, KablateError
from lib.runner import locks
from lib.runner.locks import SIGNALS
from lib.runs.finalize import finalize_run
from lib.runs.run_dir import RunDir, RunStatus, State, is_done, read_status


@dataclass(frozen=True)
class WorkerJob:
    """Arguments of a worker for one run.

    The worker calls ``function(run_dir, build_dir, report, stop, **arguments)``.
    """

    # "module:function"
    function: str
    run_dir: Path
    build_dir: Path
    environment: Mapping[str, str]
    arguments: Mapping[str, Any]
    # Rank among the workers of the run; rank 0 takes the lock and writes the status.
    rank: int = 0


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the stop signals; a process started inside keeps them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_function(name: str) -> Callable[..., Any]:
    """Return the function named by ``module:function``."""
    module, function = name.split(":")
    target: Callable[..., Any] = vars(import_module(module))[function]
    return target


class StopSignal:
    """Stop condition of a run: SIGTERM was received, or the parent process is gone.

    SIGTERM may arrive twice, sent to the process group and by the parent; repeated signals have no
    further effect. The parent sends SIGKILL to stop a worker immediately.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._requested = False
        self._orphaned = False
        # A terminal sends Ctrl-C to every process; only the parent handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def __call__(self) -> bool:
        # The parent never writes: a readable pipe has been closed.
        if not self._orphaned and self._pipe.poll():
            self._orphaned = True
        return self._requested or self._orphaned

    def send(self, event: Mapping[str, Any]) -> None:
        """Send an event to the parent if the parent is still alive."""
        if self._orphaned:
            return
        try:
            self._pipe.send(dict(event))
        except (BrokenPipeError, ConnectionResetError):
            self._orphaned = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True


def train_worker(job: WorkerJob, pipe: Connection) -> None:
    """Train one run under its lock and redirect output to the run's log."""
    stop = StopSignal(pipe)
    os.environ.update(job.environment)
    run = RunDir(job.run_dir)
    if job.rank:
        # Other ranks wait for rank 0, which waits for the lock.
        _run_job(job, run, stop)
        return
    with locks.wait_for_lock(run.lock, stop) as locked:
        # Another process may have finished the run during the wait.
        if locked and not is_done(run):
            _run_job(job, run, stop)


def call_worker(function: str, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Call a function and send its result, or the problems of the error it raised."""
    stop = StopSignal(pipe)
    try:
        event = {"kind": "result", "value": find_function(function)(*arguments)}
    except KablateError as error:
        event = {"kind": "error", "class": type(error), "problems": tuple(error.problems)}
    stop.send(event)


def generate_worker(function: str, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Send every value of a generator, or the problems of the error it raised."""
    stop = StopSignal(pipe)
    try:
        for value in find_function(function)(*arguments):
            stop.send({"kind": "result", "value": value})
            if stop():
                return
    except KablateError as error:
        stop.send({"kind": "error", "class": type(error), "problems": tuple(error.problems)})


def _run_job(job: WorkerJob, run: RunDir, stop: StopSignal) -> None:
    _redirect_output(run.logs)
    # kill -USR1 writes the stack of each thread to the log; the run continues.
    faulthandler.register(signal.SIGUSR1)
    with _Outcome(run, stop, job.rank):
        function = find_function(job.function)
        function(job.run_dir, job.build_dir, stop.send, stop, **job.arguments)


class _Outcome:
    """Context that turns any error of a run into a FAILED status at the process boundary.

    Errors of ranks other than 0 are sent to the parent, which monitors all ranks.
    """

    def __init__(self, run: RunDir, stop: StopSignal, rank: int) -> None:
        self._run = run
        self._stop = stop
        self._rank = rank

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return True
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        sys.stderr.flush()
        self._stop.send({"kind": "traceback", "text": text})
        expected = isinstance(error, KablateError)
        code = error.exit_code if isinstance(error, KablateError) else EXIT_FAILED
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        # The monotonic clock is shared by all processes: the first failure is the cause.
        self._stop.send({"kind": "failure", "message": message, "at": time.monotonic()})
        if self._rank:
            return True
        before = read_status(self._run) or RunStatus(State.RUNNING)
        finalize_run(
            self._run,
            RunStatus(State.FAILED, code, message, before.iteration, before.iterations),
        )
        return True


def _redirect_output(path: Path) -> None:
    """Redirect stdout and stderr, including those of libraries and child processes, to the log."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
