"""``manifest.json``: provenance of a run, for auditing and for reproducing the run.

Fields that depend on time, host or folder are stored under ``volatile``. Only a fixed list of
environment variables is recorded, because other variables may contain secrets.
"""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lib.environment.packages import installed
from lib.environment.record import probed_hardware
from lib.environment.tree import captured_diff
from lib.machine.observe import hardware
from lib.project import ROOT
from lib.repro.seal import SCHEMA_VERSION, write_manifest
from lib.repro.software import thread_facts, torch_facts, variables
from lib.repro.source import git_state
from lib.rundir import RunDir
from lib.status import State


def begin_manifest(
    run: RunDir,
    build_dir: Path,
    device: torch.device,
    pids: Sequence[int],
    facts: Mapping[str, Any],
) -> None:
    """Write the manifest of a run that starts or resumes.

    ``pids`` are the process ids of all ranks, ``facts`` additional entries from the caller. Code
    and data are digested before the first step, so that edits during the run are not attributed to
    it.
    """
    record = {
        "schema_version": SCHEMA_VERSION,
        "status": State.RUNNING,
        "failure": None,
        "code": git_state() | {"diff": captured_diff(run.path)},
        "hardware": hardware(device),
        "torch": torch_facts(),
        "threads": thread_facts(),
        "variables": variables(volatile=False),
        "oom_fallbacks": [],
        **facts,
        "artifacts": {},
        "volatile": {
            "name": run.path.name,
            "host": platform.node(),
            "pids": [*pids],
            "git_root": str(ROOT),
            "argv": sys.argv,
            "working_directory": os.getcwd(),
            "rerun": _rerun(run, build_dir),
            "variables": variables(volatile=True),
            "attempts": _attempts(run),
            "artifacts": {},
            "hardware_files": probed_hardware(run),
        },
    }
    write_manifest(run, record)


def note_fallback(run: RunDir, record: Mapping[str, Any]) -> None:
    """Append the record of an out-of-memory fallback to ``oom_fallbacks``."""
    manifest = json.loads(run.manifest.read_text())
    manifest["oom_fallbacks"].append(dict(record))
    write_manifest(run, manifest)


def environment() -> dict[str, Any]:
    """Return versions of Python, torch and its libraries, and every installed package."""
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "torch_git": torch.version.git_version,
        "cudnn_version": torch.backends.cudnn.version(),
        "packages": installed(),
    }


def _rerun(run: RunDir, build_dir: Path) -> str:
    """Return the command that trains the run again from ``.config``; the old folder is kept."""
    command = ["make", "-C", str(ROOT), "rerun", f"RUNS={run.path.name}"]
    if build_dir.resolve() != ROOT.resolve():
        command.append(f"O={build_dir.resolve()}")
    return shlex.join(command)


def _attempts(run: RunDir) -> list[dict[str, Any]]:
    """Return the attempts of the run so far, the current attempt last.

    An earlier attempt without a recorded end was killed.
    """
    try:
        attempts = json.loads(run.manifest.read_text())["volatile"]["attempts"]
    except (OSError, ValueError, KeyError, TypeError):
        attempts = []
    for attempt in attempts:
        if attempt["state"] == State.RUNNING:
            attempt["state"] = "KILLED"
    return [*attempts, {"state": State.RUNNING, "started_at": time.time()}]
