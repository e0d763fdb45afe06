"""Provenance of the code: a digest of every source file of this tree that the process loaded.

``git status`` is clean if an ignored file is imported, and a commit does not record edits, so the
files themselves are digested.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.files import sha256
from lib.project import ROOT

# Code that only plans and starts runs or reads their results: editing these files does not make a
# finished run stale. A worker has some of them loaded, depending on the command that started it.
_NOT_TRAINING = (
    "gpt2/ablation/",
    "gpt2/arguments.py",
    "gpt2/audit.py",
    "gpt2/comparison.py",
    "gpt2/planning.py",
    "gpt2/reproduce.py",
    "gpt2/scratch.py",
    "gpt2/verification/",
    "lib/analysis/",
    "lib/audit/",
    "lib/cli.py",
    "lib/companions.py",
    "lib/compare/",
    "lib/console.py",
    "lib/environment/",
    "lib/kconfig/",
    "lib/plan",
    "lib/queries/",
    "lib/runner/",
    "lib/setup/",
    "lib/telemetry/",
    "lib/tracking/",
    "lib/verify/",
    "lib/watch/",
)
_PACKAGES = ("gpt2", "lib")
# Time at which this process, or the server it was forked from, started to import the tree.
_LOADED_NS = time.time_ns()
# Placeholder for a digest that can no longer be computed; equals no digest, so the run is stale.
EDITED = "edited after it was loaded"


def loaded_source() -> dict[str, str]:
    """Return path in the tree → SHA-256 of every loaded module that can affect results."""
    # Strings instead of Path objects: a training process has loaded two thousand modules.
    root = f"{ROOT}/"
    files = [vars(module).get("__file__") or "" for module in list(sys.modules.values())]
    names = {file.removeprefix(root) for file in files if file.startswith(root)}
    return {name: _loaded_digest(name) for name in sorted(names) if _makes_results(name)}


def changed_since(recorded: Mapping[str, str]) -> list[str]:
    """Return the files of ``recorded`` that were edited or removed since."""
    return [name for name, digest in recorded.items() if _digest(name) != digest]


@dataclass(frozen=True)
class Commit:
    """HEAD commit of the tree and the files that differ from it."""

    sha: str
    branch: str
    # Tracked files that were changed, added or removed since the commit.
    tracked: Sequence[str]
    # Files not tracked by git, ignored or not, that Python could import or Kconfig could read.
    untracked: Sequence[str]

    @property
    def uncommitted(self) -> list[str]:
        """Return all files that differ from the commit."""
        return [*self.tracked, *self.untracked]


def commit() -> Commit | None:
    """Return the commit of this tree and its uncommitted files.

    Returns None if git fails, which is different from a clean tree.
    """
    status_args = ("--porcelain=v2", "--branch", "--untracked-files=no", "--no-renames", "-z")
    status_output = git("status", *status_args)
    untracked_output = git("ls-files", "--others", "-z", "--", *_PACKAGES)
    if status_output is None or untracked_output is None:
        return None
    lines = _entries(status_output)
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    if heads["branch.oid"] == "(initial)":
        return None
    # Number of fields before the path, for a change and for a conflict.
    fields = {"1": 8, "u": 10}
    tracked = [line.split(" ", fields[line[0]])[-1] for line in lines if line[0] in fields]
    untracked = [name for name in _entries(untracked_output) if _is_code(name)]
    return Commit(heads["branch.oid"], heads["branch.head"], sorted(tracked), sorted(untracked))


def git_state() -> dict[str, str | bool | None]:
    """Return ``git_sha``, ``branch`` and ``dirty_tree`` of this tree.

    Outside a repository, or if git is not installed, sha and branch are None and ``dirty_tree`` is
    "unknown".
    """
    head = commit()
    if head is None:
        return {"git_sha": None, "branch": None, "dirty_tree": "unknown"}
    return {
        "git_sha": head.sha,
        "branch": head.branch,
        "dirty_tree": bool(head.uncommitted),
    }


def git(*args: str, expected: Sequence[int] = (0,)) -> bytes | None:
    """Run git in the repository of this tree and return its output.

    Returns None if git fails or the tree is not a repository root: an enclosing repository is
    ignored, and so are variables that select another repository (git sets them for hooks).
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *args]
    try:
        process = subprocess.run(command, capture_output=True, check=False, env=environment)
    except OSError:
        return None
    return process.stdout if process.returncode in expected else None


def _entries(output: bytes) -> list[str]:
    return [entry for entry in os.fsdecode(output).split("\0") if entry]


def _is_code(name: str) -> bool:
    path = ROOT / name
    return (path.suffix == ".py" or path.name.startswith("Kconfig")) and path.is_file()


def _makes_results(name: str) -> bool:
    inside = name.split("/", 1)[0] in _PACKAGES
    return inside and not name.startswith(_NOT_TRAINING)


def _loaded_digest(name: str) -> str:
    """Return the digest of the file as it was loaded: workers are forked long after the import."""
    path = os.path.join(str(ROOT), name)
    try:
        info = os.stat(path)
    except OSError:
        return EDITED
    # A time in the future indicates a wrong clock and is ignored.
    if _LOADED_NS < info.st_mtime_ns <= time.time_ns():
        return EDITED
    return _digest_of(path, info.st_mtime_ns, info.st_size)


def _digest(name: str) -> str:
    path = os.path.join(str(ROOT), name)
    try:
        info = os.stat(path)
    except OSError:
        return "absent"
    return _digest_of(path, info.st_mtime_ns, info.st_size)


@functools.cache
def _digest_of(path: str, modified_ns: int, size: int) -> str:
    """Compute SHA-256; cached by modification time and size, since one process checks many runs.

    ``path`` is a string because creating Path objects takes longer than the cache lookup.
    """
    return sha256(Path(path))
