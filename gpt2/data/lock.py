"""One process at a time in a folder; the system drops the lock of a process that dies."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.console import say


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` (its file ``.lock``), waiting for another process if need be."""
    with open(folder / ".lock", "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("WAIT", f"another process prepares data in {folder}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
