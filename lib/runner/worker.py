"""The worker's side: one run in one fresh process, forked from a server that has torch loaded.

A worker ends orderly (exit code 0) with the run's status on the disk, whatever became of the run.
Any other end means that it died. Once nobody reads its events any more, it saves and stops.
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
from lib.repro.seal import end_run
from lib.rundir import RunDir
from lib.runner import locks
from lib.runner.interrupts import SIGNALS
from lib.status import State, Status, is_done, read_status


@dataclass(frozen=True)
class Job:
    """What a worker is to do: call ``function(run_dir, build_dir, report, stop, **arguments)``."""

    # "module:function"
    function: str
    run_dir: Path
    build_dir: Path
    environment: Mapping[str, str]
    arguments: Mapping[str, Any]
    # Among the workers that train the run together; 0 holds its lock and writes its status.
    rank: int = 0


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Inside, the stop signals wait; a process that is started there keeps them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_function(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, function = name.split(":")
    found: Callable[..., Any] = vars(import_module(module))[function]
    return found


class Stop:
    """Whether the run should save and stop: SIGTERM came, or the parent is gone.

    SIGTERM may come twice, to the whole group and from the parent, and means the same each time;
    the parent uses SIGKILL where its user cannot wait.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._asked = False
        self._orphaned = False
        # A terminal sends Ctrl-C to every process; the parent alone decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def __call__(self) -> bool:
        # The parent never writes: something to read is the end of the pipe.
        if not self._orphaned and self._pipe.poll():
            self._orphaned = True
        return self._asked or self._orphaned

    def send(self, event: Mapping[str, Any]) -> None:
        """Hand an event to the parent, if it is still there."""
        if self._orphaned:
            return
        try:
            self._pipe.send(dict(event))
        except (BrokenPipeError, ConnectionResetError):
            self._orphaned = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


def train(job: Job, pipe: Connection) -> None:
    """Train one run under its lock, its output in the run's log."""
    stop = Stop(pipe)
    os.environ.update(job.environment)
    run = RunDir(job.run_dir)
    if job.rank:
        # It waits for rank 0, which waits for the lock.
        _work(job, run, stop)
        return
    with locks.waiting(run.lock, stop) as locked:
        # Another process may have finished the run while this one waited.
        if locked and not is_done(run):
            _work(job, run, stop)


def call(function: str, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Call a function and send what it returns, or the problems of the error it raised."""
    stop = Stop(pipe)
    try:
        answer = {"kind": "result", "value": find_function(function)(*arguments)}
    except KablateError as error:
        answer = {"kind": "error", "class": type(error), "problems": tuple(error.problems)}
    stop.send(answer)


def generate(function: str, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Send every value that a generator yields, or the problems of the error it raised."""
    stop = Stop(pipe)
    try:
        for value in find_function(function)(*arguments):
            stop.send({"kind": "result", "value": value})
            if stop():
                return
    except KablateError as error:
        stop.send({"kind": "error", "class": type(error), "problems": tuple(error.problems)})


def _work(job: Job, run: RunDir, stop: Stop) -> None:
    _redirect_output(run.logs)
    # kill -USR1: what each thread is doing goes to the log, and the run goes on.
    faulthandler.register(signal.SIGUSR1)
    with _Outcome(run, stop, job.rank):
        function = find_function(job.function)
        function(job.run_dir, job.build_dir, stop.send, stop, **job.arguments)


class _Outcome:
    """Turns any error of a run into its FAILED status: the process boundary is the last to know.

    An error of another rank than 0 is told to the parent, which knows what became of the others.
    """

    def __init__(self, run: RunDir, stop: Stop, rank: int) -> None:
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
        known = isinstance(error, KablateError)
        code = error.exit_code if isinstance(error, KablateError) else EXIT_FAILED
        message = str(error) if known else f"{type(error).__name__}: {error}"
        # The clock is one for all processes: the first to fail is the cause.
        self._stop.send({"kind": "failure", "message": message, "at": time.monotonic()})
        if self._rank:
            return True
        before = read_status(self._run) or Status(State.RUNNING)
        end_run(
            self._run,
            Status(State.FAILED, code, message, before.iteration, before.iterations),
        )
        return True


def _redirect_output(path: Path) -> None:
    """Send stdout and stderr, those of libraries and child processes too, to the run's log."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
