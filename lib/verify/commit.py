"""The commit that runs were made from: in the repository, clean, public, and holding their code."""

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

_NAMED_FILES = 3
_SHORT = 12


def commit_rows(runs: Sequence[Evidence]) -> list[Row]:
    """Four rows; a commit that is not there is neither public nor can its code be compared."""
    shas = {each.name: each.of("code", "git_sha") for each in runs}
    known = [sha for sha in dict.fromkeys(shas.values()) if sha not in (UNKNOWN, None)]
    here = [sha for sha in known if has_commit(sha)]
    return [
        row("commit exists", _short(here), _missing(runs, here)),
        row("commit is clean", "no file was edited", _edited(runs)),
        _public(runs, here),
        row("commit holds the code", "the files that were loaded", _code(runs, here)),
    ]


def remote_branches(sha: str) -> list[str] | None:
    """Remote branches, as this repository last saw them, that ``sha`` is reachable from.

    None where no remote is known: then nothing can be said.
    """
    if not (git("remote") or b"").strip():
        return None
    found = git("branch", "-r", "--contains", sha, "--format=%(refname:short)")
    return (found or b"").decode().split()


def _missing(runs: Sequence[Evidence], here: Sequence[str]) -> Iterator[Remark]:
    for each in runs:
        sha = each.of("code", "git_sha")
        if sha in (UNKNOWN, None):
            yield Remark(Verdict.UNKNOWN, f"no commit is recorded of {each.name}", each.name)
        elif sha not in here:
            what = f"{sha[:_SHORT]} of {each.name} is not in this repository"
            yield Remark(Verdict.FAIL, what, each.name)


def _edited(runs: Sequence[Evidence]) -> Iterator[Remark]:
    for each in runs:
        dirty = each.of("code", "dirty_tree")
        during = each.of("code", "changed_during_run")
        if dirty is True:
            what = f"{each.name} was trained with code that no commit names"
            yield Remark(Verdict.FAIL, what, each.name)
        elif dirty is not False or during == UNKNOWN:
            yield Remark(Verdict.UNKNOWN, f"git could not tell it of {each.name}", each.name)
        elif during:
            what = f"edited while {each.name} was at work: {_files(during)}"
            yield Remark(Verdict.FAIL, what, each.name)


def _public(runs: Sequence[Evidence], here: Sequence[str]) -> Row:
    branches = {sha: remote_branches(sha) for sha in here}
    remarks, advice = [], ""
    for each in runs:
        sha = each.of("code", "git_sha")
        found = branches.get(sha)
        if sha not in branches:
            what = f"the commit of {each.name} is not here to be looked for"
            remarks.append(Remark(Verdict.UNKNOWN, what, each.name))
        elif found is None:
            what, advice = "no remote is known", "git remote add origin URL && git push origin HEAD"
            remarks.append(Remark(Verdict.UNKNOWN, what, each.name))
        elif not found:
            what = f"{sha[:_SHORT]} is on no remote branch that is known here"
            advice = (
                f"git push origin {sha[:_SHORT]}:refs/heads/BRANCH, or git fetch if it was pushed"
            )
            remarks.append(Remark(Verdict.FAIL, what, each.name))
    named = ", ".join(dict.fromkeys(b for found in branches.values() for b in found or ()))
    return row("commit is public", f"on {named}", remarks, advice and f"type: {advice}")


def _code(runs: Sequence[Evidence], here: Sequence[str]) -> Iterator[Remark]:
    """Each file that a run loaded, against what the commit has."""
    for each in runs:
        sha, sources = each.of("code", "git_sha"), each.facts.sources
        # Weights that a run began with are no part of the tree.
        names = tuple(name for name in sources if not Path(name).is_absolute())
        committed = _committed(sha, names) if sha in here and names else None
        if committed is None:
            what = f"what {each.name} loaded and its commit cannot be compared"
            yield Remark(Verdict.UNKNOWN, what, each.name)
        elif others := [name for name in names if committed.get(name) != sources[name]]:
            what = f"{each.name} loaded other files: {_files(others)}"
            yield Remark(Verdict.FAIL, what, each.name)


@functools.cache
def _committed(sha: str, names: Sequence[str]) -> dict[str, str] | None:
    """File → SHA-256 for those of ``names`` that a commit has; None where git cannot tell."""
    packed = git("archive", "--format=tar", sha)
    if packed is None:
        return None
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # A link may lead out of the tree, and is then none of its files.
        for name in names:
            with contextlib.suppress(KeyError):
                if (stream := archive.extractfile(name)) is not None:
                    found[name] = hashlib.sha256(stream.read()).hexdigest()
    return found


def _files(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_FILES
    return ", ".join(names[:_NAMED_FILES]) + (f" and {more} more" if more > 0 else "")


def _short(shas: Sequence[str]) -> str:
    return ", ".join(sha[:_SHORT] for sha in shas)
