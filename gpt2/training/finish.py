"""Result files of a finished run: weights, per-document rows, text sample and summary."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch

from gpt2.evaluate import Evaluation
from gpt2.generate import generate
from gpt2.items import items_of
from gpt2.training.first_steps import first_steps
from gpt2.training.session import Session
from lib.files import read_json_lines, write_atomic, write_json
from lib.repro.figures import evaluation_figures, expected_calibration_error, train_loss
from lib.repro.per_query import Item, to_csv
from lib.repro.streams import stream_seed

SCHEMA_VERSION = 2


def write_results(session: Session, evaluation: Evaluation, started: float) -> None:
    """Write all results except the status; ``started`` is the process start by time.monotonic."""
    weights = {name: tensor.contiguous() for name, tensor in session.weights().items()}
    write_atomic(session.run.weights, safetensors.torch.save(weights))
    dataset, step = session.config.data.dataset, session.iteration
    items = items_of(evaluation, session.evaluate, dataset, session.tokenizer, step)
    write_atomic(session.run.per_query, to_csv(items))
    if session.config.train.sample_tokens:
        write_atomic(session.run.sample, text_sample(session))
    write_json(session.run.summary, _summary(session, items, evaluation.calibration, started))


def text_sample(session: Session) -> str:
    """Generate text after ``SAMPLE_PROMPT`` with a dedicated random stream."""
    config = session.config
    tokenizer = session.tokenizer
    prompt = tokenizer.encode(config.train.sample_prompt)
    # An empty prompt starts a new document.
    ids = torch.tensor([int(i) for i in prompt] or [tokenizer.end_of_text])
    seed = stream_seed(config.seed, "sample")
    tokens = generate(session.model, ids, seed, config.machine)
    sample = list(itertools.islice(tokens, config.train.sample_tokens))
    return tokenizer.decode(np.array([*ids.tolist(), *sample])) + "\n"


def _summary(
    session: Session,
    items: Sequence[Item],
    calibration: dict[str, list[float]],
    started: float,
) -> dict[str, Any]:
    """Build summary.json; configuration and seed determine all values outside ``timing``."""
    config, seconds, verdict = session.config, session.watch.seconds, first_steps(session)
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": config.seed,
        "run_profile": config.repro.profile,
        "final": {
            **evaluation_figures(items),
            "expected_calibration_error": expected_calibration_error(calibration),
            "train_loss": train_loss(read_json_lines(session.run.metrics), session.iteration),
            "iterations": session.iteration,
            "tokens": session.tokens,
            "data_order_digest": session.order.digest,
            "unigram_entropy": session.dataset.unigram_entropy,
            "parameters": sum(w.numel() for w in session.weights().values()),
            "budget_stretch": session.budget.stretch,
            "sparsity": session.pruner.sparsity(),
            "sparsity_by_layer": session.pruner.sparsity_by_layer(),
            "prunable_weights": session.pruner.prunable_weights(),
        },
        "calibration": calibration,
        "numerics": config.numerics.flags,
        "timing": {
            "total_seconds": time.monotonic() - started,
            "train_seconds": seconds,
            "mean_step_seconds": seconds / session.iteration,
            "tokens_per_second": session.tokens / seconds,
            "first_steps": verdict.record() if verdict else None,
            # With debug flags set, the timing does not represent the run's speed.
            "debug_flags": config.numerics.debug_flags,
        },
    }
