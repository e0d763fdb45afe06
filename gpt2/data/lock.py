"""An exclusive lock on a folder; the operating system releases it when its process dies."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.console import say


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Acquire the lock of ``folder`` (the file ``.lock`` in it); wait if another process has it."""
    with open(folder / ".lock", "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("WAIT", f"another process is preparing data in {folder}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
