"""``manifest.json``: what made a run, so that it can be judged and built again.

Everything that the hour or the host decides stands under ``volatile``. The environment's variables
are not written down: some of them are secrets.
"""

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lib.files import sha256, write_json
from lib.machine.observe import deviations, hardware, knobs
from lib.machine.options import MachineConfig
from lib.machine.process import Process
from lib.repro.source import git_state
from lib.rundir import RunDir

SCHEMA_VERSION = 1


def begin_manifest(
    run: RunDir,
    machine: MachineConfig,
    device: torch.device,
    process: Process,
    pids: Sequence[int],
    facts: Mapping[str, Any],
) -> None:
    """Write the manifest of a run that starts or goes on; ``facts`` are the caller's own.

    ``pids`` are the process ids of all ranks.

    Code and data are digested before the first step, so an edit during the run is not taken for
    what made it.
    """
    settings = knobs(machine, device, process)
    record = {
        "schema_version": SCHEMA_VERSION,
        "command": sys.argv,
        "code": git_state(),
        "environment": environment(),
        "hardware": hardware(device),
        "knobs": settings,
        "deviations": deviations(settings),
        "oom_fallbacks": [],
        **facts,
        "artifacts": {},
        "volatile": {"host": platform.node(), "pids": [*pids], "attempts": _attempts(run)},
    }
    write_json(run.manifest, record)


def end_manifest(run: RunDir, code_changed: list[str]) -> None:
    """Add the digest of every result, the end, and the source files edited during the run."""
    record = json.loads(run.manifest.read_text())
    results = (
        run.resolved_config,
        run.metrics,
        run.per_query,
        run.summary,
        run.weights,
        run.sample,
    )
    record["artifacts"] = {path.name: _facts(path) for path in results if path.exists()}
    record["code"]["changed_during_run"] = code_changed
    record["volatile"]["attempts"][-1]["ended_at"] = time.time()
    write_json(run.manifest, record)


def environment() -> dict[str, Any]:
    """Versions of Python, torch and every installed package."""
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "torch_git": torch.version.git_version,
        "cudnn_version": torch.backends.cudnn.version(),
        "packages": _packages(),
    }


def _packages() -> dict[str, str]:
    """Name → version of what is installed, as the folders that pip makes are called.

    Ten times faster than reading each package's metadata.
    """
    folders = (Path(entry) for entry in sys.path if entry)
    installed = {info.stem for folder in folders for info in folder.glob("*.dist-info")}
    return dict(name.rsplit("-", 1) for name in sorted(installed))


def _attempts(run: RunDir) -> list[dict[str, float]]:
    """The starts of the run so far, this one last."""
    try:
        earlier = json.loads(run.manifest.read_text())["volatile"]["attempts"]
    except (OSError, ValueError, KeyError):
        earlier = []
    return [*earlier, {"started_at": time.time()}]


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
