"""Faults of the inputs of a training step, and of the model in training mode only.

B batch, T tokens.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from gpt2 import model
from gpt2.attention.attention import Attention
from gpt2.attention.reciprocal import Reciprocal
from gpt2.data import loader
from gpt2.data.loader import BatchLoader
from gpt2.evaluate import Evaluator
from gpt2.loss import IGNORE_INDEX
from gpt2.mlp.mlp import Mlp
from gpt2.model import GPT
from gpt2.training import step
from gpt2.training.budget import TrainingBudget
from lib.optim import schedule
from tests.mutants.mutant import LOGITS, Mutant, after_init, edited, replaced, then


def _same_span(self: Any) -> Iterator[tuple[int, int]]:
    for start in itertools.count(self.first, self.stride):
        yield from itertools.repeat((start, self.micro_batch), self.micro_batches)


def _as_rank_0(right: Any) -> Any:
    def init(self: BatchLoader, *given: Any) -> None:
        sampler, config, whole, micro, _, *rest = given
        right(self, sampler, config, whole, micro, 0, *rest)

    return init


def _later_by_one(right: Any) -> Any:
    def hidden(self: GPT, idx_BT: Tensor, cache: Any = None) -> Tensor:
        table = self.wpe.weight
        turned = table.roll(-1, 0) - table
        hook = self.wte.register_forward_hook(
            lambda module, given, x_BTC: x_BTC + turned[: x_BTC.size(1)]
        )
        out: Tensor = right(self, idx_BT, cache)
        hook.remove()
        return out

    return hidden


def _without_the_last(right: Any) -> Any:
    def forward(self: GPT, idx_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is not None and self.training:
            targets_BT = targets_BT.clone()
            targets_BT[:, -1] = IGNORE_INDEX
        out: Tensor = right(self, idx_BT, targets_BT)
        return out

    return forward


def _still_evaluating(out: Any, self: Evaluator, network: GPT, *rest: Any) -> Any:
    network.eval()
    return out


def _first_twice(right: Any) -> Any:
    return lambda session, batches: right(session, [*batches[:-1], batches[0]])


MUTANTS = (
    Mutant(
        "micro-batches of a step are equal",
        "baseline",
        {"paired": ("paired-data", "^rank 1 of 2")},
        replaced(loader._Plan, "__iter__", lambda _: _same_span),
    ),
    Mutant(
        "parts of ranks overlap",
        "baseline",
        {"paired": ("paired-data", "^rank 1 of 2")},
        edited(
            loader.BatchLoader,
            "__init__",
            "rank * global_batch // world_size",
            "rank * micro_batch",
        ),
    ),
    Mutant(
        "ranks read the same",
        "full",
        {"paired": ("paired-data", "^rank 1 of 2")},
        replaced(BatchLoader, "__init__", _as_rank_0),
    ),
    Mutant(
        "cosine is a parabola",
        "baseline",
        {"budgeted": ("schedule-end", "after 5200 of 10400 steps")},
        replaced(schedule, "_decayed_share", lambda _: lambda options, x: x * x),
    ),
    Mutant(
        "progress is ahead",
        "mla",
        {"budgeted": ("schedule-end", "after 2000 of 10400 steps")},
        then(TrainingBudget, "progress", lambda out, *given: min(1.0, out + 0.1)),
    ),
    Mutant(
        "the last target is not learned",
        "golden",
        {"reference": ("reference-formulas", "^the loss")},
        replaced(GPT, "forward", _without_the_last),
    ),
    Mutant(
        "evaluation mode persists",
        "baseline",
        {"evaluated": "evaluation-mode"},
        then(Evaluator, "__call__", _still_evaluating),
    ),
    Mutant(
        "attention has no dropout",
        "ra",
        {"precise": ("dropout-place", "^attention weights")},
        after_init(Attention, lambda self: setattr(self, "dropout", 0.0)),
    ),
    Mutant(
        "MLP has half the dropout",
        "baseline",
        {"precise": ("dropout-place", "output of the MLP")},
        after_init(Mlp, lambda self: setattr(self.dropout, "p", self.dropout.p / 2)),
    ),
    Mutant(
        "precision is ignored",
        "baseline",
        {"precise": ("product-type", r"torch\.bfloat16 in training; torch\.float32$")},
        replaced(step, "autocast", lambda _: lambda machine: nullcontext()),
    ),
    Mutant(
        "the first micro-batch counts twice",
        "baseline",
        {"parallel": ("same-loss", "rank 0")},
        replaced(step, "accumulate_gradients", _first_twice),
    ),
    Mutant(
        "positions are those of the next token",
        "baseline",
        {"reference": LOGITS},
        replaced(GPT, "hidden", _later_by_one),
    ),
    Mutant(
        "no gradient from the head to the embedding",
        "baseline",
        {"reference": ("reference-formulas", r"gradient of wte\.weight")},
        replaced(
            model,
            "linear_cross_entropy",
            lambda right: lambda hidden, weight, *rest: right(hidden, weight.detach(), *rest),
        ),
    ),
    Mutant(
        "reciprocal band is one token too wide",
        "ra-golden",
        {"reference": LOGITS},
        after_init(Reciprocal, lambda self: setattr(self, "reach", self.reach + 1)),
    ),
)
