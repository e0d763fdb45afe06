"""Local dashboards of the trackers for the runs of a study, reachable from this machine only."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lib.console import log
from lib.errors import PreflightError, Problem
from lib.project import python_module_command

_LOOPBACK = "127.0.0.1"
# trackio.cli cannot be started with "-m".
_TRACKIO = "from trackio.cli import main; main()"
# Default port of each program.
DASHBOARD_PORTS = {"tensorboard": 6006, "trackio": 7860}


def serve_dashboard(name: str, study: Path, port: int) -> NoReturn:
    """Replace this process with the dashboard server of ``name`` for the runs of a study.

    Raises PreflightError if the package is missing or no run was logged to this tracker.
    """
    if find_spec(name) is None:
        advice = f"type: make setup EXTRAS={name}"
        raise PreflightError(
            Problem(f"package {name} is not installed", next=advice, code="env.missing-package")
        )
    log_folder = study if name == "tensorboard" else _store(study)
    if not any(log_folder.glob("*/trackers/tensorboard" if name == "tensorboard" else "*.db")):
        advice = f"train with SET=TRACKER_{name.upper()}=y"
        raise PreflightError(
            Problem(f"no run was logged to {name}", str(log_folder), advice, code="run.not-found")
        )
    log("SERVE", f"{name} at http://{_LOOPBACK}:{port}   press Ctrl-C to stop")
    os.execve(sys.executable, _command(name, study, port), _environment(name, study, port))


def _command(name: str, study: Path, port: int) -> list[str]:
    if name == "tensorboard":
        args = ["--logdir", str(study), "--host", _LOOPBACK, "--port", str(port)]
        return python_module_command("tensorboard.main", "serve", *args)
    return [sys.executable, "-P", "-c", _TRACKIO, "show", "--host", _LOOPBACK]


def _environment(name: str, study: Path, port: int) -> dict[str, str]:
    if name == "tensorboard":
        return dict(os.environ)
    # trackio reads its port from gradio's variable.
    return {**os.environ, "TRACKIO_DIR": str(_store(study)), "GRADIO_SERVER_PORT": str(port)}


def _store(study: Path) -> Path:
    """Return the folder of trackio's databases for this study."""
    return Path(os.environ.get("TRACKIO_DIR") or study / "trackio")
