"""``make verify-results``: whether finished runs can be published as a comparison.

The evidence of a run is its own files and its configuration in the tracker. A checklist that passes
ends with the facts to publish in a methods section. Does not import torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gpt2.records.compare import names_of
from gpt2.study.plan import Plan
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE, ConfigError, Problem
from lib.files import canonical_json, sha256_file
from lib.json_files import RecordError
from lib.report.checklist import (
    FAIL,
    UNDECIDED,
    Checklist,
    CheckRemark,
    CheckRow,
    check_row,
    failing_rows,
    value_text,
    values_by_run_text,
)
from lib.report.run_facts import FieldDifference, RunFacts, field_differences, read_run_facts
from lib.runs.code import files_not_committed, has_commit, run_git
from lib.runs.digests import digest_findings
from lib.runs.record import UNKNOWN
from lib.runs.run_dir import RunDir
from lib.tracking.queries import SOURCES
from lib.tracking.sources import RunRef, RunSource, WandbServerSource, sent_config
from lib.tracking.trackers import TrackerMetadata
from lib.units import first_of

# A run with a time budget ends after the step that exceeds the budget, and step times vary.
_MAX_OVERTIME_STEPS = 3
_SHA_CHARS = 12
# A run's configuration from the tracker, or the reason that there is none.
TrackerConfig = Mapping[str, Any] | str
TrackerQuery = Callable[[RunDir], TrackerConfig]


@dataclass(frozen=True)
class RunEvidence:
    """Records of a finished run."""

    facts: RunFacts
    tracker_config: TrackerConfig
    # Symbols in which the run was declared to differ from the other runs.
    axis: Set[str]

    @property
    def name(self) -> str:
        return self.facts.run.path.name

    def of(self, *place: str) -> Any:
        """Return the manifest value at the key path ``place``, or UNKNOWN."""
        return self.facts.record.manifest.find(*place)

    def figure(self, *place: str) -> Any:
        """Return the summary value at the key path ``place``, or UNKNOWN."""
        return self.facts.record.summary.find(*place)

    def setting(self, path: str) -> Any:
        """Return a setting of the identity, or UNKNOWN."""
        return self.facts.settings.get(path, UNKNOWN)

    def fails(self, what: str) -> CheckRemark:
        return CheckRemark(FAIL, what, self.name)

    def lacks(self, what: str) -> CheckRemark:
        return CheckRemark(UNDECIDED, what, self.name)


def verify(
    runs: Sequence[RunDir],
    axes: Mapping[Path, Set[str]],
    ask: TrackerQuery,
    source: str,
    min_seeds: int,
    words: Sequence[CheckRow] = (),
) -> Checklist:
    """Compare all ``runs`` with the first one and return the checklist.

    ``axes`` maps each run to the symbols in which it may differ; ``ask`` queries the tracker
    ``source``; ``words`` are the rows of the study's document. Raises ConfigError if a record cannot
    be read, PreflightError if the tracker cannot be read.
    """
    # Before the tracker is queried, a damaged file is an error.
    facts = [read_run_facts(run) for run in runs]
    _ = [each.record.summary for each in facts]
    evidence = [RunEvidence(each, ask(each.run), axes[each.run.path]) for each in facts]
    damages = [
        each.fails(f"{each.name}: {finding}")
        for each in evidence
        for finding in digest_findings(each.facts.record)
    ]
    unreachable = any(isinstance(each.tracker_config, str) for each in evidence)
    advice = "another SOURCE=, or wandb sync" if unreachable else ""
    count = len(evidence[0].facts.symbols)
    same = f"the digest of the manifest, the settings and all {count} symbols are the same"
    rows = [
        check_row("records", "all file digests match", damages, "type: make audit RUNS=NAME"),
        check_row("tracker", same, _tracker_remarks(evidence), advice),
        *group_rows(evidence, names_of(runs), _texts(evidence)),
        seeds_row(evidence, min_seeds),
        *words,
        *_commit_rows(evidence),
    ]
    fails = bool(failing_rows(rows))
    return {
        "source": source,
        "runs": [str(run.path) for run in runs],
        "rows": rows,
        "publish": None if fails else _to_publish(evidence, rows),
        "exit_code": EXIT_NOT_COMPARABLE if fails else EXIT_DONE,
    }


# The tracker's values.


def query_run_directory(run: RunDir) -> TrackerConfig:
    """Return the configuration sent to trackers, read from the run directory."""
    if not run.tracker_facts.exists():
        return f"{run.tracker_facts} does not exist"
    return sent_config(run)


def tracker(plan: Plan, source: str, entity: str) -> TrackerQuery:
    """Return a function that queries ``source``.

    Raises ConfigError if ``source`` is unknown, PreflightError if it cannot be reached.
    """
    if source not in SOURCES:
        expected = ", ".join(sorted(SOURCES))
        what = f"unknown source {source!r} (expected {expected})"
        advice = "type: make verify-results SOURCE=wandb"
        raise ConfigError(Problem(what, "SOURCE", advice, code="usage.invalid-value"))
    if source == "local":
        return query_run_directory
    entity = entity or str(plan.base.values["TRACKER_WANDB_ENTITY"])
    return tracker_query(WandbServerSource(entity))


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


def max_time(each: RunEvidence) -> Any:
    """Return the configured time budget in seconds; None if the budget is not a time."""
    budget = each.setting("train.budget")
    return each.setting("train.max_time_seconds") if budget in ("time", UNKNOWN) else None


# Tracked setting → key path in the manifest, or path of a setting.
_TRACKED: Mapping[str, Sequence[str] | str] = {
    "seed": ("seeds", "seed"),
    "batch_size": ("batch", "micro_batch"),
    "gradient_accumulation": ("batch", "accumulation"),
    "num_gpus": ("processes", "world_size"),
    "compile_model": ("knobs", "torch_compile_enabled", "observed"),
    "dataset": ("data", "dataset"),
    "data_digest": ("data", "digest"),
    "git_commit": ("code", "git_sha"),
    "learning_rate": "schedule.learning_rate",
    "warmup_steps": "schedule.warmup_steps",
    "optimizer": "optimizer",
}


def _tracker_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield each value of a run that the tracker lacks or has otherwise."""
    for run in runs:
        own = {
            name: run.setting(place) if isinstance(place, str) else run.of(*place)
            for name, place in _TRACKED.items()
        }
        digest = sha256_file(run.facts.run.manifest)
        own |= {"max_time": max_time(run), **run.facts.symbols, "manifest_sha256": digest}
        tracked = run.tracker_config
        if isinstance(tracked, str):
            yield run.lacks(tracked)
            continue
        for name, value in own.items():
            if value == UNKNOWN:
                yield run.lacks(f"the manifest of {run.name} has no {name}")
            elif name not in tracked:
                yield run.lacks(f"the tracker has no {name} for {run.name}")
            elif tracked[name] != value:
                values = f"tracker {value_text(tracked[name])}, run {value_text(value)}"
                yield run.fails(f"{name} of {run.name}: {values}")


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
_HARDWARE = ("cpu_model", "cpu_cores", "gpu_name", "vram_gib", "driver_version")


