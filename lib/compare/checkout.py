"""The source that made a run, put together again: its commit, and the edits that it was made with."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from lib.errors import PreflightError, Problem
from lib.files import sha256
from lib.project import ROOT


def has_commit(sha: str) -> bool:
    """Whether the repository of this tree holds the commit ``sha``."""
    try:
        return not _git(ROOT, "cat-file", "-e", f"{sha}^{{commit}}").returncode
    except OSError:
        return False


def check_out(sha: str, diff: Path | None, folder: Path) -> None:
    """Write the tree of ``sha``, with ``diff`` applied, into ``folder``, which does not exist.

    It is a clone that borrows the objects of this repository, whose own state stays as it is.
    PreflightError with git's own words where that does not work.
    """
    steps = [
        (ROOT, ["clone", "-q", "--shared", "--no-checkout", str(ROOT), str(folder)]),
        (folder, ["checkout", "-q", "--detach", sha]),
    ]
    if diff is not None:
        steps.append((folder, ["apply", "--binary", "--whitespace=nowarn", str(diff.absolute())]))
    for place, words in steps:
        done = _git(place, *words)
        if done.returncode:
            what = f"git {words[0]} failed: {done.stderr.strip()}"
            raise PreflightError(Problem(what, str(diff or sha)))


def other_files(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    """The files of ``recorded`` that are not in ``folder`` with that digest.

    A name that is an absolute path is no part of the tree, and left out.
    """
    return [
        name
        for name, digest in recorded.items()
        if not Path(name).is_absolute()
        and (not (folder / name).is_file() or sha256(folder / name) != digest)
    ]


def _git(place: Path, *words: str) -> subprocess.CompletedProcess:
    command = ["git", "--no-optional-locks", "-C", str(place), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)
