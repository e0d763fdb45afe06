"""Softmax attention over a window, with the log-sum-exp of the scores of every row.

B batch, T tokens, N heads, D width of queries and keys, E width of values. Query i sees max(0, i −
window + 1) ≤ j ≤ i, so no row is empty.

On a GPU the pass is compiled FlexAttention (Dong et al. 2024, arXiv 2412.05496) and skips blocks
outside the window. On a CPU FlexAttention has no backward; an equivalent implementation over all
pairs is used there with the same arithmetic: products in the dtype of the inputs, softmax in fp32
or wider.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

# Maximum number of compiled kernels per process: passes differ in length, widths and the need for
# a backward. torch's default of 8 is almost exceeded by two windows with a statistic.
MOST_KERNELS = 64


def window_attention(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return context BNTE in the dtype of v and the log-sum-exp of scaled scores, BNT.

    The log-sum-exp is in fp32 or wider. Both outputs are differentiable.
    """
    if q_BNTD.device.type == "cpu":
        return _all_pairs(q_BNTD, k_BNTD, v_BNTE, window, scale)
    return flex(_compiled(), q_BNTD, k_BNTD, v_BNTE, window, scale)


def flex(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q_BNTD: Tensor,
    k_BNTD: Tensor,
    v_BNTE: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the pass with ``kernel``, a variant of ``flex_attention``."""
    length = q_BNTD.shape[2]
    mask = _block_mask(min(window, length), length, q_BNTD.device)
    with torch._dynamo.config.patch(recompile_limit=MOST_KERNELS):
        context, aux = kernel(
            q_BNTD,
            k_BNTD,
            v_BNTE,
            block_mask=mask,
            scale=scale,
            return_aux=AuxRequest(lse=True),
        )
    return context, aux.lse


def _all_pairs(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    length = q_BNTD.shape[2]
    wide = torch.promote_types(q_BNTD.dtype, torch.float32)
    visible = torch.ones(length, length, dtype=torch.bool, device=q_BNTD.device)
    visible = visible.tril_().triu_(1 - window)
    scores = (q_BNTD @ k_BNTD.mT).to(wide) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v_BNTE.dtype) @ v_BNTE, lse


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile ``flex_attention`` with ``fullgraph=True``.

    Otherwise a graph break, or reaching the recompile limit, would silently fall back to computing
    all pairs.
    """
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
        flex_attention, fullgraph=True, dynamic=False
    )
    return compiled


@cache
def _block_mask(window: int, length: int, device: torch.device) -> BlockMask:
    """Return the block mask; cached, because all blocks and steps share it."""
    return create_block_mask(_mask_mod(window), None, None, length, length, device=str(device))


def _mask_mod(window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    return visible
