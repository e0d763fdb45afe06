"""The trackers' own pages of the runs here, served to this machine alone."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lib.console import say
from lib.errors import PreflightError, Problem
from lib.modules import module_command

_LOOPBACK = "127.0.0.1"
# trackio.cli has no entry of its own for "-m".
_TRACKIO = "from trackio.cli import main; main()"
# What each program takes when nobody says otherwise.
PORTS = {"tensorboard": 6006, "trackio": 7860}


def serve(name: str, study: Path, port: int) -> NoReturn:
    """Become the server that ``name`` brings, for the runs of a study's folder.

    PreflightError where the package is missing, or has nothing to show.
    """
    if find_spec(name) is None:
        advice = f"type: make setup EXTRAS={name}"
        raise PreflightError(Problem(f"the package {name} is missing", next=advice))
    shown = study if name == "tensorboard" else _store(study)
    if not any(shown.glob("*/trackers/tensorboard" if name == "tensorboard" else "*.db")):
        advice = f"train with SET=TRACKER_{name.upper()}=y"
        raise PreflightError(Problem(f"no run here was shown to {name}", str(shown), advice))
    say("SERVE", f"{name} at http://{_LOOPBACK}:{port}   Ctrl-C ends it")
    os.execve(sys.executable, _command(name, study, port), _environment(name, study, port))


def _command(name: str, study: Path, port: int) -> list[str]:
    if name == "tensorboard":
        where = ["--logdir", str(study), "--host", _LOOPBACK, "--port", str(port)]
        return module_command("tensorboard.main", "serve", *where)
    return [sys.executable, "-P", "-c", _TRACKIO, "show", "--host", _LOOPBACK]


def _environment(name: str, study: Path, port: int) -> dict[str, str]:
    if name == "tensorboard":
        return dict(os.environ)
    # trackio takes its port from where gradio does.
    return {**os.environ, "TRACKIO_DIR": str(_store(study)), "GRADIO_SERVER_PORT": str(port)}


def _store(study: Path) -> Path:
    """Where the study's trackers have trackio keep its runs."""
    return Path(os.environ.get("TRACKIO_DIR") or study / "trackio")
