"""Attention kernels of a GPU, replaced by kernels that only count FLOPs.

Each saves the tensors that the GPU's kernel saves for backward.

B batch, T queries, S tokens, N heads, K key/value heads, g query heads per key/value head, D width of
queries and keys, E width of values, H head dim, n selected blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.tiled import TileLaunch, TileSpec
from gpt2.memory.tracker import StorageTracker
from gpt2.nsa.fused import FusedKernels
from gpt2.nsa.options import selected_pairs
from gpt2.nsa.query_major import MaskSpec
from gpt2.nsa.select import SEGMENT, queries_by_block, segment_owners

# Queries and keys of a tile of FlexAttention, which it computes or skips as a whole.
TILE = 128
# Rows and columns of a tile of ``tile_kernels.py``.
_SIDE = 64


def fake_nsa_kernels(tracker: StorageTracker) -> FusedKernels:
    """Return the fused kernels of native sparse attention, added to ``tracker``."""

    def visible(
        q_BNTH: Tensor, k_BKMH: Tensor, v_BKMH: Tensor, sight: MaskSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = _FlexPass.apply(tracker, q_BNTH, k_BKMH, v_BKMH, sight)
        return outputs

    def ranked(
        q_BKTgH: Tensor,
        k_BKMH: Tensor,
        lse_BNT: Tensor,
        sight: MaskSpec,
        scale: float,
        size: int,
        count: int,
    ) -> Tensor:
        blocks = q_BKTgH.new_empty(*q_BKTgH.shape[:3], count, dtype=torch.int64)
        pairs = sum(sight.complete(sight.first + t + 1) for t in range(sight.queries))
        # A compressed block is multiplied once for each selected block with a token of it.
        visits = (size + sight.size - sight.stride) / size
        tracker.compute(2.0 * visits * pairs * q_BKTgH.numel() / sight.queries)
        return blocks

    def selected(
        q_BKTgH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        blocks_BKTn: Tensor,
        size: int,
        scale: float,
    ) -> Tensor:
        qkv = (x.contiguous() for x in (q_BKTgH, k_BKSH, v_BKSH))
        context: Tensor = _SelectedPass.apply(tracker, *qkv, blocks_BKTn.contiguous(), size)
        return context

    return FusedKernels(visible, ranked, selected)


def fake_tile_launch(tracker: StorageTracker) -> TileLaunch:
    """Return a replacement for ``triton_launch`` that adds the kernels to ``tracker``."""

    def launch(name: str, spec: TileSpec, tensors: Mapping[str, Tensor | None]) -> None:
        present = {key: x for key, x in tensors.items() if x is not None}
        q = present["q"]
        batch, heads, length, width = q.shape
        sight = MaskSpec(length, length, 0, window=min(spec.window, length))
        pairs = tile_pairs(sight, _SIDE)
        near = 0
        if spec.band >= 0:
            window = min(spec.window, spec.band + 1, length)
            near = tile_pairs(MaskSpec(length, length, 0, window=window), _SIDE)
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


def tile_pairs(sight: MaskSpec, side: int = TILE) -> int:
    """Return the number of pairs in tiles in which any query sees any key."""
    tiles = 0
    for start in range(0, sight.queries, side):
        first, last = sight.first + start, sight.first + min(start + side, sight.queries)
        if end := sight.complete(last):
            tiles += -(-end // side) - sight.begin(first + 1) // side
    return tiles * side**2


class _FlexPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tracker: StorageTracker, q: Tensor, k: Tensor, v: Tensor, sight: MaskSpec
    ) -> tuple[Tensor, Tensor]:
        batch, heads, length, width = q.shape
        context = q.new_empty(batch, heads, length, v.shape[-1], dtype=v.dtype)
        lse = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, context, lse)
        ctx.tracker, ctx.pairs = tracker, batch * heads * tile_pairs(sight)
        # q kᵀ and p v.
        tracker.compute(2.0 * ctx.pairs * (width + v.shape[-1]))
        return context, lse

    @staticmethod
    def backward(ctx: Any, dcontext: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        # Σ do·o of every query, in fp32.
        delta = torch.empty_like(lse)
        # One pass computes dq, another dk and dv; each recomputes scores and do vᵀ.
        ctx.tracker.compute(2.0 * ctx.pairs * (4 * q.shape[-1] + 3 * v.shape[-1]))
        gradients = None, *(torch.empty_like(x) for x in (q, k, v)), None
        del delta
        return gradients


class _SelectedPass(torch.autograd.Function):
    """The launches of ``gpt2/nsa/kernels.py``, with the same work beside them."""

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
        length, width = q.shape[2], q.shape[-1]
        context = torch.empty_like(q)
        logsums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, blocks, context, logsums)
        ctx.tracker, ctx.size = tracker, size
        rows = q.numel() // (length * width)
        # FLOPs of one product.
        ctx.product = 2.0 * rows * width * selected_pairs(length, size, blocks.shape[-1])
        tracker.compute(2 * ctx.product)
        return context

    @staticmethod
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks, _, logsums = ctx.saved_tensors
        tokens, width = k.shape[2:]
        dcontext = dcontext.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        inner = torch.empty_like(logsums)
        ctx.tracker.compute(3 * ctx.product)
        _, _, segments = queries_by_block(blocks, -(-tokens // ctx.size), q.shape[2], SEGMENT)
        owners = segment_owners(segments, blocks.numel(), SEGMENT)
        partial = k.new_empty(2, len(owners), ctx.size, width, dtype=torch.float32)
        ctx.tracker.compute(4 * ctx.product)
        del inner, partial
        return None, dq, dk, dv, None, None
