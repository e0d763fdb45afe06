"""``make verify-results``: the checks that need GPT-2's setting names, and the whole checklist.

The checks that do not depend on setting names are in ``lib.report.checklist``. A checklist that
passes ends with the facts to publish in a methods section. Does not import torch.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

from gpt2.records.compare import names_of
from gpt2.study.plan import Plan
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE, ConfigError, Problem
from lib.files import canonical_json
from lib.report.checklist import (
    Checklist,
    CheckRemark,
    CheckRow,
    CheckVerdict,
    RunEvidence,
    TrackerQuery,
    check_row,
    failing_rows,
    query_run_directory,
    read_evidence,
    tracker_query,
    values_by_run_text,
)
from lib.report.checklist_rows import (
    LENGTH,
    SOFTWARE,
    TrackedSetting,
    commit_rows,
    group_rows,
    manifest_row,
    package_remarks,
    setting_row,
    symbols_row,
)
from lib.report.run_facts import code_differences
from lib.runs.audit import artifact_findings
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run_dir import RunDir, State, read_status
from lib.tracking.queries import SOURCES, open_source

# A run with a time budget ends after the step that exceeds the budget, and step times vary.
_MAX_OVERTIME_STEPS = 3


def max_time(each: RunEvidence) -> Any:
    """Return the configured time budget in seconds; None if the budget is not a time."""
    budget = each.setting("train.budget")
    return each.setting("train.max_time_seconds") if budget in ("time", UNKNOWN) else None


def is_compiled(each: RunEvidence) -> Any:
    """Return whether torch.compile was active, as observed during the run."""
    return each.of("knobs", "torch_compile_enabled", "observed")


def same_code(first: RunEvidence, each: RunEvidence) -> str:
    """Return a note if the runs' source files are equal, else "".

    Commits may differ in files that no run loads, such as documents.
    """
    return "" if any(code_differences(first.facts, each.facts)) else "the code is the same"


def same_text(first: RunEvidence, each: RunEvidence) -> str:
    """Return a note if a step declares other training data, and the evaluated text is equal, else ""."""
    declared = first.axis | each.axis
    is_same = declared & {"CUSTOM_PATH", "TOKENIZER"} and first.facts.text == each.facts.text
    return "the evaluated text is the same" if is_same else ""


KEYS = (
    TrackedSetting("batch_size", "BATCH_SIZE", lambda e: e.of("batch", "micro_batch")),
    TrackedSetting(
        "gradient_accumulation", "GRAD_ACCUMULATION", lambda e: e.of("batch", "accumulation")
    ),
    TrackedSetting("num_gpus", "GPUS", lambda e: e.of("processes", "world_size")),
    TrackedSetting("learning_rate", "LEARNING_RATE", lambda e: e.setting("schedule.learning_rate")),
    TrackedSetting("warmup_steps", "WARMUP_STEPS", lambda e: e.setting("schedule.warmup_steps")),
    TrackedSetting("max_time", "GPT2_MAX_TIME", max_time),
    TrackedSetting("compile_model", "COMPILE", is_compiled),
    TrackedSetting("optimizer", "OPTIMIZER", lambda e: e.setting("optimizer")),
    TrackedSetting("dataset", "DATASET", lambda e: e.of("data", "dataset")),
    TrackedSetting("data_digest", "", lambda e: e.of("data", "digest"), same_text),
    TrackedSetting("git_commit", "", lambda e: e.of("code", "git_sha"), same_code),
)


def stop_row(runs: Sequence[RunEvidence]) -> CheckRow:
    """Return the row that checks that each run ended because its budget was used up."""
    remarks, resumed = [], []
    for each in runs:
        status, done = read_status(each.run), each.figure("final", "iterations")
        seconds, limit = each.figure("timing", "train_seconds"), _seconds(each)
        if status is None or UNKNOWN in (done, seconds, limit):
            remarks.append(each.lacks(f"{each.name} has no recorded stop reason"))
        elif status.state is not State.SUCCESS or done != (status.iterations or done):
            ended = f"{status.state} at {done} of {status.iterations} iterations"
            remarks.append(each.fails(f"{each.name}: {ended}"))
        elif limit is not None and seconds < limit:
            remarks.append(each.fails(f"{each.name} stopped after {seconds:.1f} of {limit:g} s"))
        attempts = each.of("volatile", "attempts")
        resumed += [each.name] if isinstance(attempts, list) and len(attempts) > 1 else []
    suffix = f"; resumed: {', '.join(resumed)}" if resumed else ""
    return check_row("stop reason", f"every budget was used up{suffix}", remarks)


def seeds_row(runs: Sequence[RunEvidence], min_seeds: int) -> CheckRow:
    """Return the row of the seeds.

    Every variant must have the same seeds, at least ``min_seeds``, each once. Each seed must be
    recorded, and equal in manifest and tracker.
    """
    variants = _seeds_of_variants(runs)
    wanted = {seed for seeds in variants.values() for seed in seeds}
    text = f"{_listed(wanted)} of each variant"
    remarks: list[CheckRemark] = []
    for each in runs:
        seed = each.of("seeds", "seed")
        both = f"{each.tracked('seed')} in the tracker, {seed} in the manifest"
        remarks += each.against_tracker("seed", seed, f"seed of {each.name}: {both}")
    remarks += _seed_set_remarks(variants, min_seeds)
    unused = (seed for seed in range(1, min_seeds + len(wanted) + 1) if seed not in wanted)
    wanted.update(islice(unused, max(0, min_seeds - len(wanted))))
    seeds = _listed(wanted, ",")
    advice = f"type: make SEEDS={seeds} && make verify-results SEEDS={seeds}"
    return check_row("seeds", text, remarks, advice)


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


def _seed_set_remarks(
    variants: Mapping[str, Sequence[int]], min_seeds: int
) -> Iterator[CheckRemark]:
    """Yield a remark for different seeds, for too few seeds, and for each duplicate seed.

    A difference between variants with one seed, or with different seeds, includes that of the seeds.
    """
    distinct = {name: set(seeds) for name, seeds in variants.items()}
    if len({frozenset(seeds) for seeds in distinct.values()}) > 1:
        what = f"variants have different seeds: {_by_variant(distinct)}"
        yield CheckRemark(CheckVerdict.FAIL, what)
    if few := {name: seeds for name, seeds in distinct.items() if len(seeds) < min_seeds}:
        expected = f"expected at least FINALIST_MIN_SEEDS={min_seeds} of each variant"
        what = f"too few seeds ({expected}, got {_by_variant(few)})"
        yield CheckRemark(CheckVerdict.FAIL, what)
    for name, seeds in variants.items():
        if repeated := {seed for seed in seeds if seeds.count(seed) > 1}:
            what = f"several runs of {name} with the same seed: {_listed(repeated)}"
            yield CheckRemark(CheckVerdict.FAIL, what)


def _by_variant(seeds: Mapping[str, Set[int]]) -> str:
    return values_by_run_text(
        (name, f"seed{'s' if len(own) > 1 else ''} {_listed(own)}") for name, own in seeds.items()
    )


def _listed(seeds: Set[int], separator: str = ", ") -> str:
    return separator.join(map(str, sorted(seeds)))


def length_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield a remark for each run whose length differs from the declared budget.

    Runs with a time budget must have equal time, all others equal tokens. Only the stretch declared
    by a pruning method may make a run longer.
    """
    for each in runs:
        tokens, seconds, step = (
            each.figure("final", "tokens"),
            each.figure("timing", "train_seconds"),
            each.figure("timing", "mean_step_seconds"),
        )
        limit = _seconds(each)
        if UNKNOWN in (tokens, seconds, step, limit, _stretch(each)):
            yield each.lacks(f"the length of {each.name} is unknown")
        elif limit is not None and seconds > limit + _MAX_OVERTIME_STEPS * step:
            yield each.fails(f"{each.name} trained for {seconds:.1f} s (expected {limit:g} s)")
        elif limit is None and not _as_long(runs[0], each):
            yield each.fails(f"tokens: {_tokens(runs)}")


