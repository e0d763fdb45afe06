"""Rows of the checklist: commit, facts that can change a result or its cost, and settings.

The commit must be present, clean and public, and contain the loaded code. All other facts are
compared in named groups. Settings must be present, consistent and equal in the tracker and in the
run's own records.
"""

import contextlib
import functools
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.report.checklist import (
    CheckRemark,
    CheckRow,
    CheckVerdict,
    RunEvidence,
    check_row,
    value_text,
    values_by_run_text,
)
from lib.report.run_facts import FieldDifference, field_differences
from lib.runs.code import has_commit, run_git
from lib.runs.record import UNKNOWN

_MAX_FILES_SHOWN = 3
_SHA_CHARS = 12


def commit_rows(runs: Sequence[RunEvidence]) -> list[CheckRow]:
    """Return four rows; a missing commit is reported as neither public nor comparable."""
    shas = {run.name: run.of("code", "git_sha") for run in runs}
    recorded = [sha for sha in dict.fromkeys(shas.values()) if sha not in (UNKNOWN, None)]
    present = [sha for sha in recorded if has_commit(sha)]
    return [
        check_row("commit exists", _short(present), _missing(runs, present)),
        check_row("commit is clean", "no edited files", _edited(runs)),
        _public(runs, present),
        check_row("commit holds the code", "all loaded files", _code(runs, present)),
    ]


def remote_branches(sha: str) -> list[str] | None:
    """Return the remote branches that contain ``sha`` as of the last fetch; None without remotes."""
    if not (run_git("remote") or b"").strip():
        return None
    output = run_git("branch", "-r", "--contains", sha, "--format=%(refname:short)")
    return (output or b"").decode().split()


def _missing(runs: Sequence[RunEvidence], present: Sequence[str]) -> Iterator[CheckRemark]:
    for run in runs:
        sha = run.of("code", "git_sha")
        if sha in (UNKNOWN, None):
            yield CheckRemark(CheckVerdict.UNKNOWN, f"no commit recorded for {run.name}", run.name)
        elif sha not in present:
            what = f"commit {sha[:_SHA_CHARS]} of {run.name} is not in this repository"
            yield CheckRemark(CheckVerdict.FAIL, what, run.name)


