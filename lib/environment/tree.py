"""Uncommitted code: refused under the profile paper_repro, otherwise stored as a patch.

The tree is the one that contains this package, independent of the working directory.
"""

from pathlib import Path

from lib.errors import Problem, RunError
from lib.files import sha256, write_atomic
from lib.repro.source import Commit, commit, git
from lib.rundir import RunDir

_MAX_FILES_SHOWN = 3
# The patch must not depend on the user's git settings or external programs.
_PATCH = ("diff", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv")
_PATCH += ("--no-color", "--src-prefix=a/", "--dst-prefix=b/")


def describe_tree(head: Commit | None) -> str:
    """Return one line listing uncommitted files; "" if all code is committed."""
    if head is None:
        return "no commit found for this code (see git status)"
    if not head.uncommitted:
        return ""
    shown = ", ".join(head.uncommitted[:_MAX_FILES_SHOWN])
    hidden = len(head.uncommitted) - _MAX_FILES_SHOWN
    return f"not committed: {shown}" + (f" and {hidden} more" if hidden > 0 else "")


def tree_problems(profile: str, allowed: bool) -> list[Problem]:
    """Return a problem if code is uncommitted under paper_repro, unless ``allowed``."""
    if allowed or profile != "paper_repro":
        return []
    what = describe_tree(commit())
    if not what:
        return []
    remedy = "commit it, or type: make DIRTY=y to store the difference with each run"
    return [Problem(f"{what}; {remedy}", code="code.uncommitted")]


def captured_diff(run_dir: Path) -> dict[str, str] | None:
    """Write the patch from the commit to the current code to ``code.diff``.

    Returns file name and SHA-256, or None if all code is committed or there is no commit. The patch
    contains changes to tracked files, and untracked files that Python can import or Kconfig can
    read. Raises RunError if git diff fails.
    """
    target = RunDir(run_dir).code_diff
    target.unlink(missing_ok=True)
    head = commit()
    if head is None or not head.uncommitted:
        return None
    parts = [git(*_PATCH, "HEAD")]
    # git diff --no-index returns exit code 1 if the files differ.
    new_file = (*_PATCH, "--no-index", "--", "/dev/null")
    parts += [git(*new_file, name, expected=(1,)) for name in head.untracked]
    patch = [part for part in parts if part is not None]
    if len(patch) < len(parts):
        advice = "type: git diff HEAD"
        raise RunError(Problem("git diff failed", str(run_dir), advice, code="git.failed"))
    write_atomic(target, b"".join(patch))
    return {"file": target.name, "sha256": sha256(target)}
