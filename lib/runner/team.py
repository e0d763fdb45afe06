"""Workers that train one run together: they end together, and one message reports the cause.

A single worker is a team of one.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from lib.machine.process import rank_variables
from lib.plan import Run
from lib.runner.pool import Pool, Worker, describe_death
from lib.runner.target import Slot, Target
from lib.runner.worker import Job
from lib.status import State, Status

# Time for the remaining workers to exit after rank 0 has ended or any rank has failed.
GRACE_SECONDS = 10.0
# Time for rank 0 to exit after the other ranks have exited cleanly. Must exceed the time that rank
# 0 waits for its sidecar processes (lib.companions), which other ranks do not have.
FAREWELL_SECONDS = 60.0


class Team:
    """Workers of one run, indexed by rank."""

    def __init__(self, run: Run[Any], slot: Slot, target: Target, pool: Pool) -> None:
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
                Job(
                    target.function,
                    run.path,
                    target.build_dir,
                    {**variables, **rank_variables(rank, size, rendezvous)},
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
        grace = GRACE_SECONDS if failed or rank == 0 else FAREWELL_SECONDS
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

    def cause(self, status: Status) -> str:
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
