"""One fused kernel per branch, forward and backward: the triton backend.

FlexAttention (Dong et al. 2024, arXiv 2412.05496) computes the compressed and the window branch:
their masks depend on positions alone. The selected branch has kernels of its own (``kernels.py``),
because the blocks of FlexAttention are tiles of queries, which together select almost every block;
another one selects the blocks, from the log-sum-exp of the compressed branch.

B batch, T queries, N heads, K key/value heads, g query heads per key/value head, H head dim, M
keys, n selected blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from gpt2.nsa.cache import BranchKeyValues, KeyValue
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.query_major import MaskSpec
from gpt2.nsa.select import random_blocks

# Queries and keys of a tile of FlexAttention.
_TILE = 128
# Maximum number of compiled FlexAttention kernels per process: passes differ in length, widths and the
# need for a backward. torch's default is 8.
_RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class FusedKernels:
    """Kernels of the branches, which tests replace on a machine without a GPU.

    ``visible``: q BNTH, k BKMH, v, mask and scale → context BNTH and log-sum-exp BNT;
    ``ranked``: q BKTgH, k BKMH, log-sum-exp, mask, scale, tokens of a block and n → blocks BKTn;
    ``selected``: q BKTgH, k BKSH, v, blocks BKTn, tokens of a block and scale → context BKTgH.
    """

    visible: Callable[[Tensor, Tensor, Tensor, MaskSpec, float], tuple[Tensor, Tensor]]
    ranked: Callable[[Tensor, Tensor, Tensor, MaskSpec, float, int, int], Tensor]
    selected: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


@cache
def gpu_kernels() -> FusedKernels | None:
    """Return the kernels of a GPU; None without triton, and in the code of an exported model."""
    try:
        from gpt2.nsa.kernels import attend_blocks, rank_blocks
    except ImportError:
        return None
    return FusedKernels(flex_visible, rank_blocks, attend_blocks)


def attend_fused(
    q_BNTH: Tensor,
    keys: BranchKeyValues,
    options: NsaOptions,
    first: int,
    block: int,
    kernels: FusedKernels,
) -> list[Tensor]:
    """Return the head outputs BNTH of every built branch; the first query is token ``first``.

    ``block`` is the layer index, which seeds random selection.
    """
    length, scale = q_BNTH.shape[2], q_BNTH.shape[-1] ** -0.5
    outputs: list[Tensor] = []
    blocks_BKTn = None
    q_BKTgH = q_BNTH.unflatten(1, (keys.heads, -1)).transpose(2, 3)
    if options.branch_selected:
        # One copy for both kernels that read it.
        q_BKTgH = q_BKTgH.contiguous()
    if options.compresses:
        assert keys.compressed_BKMH
        k_BKMH, *rest = keys.compressed_BKMH
        sight = MaskSpec(length, k_BKMH.shape[2], first, options.compress, options.stride)
        # Ranking alone needs no values.
        v_BKMH = rest[0] if options.branch_compressed else k_BKMH.detach()
        context_BNTH, lse_BNT = _compressed(q_BNTH, (k_BKMH, v_BKMH), sight, scale, kernels)
        if options.branch_compressed:
            outputs.append(context_BNTH)
        if options.ranks:
            sizes = options.select, options.count
            blocks_BKTn = kernels.ranked(q_BKTgH, k_BKMH, lse_BNT, sight, scale, *sizes)
    if keys.selected_BKSH:
        if not options.ranks:
            drawn = random_blocks(options, block, keys.heads, first, length, q_BNTH.device)
            blocks_BKTn = drawn.expand(len(q_BNTH), -1, -1, -1)
        assert blocks_BKTn is not None
        context_BKTgH = kernels.selected(
            q_BKTgH, *keys.selected_BKSH, blocks_BKTn, options.select, scale
        )
        outputs.append(context_BKTgH.transpose(2, 3).flatten(1, 2))
    if keys.window_BKSH:
        k_BKSH, v_BKSH = keys.window_BKSH
        sight = MaskSpec(length, k_BKSH.shape[2], first, window=options.window)
        outputs.append(kernels.visible(q_BNTH, k_BKSH, v_BKSH, sight, scale)[0])
    return outputs


def _compressed(
    q_BNTH: Tensor, blocks: KeyValue, sight: MaskSpec, scale: float, kernels: FusedKernels
) -> tuple[Tensor, Tensor]:
    """Return context and log-sum-exp; 0 and −∞ for queries before the end of the first block."""
    if not sight.complete(sight.first + sight.queries):
        k_BKMH, v_BKMH = blocks
        # Connected to the autograd graph.
        nothing = q_BNTH * 0 + (k_BKMH.sum() + v_BKMH.sum()) * 0
        return nothing, q_BNTH.new_full(q_BNTH.shape[:-1], -torch.inf, dtype=torch.float32)
    return kernels.visible(q_BNTH, *blocks, sight, scale)


def flex_visible(
    q_BNTH: Tensor, k_BKMH: Tensor, v_BKMH: Tensor, sight: MaskSpec, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by compiled FlexAttention; queries without a visible key have the output 0."""
    mask = visible_tiles(sight, str(q_BNTH.device))
    return flex_pass(compiled_flex_attention(), q_BNTH, k_BKMH, v_BKMH, mask, scale)


