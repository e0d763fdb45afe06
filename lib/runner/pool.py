"""Worker pool of the runner: a fork server with torch loaded, and the workers forked from it.

A forked worker is ready in about 20 ms, a fresh interpreter that imports torch in two seconds. The
server only imports modules: threads started by an operation would not survive a fork.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from lib.env.ranks import rank_environment
from lib.errors import Problem, RunError
from lib.plan.run import PlannedRun
from lib.runner import preload, worker
from lib.runner.worker import WorkerJob
from lib.runs.run_dir import RunDir, RunStatus, State


@dataclass(eq=False)
class Worker:
    """A worker process and the pipe with its events."""

    process: BaseProcess
    pipe: Connection

    @property
    def exit_code(self) -> int | None:
        """Return 0 after a clean exit, −n after signal n, None while the worker runs."""
        return self.process.exitcode


class WorkerPool:
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

    def start(self, job: WorkerJob) -> Worker:
        """Start a worker for ``job``."""
        return self._start(worker.train_worker, job)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``module:function`` in a worker and return its result.

        Raises the KablateError raised by the function, or RunError if the worker died.
        """
        started = self._start(worker.call_worker, function, arguments)
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
        workers = [
            self._start(worker.generate_worker, function, tuple(arguments)) for arguments in calls
        ]
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


# Protocol of the program whose runs the runner starts.


# Environment variables that select the device of a run, such as a GPU.
DeviceSlot = Mapping[str, str]


class TrainingBackend(Protocol):
    """A program that can train a run.

    ``function`` is the ``module:function`` that trains one run. A worker calls it with the run
    directory, ``build_dir``, a function that accepts events, a function that returns whether to
    stop, and the keyword arguments ``arguments``. The function writes the run status. If several
    workers train one run, each worker calls ``function``, and only rank 0 writes files.
    """

    function: str
    build_dir: Path
    arguments: Mapping[str, Any]

    def preflight(self, pool: WorkerPool, runs: Sequence[PlannedRun[Any]]) -> Sequence[DeviceSlot]:
        """Check that this machine can train ``runs``; return one slot per concurrent run.

        Raises PreflightError with all problems at once. Writes nothing to the output folder.
        """

    def bytes_needed(self, runs: Sequence[PlannedRun[Any]], jobs: int) -> int:
        """Return the disk space for the results of ``runs`` with ``jobs`` concurrent runs."""

    def differences(self, run: RunDir) -> Sequence[str]:
        """Return what changed since ``run`` was made: code, library versions, device."""

    def prepare(self, run: PlannedRun[Any]) -> None:
        """Write the input files of ``function`` to the run's existing directory."""

    def processes(self, run: PlannedRun[Any]) -> int:
        """Return the number of workers that train ``run`` together."""

    def environment(self, run: PlannedRun[Any]) -> Mapping[str, str]:
        """Return the environment variables for the run's workers."""


# Workers that train one run together: they end together, and one message reports the cause.
#
# A single worker is a team of one.


# Time for the remaining workers to exit after rank 0 has ended or any rank has failed.
EXIT_TIMEOUT_SECONDS = 10.0
# Time for rank 0 to exit after the other ranks have exited cleanly. Must exceed the time that rank
# 0 waits for its sidecar processes (lib.tracking.sidecar), which other ranks do not have.
MAIN_RANK_EXIT_TIMEOUT_SECONDS = 60.0


class WorkerGroup:
    """Workers of one run, indexed by rank."""

    def __init__(
        self, run: PlannedRun[Any], slot: DeviceSlot, target: TrainingBackend, pool: WorkerPool
    ) -> None:
        """Start the workers."""
        self.run = run
        self.slot = slot
        # Folder of the rendezvous file. Only rank 0 writes to the run directory.
        self._folder = tempfile.TemporaryDirectory(prefix="kablate-")
        size = target.processes(run)
        rendezvous = Path(self._folder.name) / "rendezvous"
        variables = {**target.environment(run), **slot}
        self.workers = [
            pool.start(
                WorkerJob(
                    target.function,
                    run.path,
                    target.build_dir,
                    {**variables, **rank_environment(rank, size, rendezvous)},
                    target.arguments,
                    rank,
                )
            )
            for rank in range(size)
        ]
        self._running = list(self.workers)
        self._deadline = float("inf")
        self._killed = False
        # Description of the first worker that did not exit cleanly.
        self._death = ""
        # (time, rank, message) of each error.
        self._failures: list[tuple[float, int, str]] = []

    def failed(self, worker: Worker, event: dict[str, Any]) -> None:
        """Record an error reported by ``worker``."""
        self._failures.append((event["at"], self.workers.index(worker), event["message"]))

    def ended(self, worker: Worker) -> bool:
        """Record the end of ``worker``; return whether it was the last one."""
        rank = self.workers.index(worker)
        if worker.exit_code and not self._killed and not self._death:
            self._death = describe_death(worker.exit_code, self._name(rank))
        self._running.remove(worker)
        failed = worker.exit_code or any(rank == other for _, other, _ in self._failures)
        grace = EXIT_TIMEOUT_SECONDS if failed or rank == 0 else MAIN_RANK_EXIT_TIMEOUT_SECONDS
        self._deadline = min(self._deadline, time.monotonic() + grace)
        if not self._running:
            self._folder.cleanup()
        return not self._running

    def overdue(self) -> list[Worker]:
        """Return the workers to be killed: those still running after the deadline."""
        if time.monotonic() < self._deadline:
            return []
        self._killed = True
        return self._running

    def cause(self, status: RunStatus) -> str:
        """Return the cause of a failure if ``status`` does not contain it, else "".

        The death of a worker takes precedence over the errors that it causes in other ranks, and
        the first error over later ones.
        """
        if self._death:
            return self._death
        if self._failures and (status.state is State.RUNNING or self._main_rank_failed()):
            _, rank, message = min(self._failures)
            return "" if message == status.message else f"{self._name(rank)}: {message}"
        return describe_death(0) if status.state is State.RUNNING else ""

    def _main_rank_failed(self) -> bool:
        """Return whether rank 0 raised an unexpected error, such as a lost peer."""
        return any(rank == 0 for _, rank, _ in self._failures)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.workers)}" if len(self.workers) > 1 else "worker"
