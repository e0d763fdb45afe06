"""Launches of the Triton kernels, and their gradients: the triton backend. Requires triton.

B batch, K key/value heads, T queries, S tokens, g query heads per key/value head, H head dim, n
selected blocks, M keys of a band, t queries of a chunk.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.nsa.kernels import KERNELS, tile_constants
from gpt2.nsa.lists import SEGMENT, ListChunk, queries_by_block, query_chunks
from gpt2.nsa.query_major import MaskSpec

# Keys of a tile of a band.
_KEYS = 64
# Blocks that are sorted at once to be ranked.
_LANES = 16
_LOG2_E = math.log2(math.e)


def run(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    KERNELS[kernel][grid](*arguments, **constants)


def attend_band(
    q_BTKgH: Tensor, k_BMKH: Tensor, v_BMKH: Tensor, sight: MaskSpec, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention BTKgH to the keys in ``sight``, 0 without any, and log₂-sums BTKg."""
    qkv = (x.contiguous() for x in (q_BTKgH, k_BMKH, v_BMKH))
    outputs: tuple[Tensor, Tensor] = _BandAttention.apply(*qkv, sight, scale)
    return outputs


@torch.no_grad()
def rank_blocks(
    q_BTKgH: Tensor,
    k_BMKH: Tensor,
    logsums_BTKg: Tensor,
    sight: MaskSpec,
    scale: float,
    size: int,
    count: int,
) -> Tensor:
    """Return the blocks BKTn that ``score_blocks`` and ``select_blocks`` rank; a NaN affects only
    the queries that see it. ``logsums_BTKg`` are those of ``attend_band``.
    """
    q, k = q_BTKgH.contiguous(), k_BMKH.contiguous()
    batch, length, heads, group, width = q.shape
    blocks = q.new_empty(batch, heads, length, count, dtype=torch.int64)
    tile = tile_constants("rank", q) | {"L": triton.next_power_of_2(max(count, _LANES))}
    run(
        "rank", (triton.cdiv(length, tile["QUERIES"]), batch * heads),
        q, k, logsums_BTKg, blocks, scale * _LOG2_E, length, k.shape[1], heads, sight.first,
        group, width, count, size, sight.size, sight.stride, **tile,
    )  # fmt: skip
    return blocks


def attend_blocks(
    q_BTKgH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, blocks_BKTn: Tensor, size: int, scale: float
) -> Tensor:
    """Return attention BTKgH to the selected blocks of ``size`` tokens, −1 for none, of which every
    query has one with a visible token; the last query belongs to the last token.
    """
    qkv = (x.contiguous() for x in (q_BTKgH, k_BSKH, v_BSKH))
    context: Tensor = _BlockAttention.apply(*qkv, blocks_BKTn.contiguous(), size, scale)
    return context


