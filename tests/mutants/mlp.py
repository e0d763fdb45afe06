"""Faults of the MLP, its mechanisms, and what blocks hand on.

B batch, T tokens, S keys, M hidden units, G and K bottlenecks, N heads; r the rows of a chunk, c its
columns.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.rows.head_mean import HeadMean
from gpt2.attention.state import AttentionView, BlockState
from gpt2.mlp import base
from gpt2.mlp.base import Mlp
from gpt2.mlp.mlp_attn_gate.module import MlpAttnGate
from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions
from gpt2.mlp.mlp_cross_token.module import MlpCrossToken
from gpt2.mlp.mlp_latent.module import MlpLatent, _Coupling, _ScalarCoupling
from gpt2.mlp.options import BlockSize, MlpConfig
from tests.mutants.mutant import MECHANISMS, RAISES, Mutant, after_init, nothing, replaced, then
from tests.mutants.mutant import together

_LOGITS = "logits as the formulas give it"
_SAME = "another function or another training than {}; found: outputs, gradients"


def _to_the_next_call(right: Any) -> Any:
    def forward(self: Any, h: Tensor, view: AttentionView, state: BlockState) -> Tensor:
        out = right(self, h, view, state)
        kept = vars(self).get("kept", state.head_scale_BTN)
        vars(self)["kept"], state.head_scale_BTN = state.head_scale_BTN, kept
        return out

    return forward


def _pooled_over_all(right: Any) -> Any:
    def forward(self: Any, h: Tensor, view: AttentionView, state: BlockState) -> Tensor:
        right(self, h.mean(1, keepdim=True).expand_as(h), view, state)
        return h

    return forward


def _full_strength(right: Any) -> Any:
    def hand_on(self: Any, bottleneck_BTG: Tensor, state: BlockState) -> None:
        state.head_scale_BTN = torch.sigmoid(self.up(bottleneck_BTG) + self.bias)

    return hand_on


def _detached_mix(self: Any, h: Tensor, down: Tensor, view: AttentionView) -> Tensor:
    return torch.add(h, self.up(view.weights_BTS @ down).detach(), alpha=self.alpha)


def _mixes_the_future(self: Any, h: Tensor, down: Tensor, view: AttentionView) -> Tensor:
    return torch.add(h, self.up(view.weights_BTS.mT @ down), alpha=self.alpha)


def _all_units(self: Any) -> None:
    """A and B of M × M: what was to cost a tenth costs most of the block."""
    hidden = self.down.in_features
    self.down = nn.Linear(hidden, hidden, bias=False)
    self.up = nn.Linear(hidden, hidden, bias=False)


def _asks_for(**changes: Any) -> Any:
    return after_init(
        MlpCrossToken, lambda self: setattr(self, "request", replace(self.request, **changes))
    )


def _four_times(right: Any) -> Any:
    """GPT-2's width, whatever the ratio asks for."""

    def size(self: Any, site: Any) -> BlockSize:
        return BlockSize(4 * site.shape.n_embd, right(self, site).widths)

    return size


def _expensive(right: Any) -> Any:
    """The width of the mix is not paid for by the hidden units."""

    def size(self: Any, site: Any) -> BlockSize:
        found = right(self, site)
        widths = dict(found.widths)
        if "mlp_cross_token" in widths:
            widths["mlp_cross_token"] = found.hidden // 2
        return BlockSize(found.hidden, widths)

    return size


def _wider(self: Any) -> None:
    hidden, n_embd = self.c_fc.out_features + 8, self.c_fc.in_features
    self.c_fc, self.c_proj = nn.Linear(n_embd, hidden), nn.Linear(hidden, n_embd)


_unchecked = nothing(MlpConfig, "check_ratio")

