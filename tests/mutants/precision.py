"""Faults of precision, and of the places of dropout.

B batch, T tokens, C n_embd; r the rows of a chunk, c its columns.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2 import evaluate, loss, model, train
from gpt2.attention import rows
from gpt2.attention.attention import Attention
from gpt2.attention.positions import Rope
from gpt2.mlp import gate
from gpt2.mlp.mlp import Mlp
from gpt2.model import GPT
from gpt2.nsa.cache import NsaCache
from gpt2.training import step
from gpt2.training.session import TrainingSession
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


def _narrow_norm(right: Any) -> Any:
    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        weight, bias = self.weight.bfloat16(), None if self.bias is None else self.bias.bfloat16()
        out = F.layer_norm(x.bfloat16(), self.normalized_shape, weight, bias, self.eps)
        return out.to(x.dtype)

    return forward


def _downcast(out: Tensor, *given: Any) -> Tensor:
    return out.bfloat16().float() if out.dtype == torch.float32 else out


def _narrow_loss(right: Any) -> Any:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, *rest: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits = hidden.bfloat16() @ weight.bfloat16().T
            return F.cross_entropy(logits[:, :vocab], targets).float()

    return loss


def _stored_in_bf16(right: Any) -> Any:
    def batches(self: TrainingSession) -> Any:
        self.state.model.wte.weight.data = self.state.model.wte.weight.data.bfloat16()
        return right(self)

    return batches


def _always_bf16(right: Any) -> Any:
    return lambda machine: torch.autocast("cpu", torch.bfloat16)


def _hidden_dropout(self: Mlp) -> None:
    right = self.activation
    self.activation = lambda x: F.dropout(right(x), self.dropout.p, self.training)


def _on_context(right: Any) -> Any:
    """Drop elements of the context instead of weights."""

    def plan(self: Attention, dropout: float) -> Any:
        return right(self, 0.0)

    return plan


def _context_dropped(right: Any) -> Any:
    def scaled(self: Attention, result: Any, state: Any) -> Tensor:
        out: Tensor = right(self, result, state)
        return F.dropout(out, self.dropout, self.training)

    return scaled


def _context_instead_of_weights(patch: Any) -> None:
    replaced(Attention, "_plan", _on_context)(patch)
    replaced(Attention, "_scaled", _context_dropped)(patch)


def _read_dropped(right: Any) -> Any:
    def forward(self: Attention, *given: Any) -> Any:
        out, view = right(self, *given)
        if view.weights_BTS is not None and self.training:
            view = replace(view, weights_BTS=F.dropout(view.weights_BTS, self.dropout, True))
        return out, view

    return forward


def _twice(right: Any) -> Any:
    def forward(self: Mlp, *given: Any) -> Any:
        out, state = right(self, *given)
        return self.dropout(out), state

    return forward


def _counting_in_bf16(out: Any, session: TrainingSession, *rest: Any) -> Any:
    for state in session.state.optimizer.state.values():
        state["step"] = state["step"].bfloat16()
    return out


MUTANTS = (
    _precise(
        "generated text computes attention in bf16",
        edited(NsaCache, "attend", "enabled=False", "enabled=True"),
        ("check.exception", "dtype"),
        "nsa",
        defconfig="nsa-quickstart",
    ),
    _precise(
        "the loss is in bf16",
        replaced(model, "linear_cross_entropy", _narrow_loss),
        (_WIDE, r"^loss \(_log_softmax\) .* in training; torch.bfloat16"),
    ),
    _precise(
        "attention softmax is in bf16",
        replaced(rows, "softmaxes_from_scores", _narrow_softmax),
        (_WIDE, "^softmax"),
        "ra",
        quick=True,
    ),
    _precise(
        "norms are in bf16", replaced(nn.LayerNorm, "forward", _narrow_norm), (_WIDE, "^norm")
    ),
    _precise(
        "rotary angles are in bf16",
        then(Rope, "_angles", lambda out, *given: out.bfloat16()),
        "rotary-angles",
        "rope",
        defconfig=MECHANISMS,
    ),
    _precise(
        "queries and keys are rotated in bf16",
        edited(
            Rope,
            "encode_all",
            "rotation or self.rotation(",
            "(x.to(heads[0].dtype) for x in rotation) if rotation else self.rotation(",
        ),
        (_WIDE, "^rotary positions .* in training; torch.bfloat16"),
        "rope",
        defconfig=MECHANISMS,
    ),
    _precise(
        "a running mean is in bf16",
        edited(
            gate,
            "_running_mean",
            "x_BTG.to(torch.promote_types(x_BTG.dtype, torch.float32))",
            "x_BTG",
        ),
        (_WIDE, "^running sum"),
        "gate-pooled",
        defconfig=MECHANISMS,
    ),
    _precise(
        "training has no autocast",
        replaced(step, "autocast", lambda _: lambda machine: nullcontext()),
        ("product-type", "in training; torch.float32"),
    ),
    _precise(
        "evaluation has no autocast",
        replaced(evaluate, "autocast", lambda _: lambda machine: nullcontext()),
        ("product-type", "in evaluation; torch.float32"),
    ),
    _precise(
        "evaluation is in bf16",
        replaced(evaluate, "autocast", _always_bf16),
        ("product-type", "torch.float32 in evaluation; torch.bfloat16"),
        defconfig="gpt2-ratio-small",
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
        "dropout is on the context", _context_instead_of_weights, (_PLACE, "^attention weights")
    ),
    _precise(
        "the MLP reads dropped weights",
        replaced(Attention, "forward", _read_dropped),
        (_PLACE, "^the MLP reads"),
        "golden-gate-cross",
    ),
    _precise(
        "dropout of the MLP is applied twice",
        replaced(Mlp, "forward", _twice),
        (_PLACE, "^the output of the MLP"),
    ),
    _precise(
        "dropout of embeddings does not scale",
        after_init(
            GPT,
            lambda self: self.dropout.register_forward_hook(
                lambda module, given, out: out * (1 - module.p) if module.training else out
            ),
        ),
        (_PLACE, "^embeddings"),
    ),
    _precise(
        "softmax of the loss in float64",
        replaced(loss, "_wide_dtype", lambda _: lambda dtype: torch.float64),
        _WIDE,
    ),
    _precise(
        "a gate is in bf16",
        edited(
            gate.MlpAttnGate,
            "_gate",
            "torch.sigmoid(self.up(bottleneck_BTG.to(self.up.weight.dtype)) + self.bias)",
            "torch.sigmoid((self.up(bottleneck_BTG) + self.bias).bfloat16()).float()",
        ),
        (_WIDE, "^gate"),
        "golden-gate",
    ),
    _precise(
        "an activation is in fp16",
        then(Mlp, "forward", lambda out, *given: (out[0].half().to(out[0].dtype), out[1])),
        ("narrow-type", "torch.float16"),
    ),
    _precise(
        "the optimizer counts its steps in bf16",
        then(train, "optimizer_step", _counting_in_bf16),
        ("stored-type", "the optimizer's step"),
    ),
)