class _BandAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: MaskSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        batch, length, heads, group, width = q.shape
        context = torch.empty_like(q)
        logsums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        tile = tile_constants("band_forward", q, _KEYS)
        run(
            "band_forward", (triton.cdiv(length, tile["QUERIES"]), batch * heads),
            q, k, v, context, logsums, scale * _LOG2_E, length, k.shape[1], heads, sight.first,
            group, width, sight.size, sight.stride, sight.window or 0, **tile,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, context, logsums)
        ctx.settings = sight, scale
        ctx.mark_non_differentiable(logsums)
        return context, logsums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsums = ctx.saved_tensors
        sight, scale = ctx.settings
        batch, length, heads, group, width = q.shape
        keys, dcontext = k.shape[1], dcontext.contiguous()
        inner, dq = _inner(context, dcontext), torch.empty_like(q)
        band = sight.size, sight.stride, sight.window or 0
        tile = tile_constants("band_query_gradients", q, _KEYS)
        run(
            "band_query_gradients", (triton.cdiv(length, tile["QUERIES"]), batch * heads),
            q, k, v, dcontext, logsums, inner, dq, scale, scale * _LOG2_E, length, keys, heads,
            sight.first, group, width, *band, **tile,
        )  # fmt: skip
        tiles = triton.cdiv(keys, _KEYS)
        if not tiles:
            return dq, torch.zeros_like(k), torch.zeros_like(v), None, None
        # The queries that see a key of a tile, split into enough programs for a GPU.
        reach = length
        if sight.window is not None:
            reach = min(length, (_KEYS - 1 + sight.window) * sight.stride + 1)
        share = max(64, triton.next_power_of_2(length * tiles * batch * heads // 1024))
        splits = triton.cdiv(reach, min(reach, share))
        shape = 2, batch * heads, tiles, splits, _KEYS, width
        partial_k, partial_v = q.new_empty(shape, dtype=torch.float32)
        run(
            "key_gradients", (tiles, splits, batch * heads),
            q, k, v, dcontext, logsums, inner, inner, inner, inner, inner,
            inner, partial_k, partial_v, scale * _LOG2_E, length, keys, heads, sight.first,
            tiles, batch * heads, 0, 0, 0, 0, min(reach, share), group, width, 1, *band, _KEYS, False,
            **tile_constants("key_gradients", q, _KEYS), SEGMENT=SEGMENT,
        )  # fmt: skip
        dk, dv = (
            x.sum(2).view(batch, heads, -1, width)[:, :, :keys].transpose(1, 2)
            for x in (partial_k, partial_v)
        )
        return dq, dk.mul_(scale).to(k.dtype), dv.to(v.dtype), None, None


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, scale: float
    ) -> Tensor:
        group, width = q.shape[3:]
        context = torch.empty_like(q)
        logsums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        total = triton.cdiv(k.shape[1], size)
        chunks, rows = query_chunks(q, blocks, total)
        lists = queries_by_block(blocks, total, rows)
        tile = tile_constants("block_forward", q, size)
        for chunk in chunks:
            partial = _parts(q, blocks, chunk)
            partial_logsums = partial.new_empty(partial.shape[:-1], dtype=torch.float32)
            run(
                "block_forward", (chunk.segments,),
                q, k, v, *lists, partial, partial_logsums, scale * _LOG2_E,
                *_block_sizes(q, k, size), chunk.first_owner, chunk.stop_owner, chunk.start,
                chunk.length, group, width, blocks.shape[-1], size, **tile, SEGMENT=SEGMENT,
            )  # fmt: skip
            _combine(partial, partial_logsums, blocks, context, logsums, chunk)
        ctx.save_for_backward(q, k, v, blocks, *lists, context, logsums)
        ctx.settings = size, scale, chunks
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks, *lists, context, logsums = ctx.saved_tensors
        size, scale, chunks = ctx.settings
        (heads, group, width), tokens = q.shape[2:], k.shape[1]
        dcontext = dcontext.contiguous()
        inner, dq = _inner(context, dcontext), torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        tile = tile_constants("key_gradients", q, size)
        for chunk in chunks:
            partial = _parts(q, blocks, chunk)
            partial_k, partial_v = k.new_empty(2, chunk.segments, size, width, dtype=torch.float32)
            length, _, _, total, pairs = _block_sizes(q, k, size)
            owners = chunk.first_owner, chunk.stop_owner
            run(
                "key_gradients", (chunk.segments,),
                q, k, v, dcontext, logsums, inner, *lists, partial, partial_k, partial_v,
                scale * _LOG2_E, length, tokens, heads, tokens - length, total, pairs, *owners,
                chunk.start, chunk.length, 0, group, width, blocks.shape[-1], 1, 1, 0, size, True,
                **tile, SEGMENT=SEGMENT,
            )  # fmt: skip
            _combine(partial, None, blocks, dq, logsums, chunk, scale)
            run(
                "reduce", (total, pairs), partial_k, partial_v, lists[2], dk, dv, tokens, heads,
                *owners, scale, width, size, P=tile["P"], C=tile["C"], num_warps=8,
            )  # fmt: skip
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _block_sizes(q: Tensor, k: Tensor, size: int) -> tuple[int, int, int, int, int]:
    """Return T, S, K, the blocks of a key head, and the number of key heads of all sequences."""
    batch, length, heads = q.shape[:3]
    return length, k.shape[1], heads, triton.cdiv(k.shape[1], size), batch * heads


def _parts(q: Tensor, blocks: Tensor, chunk: ListChunk) -> Tensor:
    """Return an uninitialized vector for each query head of each list entry of a chunk."""
    batch, heads, _, count = blocks.shape
    return q.new_empty(batch * heads * chunk.length * count, *q.shape[3:])


def _inner(context: Tensor, dcontext: Tensor) -> Tensor:
    """Return Σ do·o of every row, in fp32."""
    inner = context.new_empty(context.shape[:-1], dtype=torch.float32)
    width, rows = context.shape[-1], 64
    run(
        "inner_products", (triton.cdiv(inner.numel(), rows),), context, dcontext, inner,
        inner.numel(), width, P=triton.next_power_of_2(width), ROWS=rows,
    )  # fmt: skip
    return inner


def _combine(
    partial: Tensor,
    partial_logsums: Tensor | None,
    blocks_BKTn: Tensor,
    out_BTKgH: Tensor,
    logsums_BTKg: Tensor,
    chunk: ListChunk,
    scale: float = 1.0,
) -> None:
    """Write the weighted mean of the partial contexts of each query, or the sum of its gradients."""
    batch, length, heads, group, width = out_BTKgH.shape
    count = blocks_BKTn.shape[-1]
    run(
        "combine", (chunk.length, batch * heads),
        partial, logsums_BTKg if partial_logsums is None else partial_logsums, blocks_BKTn,
        out_BTKgH, logsums_BTKg, scale, length, heads, chunk.start,
        group, width, count, partial_logsums is not None,
        G=triton.next_power_of_2(group), P=triton.next_power_of_2(width),
        L=triton.next_power_of_2(count), num_warps=2,
    )  # fmt: skip
