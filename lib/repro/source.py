"""Which code made a result: a digest of every source file of this tree that the process loaded.

``git status`` is clean when an ignored file is imported, and a commit says nothing about edits; the
files themselves say it all.
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

# What only plans and starts runs or reads their results: a change there makes no finished run
# stale. A worker has some of it loaded, depending on which command started it.
_AROUND_TRAINING = (
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
# When this process, or the server it was forked from, began to load the tree.
_LOADED_NS = time.time_ns()
# Stands for a digest nobody can know any more; it equals none, so the run counts as changed.
EDITED = "edited after it was loaded"


def loaded_source() -> dict[str, str]:
    """Path below the tree → SHA-256, for every loaded module that can change a run's result."""
    # Text, not paths: a process that trains has loaded two thousand modules.
    root = f"{ROOT}/"
    files = [vars(module).get("__file__") or "" for module in list(sys.modules.values())]
    names = {file.removeprefix(root) for file in files if file.startswith(root)}
    return {name: _loaded_digest(name) for name in sorted(names) if _makes_results(name)}


def changed_since(recorded: Mapping[str, str]) -> list[str]:
    """The files of ``recorded`` whose content is another now, or that are gone."""
    return [name for name, digest in recorded.items() if _digest(name) != digest]


@dataclass(frozen=True)
class Commit:
    """The commit that the tree was made from, and the files that are others than in it."""

    sha: str
    branch: str
    # Changed, added or removed since.
    tracked: Sequence[str]
    # Not known to git, ignored or not; only what Python could import or Kconfig read.
    untracked: Sequence[str]

    @property
    def uncommitted(self) -> list[str]:
        """All files that it does not name as they are."""
        return [*self.tracked, *self.untracked]


def commit() -> Commit | None:
    """What git says of this tree; None where it cannot tell, which is not the same as clean."""
    status = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--no-renames", "-z")
    state, others = git(*status), git("ls-files", "--others", "-z", "--", *_PACKAGES)
    if state is None or others is None:
        return None
    lines = _entries(state)
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    if heads["branch.oid"] == "(initial)":
        return None
    # Fields before the path: of a change, and of a conflict.
    fields = {"1": 8, "u": 10}
    tracked = [line.split(" ", fields[line[0]])[-1] for line in lines if line[0] in fields]
    untracked = [name for name in _entries(others) if _is_code(name)]
    return Commit(heads["branch.oid"], heads["branch.head"], sorted(tracked), sorted(untracked))


def git_state() -> dict[str, str | bool | None]:
    """``git_sha``, ``branch`` and ``dirty_tree`` of this tree.

    Outside git, or without the program, sha and branch are None and ``dirty_tree`` is ``unknown``.
    """
    found = commit()
    if found is None:
        return {"git_sha": None, "branch": None, "dirty_tree": "unknown"}
    return {
        "git_sha": found.sha,
        "branch": found.branch,
        "dirty_tree": bool(found.uncommitted),
    }


def git(*words: str, expected: Sequence[int] = (0,)) -> bytes | None:
    """What git prints of this tree's own repository; None where it fails or is not there.

    A repository that the tree merely lies in is not its own, and a variable that names another one
    (git sets them for its hooks) is not followed.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    variables["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=variables)
    except OSError:
        return None
    return done.stdout if done.returncode in expected else None


def _entries(output: bytes) -> list[str]:
    return [entry for entry in os.fsdecode(output).split("\0") if entry]


def _is_code(name: str) -> bool:
    path = ROOT / name
    return (path.suffix == ".py" or path.name.startswith("Kconfig")) and path.is_file()


def _makes_results(name: str) -> bool:
    inside = name.split("/", 1)[0] in _PACKAGES
    return inside and not name.startswith(_AROUND_TRAINING)


def _loaded_digest(name: str) -> str:
    """Of the file as it was loaded: workers are forked long after the code was read."""
    path = os.path.join(str(ROOT), name)
    try:
        found = os.stat(path)
    except OSError:
        return EDITED
    # A time in the future is a clock that is wrong, and says nothing.
    if _LOADED_NS < found.st_mtime_ns <= time.time_ns():
        return EDITED
    return _digest_of(path, found.st_mtime_ns, found.st_size)


def _digest(name: str) -> str:
    path = os.path.join(str(ROOT), name)
    try:
        found = os.stat(path)
    except OSError:
        return "absent"
    return _digest_of(path, found.st_mtime_ns, found.st_size)


@functools.cache
def _digest_of(path: str, modified_ns: int, size: int) -> str:
    """Cached on what changes when a file is written: one process asks for many runs.

    Text, not paths, which take longer to make than a file to look up.
    """
    return sha256(Path(path))
