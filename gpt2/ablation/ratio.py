"""The RATIO study: how to divide a block's parameters between MLP and attention.

GPT-2's MLP has 2.0 times the parameters of attention; "golden" uses 2.5. The study compares the two
ratios for dense and for latent attention, and with the mechanisms that connect the two halves of a
block. The parameters of a mechanism come out of the MLP's share, so a step with mechanisms has the
same size as its parent without them.
"""

from gpt2.ablation.step import Step, Study
from lib.config.field import SymbolValue

_GOLDEN: dict[str, SymbolValue] = {"MLP_SIZING_RATIO": True, "MLP_RATIO": "2.5"}
_RA: dict[str, SymbolValue] = {
    "RECIPROCAL": True,
    "RECIPROCAL_ALPHA": "0.3",
    "RECIPROCAL_WINDOW": 64,
}
_RACT: dict[str, SymbolValue] = {
    "RA_CROSS_TOKEN": True,
    "RA_CROSS_TOKEN_MODE_TOPK": True,
    "RA_CROSS_TOKEN_TOPK": 8,
    "RA_CROSS_TOKEN_APPLY_OUTPUT": True,
    "RA_CROSS_TOKEN_ALPHA": "0.2",
}
_MECHANISMS: dict[str, SymbolValue] = {
    "MLP_ATTN_GATE": True,
    "MLP_CROSS_TOKEN": True,
    "MLP_SHARE": "0.20",
}
# From ratio 2.0 to 2.5 a block grows from 3.0 to 3.5 times its attention: at most 16.7 %, diluted by
# the embeddings. Latent attention at a sixth of the width makes a block 11.1 % smaller (slightly
# more or less if the latent width R is rounded); the ratio then falls from 3.0 to 2.5: 12.5 %.
_WIDER_MLP = (0.0, 0.18)
_LATENT = (-0.12, 0.0)
_NARROWER_MLP = (-0.14, 0.0)

# Steps that the MECHANISMS study also starts from.
BASELINE = Step("baseline", "GPT-2")
GOLDEN = Step("golden", "MLP at 2.5 times attention", "baseline", _GOLDEN, _WIDER_MLP)
RA = Step("ra", "reciprocal attention", "baseline", _RA)
MLA = Step(
    "mla",
    "latent attention, MLP as the baseline's",
    "baseline",
    {"ATTENTION_PROJECTION_LATENT": True, "LATENT_DIM": 0, "MLP_SIZING_HIDDEN": True},
    _LATENT,
)
MLA_GOLDEN = Step("mla-golden", "MLP at 2.5 times attention", "mla", _GOLDEN, _NARROWER_MLP)
RACT = Step("ract", "cross-token gate: top-k, on the output", "baseline", _RACT)

RATIO = Study(
    "ratio",
    (
        BASELINE,
        Step(
            "pruned-50",
            "magnitude pruning to 50 %",
            "baseline",
            {"PRUNING_MAGNITUDE": True, "PRUNING_SPARSITY": "0.5"},
        ),
        GOLDEN,
        Step(
            "golden-gate",
            "MLP gates the next block's heads, share 15 %",
            "golden",
            {"MLP_ATTN_GATE": True, "MLP_SHARE": "0.15"},
        ),
        Step(
            "golden-gate-cross",
            "and mixes tokens by attention weights, share 20 %",
            "golden-gate",
            {"MLP_CROSS_TOKEN": True, "MLP_SHARE": "0.20"},
        ),
        RA,
        Step("ra-golden", "MLP at 2.5 times attention", "ra", _GOLDEN, _WIDER_MLP),
        Step("ra-golden-mech", "both MLP mechanisms, share 20 %", "ra-golden", _MECHANISMS),
        MLA,
        MLA_GOLDEN,
        Step("mla-golden-mech", "both MLP mechanisms, share 20 %", "mla-golden", _MECHANISMS),
        Step("ra-mla-golden", "reciprocal attention", "mla-golden", _RA),
        Step("ra-mla-golden-mech", "both MLP mechanisms, share 20 %", "ra-mla-golden", _MECHANISMS),
        RACT,
        Step("mla-ract", "cross-token gate", "mla-golden", _RACT),
        Step("ra-mla-ract", "cross-token gate", "ra-mla-golden", _RACT),
        Step("full", "cross-token gate: all mechanisms", "ra-mla-golden-mech", _RACT),
        Step(
            "ract-weights",
            "the gate acts on scores",
            "ract",
            {"RA_CROSS_TOKEN_APPLY_WEIGHTS": True},
        ),
        Step(
            "ract-entropy",
            "the gate reads the row's entropy",
            "ract",
            {"RA_CROSS_TOKEN_MODE_ENTROPY": True},
        ),
    ),
)