def group_rows(
    runs: Sequence[RunEvidence], names: Mapping[str, str], texts: Mapping[str, str]
) -> list[CheckRow]:
    """Return one row per group of facts, comparing every run with the first.

    With another tokenizer declared, the tokens of the same text may differ. ``names`` maps settings to
    symbols; ``texts`` maps groups to the text of a passing row.
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
    remarks: dict[str, list[CheckRemark]] = {group: [] for group in _FIELDS}
    for field, differing in undeclared.items():
        first = next(iter(differing.values())).a
        values = {run: each.b for run, each in differing.items()}
        shown = [(run, values.get(run.name, first)) for run in runs]
        remarks[_group(field)] += _unequal(names.get(field, field), shown)
    for name in _HARDWARE if "machine.device" not in declared else ():
        remarks["hardware"] += _unequal(name, [(run, run.of("hardware", name)) for run in runs])
    remarks[_BATCH] += batch_remarks(runs)
    remarks[_LENGTH] += length_remarks(runs)
    remarks[_SOFTWARE] += _software_remarks(runs)
    rows = []
    for group, reasons in remarks.items():
        symbols = [symbol for field, symbol in declared.items() if _group(field) == group]
        text = f"; declared to differ: {', '.join(symbols)}" if symbols else ""
        rows.append(check_row(group, texts.get(group, "the same") + text, reasons))
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


def _software_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield a remark on another Python, and on each package that both runs have in another version."""
    yield from _unequal("python", [(run, run.of("environment", "python_version")) for run in runs])
    packages = {run.name: run.of("environment", "packages") for run in runs}
    for run in runs:
        if not isinstance(packages[run.name], Mapping):
            yield run.lacks(f"no packages recorded for {run.name}")
            return
    first = packages[runs[0].name]
    for run in runs:
        for name in sorted(first.keys() & packages[run.name].keys()):
            versions = [(runs[0], first[name]), (run, packages[run.name][name])]
            yield from _unequal(f"package {name}", versions)


