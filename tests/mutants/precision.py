"""Faults of precision, and of the places of dropout.

B batch, T tokens, C n_embd; r the rows of a chunk, c its columns.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2 import evaluate
from gpt2.attention import rows
from gpt2.attention.attention import Attention
from gpt2.attention.positions import Rope
from gpt2.mlp.mlp import Mlp
from gpt2.model import GPT
from gpt2.nsa.cache import NsaCache
from gpt2.training.state import TrainingSession
from tests.mutants.mutant import (
    MECHANISMS,
    Expected,
    Mutant,
    Plant,
    after_init,
    edited,
    replaced,
    then,
)

_WIDE = "wide-operation"
_PLACE = "dropout-place"


def _precise(
    name: str,
    plant: Plant,
    expected: Expected,
    step: str = "baseline",
    **more: Any,
) -> Mutant:
    return Mutant(name, step, {"precise": expected}, plant, **more)


def _narrow_softmax(right: Any) -> Any:
    def softmaxes(plan: Any, scores: Tensor, *rest: Any, **named: Any) -> Any:
        return right(plan, scores.bfloat16(), *rest, **named)

    return softmaxes


def _downcast(out: Tensor, *given: Any) -> Tensor:
    return out.bfloat16().float() if out.dtype == torch.float32 else out


def _stored_in_bf16(right: Any) -> Any:
    def batches(self: TrainingSession) -> Any:
        self.model.wte.weight.data = self.model.wte.weight.data.bfloat16()
        return right(self)

    return batches


def _hidden_dropout(self: Mlp) -> None:
    right = self.activation
    self.activation = lambda x: F.dropout(right(x), self.dropout.p, self.training)


def _read_dropped(right: Any) -> Any:
    def forward(self: Attention, *given: Any) -> Any:
        out, view = right(self, *given)
        if view.weights_BTS is not None and self.training:
            view = replace(view, weights_BTS=F.dropout(view.weights_BTS, self.dropout, True))
        return out, view

    return forward


MUTANTS = (
    _precise(
        "generated text computes attention in bf16",
        edited(NsaCache, "attend", "enabled=False", "enabled=True"),
        ("check.exception", "dtype"),
        "nsa",
        defconfig="nsa-quickstart",
    ),
    _precise(
        "attention softmax is in bf16",
        replaced(rows, "softmaxes_from_scores", _narrow_softmax),
        (_WIDE, "^softmax"),
        "ra",
        quick=True,
    ),
    _precise(
        "rotary angles are in bf16",
        then(Rope, "_angles", lambda out, *given: out.bfloat16()),
        "rotary-angles",
        "rope",
        defconfig=MECHANISMS,
    ),
    _precise(
        "evaluation has no autocast",
        replaced(evaluate, "autocast", lambda _: lambda machine: nullcontext()),
        ("product-type", "in evaluation; torch.float32"),
    ),
    _precise(
        "an embedding is stored in bf16",
        replaced(TrainingSession, "batches", _stored_in_bf16),
        ("stored-type", r"wte\.weight"),
    ),
    _precise("the head's input is rounded", then(GPT, "hidden", _downcast), "fp32-error"),
    _precise(
        "dropout is within the MLP",
        after_init(Mlp, _hidden_dropout),
        (_PLACE, "^no dropout within the MLP"),
    ),
    _precise(
        "the MLP reads dropped weights",
        replaced(Attention, "forward", _read_dropped),
        (_PLACE, "^the MLP reads"),
        "golden-gate-cross",
    ),
    _precise(
        "an activation is in fp16",
        then(Mlp, "forward", lambda out, *given: (out[0].half().to(out[0].dtype), out[1])),
        ("narrow-type", "torch.float16"),
    ),
)
