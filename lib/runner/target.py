"""What the runner has to know of the program whose runs it starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lib.plan import Run
from lib.rundir import RunDir
from lib.runner.pool import Pool

# Environment variables of the workers that share one place, such as a GPU.
Slot = Mapping[str, str]


class Target(Protocol):
    """A program that can train a run.

    ``function`` is the ``module:function`` that trains one: it is called in a worker with the run's
    directory, ``build_dir``, a function that takes events, a function that says when to stop, and
    the keywords ``arguments``. It writes the run's status. Where several workers train a run, each
    calls it, and rank 0 alone writes.
    """

    function: str
    build_dir: Path
    arguments: Mapping[str, Any]

    def preflight(self, pool: Pool, runs: Sequence[Run[Any]]) -> Sequence[Slot]:
        """Whether this machine can train ``runs``; one slot for each that may run at a time.

        Raises PreflightError with all problems at once. Writes nothing where results go.
        """

    def bytes_needed(self, runs: Sequence[Run[Any]], jobs: int) -> int:
        """Disk space for the results of ``runs``, ``jobs`` of them at a time."""

    def differences(self, run: RunDir) -> Sequence[str]:
        """What is other now than when the run was made: code, library versions, device."""

    def prepare(self, run: Run[Any]) -> None:
        """Write what ``function`` reads into the run's directory, which exists."""

    def processes(self, run: Run[Any]) -> int:
        """How many workers train the run together."""

    def environment(self, run: Run[Any]) -> Mapping[str, str]:
        """Variables that the run's worker needs."""
