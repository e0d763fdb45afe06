"""Copies of this tree's current files in a separate repository."""

import shutil
import subprocess
from pathlib import Path

from lib.project import ROOT


def git(folder: Path, *words: str, given: str = "") -> str:
    """Run git in ``folder`` with ``given`` on stdin; return stdout."""
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", *identity, *words]
    return subprocess.run(
        command, cwd=folder, input=given, check=True, capture_output=True, text=True
    ).stdout


def commit_copy(folder: Path) -> None:
    """Copy this tree to ``folder``, except ignored files, and commit the copy."""
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
