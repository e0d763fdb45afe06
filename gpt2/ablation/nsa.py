"""The NSA study: the contribution of each component of native sparse attention, and its cost in keys.

All steps have two KV heads and a context of 1024 tokens, as in nsa-quickstart; the baseline is full
attention with the same KV heads and context. At this context the block sizes of arXiv 2502.11089
would score more query-key pairs than full attention; the sizes below score 1.3 times fewer.
"""

from gpt2.ablation.step import Step, Study
from lib.config.field import SymbolValue

# Keys read by the last of 1024 tokens: 127 compressed, 8 x 32 selected and 128 in the window. No
# token reads more keys.
READS = 511

_SIZES: dict[str, SymbolValue] = {
    "NSA_COMPRESS_BLOCK": 16,
    "NSA_COMPRESS_STRIDE": 8,
    "NSA_SELECT_BLOCK": 32,
    "NSA_SELECT_COUNT": 8,
    "NSA_WINDOW": 128,
    "NSA_PHI_HIDDEN": 16,
}
# The keys and values of the two extra branches take 8 C²/N with two KV heads, of a block's 9 C² or
# more: the largest share at four heads. The compression MLPs are small except in narrow models.
_NSA = (0.0, 0.30)
_NO_KEYS = (-0.20, 0.0)

NSA = Study(
    "nsa",
    (
        Step("baseline", "full attention"),
        Step(
            "sliding",
            "a window of as many tokens as NSA reads at most",
            "baseline",
            {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": READS},
        ),
        Step(
            "nsa",
            "native sparse attention",
            "baseline",
            {"ATTENTION_PATTERN_NSA": True, **_SIZES},
            _NSA,
        ),
        Step(
            "nsa-shared",
            "branches share keys and values",
            "nsa",
            {"NSA_SHARED_KV": True},
            _NO_KEYS,
        ),
        Step("nsa-mean", "compressed by the mean alone", "nsa", {"NSA_PHI_MEAN": True}, _NO_KEYS),
        Step("nsa-softmax", "gates sum to one", "nsa", {"NSA_GATE_SOFTMAX": True}),
        Step(
            "nsa-no-compressed",
            "no compressed branch, means of keys rank blocks",
            "nsa",
            {"NSA_BRANCH_COMPRESSED": False},
            _NO_KEYS,
        ),
        Step(
            "nsa-no-selected",
            "no selected branch",
            "nsa",
            {"NSA_BRANCH_SELECTED": False},
            _NO_KEYS,
        ),
        Step("nsa-no-window", "no window", "nsa", {"NSA_BRANCH_WINDOW": False}, _NO_KEYS),
        Step("nsa-random", "blocks drawn, not scored", "nsa", {"NSA_SELECT_BY_RANDOM": True}),
    ),
)
