"""Faults of the evaluation, and of its way into the results table."""

import copy
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from gpt2 import evaluate
from gpt2.check import evaluation_checks, result_checks
from gpt2.data import dataset, evaluation_windows
from gpt2.evaluate import EvaluationResult, Evaluator
from gpt2.model import GPT
from gpt2.training import finish, metrics, per_query, setup
from lib.runs.documents import DocumentResult
from lib.runs.record import RunRecord
from lib.runs.rows import EvalRow
from tests.mutants.mutant import Expected, Mutant, Plant, edited, replaced, then

_WINDOWS = "evaluation-windows"
_ROWS = "document-rows"
_LOSS: Expected = ("final-result", r"^val_loss ")


def _evaluated(name: str, expected: Expected, plant: Plant, **more: Any) -> Mutant:
    return Mutant(name, "baseline", {"evaluated": expected}, plant, **more)


def _spelled_end(lengths_V: np.ndarray, words: Any) -> np.ndarray:
    lengths_V[words.end_of_text] = len(words.token_bytes(words.end_of_text))
    return lengths_V


def _accuracy_of_first(result: EvaluationResult) -> float:
    first = result.documents[0]
    return first.n_correct / result.tokens


def _mean_of_documents(result: EvaluationResult) -> float:
    return statistics.fmean(d.nll_sum / d.n_tokens for d in result.documents)


def _loss_of_items(change: Callable[[Sequence[Any]], float]) -> Plant:
    """Return a plant that computes the loss of summary.json from the rows in another way."""

    def other(out: dict[str, Any], items: Sequence[Any]) -> dict[str, Any]:
        return out | {"val_loss": change(items)}

    return then(finish, "evaluation_metrics", other)


def _summary(change: Callable[[dict[str, Any], Any], Any]) -> Plant:
    """Return a plant that replaces the loss of the finished summary."""

    def other(out: dict[str, Any], session: Any, *rest: Any) -> dict[str, Any]:
        loss = change(out["final"], session)
        return out | {"final": out["final"] | {"val_loss": loss}}

    return then(finish, "_summary", other)


def _budget(change: Callable[[int], int]) -> Plant:
    def make(right: Any) -> Any:
        return lambda split, size, budget, *rest: right(split, size, change(budget), *rest)

    return replaced(evaluate, "evaluation_windows", make)


def _batches(change: Callable[[Any, Any], Any]) -> Plant:
    """Return a plant that changes every batch (x, y) of an evaluation."""

    def make(right: Any) -> Any:
        def batches(*given: Any) -> Iterator[Any]:
            return itertools.starmap(change, right(*given))

        return batches

    return replaced(evaluate, "evaluation_batches", make)


def _called(change: Callable[[Any, Evaluator, GPT], Any]) -> Plant:
    """Return a plant that wraps the evaluation of a model."""

    def make(right: Any) -> Any:
        def call(self: Evaluator, model: GPT, *rest: Any) -> Any:
            return change(lambda network: right(self, network, *rest), self, model)

        return call

    return replaced(Evaluator, "__call__", make)


def _first_result(run: Any, self: Evaluator, model: GPT) -> Any:
    if "first" not in vars(self):
        vars(self)["first"] = run(model)
    return vars(self)["first"]


def _first_weights(run: Any, self: Evaluator, model: GPT) -> Any:
    if "first" not in vars(self):
        vars(self)["first"] = copy.deepcopy(model)
    return run(vars(self)["first"])


def _random_draw(run: Any, self: Evaluator, model: GPT) -> Any:
    torch.rand(1)
    return run(model)


def _left_in_evaluation(run: Any, self: Evaluator, model: GPT) -> Any:
    out = run(model)
    model.h[-1].eval()
    return out


@torch.no_grad()
def _rounded_weights(run: Any, self: Evaluator, model: GPT) -> Any:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return run(model)


def _with_dropout(right: Any) -> Any:
    def measure(self: Evaluator, model: GPT, stop: Any) -> Any:
        return right(self, model.train(), stop)

    return measure


def _by_seed(right: Any) -> Any:
    def init(self: Evaluator, config: Any, *given: Any) -> None:
        right(self, config, *given)
        random.Random(config.seed).shuffle(self.windows)

    return init


def _in_fp32(out: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(d, nll_sum=float(np.float32(d.nll_sum))) for d in out)


