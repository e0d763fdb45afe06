"""Stopping active runs from another process; the runs save a checkpoint first."""

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
    """Create a stop request in the directory of each active run.

    Raises ConfigError if none of ``runs`` is active.
    """
    active = [run for run in runs if locks.holder(RunDir(run.path).lock)]
    if not active:
        raise ConfigError(
            Problem("no matching run is active", "RUNS", "type: make status", code="run.not-active")
        )
    for run in active:
        RunDir(run.path).stop_request.touch()
        say("STOP", f"{run.label}   stop requested; make resumes it")
    return EXIT_DONE


def stop_all(folder: Path) -> int:
    """Interrupt the process that trains in the study folder ``folder``.

    Raises ConfigError if there is no such process.
    """
    pid = locks.holder(folder / LOCK)
    if not pid.isdecimal():
        what, advice = "no process is training in this folder", "type: make status"
        raise ConfigError(Problem(what, str(folder), advice, code="run.not-active"))
    os.kill(int(pid), signal.SIGINT)
    say("STOP", f"process {pid} stops after saving its runs; make resumes them")
    return EXIT_DONE
