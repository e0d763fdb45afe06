"""Rows of the checklist: commit, facts that can change a result or its cost, and settings.

The commit must be present, clean and public, and contain the loaded code. All other facts are
compared in named groups. Settings must be present, consistent and equal in the tracker and in the
run's own records.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.files import sha256_file
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
from lib.runs.code import files_not_committed, has_commit, run_git
from lib.runs.record import UNKNOWN
from lib.units import first_of

_SHA_CHARS = 12


def commit_rows(runs: Sequence[RunEvidence]) -> list[CheckRow]:
    """Return four rows; a missing commit is reported as neither public nor comparable."""
    shas = dict.fromkeys(run.of("code", "git_sha") for run in runs)
    present = [sha for sha in shas if sha not in (UNKNOWN, None) and has_commit(sha)]
    shown = [sha[:_SHA_CHARS] for sha in present]
    return [
        check_row("commit exists", ", ".join(shown), _missing(runs, present)),
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
            yield run.lacks(f"no commit recorded for {run.name}")
        elif sha not in present:
            yield run.fails(f"commit {sha[:_SHA_CHARS]} of {run.name} is not in this repository")


def _edited(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    for run in runs:
        dirty = run.of("code", "dirty_tree")
        edited = run.of("code", "changed_during_run")
        if dirty is True:
            yield run.fails(f"{run.name} was trained with uncommitted code")
        elif dirty is not False or edited == UNKNOWN:
            yield run.lacks(f"git status unknown for {run.name}")
        elif edited:
            yield run.fails(f"edited while {run.name} was running: {first_of(edited)}")


def _public(runs: Sequence[RunEvidence], present: Sequence[str]) -> CheckRow:
    branches = {sha: remote_branches(sha) for sha in present}
    remarks, advice = [], ""
    for run in runs:
        sha = run.of("code", "git_sha")
        remote = branches.get(sha)
        if sha not in branches:
            remarks.append(run.lacks(f"the commit of {run.name} is not in this repository"))
        elif remote is None:
            remarks.append(run.lacks("no git remote configured"))
            advice = "type: git remote add origin URL && git push origin HEAD"
        elif not remote:
            short = sha[:_SHA_CHARS]
            remarks.append(run.fails(f"{short} is not on any known remote branch"))
            advice = f"type: git push origin {short}:refs/heads/BRANCH"
            advice += ", or git fetch if the commit is already pushed"
    names = ", ".join(dict.fromkeys(b for remote in branches.values() for b in remote or ()))
    return check_row("commit is public", f"on {names}", remarks, advice)


def _code(runs: Sequence[RunEvidence], present: Sequence[str]) -> Iterator[CheckRemark]:
    """Compare each file that a run loaded with the same file in the commit."""
    for run in runs:
        sha, sources = run.of("code", "git_sha"), run.facts.sources
        if sha not in present or all(Path(name).is_absolute() for name in sources):
            yield run.lacks(f"cannot compare the code of {run.name} with its commit")
        elif differing := files_not_committed(sources, sha):
            what = f"{run.name} loaded files that differ from its commit: {first_of(differing)}"
            yield run.fails(what)


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
    "eval_tokens": ("data.tokenizer",),
    "splits": ("data.custom_path", "data.tokenizer"),
    **dict.fromkeys(_HARDWARE, ("machine.device",)),
}


def group_rows(
    runs: Sequence[RunEvidence],
    names: Mapping[str, str],
    said: Mapping[str, str],
    remarks: Mapping[str, Sequence[CheckRemark]],
) -> list[CheckRow]:
    """Return one row per group, comparing every run with the first.

    Seeds have a row of their own. With another tokenizer declared, the tokens of the same text may
    differ. ``names`` maps settings to symbols; ``said`` maps groups to the text of a passing row;
    ``remarks`` maps groups to further reasons found by the caller.
    """
    undeclared: dict[str, dict[str, FieldDifference]] = {}
    declared: dict[str, str] = {}
    for run in runs[1:]:
        axis = runs[0].axis | run.axis
        same_text = "TOKENIZER" in axis and runs[0].facts.text == run.facts.text
        ignored = {"seed", *(("documents", "tokenizer") if same_text else ())}
        for difference in field_differences(runs[0].facts, run.facts):
            symbol = names.get(difference.field, difference.field)
            if symbol in axis:
                declared[difference.field] = symbol
            elif difference.field not in ignored:
                undeclared.setdefault(difference.field, {})[run.name] = difference
    rows = []
    for group in _FIELDS:
        text = said.get(group, "the same")
        if symbols := [s for field, s in declared.items() if _group(field) == group]:
            text += f"; declared to differ: {', '.join(symbols)}"
        reasons: list[CheckRemark] = []
        for field, differing in undeclared.items():
            if _group(field) == group:
                reasons += _difference_remarks(runs, names.get(field, field), differing)
        reasons += [*_extra_remarks(runs, group, declared), *remarks.get(group, ())]
        rows.append(check_row(group, text, reasons))
    return rows


def package_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield a remark on each package with different versions in two runs.

    A package that only one run has is ignored.
    """
    first = runs[0].of("environment", "packages")
    for run in runs:
        packages = run.of("environment", "packages")
        if not isinstance(packages, Mapping) or not isinstance(first, Mapping):
            yield run.lacks(f"no packages recorded for {run.name} or {runs[0].name}")
            continue
        for name in sorted(first.keys() & packages.keys()):
            if first[name] != packages[name]:
                both = [(runs[0].name, first[name]), (run.name, packages[name])]
                yield run.fails(f"package {name}: {values_by_run_text(both)}")


