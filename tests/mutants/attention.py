"""Faults of attention: masks, scores, gates, projections.

B batch, T tokens, S keys, N heads, K key/value heads, H head dim; r the rows of a chunk, c its
columns, b the columns of a band.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpt2 import model
from gpt2.attention import cross_token, rows
from gpt2.attention.attention import Attention
from gpt2.attention.components import MASKED_SCORE, QueriesKeys, Window
from gpt2.attention.cross_token import RaCrossToken
from gpt2.attention.projections import QKV, Dense, ZeroInitLinear
from gpt2.attention.reciprocal import Reciprocal
from gpt2.model import GPT
from gpt2.nsa import select
from tests.mutants.mutant import (
    LOGITS,
    MECHANISMS,
    Mutant,
    after_init,
    replaced,
    same_as,
    then,
)


def _not_transposed(right: Any) -> Any:
    return lambda self, rows, band, *rest: right(
        self, QueriesKeys(rows.k, rows.q), QueriesKeys(band.k, band.q), *rest
    )


def _other_masks(right: Any) -> Any:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.generator:
            ctx.generator.manual_seed(9)
        return right(ctx, *gradients)

    return staticmethod(backward)


def _without_random_state(right: Any) -> Any:
    return lambda *given, **named: right(*given, **named, preserve_rng_state=False)


def _sees_next(self: Any, length: int, device: torch.device) -> dict[str, Any]:
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril(1)}


def _hides_all_but_next(self: Any, scores_BNrc: Tensor, chunk: Any) -> None:
    square = scores_BNrc.new_full((chunk.height, chunk.height), MASKED_SCORE)
    scores_BNrc[..., -chunk.height :].add_(square.triu_(2))


def _wide_window(self: Any, length: int, device: torch.device) -> dict[str, Any]:
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril().triu(-self.width)}


def _mix_first_keys(right: Any) -> Any:
    """Mix the keys of the first call into every call."""

    def forward(self: Any, x_BTC: Tensor, state: Any) -> QKV:
        heads = right(self, x_BTC, state)
        first_BKTH = vars(self).setdefault("first", heads.k_BKTH.detach())
        same = first_BKTH.shape == heads.k_BKTH.shape
        return replace(heads, k_BKTH=(heads.k_BKTH + first_BKTH) / 2 if same else heads.k_BKTH)

    return forward


def _unregistered(self: Any) -> None:
    bias = self.bias.detach().clone().requires_grad_()
    del self.bias
    vars(self)["bias"] = bias


def _leaking(out: Any, *rest: Any) -> Any:
    return out[0] + 1e-6 * out[0].mean(0, keepdim=True), out[1]


def _slope_of_max(right: Any) -> Any:
    def largest(weights: Tensor, k: int, known: Tensor) -> Tensor:
        highest = weights.amax(-1)
        return right(weights.detach(), k, known) + (highest - highest.detach())

    return largest


def _not_transformed(right: Any) -> Any:
    def call(self: Any, *given: Any, **named: Any) -> Any:
        # Statistics, and heads behind cached tokens: the third argument is the first position.
        if len(given) > 2 and given[2] == 0:
            return right(self, *given, **named)
        transforms, self.transforms = self.transforms, nn.ModuleDict()
        try:
            return right(self, *given, **named)
        finally:
            self.transforms = transforms

    return call


def _lowest(right: Any) -> Any:
    """Rank finite scores in the opposite order."""
    return lambda scores, *rest: right(scores.where(scores.isinf(), -scores), *rest)


@torch.no_grad()
def _open_gates(out: None, self: GPT, *seed: int) -> None:
    for part in self.modules():
        if isinstance(part, ZeroInitLinear):
            part.weight.fill_(0.02)


MUTANTS = (
    Mutant(
        "statistics read queries and keys without QK-norm",
        "baseline",
        {"reference": ("reference-formulas", "^the entropy of attention")},
        replaced(Attention, "statistics", _not_transformed),
        settings={"QK_NORM": True},
    ),
    Mutant(
        "reciprocal does nothing",
        "ra",
        {"distinct": same_as("baseline"), "reference": LOGITS},
        then(Reciprocal, "scores", lambda out, *given: 0 * out),
        quick=True,
    ),
    Mutant(
        "reciprocal is not transposed",
        "ra",
        {"reference": LOGITS},
        replaced(Reciprocal, "scores", _not_transposed),
    ),
    Mutant(
        "query heads read the wrong group",
        "gqa",
        {"reference": LOGITS},
        then(
            Dense,
            "forward",
            lambda out, *given: QKV(out.q_BNTH, out.k_BKTH.roll(1, 1), out.v_BKTH.roll(1, 1)),
        ),
        MECHANISMS,
    ),
    Mutant(
        "keys of the previous call",
        "baseline",
        {"causal": "stateless-call"},
        replaced(Dense, "forward", _mix_first_keys),
    ),
    Mutant(
        "mask off by one in SDPA",
        "baseline",
        {"causal": "causal-logits"},
        replaced(Window, "sdpa_arguments", lambda _: _sees_next),
        quick=True,
    ),
    Mutant(
        "mask off by one in the row engine",
        "ra-mla-golden-mech",
        {"causal": "causal-logits"},
        replaced(Window, "hide_", lambda _: _hides_all_but_next),
    ),
    Mutant(
        "sliding window off by one",
        "sliding",
        {"reference": LOGITS},
        replaced(Window, "sdpa_arguments", lambda _: _wide_window),
        MECHANISMS,
    ),
    Mutant(
        "cross-token detach flag is dead",
        "ract-detached",
        {"distinct": same_as("ract")},
        after_init(RaCrossToken, lambda self: setattr(self, "detach_stats", False)),
        MECHANISMS,
    ),
    Mutant(
        "top-k has the gradient of the maximum",
        "ract",
        {"reference": ("reference-formulas", "^the gradient of")},
        replaced(cross_token, "largest_sum", _slope_of_max),
    ),
    Mutant(
        "cross-token bias is no parameter",
        "ra-mla-ract",
        {"declared": ("registered-parameters", r"h\.0\.attn\.gates.*bias")},
        after_init(RaCrossToken, _unregistered),
    ),
    Mutant(
        "rows of the batch leak",
        "baseline",
        {"causal": ("independent-rows", "row 1 of the batch")},
        then(Attention, "forward", _leaking),
        quick=True,
    ),
    Mutant(
        "backward of rows draws other masks",
        "ra",
        {"gradients": "dropout-gradient"},
        replaced(rows._RowAttention, "backward", _other_masks),
    ),
    Mutant(
        "recomputed blocks draw other masks",
        "baseline",
        {"gradients": "dropout-gradient"},
        replaced(model, "checkpoint", _without_random_state),
    ),
    Mutant(
        "NSA selects the lowest scores",
        "nsa",
        {"reference": LOGITS},
        replaced(select, "select_blocks", _lowest),
        defconfig="nsa-quickstart",
    ),
    Mutant(
        "NSA gates do not start at 0",
        "nsa",
        {"reference": ("initial-zero", "c_gate")},
        then(GPT, "init_weights", _open_gates),
        defconfig="nsa-quickstart",
    ),
)
