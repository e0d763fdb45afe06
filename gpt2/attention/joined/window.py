"""One pass: softmax attention over a window, and the log-sum-exp of every row's scores.

B batch, T tokens, N heads, D width of queries and keys, E width of values. Query i sees
max(0, i − window + 1) ≤ j ≤ i, so no row is empty.

On a GPU the pass is FlexAttention (Dong et al. 2024, arXiv 2412.05496), compiled, which leaves out
blocks of pairs that the window hides. On a CPU FlexAttention has no backward; there its twin makes
all pairs, with the same arithmetic: products in the type of its inputs, softmax in fp32 or wider.
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

# Kernels of one process: passes differ in length, widths, and whether there is a backward. torch's
# own limit is 8, which two windows with a statistic come close to.
MOST_KERNELS = 64


def window_attention(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Context BNTE in the type of v, and log Σ exp of the row's scaled scores, BNT, in fp32 or wider.

    Both are differentiable.
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
    """The pass by ``kernel``, a form of ``flex_attention``."""
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
    seen = torch.ones(length, length, dtype=torch.bool, device=q_BNTD.device)
    seen = seen.tril_().triu_(1 - window)
    scores = (q_BNTD @ k_BNTD.mT).to(wide) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v_BNTE.dtype) @ v_BNTE, lse


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Whole or not at all: past its limit of kernels, or at a break in the graph, ``flex_attention``
    would otherwise make all pairs in silence."""
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
        flex_attention, fullgraph=True, dynamic=False
    )
    return compiled


@cache
def _block_mask(window: int, length: int, device: torch.device) -> BlockMask:
    """Made once, for all blocks of a model and all steps."""
    return create_block_mask(_sees(window), None, None, length, length, device=str(device))


def _sees(window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    return sees
