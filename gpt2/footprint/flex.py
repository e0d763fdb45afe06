"""FlexAttention's pass by shapes: saved tensors, temporary memory, and FLOPs.

B batch, T tokens, N heads, D width of queries and keys, E width of values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt2.footprint.tracker import Tracker

# Pairs are computed or skipped in blocks of this many queries and keys.
BLOCK = 128


def flex_pass(
    tracker: Tracker,
) -> Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]:
    """Return a replacement for ``window_attention``'s twin that adds its FLOPs to ``tracker``."""

    def run(
        q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = _FlexPass.apply(tracker, q_BNTD, k_BNTD, v_BNTE, window)
        return outputs

    return run


def computed_pairs(length: int, window: int) -> int:
    """Return the number of pairs in blocks in which any query attends to any key."""
    blocks = 0
    for first in range(0, length, BLOCK):
        left = max(0, first - window + 1)
        blocks += first // BLOCK - left // BLOCK + 1
    return blocks * BLOCK**2


class _FlexPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tracker: Tracker, q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        batch, heads, length, width = q_BNTD.shape
        context = v_BNTE.new_empty(v_BNTE.shape)
        lse = q_BNTD.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q_BNTD, k_BNTD, v_BNTE, context, lse)
        ctx.tracker = tracker
        ctx.pairs = batch * heads * computed_pairs(length, window)
        # q kᵀ and p v.
        tracker.compute(2.0 * ctx.pairs * (width + v_BNTE.shape[-1]))
        return context, lse

    @staticmethod
    def backward(
        ctx: Any, dcontext_BNTE: Tensor, dlse_BNT: Tensor
    ) -> tuple[None, Tensor, Tensor, Tensor, None]:
        q, k, v, _, lse = ctx.saved_tensors
        # Σ do·o of every query, in fp32.
        delta = torch.empty_like(lse)
        # One pass computes dq, another dk and dv; each recomputes scores and do vᵀ.
        ctx.tracker.compute(2.0 * ctx.pairs * (4 * q.shape[-1] + 3 * v.shape[-1]))
        gradients = None, *(torch.empty_like(x) for x in (q, k, v)), None
        del delta
        return gradients
