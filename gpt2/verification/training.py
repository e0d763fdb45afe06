"""Checks of training settings: their names in trackers and manifests, run length and batch size."""

from collections.abc import Iterator, Sequence
from typing import Any

from lib.compare.facts import UNKNOWN
from lib.compare.keys import code_differences
from lib.status import State, read_status
from lib.verify.evidence import Evidence
from lib.verify.rows import Remark, Row, Verdict, row, spread
from lib.verify.settings import Key

# A run with a time budget ends after the step that exceeds the budget, and step times vary.
_MAX_OVERTIME_STEPS = 3


def max_time(each: Evidence) -> Any:
    """Return the configured time budget in seconds; None if the budget is not a time."""
    budget = each.setting("train.budget")
    return each.setting("train.max_time_seconds") if budget in ("time", UNKNOWN) else None


def is_compiled(each: Evidence) -> Any:
    """Return whether torch.compile was active, as observed during the run."""
    return each.of("knobs", "torch_compile_enabled", "observed")


def same_code(first: Evidence, each: Evidence) -> str:
    """Return a note if the runs' source files are equal, else "".

    Commits may differ in files that no run loads, such as documents.
    """
    return "" if any(code_differences(first.facts, each.facts)) else "the code is the same"


KEYS = (
    Key("batch_size", "BATCH_SIZE", lambda e: e.of("batch", "micro_batch")),
    Key("gradient_accumulation", "GRAD_ACCUMULATION", lambda e: e.of("batch", "accumulation")),
    Key("num_gpus", "GPUS", lambda e: e.of("processes", "world_size")),
    Key("learning_rate", "LEARNING_RATE", lambda e: e.setting("schedule.learning_rate")),
    Key("warmup_steps", "WARMUP_STEPS", lambda e: e.setting("schedule.warmup_steps")),
    Key("max_time", "GPT2_MAX_TIME", max_time),
    Key("compile_model", "COMPILE", is_compiled),
    Key("optimizer", "OPTIMIZER", lambda e: e.setting("optimizer")),
    Key("dataset", "DATASET", lambda e: e.of("data", "dataset")),
    Key("data_digest", "", lambda e: e.of("data", "digest")),
    Key("git_commit", "", lambda e: e.of("code", "git_sha"), same_code),
)


def stop_row(runs: Sequence[Evidence]) -> Row:
    """Return the row that checks that each run ended because its budget was used up."""
    remarks, resumed = [], []
    for each in runs:
        status, done = read_status(each.run), each.figure("final", "iterations")
        seconds, limit = each.figure("timing", "train_seconds"), _seconds(each)
        if status is None or UNKNOWN in (done, seconds, limit):
            what = f"{each.name} has no recorded stop reason"
            remarks.append(Remark(Verdict.UNKNOWN, what, each.name))
        elif status.state is not State.SUCCESS or done != (status.iterations or done):
            what = f"{each.name}: {status.state} at {done} of {status.iterations} iterations"
            remarks.append(Remark(Verdict.FAIL, what, each.name))
        elif limit is not None and seconds < limit:
            what = f"{each.name} stopped after {seconds:.1f} of {limit:g} s"
            remarks.append(Remark(Verdict.FAIL, what, each.name))
        attempts = each.of("volatile", "attempts")
        resumed += [each.name] if isinstance(attempts, list) and len(attempts) > 1 else []
    suffix = f"; resumed: {', '.join(resumed)}" if resumed else ""
    return row("stop reason", f"every budget was used up{suffix}", remarks)


def seeds_row(runs: Sequence[Evidence]) -> Row:
    """Return the row that lists the seeds.

    Seeds may differ between runs, but each seed must be recorded and equal in manifest and tracker.
    """
    remarks = []
    for each in runs:
        seed, tracked = each.of("seeds", "seed"), each.tracked("seed")
        if UNKNOWN in (seed, tracked):
            what = each.told if isinstance(each.told, str) else f"{each.name} has no seed"
            remarks.append(Remark(Verdict.UNKNOWN, what, each.name))
        elif seed != tracked:
            what = f"seed of {each.name}: {tracked} in the tracker, {seed} in the manifest"
            remarks.append(Remark(Verdict.FAIL, what, each.name))
    return row("seeds", spread((each.name, each.of("seeds", "seed")) for each in runs), remarks)


def length_remarks(runs: Sequence[Evidence]) -> Iterator[Remark]:
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
            yield Remark(Verdict.UNKNOWN, f"the length of {each.name} is unknown", each.name)
        elif limit is not None and seconds > limit + _MAX_OVERTIME_STEPS * step:
            what = f"{each.name} trained for {seconds:.1f} s (expected {limit:g} s)"
            yield Remark(Verdict.FAIL, what, each.name)
        elif limit is None and not _as_long(runs[0], each):
            tokens_of_runs = spread((one.name, one.figure("final", "tokens")) for one in runs)
            yield Remark(Verdict.FAIL, f"tokens: {tokens_of_runs}", each.name)


def batch_remarks(runs: Sequence[Evidence]) -> Iterator[Remark]:
    """Yield a remark for each run whose batch is inconsistent or differs from the first run's.

    The global batch must equal micro-batch × gradient accumulation × world size.
    """
    for each in runs:
        parts = [key.own(each) for key in KEYS[:3]]
        whole = each.of("batch", "global_sequences")
        if UNKNOWN in (*parts, whole):
            yield Remark(Verdict.UNKNOWN, f"the batch of {each.name} is unknown", each.name)
        elif parts[0] * parts[1] * parts[2] != whole:
            what = f"{each.name}: {' × '.join(map(str, parts))} is not {whole}"
            yield Remark(Verdict.FAIL, what, each.name)
    global_batches = [(each.name, each.of("batch", "global_sequences")) for each in runs]
    for name, whole in global_batches:
        if UNKNOWN not in (whole, global_batches[0][1]) and whole != global_batches[0][1]:
            yield Remark(Verdict.FAIL, f"sequences: {spread(global_batches)}", name)


def _stretch(each: Evidence) -> Any:
    return each.figure("final", "budget_stretch")


def _seconds(each: Evidence) -> Any:
    """Return the time budget in seconds, stretched by pruning; None if it is not a time budget."""
    limit = max_time(each)
    if limit is None or UNKNOWN in (limit, _stretch(each)):
        return limit
    return limit * _stretch(each)


def _as_long(first: Evidence, each: Evidence) -> bool:
    """Return whether two runs trained on the same tokens, up to the stretch of their pruning."""
    tokens = [one.figure("final", "tokens") for one in (first, each)]
    stretches = [_stretch(one) for one in (first, each)]
    if UNKNOWN in (*tokens, *stretches) or stretches[0] == stretches[1]:
        return tokens[0] == tokens[1]
    # A stretched budget is a whole number of iterations.
    iteration = each.of("batch", "tokens_per_iteration")
    gap = abs(tokens[0] / stretches[0] - tokens[1] / stretches[1])
    return iteration != UNKNOWN and gap <= iteration
