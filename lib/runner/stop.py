"""Asking runs at work to save and stop, from another process."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.console import say
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.plan import Run
from lib.rundir import RunDir
from lib.runner import locks
from lib.runner.runner import LOCK


def stop_runs(runs: Sequence[Run[Any]]) -> int:
    """Leave a request in the directory of each that is at work. ConfigError where none is."""
    at_work = [run for run in runs if locks.holder(RunDir(run.path).lock)]
    if not at_work:
        raise ConfigError(Problem("none of these runs is at work", "RUNS", "type: make status"))
    for run in at_work:
        RunDir(run.path).stop_request.touch()
        say("STOP", f"{run.label}   asked to save and stop; make goes on with it")
    return EXIT_DONE


def stop_all(folder: Path) -> int:
    """Interrupt whoever trains in a study's ``folder``. ConfigError where nobody does."""
    pid = locks.holder(folder / LOCK)
    if not pid.isdecimal():
        raise ConfigError(Problem("nobody is training here", str(folder), "type: make status"))
    os.kill(int(pid), signal.SIGINT)
    say("STOP", f"process {pid} asked to save its runs and stop; make goes on with them")
    return EXIT_DONE
