"""Code that no commit names: refused where results are for a paper, and kept beside the run.

The tree is the one that this package lies in, whatever folder a command is typed in.
"""

from pathlib import Path

from lib.errors import Problem, RunError
from lib.files import sha256, write_atomic
from lib.repro.source import Commit, commit, git
from lib.rundir import RunDir

_NAMED_FILES = 3
# Nothing of the user's settings may change a patch, and no program of theirs is run.
_PATCH = ("diff", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv")
_PATCH += ("--no-color", "--src-prefix=a/", "--dst-prefix=b/")


def describe_tree(found: Commit | None) -> str:
    """What is not committed, in one line; "" for nothing."""
    if found is None:
        return "no commit names this code (git status says why)"
    if not found.uncommitted:
        return ""
    named = ", ".join(found.uncommitted[:_NAMED_FILES])
    more = len(found.uncommitted) - _NAMED_FILES
    return f"not committed: {named}" + (f" and {more} more" if more > 0 else "")


def tree_problems(profile: str, allowed: bool) -> list[Problem]:
    """Code that is not committed, under a ``profile`` that is for papers, unless ``allowed``."""
    if allowed or profile != "paper_repro":
        return []
    what = describe_tree(commit())
    if not what:
        return []
    remedy = "commit it, or type: make DIRTY=y, which keeps the difference beside each run"
    return [Problem(f"{what}; {remedy}")]


def captured_diff(run_dir: Path) -> dict[str, str] | None:
    """Write what git needs to make this code from the commit into ``code.diff``; file and SHA-256.

    Tracked files, and those that git does not track but Python can import or Kconfig read. None
    where all is committed, or git cannot tell. RunError where git fails.
    """
    target = RunDir(run_dir).code_diff
    target.unlink(missing_ok=True)
    found = commit()
    if found is None or not found.uncommitted:
        return None
    parts = [git(*_PATCH, "HEAD")]
    # Between two files, a difference is exit code 1.
    against = (*_PATCH, "--no-index", "--", "/dev/null")
    parts += [git(*against, name, expected=(1,)) for name in found.untracked]
    patch = [part for part in parts if part is not None]
    if len(patch) < len(parts):
        raise RunError(Problem("git diff failed", str(run_dir), "type: git diff HEAD"))
    write_atomic(target, b"".join(patch))
    return {"file": target.name, "sha256": sha256(target)}
