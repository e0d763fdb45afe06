"""Stop signals such as Ctrl-C, counted instead of raised so that work stops at a safe point."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Shells report 128 plus the signal number for a process terminated by a signal.
SIGNAL_EXIT = 128


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the stop signals; a process started inside keeps them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_death(exit_code: int, who: str = "worker") -> str:
    """Describe the exit code of a process that did not exit cleanly."""
    if exit_code >= 0:
        return f"{who} died with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; out of memory?" if -exit_code == signal.SIGKILL else ""
    return f"{who} died with signal {-exit_code} ({name}{hint})"


class SignalCounter:
    """Counter of SIGINT, SIGTERM and SIGHUP while the context is active."""

    def __init__(self) -> None:
        self.count = 0
        # 130 after Ctrl-C, 143 after SIGTERM.
        self.exit_code = 0

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._count_signal) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Count a request to stop that did not come as a signal, as a Ctrl-C."""
        self._count_signal(signal.SIGINT, None)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        # A batch system signals the processes of a job, and the script that started them does too.
        if not self.count or number == signal.SIGINT:
            self.count += 1
            self.exit_code = self.exit_code or SIGNAL_EXIT + number
