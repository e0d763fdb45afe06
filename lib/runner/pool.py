"""The parent's side: a fork server with torch loaded, and the workers that it starts.

A forked worker is ready in about 20 ms, a fresh interpreter that imports torch in two seconds. The
server only imports: threads that an operation would start do not survive a fork.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lib.errors import RunError
from lib.runner import preload, worker
from lib.runner.worker import Job


@dataclass(eq=False)
class Worker:
    """A process at work, and the pipe that its events come through."""

    process: BaseProcess
    pipe: Connection

    @property
    def exit_code(self) -> int | None:
        """0 after an orderly end, −n after signal n, None while it runs."""
        return self.process.exitcode


class Pool:
    """Starts workers and collects their events. Use it from one thread, one at a time."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """The server starts at the first use, with ``modules`` imported.

        ``environment`` is for what libraries read when they are loaded.
        """
        self._context = multiprocessing.get_context("forkserver")
        self._modules = list(modules)
        self._environment = dict(environment)
        self._workers: list[Worker] = []

    def warm_up(self) -> None:
        """Start the server, and let it import while this process does something else."""
        self._context.set_forkserver_preload([preload.__name__])
        before = dict(os.environ)
        # First, because starting it takes its own signals off the mask.
        resource_tracker.ensure_running()
        # The server and its children must outlive a Ctrl-C, which a terminal sends to all.
        with worker.signals_blocked():
            # The working directory may be another checkout, whose modules are not ours.
            os.environ.update({**self._environment, "PYTHONSAFEPATH": "1"})
            os.environ[preload.MODULES] = ",".join(self._modules)
            try:
                forkserver.ensure_running()
            finally:
                os.environ.clear()
                os.environ.update(before)

    def start(self, job: Job) -> Worker:
        """Start a worker that does ``job``."""
        return self._start(worker.train, job)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``module:function`` in a worker; what it returns.

        Raises the KablateError that it raised, or RunError when the worker died.
        """
        started = self._start(worker.call, function, arguments)
        answer = None
        while started in self._workers:
            for _, event in self.events(timeout=None):
                answer = event or answer
        if answer is None:
            raise RunError(f"{function} {describe_death(started.exit_code or 0)}")
        if answer["kind"] == "error":
            raise answer["class"](*answer["problems"])
        return answer["value"]

    def gather(self, function: str, calls: Sequence[Sequence[Any]]) -> Iterator[Any]:
        """Values of the generator ``module:function``, called in one worker for each of ``calls``.

        They come as they are made. Raises the KablateError that a worker raised, or RunError when
        one died.
        """
        started = [self._start(worker.generate, function, tuple(words)) for words in calls]
        done = 0
        while done < len(started):
            for found, event in self.events(timeout=None):
                if event is None and found.exit_code:
                    raise RunError(f"{function} {describe_death(found.exit_code)}")
                if event is None:
                    done += 1
                elif event["kind"] == "error":
                    raise event["class"](*event["problems"])
                else:
                    yield event["value"]

    def events(self, timeout: float | None) -> Iterator[tuple[Worker, dict[str, Any] | None]]:
        """Events as they come, for ``timeout`` seconds at most; None is the end of a worker.

        All events of a worker come before its end.
        """
        waited_for = {w.pipe: w for w in self._workers if not w.pipe.closed}
        waited_for |= {w.process.sentinel: w for w in self._workers}
        ready = connection.wait(list(waited_for), timeout)
        for found in {id(waited_for[r]): waited_for[r] for r in ready}.values():
            yield from ((found, event) for event in _drain(found.pipe))
            if found.process.exitcode is not None:
                yield from ((found, event) for event in _drain(found.pipe))
                self._workers.remove(found)
                found.process.join()
                found.pipe.close()
                yield found, None

    def signal(self, number: int, workers: Sequence[Worker] | None = None) -> None:
        """Send a signal to ``workers``, or to every worker."""
        for running in self._workers if workers is None else workers:
            if running.process.pid and running.process.exitcode is None:
                # It is the server's child: its end may not be known here yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.process.pid, number)

    def _start(self, target: Any, *arguments: Any) -> Worker:
        self.warm_up()
        ours, theirs = self._context.Pipe(duplex=True)
        # Not daemonic: a run may start loader processes of its own.
        process = self._context.Process(target=target, args=(*arguments, theirs))
        # A Ctrl-C in between would leave the server with half a message, which it shows as an error.
        with worker.signals_blocked():
            process.start()
            theirs.close()
            started = Worker(process, ours)
            self._workers.append(started)
        return started


def describe_death(exit_code: int, who: str = "worker") -> str:
    """What an exit code says of a worker that did not end orderly."""
    if exit_code >= 0:
        return f"{who} died with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; out of memory?" if -exit_code == signal.SIGKILL else ""
    return f"{who} died with signal {-exit_code} ({name}{hint})"


def _drain(pipe: Connection) -> Iterator[dict[str, Any]]:
    """What has arrived; closes the pipe at its end."""
    try:
        while not pipe.closed and pipe.poll():
            yield pipe.recv()
    # A worker that died left the end of the pipe, or half a message.
    except (EOFError, OSError):
        pipe.close()
