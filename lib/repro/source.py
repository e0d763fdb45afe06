"""Which code made a result: a digest of every source file of this tree that the process loaded.

``git status`` is clean when an ignored file is imported, and a commit says nothing about edits; the
files themselves say it all.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lib.files import sha256
from lib.project import ROOT

# What only plans and starts runs or reads their results: a change there makes no finished run
# stale. A worker has some of it loaded, depending on which command started it.
_AROUND_TRAINING = (
    "gpt2/ablation/",
    "gpt2/planning.py",
    "lib/analysis/",
    "lib/cli.py",
    "lib/console.py",
    "lib/kconfig/",
    "lib/plan",
    "lib/runner/",
    "lib/setup/",
    "lib/tracking/",
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


def git_state() -> dict[str, str | bool | None]:
    """``git_sha``, ``branch`` and ``dirty_tree`` of this tree.

    Where this tree is no repository of its own, or without the program, sha and branch are None and
    ``dirty_tree`` is ``unknown``, which is not the same as clean.
    """
    unknown: dict[str, str | bool | None] = {
        "git_sha": None,
        "branch": None,
        "dirty_tree": "unknown",
    }
    # git would answer for a repository that this tree lies in.
    if not (ROOT / ".git").exists():
        return unknown
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(ROOT),
        "status",
        "--porcelain=v2",
        "--branch",
    ]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return unknown
    lines = output.splitlines()
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    return {
        "git_sha": heads["branch.oid"],
        "branch": heads["branch.head"],
        "dirty_tree": any(not line.startswith("#") for line in lines),
    }


def _makes_results(name: str) -> bool:
    inside = name.split("/", 1)[0] in _PACKAGES
    return inside and not name.startswith(_AROUND_TRAINING)


def _loaded_digest(name: str) -> str:
    """Of the file as it was loaded: workers are forked long after the code was read."""
    try:
        modified_ns = (ROOT / name).stat().st_mtime_ns
    except OSError:
        return EDITED
    # A time in the future is a clock that is wrong, and says nothing.
    return EDITED if _LOADED_NS < modified_ns <= time.time_ns() else _digest(name)


def _digest(name: str) -> str:
    path = ROOT / name
    try:
        found = path.stat()
    except OSError:
        return "absent"
    return _digest_of(path, found.st_mtime_ns, found.st_size)


@functools.cache
def _digest_of(path: Path, modified_ns: int, size: int) -> str:
    """Cached on what changes when a file is written: one process asks for many runs."""
    return sha256(path)
