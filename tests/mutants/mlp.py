"""Faults of the MLP, its mechanisms, and the state passed between blocks.

B batch, T tokens, S keys, M hidden units, G and K bottlenecks, N heads; r the rows of a chunk, c its
columns.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.mlp import activations
from gpt2.mlp.cross_token import MlpCrossToken
from gpt2.mlp.gate import MlpAttnGate
from gpt2.mlp.latent import MlpLatent, _Coupling, _ScalarCoupling
from gpt2.mlp.mlp import Mlp
from gpt2.mlp.options import (
    GeluTanhOptions,
    MlpAttnGateOptions,
    MlpConfig,
    MlpCrossTokenOptions,
    MlpWidths,
)
from tests.mutants.mutant import (
    LOGITS,
    MECHANISMS,
    Mutant,
    Plant,
    after_init,
    edited,
    entry,
    nothing,
    replaced,
    same_as,
    then,
    together,
)


def _exploding(x: Tensor) -> Tensor:
    return x * 1e38 * 1e38


def _to_the_next_call(right: Any) -> Any:
    def forward(self: Any, h: Tensor, view: Any, state: BlockState, cache: Any) -> Tensor:
        out = right(self, h, view, state, cache)
        previous_BTN = vars(self).get("previous", state.head_scale_BTN)
        vars(self)["previous"], state.head_scale_BTN = state.head_scale_BTN, previous_BTN
        return out

    return forward


def _pooled_over_all(right: Any) -> Any:
    def forward(self: Any, h: Tensor, *others: Any) -> Tensor:
        right(self, h.mean(1, keepdim=True).expand_as(h), *others)
        return h

    return forward


def _mixes_the_future(self: Any, down: Tensor, view: AttentionOutputs) -> Tensor:
    mixed: Tensor = self.up(view.weights_BTS.mT @ down)
    return mixed


def _all_units(self: Any) -> None:
    """Replace the bottleneck matrices by M × M matrices."""
    hidden = self.down.in_features
    self.down = nn.Linear(hidden, hidden, bias=False)
    self.up = nn.Linear(hidden, hidden, bias=False)


def _request_with(change: Callable[[MlpCrossTokenOptions], dict[str, Any]]) -> Plant:
    return replaced(
        MlpCrossTokenOptions,
        "request",
        lambda right: property(lambda self: replace(right.fget(self), **change(self))),
    )


def _four_times(right: Any) -> Any:
    """Use GPT-2's width regardless of the ratio."""

    def size(self: Any, site: Any) -> MlpWidths:
        return MlpWidths(4 * site.shape.n_embd, right(self, site).widths)

    return size


def _expensive(right: Any) -> Any:
    """Widen the mix without reducing the hidden units."""

    def size(self: Any, site: Any) -> MlpWidths:
        found = right(self, site)
        widths = dict(found.widths)
        if "mlp_cross_token" in widths:
            widths["mlp_cross_token"] = found.hidden // 2
        return MlpWidths(found.hidden, widths)

    return size


def _wider(self: Any) -> None:
    hidden, n_embd = self.c_fc.out_features + 8, self.c_fc.in_features
    self.c_fc, self.c_proj = nn.Linear(n_embd, hidden), nn.Linear(hidden, n_embd)


_unchecked = nothing(MlpConfig, "check_ratio")