def _mean_of_documents(self: EvaluationResult) -> float:
    return statistics.fmean(d.nll_sum / d.n_tokens for d in self.documents)


def _best(final: dict[str, Any], session: Any) -> float:
    rows = RunRecord(session.run).metrics
    return min(row.val_loss for row in rows if isinstance(row, EvalRow))


def _in_order(document: Any, offset: int) -> tuple[bytes, int]:
    return b"", offset


def _as_one_text(out: Any, *given: Any) -> Any:
    return dataclasses.replace(out, val=dataset.TokenSplit("val", out.val._paths, None))


def _all_correct(out: Any, *given: Any) -> Any:
    return out._replace(correct=torch.ones_like(out.correct))


def _confident(out: Any, *given: Any) -> Any:
    return out._replace(confidence=out.confidence.sqrt())


def _left_gradients(run: Any, self: Evaluator, model: GPT) -> Any:
    out = run(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return out


def _without_moments(out: None, session: Any) -> None:
    for state in session.state.optimizer.state.values():
        state["exp_avg"].zero_()


MUTANTS = (
    _evaluated(
        "the loss is a mean over documents",
        _LOSS,
        _loss_of_items(lambda items: statistics.fmean(item.nll_mean for item in items)),
        quick=True,
    ),
    _evaluated(
        "rows of the metrics are means over documents",
        ("exact-sum", "the last evaluation row"),
        replaced(EvaluationResult, "loss", lambda _: property(_mean_of_documents)),
    ),
    _evaluated(
        "the last window of a document is dropped",
        _WINDOWS,
        then(
            evaluation_windows,
            "_cut",
            lambda out, number, document, size: [w for w in out if w.length > size],
        ),
    ),
    _evaluated(
        "evaluation reads the training split",
        _WINDOWS,
        then(setup, "open_dataset", lambda out, *given: dataclasses.replace(out, val=out.train)),
    ),
    _evaluated(
        "evaluation budget is doubled",
        (_WINDOWS, r"^137 tokens in 5 "),
        _budget(lambda budget: 2 * budget),
    ),
    _evaluated("evaluation budget is halved", _WINDOWS, _budget(lambda b: b // 2)),
    _evaluated("windows depend on the seed", _WINDOWS, replaced(Evaluator, "__init__", _by_seed)),
    _evaluated(
        "windows are in the order of the text",
        _WINDOWS,
        replaced(evaluation_windows, "_order", lambda _: _in_order),
    ),
    _evaluated("windows cross documents", _WINDOWS, then(setup, "open_dataset", _as_one_text)),
    _evaluated(
        "evaluation has dropout", (_ROWS, "nats"), replaced(Evaluator, "_measure", _with_dropout)
    ),
    _evaluated(
        "evaluation ignores the precision",
        (_ROWS, "nats"),
        replaced(evaluate, "autocast", lambda _: lambda machine: nullcontext()),
    ),
    _evaluated(
        "evaluation predicts the input", _ROWS, _batches(lambda x, y: (x, np.where(y < 0, y, x)))
    ),
    _evaluated("padding counts as a target", _ROWS, _batches(lambda x, y: (x, np.maximum(y, 0)))),
    _evaluated(
        "documents are in the order of evaluation",
        _ROWS,
        then(
            finish,
            "items_of",
            lambda out, *given: sorted(out, key=lambda i: (i.batch_index, i.row_in_batch)),
        ),
    ),
    _evaluated(
        "a document is duplicated",
        _ROWS,
        then(finish, "items_of", lambda out, *given: [out[0], *out]),
    ),
    _evaluated(
        "a document is missing", _ROWS, then(finish, "items_of", lambda out, *given: out[:-1])
    ),
    _evaluated(
        "accuracy is the loss", _LOSS, _summary(lambda final, session: final["token_accuracy"])
    ),
    _evaluated(
        "the loss is in bits",
        _LOSS,
        _summary(lambda final, session: final["val_loss"] / math.log(2)),
    ),
    _evaluated(
        "the result is the training loss",
        _LOSS,
        _summary(lambda final, session: final["train_loss"]),
    ),
    _evaluated("the result is the best evaluation", _LOSS, _summary(_best)),
    _evaluated(
        "the summary rounds",
        "exact-sum",
        _summary(lambda final, session: round(final["val_loss"], 7)),
    ),
    _evaluated("the first evaluation is the result", _ROWS, _called(_first_result)),
    _evaluated("a copy of the model is evaluated", _ROWS, _called(_first_weights)),
    _evaluated("evaluation draws random numbers", "evaluation-random-state", _called(_random_draw)),
    _evaluated(
        "the last block stays in evaluation mode", "evaluation-mode", _called(_left_in_evaluation)
    ),
    _evaluated("evaluation rounds the weights", "evaluation-weights", _called(_rounded_weights)),
    _evaluated(
        "losses are summed in fp32", "evaluation-sums", then(evaluate, "_documents", _in_fp32)
    ),
    _evaluated(
        "losses of a window are summed in fp32",
        "evaluation-sums",
        edited(Evaluator, "_rows", "column.double().sum(1)", "column.sum(1).double()"),
    ),
    _evaluated(
        "every prediction is correct",
        (_ROWS, "correct predictions"),
        then(GPT, "token_losses", _all_correct),
    ),
    _evaluated(
        "confidence is a square root",
        ("final-result", "^expected_calibration_error"),
        then(GPT, "token_losses", _confident),
    ),
    _evaluated(
        "accuracy counts the tokens of the first document",
        "evaluation-figures",
        replaced(EvaluationResult, "accuracy", lambda _: property(_accuracy_of_first)),
    ),
    _evaluated(
        "the loss of an evaluation is a mean over documents",
        "evaluation-figures",
        replaced(EvaluationResult, "loss", lambda _: property(_mean_of_documents)),
    ),
    _evaluated(
        "summary.json has another version",
        ("final-result", "'schema_version': 0"),
        lambda patch: patch.setattr(finish, "SCHEMA_VERSION", 0),
    ),
    _evaluated(
        "statistics leave the model in evaluation mode",
        "evaluation-mode",
        edited(metrics, "_measure", "model.train(training)", "model.eval()"),
    ),
    _evaluated(
        "the end of text counts as text",
        (_ROWS, "tokens, bytes"),
        then(per_query, "_token_lengths", _spelled_end),
    ),
    _evaluated(
        "bytes of a token are characters",
        (_ROWS, "tokens, bytes"),
        edited(per_query, "_token_lengths", "bytes(i)", 'bytes(i).decode(errors="replace")'),
    ),
    _evaluated(
        "rows name the last window's batch",
        (_ROWS, "batch_index"),
        edited(per_query, "item_facts", "indices[0]", "indices[-1]"),
    ),
    _evaluated(
        "the sample has another stream",
        "text-sample",
        edited(result_checks, "generate_sample", '"sample"', '"dropout"'),
    ),
    _evaluated(
        "evaluation has batches of another size",
        (_ROWS, "batch_index, row_in_batch"),
        edited(Evaluator, "__init__", "train.batch_size", "train.grad_accumulation"),
    ),
    _evaluated(
        "the mean of a document is per byte",
        (_ROWS, "nll_mean"),
        replaced(
            DocumentResult, "nll_mean", lambda _: property(lambda row: row.nll_sum / row.n_bytes)
        ),
    ),
    _evaluated(
        "bits of a document are per token",
        (_ROWS, "bits_per_byte"),
        replaced(
            DocumentResult,
            "bits_per_byte",
            lambda _: property(lambda row: row.nll_sum / math.log(2) / row.n_tokens),
        ),
    ),
    _evaluated(
        "lines of the rows end as on Windows",
        (_ROWS, "carriage returns"),
        edited(finish, "to_csv", ', lineterminator="\\n"', ""),
    ),
    _evaluated(
        "the sample has one token more",
        "text-sample",
        edited(result_checks, "generate_sample", "sample_tokens)", "sample_tokens + 1)"),
    ),
    _evaluated("evaluation leaves gradients", "evaluation-gradient", _called(_left_gradients)),
    _evaluated(
        "statistics reset the moments",
        ("evaluation-weights", "the optimizer's state"),
        then(evaluation_checks, "record_statistics", _without_moments),
    ),
    _evaluated(
        "the digest of tokens has another width",
        (_ROWS, "doc_sha256, tokens_sha256"),
        edited(per_query, "item_facts", 'astype("<u2")', 'astype("<u4")'),
    ),
)
