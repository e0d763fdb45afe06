"""Jobs on this machine: a fork server with torch loaded, and the workers forked from it.

A forked worker is ready in about 20 ms, a fresh interpreter that imports torch in two seconds. The
server only imports modules: threads started by an operation would not survive a fork.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from lib.env.ranks import rank_environment
from lib.errors import Problem, RunError
from lib.files import remove_leftovers
from lib.runner import preload, worker
from lib.runner.signals import describe_death, signals_blocked
from lib.runs.run_dir import RunStatus, State

T = TypeVar("T")
# Event of a job: ``kind`` and the fields of that kind, see ``lib.runner.worker``.
JobEvent = Mapping[str, Any]
# Environment variables that select the device of a job, such as a GPU.
DeviceSlot = Mapping[str, str]

# Time for the remaining workers to exit after rank 0 has ended or any rank has failed.
EXIT_TIMEOUT_SECONDS = 10.0
# Time for rank 0 to exit after the other ranks have exited cleanly. Must exceed the time that rank
# 0 waits for its sidecar processes (lib.tracking.sidecar), which other ranks do not have.
MAIN_RANK_EXIT_TIMEOUT_SECONDS = 60.0
# Time in which a worker writes the stacks of its threads.
_STACKS_SECONDS = 0.1
# Folders of jobs; the name of each goes on with the id of the process.
_FOLDERS = "kablate-job-"
# Exit code that multiprocessing returns for a worker whose fork server has died.
_SERVER_DIED = 255


@dataclass(eq=False)
class _Worker:
    """A worker process, and the pipe with its events."""

    rank: int
    process: BaseProcess
    pipe: Connection

    def signal(self, number: int) -> None:
        if self.process.pid and self.process.exitcode is None:
            # The worker is a child of the server, so its exit may not be visible here yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class Job:
    """Workers, one per rank, that work and end together; one message reports the cause."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # Workers that have not ended, as of the executor's last look.
        self.running: list[_Worker] = []
        # Events that have not been read yet.
        self.events: deque[JobEvent] = deque()
        # Description of the first worker that did not exit cleanly, or "".
        self.death = ""
        # Folder of the file at which the ranks meet. Only rank 0 writes to the run directory.
        self.folder = tempfile.TemporaryDirectory(prefix=f"{_FOLDERS}{os.getpid()}-")
        # Moment at which workers that still run are killed.
        self.deadline = float("inf")
        self._killed = False
        # (time, rank, message) of each error.
        self._failures: list[tuple[float, int, str]] = []

    def cancel(self, *, immediately: bool = False) -> None:
        """Request a stop, before which a run is saved; ``immediately`` kills the processes."""
        for running in self.running:
            running.signal(signal.SIGKILL if immediately else signal.SIGTERM)

    def end_overdue(self) -> None:
        """Write the stacks of all threads to the log, rank by rank, and request a stop.

        Workers that have not ended after a while are killed. Loader and sidecar processes end when
        their worker does.
        """
        # A stopped process handles signals only after it continues; SIGUSR1 is registered by worker.
        for running in self.running:
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
                running.signal(number)
            # All ranks write to one log.
            time.sleep(_STACKS_SECONDS)
        self.deadline = min(self.deadline, time.monotonic() + EXIT_TIMEOUT_SECONDS)

    def kill_overdue(self) -> None:
        """Kill the workers that still run after the deadline."""
        if self.running and time.monotonic() >= self.deadline:
            self._killed = True
            self.cancel(immediately=True)

    def receive(self, worker: _Worker) -> None:
        """Read the events that have arrived from ``worker``, and record its end."""
        # First, since all events precede the end.
        exit_code = worker.process.exitcode
        try:
            while not worker.pipe.closed and worker.pipe.poll():
                event = worker.pipe.recv()
                if event["kind"] == "failure":
                    self._failures.append((event["at"], worker.rank, event["message"]))
                else:
                    self.events.append(event)
        # A worker that died leaves a closed pipe or a partial message.
        except (EOFError, OSError):
            worker.pipe.close()
        if exit_code is not None:
            self._record_exit(worker, exit_code)

    def _record_exit(self, worker: _Worker, exit_code: int) -> None:
        if exit_code and not self._killed and not self.death:
            self.death = describe_death(exit_code, self._rank_name(worker.rank))
        worker.process.join()
        if exit_code == _SERVER_DIED:
            # The server reports the exits; without it, the worker may still be running.
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid or 0, signal.SIGKILL)
        worker.pipe.close()
        self.running.remove(worker)
        failed = exit_code or self._has_failed(worker.rank)
        soon = failed or worker.rank == 0
        grace = EXIT_TIMEOUT_SECONDS if soon else MAIN_RANK_EXIT_TIMEOUT_SECONDS
        self.deadline = min(self.deadline, time.monotonic() + grace)
        if not self.running:
            self.folder.cleanup()

    def failure_cause(self, status: RunStatus) -> str:
        """Return the cause of a failure if ``status``, written by rank 0, lacks it, else "".

        The death of a worker takes precedence over the errors that it causes in other ranks, and
        the first error over later ones.
        """
        if self.death:
            return self.death
        # An unexpected error of rank 0, such as a lost peer, is in its status.
        if self._failures and (status.state is State.RUNNING or self._has_failed(0)):
            _, rank, message = min(self._failures)
            return "" if message == status.message else f"{self._rank_name(rank)}: {message}"
        return describe_death(0) if status.state is State.RUNNING else ""

    def _has_failed(self, rank: int) -> bool:
        return any(rank == failed_rank for _, failed_rank, _ in self._failures)

    def _rank_name(self, rank: int) -> str:
        return f"rank {rank} of {self._world_size}" if self._world_size > 1 else "worker"


