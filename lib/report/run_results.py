"""Results of single runs, as read from their directories: losses, outcome, speed, utilisation."""

import contextlib
import gc
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from lib.files import json_digest
from lib.json_files import DamagedRecord, MissingRecord, RecordError
from lib.report.options import NATS
from lib.report.run_facts import observed_facts, text_digest
from lib.report.verdicts import SeedOutcome
from lib.runs.digests import digest_findings
from lib.runs.documents import bits_per_byte
from lib.runs.record import UNKNOWN, RunRecord, derived
from lib.runs.rows import StatisticsRow, TrainRow
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, State
from lib.tracking.reader import mean_metrics, reduce_over_layers
from lib.tracking.stability import unstable_points, unstable_steps

T = TypeVar("T")

_NON_FINITE = re.compile(r"\b(nan|inf|infinite|non-?finite|not finite|diverged)\b", re.IGNORECASE)
# States of a run whose outcome is not known yet.
_OPEN_STATES = ("new", "running", "interrupted")
# A final loss this close to that of the untrained model has learned nothing, in nats.
_UNTRAINED_NATS = 0.1
# A run that ends above its loss at this share of its iterations has diverged.
_EARLY_SHARE = 0.2
_MIB_PER_GB = 1024
# Name → (heading, number format), in table order. 1 GB is 2^30 bytes.
UTILISATION_COLUMNS: Mapping[str, tuple[str, str]] = {
    "tokens_per_second": ("tok/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "gpu/compute_util_avg": ("GPU %", ".0f"),
    "gpu/memory_util_avg": ("GPU memory %", ".0f"),
    "gpu/memory_used_peak_gb": ("GPU GB, peak", ".2f"),
    "process/cpu_cores": ("cores", ".2f"),
    "process/rss_peak_gb": ("RSS GB, peak", ".2f"),
}


def read_records(runs: Sequence[Run[Any]], unit: str = NATS) -> list[RunRecord]:
    """Return the records of ``runs``; what a study asks of them has been derived."""
    records = [RunRecord(RunDir(run.path), planned=run) for run in runs]
    try:
        for record in records:
            run_outcome(record, unit)
            # What the records keep is no garbage: to look for garbage in it takes a third of the time.
            gc.freeze()
    finally:
        gc.unfreeze()
    return records


def planned_run(record: RunRecord) -> Run[Any]:
    assert isinstance(record.planned, Run)
    return record.planned


@derived
def run_outcome(record: RunRecord, unit: str) -> SeedOutcome:
    """Return the outcome of a planned run; rows are not kept, as they would fill the memory."""
    if not record.is_done:
        message = record.damage or (record.status.message if record.status else "")
        return absent_outcome(record, record.state, message.split("\n")[0])
    if damage := next(digest_findings(record, weights=False), None):
        return absent_outcome(record, State.DAMAGED.word, str(damage))
    try:
        if json_digest(record.identity) != planned_run(record).config.digest:
            details = "identity differs from the planned run"
            return absent_outcome(record, "not comparable", details, ("identity",))
        outcome = _finished_outcome(record, unit)
        for derive in (unstable_steps, observed_facts, run_origin, run_utilisation, read_curves):
            derive(record)
        if unit != NATS:
            text_digest(record)
        return outcome
    except RecordError as error:
        return absent_outcome(record, State.DAMAGED.word, error.problems[0].what)
    finally:
        record.forget_rows()


def absent_outcome(
    record: RunRecord, state: str, details: str = "", undeclared: tuple[str, ...] = ()
) -> SeedOutcome:
    """Return the outcome of a run without a result: diverged, not comparable, or missing."""
    non_finite = _NON_FINITE.search(details) or record.run.numerics_failure.exists()
    return SeedOutcome(
        planned_run(record).seed,
        None,
        state.startswith(State.FAILED.word) and bool(non_finite),
        state,
        details,
        undeclared=undeclared,
        reused=record.run.path.parent.name != planned_run(record).study,
        ended=state not in _OPEN_STATES,
        record=record,
    )


@derived
def run_origin(record: RunRecord) -> dict[str, Any]:
    """Return the origin of the figures of a run; "unknown" if not recorded. Raises RecordError."""
    manifest = record.manifest
    commit, edited = (manifest.find("code", name) for name in ("git_sha", "dirty_tree"))
    versions = {"CUDA": "cuda_version", "ROCm": "hip_version"}
    platforms = {
        name: version
        for name, field in versions.items()
        if (version := manifest.find("hardware", field)) not in (None, UNKNOWN)
    }
    return {
        "run_id": str(manifest.find("run", "run_id")),
        "configuration": str(record.config.find("hash8")),
        "commit": commit if isinstance(commit, str) else None,
        "branch": str(manifest.find("code", "branch")),
        "edited": edited if isinstance(edited, bool) else str(edited),
        "data": str(manifest.find("data", "digest")),
        "weights": str(manifest.find("final_weights_digest")),
        "torch": str(manifest.find("origin", "torch")),
        "platform": next((f"{name} {version}" for name, version in platforms.items()), None),
        "device": str(manifest.find("origin", "device")),
        "processes": manifest.find("processes", "world_size"),
    }


def evaluated_loss(record: RunRecord, unit: str) -> float:
    """Return the loss of a finished run. Raises RecordError if it has none in ``unit``."""
    if unit == NATS:
        return record.final.val_loss
    documents = record.documents
    nats = math.fsum(document.nll_sum for document in documents)
    bits = bits_per_byte(nats, sum(document.n_bytes for document in documents))
    if bits is None:
        raise DamagedRecord(record.run.per_query, "documents with bytes", "none")
    return bits


def _finished_outcome(record: RunRecord, unit: str) -> SeedOutcome:
    final = record.final
    documents = record.documents
    digest = json_digest([document.nll_sum for document in documents])[:16]
    attempts, started_at = record.attempts, None
    if attempts:
        # When the runner first submitted the run, or else when the run first started.
        first_at = attempts[0].submitted_at
        started_at = attempts[0].started_at if first_at is None else first_at
    outcome = SeedOutcome(
        planned_run(record).seed,
        evaluated_loss(record, unit),
        items=digest,
        documents=tuple(d.nll_mean if unit == NATS else d.bits_per_byte or 0.0 for d in documents),
        started_at=started_at,
        ended_at=attempts[-1].ended_at if attempts else None,
        unstable=bool(unstable_steps(record)),
        reused=record.run.path.parent.name != planned_run(record).study,
        record=record,
    )
    first = next((row.loss for row in record.train_rows), 0.0)
    early = [row for row in record.eval_rows if row.iteration >= _EARLY_SHARE * final.iterations]
    # Pretrained weights begin below the unigram entropy: they may improve by less.
    if first > final.unigram_entropy and final.val_loss >= first - _UNTRAINED_NATS:
        before = f"first loss {first:.4f}"
    elif early and early[0].iteration < final.iterations and final.val_loss > early[0].val_loss:
        before = f"loss {early[0].val_loss:.4f} at iteration {early[0].iteration}"
    else:
        return outcome
    reason = f"diverged: final loss {final.val_loss:.4f}, {before}"
    return replace(outcome, diverged=True, reason=reason)


# Curves that a report draws, small however long the run is: a record keeps them, and no rows.


# Points of a training curve; each is a mean over equally many tokens.
_BINS = 60
# Training tokens → value, in ascending order.
Curve = Mapping[float, float]


class RunCurves(NamedTuple):
    """Curves of a finished run."""

    # Tokens of one bin of the training loss.
    width: float
    # Mean training loss of each bin, at its end; validation loss.
    train: Curve
    evaluations: Curve
    # Training tokens and loss of each unstable step.
    spikes: Sequence[tuple[int, float]]
    # Name → last statistic, reduced over layers.
    last_statistics: Mapping[str, float]


@derived
def read_curves(record: RunRecord) -> RunCurves:
    """Return the curves of a finished run. Raises RecordError."""
    statistics = [row.values for row in record.metrics if isinstance(row, StatisticsRow)]
    try:
        width = bin_width(record.final.tokens)
        return RunCurves(
            width,
            binned(record.train_rows, width),
            dict(sorted((float(row.tokens), row.val_loss) for row in record.eval_rows)),
            unstable_points(record),
            reduce_over_layers(statistics[-1]) if statistics else {},
        )
    except OverflowError as error:
        raise DamagedRecord(record.run.metrics, "numbers of 64 bits", str(error)) from None


def bin_width(tokens: int) -> float:
    return tokens / _BINS or 1.0


def binned(rows: Sequence[TrainRow], width: float) -> Curve:
    """Return the mean training loss of each bin of tokens, at the end of the bin."""
    bins: dict[float, list[float]] = {}
    for row in rows:
        bins.setdefault(-(-row.tokens // width) * width, []).append(row.loss)
    return {at: fmean(bins[at]) for at in sorted(bins)}


# Speed, memory and utilisation.


@derived
def run_utilisation(record: RunRecord) -> tuple[dict[str, float], str]:
    """Return the known figures over all GPUs, and the first problem of a damaged file, or ""."""
    timings, unread = _readable(lambda: record.timings)
    telemetry, damage = _readable(lambda: record.telemetry)
    # The sampler takes its first sample before the first step.
    mfu, samples = [row.mfu for row in timings if row.mfu is not None], telemetry[1:]
    figures = {"tokens_per_second": record.timing.tokens_per_second}
    figures |= {"mfu": median(mfu)} if mfu else {}
    # The sum of damaged samples may overflow.
    with contextlib.suppress(OverflowError):
        if samples:
            used = [[gpu["memory_used_mib"] for gpu in sample.gpus] for sample in samples]
            totals = [sum(gpus) for gpus in used if gpus and None not in gpus]
            figures |= mean_metrics(samples)
            figures["process/rss_peak_gb"] = max(s.rss_mib for s in samples) / _MIB_PER_GB
            figures |= {"gpu/memory_used_peak_gb": max(totals) / _MIB_PER_GB} if totals else {}
    known = {name: figures[name] for name in UTILISATION_COLUMNS if name in figures}
    return known, unread or damage


def _readable(read: Callable[[], Sequence[T]]) -> tuple[Sequence[T], str]:
    """Return the rows of a file, and ""; no rows and the problem if the file is damaged."""
    try:
        return read(), ""
    except MissingRecord:
        return (), ""
    except RecordError as error:
        line = f":{error.line}" if error.line else ""
        return (), f"{error.file.name}{line}: {error.problems[0].what}"


def mean_over_seeds(by_seed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    first = by_seed[0] if by_seed else {}
    names = [name for name in first if all(name in figures for figures in by_seed)]
    return {name: fmean(figures[name] for figures in by_seed) for name in names}
