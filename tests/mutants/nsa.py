"""Faults of native sparse attention that make check must find.

B batch, S tokens, N heads, K key/value heads, H head dim.
"""

from typing import Any

from torch import Tensor

from gpt2.nsa import module
from tests.mutants.mutant import Mutant, replaced

_ON = {
    "ATTENTION_PROJECTION_GROUPED": True,
    "ATTENTION_PATTERN_NSA": True,
    "DROPOUT": "0.0",
    "SINGLE_TRAINING": True,
    "NSA_WINDOW": 2,
}


def _wider(right: Any) -> Any:
    return lambda q, k, v, window: right(q, k, v, window + 1)


def _sees_next(right: Any) -> Any:
    def attend(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int) -> Tensor:
        return right(q_BNTH, k_BKSH.roll(-1, 2), v_BKSH.roll(-1, 2), window)

    return attend


MUTANTS = (
    Mutant(
        "NSA window off by one",
        "w + 1 tokens are visible",
        "run",
        {"field": ("receptive-field", "head 0 .* window branch;")},
        replaced(module, "attend_window", _wider),
        defconfig="gpt2-quickstart",
        settings=_ON,
        quick=True,
    ),
    Mutant(
        "NSA window sees the next token",
        "a leak that looks like progress in the loss",
        "run",
        {"entropy": ("no-future-leak", r"2\.08 .*; [01]\.")},
        replaced(module, "attend_window", _sees_next),
        defconfig="gpt2-quickstart",
        settings=_ON,
        quick=True,
    ),
)