MUTANTS = (
    Mutant(
        "gate is applied in the next call",
        "golden-gate",
        {"causal": "check.exception"},
        replaced(MlpAttnGate, "forward", _to_the_next_call),
        quick=True,
    ),
    Mutant(
        "gate pools over the future",
        "golden-gate",
        {"causal": "causal-logits"},
        replaced(MlpAttnGate, "forward", _pooled_over_all),
    ),
    Mutant(
        "gate is dropped between blocks",
        "golden-gate",
        {
            "gradients": ("nonzero-gradient", r"h\.0\.mlp\.mechanisms\.mlp_attn_gate"),
            "reference": LOGITS,
        },
        then(Mlp, "forward", lambda out, *given: (out[0], BlockState())),
        quick=True,
    ),
    Mutant(
        "gate exists in the last block",
        "golden-gate",
        {
            "gradients": ("nonzero-gradient", r"h\.2\.mlp\.mechanisms\.mlp_attn_gate"),
            "parallel": ("gradient-on-all-ranks", r"h\.2\.mlp\.mechanisms\.mlp_attn_gate"),
        },
        replaced(MlpAttnGateOptions, "in_block", lambda _: lambda self, site: True),
    ),
    Mutant(
        "gate has full strength",
        "golden-gate",
        {"reference": ("zero-strength", "MLP_ATTN_GATE ")},
        edited(MlpAttnGate, "forward", "(1 - alpha) + alpha * ", ""),
    ),
    Mutant(
        "gate has another initial bias",
        "golden-gate",
        {"reference": ("initial-value", r"h\.0\.mlp\.mechanisms\.mlp_attn_gate\.bias; 1$")},
        after_init(MlpAttnGate, lambda self: nn.init.ones_(self.bias)),
    ),
    Mutant(
        "gate changes the hidden layer",
        "mla-golden-mech",
        {"reference": LOGITS},
        then(MlpAttnGate, "forward", lambda out, *given: out * 0.99),
    ),
    Mutant(
        "gate pooling is dead",
        "gate-pooled",
        {"distinct": same_as("gate")},
        after_init(
            MlpAttnGate, lambda self: setattr(self, "options", replace(self.options, pooled=False))
        ),
        MECHANISMS,
    ),
    Mutant(
        "cross-token mix is detached",
        "golden-gate-cross",
        {
            "gradients": (
                "nonzero-gradient",
                r"h\.0\.mlp\.mechanisms\.mlp_cross_token\.down\.weight",
            )
        },
        then(MlpCrossToken, "_gathered", lambda out, *given: out.detach()),
    ),
    Mutant(
        "cross-token mix reads the future",
        "ra-golden-mech",
        {"causal": "causal-logits"},
        replaced(MlpCrossToken, "_gathered", lambda _: _mixes_the_future),
    ),
    Mutant(
        "cross-token share costs a multiple",
        "golden-gate-cross",
        {"declared": "parameter-count"},
        after_init(MlpCrossToken, _all_units),
        quick=True,
    ),
    Mutant(
        "cross-token share is declared as a multiple",
        "golden-gate-cross",
        {"declared": ("size-change", r"^-1\.0% to \+1\.0% .* golden-gate; \+")},
        together(replaced(MlpConfig, "size", _expensive), _unchecked),
    ),
    Mutant(
        "cross-token share breaks the ratio",
        "golden-gate-cross",
        {"resolve": ("resolved-configuration", "MLP_RATIO: ")},
        replaced(MlpConfig, "size", _expensive),
    ),
    Mutant(
        "cross-token sparsity is dead",
        "cross",
        {"distinct": same_as("cross-all"), "reference": LOGITS},
        replaced(
            AttentionWeightsTap,
            "_kept",
            lambda _: lambda self, weights, chunk: (weights.mean(1), torch.ones(())),
        ),
        MECHANISMS,
        beside=("cross-all",),
    ),
    Mutant(
        "cross-token weights are not renormalised",
        "cross",
        {"reference": LOGITS},
        then(AttentionWeightsTap, "_kept", lambda out, *given: (out[0], torch.ones_like(out[1]))),
        MECHANISMS,
    ),
    Mutant(
        "cross-token threshold is wrong",
        "cross-rms",
        {"reference": LOGITS},
        replaced(
            AttentionWeightsTap,
            "__init__",
            lambda right: lambda self, request, pattern: right(
                self, replace(request, tau=2 * request.tau), pattern
            ),
        ),
        MECHANISMS,
    ),
    Mutant(
        "cross-token threshold is the strength",
        "cross-rms",
        {"reference": LOGITS},
        _request_with(lambda options: {"tau": options.alpha}),
        MECHANISMS,
    ),
    Mutant(
        "cross-token weights stay detached",
        "cross-attached",
        {"distinct": same_as("cross")},
        _request_with(lambda options: {"detach": True}),
        MECHANISMS,
    ),
    Mutant(
        "ratio is ignored",
        "golden",
        {"resolve": ("resolved-configuration", r"MLP_RATIO: .*\b2\.0")},
        replaced(MlpConfig, "size", _four_times),
        quick=True,
    ),
    Mutant(
        "ratio and its rule are ignored",
        "ra-golden",
        {"declared": ("mlp-ratio", r"2\.5 .*; 2\.0")},
        together(replaced(MlpConfig, "size", _four_times), _unchecked),
    ),
    Mutant(
        "ratio is ignored by the module",
        "mla-golden",
        {"declared": "parameter-count"},
        after_init(Mlp, _wider),
    ),
    Mutant(
        "coupling is not tied",
        "mla-tied",
        {"declared": "parameter-count"},
        replaced(
            _Coupling,
            "__init__",
            lambda right: lambda self, hidden, latent, untied: right(self, hidden, latent, True),
        ),
        MECHANISMS,
    ),
    Mutant(
        "coupling has twice its strength",
        "mla-tied",
        {"reference": LOGITS},
        after_init(MlpLatent, lambda self: setattr(self, "alpha", 2 * self.alpha)),
        MECHANISMS,
    ),
    Mutant(
        "coupling reads the next token",
        "mla-untied",
        {"causal": "causal-logits"},
        replaced(_Coupling, "read", lambda right: lambda self, a: right(self, a.roll(-1, 1))),
        MECHANISMS,
    ),
    Mutant(
        "scalar coupling mixes heads",
        "mla-scalar",
        {"reference": LOGITS},
        replaced(
            _ScalarCoupling,
            "_factors_R",
            lambda _: lambda self: self.factors[torch.arange(self.latent) % len(self.factors)],
        ),
        MECHANISMS,
    ),
    Mutant(
        "scalar coupling gives the remainder to the last head",
        "mla-scalar",
        {"reference": LOGITS},
        edited(
            _ScalarCoupling,
            "_factors_R",
            "units_R * len(self.factors) // self.latent",
            "(units_R // (self.latent // len(self.factors))).clamp(max=len(self.factors) - 1)",
        ),
        MECHANISMS,
    ),
    Mutant(
        "a mechanism takes the share of an absent one",
        "golden-gate-cross",
        {"declared": ("mlp-share", "^MLP_SHARE=0.2 of the MLP for 2 .*; mlp_cross_token 0.2")},
        edited(MlpConfig, "size", "m in self.mechanisms))", "m in built))"),
    ),
    Mutant(
        "the gate reads the hidden layer before the token mix",
        "golden-gate-cross",
        {"reference": LOGITS},
        then(MlpConfig, "built", lambda out, self, site: out[::-1]),
    ),
    Mutant(
        "activation is wrong",
        "baseline",
        {"reference": LOGITS},
        entry(activations.FUNCTIONS, GeluTanhOptions, F.gelu),
    ),
    Mutant(
        "activation explodes",
        "mla-golden-mech",
        {"gradients": ("finite-gradient", r"wte\.weight")},
        entry(activations.FUNCTIONS, GeluTanhOptions, _exploding),
    ),
)
