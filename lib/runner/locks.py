"""File locks that the operating system releases when the owning process ends for any reason."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lib.errors import ConfigError, Problem

_POLL_SECONDS = 0.1


def holder(path: Path) -> str:
    """Return the process id of the owner of lock ``path``, or "" if the lock is free.

    Creates no file.
    """
    try:
        with open(path, "r+") as stream:
            return "" if _try_lock(stream) else _read_pid(stream)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def refuse_if_held(path: Path) -> None:
    """Raise ConfigError naming the owner if lock ``path`` is taken."""
    pid = holder(path)
    if pid:
        raise _locked_error(path, pid)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Take the lock ``path``; its folder must exist.

    Raises ConfigError if another process owns the lock.
    """
    with open(path, "a+") as stream:
        if not _try_lock(stream):
            raise _locked_error(path, _read_pid(stream))
        _write_pid(stream)
        yield


@contextmanager
def waiting(path: Path, give_up: Callable[[], bool]) -> Iterator[bool]:
    """Wait for the lock ``path`` and yield True; yield False if ``give_up`` returned True first."""
    with open(path, "a+") as stream:
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
