"""Locks that the system drops with the process that holds them, however it dies."""

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
    """The process id of whoever holds the lock ``path``; empty when it is free. Creates nothing."""
    try:
        with open(path, "r+") as stream:
            return "" if _try_lock(stream) else _read_pid(stream)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def refuse_if_held(path: Path) -> None:
    """ConfigError naming the process that holds the lock ``path``."""
    pid = holder(path)
    if pid:
        raise _held(path, pid)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock ``path``; its folder exists. ConfigError when another process holds it."""
    with open(path, "a+") as stream:
        if not _try_lock(stream):
            raise _held(path, _read_pid(stream))
        _write_pid(stream)
        yield


@contextmanager
def waiting(path: Path, give_up: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock ``path`` as soon as it is free; False when ``give_up`` said so before."""
    with open(path, "a+") as stream:
        while not (locked := _try_lock(stream)) and not give_up():
            time.sleep(_POLL_SECONDS)
        if locked:
            _write_pid(stream)
        yield locked


def _held(path: Path, pid: str) -> ConfigError:
    what = f"process {pid} is training in this folder"
    return ConfigError(Problem(what, str(path.parent), f"wait for it, or type: kill {pid}"))


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
