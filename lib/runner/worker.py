"""Worker process: calls one function in a fresh process forked from a server with torch loaded.

The events of a worker are dictionaries: ``{"kind": "line", tag, text}`` for a log line, ``progress``
with the fields of a display, ``alive``, ``failure`` with ``message`` and ``at`` (monotonic seconds),
``traceback`` with ``text``, and ``result`` or ``error`` of a call.

A worker that trains exits cleanly (exit code 0) after writing the run status, whether or not the run
succeeded. Any other exit means that the worker died. If the parent disappears, the worker saves and
stops.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lib.env.ranks import current_process
from lib.errors import EXIT_FAILED, KablateError, environment_error
from lib.files import no_follow, remove_leftovers
from lib.runner.signals import SIGNALS
from lib.runs.lease import Lease, LeaseLost, guard_of_other_ranks
from lib.runs.manifest import finalize_run
from lib.runs.run_dir import RunDir, RunStatus, State, read_status

# Least time between an event ``alive`` and the event before it.
_ALIVE_SECONDS = 5.0

# Trains the run in a directory, on every rank; only rank 0 writes files and the status. Receives a
# function for events, one that returns whether to stop, and a guard that raises LeaseLost, to be
# called before every write.
TrainFunction = Callable[
    [Path, Callable[[Mapping[str, Any]], None], Callable[[], bool], Callable[[], None]], object
]


class ParentConnection:
    """Connection of a worker to its parent: events to it, and its request to stop.

    SIGTERM requests a stop, and may arrive twice: to the process group, and from the parent. A parent
    that has disappeared requests a stop too.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._requested = self._orphaned = False
        self._sent_at = float("-inf")
        # A terminal sends Ctrl-C to every process; only the parent handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def stop_requested(self) -> bool:
        """Return whether the worker must stop; a call is a sign of life."""
        self.send({"kind": "alive"})
        # The parent never writes: a readable pipe has been closed.
        if not self._orphaned and self._pipe.poll():
            self._orphaned = True
        return self._requested or self._orphaned

    def send(self, event: Mapping[str, Any]) -> None:
        """Send an event to the parent, ``alive`` only if nothing was sent for some seconds."""
        now = time.monotonic()
        if self._orphaned or (event["kind"] == "alive" and now < self._sent_at + _ALIVE_SECONDS):
            return
        self._sent_at = now
        try:
            self._pipe.send(dict(event))
        except (BrokenPipeError, ConnectionResetError):
            self._orphaned = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True


def run_worker(
    function: Callable[..., None],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    pipe: Connection,
) -> None:
    """Call ``function(*arguments, parent)`` in a worker."""
    parent = ParentConnection(pipe)
    os.environ.update(environment)
    function(*arguments, parent)


def send_results(
    function: Callable[..., Any], arguments: Sequence[Any], parent: ParentConnection
) -> None:
    """Send on rank 0 what a function returns, or every value of a generator; or the problems of its error.

    A traceback would go to the terminal.
    """
    try:
        returned = function(*arguments)
        for value in returned if isinstance(returned, Iterator) else [returned]:
            if current_process().is_main:
                parent.send({"kind": "result", "value": value})
            if parent.stop_requested():
                return
    except (KablateError, ImportError, MemoryError) as raised:
        error = raised if isinstance(raised, KablateError) else environment_error(raised)
        parent.send({"kind": "error", "class": type(error), "problems": tuple(error.problems)})


def train_worker(
    function: TrainFunction, run_dir: Path, token: int, parent: ParentConnection
) -> None:
    """Train the run in ``run_dir`` under its lease ``token``, with output in the run's log.

    A worker that loses the lease ends without writing; its parent notices and reports that.
    """
    run = RunDir(run_dir)
    with contextlib.suppress(LeaseLost):
        # Other ranks wait for rank 0, which has the lease.
        if not current_process().is_main:
            _train(function, run, parent, guard_of_other_ranks(run, token))
            return
        with Lease.adopt(run, token) as lease:
            remove_leftovers(run.path)
            _train(function, run, parent, lease.require)


def _train(
    function: TrainFunction, run: RunDir, parent: ParentConnection, guard: Callable[[], None]
) -> None:
    """Train a run; send any error to the parent, and on rank 0 write that the run is FAILED by it."""
    # Whether output goes to the run's log, and not to the terminal.
    has_log = False

    def fail(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        # Any error may be a consequence of a run that was taken over.
        guard()
        text = "".join(traceback.format_exception(error))
        parent.send({"kind": "traceback", "text": text})
        code, message = EXIT_FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, KablateError):
            code, message = error.exit_code, str(error)
        # The monotonic clock is shared by all processes: the first failure is the cause.
        parent.send({"kind": "failure", "message": message, "at": time.monotonic()})
        # A full disk may be the cause, which the parent has by now.
        with contextlib.suppress(OSError):
            if has_log:
                sys.stderr.write(text)
                sys.stderr.flush()
            if current_process().is_main:
                before = read_status(run) or RunStatus(State.FAILED)
                failed = replace(before, state=State.FAILED, exit_code=code, message=message)
                finalize_run(run, failed)
        return True

    with contextlib.ExitStack() as stack:
        stack.push(fail)
        log = no_follow(run.logs, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Also the output of libraries and child processes.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        os.close(log)
        has_log = True
        # kill -USR1 writes the stack of each thread to the log; the run continues.
        faulthandler.register(signal.SIGUSR1)
        function(run.path, parent.send, parent.stop_requested, guard)


@contextlib.contextmanager
def warnings_in(path: Path) -> Iterator[None]:
    """Append the warnings of libraries to a log, for a run in the process of a command."""

    def record(message: Any, kind: Any, name: str, line: int, *unused: object) -> None:
        append(path, warnings.formatwarning(message, kind, name, line))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = record  # type: ignore[assignment]
        yield


def append(path: Path, text: str) -> None:
    """Append to a log, which must not be a link."""
    descriptor = no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