def _edited(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    for run in runs:
        dirty = run.of("code", "dirty_tree")
        edited = run.of("code", "changed_during_run")
        if dirty is True:
            what = f"{run.name} was trained with uncommitted code"
            yield CheckRemark(CheckVerdict.FAIL, what, run.name)
        elif dirty is not False or edited == UNKNOWN:
            yield CheckRemark(CheckVerdict.UNKNOWN, f"git status unknown for {run.name}", run.name)
        elif edited:
            what = f"edited while {run.name} was running: {_files(edited)}"
            yield CheckRemark(CheckVerdict.FAIL, what, run.name)


def _public(runs: Sequence[RunEvidence], present: Sequence[str]) -> CheckRow:
    branches = {sha: remote_branches(sha) for sha in present}
    remarks, advice = [], ""
    for run in runs:
        sha = run.of("code", "git_sha")
        remote = branches.get(sha)
        if sha not in branches:
            what = f"the commit of {run.name} is not in this repository"
            remarks.append(CheckRemark(CheckVerdict.UNKNOWN, what, run.name))
        elif remote is None:
            what, advice = (
                "no git remote configured",
                "git remote add origin URL && git push origin HEAD",
            )
            remarks.append(CheckRemark(CheckVerdict.UNKNOWN, what, run.name))
        elif not remote:
            what = f"{sha[:_SHA_CHARS]} is not on any known remote branch"
            advice = (
                f"git push origin {sha[:_SHA_CHARS]}:refs/heads/BRANCH, "
                "or git fetch if the commit is already pushed"
            )
            remarks.append(CheckRemark(CheckVerdict.FAIL, what, run.name))
    names = ", ".join(dict.fromkeys(b for remote in branches.values() for b in remote or ()))
    return check_row("commit is public", f"on {names}", remarks, advice and f"type: {advice}")


def _code(runs: Sequence[RunEvidence], present: Sequence[str]) -> Iterator[CheckRemark]:
    """Compare each file that a run loaded with the same file in the commit."""
    for run in runs:
        sha, sources = run.of("code", "git_sha"), run.facts.sources
        # Absolute paths, such as initial weights, are not part of the tree.
        names = tuple(name for name in sources if not Path(name).is_absolute())
        committed = _committed(sha, names) if sha in present and names else None
        if committed is None:
            what = f"cannot compare the code of {run.name} with its commit"
            yield CheckRemark(CheckVerdict.UNKNOWN, what, run.name)
        elif mismatches := [name for name in names if committed.get(name) != sources[name]]:
            what = f"{run.name} loaded files that differ from its commit: {_files(mismatches)}"
            yield CheckRemark(CheckVerdict.FAIL, what, run.name)


@functools.cache
def _committed(sha: str, names: Sequence[str]) -> dict[str, str] | None:
    """Return file → SHA-256 of ``names`` in a commit; None if git fails."""
    tar = run_git("archive", "--format=tar", sha)
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


LENGTH, SOFTWARE, OTHERS = "training length", "software", "other settings and kernels"
# Group → prefixes of lib.report.compare fields and of identity paths.
_FIELDS = {
    "hardware": ("device", "cpu_cap", "cuda", "hip", "world_size", "backend", "machine.device"),
    "compile": ("knobs.torch_compile_", "machine.compile"),
    "effective batch": ("batch", "train.global_batch", "train.batch_size", "train.grad_acc"),
    LENGTH: ("train.budget", "train.max_"),
    "evaluation": ("documents", "data.eval_"),
    "data and preprocessing": ("data", "tokenizer", "split"),
    SOFTWARE: ("torch", "cudnn", "reduced_precision", "variables."),
    "code": ("code", "changed_during_run"),
    OTHERS: ("",),
}
_HARDWARE = ("cpu_model", "cpu_cores", "gpu_name", "vram_gib", "driver_version")
# Group → name → path in the manifest or summary of facts that lib.report.compare does not read.
_EXTRA_FIELDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "hardware": {name: ("hardware", name) for name in _HARDWARE},
    "compile": {"torch_compile_enabled": ("knobs", "torch_compile_enabled", "observed")},
    "effective batch": {"tokens_per_iteration": ("batch", "tokens_per_iteration")},
    "evaluation": {
        "eval_tokens": ("final", "eval_tokens"),
        "eval_documents": ("final", "eval_documents"),
        "eval_batch": ("batch", "micro_batch"),
    },
    "data and preprocessing": {"dataset": ("data", "dataset"), "splits": ("data", "splits")},
    SOFTWARE: {"python": ("environment", "python_version")},
}
# Name → settings that determine it; it may differ if one of them is declared to differ.
_FOLLOWS = {
    "torch_compile_enabled": ("machine.compile",),
    "tokens_per_iteration": ("train.global_batch", "model.shape.block_size"),
    "eval_batch": ("train.batch_size",),
    **dict.fromkeys(_HARDWARE, ("machine.device",)),
}
# Reported in a separate row, and allowed to differ.
_SEED = "seed"


def group_rows(
    runs: Sequence[RunEvidence],
    names: Mapping[str, str],
    said: Mapping[str, str],
    remarks: Mapping[str, Sequence[CheckRemark]],
) -> list[CheckRow]:
    """Return one row per group, comparing every run with the first.

    ``names`` maps settings to symbols; ``said`` maps groups to the text of a passing row;
    ``remarks`` maps groups to further reasons found by the caller.
    """
    undeclared: list[tuple[str, FieldDifference]] = []
    declared: dict[str, str] = {}
    for run in runs[1:]:
        for difference in field_differences(runs[0].facts, run.facts):
            symbol = names.get(difference.field, difference.field)
            if symbol in runs[0].axis | run.axis:
                declared[difference.field] = symbol
            elif difference.field != _SEED:
                undeclared.append((run.name, difference))
    rows = []
    for group in _FIELDS:
        text = said.get(group, "the same")
        if symbols := [s for field, s in declared.items() if _group(field) == group]:
            text += f"; declared to differ: {', '.join(symbols)}"
        within = [(run, d) for run, d in undeclared if _group(d.field) == group]
        reasons = [
            *_difference_remarks(runs, names, within),
            *_extra_remarks(runs, group, declared),
        ]
        rows.append(check_row(group, text, [*reasons, *remarks.get(group, ())]))
    return rows