MUTANTS = (
    Mutant(
        "gate goes to the next call",
        "the same block reads it with the next batch, and walks a freed graph",
        "golden-gate",
        {
            "steps": f"{RAISES}: RuntimeError: .*backward through the graph a second time",
            "isolated": "no trace of a first batch of this shape",
        },
        replaced(MlpAttnGate, "forward", _to_the_next_call),
        quick=True,
    ),
    Mutant(
        "gate pools over the future",
        "its mean runs over all positions",
        "golden-gate",
        {"causal": r"token \d+ changes no logits before \d+; found: logits at \d+ change"},
        replaced(MlpAttnGate, "forward", _pooled_over_all),
    ),
    Mutant(
        "gate is dropped between blocks",
        "nobody receives it",
        "golden-gate",
        {
            "gradients": r"a gradient of h\.0\.mlp\.mechanisms\.mlp_attn_gate",
            "reference": _LOGITS,
        },
        then(Mlp, "forward", lambda out, *given: (out[0], BlockState())),
        quick=True,
    ),
    Mutant(
        "gate stands in the last block",
        "parameters without a receiver",
        "golden-gate",
        {
            "gradients": r"a gradient of h\.2\.mlp\.mechanisms\.mlp_attn_gate.*; found: none or zero",
            "parallel": "a gradient of h.2.mlp.mechanisms.mlp_attn_gate.*on both ranks",
        },
        replaced(MlpAttnGateOptions, "in_block", lambda _: lambda self, site: True),
    ),
    Mutant(
        "gate has full strength",
        "alpha is left out",
        "golden-gate",
        {"reference": "MLP_ATTN_GATE of strength 0 changes nothing"},
        replaced(MlpAttnGate, "_hand_on", _full_strength),
    ),
    Mutant(
        "gate starts elsewhere",
        "another bias than is configured",
        "golden-gate",
        {"reference": r"in the initial h\.0\.mlp\.mechanisms\.mlp_attn_gate\.bias; found: 1"},
        after_init(MlpAttnGate, lambda self: nn.init.ones_(self.bias)),
    ),
    Mutant(
        "gate changes the hidden layer",
        "it scales its own block too",
        "mla-golden-mech",
        {"reference": _LOGITS},
        then(MlpAttnGate, "forward", lambda out, *given: out * 0.99),
    ),
    Mutant(
        "gate pooling is dead",
        "a copy of its parent",
        "gate-pooled",
        {"distinct": _SAME.format("gate")},
        after_init(
            MlpAttnGate, lambda self: setattr(self, "options", replace(self.options, pooled=False))
        ),
        MECHANISMS,
    ),
    Mutant(
        "cross-token mix is detached",
        "its matrices never learn",
        "golden-gate-cross",
        {"gradients": r"a gradient of h\.0\.mlp\.mechanisms\.mlp_cross_token\.down\.weight"},
        replaced(MlpCrossToken, "_mix", lambda _: _detached_mix),
    ),
    Mutant(
        "cross-token mix reads the future",
        "the weights are transposed",
        "ra-golden-mech",
        {"causal": "changes no logits before"},
        replaced(MlpCrossToken, "_mix", lambda _: _mixes_the_future),
    ),
    Mutant(
        "cross-token share costs a multiple",
        "M x M matrices in place of a bottleneck",
        "golden-gate-cross",
        {"declared": "parameters, as declared"},
        after_init(MlpCrossToken, _all_units),
        quick=True,
    ),
    Mutant(
        "cross-token share is declared as a multiple",
        "what is built and what is declared are wrong alike, and the rule that refuses it is off",
        "golden-gate-cross",
        {"declared": r"-1\.0% to \+1\.0% parameters against golden-gate; found: \+"},
        together(replaced(MlpConfig, "size", _expensive), _unchecked),
    ),
    Mutant(
        "cross-token share breaks the ratio",
        "what is built and what is declared are wrong alike",
        "golden-gate-cross",
        {"resolve": r"the step resolves; found: .*MLP_RATIO: block 0 comes out at"},
        replaced(MlpConfig, "size", _expensive),
    ),
    Mutant(
        "cross-token sparsity is dead",
        "all weights are kept",
        "cross",
        {"distinct": _SAME.format("cross-all"), "reference": _LOGITS},
        replaced(
            HeadMean,
            "_kept",
            lambda _: lambda self, weights, chunk: (weights.mean(1), torch.ones(())),
        ),
        MECHANISMS,
        beside=("cross-all",),
    ),
    Mutant(
        "cross-token weights are not renormalised",
        "rows do not sum to one",
        "cross",
        {"reference": _LOGITS},
        then(HeadMean, "_kept", lambda out, *given: (out[0], torch.ones_like(out[1]))),
        MECHANISMS,
    ),
    Mutant(
        "cross-token threshold is another",
        "tau counts twice",
        "cross-rms",
        {"reference": _LOGITS},
        replaced(
            HeadMean,
            "__init__",
            lambda right: lambda self, request, pattern: right(
                self, replace(request, tau=2 * request.tau), pattern
            ),
        ),
        MECHANISMS,
    ),
    Mutant(
        "cross-token weights stay detached",
        "a copy of its parent",
        "cross-attached",
        {"distinct": _SAME.format("cross")},
        _asks_for(detach=True),
        MECHANISMS,
    ),
    Mutant(
        "ratio is ignored",
        "the MLP is GPT-2's in every step that asks for a ratio",
        "golden",
        {"resolve": r"the step resolves; found: .*MLP_RATIO: block 0 comes out at 2\.0"},
        replaced(MlpConfig, "size", _four_times),
        quick=True,
    ),
    Mutant(
        "ratio is ignored and nobody refuses it",
        "the rule that holds the ratio is off too",
        "ra-golden",
        {"declared": r"MLP / attention of 2\.5 within 1 %; found: block 0 is built at 2\.0"},
        together(replaced(MlpConfig, "size", _four_times), _unchecked),
    ),
    Mutant(
        "ratio is ignored by the module",
        "what is built is not what is declared",
        "mla-golden",
        {"declared": "parameters, as declared"},
        after_init(Mlp, _wider),
    ),
    Mutant(
        "coupling is not tied",
        "the way back has a matrix of its own",
        "mla-tied",
        {"declared": "parameters, as declared"},
        replaced(
            _Coupling,
            "__init__",
            lambda right: lambda self, hidden, latent, untied: right(self, hidden, latent, True),
        ),
        MECHANISMS,
    ),
    Mutant(
        "coupling has twice its strength",
        "alpha counts twice",
        "mla-tied",
        {"reference": _LOGITS},
        after_init(MlpLatent, lambda self: setattr(self, "alpha", 2 * self.alpha)),
        MECHANISMS,
    ),
    Mutant(
        "coupling reads the next token",
        "latents of the future",
        "mla-untied",
        {"causal": "changes no logits before"},
        replaced(_Coupling, "read", lambda right: lambda self, a: right(self, a.roll(-1, 1))),
        MECHANISMS,
    ),
    Mutant(
        "scalar coupling mixes heads up",
        "factors are dealt out in turn",
        "mla-scalar",
        {"reference": _LOGITS},
        replaced(
            _ScalarCoupling,
            "_factors_R",
            lambda _: lambda self: self.factors[torch.arange(self.latent) % len(self.factors)],
        ),
        MECHANISMS,
    ),
    Mutant(
        "activation is another",
        "the exact GELU in place of the tanh form",
        "baseline",
        {"reference": _LOGITS},
        lambda patch: patch.setitem(base.ACTIVATIONS, "gelu_tanh", F.gelu),
    ),
    Mutant(
        "activation explodes",
        "losses that are no numbers",
        "mla-golden-mech",
        {"steps": "loss is (NaN|infinite) at it 1|a finite loss"},
        lambda patch: patch.setitem(
            base.ACTIVATIONS, "gelu_tanh", lambda x: partial(torch.mul, 1e38)(x) * 1e38
        ),
    ),
)