def _group(field: str) -> str:
    return next(group for group, starts in _FIELDS.items() if field.startswith(starts))


def _difference_remarks(
    runs: Sequence[RunEvidence], name: str, differing: Mapping[str, FieldDifference]
) -> Iterator[CheckRemark]:
    """Yield a remark for each run that differs from the first, with the value of every run."""
    first = next(iter(differing.values())).a
    values = {run: difference.b for run, difference in differing.items()}
    text = values_by_run_text((run.name, values.get(run.name, first)) for run in runs)
    unknown = UNKNOWN in (first, *values.values())
    for run in values:
        verdict = CheckVerdict.UNKNOWN if unknown else CheckVerdict.FAIL
        yield CheckRemark(verdict, f"{name}: {text}", run)


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


class TrackedSetting(NamedTuple):
    """A setting by its tracker name."""

    name: str
    # Symbol whose declaration allows the setting to differ; "" if none does.
    symbol: str
    # Reads the value from the run's own records.
    own: Callable[[RunEvidence], Any]
    # Returns the reason why two runs may differ without a declaration; "" if they may not.
    reason: Callable[[RunEvidence, RunEvidence], str] = lambda first, each: ""


def setting_row(key: TrackedSetting, runs: Sequence[RunEvidence]) -> CheckRow:
    """Return the row of one setting; a missing value is UNKNOWN and never equal.

    The manifests, and the tracker's values, of every run are compared with those of the first.
    """
    first, own = runs[0], [key.own(run) for run in runs]
    tracked = [run.tracked(key.name) for run in runs]
    text = values_by_run_text((run.name, value) for run, value in zip(runs, own, strict=True))
    if different := [run for run, value in zip(runs, own, strict=True) if value != own[0]]:
        reason = key.reason(first, different[0]) or f"declared to differ ({key.symbol})"
        text = f"{reason}: {text}"
    remarks: list[CheckRemark] = []
    for run, value, other in zip(runs, own, tracked, strict=True):
        both = f"tracker {value_text(other)}, manifest {value_text(value)}"
        remarks += run.against_tracker(key.name, value, f"{run.name}: {both}")
    for side, values in (("manifests", own), ("tracker", tracked)):
        pairs = zip(runs, values, strict=True)
        present = [(run, value) for run, value in pairs if value != UNKNOWN]
        what = f"{side}: {values_by_run_text((run.name, value) for run, value in present)}"
        for run, value in present if values[0] != UNKNOWN else ():
            declared = key.symbol in first.axis | run.axis or key.reason(first, run)
            if value != values[0] and not declared:
                remarks.append(run.fails(what))
    return check_row(key.name, text, remarks)


def symbols_row(runs: Sequence[RunEvidence]) -> CheckRow:
    """Return the row that compares every symbol in the tracker with the run's own value."""
    remarks: list[CheckRemark] = []
    for run in runs:
        for name, value in run.facts.symbols.items():
            both = f"tracker {value_text(run.tracked(name))}, run {value_text(value)}"
            remarks += run.against_tracker(name, value, f"{name}: {both}")
    count = len(runs[0].facts.symbols)
    return check_row("symbols", f"all {count} match the tracker", remarks)


def manifest_row(runs: Sequence[RunEvidence]) -> CheckRow:
    """Return the row that compares the manifest with the digest recorded by the tracker."""
    changed = "manifest.json has changed since the tracker recorded its digest"
    remarks: list[CheckRemark] = []
    for run in runs:
        digest = sha256_file(run.run.manifest)
        remarks += run.against_tracker("manifest_sha256", digest, changed)
    unreachable = any(isinstance(run.tracker_config, str) for run in runs)
    advice = "another SOURCE=, or scripts/verify_results.py --folder DIR" if unreachable else ""
    return check_row("manifest", "matches the tracker's digest", remarks, advice)