class LocalExecutor:
    """Starts jobs and collects their events. Not thread-safe."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Create an executor; the fork server starts at first use with ``modules`` imported.

        ``environment`` contains the variables that libraries read when they are loaded.
        """
        self._context = multiprocessing.get_context("forkserver")
        self._modules = list(modules)
        self._environment = dict(environment)
        self._jobs: list[Job] = []
        remove_leftovers(Path(tempfile.gettempdir()), f"{_FOLDERS}*")

    def warm_up(self) -> None:
        """Start the server, whose imports then run in parallel with this process."""
        self._context.set_forkserver_preload([preload.__name__])
        before = dict(os.environ)
        # Must come first: starting the tracker removes signals from the mask.
        resource_tracker.ensure_running()
        # The server and its children must survive Ctrl-C, which a terminal sends to every process.
        with signals_blocked():
            # The working directory may be another checkout with modules of the same names.
            os.environ.update({**self._environment, "PYTHONSAFEPATH": "1"})
            os.environ[preload.MODULES] = ",".join(self._modules)
            try:
                forkserver.ensure_running()
            finally:
                os.environ.clear()
                os.environ.update(before)

    def submit(
        self,
        function: Callable[..., None],
        *arguments: Any,
        world_size: int = 1,
        environment: Mapping[str, str] = {},
    ) -> Job:
        """Start ``function(*arguments, parent)`` in ``world_size`` workers.

        ``function`` is a top-level function, ``parent`` a ``lib.runner.worker.ParentConnection``.
        ``environment`` has variables for the workers, in addition to rank and world size.
        """
        self.warm_up()
        job = Job(world_size)
        self._jobs.append(job)
        for rank in range(world_size):
            ranks = rank_environment(rank, world_size, Path(job.folder.name, "rendezvous"))
            ours, theirs = self._context.Pipe(duplex=True)
            # Not daemonic: a run may start data loader processes.
            process = self._context.Process(
                target=worker.run_worker,
                args=(function, arguments, {**environment, **ranks}, theirs),
            )
            # A Ctrl-C in between would leave the server with a partial message and print an error.
            try:
                with signals_blocked():
                    process.start()
                    theirs.close()
            except (EOFError, ConnectionError) as error:
                what = "the process that starts workers died (out of memory?)"
                problem = Problem(what, next="type: make JOBS=1", code="worker.server-died")
                raise RunError(problem) from error
            job.running.append(_Worker(rank, process, ours))
        return job

    def submit_call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Job:
        """Start ``function(*arguments)`` as a job for ``results``; ``options`` are those of ``submit``."""
        return self.submit(worker.send_results, function, arguments, **options)

    def results(self, jobs: Sequence[Job], seconds: float | None = None) -> Iterator[Any]:
        """Yield what the functions of ``jobs`` return, or their generators yield, on rank 0, as it comes.

        Raises the KablateError of any rank, or RunError if a worker died, or if the jobs have not ended
        after ``seconds``.
        """
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        running = list(jobs)
        try:
            while running:
                self.collect(None if seconds is None else max(0.0, deadline - time.monotonic()))
                for job in tuple(running):
                    while job.events:
                        event = job.events.popleft()
                        if event["kind"] == "error":
                            raise event["class"](*event["problems"])
                        if event["kind"] == "result":
                            yield event["value"]
                    if not job.running:
                        running.remove(job)
                        self._jobs.remove(job)
                        if job.death:
                            raise RunError(Problem(job.death, code="worker.died"))
                if running and time.monotonic() >= deadline:
                    what = f"no answer within {seconds:g} s"
                    raise RunError(Problem(what, code="worker.no-answer"))
        finally:
            for job in running:
                # One with a limit may hang.
                job.cancel(immediately=seconds is not None)
                self._jobs.remove(job)

    def result(self, job: Job, seconds: float | None = None) -> Any:
        """Return the only result of a job. Raises like ``results``."""
        if values := list(self.results([job], seconds)):
            return values[0]
        raise RunError(Problem(describe_death(0), code="worker.died"))

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a top-level function in a worker and return its result. Raises like ``results``."""
        value: T = self.result(self.submit_call(function, *arguments))
        return value

    def events(self, timeout: float) -> Iterator[tuple[Job, JobEvent | None]]:
        """Yield (job, event) pairs after waiting at most ``timeout`` seconds for the first.

        Event None marks the end of a job; all other events of the job precede it.
        """
        if any(job.events or not job.running for job in self._jobs):
            timeout = 0.0
        self.collect(timeout)
        for job in tuple(self._jobs):
            while job.events:
                yield job, job.events.popleft()
            if not job.running:
                self._jobs.remove(job)
                yield job, None

    def collect(self, timeout: float | None) -> None:
        """Wait at most ``timeout`` seconds for events or ends of workers; kill overdue workers."""
        sources: dict[Any, tuple[Job, _Worker]] = {}
        for job in self._jobs:
            if job.running and job.deadline < float("inf"):
                left = max(0.0, job.deadline - time.monotonic())
                timeout = left if timeout is None else min(timeout, left)
            job.kill_overdue()
            for running in job.running:
                sources[running.process.sentinel] = job, running
                if not running.pipe.closed:
                    sources[running.pipe] = job, running
        ready = connection.wait(list(sources), timeout)
        for job, reporting in dict.fromkeys(sources[source] for source in ready):
            job.receive(reporting)
