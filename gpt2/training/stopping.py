"""Why a run may stop before its budget is used; it then saves, and goes on another time."""

import time
from collections.abc import Callable

from lib.errors import EXIT_INTERRUPTED, EXIT_TIME_LIMIT


class Stop:
    """Asked between optimizer steps and between evaluation batches; stays true once it was."""

    def __init__(
        self,
        requested: Callable[[], bool],
        limit_seconds: int,
        agree: Callable[[float], float] = lambda number: number,
    ) -> None:
        """``limit_seconds`` counts from now; 0 sets no limit. ``agree`` gives rank 0's number."""
        self._requested = requested
        self._agree = agree
        self._limit_seconds = limit_seconds
        self._deadline = time.monotonic() + limit_seconds if limit_seconds else float("inf")
        # 0 until the run has to stop.
        self.exit_code = 0

    def __call__(self) -> bool:
        if not self.exit_code:
            self.exit_code = int(self._agree(self._wish()))
        return self.exit_code != 0

    @property
    def reason(self) -> str:
        """Why the run has to stop."""
        limit = f"RUN_TIME_LIMIT_SECONDS={self._limit_seconds} is over"
        return {0: "", EXIT_INTERRUPTED: "interrupted", EXIT_TIME_LIMIT: limit}[self.exit_code]

    def _wish(self) -> int:
        """The exit code that this process would stop with; 0 to go on."""
        if self._requested():
            return EXIT_INTERRUPTED
        return EXIT_TIME_LIMIT if time.monotonic() > self._deadline else 0
