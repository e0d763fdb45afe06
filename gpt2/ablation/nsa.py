"""The NSA study: what does each part of native sparse attention give, and is it worth its reads?

All steps have two heads of keys and values and a context of 1024 tokens, as nsa-quickstart has: the
baseline is full attention with these. At that context the sizes of arXiv 2502.11089 score more
query-key pairs than full attention; those here score 1.3 times fewer.

    baseline ─┬─ sliding
              └─ nsa ─┬─ nsa-shared
                      ├─ nsa-mean
                      ├─ nsa-softmax
                      ├─ nsa-no-compressed
                      ├─ nsa-no-selected
                      ├─ nsa-no-window
                      └─ nsa-random
"""

from gpt2.ablation.step import Step, Study
from lib.binding import Value

# Of the last token of 1024 native sparse attention reads 127 compressed keys, 8 x 32 selected ones
# and 128 of the window: no token reads more.
READS = 511

_SIZES: dict[str, Value] = {
    "NSA_COMPRESS_BLOCK": 16,
    "NSA_COMPRESS_STRIDE": 8,
    "NSA_SELECT_BLOCK": 32,
    "NSA_SELECT_COUNT": 8,
    "NSA_WINDOW": 128,
    "NSA_PHI_HIDDEN": 16,
}
# Keys and values of two branches are 8 C²/N for two key heads, of the 9 C² and more of a block: most
# at four heads. The MLPs are small beside them but in narrow models.
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
