"""Early stop of a run by an interrupt or a time limit; the run is saved and can be resumed."""

import time
from collections.abc import Callable

from lib.errors import EXIT_INTERRUPTED, EXIT_TIME_LIMIT


class Stop:
    """Stop condition, polled between optimizer steps and evaluation batches; it latches."""

    def __init__(
        self,
        requested: Callable[[], bool],
        limit_seconds: int,
        agree: Callable[[float], float] = lambda number: number,
    ) -> None:
        """Start the time limit of ``limit_seconds`` (0: none). ``agree`` returns rank 0's value."""
        self._requested = requested
        self._agree = agree
        self._limit_seconds = limit_seconds
        self._deadline = time.monotonic() + limit_seconds if limit_seconds else float("inf")
        # 0 until the run must stop.
        self.exit_code = 0

    def __call__(self) -> bool:
        if not self.exit_code:
            self.exit_code = int(self._agree(self._local_exit_code()))
        return self.exit_code != 0

    @property
    def reason(self) -> str:
        """Return the reason of the stop; "" if the run need not stop."""
        limit = f"RUN_TIME_LIMIT_SECONDS={self._limit_seconds} reached"
        return {0: "", EXIT_INTERRUPTED: "interrupted", EXIT_TIME_LIMIT: limit}[self.exit_code]

    def _local_exit_code(self) -> int:
        """Return the exit code with which this process would stop; 0 to continue."""
        if self._requested():
            return EXIT_INTERRUPTED
        return EXIT_TIME_LIMIT if time.monotonic() > self._deadline else 0
