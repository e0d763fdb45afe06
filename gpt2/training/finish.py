"""The files of a finished run: weights, rows, sample, summary and manifest."""

import csv
import io
import itertools
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import safetensors.torch
import torch

from gpt2.evaluate import Evaluation
from gpt2.generate import generate
from gpt2.training.session import Session
from lib.files import read_json_lines, write_atomic, write_json
from lib.repro.streams import stream_seed

SCHEMA_VERSION = 1
PER_QUERY_COLUMNS = ("document", "n_tokens", "n_correct", "loss_sum")
# The training loss of a run is the mean over this last part of its iterations.
_TRAIN_LOSS_PART = 0.1


def write_results(session: Session, evaluation: Evaluation, started: float) -> None:
    """Write everything but the status; the process began at ``started`` of time.monotonic."""
    weights = {name: tensor.contiguous() for name, tensor in session.weights().items()}
    write_atomic(session.run.weights, safetensors.torch.save(weights))
    write_atomic(session.run.per_query, _per_query(evaluation))
    if session.config.train.sample_tokens:
        write_atomic(session.run.sample, text_sample(session))
    write_json(session.run.summary, _summary(session, evaluation, started))


def text_sample(session: Session) -> str:
    """Text that the model writes after ``SAMPLE_PROMPT``, from a random stream of its own."""
    config = session.config
    words = session.tokenizer
    prompt = words.encode(config.train.sample_prompt)
    # An empty prompt starts where a document ends.
    ids = torch.tensor([int(i) for i in prompt] or [words.end_of_text])
    seed = stream_seed(config.seed, "sample")
    tokens = generate(session.model, ids, seed, config.machine)
    written = list(itertools.islice(tokens, config.train.sample_tokens))
    return words.decode(np.array([*ids.tolist(), *written])) + "\n"


def _per_query(evaluation: Evaluation) -> str:
    """CSV with one row for each document; floats in their shortest exact form."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PER_QUERY_COLUMNS)
    for row in evaluation.documents:
        writer.writerow((row.document, row.n_tokens, row.n_correct, repr(row.loss_sum)))
    return text.getvalue()


def _summary(session: Session, evaluation: Evaluation, started: float) -> dict[str, Any]:
    """Everything outside ``timing`` is decided by the configuration and the seed."""
    seconds = session.watch.seconds
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": session.config.seed,
        "final": {
            "val_loss": evaluation.loss,
            "val_perplexity": perplexity(evaluation.loss),
            "token_accuracy": evaluation.accuracy,
            "eval_tokens": evaluation.tokens,
            "eval_documents": len(evaluation.documents),
            "train_loss": _train_loss(session),
            "iterations": session.iteration,
            "tokens": session.tokens,
            "data_order_digest": session.order.digest,
            "unigram_entropy": session.dataset.unigram_entropy,
            "parameters": sum(w.numel() for w in session.weights().values()),
            "budget_stretch": session.budget.stretch,
            "sparsity": session.pruner.sparsity(),
            "sparsity_by_layer": session.pruner.sparsity_by_layer(),
        },
        "numerics": {"check_numerics": False, "detect_anomaly": False},
        "timing": {
            "total_seconds": time.monotonic() - started,
            "train_seconds": seconds,
            "mean_step_seconds": seconds / session.iteration,
            "tokens_per_second": session.tokens / seconds,
        },
    }


def _train_loss(session: Session) -> float:
    """Mean over the last tenth of the iterations, at least one: less noise than one batch has."""
    records = read_json_lines(session.run.metrics)
    losses = {r["iteration"]: r["loss"] for r in records if r["kind"] == "train"}
    first = session.iteration - max(1, int(session.iteration * _TRAIN_LOSS_PART))
    return _mean(loss for iteration, loss in losses.items() if iteration > first)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def perplexity(loss: float) -> float | str:
    """exp(loss), as text where it is beyond floating point: JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return "infinite"