def batch_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield a remark for each run whose global batch is not micro-batch × accumulation × GPUs."""
    for each in runs:
        micro, accumulation, whole = (
            each.of("batch", name) for name in ("micro_batch", "accumulation", "global_sequences")
        )
        processes = each.of("processes", "world_size")
        if UNKNOWN in (micro, accumulation, processes, whole):
            yield each.lacks(f"the batch of {each.name} is unknown")
        elif micro * accumulation * processes != whole:
            yield each.fails(f"{each.name}: {micro} × {accumulation} × {processes} is not {whole}")


def length_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield a remark for each run whose length differs from the declared budget.

    Runs with a time budget must have equal time, all others equal tokens. Only the stretch declared
    by a pruning method may make a run longer.
    """
    for each in runs:
        status, limit = each.facts.record.status, max_time(each)
        done, tokens, stretch, seconds, step = (
            each.figure(*place)
            for place in (
                ("final", "iterations"),
                ("final", "tokens"),
                ("final", "budget_stretch"),
                ("timing", "train_seconds"),
                ("timing", "mean_step_seconds"),
            )
        )
        if status is None or UNKNOWN in (done, tokens, stretch, seconds, step, limit):
            yield each.lacks(f"the length of {each.name} is unknown")
        elif done != (status.iterations or done):
            yield each.fails(f"{each.name} ended at {done} of {status.iterations} iterations")
        elif limit is None:
            if not _as_long(runs[0], each):
                yield each.fails(f"tokens: {_tokens(runs)}")
        elif not 0 <= seconds - limit * stretch <= _MAX_OVERTIME_STEPS * step:
            expected = f"expected {limit * stretch:g} s"
            yield each.fails(f"{each.name} trained for {seconds:.1f} s ({expected})")


def _as_long(first: RunEvidence, each: RunEvidence) -> bool:
    """Return whether two runs trained on the same tokens, up to the stretch of their pruning."""
    tokens, stretches = (
        [one.figure("final", name) for one in (first, each)]
        for name in ("tokens", "budget_stretch")
    )
    if UNKNOWN in (*tokens, *stretches) or stretches[0] == stretches[1]:
        return bool(tokens[0] == tokens[1])
    # A stretched budget is a whole number of iterations.
    iteration = each.of("batch", "tokens_per_iteration")
    gap = abs(tokens[0] / stretches[0] - tokens[1] / stretches[1])
    return iteration != UNKNOWN and gap <= iteration


def _tokens(runs: Sequence[RunEvidence]) -> str:
    return values_by_run_text((each.name, each.figure("final", "tokens")) for each in runs)


# Seeds.


def seeds_row(runs: Sequence[RunEvidence], min_seeds: int) -> CheckRow:
    """Return the row of the seeds: the same of every variant, at least ``min_seeds``, each once.

    A difference between variants with one seed, or with different seeds, includes that of the seeds.
    """
    variants = _seeds_of_variants(runs)
    distinct = {name: set(seeds) for name, seeds in variants.items()}
    wanted = set().union(*distinct.values())
    problems = []
    if len({frozenset(seeds) for seeds in distinct.values()}) > 1:
        problems.append(f"variants have different seeds: {_by_variant(distinct)}")
    if few := {name: seeds for name, seeds in distinct.items() if len(seeds) < min_seeds}:
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


def _seeds_of_variants(runs: Sequence[RunEvidence]) -> dict[str, list[int]]:
    """Return {variant: seeds of its runs}; a variant is a configuration without its seed."""
    grouped: dict[str, list[RunEvidence]] = {}
    for each in runs:
        settings = {name: v for name, v in each.facts.settings.items() if name != "seed"}
        grouped.setdefault(canonical_json(settings), []).append(each)
    names = [group[0].name.rpartition("-s")[0] for group in grouped.values()]
    return {
        # Runs of one step, of which one was declared to differ, have the same name.
        name if name and names.count(name) == 1 else group[0].name: [
            each.setting("seed") for each in group
        ]
        for name, group in zip(names, grouped.values(), strict=True)
    }


def _by_variant(seeds: Mapping[str, Set[int]]) -> str:
    return values_by_run_text(
        (name, f"seed{'s' if len(own) > 1 else ''} {_listed(own)}") for name, own in seeds.items()
    )


def _listed(seeds: Set[int], separator: str = ", ") -> str:
    return separator.join(map(str, sorted(seeds)))


# The commit: present, clean and public, with the loaded code.


