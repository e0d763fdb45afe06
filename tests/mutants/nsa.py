"""Faults of native sparse attention that make check must find.

B batch, S tokens, N heads, K key/value heads, H head dim.
"""

from typing import Any

import torch
from torch import Tensor

from gpt2.attention.projections import ZeroInitLinear
from gpt2.model import GPT
from gpt2.nsa import branches, select
from tests.mutants.mutant import LOGITS, Mutant, replaced, then

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


def _lowest(right: Any) -> Any:
    """Rank finite scores in the opposite order."""
    return lambda scores, *rest: right(scores.where(scores.isinf(), -scores), *rest)


@torch.no_grad()
def _open_gates(out: None, self: GPT, *seed: int) -> None:
    for part in self.modules():
        if isinstance(part, ZeroInitLinear):
            part.weight.fill_(0.02)


MUTANTS = (
    Mutant(
        "NSA window off by one",
        "run",
        {"reference": LOGITS},
        replaced(branches, "attend_window", _wider),
        defconfig="gpt2-ratio-small",
        settings=_ON,
        quick=True,
    ),
    Mutant(
        "NSA window sees the next token",
        "run",
        {"causal": "causal-logits"},
        replaced(branches, "attend_window", _sees_next),
        defconfig="gpt2-ratio-small",
        settings=_ON,
        quick=True,
    ),
    Mutant(
        "NSA selects the lowest scores",
        "nsa",
        {"reference": LOGITS},
        replaced(select, "select_blocks", _lowest),
        defconfig="nsa-quickstart",
    ),
    Mutant(
        "NSA gates do not start at 0",
        "nsa",
        {"reference": ("initial-zero", "c_gate")},
        then(GPT, "init_weights", _open_gates),
        defconfig="nsa-quickstart",
    ),
)
