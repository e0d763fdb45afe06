"""Worker pool of the runner: a fork server with torch loaded, and the workers forked from it.

A forked worker is ready in about 20 ms, a fresh interpreter that imports torch in two seconds. The
server only imports modules: threads started by an operation would not survive a fork.
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

from lib.errors import Problem, RunError
from lib.runner import preload, worker
from lib.runner.worker import Job


@dataclass(eq=False)
class Worker:
    """A worker process and the pipe with its events."""

    process: BaseProcess
    pipe: Connection

    @property
    def exit_code(self) -> int | None:
        """Return 0 after a clean exit, −n after signal n, None while the worker runs."""
        return self.process.exitcode


class Pool:
    """Pool that starts workers and collects their events. Not thread-safe."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Create a pool; the fork server starts at first use with ``modules`` imported.

        ``environment`` contains the variables that libraries read when they are loaded.
        """
        self._context = multiprocessing.get_context("forkserver")
        self._modules = list(modules)
        self._environment = dict(environment)
        self._workers: list[Worker] = []

    def warm_up(self) -> None:
        """Start the server, whose imports then run in parallel with this process."""
        self._context.set_forkserver_preload([preload.__name__])
        before = dict(os.environ)
        # Must come first: starting the tracker removes signals from the mask.
        resource_tracker.ensure_running()
        # The server and its children must survive Ctrl-C, which a terminal sends to every process.
        with worker.signals_blocked():
            # The working directory may be another checkout with modules of the same names.
            os.environ.update({**self._environment, "PYTHONSAFEPATH": "1"})
            os.environ[preload.MODULES] = ",".join(self._modules)
            try:
                forkserver.ensure_running()
            finally:
                os.environ.clear()
                os.environ.update(before)

    def start(self, job: Job) -> Worker:
        """Start a worker for ``job``."""
        return self._start(worker.train, job)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``module:function`` in a worker and return its result.

        Raises the KablateError raised by the function, or RunError if the worker died.
        """
        started = self._start(worker.call, function, arguments)
        answer = None
        while started in self._workers:
            for _, event in self.events(timeout=None):
                answer = event or answer
        if answer is None:
            what = f"{function}: {describe_death(started.exit_code or 0)}"
            raise RunError(Problem(what, code="worker.died"))
        if answer["kind"] == "error":
            raise answer["class"](*answer["problems"])
        return answer["value"]

    def gather(self, function: str, calls: Sequence[Sequence[Any]]) -> Iterator[Any]:
        """Yield the values of the generator ``module:function``, one worker per entry of ``calls``.

        Values arrive in the order they are produced. Raises the KablateError raised by a worker, or
        RunError if a worker died.
        """
        workers = [self._start(worker.generate, function, tuple(arguments)) for arguments in calls]
        done = 0
        while done < len(workers):
            for finished, event in self.events(timeout=None):
                if event is None and finished.exit_code:
                    what = f"{function}: {describe_death(finished.exit_code)}"
                    raise RunError(Problem(what, code="worker.died"))
                if event is None:
                    done += 1
                elif event["kind"] == "error":
                    raise event["class"](*event["problems"])
                else:
                    yield event["value"]

    def events(self, timeout: float | None) -> Iterator[tuple[Worker, dict[str, Any] | None]]:
        """Yield (worker, event) pairs for at most ``timeout`` seconds.

        Event None marks the end of a worker; all other events of the worker precede it.
        """
        sources = {w.pipe: w for w in self._workers if not w.pipe.closed}
        sources |= {w.process.sentinel: w for w in self._workers}
        ready = connection.wait(list(sources), timeout)
        for ready_worker in {id(sources[r]): sources[r] for r in ready}.values():
            yield from ((ready_worker, event) for event in _drain(ready_worker.pipe))
            if ready_worker.process.exitcode is not None:
                yield from ((ready_worker, event) for event in _drain(ready_worker.pipe))
                self._workers.remove(ready_worker)
                ready_worker.process.join()
                ready_worker.pipe.close()
                yield ready_worker, None

    def signal(self, number: int, workers: Sequence[Worker] | None = None) -> None:
        """Send signal ``number`` to ``workers``, or to every worker."""
        for running in self._workers if workers is None else workers:
            if running.process.pid and running.process.exitcode is None:
                # The worker is a child of the server, so its exit may not be visible here yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.process.pid, number)

    def _start(self, target: Any, *arguments: Any) -> Worker:
        self.warm_up()
        ours, theirs = self._context.Pipe(duplex=True)
        # Not daemonic: a run may start data loader processes.
        process = self._context.Process(target=target, args=(*arguments, theirs))
        # A Ctrl-C in between would leave the server with a partial message and print an error.
        with worker.signals_blocked():
            process.start()
            theirs.close()
            started = Worker(process, ours)
            self._workers.append(started)
        return started


def describe_death(exit_code: int, who: str = "worker") -> str:
    """Describe the exit code of a worker that did not exit cleanly."""
    if exit_code >= 0:
        return f"{who} died with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; out of memory?" if -exit_code == signal.SIGKILL else ""
    return f"{who} died with signal {-exit_code} ({name}{hint})"


def _drain(pipe: Connection) -> Iterator[dict[str, Any]]:
    """Yield the events that have arrived; close the pipe at its end."""
    try:
        while not pipe.closed and pipe.poll():
            yield pipe.recv()
    # A worker that died leaves a closed pipe or a partial message.
    except (EOFError, OSError):
        pipe.close()
