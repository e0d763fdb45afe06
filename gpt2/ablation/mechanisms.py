"""The MECHANISMS study: the effect of each mechanism option that the RATIO study keeps fixed.

The RATIO mechanisms are repeated here as the parents of their options. The options of the MLP and of
the MLP-latent coupling use an MLP sized by ratio, so that their parameters come out of the MLP's
share. The study requires an even number of heads: every GPT-2 size except XL, which has 25.
"""

from gpt2.ablation.ratio import BASELINE, GOLDEN, MLA, MLA_GOLDEN, RA, RACT
from gpt2.ablation.step import Step, Study

# A GPT-2 block has 12 C² parameters. With two KV heads, keys and values take 2 C²/N each instead of
# C²: 8.3 % fewer at 4 heads, 13.9 % at 12, always less than 16.7 %. Embeddings dilute the change.
_FEWER_HEADS = (-0.17, 0.0)
# From two KV heads to one: 2 C²/N fewer of the remaining 10 C² or more, 4.5 % at 4 heads.
_ONE_HEAD = (-0.06, 0.0)
# K and U exist once instead of N times: C²/3 fewer of 10.7 C² at a latent width of C/6.
_SHARED = (-0.04, 0.0)
# The position table has T·C parameters: 0.6 % of 124M, 17 % of a narrow byte-level model with a
# context of 1024.
_NO_TABLE = (-0.18, 0.0)

MECHANISMS = Study(
    "mechanisms",
    (
        BASELINE,
        Step(
            "gqa",
            "two heads of keys and values",
            "baseline",
            {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 2},
            _FEWER_HEADS,
        ),
        Step("mqa", "one head of keys and values", "gqa", {"N_KV_HEAD": 1}, _ONE_HEAD),
        # Narrower than the 128-token context of the quick start, so that the window has an effect.
        Step(
            "sliding",
            "a window of 64 tokens",
            "baseline",
            {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 64},
        ),
        RA,
        Step("ra-learnable", "every head learns its alpha", "ra", {"RECIPROCAL_LEARNABLE": True}),
        RACT,
        Step(
            "ract-max",
            "the gate reads the row's largest weight",
            "ract",
            {"RA_CROSS_TOKEN_MODE_MAX": True},
        ),
        Step(
            "ract-rms",
            "the gate reads the root of the row's sum of squares",
            "ract",
            {"RA_CROSS_TOKEN_MODE_RMS": True},
        ),
        Step(
            "ract-head-average",
            "heads share the mean of their statistics",
            "ract",
            {"RA_CROSS_TOKEN_HEAD_AVERAGE": True},
        ),
        Step(
            "ract-detached",
            "no gradient through the statistic",
            "ract",
            {"RA_CROSS_TOKEN_DETACH_STATS": True},
        ),
        MLA,
        Step(
            "mla-shared", "heads share K and U", "mla", {"LATENT_SHARED_EXPANSION": True}, _SHARED
        ),
        MLA_GOLDEN,
        Step(
            "mla-tied",
            "MLP and latents coupled, one matrix for both directions",
            "mla-golden",
            {"MLP_LATENT": True, "MLP_LATENT_TYING_TIED": True, "MLP_LATENT_ALPHA": "0.2"},
        ),
        Step(
            "mla-untied",
            "a matrix for each direction",
            "mla-tied",
            {"MLP_LATENT_TYING_UNTIED": True},
        ),
        Step(
            "mla-scalar",
            "a scalar for each head",
            "mla-tied",
            {"MLP_LATENT_TYING_SCALAR": True},
        ),
        GOLDEN,
        Step(
            "gate",
            "MLP gates the next block's heads, share 15 %",
            "golden",
            {"MLP_ATTN_GATE": True, "MLP_SHARE": "0.15"},
        ),
        Step(
            "gate-pooled",
            "the gate reads a causal running mean",
            "gate",
            {"MLP_ATTN_GATE_POOLED": True},
        ),
        Step(
            "cross",
            "MLP mixes tokens by attention weights, share 15 %",
            "golden",
            {"MLP_CROSS_TOKEN": True, "MLP_SHARE": "0.15"},
        ),
        # Attention is almost uniform at initialization: the default threshold of 0.5 would not
        # remove any weight.
        Step(
            "cross-rms",
            "weights above the row's root mean square",
            "cross",
            {"MLP_CROSS_TOKEN_SPARSITY_RMS": True, "MLP_CROSS_TOKEN_TAU": "1.0"},
        ),
        Step("cross-all", "all weights", "cross", {"MLP_CROSS_TOKEN_SPARSITY_NONE": True}),
        Step(
            "cross-attached",
            "the mix teaches attention too",
            "cross",
            {"MLP_CROSS_TOKEN_DETACH_WEIGHTS": False},
        ),
        Step(
            "rope",
            "queries and keys rotated by their positions",
            "baseline",
            {"POSITIONS_ROPE": True},
            _NO_TABLE,
        ),
    ),
)
