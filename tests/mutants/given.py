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

_RATE = "learning-rate"


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
        "accumulation repeats the same sequences",
        "dropped",
        "baseline",
        {"steps": ("data-order", r"of 1 process\(es\)")},
        replaced(loader._Plan, "__iter__", lambda _: _same_span),
    ),
    Mutant(
        "parts of ranks overlap",
        "rank 1 starts one micro-batch after rank 0, which has several",
        "formula",
        "baseline",
        {
            "steps": ("data-order", r"of 2 process\(es\)"),
            "paired": ("paired-data", "^rank 1 of 2"),
        },
        edited(
            loader.BatchLoader,
            "__init__",
            "rank * global_batch // world_size",
            "rank * micro_batch",
        ),
    ),
    Mutant(
        "ranks read the same",
        "every rank reads rank 0's share of the batch",
        "dropped",
        "full",
        {"steps": ("data-order", r"of 2 process\(es\)")},
        replaced(BatchLoader, "__init__", _as_rank_0),
    ),
    Mutant(
        "cosine is a parabola",
        "the decay follows another curve",
        "formula",
        "baseline",
        {"steps": _RATE},
        replaced(schedule, "_decayed_share", lambda _: lambda options, x: x * x),
    ),
    Mutant(
        "progress is ahead",
        "the schedule ends early",
        "moved",
        "mla",
        {"steps": _RATE},
        then(TrainingBudget, "progress", lambda out, *given: min(1.0, out + 0.1)),
    ),
    Mutant(
        "the last target is not learned",
        "the loss mask in training differs",
        "dropped",
        "golden",
        {"reference": ("reference-formulas", "^the loss")},
        replaced(GPT, "forward", _without_the_last),
    ),
    Mutant(
        "evaluation mode persists",
        "training after the first evaluation has no dropout",
        "dropped",
        "baseline",
        {"repeat": ("same-loss", "step 2 .*evaluation")},
        then(Evaluator, "__call__", _still_evaluating),
    ),
    Mutant(
        "attention has no dropout",
        "neither on weights nor on the output",
        "dropped",
        "ra",
        {"isolated": ("dropout-rate", "^50% of attention weights of block 0 .*; 0%$")},
        after_init(Attention, lambda self: setattr(self, "dropout", 0.0)),
    ),
    Mutant(
        "MLP has half the dropout",
        "half of the configured rate",
        "constant",
        "baseline",
        {"isolated": ("dropout-rate", "^50% of the MLP of block 0 .*; 2[0-9]%$")},
        after_init(Mlp, lambda self: setattr(self.dropout, "p", self.dropout.p / 2)),
    ),
    Mutant(
        "precision is ignored",
        "products in fp32 although bf16 is configured",
        "dtype",
        "baseline",
        {"steps": ("precision", r"torch\.bfloat16; torch\.float32$")},
        replaced(step, "autocast", lambda _: lambda machine: nullcontext()),
    ),
    Mutant(
        "the first micro-batch counts twice",
        "it replaces the last one",
        "swapped",
        "baseline",
        {"steps": ("accumulation", "gradient norm")},
        replaced(step, "accumulate_gradients", _first_twice),
    ),
    Mutant(
        "positions are those of the next token",
        "the table is rotated by one row",
        "off by one",
        "baseline",
        {"reference": LOGITS},
        replaced(GPT, "hidden", _later_by_one),
    ),
    Mutant(
        "no gradient from the head to the embedding",
        "only values are tied",
        "gradient",
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
        "W + 2 tokens",
        "off by one",
        "ra-golden",
        {"reference": LOGITS},
        after_init(Reciprocal, lambda self: setattr(self, "reach", self.reach + 1)),
    ),
)
