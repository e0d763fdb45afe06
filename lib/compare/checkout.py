"""Reconstruction of the source tree behind a run: the recorded commit with the recorded diff."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from lib.errors import PreflightError, Problem
from lib.files import sha256
from lib.project import ROOT


def has_commit(sha: str) -> bool:
    """Return whether this repository contains the commit ``sha``."""
    try:
        return not _git(ROOT, "cat-file", "-e", f"{sha}^{{commit}}").returncode
    except OSError:
        return False


def check_out(sha: str, diff: Path | None, folder: Path) -> None:
    """Write the tree of ``sha`` with ``diff`` applied into ``folder``, which must not exist.

    The tree is a clone that shares the objects of this repository; this repository does not change.
    Raises PreflightError with git's message if a git command fails.
    """
    steps = [
        (ROOT, ["clone", "-q", "--shared", "--no-checkout", str(ROOT), str(folder)]),
        (folder, ["checkout", "-q", "--detach", sha]),
    ]
    if diff is not None:
        steps.append((folder, ["apply", "--binary", "--whitespace=nowarn", str(diff.absolute())]))
    for directory, args in steps:
        done = _git(directory, *args)
        if done.returncode:
            what = f"git {args[0]} failed: {done.stderr.strip()}"
            raise PreflightError(Problem(what, str(diff or sha), code="git.failed"))


def other_files(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    """Return the files of ``recorded`` that are missing from ``folder`` or have another digest.

    Absolute paths are skipped because they are not part of the tree.
    """
    return [
        name
        for name, digest in recorded.items()
        if not Path(name).is_absolute()
        and (not (folder / name).is_file() or sha256(folder / name) != digest)
    ]


def _git(directory: Path, *args: str) -> subprocess.CompletedProcess:
    command = ["git", "--no-optional-locks", "-C", str(directory), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)
