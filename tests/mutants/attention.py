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
from gpt2.attention.options import LatentOptions
from gpt2.attention.projections import QKV, Dense, Latent, split_heads
from gpt2.attention.qk_norm import QkNorm
from gpt2.attention.reciprocal import Reciprocal
from tests.mutants.mutant import (
    LOGITS,
    MECHANISMS,
    Mutant,
    Plant,
    after_init,
    edited,
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


def _band_detached(right: Any) -> Any:
    return lambda self, rows, band, *rest: right(
        self, rows, QueriesKeys(band.q.detach(), band.k), *rest
    )


def _inputs_detached(right: Any) -> Any:
    return lambda self, *rest: right(self, *rest[:-1], [x.detach() for x in rest[-1]])


def _sees_next(self: Any, length: int, device: torch.device) -> dict[str, Any]:
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril(1)}


def _hides_all_but_next(self: Any, scores_BNrc: Tensor, chunk: Any) -> None:
    square = scores_BNrc.new_full((chunk.height, chunk.height), MASKED_SCORE)
    scores_BNrc[..., -chunk.height :].add_(square.triu_(2))


def _wide_window(self: Any, length: int, device: torch.device) -> dict[str, Any]:
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril().triu(-self.width)}


def _values_shifted_too(self: Any, x_BTC: Tensor, state: Any) -> QKV:
    latent_BTR = self._latent_keys(x_BTC, state)
    v = self.expand_v(self.c_v(x_BTC) + latent_BTR - self.c_k(x_BTC))
    wide = self.c_q(x_BTC), self.expand_k(latent_BTR), v
    return QKV(*(split_heads(part, self.head_dim) for part in wide), latent_BTR)


def _latent_everywhere(right: Any) -> Any:
    def init(self: Any, shape: Any, options: Any, *others: Any) -> None:
        right(self, shape, replace(options, projection=LatentOptions(0, False)), *others)

    return init


def _shared_anyway(right: Any) -> Any:
    return lambda self, shape, options: right(self, shape, replace(options, shared_expansion=True))


def _mix_first_keys(right: Any) -> Any:
    """Mix the keys of the first call into every call."""

    def forward(self: Any, x_BTC: Tensor, state: Any) -> QKV:
        heads = right(self, x_BTC, state)
        first_BKTH = vars(self).setdefault("first", heads.k_BKTH.detach())
        same = first_BKTH.shape == heads.k_BKTH.shape
        return replace(heads, k_BKTH=(heads.k_BKTH + first_BKTH) / 2 if same else heads.k_BKTH)

    return forward


def _statistic_is(mode: str) -> Plant:
    """Return a plant that ignores the configured mode."""
    return after_init(RaCrossToken, lambda self: setattr(self, "mode", mode))


@torch.no_grad()
def _one_higher(parameter: Tensor) -> None:
    """Shift the initial value."""
    parameter += 1.0


def _unregistered(self: Any) -> None:
    bias = self.bias.detach().clone().requires_grad_()
    del self.bias
    vars(self)["bias"] = bias


def _dropping_always(out: Any, self: Any, *rest: Any) -> Any:
    return nn.functional.dropout(out[0], self.dropout, True), out[1]


def _leaking(out: Any, *rest: Any) -> Any:
    return out[0] + 1e-6 * out[0].mean(0, keepdim=True), out[1]


def _slope_of_max(right: Any) -> Any:
    def largest(weights: Tensor, k: int) -> Tensor:
        highest = weights.amax(-1)
        return right(weights.detach(), k) + (highest - highest.detach())

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


