"""File locks that the operating system releases when the owning process ends for any reason."""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Self

from lib.errors import ConfigError, Problem
from lib.files import no_follow, regular_file

_POLL_SECONDS = 0.1


def lock_owner(path: Path) -> str:
    """Return the process id of the owner of lock ``path``, or "" if the lock is free.

    Creates no file.
    """
    try:
        with open(path, encoding="utf-8", opener=regular_file) as stream:
            return "" if _try_lock(stream) else _read_pid(stream)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def require_unlocked(path: Path) -> None:
    """Raise ConfigError naming the owner if lock ``path`` is taken."""
    pid = lock_owner(path)
    if pid:
        raise _locked_error(path, pid)


@contextmanager
def acquire_lock(path: Path) -> Iterator[None]:
    """Take the lock ``path``; its folder must exist.

    Raises ConfigError if another process owns the lock.
    """
    with open(path, "a+", encoding="utf-8", opener=no_follow) as stream:
        if not _try_lock(stream):
            raise _locked_error(path, _read_pid(stream))
        _write_pid(stream)
        yield


@contextmanager
def wait_for_lock(path: Path, give_up: Callable[[], bool]) -> Iterator[bool]:
    """Wait for the lock ``path`` and yield True; yield False if ``give_up`` returned True first."""
    with open(path, "a+", encoding="utf-8", opener=no_follow) as stream:
        while not (locked := _try_lock(stream)) and not give_up():
            time.sleep(_POLL_SECONDS)
        if locked:
            _write_pid(stream)
        yield locked


def _locked_error(path: Path, pid: str) -> ConfigError:
    what = f"process {pid} is training in this folder"
    advice = f"wait until it ends, or type: kill {pid}"
    return ConfigError(Problem(what, str(path.parent), advice, code="run.locked"))


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read().strip() or "unknown"


def _write_pid(stream: IO[str]) -> None:
    stream.truncate(0)
    stream.write(f"{os.getpid()}\n")
    stream.flush()


# Stop signals such as Ctrl-C, counted instead of raised so that work stops at a safe point.


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Shells report 128 plus the signal number for a process terminated by a signal.
_SIGNAL_EXIT = 128


class SignalCounter:
    """Counter of SIGINT, SIGTERM and SIGHUP while the context is active."""

    def __init__(self) -> None:
        self.count = 0
        # 130 after Ctrl-C, 143 after SIGTERM.
        self.exit_code = 0
        self._reported = 0

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._count_signal) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def stopped(self) -> bool:
        """Return whether any signal has arrived."""
        return self.count > 0

    def news(self) -> Iterator[int]:
        """Yield the ordinal number (from 1) of each signal since the last call."""
        while self._reported < self.count:
            self._reported += 1
            yield self._reported

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.exit_code = self.exit_code or _SIGNAL_EXIT + number
