"""Faults of attention: masks, scores, gates, projections.

B batch, T tokens, S keys, N heads, K key/value heads, H head dim; r the rows of a chunk, c its
columns, b the columns of a band.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.attention import base
from gpt2.attention.base import Attention
from gpt2.attention.dense.module import Dense
from gpt2.attention.full.module import Full
from gpt2.attention.grouped.module import Grouped
from gpt2.attention.heads import Heads, split_heads
from gpt2.attention.latent.module import Latent
from gpt2.attention.latent.options import LatentOptions
from gpt2.attention.ra_cross_token.module import RaCrossToken
from gpt2.attention.ra_cross_token.statistics import STATISTICS, Entropy, Max, Topk
from gpt2.attention.reciprocal.module import Reciprocal
from gpt2.attention.rows.parts import HIDDEN
from gpt2.attention.sliding.module import Sliding
from tests.mutants.mutant import MECHANISMS, Mutant, Plant, after_init, nothing, replaced, then
from tests.mutants.mutant import together

_LOGITS = "logits as the formulas give it"
_SAME = "another function or another training than {}; found: outputs, gradients"


def _not_transposed(
    self: Any, scores: Tensor, q: Tensor, k: Tensor, chunk: Any, inputs: Any
) -> None:
    left = self._left(chunk)
    straight = self.constant * q[:, :, chunk.rows] @ k[:, :, chunk.slice(left)].mT
    self._cut_(straight, chunk, left)
    scores[..., left - chunk.left :].add_(straight)


def _narrower_band(self: Any, reverse_BNrb: Tensor, chunk: Any, left: int) -> None:
    reverse_BNrb[..., : chunk.height].triu_(chunk.first - self.window - left + 1)


def _sees_next(self: Any, length: int, device: torch.device) -> dict[str, Any]:
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril(1)}


def _hides_all_but_next(self: Any, scores_BNrc: Tensor, chunk: Any) -> None:
    square = scores_BNrc.new_full((chunk.height, chunk.height), HIDDEN)
    scores_BNrc[..., -chunk.height :].add_(square.triu_(2))


def _wide_window(self: Any, length: int, device: torch.device) -> dict[str, Any]:
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril().triu(-self.window)}


def _values_shifted_too(self: Any, x_BTC: Tensor, state: Any) -> Heads:
    latent_BTR = self._latent_keys(x_BTC, state)
    v = self.expand_v(self.c_v(x_BTC) + latent_BTR - self.c_k(x_BTC))
    wide = self.c_q(x_BTC), self.expand_k(latent_BTR), v
    return Heads(*(split_heads(part, self.head_dim) for part in wide), latent_BTR)


def _latent_everywhere(right: Any) -> Any:
    def init(self: Any, shape: Any, options: Any, *others: Any) -> None:
        right(self, shape, replace(options, projection=LatentOptions(0, False)), *others)

    return init


def _shared_anyway(right: Any) -> Any:
    return lambda self, shape, options: right(self, shape, replace(options, shared_expansion=True))


def _kept(right: Any) -> Any:
    """The first keys of all calls are used in each."""

    def forward(self: Any, x_BTC: Tensor, state: Any) -> Heads:
        heads = right(self, x_BTC, state)
        kept = vars(self).setdefault("kept", heads.k_BKTH.detach())
        same = kept.shape == heads.k_BKTH.shape
        return replace(heads, k_BKTH=(heads.k_BKTH + kept) / 2 if same else heads.k_BKTH)

    return forward


def _statistic_is(mode: str) -> Plant:
    """Whatever mode was asked for."""

    def plant(patch: Any) -> None:
        for name in STATISTICS:
            patch.setitem(STATISTICS, name, STATISTICS[mode])

    return plant


@torch.no_grad()
def _one_higher(parameter: Tensor) -> None:
    """Where it starts."""
    parameter += 1.0


def _unregistered(self: Any) -> None:
    bias = self.bias.detach().clone().requires_grad_()
    del self.bias
    vars(self)["bias"] = bias


def _dropping_always(out: Any, self: Any, *rest: Any) -> Any:
    return nn.functional.dropout(out[0], self.dropout, True), out[1]


def _leaking(out: Any, *rest: Any) -> Any:
    return out[0] + 1e-6 * out[0].mean(0, keepdim=True), out[1]


def _unnormalised(self: Any, rows: Any) -> Tensor:
    p = rows.weights_BNrc
    return -(torch.xlogy(p, p)).sum(-1, keepdim=True)


MUTANTS = (
    Mutant(
        "reciprocal does nothing",
        "the score term adds nothing: a copy of the baseline under another name",
        "ra",
        {"distinct": _SAME.format("baseline"), "reference": _LOGITS},
        together(
            nothing(Reciprocal, "add_"),
            replaced(Reciprocal, "backward_", lambda _: lambda *given: ()),
        ),
        quick=True,
    ),
    Mutant(
        "reciprocal is not transposed",
        "the score seen from the other side is the same score again",
        "ra",
        {"reference": _LOGITS},
        replaced(Reciprocal, "add_", lambda _: _not_transposed),
    ),
    Mutant(
        "reciprocal band off by one",
        "the band ends one token early",
        "ra-golden",
        {"reference": _LOGITS},
        replaced(Reciprocal, "_cut_", lambda _: _narrower_band),
    ),
    Mutant(
        "reciprocal strength is not the configured one",
        "alpha is 0.2 whatever is asked for",
        "ra-mla-golden",
        {"reference": _LOGITS},
        after_init(Reciprocal, lambda self: setattr(self, "constant", 0.2)),
    ),
    Mutant(
        "reciprocal leaves the queries without its gradient",
        "the hand-written derivative forgets one side",
        "ra",
        {"reference": "the gradient of h.0.attn.c_attn.weight as the formulas give it"},
        replaced(Reciprocal, "backward_", lambda _: lambda *given: ()),
    ),
    Mutant(
        "learnable alpha is a constant",
        "the flag builds no parameter",
        "ra-learnable",
        {"declared": "parameters, as declared", "distinct": _SAME.format("ra")},
        after_init(Reciprocal, lambda self: setattr(self, "alpha", None)),
        MECHANISMS,
    ),
    Mutant(
        "learnable alpha gets no gradient",
        "a dead parameter",
        "ra-learnable",
        {"gradients": r"a gradient of h\.0\.attn\.terms\.reciprocal\.alpha; found: none or zero"},
        then(Reciprocal, "backward_", lambda out, *given: tuple(0 * o for o in out)),
        MECHANISMS,
    ),
    Mutant(
        "reciprocal is a little too strong",
        "a thousandth more than is configured",
        "ra",
        {"reference": _LOGITS},
        then(Reciprocal, "_scaled_keys", lambda out, *given: out * 1.001),
    ),
    Mutant(
        "learnable alpha starts elsewhere",
        "one more than is configured",
        "ra-learnable",
        {"reference": r"0\.3 in the initial h\.0\.attn\.terms\.reciprocal\.alpha; found: 1\.3"},
        after_init(Reciprocal, lambda self: self.alpha is None or _one_higher(self.alpha)),
        MECHANISMS,
    ),
    Mutant(
        "cross-token gate starts elsewhere",
        "another bias than is configured",
        "ract",
        {"reference": r"in the initial h\.0\.attn\.gates\.ra_cross_token\.bias; found"},
        after_init(RaCrossToken, lambda self: _one_higher(self.bias)),
    ),
    Mutant(
        "latent projection in every step",
        "the baseline is built with the latent projection too",
        "baseline",
        {"declared": "parameters, as declared"},
        replaced(Attention, "__init__", _latent_everywhere),
    ),
    Mutant(
        "latent expansions are shared unasked",
        "one K and U for all heads",
        "mla",
        {"declared": "parameters, as declared"},
        replaced(Latent, "__init__", _shared_anyway),
    ),
    Mutant(
        "latent shift is dropped",
        "what the block before hands on reaches nothing",
        "mla-untied",
        {
            "gradients": "a gradient of h.0.mlp.mechanisms.mlp_latent.coupling.to_latent.weight",
            "reference": _LOGITS,
        },
        replaced(Latent, "_latent_keys", lambda _: lambda self, x_BTC, state: self.c_k(x_BTC)),
        MECHANISMS,
    ),
    Mutant(
        "latent shift moves the values",
        "c_v is shifted with c_k",
        "mla-tied",
        {"reference": _LOGITS},
        replaced(Latent, "forward", lambda _: _values_shifted_too),
        MECHANISMS,
    ),
    Mutant(
        "query heads read the wrong group",
        "key and value heads are turned by one",
        "gqa",
        {"reference": _LOGITS},
        then(
            Grouped,
            "forward",
            lambda out, *given: Heads(out.q_BNTH, out.k_BKTH.roll(1, 1), out.v_BKTH.roll(1, 1)),
        ),
        MECHANISMS,
    ),
    Mutant(
        "queries and keys change places",
        "a wrong order in c_attn",
        "baseline",
        {"reference": _LOGITS},
        then(Dense, "forward", lambda out, *given: Heads(out.k_BKTH, out.q_BNTH, out.v_BKTH)),
    ),
    Mutant(
        "keys of the call before",
        "attention keeps context between calls",
        "baseline",
        {"isolated": "no trace of a first batch of this shape"},
        replaced(Dense, "forward", _kept),
    ),
    Mutant(
        "mask off by one in SDPA",
        "every token sees the next one",
        "baseline",
        {"causal": r"token \d+ changes no logits before \d+; found: logits at \d+ change"},
        replaced(Full, "sdpa_arguments", lambda _: _sees_next),
        quick=True,
    ),
    Mutant(
        "mask off by one in the row engine",
        "every token sees the next one",
        "ra-mla-golden-mech",
        {"causal": r"token \d+ changes no logits before \d+; found: logits at \d+ change"},
        replaced(Full, "hide_", lambda _: _hides_all_but_next),
    ),
    Mutant(
        "sliding window off by one",
        "w + 1 tokens are seen",
        "sliding",
        {"reference": _LOGITS},
        replaced(Sliding, "sdpa_arguments", lambda _: _wide_window),
        MECHANISMS,
    ),
    Mutant(
        "sliding window hides nothing",
        "a copy of the baseline under another name",
        "sliding",
        {"distinct": _SAME.format("baseline")},
        replaced(
            Sliding, "sdpa_arguments", lambda _: lambda self, length, device: {"is_causal": True}
        ),
        MECHANISMS,
    ),
    Mutant(
        "cross-token statistic detached unasked",
        "no gradient through the statistic",
        "ract",
        {"reference": "the gradient of h.0.attn.c_attn.weight as the formulas give it"},
        after_init(RaCrossToken, lambda self: setattr(self, "detach_stats", True)),
    ),
    Mutant(
        "cross-token detach flag is dead",
        "a copy of its parent",
        "ract-detached",
        {"distinct": _SAME.format("ract")},
        after_init(RaCrossToken, lambda self: setattr(self, "detach_stats", False)),
        MECHANISMS,
    ),
    Mutant(
        "cross-token gate on weights is the gate on outputs",
        "rows are scaled after the softmax",
        "ract-weights",
        {"distinct": _SAME.format("ract"), "reference": _LOGITS},
        after_init(RaCrossToken, lambda self: setattr(self, "scales_scores", False)),
    ),
    Mutant(
        "cross-token head average is dead",
        "a copy of its parent",
        "ract-head-average",
        {"distinct": _SAME.format("ract")},
        after_init(RaCrossToken, lambda self: setattr(self, "head_average", False)),
        MECHANISMS,
    ),
    Mutant(
        "cross-token mode is dead",
        "every mode reads the k largest",
        "ract-entropy",
        {"reference": _LOGITS},
        _statistic_is("topk"),
    ),
    Mutant(
        "cross-token max is the entropy",
        "the wrong statistic of two",
        "ract-max",
        {"reference": _LOGITS},
        _statistic_is("entropy"),
        MECHANISMS,
    ),
    Mutant(
        "entropy is not normalised",
        "it grows with the row",
        "ract-entropy",
        {"reference": _LOGITS},
        replaced(Entropy, "of", lambda _: _unnormalised),
    ),
    Mutant(
        "top-k has the slope of the maximum",
        "a wrong hand-written derivative",
        "ract",
        {"reference": "the gradient of"},
        replaced(Topk, "add_slope_", lambda _: Max.add_slope_),
    ),
    Mutant(
        "cross-token gate reads the next row",
        "a statistic of the future",
        "ract",
        {"causal": r"changes no logits before"},
        then(RaCrossToken, "factor", lambda out, *given: out.roll(-1, 2)),
    ),
    Mutant(
        "cross-token gate without its strength",
        "alpha counts as 1",
        "mla-ract",
        {"reference": "RA_CROSS_TOKEN of strength 0 changes nothing"},
        after_init(RaCrossToken, lambda self: setattr(self, "alpha", 1.0)),
    ),
    Mutant(
        "cross-token bias is no parameter",
        "an unregistered tensor that wants a gradient",
        "ra-mla-ract",
        {"declared": "every trained tensor is a parameter; found: h.0.attn.gates.*bias"},
        after_init(RaCrossToken, _unregistered),
    ),
    Mutant(
        "scores are not scaled",
        "q·k without 1/√H",
        "ract",
        {"reference": _LOGITS},
        replaced(base.rows, "attend", lambda right: lambda q, *rest: right(2 * q, *rest)),
    ),
    Mutant(
        "dropout outlives training",
        "attention drops while evaluating",
        "baseline",
        {"isolated": "the same output for the same input; found: the second call differs"},
        then(Attention, "forward", _dropping_always),
    ),
    Mutant(
        "rows of the batch leak",
        "a mean over the batch",
        "baseline",
        {"isolated": "row 0 does not depend on row 1 of the batch; found: logits change"},
        then(Attention, "forward", _leaking),
        quick=True,
    ),
)
