"""Ctrl-C and its like, counted instead of raised, so that work ends where it is safe."""

import signal
from collections.abc import Iterator
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a shell reports for a process that a signal ended: 128 and the signal's number.
_SIGNAL_EXIT = 128


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered."""

    def __init__(self) -> None:
        self.count = 0
        # 130 after Ctrl-C, 143 after SIGTERM.
        self.exit_code = 0
        self._told = 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stopped(self) -> bool:
        """Whether there was one."""
        return self.count > 0

    def news(self) -> Iterator[int]:
        """The numbers, from 1, of the interrupts since the last call."""
        while self._told < self.count:
            self._told += 1
            yield self._told

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.exit_code = self.exit_code or _SIGNAL_EXIT + number
