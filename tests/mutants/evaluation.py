"""Faults of the evaluation, and of its way into the results table."""

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpt2 import evaluate
from gpt2.check import evaluation_checks
from gpt2.data import dataset
from gpt2.evaluate import EvaluationResult, Evaluator
from gpt2.model import GPT
from gpt2.training import loop, per_query, results
from lib.runs.documents import DocumentResult
from tests.mutants.mutant import Expected, Mutant, Plant, edited, replaced, then

_WINDOWS = "evaluation-windows"
_ROWS = "document-rows"
_LOSS: Expected = ("final-result", " val_loss ")


def _evaluated(name: str, expected: Expected, plant: Plant, **more: Any) -> Mutant:
    return Mutant(name, "baseline", {"evaluated": expected}, plant, **more)


def _accuracy_of_first(result: EvaluationResult) -> float:
    first = result.documents[0]
    return first.n_correct / result.tokens


def _mean_of_documents(result: EvaluationResult) -> float:
    return statistics.fmean(d.nll_sum / d.n_tokens for d in result.documents)


def _loss_of_items(change: Callable[[Sequence[Any]], float]) -> Plant:
    """Return a plant that computes the loss of summary.json from the rows in another way."""

    def other(out: dict[str, Any], items: Sequence[Any]) -> dict[str, Any]:
        return out | {"val_loss": change(items)}

    return then(results, "evaluation_metrics", other)


def _summary(change: Callable[[dict[str, Any], Any], Any]) -> Plant:
    """Return a plant that replaces the loss of the finished summary."""

    def other(out: dict[str, Any], session: Any, *rest: Any) -> dict[str, Any]:
        loss = change(out["final"], session)
        return out | {"final": out["final"] | {"val_loss": loss}}

    return then(results, "_summary", other)


def _budget(change: Callable[[int], int]) -> Plant:
    def make(right: Any) -> Any:
        return lambda split, size, budget, *rest: right(split, size, change(budget), *rest)

    return replaced(evaluate, "evaluation_windows", make)


def _called(change: Callable[[Any, Evaluator, GPT], Any]) -> Plant:
    """Return a plant that wraps the evaluation of a model."""

    def make(right: Any) -> Any:
        def call(self: Evaluator, model: GPT, *rest: Any) -> Any:
            return change(lambda network: right(self, network, *rest), self, model)

        return call

    return replaced(Evaluator, "__call__", make)


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


def _mean_of_documents(self: EvaluationResult) -> float:
    return statistics.fmean(d.nll_sum / d.n_tokens for d in self.documents)


def _as_one_text(out: Any, *given: Any) -> Any:
    return dataclasses.replace(out, val=dataset.TokenSplit("val", out.val._paths, None))


def _confident(out: Any, *given: Any) -> Any:
    return out._replace(confidence=out.confidence.sqrt())


def _left_gradients(run: Any, self: Evaluator, model: GPT) -> Any:
    out = run(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return out


# Longer than the context of every small form.


def _blames_the_product(code: str, problem: str) -> Expected:
    """Return a finding with this code and problem that contains no command for the user."""
    what = f"not in the configuration: the small form of this step failed: {problem}"
    return code, "error in the product or in the check", what, "^(?!.*(menuconfig|type: ))"


MUTANTS = (
    _evaluated(
        "the loss is a mean over documents",
        _LOSS,
        _loss_of_items(lambda items: statistics.fmean(item.nll_mean for item in items)),
        quick=True,
    ),
    _evaluated(
        "evaluation budget is doubled",
        (_WINDOWS, "^137 tokens in held-out"),
        _budget(lambda budget: 2 * budget),
    ),
    _evaluated("windows cross documents", _WINDOWS, then(loop, "open_dataset", _as_one_text)),
    _evaluated(
        "a document is missing", _ROWS, then(results, "items_of", lambda out, *given: out[:-1])
    ),
    _evaluated(
        "the summary rounds",
        "exact-sum",
        _summary(lambda final, session: round(final["val_loss"], 7)),
    ),
    _evaluated("a copy of the model is evaluated", _ROWS, _called(_first_weights)),
    _evaluated("evaluation draws random numbers", "evaluation-random-state", _called(_random_draw)),
    _evaluated(
        "the last block stays in evaluation mode", "evaluation-mode", _called(_left_in_evaluation)
    ),
    _evaluated("evaluation rounds the weights", "evaluation-weights", _called(_rounded_weights)),
    _evaluated(
        "losses of a window are summed in fp32",
        "evaluation-sums",
        edited(Evaluator, "_rows", "column.double().sum(1)", "column.sum(1).double()"),
    ),
    _evaluated(
        "confidence is a square root",
        ("final-result", " expected_calibration_error "),
        then(GPT, "token_losses", _confident),
    ),
    _evaluated(
        "accuracy counts the tokens of the first document",
        "evaluation-figures",
        replaced(EvaluationResult, "accuracy", lambda _: property(_accuracy_of_first)),
    ),
    _evaluated(
        "bytes of a token are characters",
        (_ROWS, "n_bytes"),
        edited(per_query, "_token_lengths", "bytes(i)", 'bytes(i).decode(errors="replace")'),
    ),
    _evaluated(
        "the sample has another stream",
        "text-sample",
        edited(evaluation_checks, "generate_sample", '"sample"', '"dropout"'),
    ),
    _evaluated(
        "the sample has the seed 1",
        "text-sample",
        edited(evaluation_checks, "generate_sample", "config.seed", "1"),
    ),
    _evaluated(
        "the stored weights are rounded",
        "stored-weights",
        edited(loop, "write_results", "p.detach()", "p.detach().bfloat16().float()"),
    ),
    _evaluated(
        "evaluation has batches of another size",
        (_ROWS, "batch_index"),
        edited(Evaluator, "__init__", "train.batch_size", "train.grad_accumulation"),
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
        edited(results, "to_csv", ', lineterminator="\\n"', ""),
    ),
    _evaluated("evaluation leaves gradients", "evaluation-gradient", _called(_left_gradients)),
    _evaluated(
        "the digest of tokens has another width",
        (_ROWS, "tokens_sha256"),
        edited(per_query, "item_facts", 'astype("<u2")', 'astype("<u4")'),
    ),
    Mutant(
        "the budget of an evaluation is lost",
        "baseline",
        {"evaluated": _blames_the_product("config.out-of-range", "EVAL_TOKENS: smaller than")},
        replaced(
            evaluate,
            "evaluation_windows",
            lambda right: lambda split, size, tokens, documents: right(split, size, 0, documents),
        ),
        quick=True,
    ),
)
