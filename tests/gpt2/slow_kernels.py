"""Comparisons of kernels that take time, crash or fail; workers import this module alone."""

import os
import time
from pathlib import Path

from lib.errors import PreflightError, Problem


def compile_slowly(what: str, folder: Path) -> None:
    """Wait for the other compilation, as only processes side by side can, or crash."""
    if what == "crash":
        os._exit(9)
    (folder / what).write_text(str(os.getpid()))
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    if what == "wrong":
        raise PreflightError(Problem("differs", code="gpu.wrong-values"))


def refuse_a_second_process(parent: int) -> None:
    """Fail outside of the process ``parent``, as a GPU in exclusive mode does."""
    if os.getpid() != parent:
        raise PreflightError(Problem("device busy", code="gpu.unsupported"))
