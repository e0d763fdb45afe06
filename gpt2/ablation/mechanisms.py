"""The MECHANISMS study: what does each option of a mechanism do that RATIO leaves as it is?

A mechanism that RATIO has is here again, as the parent of its options. The options of the MLP and of
the coupling stand on an MLP sized by ratio, which pays for their parameters. It takes an even
number of heads: all of GPT-2's sizes but XL, which has 25.

    baseline ─┬─ gqa ── mqa
              ├─ sliding
              ├─ ra ── ra-learnable
              ├─ ract ─┬─ ract-max
              │        ├─ ract-rms
              │        ├─ ract-head-average
              │        └─ ract-detached
              ├─ mla ─┬─ mla-shared
              │       └─ mla-golden ── mla-tied ─┬─ mla-untied
              │                                  └─ mla-scalar
              ├─ golden ─┬─ gate ── gate-pooled
              │          └─ cross ─┬─ cross-rms
              │                    ├─ cross-all
              │                    └─ cross-attached
              └─ rope
"""

from gpt2.ablation.ratio import BASELINE, GOLDEN, MLA, MLA_GOLDEN, RA, RACT
from gpt2.ablation.step import Step, Study

# Of the 12 C² of GPT-2's block, two key and value heads leave 2 C²/N each for keys and for values
# instead of C²: 8.3 % off at 4 heads, 13.9 % at 12, never 16.7 %, less what the embeddings weigh.
_FEWER_HEADS = (-0.17, 0.0)
# From two to one: 2 C²/N off the 10 C² and more that are left, 4.5 % at 4 heads.
_ONE_HEAD = (-0.06, 0.0)
# K and U once instead of N times: C²/3 off 10.7 C² at a latent width of C/6.
_SHARED = (-0.04, 0.0)
# T·C of the position table: 0.6 % of 124M, 17 % of a narrow model of bytes with a context of 1024.
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
        # Narrow enough to hide something from the quick start's 128 tokens.
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
        # Attention starts out almost even: the default threshold of 0.5 would leave nothing out.
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
