"""Record of the training environment in a run's folder and manifest."""

import shutil
from pathlib import Path
from typing import Any

from lib.environment.detect import running
from lib.environment.packages import digest, installed
from lib.environment.snapshot import FOLDER, VOLATILE, read_index
from lib.files import sha256
from lib.rundir import RunDir


def keep_snapshot(build_dir: Path, run: RunDir) -> None:
    """Copy the build folder's snapshot to the run's folder, replacing an earlier snapshot."""
    source, target = build_dir / FOLDER, run.environment
    names = {*read_index(source).get("files", ()), *VOLATILE}
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for name in sorted(names):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def observed_environment(run: RunDir | None = None, policy: str = "any") -> dict[str, Any]:
    """Return facts of the running environment and digests of the snapshot in the run's folder.

    ``policy`` is the configured policy; ``kind`` and ``name`` are detected. No fact depends on
    time.
    """
    interpreter = running()
    packages = installed()
    return {
        "policy": policy,
        "kind": interpreter.kind,
        "name": interpreter.name,
        "conda_env_name": interpreter.name if interpreter.kind == "conda" else None,
        "python": interpreter.python,
        "packages_digest": digest(packages),
        "snapshot": {} if run is None else _digests(run, volatile=False),
    }


def probed_hardware(run: RunDir) -> dict[str, str]:
    """Return the digests of volatile files, which contain free disk space or temperatures."""
    return _digests(run, volatile=True)


def _digests(run: RunDir, volatile: bool) -> dict[str, str]:
    """Return file → SHA-256 of the snapshot in the run's folder."""
    files = sorted(run.environment.glob("*")) if run.environment.is_dir() else []
    selected = (path for path in files if (path.name in VOLATILE) == volatile)
    return {path.name: sha256(path) for path in selected if not path.name.startswith(".")}
