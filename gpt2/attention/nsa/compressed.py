"""Attention to compressed blocks, and what it selects.

B batch, T queries, K key/value heads, g query heads of one, H head dim, M compressed blocks, n
selected blocks; r the rows of a chunk, c the blocks that one of them sees.

A chunk's weights serve twice: they multiply values, and they rank blocks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.nsa import by_rows
from gpt2.attention.nsa.blocks import score_blocks, select_blocks
from gpt2.attention.nsa.buffers import heads_of, wide
from gpt2.attention.nsa.by_rows import Chunk, Sight
from gpt2.attention.nsa.options import NsaOptions


def attend_compressed(
    q_BKgTH: Tensor, k_BKMH: Tensor, v_BKMH: Tensor, options: NsaOptions, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Head outputs BKgTH, and the selected blocks BKTn. q is divided by √H.

    Query t is that of token ``first`` + t. It sees the blocks that end with it or before; where
    there are none its output is 0. No block is selected unless ``options.ranks``.
    """
    found: tuple[Tensor, Tensor] = _Compressed.apply(q_BKgTH, k_BKMH, v_BKMH, options, first)
    return found


@torch.no_grad()
def rank_compressed(q_BKgTH: Tensor, k_BKMH: Tensor, options: NsaOptions, first: int = 0) -> Tensor:
    """The selected blocks BKTn of ``attend_compressed``, without its output."""
    # No values: their product costs nothing.
    _, chosen_BKTn = attend_compressed(q_BKgTH, k_BKMH, k_BKMH[..., :0], options, first)
    return chosen_BKTn


class _Compressed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: NsaOptions, first: int
    ) -> tuple[Tensor, Tensor]:
        ctx.sight = Sight(q.shape[3], k.shape[2], first, options.compress, options.stride)
        context = q.new_empty(*q.shape[:-1], v.shape[-1])
        logsums = q.new_empty(q.shape[:-1], dtype=wide(q))
        ranking = _Ranking(options)
        for at in heads_of(k):
            given = (x[at].to(logsums.dtype) for x in (q, k, v))
            show = ranking if options.ranks else None
            by_rows.forward(*given, ctx.sight, context[at], logsums[at], show)
        ctx.save_for_backward(q, k, v, context, logsums)
        chosen = ranking.chosen_BKTn(*k.shape[:2]) if options.ranks else q.new_empty(0).long()
        ctx.mark_non_differentiable(chosen)
        return context, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for at in heads_of(k):
            given = (x[at].to(logsums.dtype) for x in (dcontext, q, k, v, context, logsums))
            dk[at], dv[at] = by_rows.backward(*given, ctx.sight, dq[at])
        return dq, dk, dv, None, None


class _Ranking:
    """Ranks blocks by the weights of each chunk that it is shown."""

    def __init__(self, options: NsaOptions) -> None:
        self.options = options
        self.found_rn: list[Tensor] = []

    def __call__(self, chunk: Chunk, weights_grc: Tensor) -> None:
        blocks = -(-chunk.last // self.options.select)
        scores_11rJ = score_blocks(weights_grc[None, None], self.options, blocks)
        self.found_rn.append(select_blocks(scores_11rJ, self.options, chunk.first)[0, 0])

    def chosen_BKTn(self, batch: int, heads: int) -> Tensor:
        """Of all chunks."""
        return torch.cat(self.found_rn).view(batch, heads, -1, self.options.count)
