"""The workers that train one run together: they end together, and one message says why.

A worker that is alone is a team of one.
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

# How long the others may take to end by themselves once rank 0 has ended, or one has failed.
GRACE_SECONDS = 10.0
# How long rank 0 may take when the others have ended as they should: longer than it waits for its
# companions (lib.companions), which only it has.
FAREWELL_SECONDS = 60.0


class Team:
    """The workers of one run, by rank."""

    def __init__(self, run: Run[Any], slot: Slot, target: Target, pool: Pool) -> None:
        """Start them."""
        self.run = run
        self.slot = slot
        # Where they meet. Rank 0 alone writes into the run's own directory.
        self._folder = tempfile.TemporaryDirectory(prefix="kablate-")
        size = target.processes(run)
        meeting = Path(self._folder.name) / "rendezvous"
        variables = {**target.environment(run), **slot}
        self.workers = [
            pool.start(
                Job(
                    target.function,
                    run.path,
                    target.build_dir,
                    {**variables, **rank_variables(rank, size, meeting)},
                    target.arguments,
                    rank,
                )
            )
            for rank in range(size)
        ]
        self._left = list(self.workers)
        self._deadline = float("inf")
        self._killed = False
        # What was first to end otherwise than orderly.
        self._death = ""
        # When a rank raised an error, which one, and what it said.
        self._failures: list[tuple[float, int, str]] = []

    def failed(self, worker: Worker, event: dict[str, Any]) -> None:
        """Take note of a worker's error."""
        self._failures.append((event["at"], self.workers.index(worker), event["message"]))

    def ended(self, worker: Worker) -> bool:
        """Take note of a worker's end; whether it was the last."""
        rank = self.workers.index(worker)
        if worker.exit_code and not self._killed and not self._death:
            self._death = describe_death(worker.exit_code, self._name(rank))
        self._left.remove(worker)
        failed = worker.exit_code or any(rank == other for _, other, _ in self._failures)
        patience = GRACE_SECONDS if failed or rank == 0 else FAREWELL_SECONDS
        self._deadline = min(self._deadline, time.monotonic() + patience)
        if not self._left:
            self._folder.cleanup()
        return not self._left

    def overdue(self) -> list[Worker]:
        """Workers that still run although the run is over, to be killed."""
        if time.monotonic() < self._deadline:
            return []
        self._killed = True
        return self._left

    def cause(self, status: Status) -> str:
        """Why the run failed, where its ``status`` does not say so by itself; else empty.

        A death comes before the errors that it causes in others, and so does the first error.
        """
        if self._death:
            return self._death
        if self._failures and (status.state is State.RUNNING or self._failed_at_main()):
            _, rank, message = min(self._failures)
            return "" if message == status.message else f"{self._name(rank)}: {message}"
        return describe_death(0) if status.state is State.RUNNING else ""

    def _failed_at_main(self) -> bool:
        """Whether rank 0 met an error that it had not foreseen, such as the death of another."""
        return any(rank == 0 for _, rank, _ in self._failures)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.workers)}" if len(self.workers) > 1 else "worker"