def batch_remarks(runs: Sequence[RunEvidence]) -> Iterator[CheckRemark]:
    """Yield a remark for each run whose batch is inconsistent.

    The global batch must equal micro-batch × gradient accumulation × world size.
    """
    for each in runs:
        parts = [key.own(each) for key in KEYS[:3]]
        whole = each.of("batch", "global_sequences")
        if UNKNOWN in (*parts, whole):
            yield each.lacks(f"the batch of {each.name} is unknown")
        elif parts[0] * parts[1] * parts[2] != whole:
            yield each.fails(f"{each.name}: {' × '.join(map(str, parts))} is not {whole}")


def _stretch(each: RunEvidence) -> Any:
    return each.figure("final", "budget_stretch")


def _seconds(each: RunEvidence) -> Any:
    """Return the time budget in seconds, stretched by pruning; None if it is not a time budget."""
    limit = max_time(each)
    if limit is None or UNKNOWN in (limit, _stretch(each)):
        return limit
    return limit * _stretch(each)


def _as_long(first: RunEvidence, each: RunEvidence) -> bool:
    """Return whether two runs trained on the same tokens, up to the stretch of their pruning."""
    tokens = [one.figure("final", "tokens") for one in (first, each)]
    stretches = [_stretch(one) for one in (first, each)]
    if UNKNOWN in (*tokens, *stretches) or stretches[0] == stretches[1]:
        return tokens[0] == tokens[1]
    # A stretched budget is a whole number of iterations.
    iteration = each.of("batch", "tokens_per_iteration")
    gap = abs(tokens[0] / stretches[0] - tokens[1] / stretches[1])
    return iteration != UNKNOWN and gap <= iteration


