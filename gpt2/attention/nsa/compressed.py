"""Attention to compressed blocks, and the block selection derived from its weights.

B batch, T queries, K key/value heads, g query heads per key/value head, H head dim, M compressed
blocks, n selected blocks; r the rows of a chunk, c the blocks that any row of the chunk sees.

The weights of a chunk are used twice: to weight the values and to rank selection blocks.
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
    """Return the head outputs BKgTH and the selected blocks BKTn.

    q must be divided by √H already. Query t belongs to token ``first`` + t and sees the blocks that
    end at or before this token; the output is 0 if there are none. Blocks are selected only if
    ``options.ranks``.
    """
    outputs: tuple[Tensor, Tensor] = _Compressed.apply(q_BKgTH, k_BKMH, v_BKMH, options, first)
    return outputs


@torch.no_grad()
def rank_compressed(q_BKgTH: Tensor, k_BKMH: Tensor, options: NsaOptions, first: int = 0) -> Tensor:
    """Return the selected blocks BKTn of ``attend_compressed``, without the head outputs."""
    # Values of width 0, so that the product with the weights costs nothing.
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
        for index in heads_of(k):
            qkv = (x[index].to(logsums.dtype) for x in (q, k, v))
            show = ranking if options.ranks else None
            by_rows.forward(*qkv, ctx.sight, context[index], logsums[index], show)
        ctx.save_for_backward(q, k, v, context, logsums)
        chosen = ranking.chosen_BKTn(*k.shape[:2]) if options.ranks else q.new_empty(0).long()
        ctx.mark_non_differentiable(chosen)
        return context, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for index in heads_of(k):
            inputs = (x[index].to(logsums.dtype) for x in (dcontext, q, k, v, context, logsums))
            dk[index], dv[index] = by_rows.backward(*inputs, ctx.sight, dq[index])
        return dq, dk, dv, None, None


class _Ranking:
    """Callback that selects blocks from the attention weights of each chunk."""

    def __init__(self, options: NsaOptions) -> None:
        self.options = options
        self.chosen_rn: list[Tensor] = []

    def __call__(self, chunk: Chunk, weights_grc: Tensor) -> None:
        blocks = -(-chunk.last // self.options.select)
        scores_11rJ = score_blocks(weights_grc[None, None], self.options, blocks)
        self.chosen_rn.append(select_blocks(scores_11rJ, self.options, chunk.first)[0, 0])

    def chosen_BKTn(self, batch: int, heads: int) -> Tensor:
        """Return the selected blocks of all chunks, BKTn."""
        return torch.cat(self.chosen_rn).view(batch, heads, -1, self.options.count)
