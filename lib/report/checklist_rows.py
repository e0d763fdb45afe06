"""Rows of the checklist: commit, facts that can change a result or its cost, settings, and words.

The commit must be present, clean and public, and contain the loaded code. All other facts are
compared in named groups. Settings must be present, consistent and equal in the tracker and in the
run's own records. The words of the study's table must be about the runs that are there now.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.files import sha256_file
from lib.json_files import RecordError, read_json_object
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
from lib.report.study import SCHEMA_VERSION
from lib.report.study_verdicts import VERDICTS_FILE
from lib.runs.code import files_not_committed, has_commit, run_git
from lib.runs.record import UNKNOWN
from lib.units import first_of

Values = Mapping[str, Any]
_SHA_CHARS = 12
_FAIL, _UNKNOWN = CheckVerdict.FAIL, CheckVerdict.UNKNOWN


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
                first = next(iter(differing.values())).a
                values = {run: each.b for run, each in differing.items()}
                shown = [(run, values.get(run.name, first)) for run in runs]
                reasons += _unequal(names.get(field, field), shown)
        for name, path in _EXTRA_FIELDS.get(group, {}).items():
            if not declared.keys() & set(_FOLLOWS.get(name, ())):
                read = RunEvidence.figure if path[0] == "final" else RunEvidence.of
                reasons += _unequal(name, [(run, read(run, *path)) for run in runs])
        rows.append(check_row(group, text, [*reasons, *remarks.get(group, ())]))
    return rows


def _group(field: str) -> str:
    return next(group for group, starts in _FIELDS.items() if field.startswith(starts))


def _unequal(name: str, values: Sequence[tuple[RunEvidence, Any]]) -> Iterator[CheckRemark]:
    """Yield a remark for each run without a value, and for each that differs from the first one."""
    known = [(run.name, value) for run, value in values if value != UNKNOWN]
    for run, value in values:
        if value == UNKNOWN:
            yield run.lacks(f"no {name} recorded for {run.name}")
        elif value != known[0][1]:
            yield run.fails(f"{name}: {values_by_run_text(known)}")


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
            yield from _unequal(f"package {name}", [(runs[0], first[name]), (run, packages[name])])


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
    advice = "another SOURCE=, or kablate verify-results --folder DIR" if unreachable else ""
    return check_row("manifest", "matches the tracker's digest", remarks, advice)


# Rows from the study's document: what its table says about the runs to publish.


def word_rows(document: Values, names: Collection[str], folder: Path) -> list[CheckRow]:
    """Return the rows about the runs in directories ``names`` of the study in ``folder``."""
    runs = [run for run in document["runs"] if run["folder"] in names]
    arms = {run["variant"] for run in runs}
    verdicts = [v for v in document["verdicts"] if arms >= v["values"].keys()]
    words = Counter(verdict["verdict"] for verdict in verdicts)
    counts = ", ".join(f"{count} {word}" for word, count in words.items())
    unstable, diverged = (
        [CheckRemark(_FAIL, f"{r['label']} {said}", r["folder"]) for r in runs if r[field]]
        for field, said in (("unstable", "is unstable"), ("diverged", "diverged"))
    )
    return [
        check_row(
            "stability",
            "no jump of loss or gradient",
            unstable,
            "type: make report, and see UNSTABLE; a longer warm-up or a smaller LEARNING_RATE helps",
        ),
        check_row("divergence", "no seed diverged", diverged, "type: make report"),
        check_row(
            "verdicts",
            counts or "no comparison",
            _open(verdicts, document["rule"]["min_seeds"]),
            "type: make verdicts, which names the seeds that give a word; to publish without a step, "
            "name the others: RUNS=",
        ),
        _aa_row(document, arms),
        check_row(
            "document",
            f"{VERDICTS_FILE} is about these runs",
            _outdated(document, runs, verdicts, folder / VERDICTS_FILE),
            "type: make report",
        ),
    ]


def _open(verdicts: list[Values], least: int) -> Iterator[CheckRemark]:
    """Yield a remark for each comparison without a word, and for each that is not fair."""
    for verdict in verdicts:
        name, reason = verdict["name"], verdict["reason"]
        if verdict["verdict"] is None:
            seeds = f"{verdict['n']} of at least {least} seeds"
            why = seeds if verdict["n"] < least else reason or "the look is not taken"
            yield CheckRemark(_UNKNOWN, f"{name}: no word, {why}")
        elif verdict["verdict"] == "INCONCLUSIVE":
            more = verdict["more_seeds"]
            needed = f", about {more} more seeds give a word" if more else ""
            yield CheckRemark(_UNKNOWN, f"{name}: INCONCLUSIVE{needed}")
        elif verdict["verdict"] == "UNFAIR":
            yield CheckRemark(_FAIL, f"{name}: UNFAIR, {reason}")


def _aa_row(document: Values, arms: Collection[str]) -> CheckRow:
    """Return the row of the A/A steps, which have no effect by construction."""
    steps = [step for step in document["aa_steps"] if step["step"] in arms]
    failed = [step for step in steps if step["verdict"] in ("BETTER", "WORSE")]
    remarks = [CheckRemark(_FAIL, f"{step['name']}: {step['verdict']}") for step in failed]
    if document["aa_failed"] and not failed:
        remarks = [CheckRemark(_FAIL, "an A/A step failed at an earlier look")]
    remarks += [
        CheckRemark(_UNKNOWN, f"{step['name']}: no word") for step in steps if not step["verdict"]
    ]
    seeds = sorted({run["seed"] for run in document["runs"]})
    more = f"{seeds[-1] + 1}-{seeds[-1] + len(seeds)}" if seeds else "1-3"
    advice = (
        "one of 20 studies has this by chance: search for what differs between its runs, then train the "
        f"study with other seeds (make SEEDS={more}), and publish both"
    )
    passed = "no effect where there is none" if steps else "no run of one"
    return check_row("A/A step", passed, remarks, advice)


def _outdated(
    document: Values, runs: list[Values], verdicts: list[Values], file: Path
) -> Iterator[CheckRemark]:
    """Yield how the written document differs from ``document``, computed from the runs of today.

    The written one is compared only: no word or figure is taken from it.
    """
    now = _results(document)
    try:
        written = read_json_object(file)
        then, is_readable = _results(written), written["schema_version"] == SCHEMA_VERSION
    except RecordError as error:
        yield CheckRemark(_UNKNOWN, f"{file}: {error.problems[0].what}")
        return
    except (KeyError, TypeError):
        is_readable = False
    if not is_readable:
        yield CheckRemark(_UNKNOWN, f"{file} is of another version, or damaged")
        return
    for run in runs:
        if then.get(run["folder"]) != now[run["folder"]]:
            what = f"{run['label']}: another result in {VERDICTS_FILE}"
            yield CheckRemark(_FAIL, what, run["folder"])
    variants = {run["variant"] for run in runs}
    for run in written["runs"]:
        gone = run["folder"] not in now or now[run["folder"]][1] is None
        if gone and run["variant"] in variants and run.get("run_id"):
            what = f"{VERDICTS_FILE} rests on {run['folder']}, which has no result"
            yield CheckRemark(_FAIL, what, run["folder"])
    for verdict in verdicts:
        if then.get(verdict["name"]) != now[verdict["name"]]:
            yield CheckRemark(_FAIL, f"{verdict['name']}: another result in {VERDICTS_FILE}")


def _results(document: Values) -> dict[str, list[Any]]:
    """Return what a second training changes of each run, and the result of each comparison.

    Raises KeyError or TypeError if the document is damaged or of another version.
    """
    runs = [{**run} for run in document["runs"]]
    results = {
        run["folder"]: [run.get(k) for k in ("configuration", "run_id", "commit", "weights")]
        for run in runs
    }
    verdicts = {v["name"]: [v["verdict"], v["difference"], v["n"]] for v in document["verdicts"]}
    return {**results, **verdicts}
