"""Checks of the commit behind the runs: present, clean, public, and containing the loaded code."""

import contextlib
import functools
import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lib.compare.checkout import has_commit
from lib.compare.facts import UNKNOWN
from lib.repro.source import git
from lib.verify.evidence import Evidence
from lib.verify.rows import Remark, Row, Verdict, row

_MAX_FILES_SHOWN = 3
_SHA_CHARS = 12


def commit_rows(runs: Sequence[Evidence]) -> list[Row]:
    """Return four rows; a missing commit is reported as neither public nor comparable."""
    shas = {run.name: run.of("code", "git_sha") for run in runs}
    recorded = [sha for sha in dict.fromkeys(shas.values()) if sha not in (UNKNOWN, None)]
    present = [sha for sha in recorded if has_commit(sha)]
    return [
        row("commit exists", _short(present), _missing(runs, present)),
        row("commit is clean", "no edited files", _edited(runs)),
        _public(runs, present),
        row("commit holds the code", "all loaded files", _code(runs, present)),
    ]


def remote_branches(sha: str) -> list[str] | None:
    """Return the remote branches that contain ``sha`` as of the last fetch; None without remotes."""
    if not (git("remote") or b"").strip():
        return None
    output = git("branch", "-r", "--contains", sha, "--format=%(refname:short)")
    return (output or b"").decode().split()


def _missing(runs: Sequence[Evidence], present: Sequence[str]) -> Iterator[Remark]:
    for run in runs:
        sha = run.of("code", "git_sha")
        if sha in (UNKNOWN, None):
            yield Remark(Verdict.UNKNOWN, f"no commit recorded for {run.name}", run.name)
        elif sha not in present:
            what = f"commit {sha[:_SHA_CHARS]} of {run.name} is not in this repository"
            yield Remark(Verdict.FAIL, what, run.name)


def _edited(runs: Sequence[Evidence]) -> Iterator[Remark]:
    for run in runs:
        dirty = run.of("code", "dirty_tree")
        edited = run.of("code", "changed_during_run")
        if dirty is True:
            what = f"{run.name} was trained with uncommitted code"
            yield Remark(Verdict.FAIL, what, run.name)
        elif dirty is not False or edited == UNKNOWN:
            yield Remark(Verdict.UNKNOWN, f"git status unknown for {run.name}", run.name)
        elif edited:
            what = f"edited while {run.name} was running: {_files(edited)}"
            yield Remark(Verdict.FAIL, what, run.name)


def _public(runs: Sequence[Evidence], present: Sequence[str]) -> Row:
    branches = {sha: remote_branches(sha) for sha in present}
    remarks, advice = [], ""
    for run in runs:
        sha = run.of("code", "git_sha")
        remote = branches.get(sha)
        if sha not in branches:
            what = f"the commit of {run.name} is not in this repository"
            remarks.append(Remark(Verdict.UNKNOWN, what, run.name))
        elif remote is None:
            what, advice = (
                "no git remote configured",
                "git remote add origin URL && git push origin HEAD",
            )
            remarks.append(Remark(Verdict.UNKNOWN, what, run.name))
        elif not remote:
            what = f"{sha[:_SHA_CHARS]} is not on any known remote branch"
            advice = (
                f"git push origin {sha[:_SHA_CHARS]}:refs/heads/BRANCH, "
                "or git fetch if the commit is already pushed"
            )
            remarks.append(Remark(Verdict.FAIL, what, run.name))
    names = ", ".join(dict.fromkeys(b for remote in branches.values() for b in remote or ()))
    return row("commit is public", f"on {names}", remarks, advice and f"type: {advice}")


def _code(runs: Sequence[Evidence], present: Sequence[str]) -> Iterator[Remark]:
    """Compare each file that a run loaded with the same file in the commit."""
    for run in runs:
        sha, sources = run.of("code", "git_sha"), run.facts.sources
        # Absolute paths, such as initial weights, are not part of the tree.
        names = tuple(name for name in sources if not Path(name).is_absolute())
        committed = _committed(sha, names) if sha in present and names else None
        if committed is None:
            what = f"cannot compare the code of {run.name} with its commit"
            yield Remark(Verdict.UNKNOWN, what, run.name)
        elif mismatches := [name for name in names if committed.get(name) != sources[name]]:
            what = f"{run.name} loaded files that differ from its commit: {_files(mismatches)}"
            yield Remark(Verdict.FAIL, what, run.name)


@functools.cache
def _committed(sha: str, names: Sequence[str]) -> dict[str, str] | None:
    """Return file → SHA-256 of ``names`` in a commit; None if git fails."""
    tar = git("archive", "--format=tar", sha)
    if tar is None:
        return None
    digests = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        # A link may point out of the tree; it then counts as missing.
        for name in names:
            with contextlib.suppress(KeyError):
                if (stream := archive.extractfile(name)) is not None:
                    digests[name] = hashlib.sha256(stream.read()).hexdigest()
    return digests


def _files(names: Sequence[str]) -> str:
    more = len(names) - _MAX_FILES_SHOWN
    return ", ".join(names[:_MAX_FILES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _short(shas: Sequence[str]) -> str:
    return ", ".join(sha[:_SHA_CHARS] for sha in shas)
