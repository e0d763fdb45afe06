"""Protocol of the program whose runs the runner starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lib.plan import Run
from lib.rundir import RunDir
from lib.runner.pool import Pool

# Environment variables that select the device of a run, such as a GPU.
Slot = Mapping[str, str]


class Target(Protocol):
    """A program that can train a run.

    ``function`` is the ``module:function`` that trains one run. A worker calls it with the run
    directory, ``build_dir``, a function that accepts events, a function that returns whether to
    stop, and the keyword arguments ``arguments``. The function writes the run status. If several
    workers train one run, each worker calls ``function``, and only rank 0 writes files.
    """

    function: str
    build_dir: Path
    arguments: Mapping[str, Any]

    def preflight(self, pool: Pool, runs: Sequence[Run[Any]]) -> Sequence[Slot]:
        """Check that this machine can train ``runs``; return one slot per concurrent run.

        Raises PreflightError with all problems at once. Writes nothing to the output folder.
        """

    def bytes_needed(self, runs: Sequence[Run[Any]], jobs: int) -> int:
        """Return the disk space for the results of ``runs`` with ``jobs`` concurrent runs."""

    def differences(self, run: RunDir) -> Sequence[str]:
        """Return what changed since ``run`` was made: code, library versions, device."""

    def prepare(self, run: Run[Any]) -> None:
        """Write the input files of ``function`` to the run's existing directory."""

    def processes(self, run: Run[Any]) -> int:
        """Return the number of workers that train ``run`` together."""

    def environment(self, run: Run[Any]) -> Mapping[str, str]:
        """Return the environment variables for the run's workers."""
