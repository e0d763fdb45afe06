"""What a run's folder and its manifest say of the environment that it was trained in."""

import shutil
from pathlib import Path
from typing import Any

from lib.environment.detect import running
from lib.environment.packages import digest, installed
from lib.environment.snapshot import FOLDER, VOLATILE, read_index
from lib.files import sha256
from lib.rundir import RunDir


def keep_snapshot(build_dir: Path, run: RunDir) -> None:
    """Copy the build folder's snapshot into the run's folder, in place of an earlier one."""
    source, target = build_dir / FOLDER, run.environment
    wanted = {*read_index(source).get("files", ()), *VOLATILE}
    target.mkdir(exist_ok=True)
    for left in target.iterdir():
        left.unlink()
    for name in sorted(wanted):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def observed_environment(run: RunDir | None = None, policy: str = "any") -> dict[str, Any]:
    """The running interpreter's environment, and the files in the run's folder that describe it.

    ``policy`` is what the configuration asks for, ``kind`` and ``name`` what was found. Nothing in
    it depends on the moment.
    """
    found = running()
    packages = installed()
    return {
        "policy": policy,
        "kind": found.kind,
        "name": found.name,
        "conda_env_name": found.name if found.kind == "conda" else None,
        "python": found.python,
        "packages_digest": digest(packages),
        "snapshot": {} if run is None else _digests(run, volatile=False),
    }


def probed_hardware(run: RunDir) -> dict[str, str]:
    """The digests of the files that the moment decides too: free disk space, temperatures."""
    return _digests(run, volatile=True)


def _digests(run: RunDir, volatile: bool) -> dict[str, str]:
    """File → SHA-256, of the snapshot in the run's folder."""
    files = sorted(run.environment.glob("*")) if run.environment.is_dir() else []
    chosen = (path for path in files if (path.name in VOLATILE) == volatile)
    return {path.name: sha256(path) for path in chosen if not path.name.startswith(".")}
