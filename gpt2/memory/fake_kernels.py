"""Attention kernels of a GPU, replaced by kernels that only count FLOPs.

Each saves the tensors that the GPU's kernel saves for backward.

B batch, T queries, S tokens, N heads, K key/value heads, g query heads per key/value head, D width of
queries and keys, E width of values, H head dim, n selected blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.triton import TileLaunch, TileSpec
from gpt2.memory.tracker import StorageTracker
from gpt2.nsa.branches import FusedKernels
from gpt2.nsa.lists import ListChunk, queries_by_block, query_chunks
from gpt2.nsa.options import selected_pairs
from gpt2.nsa.query_major import MaskSpec

# Queries and keys of a tile, which is computed or skipped as a whole.
_SIDE = 64


def fake_nsa_kernels(tracker: StorageTracker) -> FusedKernels:
    """Return the fused kernels of native sparse attention, added to ``tracker``."""

    def band(
        q_BTKgH: Tensor, k_BMKH: Tensor, v_BMKH: Tensor, sight: MaskSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        qkv = (x.contiguous() for x in (q_BTKgH, k_BMKH, v_BMKH))
        outputs: tuple[Tensor, Tensor] = _BandPass.apply(tracker, *qkv, sight)
        return outputs

    def ranked(
        q_BTKgH: Tensor,
        k_BMKH: Tensor,
        logsums_BTKg: Tensor,
        sight: MaskSpec,
        scale: float,
        size: int,
        count: int,
    ) -> Tensor:
        batch, length, heads = q_BTKgH.shape[:3]
        blocks = q_BTKgH.new_empty(batch, heads, length, count, dtype=torch.int64)
        pairs = sum(sight.complete(sight.first + t + 1) for t in range(sight.queries))
        # A compressed block is multiplied once for each selected block with a token of it.
        visits = (size + sight.size - sight.stride) / size
        tracker.compute(2.0 * visits * pairs * q_BTKgH.numel() / sight.queries)
        return blocks

    def selected(
        q_BTKgH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        blocks_BKTn: Tensor,
        size: int,
        scale: float,
    ) -> Tensor:
        qkv = (x.contiguous() for x in (q_BTKgH, k_BSKH, v_BSKH))
        context: Tensor = _SelectedPass.apply(tracker, *qkv, blocks_BKTn.contiguous(), size)
        return context

    return FusedKernels(band, ranked, selected)


def fake_tile_launch(tracker: StorageTracker) -> TileLaunch:
    """Return a replacement for ``triton_launch`` that adds the kernels to ``tracker``."""

    def launch(name: str, spec: TileSpec, tensors: Mapping[str, Tensor | None]) -> None:
        present = {key: x for key, x in tensors.items() if x is not None}
        q = present["q"]
        batch, heads, length, width = q.shape
        sight = MaskSpec(length, length, 0, window=min(spec.window, length))
        pairs = tile_pairs(sight)
        near = 0
        if spec.band >= 0:
            window = min(spec.window, spec.band + 1, length)
            near = tile_pairs(MaskSpec(length, length, 0, window=window))
        values, mean = "v" in present, "dmean" in present
        # The products of all pairs, and those of the band: the transposed scores, and their gradients.
        products, banded = {
            "forward": (1 + values, 1),
            "row_gradients": (2 + values + mean, 2 + mean),
            "column_gradients": (2 + 2 * values, 2),
            "mean_weights": (1, 1),
        }[name]
        tracker.compute(2.0 * batch * heads * width * (products * pairs + banded * near))

    return launch


def tile_pairs(sight: MaskSpec, side: int = _SIDE) -> int:
    """Return the number of pairs in tiles in which any query sees any key."""
    tiles = 0
    for start in range(0, sight.queries, side):
        first, last = sight.first + start, sight.first + min(start + side, sight.queries)
        if end := sight.complete(last):
            tiles += -(-end // side) - sight.begin(first + 1) // side
    return tiles * side**2


class _BandPass(torch.autograd.Function):
    """The band launches of ``gpt2/nsa/fused.py``, with the same work beside them."""

    @staticmethod
    def forward(
        ctx: Any, tracker: StorageTracker, q: Tensor, k: Tensor, v: Tensor, sight: MaskSpec
    ) -> tuple[Tensor, Tensor]:
        context = torch.empty_like(q)
        logsums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, context, logsums)
        ctx.mark_non_differentiable(logsums)
        ctx.tracker, ctx.product = tracker, 2.0 * q.numel() / sight.queries * tile_pairs(sight)
        # q kᵀ and p v.
        tracker.compute(2 * ctx.product)
        return context, logsums

    @staticmethod
    def backward(ctx: Any, dcontext: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, logsums = ctx.saved_tensors
        dcontext = dcontext.contiguous()
        inner = torch.empty_like(logsums)
        # One pass computes dq, another dk and dv; each recomputes scores and do vᵀ.
        ctx.tracker.compute(7 * ctx.product)
        partial = k.new_empty(2, *k.shape, dtype=torch.float32)
        gradients = None, *(torch.empty_like(x) for x in (q, k, v)), None
        del inner, partial
        return gradients


class _SelectedPass(torch.autograd.Function):
    """The block launches of ``gpt2/nsa/fused.py``, with the same work beside them."""

    @staticmethod
    def forward(
        ctx: Any,
        tracker: StorageTracker,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        size: int,
    ) -> Tensor:
        length = q.shape[1]
        context = torch.empty_like(q)
        logsums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        total = -(-k.shape[1] // size)
        ctx.chunks, rows = query_chunks(q, blocks, total)
        lists = queries_by_block(blocks, total, rows)
        ctx.save_for_backward(q, k, v, blocks, *lists, context, logsums)
        ctx.tracker, ctx.size = tracker, size
        # FLOPs of one product.
        ctx.product = 2.0 * q.numel() / length * selected_pairs(length, size, blocks.shape[-1])
        for chunk in ctx.chunks:
            partial = _partial(q, blocks, chunk)
            del partial
        tracker.compute(2 * ctx.product)
        return context

    @staticmethod
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks, *_, logsums = ctx.saved_tensors
        dcontext = dcontext.contiguous()
        inner, dq = torch.empty_like(logsums), torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        ctx.tracker.compute(5 * ctx.product)
        for chunk in ctx.chunks:
            shape = 2, chunk.segments, ctx.size, k.shape[-1]
            partial = _partial(q, blocks, chunk), k.new_empty(shape, dtype=torch.float32)
            del partial
        del inner
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _partial(q_BTKgH: Tensor, blocks_BKTn: Tensor, chunk: ListChunk) -> Tensor:
    """Return a partial result of every query of a chunk for each of its blocks."""
    batch, heads, _, count = blocks_BKTn.shape
    return q_BTKgH.new_empty(batch * heads * chunk.length * count, *q_BTKgH.shape[3:])