MUTANTS = (
    Mutant(
        "keys are normalized a little too large",
        "baseline",
        {"reference": LOGITS},
        then(QkNorm, "keys", lambda out, *given: out * 1.001),
        settings={"QK_NORM": True},
    ),
    Mutant(
        "statistics read queries and keys without QK-norm",
        "baseline",
        {"reference": ("reference-formulas", "^the entropy of attention")},
        replaced(Attention, "statistics", _not_transformed),
        settings={"QK_NORM": True},
    ),
    Mutant(
        "decoding forgets QK-norm",
        "baseline",
        {"decode": "cached-logits"},
        replaced(Attention, "_heads", _not_transformed),
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
        "reciprocal band off by one",
        "ra-golden",
        {"reference": LOGITS},
        edited(Reciprocal, "scores", "chunk.first - self.reach", "chunk.first + 1 - self.reach"),
    ),
    Mutant(
        "reciprocal strength is not the configured one",
        "ra-mla-golden",
        {"reference": LOGITS},
        after_init(Reciprocal, lambda self: setattr(self, "constant", 0.2)),
    ),
    Mutant(
        "reciprocal leaves the queries without its gradient",
        "ra",
        {"reference": ("reference-formulas", r"gradient of h\.0\.attn\.c_attn\.weight")},
        replaced(Reciprocal, "scores", _band_detached),
    ),
    Mutant(
        "learnable alpha is a constant",
        "ra-learnable",
        {"declared": "parameter-count", "distinct": same_as("ra")},
        after_init(Reciprocal, lambda self: setattr(self, "alpha", None)),
        MECHANISMS,
    ),
    Mutant(
        "learnable alpha gets no gradient",
        "ra-learnable",
        {"gradients": ("nonzero-gradient", r"h\.0\.attn\.terms\.reciprocal\.alpha")},
        replaced(Reciprocal, "scores", _inputs_detached),
        MECHANISMS,
    ),
    Mutant(
        "reciprocal is a little too strong",
        "ra",
        {"reference": LOGITS},
        then(Reciprocal, "scores", lambda out, *given: out * 1.001),
    ),
    Mutant(
        "learnable alpha has another initial value",
        "ra-learnable",
        {"reference": ("initial-value", r"^0\.3 .*h\.0\.attn\.terms\.reciprocal\.alpha; 1\.3$")},
        after_init(Reciprocal, lambda self: self.alpha is None or _one_higher(self.alpha)),
        MECHANISMS,
    ),
    Mutant(
        "cross-token gate has another initial bias",
        "ract",
        {"reference": ("initial-value", r"h\.0\.attn\.gates\.ra_cross_token\.bias;")},
        after_init(RaCrossToken, lambda self: _one_higher(self.bias)),
    ),
    Mutant(
        "latent projection in every step",
        "baseline",
        {"declared": "parameter-count"},
        replaced(Attention, "__init__", _latent_everywhere),
    ),
    Mutant(
        "latent expansions are shared unasked",
        "mla",
        {"declared": "parameter-count"},
        replaced(Latent, "__init__", _shared_anyway),
    ),
    Mutant(
        "latent shift is dropped",
        "mla-untied",
        {
            "gradients": (
                "nonzero-gradient",
                r"h\.0\.mlp\.mechanisms\.mlp_latent\.coupling\.to_latent\.weight",
            ),
            "reference": LOGITS,
        },
        replaced(Latent, "_latent_keys", lambda _: lambda self, x_BTC, state: self.c_k(x_BTC)),
        MECHANISMS,
    ),
    Mutant(
        "latent shift moves the values",
        "mla-tied",
        {"reference": LOGITS},
        replaced(Latent, "forward", lambda _: _values_shifted_too),
        MECHANISMS,
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
        "queries and keys are swapped",
        "baseline",
        {"reference": LOGITS},
        then(Dense, "forward", lambda out, *given: QKV(out.k_BKTH, out.q_BNTH, out.v_BKTH)),
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
        "sliding window masks nothing",
        "sliding",
        {"distinct": same_as("baseline")},
        replaced(
            Window, "sdpa_arguments", lambda _: lambda self, length, device: {"is_causal": True}
        ),
        MECHANISMS,
    ),
    Mutant(
        "cross-token statistic detached unasked",
        "ract",
        {"reference": ("reference-formulas", r"gradient of h\.0\.attn\.c_attn\.weight")},
        after_init(RaCrossToken, lambda self: setattr(self, "detach_stats", True)),
    ),
    Mutant(
        "cross-token detach flag is dead",
        "ract-detached",
        {"distinct": same_as("ract")},
        after_init(RaCrossToken, lambda self: setattr(self, "detach_stats", False)),
        MECHANISMS,
    ),
    Mutant(
        "cross-token gate on weights is the gate on outputs",
        "ract-weights",
        {"distinct": same_as("ract"), "reference": LOGITS},
        after_init(RaCrossToken, lambda self: setattr(self, "scales_scores", False)),
    ),
    Mutant(
        "cross-token head average is dead",
        "ract-head-average",
        {"distinct": same_as("ract")},
        after_init(RaCrossToken, lambda self: setattr(self, "head_average", False)),
        MECHANISMS,
    ),
    Mutant(
        "cross-token mode is dead", "ract-entropy", {"reference": LOGITS}, _statistic_is("topk")
    ),
    Mutant(
        "cross-token max is the entropy",
        "ract-max",
        {"reference": LOGITS},
        _statistic_is("entropy"),
        MECHANISMS,
    ),
    Mutant(
        "entropy is not normalised",
        "ract-entropy",
        {"reference": LOGITS},
        edited(cross_token, "entropy", "entropy_BNr1 / logs_r1", "entropy_BNr1"),
    ),
    Mutant(
        "top-k has the gradient of the maximum",
        "ract",
        {"reference": ("reference-formulas", "^the gradient of")},
        replaced(cross_token, "largest_sum", _slope_of_max),
    ),
    Mutant(
        "cross-token gate reads the next row",
        "ract",
        {"causal": "causal-logits"},
        then(RaCrossToken, "factor", lambda out, *given: out.roll(-1, 2)),
    ),
    Mutant(
        "cross-token gate without its strength",
        "mla-ract",
        {"reference": ("zero-strength", "RA_CROSS_TOKEN ")},
        after_init(RaCrossToken, lambda self: setattr(self, "alpha", 1.0)),
    ),
    Mutant(
        "cross-token bias is no parameter",
        "ra-mla-ract",
        {"declared": ("registered-parameters", r"h\.0\.attn\.gates.*bias")},
        after_init(RaCrossToken, _unregistered),
    ),
    Mutant(
        "scores are not scaled",
        "ract",
        {"reference": LOGITS},
        replaced(rows, "attend", lambda right: lambda q, *rest: right(2 * q, *rest)),
    ),
    Mutant(
        "dropout outlives training",
        "baseline",
        {"precise": ("dropout-place", "output of attention")},
        then(Attention, "forward", _dropping_always),
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
)
