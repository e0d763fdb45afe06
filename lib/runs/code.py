"""Code of a run: digests of loaded files, commit, uncommitted changes, drift, reconstruction.

``git status`` is clean if an ignored file is imported, and a commit does not record edits, so the
files themselves are digested. Uncommitted code is refused under the profile paper_repro, and
otherwise stored as a patch. The tree is the one that contains this package, independent of the
working directory. Does not import torch.
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

from lib.errors import PreflightError, Problem, RunError
from lib.files import sha256_file, write_atomic
from lib.json_files import DamagedRecord, MissingRecord, read_record
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
# A larger file is not an edit of this tree, and would fill the memory.
_MAX_PATCH_BYTES = 1 << 28


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
    """Digests of the files of the tree for one command, each computed once: many runs record the same
    files.
    """

    def __missing__(self, name: str) -> str:
        self[name] = digest = _digest(name)
        return digest


def changed_since(recorded: Mapping[str, str], tree: TreeDigests | None = None) -> list[str]:
    """Return the files of ``recorded`` whose bytes have changed since, or that were removed.

    The files of ``NOT_TRAINING``, which older records have, do not count.
    """
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
    """Return the commit of this tree and its uncommitted files.

    Returns None if git fails, which is different from a clean tree.
    """
    status_args = ("--porcelain=v2", "--branch", "--untracked-files=no", "--no-renames", "-z")
    status_output = run_git("status", *status_args)
    untracked_output = run_git("ls-files", "--others", "-z", "--", *_PACKAGES)
    if status_output is None or untracked_output is None:
        return None
    lines = _entries(status_output)
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    if heads["branch.oid"] == "(initial)":
        return None
    # Number of fields before the path, for a change and for a conflict.
    fields = {"1": 8, "u": 10}
    tracked = [line.split(" ", fields[line[0]])[-1] for line in lines if line[0] in fields]
    untracked = [
        name
        for name in sorted(_entries(untracked_output))
        if Path(name).match("*.py") or Path(name).match("Kconfig*")
        if (ROOT / name).is_file()
    ]
    uncommitted = [*sorted(tracked), *untracked]
    return GitCommit(heads["branch.oid"], heads["branch.head"], untracked, uncommitted)


def git_state() -> dict[str, str | bool | None]:
    """Return ``git_sha``, ``branch`` and ``dirty_tree`` of this tree.

    Outside a repository, or if git is not installed, sha and branch are None and ``dirty_tree`` is
    "unknown".
    """
    head = head_commit()
    if head is None:
        return {"git_sha": None, "branch": None, "dirty_tree": "unknown"}
    return {"git_sha": head.sha, "branch": head.branch, "dirty_tree": bool(head.uncommitted)}


def run_git(*args: str) -> bytes | None:
    """Run git in the repository of this tree and return its output.

    Returns None if git fails or the tree is not a repository root: an enclosing repository is
    ignored, and so are variables that select another repository (git sets them for hooks).
    """
    try:
        process = _git(args)
    except OSError:
        return None
    return None if process.returncode else process.stdout


def _git(args: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
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
    """Return the digest of the file, or of the file as it was ``loaded``.

    Workers are forked long after the import.
    """
    path = os.path.join(str(ROOT), name)
    try:
        info = os.stat(path)
    except OSError:
        return EDITED if loaded else "absent"
    # A time in the future indicates a wrong clock and is ignored.
    if loaded and _LOADED_NS < info.st_mtime_ns <= time.time_ns():
        return EDITED
    return _digest_of(path, info.st_mtime_ns, info.st_size)


@functools.cache
def _digest_of(path: str, modified_ns: int, size: int) -> str:
    """Compute SHA-256; cached by modification time and size, since one process checks many runs.

    ``path`` is a string because creating Path objects takes longer than the cache lookup.
    """
    return sha256_file(Path(path))


def run_drift(record: RunRecord, device: str | None, tree: TreeDigests | None = None) -> list[str]:
    """Return source files, torch version and device model that differ from the manifest of a run.

    ``device`` is the device model that would be used now, None if it is not known. Returns [] for a
    run that never started.
    """
    try:
        recorded = {
            name: record.manifest.value(str, "origin", name) for name in ("torch", "device")
        }
        origin = {**recorded, "sources": record.sources}
    except MissingRecord:
        return []
    except DamagedRecord:
        return [f"{record.run.manifest.name}, unreadable"]
    now = {"torch": installed_torch(), "device": recorded["device"] if device is None else device}
    return drift(origin, now, tree)


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
    if head is None and not shutil.which("git"):
        return "git is not installed, so the commit of this code is unknown"
    if head is None:
        # One of them fails, and its message is the reason.
        commands = ("status", "--porcelain"), ("log", "-1")
        reasons = (_reason(done) for c in commands if (done := _git(c)).returncode)
        return f"no commit found for this code: {next(reasons, '')}"
    if not head.uncommitted:
        return ""
    return f"not committed: {first_of(head.uncommitted)}"


def uncommitted_problems(profile: str, allowed: bool) -> list[Problem]:
    """Return a problem if code is uncommitted under paper_repro, unless ``allowed``."""
    if allowed or profile != "paper_repro" or not (what := describe_tree()):
        return []
    if not shutil.which("git"):
        remedy = "install git, or type: make ALLOW_DIRTY=y"
        return [Problem(f"{what}; {remedy}", code="code.no-git")]
    remedy = "commit it, or type: make ALLOW_DIRTY=y to store the difference with each run"
    return [Problem(f"{what}; {remedy}", code="code.uncommitted")]


def write_code_patch(run_dir: Path) -> dict[str, str] | None:
    """Write the patch from the commit to the current code to ``code.diff``.

    Returns file name and SHA-256, or None if all code is committed or there is no commit. The patch
    contains changes to tracked files, and untracked files that Python can import or Kconfig can
    read. Raises RunError if git diff fails.
    """
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


def checkout_commit(sha: str, diff: Path | None, folder: Path) -> None:
    """Write the tree of ``sha`` with ``diff`` applied into ``folder``, which must not exist.

    The tree is a clone that shares the objects of this repository; this repository does not change.
    Raises PreflightError with git's message if a git command fails.
    """
    subject = str(diff or sha)
    clone = ("clone", "-q", "--shared", "--no-checkout", str(ROOT), str(folder))
    _require_git(ROOT, subject, *clone)
    _require_git(folder, subject, "checkout", "-q", "--detach", sha)
    if diff is not None:
        _apply(folder, diff, "--binary", "--whitespace=nowarn")


def describe_patch(diff: Path) -> str:
    """Return the files that a patch changes, with the number of added and removed lines.

    Nothing is applied. Raises PreflightError if git cannot read the patch, ConfigError if it is not a
    regular file of a patch's size.
    """
    return _apply(ROOT, diff, "--stat", "--summary").rstrip()


def _apply(directory: Path, diff: Path, *options: str) -> str:
    """Return the output of git apply, which would wait for a pipe in place of ``diff``."""
    patch = read_record(diff, "a patch", _MAX_PATCH_BYTES)
    return _require_git(directory, str(diff), "apply", *options, "-", text=patch)


def _require_git(directory: Path, subject: str, *args: str, text: bytes = b"") -> str:
    """Return the output of git. Raises PreflightError on ``subject`` with git's message."""
    command = ["git", "--no-optional-locks", "-C", str(directory), *args]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    if done.returncode:
        what = f"git {args[0]} failed: {done.stderr.decode(errors='replace').strip()}"
        raise PreflightError(Problem(what, subject, code="git.failed"))
    return done.stdout.decode(errors="replace")


def files_not_committed(recorded: Mapping[str, str], commit: str) -> list[str]:
    """Return the files of ``recorded`` that ``commit`` does not hold with this digest.

    Absolute paths, such as initial weights, are not part of the tree.
    """
    # A record is data: text that is no commit would be an option or another revision.
    is_commit = _COMMIT.fullmatch(commit) is not None
    return [
        name
        for name, digest in recorded.items()
        if not Path(name).is_absolute()
        and not (is_commit and _committed_digest(str(ROOT), commit, name) == digest)
    ]


@functools.cache
def _committed_digest(root: str, commit: str, name: str) -> str:
    """Return the digest of a file in ``commit`` of the tree ``root``; "" if it has no such file."""
    content = run_git("show", f"{commit}:{name}")
    return "" if content is None else hashlib.sha256(content).hexdigest()


def mismatched_files(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    """Return the files of ``recorded`` that are missing from ``folder`` or have another digest.

    Absolute paths are skipped because they are not part of the tree.
    """
    return [
        name
        for name, digest in recorded.items()
        if not Path(name).is_absolute()
        and (not (folder / name).is_file() or sha256_file(folder / name) != digest)
    ]
