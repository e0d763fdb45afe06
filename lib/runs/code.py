"""Code of a run: digests of the loaded files, the commit, and the patch of uncommitted changes.

``git status`` is clean if an ignored file is imported, so the files themselves are digested. The tree
is the one that contains this package. Imports no torch.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.errors import Problem, RunError
from lib.files import sha256_file, write_atomic
from lib.json_files import DamagedRecord, MissingRecord
from lib.project import ROOT
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run_dir import RunDir
from lib.units import first_of

# Code that a worker loads, and that plans and starts runs, or reads and shows their results: editing
# it makes no run stale. What it plans is the recorded identity of the run.
NOT_TRAINING = (
    "gpt2/records/",
    "gpt2/running/",
    "gpt2/study/",
    "lib/_start.py",
    "lib/commands.py",
    "lib/kablate.py",
    "lib/make_",
    "lib/report/",
    "lib/runner/",
    "lib/tracking/",
)
_PACKAGES = ("gpt2", "lib")
# A module that is run by ``python -m`` has another name.
_MODULES = ("__main__", "__mp_main__", *_PACKAGES)
# Time at which this process, or the server it was forked from, started to import the tree.
_LOADED_NS = time.time_ns()
# Placeholder for a digest that can no longer be computed; equals no digest, so the run is stale.
EDITED = "edited after it was loaded"
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def loaded_source() -> dict[str, str]:
    """Return path in the tree → SHA-256 of every loaded module that can affect results."""
    # Strings instead of Path objects: a training process has loaded two thousand modules.
    root = f"{ROOT}/"
    roots = tuple(f"{root}{package}/" for package in _PACKAGES)
    # Most modules are those of torch, which the name excludes.
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_MODULES)]
    files = [vars(module).get("__file__") or "" for module in modules]
    names = {file.removeprefix(root) for file in files if file.startswith(roots)}
    return {n: _digest(n, loaded=True) for n in sorted(names) if makes_results(n)}


class TreeDigests(dict[str, str]):
    """Digests of the files of the tree for one command: many runs record the same files."""

    def __missing__(self, name: str) -> str:
        self[name] = digest = _digest(name)
        return digest


def changed_since(recorded: Mapping[str, str], tree: TreeDigests | None = None) -> list[str]:
    """Return the files whose bytes changed, or that went, without ``NOT_TRAINING`` of older records."""
    tree = TreeDigests() if tree is None else tree
    changed = [name for name, digest in recorded.items() if tree[name] != digest]
    return [name for name in changed if makes_results(name)]


class GitCommit(NamedTuple):
    """HEAD commit of the tree and the files that differ from it."""

    sha: str
    branch: str
    # Files not tracked by git, ignored or not, that Python could import or Kconfig could read.
    untracked: Sequence[str]
    # Tracked files that were changed, added or removed since the commit, and the untracked ones.
    uncommitted: Sequence[str]


def head_commit() -> GitCommit | None:
    """Return the commit of this tree and its uncommitted files; None if git fails."""
    head = run_git("rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    status = run_git("status", "--porcelain", "--untracked-files=no", "--no-renames", "-z")
    others = run_git("ls-files", "--others", "-z", "--", *_PACKAGES)
    if head is None or status is None or others is None:
        return None
    sha, branch = os.fsdecode(head).split()
    untracked = [
        name
        for name in sorted(_entries(others))
        if name.endswith(".py") or name.rpartition("/")[2].startswith("Kconfig")
        if (ROOT / name).is_file()
    ]
    # Two letters and a space precede each name.
    tracked = sorted(entry[3:] for entry in _entries(status))
    return GitCommit(sha, branch, untracked, [*tracked, *untracked])


def git_state() -> dict[str, str | bool | None]:
    """Return ``git_sha``, ``branch`` and ``dirty_tree`` of this tree; "unknown" is not clean."""
    head = head_commit()
    if head is None:
        return {"git_sha": None, "branch": None, "dirty_tree": "unknown"}
    return {"git_sha": head.sha, "branch": head.branch, "dirty_tree": bool(head.uncommitted)}


def run_git(*args: str) -> bytes | None:
    """Return the output of git in the repository of this tree; None if git fails or is missing."""
    try:
        process = _git(args)
    except OSError:
        return None
    return None if process.returncode else process.stdout


def _git(args: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    # An enclosing repository is ignored, and so are variables that select another one, for hooks.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, check=False, env=environment)


def _reason(failed: subprocess.CompletedProcess[bytes]) -> str:
    """Return the message of git in one line."""
    return " ".join(failed.stderr.decode(errors="replace").split())


def _entries(output: bytes) -> list[str]:
    return [entry for entry in os.fsdecode(output).split("\0") if entry]


def makes_results(name: str) -> bool:
    """Return whether the code of a file, by its path in the tree, can affect results."""
    return not name.startswith(NOT_TRAINING)


def _digest(name: str, *, loaded: bool = False) -> str:
    """Return the digest of the file, or of the file as it was ``loaded``, long before a fork."""
    path = ROOT / name
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        return EDITED if loaded else "absent"
    # A time in the future indicates a wrong clock and is ignored.
    if loaded and _LOADED_NS < modified_ns <= time.time_ns():
        return EDITED
    return sha256_file(path)


def run_drift(record: RunRecord, device: str | None, tree: TreeDigests | None = None) -> list[str]:
    """Return what changed since the manifest of a run, which has none if the run never started.

    ``device`` is the device model that would be used now, None if it is not known.
    """
    try:
        torch, was = (record.manifest.value(str, "origin", name) for name in ("torch", "device"))
        recorded = {"torch": torch, "device": was, "sources": record.sources}
    except MissingRecord:
        return []
    except DamagedRecord:
        return [f"{record.run.manifest.name}, unreadable"]
    now = {"torch": installed_torch(), "device": was if device is None else device}
    return drift(recorded, now, tree)


def drift(
    recorded: Mapping[str, Any], now: Mapping[str, str], tree: TreeDigests | None = None
) -> list[str]:
    """Return torch version, device model and source files of ``recorded`` that changed."""
    facts = [
        f"{name} (was {recorded[name]}, is {now[name]})"
        for name in ("torch", "device")
        if recorded[name] != now[name]
    ]
    return facts + changed_since(recorded["sources"], tree)


@functools.cache
def installed_torch() -> str:
    """Return ``torch.__version__`` without importing torch, or "none" if torch is not installed.

    The package metadata may lack the local version (after ``+``) that names the build.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__(?:: \w+)? = ['\"](.+)['\"]$", text, re.MULTILINE)
    return match[1] if match else UNKNOWN


