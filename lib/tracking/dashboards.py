"""TensorBoard for the runs of a study, reachable from this machine only."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lib.console import log
from lib.errors import PreflightError, Problem
from lib.project import python_module_command

_LOOPBACK = "127.0.0.1"


def serve_tensorboard(study: Path, port: int) -> NoReturn:
    """Replace this process with the server for the runs of a study.

    Raises PreflightError if the package is missing or no run was logged to TensorBoard.
    """
    if find_spec("tensorboard") is None:
        what, advice = "package tensorboard is not installed", "type: make setup EXTRAS=tensorboard"
        raise PreflightError(Problem(what, next=advice, code="env.missing-package"))
    if not any(study.glob("*/trackers/tensorboard")):
        what, advice = "no run was logged to tensorboard", "train with SET=TRACKER_TENSORBOARD=y"
        raise PreflightError(Problem(what, str(study), advice, code="run.not-found"))
    log("SERVE", f"tensorboard at http://{_LOOPBACK}:{port}   press Ctrl-C to stop")
    args = ["--logdir", str(study), "--host", _LOOPBACK, "--port", str(port)]
    command = python_module_command("tensorboard.main", "serve", *args)
    os.execv(command[0], command)
