"""Result files of a finished run: weights, per-document rows, text sample and summary."""

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch

from gpt2.evaluate import EvaluationResult
from gpt2.generate import generate
from gpt2.model import GPT
from gpt2.training.metrics import check_first_steps
from gpt2.training.per_query import items_of
from gpt2.training.session import TrainingSession
from lib.files import pretty_json
from lib.runs.documents import (
    DocumentResult,
    evaluation_metrics,
    expected_calibration_error,
    to_csv,
    train_loss,
)
from lib.runs.record import RunRecord
from lib.runs.seeds import stream_seed
from lib.tracking.sidecar import Sidecars
from lib.tracking.trackers import TrackerMetadata

SCHEMA_VERSION = 2


def write_results(session: TrainingSession, evaluation: EvaluationResult, started: float) -> None:
    """Write all results except the status; ``started`` is the process start by time.monotonic.

    Must be called on every rank; rank 0 writes.
    """
    model = session.state.whole_model()
    sparsity = _sparsity(session)
    if not session.group.is_main:
        return
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    session.records.write(session.run.weights, safetensors.torch.save(weights))
    dataset, step = session.config.data.dataset, session.state.iteration
    items = items_of(evaluation, session.evaluate, dataset, session.tokenizer, step)
    session.records.write(session.run.per_query, to_csv(items))
    if session.config.train.sample_tokens:
        session.records.doing("writing a sample")
        session.records.write(session.run.sample, generate_sample(session, model))
    summary = _summary(session, items, evaluation.calibration, sparsity, started)
    session.records.write(session.run.summary, pretty_json(summary))


def _sparsity(session: TrainingSession) -> dict[str, Any]:
    pruner = session.state.pruner
    return {
        "sparsity": pruner.sparsity(),
        "sparsity_by_layer": pruner.sparsity_by_layer(),
        "prunable_weights": pruner.prunable_weights(),
    }


def generate_sample(session: TrainingSession, model: GPT) -> str:
    """Generate text after ``SAMPLE_PROMPT`` with a dedicated random stream."""
    config = session.config
    tokenizer = session.tokenizer
    prompt = tokenizer.encode(config.train.sample_prompt)
    # An empty prompt starts a new document.
    ids = torch.tensor([int(i) for i in prompt] or [tokenizer.end_of_text])
    seed = stream_seed(config.seed, "sample")
    tokens = generate(model, ids, seed, config.machine)
    sample = list(itertools.islice(tokens, config.train.sample_tokens))
    return tokenizer.decode(np.array([*ids.tolist(), *sample])) + "\n"


def _summary(
    session: TrainingSession,
    items: Sequence[DocumentResult],
    calibration: dict[str, list[float]],
    sparsity: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Build summary.json; configuration and seed determine all values outside ``timing``."""
    config, state, record = session.config, session.state, RunRecord(session.run)
    seconds, verdict = state.clock.seconds, check_first_steps(session)
    # A run of one log line has no other speed than that of all steps.
    first = next((row for row in record.timings if row.iteration < state.iteration), None)
    warmup = (first.iteration, first.train_seconds) if first else (0, 0.0)
    step_seconds = (seconds - warmup[1]) / (state.iteration - warmup[0])
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": config.seed,
        "run_profile": config.repro.profile,
        "final": {
            **evaluation_metrics(items),
            "expected_calibration_error": expected_calibration_error(calibration),
            "train_loss": train_loss(record.metrics_fields, state.iteration),
            "iterations": state.iteration,
            "tokens": state.tokens,
            "data_order_digest": state.order.digest,
            "unigram_entropy": session.dataset.unigram_entropy,
            "parameters": state.model.num_params(),
            "budget_stretch": state.budget.stretch,
            **sparsity,
        },
        "calibration": calibration,
        "numerics": config.numerics.flags,
        "timing": {
            "total_seconds": time.monotonic() - started,
            "train_seconds": seconds,
            "warmup_iterations": warmup[0],
            "warmup_seconds": warmup[1],
            "mean_step_seconds": step_seconds,
            "tokens_per_second": state.tokens / state.iteration / step_seconds,
            "first_steps": verdict.record() if verdict else None,
            # With debug flags set, the timing does not represent the run's speed.
            "debug_flags": config.numerics.debug_flags,
        },
    }


# Sidecar processes of a run, and the run metadata for trackers.


def start_sidecars(session: TrainingSession) -> Sidecars:
    """Start the hardware sampler and the tracker mirrors on rank 0; the manifest must exist."""
    if not session.group.is_main:
        return Sidecars()
    # Without a reference to the session, because it must be freed before its sidecars are.
    records, run = session.records, session.run
    sidecars = Sidecars(lambda text: records.line("WARN", text))
    if seconds := session.config.telemetry.interval_seconds:
        sidecars.start_telemetry(run, seconds)
    try:
        run.trackers.mkdir(exist_ok=True)
        tracker_metadata(session).write(run.tracker_facts)
    except OSError as error:
        records.line(
            "WARN", f"no tracker could be started: {error}; the run continues without trackers"
        )
        return sidecars
    for tracker in session.config.tracking.trackers:
        sidecars.start_mirror(run, tracker.name)
    return sidecars


def tracker_metadata(session: TrainingSession) -> TrackerMetadata:
    """Return the names and the configuration of the run for trackers."""
    run, tracking = session.run, session.config.tracking
    study = run.path.parent.name
    record = RunRecord(run)
    return TrackerMetadata(
        id=_id(session, record),
        project=tracking.project or f"kablate-{study}",
        name=tracking.run_name or run.path.name,
        study=study,
        # <slug>-s<seed>-<hash8>
        step=run.path.name.rsplit("-", 2)[0],
        settings=_settings(session, record),
        symbols=session.config.values,
    )


def _settings(session: TrainingSession, record: RunRecord) -> dict[str, Any]:
    config, train = session.config, session.config.train
    return {
        "run_name": session.run.path.name,
        "hash8": config.hash8,
        "seed": config.seed,
        "dataset": config.data.dataset,
        "optimizer": config.optimizer.name,
        "batch_size": train.batch_size,
        "gradient_accumulation": train.grad_accumulation,
        "num_gpus": train.gpus,
        "learning_rate": config.schedule.learning_rate,
        "warmup_steps": config.schedule.warmup_steps,
        # Seconds; None unless the budget is time.
        "max_time": train.max_time_seconds if session.state.budget.is_time else None,
        "compile_model": config.machine.compile,
        "git_commit": record.code.git_sha,
        "dirty_tree": record.code.dirty_tree,
        "data_digest": record.manifest.value(str, "data", "digest"),
    }


def _id(session: TrainingSession, record: RunRecord) -> str:
    """Return the tracker id: stable when a run resumes, new when a run is repeated.

    The id is a hash of the run's name and of host and time of its first start.
    """
    if session.run.tracker_facts.exists():
        return TrackerMetadata.read(session.run.tracker_facts).id
    host = record.manifest.value(str, "volatile", "host")
    first_start = [session.run.path.name, host, record.attempts[0].started_at]
    return hashlib.sha256(json.dumps(first_start).encode()).hexdigest()[:16]