def _commit_rows(runs: Sequence[RunEvidence]) -> list[CheckRow]:
    """Return four rows; a missing commit is reported as neither public nor comparable."""
    commits = dict.fromkeys(run.of("code", "git_sha") for run in runs)
    present = [sha for sha in commits if sha not in (UNKNOWN, None) and has_commit(sha)]
    branches = {sha: _remote_branches(sha) for sha in present}
    missing, edited, private, code = (list[CheckRemark]() for _ in range(4))
    advice = ""
    for run in runs:
        sha, sources = run.of("code", "git_sha"), run.facts.sources
        dirty, changed = run.of("code", "dirty_tree"), run.of("code", "changed_during_run")
        if sha in (UNKNOWN, None):
            missing.append(run.lacks(f"no commit recorded for {run.name}"))
        elif sha not in present:
            what = f"commit {sha[:_SHA_CHARS]} of {run.name} is not in this repository"
            missing.append(run.fails(what))
        if dirty is True:
            edited.append(run.fails(f"{run.name} was trained with uncommitted code"))
        elif dirty is not False or changed == UNKNOWN:
            edited.append(run.lacks(f"git status unknown for {run.name}"))
        elif changed:
            what = f"edited while {run.name} was running: {first_of(changed)}"
            edited.append(run.fails(what))
        if sha not in branches:
            private.append(run.lacks(f"the commit of {run.name} is not in this repository"))
        elif branches[sha] is None:
            private.append(run.lacks("no git remote configured"))
            advice = "type: git remote add origin URL && git push origin HEAD"
        elif not branches[sha]:
            short = sha[:_SHA_CHARS]
            private.append(run.fails(f"{short} is not on any known remote branch"))
            advice = f"type: git push origin {short}:refs/heads/BRANCH"
            advice += ", or git fetch if the commit is already pushed"
        if sha not in present or all(Path(name).is_absolute() for name in sources):
            code.append(run.lacks(f"cannot compare the code of {run.name} with its commit"))
        elif differing := files_not_committed(sources, sha):
            what = f"{run.name} loaded files that differ from its commit: {first_of(differing)}"
            code.append(run.fails(what))
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


# Texts of rows that pass, and to publish.


def _texts(runs: Sequence[RunEvidence]) -> dict[str, str]:
    """Return {group: text of its row if all runs agree}."""
    first = runs[0]
    whole, micro, accumulation, tokens = (
        first.of("batch", name)
        for name in ("global_sequences", "micro_batch", "accumulation", "tokens_per_iteration")
    )
    processes, driver = first.of("processes", "world_size"), first.of("hardware", "driver_version")
    device = first.of("hardware", "gpu_name") or first.of("hardware", "cpu_model")
    seconds = [each.figure("timing", "train_seconds") for each in runs]
    timed = [value for value in seconds if isinstance(value, float)]
    measured = f"{min(timed):,.1f} to {max(timed):,.1f} s of training" if timed else "not timed"
    attempts = {each.name: each.of("volatile", "attempts") for each in runs}
    resumed = [name for name, each in attempts.items() if isinstance(each, list) and each[1:]]
    measured += f"; resumed: {', '.join(resumed)}" if resumed else ""
    limit = max_time(first)
    is_compiled = first.of("knobs", "torch_compile_enabled", "observed") is True
    digest, tokenizer = first.of("data", "digest"), first.facts.observed["tokenizer"]
    return {
        "hardware": f"{processes} × {device}" + (f", driver {driver}" if driver else ""),
        "compile": "on" if is_compiled else "off",
        _BATCH: f"{whole} sequences = {micro} × {accumulation} × {processes}, {tokens} tokens",
        _LENGTH: f"{'' if limit is None else f'{limit} s each, '}tokens: {_tokens(runs)}; {measured}",
        "evaluation": (
            f"{first.figure('final', 'eval_documents')} documents, "
            f"{first.figure('final', 'eval_tokens')} tokens, batches of {micro}"
        ),
        _DATA: f"{first.of('data', 'dataset')} {digest}, tokenizer {tokenizer}",
        _SOFTWARE: (
            f"torch {first.facts.observed['torch']}, "
            f"Python {first.of('environment', 'python_version')}"
        ),
    }


def _to_publish(runs: Sequence[RunEvidence], rows: Sequence[CheckRow]) -> Mapping[str, str]:
    """Return {name: text} in the order of a methods section."""
    said = {row.check: row.what for row in rows}
    axis = sorted({name for each in runs for name in each.axis})
    commits = values_by_run_text((each.name, each.of("code", "git_sha")) for each in runs)
    return {
        "commit": f"{commits} ({said['commit is public']})",
        "runs": ", ".join(each.name for each in runs),
        "seeds": said["seeds"],
        "differ in": ", ".join(axis) or "no declared setting",
        "hardware": said["hardware"],
        "training": said[_LENGTH],
        "effective batch": said[_BATCH],
        "compile": said["compile"],
        "data": said[_DATA],
        "evaluation": said["evaluation"],
        "software": said[_SOFTWARE],
    }