def said(runs: Sequence[RunEvidence]) -> dict[str, str]:
    """Return {group: text of its checklist row if all runs agree}."""
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
    limit = max_time(first)
    digest, tokenizer = first.of("data", "digest"), first.facts.observed["tokenizer"]
    return {
        "hardware": f"{processes} × {device}" + (f", driver {driver}" if driver else ""),
        "compile": "on" if is_compiled(first) is True else "off",
        "effective batch": (
            f"{whole} sequences = {micro} × {accumulation} × {processes}, {tokens} tokens"
        ),
        LENGTH: (
            f"{'' if limit is None else f'{limit} s each, '}tokens: {_tokens(runs)}; {measured}"
        ),
        "evaluation": (
            f"{first.figure('final', 'eval_documents')} documents, "
            f"{first.figure('final', 'eval_tokens')} tokens, batches of {micro}"
        ),
        "data and preprocessing": f"{first.of('data', 'dataset')} {digest}, tokenizer {tokenizer}",
        SOFTWARE: (
            f"torch {first.facts.observed['torch']}, "
            f"Python {first.of('environment', 'python_version')}"
        ),
    }


def to_publish(runs: Sequence[RunEvidence], rows: Sequence[CheckRow]) -> Mapping[str, str]:
    """Return {name: text} in the order of a methods section."""
    texts = {row.check: row.what for row in rows}
    axis = sorted({name for each in runs for name in each.axis})
    return {
        "commit": f"{texts['git_commit']} ({texts['commit is public']})",
        "runs": ", ".join(each.name for each in runs),
        "seeds": texts["seeds"],
        "differ in": ", ".join(axis) or "no declared setting",
        "hardware": texts["hardware"],
        "training": texts[LENGTH],
        "effective batch": texts["effective batch"],
        "compile": texts["compile"],
        "data": texts["data and preprocessing"],
        "evaluation": texts["evaluation"],
        "software": texts[SOFTWARE],
    }


def _tokens(runs: Sequence[RunEvidence]) -> str:
    return values_by_run_text((each.name, each.figure("final", "tokens")) for each in runs)


def tracker(plan: Plan, source: str, folder: Path | None, entity: str) -> TrackerQuery:
    """Return a function that queries ``source`` for the tracked settings of a run.

    ``folder`` defaults to the results folder. Raises ConfigError if ``source`` is unknown,
    PreflightError if it cannot be reached.
    """
    if source not in SOURCES:
        expected = ", ".join(sorted(SOURCES))
        what = f"unknown source {source!r} (expected {expected})"
        advice = "type: make verify-results SOURCE=wandb"
        raise ConfigError(Problem(what, "SOURCE", advice, code="usage.invalid-value"))
    if source == "local":
        return query_run_directory
    entity = entity or str(plan.base.values["TRACKER_WANDB_ENTITY"])
    args = Namespace(source=source, folder=folder, entity=entity)
    return tracker_query(open_source(args, plan.folder.parent))


def verify(
    runs: Sequence[RunDir],
    axes: Mapping[Path, Set[str]],
    ask: TrackerQuery,
    source: str,
    min_seeds: int,
    words: Sequence[CheckRow] = (),
) -> Checklist:
    """Compare all ``runs`` with the first one and return the checklist.

    ``axes`` maps each run to the symbols in which it may differ; ``ask`` returns the settings stored
    by the tracker ``source``; each variant needs ``min_seeds`` seeds; ``words`` are the rows of the
    study's document. Raises ConfigError if a record cannot be read, PreflightError if the tracker
    cannot be read.
    """
    evidence = [read_evidence(run, ask, axes[run.path]) for run in runs]
    remarks = {
        LENGTH: [*length_remarks(evidence)],
        SOFTWARE: [*package_remarks(evidence)],
        "effective batch": [*batch_remarks(evidence)],
    }
    damages = [
        each.fails(f"{each.name}: {finding}")
        for each in evidence
        for finding in artifact_findings(RunRecord(each.run))
    ]
    rows = [
        stop_row(evidence),
        check_row("records", "all file digests match", damages, "type: make audit RUNS=NAME"),
        manifest_row(evidence),
        *(setting_row(key, evidence) for key in KEYS),
        symbols_row(evidence),
        *group_rows(evidence, names_of(runs), said(evidence), remarks),
        seeds_row(evidence, min_seeds),
        *words,
        *commit_rows(evidence),
    ]
    fails = bool(failing_rows(rows))
    return {
        "source": source,
        "runs": [str(run.path) for run in runs],
        "rows": rows,
        "publish": None if fails else to_publish(evidence, rows),
        "exit_code": EXIT_NOT_COMPARABLE if fails else EXIT_DONE,
    }