def package_remarks(runs: Sequence[RunEvidence]) -> list[CheckRemark]:
    """Return remarks on packages with different versions in two runs.

    A package that only one run has is ignored.
    """
    remarks = []
    first = runs[0].of("environment", "packages")
    for run in runs:
        packages = run.of("environment", "packages")
        if not isinstance(packages, Mapping) or not isinstance(first, Mapping):
            what = f"no packages recorded for {run.name} or {runs[0].name}"
            remarks.append(CheckRemark(CheckVerdict.UNKNOWN, what, run.name))
            continue
        for name in sorted(first.keys() & packages.keys()):
            if first[name] != packages[name]:
                both = [(runs[0].name, first[name]), (run.name, packages[name])]
                remarks.append(
                    CheckRemark(
                        CheckVerdict.FAIL, f"package {name}: {values_by_run_text(both)}", run.name
                    )
                )
    return remarks


def _group(field: str) -> str:
    return next(group for group, starts in _FIELDS.items() if field.startswith(starts))


def _difference_remarks(
    runs: Sequence[RunEvidence],
    names: Mapping[str, str],
    undeclared: Sequence[tuple[str, FieldDifference]],
) -> Iterator[CheckRemark]:
    """Yield one remark per field with the value of every run."""
    for field in dict.fromkeys(difference.field for _, difference in undeclared):
        values: dict[str, Any] = {run: d.b for run, d in undeclared if d.field == field}
        first = next(d.a for _, d in undeclared if d.field == field)
        text = values_by_run_text(
            (evidence.name, values.get(evidence.name, first)) for evidence in runs
        )
        verdict = (
            CheckVerdict.UNKNOWN if UNKNOWN in (first, *values.values()) else CheckVerdict.FAIL
        )
        for run in values:
            yield CheckRemark(verdict, f"{names.get(field, field)}: {text}", run)


def _extra_remarks(
    runs: Sequence[RunEvidence], group: str, declared: Mapping[str, str]
) -> Iterator[CheckRemark]:
    for name, path in _EXTRA_FIELDS.get(group, {}).items():
        if declared.keys() & set(_FOLLOWS.get(name, ())):
            continue
        read = RunEvidence.figure if path[0] == "final" else RunEvidence.of
        values = [(run.name, read(run, *path)) for run in runs]
        known = [(run, value) for run, value in values if value != UNKNOWN]
        for run, value in values:
            if value == UNKNOWN:
                yield CheckRemark(CheckVerdict.UNKNOWN, f"no {name} recorded for {run}", run)
            elif value != known[0][1]:
                yield CheckRemark(CheckVerdict.FAIL, f"{name}: {values_by_run_text(known)}", run)


@dataclass(frozen=True)
class TrackedSetting:
    """A setting by its tracker name."""

    name: str
    # Symbol whose declaration allows the setting to differ; "" if none does.
    symbol: str
    # Reads the value from the run's own records.
    own: Callable[[RunEvidence], Any]
    # Returns the reason why two runs may differ without a declaration; "" if they may not.
    reason: Callable[[RunEvidence, RunEvidence], str] = lambda first, each: ""


