"""``make verify-results``: whether finished runs can be published as a comparison.

The evidence of a run is its own files and its configuration in the tracker. Does not import torch.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

from gpt2.records.compare import chosen_runs, declared_axes, names_of, whole_study
from gpt2.running.results import judged_document
from gpt2.study.arguments import asked_plan, selects_runs
from gpt2.study.plan import table_plan
from lib import console
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE
from lib.files import sha256_file
from lib.json_files import RecordError
from lib.report.checklist import (
    FAIL,
    UNDECIDED,
    Checklist,
    CheckRemark,
    CheckRow,
    check_row,
    checklist_to_json,
    checklist_to_markdown,
    failing_rows,
    log_failing,
    value_text,
    values_by_run_text,
    word_rows,
)
from lib.report.run_facts import field_differences, observed_facts, settings_of, text_digest
from lib.runs.code import files_not_committed, has_commit, run_git
from lib.runs.digests import digest_findings
from lib.runs.identity import configuration_digest
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run_dir import RunDir
from lib.tracking.sources import RunRef, RunSource, WandbServerSource, sent_config
from lib.tracking.trackers import TrackerMetadata
from lib.units import first_of

# A run with a time budget ends after the step that exceeds the budget, and step times vary.
_MAX_OVERTIME_STEPS = 3
_SHA_CHARS = 12
# A run's configuration from the tracker, or the reason that there is none.
TrackerConfig = Mapping[str, Any] | str
TrackerQuery = Callable[[RunDir], TrackerConfig]
Records = Sequence[RunRecord]


def verify(
    records: Records,
    axes: Mapping[Path, Set[str]],
    ask: TrackerQuery,
    source: str,
    min_seeds: int,
    words: Sequence[CheckRow] = (),
) -> Checklist:
    """Compare all finished runs with the first one, except in their ``axes``. Raises ConfigError."""
    # Before the tracker is queried, a damaged file is an error.
    for record in records:
        _ = observed_facts(record), record.summary
    tracked = [ask(record.run) for record in records]
    unreachable = any(isinstance(config, str) for config in tracked)
    advice = "another SOURCE=, or wandb sync" if unreachable else ""
    symbols = len(records[0].symbols)
    same = f"the digest of the manifest, the settings and all {symbols} symbols are the same"
    damages = [_fails(r, f"{_name(r)}: {found}") for r in records for found in digest_findings(r)]
    rows = [
        check_row("records", "all file digests match", damages, "type: make audit RUNS=NAME"),
        check_row("tracker", same, _tracker_remarks(records, tracked), advice),
        *_group_rows(records, axes),
        _seeds_row(records, min_seeds),
        *words,
        *_commit_rows(records),
    ]
    return {
        "source": source,
        "runs": [str(record.run.path) for record in records],
        "rows": rows,
        "exit_code": EXIT_NOT_COMPARABLE if failing_rows(rows) else EXIT_DONE,
    }


def _name(record: RunRecord) -> str:
    return record.run.path.name


def _fails(record: RunRecord, what: str) -> CheckRemark:
    return CheckRemark(FAIL, what, _name(record))


def _lacks(record: RunRecord, what: str) -> CheckRemark:
    return CheckRemark(UNDECIDED, what, _name(record))


def _value(record: RunRecord, path: str) -> Any:
    """Return a value by its path in ``settings``, ``summary`` or the manifest; UNKNOWN if absent."""
    source, _, below = path.partition(".")
    if source == "settings":
        return settings_of(record).get(below, UNKNOWN)
    if source == "summary":
        return record.summary.find(*below.split("."))
    return record.manifest.find(*path.split("."))


def _values(record: RunRecord, section: str, *names: str) -> list[Any]:
    return [_value(record, f"{section}.{name}") for name in names]


# The tracker's values.


def query_run_directory(run: RunDir) -> TrackerConfig:
    """Return the configuration sent to trackers, read from the run directory."""
    facts = run.tracker_facts
    return sent_config(run) if facts.exists() else f"{facts} does not exist"


def tracker_query(source: RunSource) -> TrackerQuery:
    """Return a function that queries ``source`` for the configuration of a run, by project and id."""
    tracked: dict[str, dict[str, RunRef]] = {}

    def query(run: RunDir) -> TrackerConfig:
        try:
            facts = TrackerMetadata.read(run.tracker_facts)
        except RecordError as error:
            return f"{run.tracker_facts} cannot be read: {error.problems[0].what}"
        if facts.project not in tracked:
            tracked[facts.project] = {each.id: each for each in source.names(facts.project)}
        if facts.id in tracked[facts.project]:
            return source.config(tracked[facts.project][facts.id])
        return f"no run of {facts.project} in {source.place} has the id of {facts.name}"

    return query


def _max_time(record: RunRecord) -> Any:
    """Return the configured time budget in seconds; None if the budget is not a time."""
    budget, seconds = _values(record, "settings", "train.budget", "train.max_time_seconds")
    return seconds if budget in ("time", UNKNOWN) else None


# Tracked setting → path of the value of the run.
_TRACKED = {
    "seed": "seeds.seed",
    "batch_size": "batch.micro_batch",
    "gradient_accumulation": "batch.accumulation",
    "num_gpus": "processes.world_size",
    "compile_model": "knobs.torch_compile_enabled.observed",
    "dataset": "data.dataset",
    "data_digest": "data.digest",
    "git_commit": "code.git_sha",
    "learning_rate": "settings.schedule.learning_rate",
    "warmup_steps": "settings.schedule.warmup_steps",
    "optimizer": "settings.optimizer",
}


def _tracker_remarks(records: Records, tracked: Sequence[TrackerConfig]) -> Iterator[CheckRemark]:
    """Yield each value of a run that the tracker lacks or has otherwise."""
    for record, config in zip(records, tracked, strict=True):
        if isinstance(config, str):
            yield _lacks(record, config)
            continue
        own = {name: _value(record, path) for name, path in _TRACKED.items()}
        own |= {"max_time": _max_time(record), **record.symbols}
        own["manifest_sha256"] = sha256_file(record.run.manifest)
        for name, value in own.items():
            if value == UNKNOWN:
                yield _lacks(record, f"the manifest of {_name(record)} has no {name}")
            elif name not in config:
                yield _lacks(record, f"the tracker has no {name} for {_name(record)}")
            elif config[name] != value:
                values = f"tracker {value_text(config[name])}, run {value_text(value)}"
                yield _fails(record, f"{name} of {_name(record)}: {values}")


# Facts in which all runs must be equal.

_BATCH, _LENGTH, _SOFTWARE = "effective batch", "training length", "software"
_DATA, _OTHERS = "data and preprocessing", "other settings and kernels"
# Row → prefixes of the fields of ``lib.report.run_facts``, identity paths among them.
_FIELDS = {
    "hardware": ("device", "cpu_cap", "cuda", "hip", "world_size", "backend", "machine.device"),
    "compile": ("knobs.torch_compile_", "machine.compile"),
    _BATCH: ("batch", "train.global_batch", "train.batch_size", "train.grad_acc"),
    _LENGTH: ("train.budget", "train.max_"),
    "evaluation": ("documents", "data.eval_"),
    _DATA: ("data", "tokenizer", "split"),
    _SOFTWARE: ("torch", "cudnn", "reduced_precision", "variables."),
    "code": ("code", "changed_during_run"),
    _OTHERS: ("",),
}
# Row, name and path of each further value.
_RECORDED = (
    *(
        ("hardware", name, f"hardware.{name}")
        for name in ("cpu_model", "cpu_cores", "gpu_name", "vram_gib", "driver_version")
    ),
    (_SOFTWARE, "python", "environment.python_version"),
)


def _group_rows(records: Records, axes: Mapping[Path, Set[str]]) -> list[CheckRow]:
    """Return one row per group of facts, comparing every run with the first."""
    names, first = names_of(records), records[0]
    # Field → its value in each run.
    undeclared: dict[str, list[Any]] = {}
    declared: dict[str, str] = {}
    for index, record in enumerate(records[1:], 1):
        axis = axes[first.run.path] | axes[record.run.path]
        same_text = "TOKENIZER" in axis and text_digest(first) == text_digest(record)
        ignored = {"seed", *(("documents", "tokenizer") if same_text else ())}
        for difference in field_differences(first, record):
            symbol = names.get(difference.field, difference.field)
            if symbol in axis:
                declared[difference.field] = symbol
            elif difference.field not in ignored:
                values = undeclared.setdefault(difference.field, [difference.a] * len(records))
                values[index] = difference.b
    remarks: dict[str, list[CheckRemark]] = {group: [] for group in _FIELDS}
    for field, values in undeclared.items():
        remarks[_group(field)] += _unequal(names.get(field, field), records, values)
    for row, name, path in _RECORDED:
        if row != "hardware" or "machine.device" not in declared:
            remarks[row] += _unequal(name, records, [_value(record, path) for record in records])
    for record in records:
        if UNKNOWN in _values(record, "batch", "micro_batch", "accumulation", "global_sequences"):
            remarks[_BATCH].append(_lacks(record, f"the batch of {_name(record)} is unknown"))
    remarks[_LENGTH] += length_remarks(records)
    remarks[_SOFTWARE] += _package_remarks(records)
    texts, rows = _texts(records), []
    for group, reasons in remarks.items():
        symbols = [symbol for field, symbol in declared.items() if _group(field) == group]
        text = f"; declared to differ: {', '.join(symbols)}" if symbols else ""
        rows.append(check_row(group, texts.get(group, "the same") + text, reasons))
    return rows


def _group(field: str) -> str:
    return next(group for group, starts in _FIELDS.items() if field.startswith(starts))


def _unequal(name: str, records: Records, values: Sequence[Any]) -> Iterator[CheckRemark]:
    """Yield a remark for each run without a value, and for each that differs from the first one."""
    each = list(zip(records, values, strict=True))
    known = [(_name(record), value) for record, value in each if value != UNKNOWN]
    for record, value in each:
        if value == UNKNOWN:
            yield _lacks(record, f"no {name} recorded for {_name(record)}")
        elif value != known[0][1]:
            yield _fails(record, f"{name}: {values_by_run_text(known)}")


def _package_remarks(records: Records) -> Iterator[CheckRemark]:
    """Yield a remark on each package that two runs have in another version."""
    packages = [_value(record, "environment.packages") for record in records]
    for record, versions in zip(records, packages, strict=True):
        if not isinstance(versions, Mapping):
            yield _lacks(record, f"no packages recorded for {_name(record)}")
            return
    for record, versions in zip(records, packages, strict=True):
        for name in sorted(packages[0].keys() & versions.keys()):
            both = [packages[0][name], versions[name]]
            yield from _unequal(f"package {name}", [records[0], record], both)


def length_remarks(records: Records) -> Iterator[CheckRemark]:
    """Yield a remark for each run whose length differs from the declared budget, or its stretch."""
    for record in records:
        name, status, limit = _name(record), record.status, _max_time(record)
        done, tokens, stretch = _values(
            record, "summary.final", "iterations", "tokens", "budget_stretch"
        )
        seconds, step = _values(record, "summary.timing", "train_seconds", "mean_step_seconds")
        if status is None or UNKNOWN in (done, tokens, stretch, seconds, step, limit):
            yield _lacks(record, f"the length of {name} is unknown")
        elif done != (status.iterations or done):
            yield _fails(record, f"{name} ended at {done} of {status.iterations} iterations")
        elif limit is None:
            if not _as_long(records[0], record):
                yield _fails(record, f"tokens: {_tokens(records)}")
        elif not 0 <= seconds - limit * stretch <= _MAX_OVERTIME_STEPS * step:
            expected = f"expected {limit * stretch:g} s"
            yield _fails(record, f"{name} trained for {seconds:.1f} s ({expected})")


def _as_long(first: RunRecord, each: RunRecord) -> bool:
    """Return whether two runs trained on the same tokens, up to the stretch of their pruning."""
    tokens, stretches = (
        [_value(record, f"summary.final.{name}") for record in (first, each)]
        for name in ("tokens", "budget_stretch")
    )
    if UNKNOWN in (*tokens, *stretches) or stretches[0] == stretches[1]:
        return bool(tokens[0] == tokens[1])
    # A stretched budget is a whole number of iterations.
    iteration = _value(each, "batch.tokens_per_iteration")
    gap = abs(tokens[0] / stretches[0] - tokens[1] / stretches[1])
    return iteration != UNKNOWN and gap <= iteration


def _tokens(records: Records) -> str:
    return values_by_run_text((_name(r), _value(r, "summary.final.tokens")) for r in records)


# Seeds.


def _seeds_row(records: Records, min_seeds: int) -> CheckRow:
    """Return the row of the seeds: the same of every variant, at least ``min_seeds``, each once."""
    variants = _seeds_of_variants(records)
    wanted = {seed for seeds in variants.values() for seed in seeds}
    problems = []
    if any(set(seeds) != wanted for seeds in variants.values()):
        problems.append(f"variants have different seeds: {_by_variant(variants)}")
    if few := {name: seeds for name, seeds in variants.items() if len({*seeds}) < min_seeds}:
        expected = f"expected at least FINALIST_MIN_SEEDS={min_seeds} of each variant"
        problems.append(f"too few seeds ({expected}, got {_by_variant(few)})")
    for name, seeds in variants.items():
        if repeated := {seed for seed in seeds if seeds.count(seed) > 1}:
            problems.append(f"several runs of {name} with the same seed: {_listed(repeated)}")
    text = f"{_listed(wanted)} of each variant"
    unused = (seed for seed in range(1, min_seeds + len(wanted) + 1) if seed not in wanted)
    wanted.update(islice(unused, max(0, min_seeds - len(wanted))))
    advice = "type: make SEEDS={0} && make verify-results SEEDS={0}".format(_listed(wanted, ","))
    return check_row("seeds", text, [CheckRemark(FAIL, what) for what in problems], advice)


def _seeds_of_variants(records: Records) -> dict[str, list[int]]:
    """Return {variant: seeds of its runs}; a variant is a configuration without its seed."""
    grouped: dict[str, list[RunRecord]] = {}
    for record in records:
        grouped.setdefault(configuration_digest(record.identity), []).append(record)
    names = [_name(group[0]).rpartition("-s")[0] for group in grouped.values()]
    return {
        # Runs of one step, of which one was declared to differ, have the same name.
        name if name and names.count(name) == 1 else _name(group[0]): [
            _value(record, "settings.seed") for record in group
        ]
        for name, group in zip(names, grouped.values(), strict=True)
    }


def _by_variant(variants: Mapping[str, Sequence[int]]) -> str:
    distinct = ((name, {*seeds}) for name, seeds in variants.items())
    return values_by_run_text(
        (name, f"seed{'s' * (len(s) > 1)} {_listed(s)}") for name, s in distinct
    )


def _listed(seeds: Set[int], separator: str = ", ") -> str:
    return separator.join(map(str, sorted(seeds)))


# The commit: present, clean and public, with the loaded code.


def _commit_rows(records: Records) -> list[CheckRow]:
    commits = dict.fromkeys(_value(record, "code.git_sha") for record in records)
    present = [sha for sha in commits if sha not in (UNKNOWN, None) and has_commit(sha)]
    branches = {sha: _remote_branches(sha) for sha in present}
    missing, edited, private, code = (list[CheckRemark]() for _ in range(4))
    advice = ""
    for record in records:
        name = _name(record)
        sha, dirty, changed = _values(record, "code", "git_sha", "dirty_tree", "changed_during_run")
        if sha in (UNKNOWN, None):
            missing.append(_lacks(record, f"no commit recorded for {name}"))
        elif sha not in present:
            what = f"commit {sha[:_SHA_CHARS]} of {name} is not in this repository"
            missing.append(_fails(record, what))
        if dirty is True:
            edited.append(_fails(record, f"{name} was trained with uncommitted code"))
        elif dirty is not False or changed == UNKNOWN:
            edited.append(_lacks(record, f"git status unknown for {name}"))
        elif changed:
            edited.append(_fails(record, f"edited while {name} was running: {first_of(changed)}"))
        if sha not in branches:
            private.append(_lacks(record, f"the commit of {name} is not in this repository"))
        elif branches[sha] is None:
            private.append(_lacks(record, "no git remote configured"))
            advice = "type: git remote add origin URL && git push origin HEAD"
        elif not branches[sha]:
            short = sha[:_SHA_CHARS]
            private.append(_fails(record, f"{short} is not on any known remote branch"))
            advice = f"type: git push origin {short}:refs/heads/BRANCH"
            advice += ", or git fetch if the commit is already pushed"
        if sha not in present or all(Path(file).is_absolute() for file in record.sources):
            code.append(_lacks(record, f"cannot compare the code of {name} with its commit"))
        elif differing := files_not_committed(record.sources, sha):
            what = f"{name} loaded files that differ from its commit: {first_of(differing)}"
            code.append(_fails(record, what))
    names = ", ".join(dict.fromkeys(b for remote in branches.values() for b in remote or ()))
    shown = ", ".join(sha[:_SHA_CHARS] for sha in present)
    return [
        check_row("commit exists", shown, missing),
        check_row("commit is clean", "no edited files", edited),
        check_row("commit is public", f"on {names}", private, advice),
        check_row("commit holds the code", "all loaded files", code),
    ]


def _remote_branches(sha: str) -> list[str] | None:
    """Return the remote branches that contain ``sha`` as of the last fetch; None without remotes."""
    if not (run_git("remote") or b"").strip():
        return None
    output = run_git("branch", "-r", "--contains", sha, "--format=%(refname:short)")
    return (output or b"").decode().split()


def _texts(records: Records) -> dict[str, str]:
    """Return {group: text of its row if all runs agree}: the facts to publish."""
    first = records[0]
    whole, micro, accumulation, tokens = _values(
        first, "batch", "global_sequences", "micro_batch", "accumulation", "tokens_per_iteration"
    )
    gpu, cpu, driver = _values(first, "hardware", "gpu_name", "cpu_model", "driver_version")
    documents, evaluated = _values(first, "summary.final", "eval_documents", "eval_tokens")
    dataset, digest = _values(first, "data", "dataset", "digest")
    processes, limit = _value(first, "processes.world_size"), _max_time(first)
    seconds = [_value(record, "summary.timing.train_seconds") for record in records]
    timed = [value for value in seconds if isinstance(value, float)]
    measured = f"{min(timed):,.1f} to {max(timed):,.1f} s of training" if timed else "not timed"
    resumed = [_name(record) for record in records if record.attempts[1:]]
    measured += f"; resumed: {', '.join(resumed)}" if resumed else ""
    is_compiled = _value(first, "knobs.torch_compile_enabled.observed") is True
    observed, python = observed_facts(first), _value(first, "environment.python_version")
    return {
        "hardware": f"{processes} × {gpu or cpu}" + (f", driver {driver}" if driver else ""),
        "compile": "on" if is_compiled else "off",
        _BATCH: f"{whole} sequences = {micro} × {accumulation} × {processes}, {tokens} tokens",
        _LENGTH: (
            f"{'' if limit is None else f'{limit} s each, '}tokens: {_tokens(records)}; {measured}"
        ),
        "evaluation": f"{documents} documents, {evaluated} tokens, batches of {micro}",
        _DATA: f"{dataset} {digest}, tokenizer {observed['tokenizer']}",
        _SOFTWARE: f"torch {observed['torch']}, Python {python}",
    }


def verify_results(options: Namespace) -> int:
    """Check whether finished runs are comparable and can be published together.

    kablate verify-results                            every finished run of .config's study
    kablate verify-results --runs 'ra,baseline'       selected runs, or directories
    kablate verify-results --source wandb             settings as stored by W&B, not the run record
    kablate verify-results --axis COMPILE             directories that may differ in COMPILE

    Prints a Markdown checklist, whose rows are the facts to publish if all are PASS. Settings must be equal
    both in the tracker and in the manifests, except for the changes of the study's steps. Every step
    must have the same seeds, at least FINALIST_MIN_SEEDS. UNKNOWN means not recorded or not available
    here, and never counts as equal. Exit codes: 0 all rows pass, 2 no such run, 3 the tracker cannot be
    read, 4 a row is FAIL or UNKNOWN.
    """
    plan = asked_plan(options)
    ask: TrackerQuery = query_run_directory
    if options.source == "wandb":
        entity = options.entity or str(plan.base.values["TRACKER_WANDB_ENTITY"])
        ask = tracker_query(WandbServerSource(entity))
    study = whole_study(plan)
    table = table_plan(plan)
    records = chosen_runs(plan if selects_runs(options) else table, study, options.runs)
    axes = declared_axes(study, records, options.axis)
    paths = {record.run.path.resolve() for record in records}
    names = {run.path.name for run in table.runs if run.path.resolve() in paths}
    words = word_rows(judged_document(table), names, plan.folder) if names else ()
    min_seeds = plan.base.repro.finalist_min_seeds
    checklist = verify(records, axes, ask, options.source, min_seeds, words)
    console.show(checklist_to_json(checklist) if options.json else checklist_to_markdown(checklist))
    log_failing(checklist["rows"])
    return int(checklist["exit_code"])
