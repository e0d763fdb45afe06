"""Faults of the MLP, its mechanisms, and the state passed between blocks.

B batch, T tokens, S keys, M hidden units, G and K bottlenecks, N heads; r the rows of a chunk, c its
columns.
"""

from typing import Any

from torch import Tensor, nn

from gpt2.attention.state import BlockState
from gpt2.mlp.gate import MlpAttnGate
from gpt2.mlp.latent import _ScalarCoupling
from gpt2.mlp.mlp import Mlp
from gpt2.mlp.options import (
    MlpAttnGateOptions,
    MlpConfig,
    MlpWidths,
)
from tests.mutants.mutant import (
    LOGITS,
    MECHANISMS,
    Mutant,
    after_init,
    edited,
    nothing,
    replaced,
    then,
    together,
)


def _pooled_over_all(right: Any) -> Any:
    def forward(self: Any, h: Tensor, *others: Any) -> Tensor:
        right(self, h.mean(1, keepdim=True).expand_as(h), *others)
        return h

    return forward


def _four_times(right: Any) -> Any:
    """Use GPT-2's width regardless of the ratio."""

    def size(self: Any, site: Any) -> MlpWidths:
        return MlpWidths(4 * site.shape.n_embd, right(self, site).widths)

    return size


_unchecked = nothing(MlpConfig, "check_ratio")

MUTANTS = (
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
        "ratio and its rule are ignored",
        "ra-golden",
        {"declared": ("mlp-ratio", r"2\.5 .*; 2\.0")},
        together(replaced(MlpConfig, "size", _four_times), _unchecked),
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
)
