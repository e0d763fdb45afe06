"""Result files of a finished run: weights, per-document rows, text sample and summary."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch

from gpt2.evaluate import EvaluationResult
from gpt2.generate import generate
from gpt2.model import GPT
from gpt2.training.first_steps import summary_of_first_steps
from gpt2.training.per_query import items_of
from gpt2.training.state import TrainingSession
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

SCHEMA_VERSION = 2


def write_results(session: TrainingSession, evaluation: EvaluationResult, started: float) -> None:
    """Write all results except the status, on rank 0; must be called on every rank."""
    model, records, run = session.whole_model(), session.records, session.run
    # Of all ranks.
    gathered = {
        "data_order_digest": session.order.state_dict(),
        "sparsity": session.pruner.sparsity(),
        "sparsity_by_layer": session.pruner.sparsity_by_layer(),
        "prunable_weights": session.pruner.prunable_weights(),
    }
    if not session.group.is_main:
        return
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    records.write(run.weights, safetensors.torch.save(weights))
    dataset = session.config.data.dataset
    items = items_of(evaluation, session.evaluate, dataset, session.tokenizer, session.iteration)
    records.write(run.per_query, to_csv(items))
    if session.config.train.sample_tokens:
        records.doing("writing a sample")
        records.write(run.sample, generate_sample(session, model))
    summary = _summary(session, items, evaluation.calibration, gathered, started)
    records.write(run.summary, pretty_json(summary))


def generate_sample(session: TrainingSession, model: GPT) -> str:
    """Generate text after ``SAMPLE_PROMPT`` with a dedicated random stream."""
    config, tokenizer = session.config, session.tokenizer
    prompt = tokenizer.encode(config.train.sample_prompt)
    # An empty prompt starts a new document.
    ids = torch.tensor([int(i) for i in prompt] or [tokenizer.end_of_text])
    tokens = generate(model, ids, stream_seed(config.seed, "sample"), config.machine)
    sample = list(itertools.islice(tokens, config.train.sample_tokens))
    return tokenizer.decode(np.array([*ids.tolist(), *sample])) + "\n"


def _summary(
    session: TrainingSession,
    items: Sequence[DocumentResult],
    calibration: dict[str, list[float]],
    gathered: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Build summary.json; configuration and seed determine all values outside ``timing``."""
    config, iterations, record = session.config, session.iteration, RunRecord(session.run)
    seconds = session.clock.seconds
    # A run of one log line has no other speed than that of all steps.
    first = next((row for row in record.timings if row.iteration < iterations), None)
    warmup = (first.iteration, first.train_seconds) if first else (0, 0.0)
    step_seconds = (seconds - warmup[1]) / (iterations - warmup[0])
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": config.seed,
        "run_profile": config.repro.profile,
        "final": {
            **evaluation_metrics(items),
            "expected_calibration_error": expected_calibration_error(calibration),
            "train_loss": train_loss(record.metrics_fields, iterations),
            "iterations": iterations,
            "tokens": session.tokens,
            "unigram_entropy": session.dataset.unigram_entropy,
            "parameters": session.model.num_params(),
            "budget_stretch": session.budget.stretch,
            **gathered,
        },
        "calibration": calibration,
        "numerics": config.numerics.flags,
        "timing": {
            "total_seconds": time.monotonic() - started,
            "train_seconds": seconds,
            "warmup_iterations": warmup[0],
            "warmup_seconds": warmup[1],
            "mean_step_seconds": step_seconds,
            "tokens_per_second": session.tokens / iterations / step_seconds,
            "first_steps": summary_of_first_steps(session),
            # With debug flags set, the timing does not represent the run's speed.
            "debug_flags": config.numerics.debug_flags,
        },
    }
