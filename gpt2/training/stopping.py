"""Why a run may stop before its budget is used; it then saves, and goes on another time."""

import time
from collections.abc import Callable

from lib.errors import EXIT_INTERRUPTED, EXIT_TIME_LIMIT


class Stop:
    """Asked between optimizer steps and between evaluation batches; stays true once it was."""

    def __init__(self, requested: Callable[[], bool], limit_seconds: int) -> None:
        """``limit_seconds`` counts from now; 0 sets no limit."""
        self._requested = requested
        self._limit_seconds = limit_seconds
        self._deadline = time.monotonic() + limit_seconds if limit_seconds else float("inf")
        # 0 until the run has to stop.
        self.exit_code = 0
        self.reason = ""

    def __call__(self) -> bool:
        if not self.exit_code and self._requested():
            self.exit_code, self.reason = EXIT_INTERRUPTED, "interrupted"
        elif not self.exit_code and time.monotonic() > self._deadline:
            self.exit_code = EXIT_TIME_LIMIT
            self.reason = f"RUN_TIME_LIMIT_SECONDS={self._limit_seconds} is over"
        return self.exit_code != 0
