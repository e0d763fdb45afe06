"""Attention to compressed blocks, and what it selects.

B batch, T queries, N heads, K key/value heads, g query heads of one, H head dim, M compressed
blocks, n selected blocks; r the rows of a chunk, c the blocks that its last row sees.

A chunk's weights serve twice: they multiply values, and they rank blocks. Backward computes them
again, so nothing of T·M elements is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.nsa.blocks import score_blocks, select_blocks
from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.rows.parts import HIDDEN

# Scores of a chunk.
CHUNK_ELEMENTS = 1 << 20
# Fewer rows make the matrix products too thin.
FEWEST_ROWS = 32


@dataclass(frozen=True)
class _Rows:
    """Rows [start, stop) of the queries; the first of them is token ``first``."""

    start: int
    stop: int
    first: int

    def visible(self, options: NsaOptions) -> int:
        """Compressed blocks that the last row sees."""
        return options.compressed(self.first + self.stop - self.start)


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
    chosen = (
        _ranked(_weights(q_BKgTH, k_BKMH, options, rows), options, rows)
        for rows in _chunks(q_BKgTH, k_BKMH, first)
    )
    return torch.cat(list(chosen), 2)


class _Compressed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: NsaOptions, first: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.options, ctx.first = options, first
        context = torch.empty_like(q)
        chosen = []
        for rows in _chunks(q, k, first):
            weights_BKgrc = _weights(q, k, options, rows)
            seen = slice(0, weights_BKgrc.shape[-1])
            context[..., rows.start : rows.stop, :] = _product(
                weights_BKgrc.to(v.dtype), v[:, :, seen]
            )
            if options.ranks:
                chosen.append(_ranked(weights_BKgrc, options, rows))
        chosen_BKTn = torch.cat(chosen, 2) if chosen else q.new_empty(0, dtype=torch.long)
        ctx.mark_non_differentiable(chosen_BKTn)
        return context, chosen_BKTn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for rows in _chunks(q, k, ctx.first):
            weights_BKgrc = _weights(q, k, ctx.options, rows)
            seen, these = slice(0, weights_BKgrc.shape[-1]), slice(rows.start, rows.stop)
            dout = dcontext[..., these, :].to(q.dtype)
            dv[:, :, seen] += _sum_of_rows(weights_BKgrc.to(q.dtype), dout)
            dweights = _product(dout, v[:, :, seen].mT).to(wide)
            inner = (dweights * weights_BKgrc).sum(-1, keepdim=True)
            dscores = dweights.sub_(inner).mul_(weights_BKgrc).to(q.dtype)
            dq[..., these, :] = _product(dscores, k[:, :, seen])
            dk[:, :, seen] += _sum_of_rows(dscores, q[..., these, :])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _ranked(weights_BKgrc: Tensor, options: NsaOptions, rows: _Rows) -> Tensor:
    """The blocks that a chunk's rows select, BKrn."""
    blocks = -(-(rows.first + rows.stop - rows.start) // options.select)
    return select_blocks(score_blocks(weights_BKgrc, options, blocks), options, rows.first)


def _chunks(q_BKgTH: Tensor, k_BKMH: Tensor, first: int) -> Iterator[_Rows]:
    length, columns = q_BKgTH.shape[3], max(1, k_BKMH.shape[2])
    row = q_BKgTH.shape[:3].numel() * columns
    height = max(FEWEST_ROWS, CHUNK_ELEMENTS // row)
    for start in range(0, length, height):
        yield _Rows(start, min(start + height, length), first + start)


def _weights(q_BKgTH: Tensor, k_BKMH: Tensor, options: NsaOptions, rows: _Rows) -> Tensor:
    """The softmax over visible blocks, BKgrc in fp32 or wider; 0 in rows that see none."""
    wide = torch.promote_types(q_BKgTH.dtype, torch.float32)
    count = rows.visible(options)
    scores = _product(q_BKgTH[..., rows.start : rows.stop, :], k_BKMH[:, :, :count].mT).to(wide)
    # Hidden before the softmax: a later block must not change how earlier ones compare.
    always = options.compressed(rows.first + 1)
    ends_c = torch.arange(always, count, device=scores.device) * options.stride + options.compress
    tokens_r1 = torch.arange(rows.first, rows.first + rows.stop - rows.start, device=scores.device)
    scores[..., always:].masked_fill_(ends_c > tokens_r1[:, None] + 1, HIDDEN)
    weights = scores.softmax(-1)
    blind = max(0, options.compress - 1 - rows.first)
    weights[..., :blind, :] = 0
    return weights


def _product(rows_BKgrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """BKgry. Heads that share a matrix are multiplied as more rows of it, so it is not copied."""
    height = rows_BKgrx.shape[3]
    return (rows_BKgrx.flatten(2, 3) @ shared_BKxy).unflatten(2, (-1, height))


def _sum_of_rows(left_BKgrx: Tensor, right_BKgry: Tensor) -> Tensor:
    """BKxy: Σ over heads and rows of left · right."""
    return left_BKgrx.flatten(2, 3).mT @ right_BKgry.flatten(2, 3)