def setting_row(key: TrackedSetting, runs: Sequence[RunEvidence]) -> CheckRow:
    """Return the row of one setting; a missing value is UNKNOWN and never equal."""
    recorded = [(run, key.own(run)) for run in runs]
    remarks = [
        *_missing_settings(key, recorded),
        *_contradictions(key, recorded),
        *_differences(key, recorded),
    ]
    text = values_by_run_text((run.name, value) for run, value in recorded)
    if different := [run for run, value in recorded if value != recorded[0][1]]:
        reason = key.reason(runs[0], different[0]) or f"declared to differ ({key.symbol})"
        text = f"{reason}: {text}"
    return check_row(key.name, text, remarks)


def symbols_row(runs: Sequence[RunEvidence]) -> CheckRow:
    """Return the row that compares every symbol in the tracker with the run's own value."""
    remarks = []
    for run in runs:
        for name, value in run.facts.symbols.items():
            tracked = run.tracked(name)
            if tracked == UNKNOWN:
                remarks.append(CheckRemark(CheckVerdict.UNKNOWN, _untracked(run, name), run.name))
            elif tracked != value:
                what = f"{name}: tracker {value_text(tracked)}, run {value_text(value)}"
                remarks.append(CheckRemark(CheckVerdict.FAIL, what, run.name))
    count = len(runs[0].facts.symbols)
    return check_row("symbols", f"all {count} match the tracker", remarks)


def manifest_row(runs: Sequence[RunEvidence], digest: Callable[[RunEvidence], str]) -> CheckRow:
    """Return the row that compares the manifest with the digest recorded by the tracker."""
    remarks = []
    for run in runs:
        tracked = run.tracked("manifest_sha256")
        if tracked == UNKNOWN:
            remarks.append(
                CheckRemark(CheckVerdict.UNKNOWN, _untracked(run, "manifest_sha256"), run.name)
            )
        elif tracked != digest(run):
            what = "manifest.json has changed since the tracker recorded its digest"
            remarks.append(CheckRemark(CheckVerdict.FAIL, what, run.name))
    unreachable = any(isinstance(run.tracker_config, str) for run in runs)
    advice = "another SOURCE=, or scripts/verify_results.py --folder DIR" if unreachable else ""
    return check_row("manifest", "matches the tracker's digest", remarks, advice)


def _untracked(run: RunEvidence, name: str) -> str:
    return (
        run.tracker_config
        if isinstance(run.tracker_config, str)
        else f"the tracker has no {name} for {run.name}"
    )


_Recorded = Sequence[tuple[RunEvidence, Any]]


def _missing_settings(key: TrackedSetting, recorded: _Recorded) -> Iterator[CheckRemark]:
    for run, value in recorded:
        if run.tracked(key.name) == UNKNOWN:
            yield CheckRemark(CheckVerdict.UNKNOWN, _untracked(run, key.name), run.name)
        if value == UNKNOWN:
            what = f"the manifest of {run.name} has no {key.name}"
            yield CheckRemark(CheckVerdict.UNKNOWN, what, run.name)


def _contradictions(key: TrackedSetting, recorded: _Recorded) -> Iterator[CheckRemark]:
    for run, value in recorded:
        tracked = run.tracked(key.name)
        if UNKNOWN not in (tracked, value) and tracked != value:
            what = f"{run.name}: tracker {value_text(tracked)}, manifest {value_text(value)}"
            yield CheckRemark(CheckVerdict.FAIL, what, run.name)


def _differences(key: TrackedSetting, recorded: _Recorded) -> Iterator[CheckRemark]:
    """Compare every run with the first, in the manifests and in the tracker."""
    first, value = recorded[0]
    tracked = first.tracked(key.name)
    for side, reference, values in (
        ("manifests", value, recorded),
        ("tracker", tracked, [(run, run.tracked(key.name)) for run, _ in recorded]),
    ):
        present = [(run, setting) for run, setting in values if setting != UNKNOWN]
        different = [
            run
            for run, setting in present
            if reference != UNKNOWN
            and setting != reference
            and key.symbol not in first.axis | run.axis
            and not key.reason(first, run)
        ]
        if different:
            what = f"{side}: {values_by_run_text((run.name, setting) for run, setting in present)}"
            yield from (CheckRemark(CheckVerdict.FAIL, what, run.name) for run in different)