def flex_pass(
    kernel: Callable[..., tuple[Tensor, AuxOutput]],
    q_BNTH: Tensor,
    k_BKMH: Tensor,
    v_BKMH: Tensor,
    mask: BlockMask,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return context BNTH and log-sum-exp BNT of one pass of ``kernel``, a ``flex_attention``."""
    # Not the kernel for decoding, which torch otherwise takes for fewer than 128 queries, and which
    # has no configuration for some shapes.
    kernel_options = {"BACKEND": "TRITON"} if q_BNTH.is_cuda else None
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        context, aux = kernel(
            q_BNTH,
            k_BKMH,
            v_BKMH,
            block_mask=mask,
            scale=scale,
            enable_gqa=q_BNTH.shape[1] != k_BKMH.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options=kernel_options,
        )
    assert aux.lse is not None
    return context, aux.lse


@cache
def compiled_flex_attention() -> Callable[..., tuple[Tensor, AuxOutput]]:
    """Compile ``flex_attention`` with ``fullgraph=True``.

    Otherwise a graph break, or reaching the recompile limit, would silently fall back to computing
    all pairs.
    """
    # Its result without return_aux has another type.
    attend = cast(Callable[..., tuple[Tensor, AuxOutput]], flex_attention)
    return torch.compile(attend, fullgraph=True, dynamic=False)


@cache
def visible_tiles(sight: MaskSpec, device: str) -> BlockMask:
    """Return the mask of FlexAttention, built from the ranges of tiles.

    ``create_block_mask`` evaluates all pairs, which at 65,536 tokens takes gigabytes.
    """

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        end = torch.div(sight.first + i + 1 - sight.size, sight.stride, rounding_mode="floor")
        return (j <= end) if sight.window is None else (j <= end) & (j > end - sight.window)

    rows, columns = -(-sight.queries // _TILE), -(-sight.keys // _TILE)
    complete = [sight.complete(sight.first + i + 1) for i in range(sight.queries)]
    first_of = [complete[row * _TILE] for row in range(rows)]
    last_of = [complete[min((row + 1) * _TILE, sight.queries) - 1] for row in range(rows)]
    window = sight.keys if sight.window is None else sight.window
    partial, full = (torch.zeros(1, 1, rows, columns, dtype=torch.bool) for _ in range(2))
    for row, (low, high) in enumerate(zip(first_of, last_of, strict=True)):
        # The tile's queries see the keys [low − window, high); all see [high − window, low).
        begin, inner = max(0, low - window) // _TILE, -(-max(0, high - window) // _TILE)
        end, whole = -(-high // _TILE), low // _TILE
        partial[..., row, begin:end] = True
        full[..., row, inner:whole] = True
        partial[..., row, inner:whole] = False
    return BlockMask.from_kv_blocks(
        *_ordered(partial.to(device)),
        *_ordered(full.to(device)),
        BLOCK_SIZE=_TILE,
        mask_mod=visible,
        seq_lengths=(sight.queries, sight.keys),
    )


def _ordered(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen tiles of each row, and the tiles with the chosen ones first."""
    return mask.sum(-1).int(), (~mask).int().argsort(dim=-1, stable=True).int()