# The patch must not depend on the user's git settings or external programs.
_PATCH = (
    *("diff", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv"),
    *("--no-color", "--src-prefix=a/", "--dst-prefix=b/"),
)


def describe_tree() -> str:
    """Return one line listing uncommitted files; "" if all code is committed."""
    head = head_commit()
    if head is not None:
        return f"not committed: {first_of(head.uncommitted)}" if head.uncommitted else ""
    if not shutil.which("git"):
        return "git is not installed, so the commit of this code is unknown"
    # One of them fails, and its message is the reason.
    commands = ("status", "--porcelain"), ("log", "-1")
    reasons = (_reason(done) for c in commands if (done := _git(c)).returncode)
    return f"no commit found for this code: {next(reasons, '')}"


def uncommitted_problems(profile: str, allowed: bool) -> list[Problem]:
    """Return a problem if code is uncommitted under paper_repro, unless ``allowed``."""
    if allowed or profile != "paper_repro" or not (what := describe_tree()):
        return []
    if head_commit() is not None:
        advice = "commit it, or type: make ALLOW_DIRTY=y to store the difference with each run"
    else:
        advice = (
            "make it known, or type: make ALLOW_DIRTY=y to train without a record of the commit"
        )
    code = "code.uncommitted" if shutil.which("git") else "code.no-git"
    return [Problem(what, next=advice, code=code)]


def write_code_patch(run_dir: Path) -> dict[str, str] | None:
    """Write ``code.diff``; return its name and SHA-256, None without a commit or a difference to it."""
    target = RunDir(run_dir).code_diff
    target.unlink(missing_ok=True)
    head = head_commit()
    if head is None or not head.uncommitted:
        return None
    patch = _difference("HEAD")
    for name in head.untracked:
        patch += _difference("--no-index", "--", "/dev/null", name)
    write_atomic(target, patch)
    return {"file": target.name, "sha256": sha256_file(target)}


def _difference(*args: str) -> bytes:
    """Return the output of git diff. Raises RunError with git's message."""
    done = _git([*_PATCH, *args])
    # With --no-index, 1 means that the files differ.
    if done.returncode > 1:
        advice = "type: git diff HEAD"
        raise RunError(Problem(f"git diff failed: {_reason(done)}", next=advice, code="git.failed"))
    return done.stdout


def has_commit(sha: str) -> bool:
    return run_git("cat-file", "-e", f"{sha}^{{commit}}") is not None


def files_not_committed(recorded: Mapping[str, str], commit: str) -> list[str]:
    """Return the files of ``recorded`` in the tree that ``commit`` does not hold with this digest."""
    # A record is data: text that is no commit would be an option or another revision.
    is_commit = _COMMIT.fullmatch(commit) is not None
    return [
        name
        for name, digest in recorded.items()
        # Initial weights are not part of the tree.
        if not Path(name).is_absolute()
        and not (is_commit and _committed_digest(str(ROOT), commit, name) == digest)
    ]


@functools.cache
def _committed_digest(root: str, commit: str, name: str) -> str:
    """Return the digest of a file in ``commit`` of the tree ``root``; "" if it has no such file."""
    content = run_git("show", f"{commit}:{name}")
    return "" if content is None else hashlib.sha256(content).hexdigest()
