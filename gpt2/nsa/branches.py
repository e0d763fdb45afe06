"""Attention of the three branches, by the backend of the device.

A CPU computes them block by block, a GPU by Triton kernels; ``gather`` is the selected branch of a
GPU without them.

B batch, T tokens (queries), S tokens (keys), N heads, K key/value heads, g = N/K query heads per
key/value head, H head dim, M compressed blocks, n selected blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gpt2.nsa import block_major
from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.gather import RowPacking, attend_gathered, packs_rows
from gpt2.nsa.options import NsaOptions, merges_ranges, resolve_backend
from gpt2.nsa.query_major import MaskSpec, attend_chunks
from gpt2.nsa.select import attend_compressed, chosen_blocks
from lib.errors import PreflightError, Problem


@dataclass(frozen=True)
class FusedKernels:
    """Kernels of the branches on a GPU, which tests replace on a machine without one.

    ``band``: q BTKgH, k BMKH, v, mask and scale → context BTKgH and log₂-sums BTKg;
    ``ranked``: q, k, log₂-sums, mask, scale, tokens of a block and n → blocks BKTn;
    ``selected``: q, k BSKH, v, blocks BKTn, tokens of a block and scale → context BTKgH.
    """

    band: Callable[[Tensor, Tensor, Tensor, MaskSpec, float], tuple[Tensor, Tensor]]
    ranked: Callable[[Tensor, Tensor, Tensor, MaskSpec, float, int, int], Tensor]
    selected: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


@cache
def gpu_kernels() -> FusedKernels | None:
    """Return the kernels of a GPU; None without triton, and in the code of an exported model."""
    try:
        from gpt2.nsa.fused import attend_band, attend_blocks, rank_blocks
    except ImportError:
        return None
    return FusedKernels(attend_band, rank_blocks, attend_blocks)


def attend_branches(
    q_BNTH: Tensor,
    keys: BranchKeyValues,
    options: NsaOptions,
    first: int,
    block: int = 0,
    packs: RowPacking = packs_rows,
    fused: FusedKernels | None = None,
) -> list[Tensor]:
    """Return the head outputs BNTH of every built branch; the first query is token ``first``.

    ``block`` is the layer index, which seeds random selection. ``packs`` and ``fused`` replace the
    choices of the device.
    """
    outputs: list[Tensor] = []
    blocks_BKTn: Tensor | None = None
    backend = "triton" if fused else _backend(options, q_BNTH)
    with torch.autocast(q_BNTH.device.type, enabled=False):
        if backend == "triton" and (kernels := fused or gpu_kernels()):
            return attend_fused(q_BNTH, keys, options, first, block, kernels)
        q_BKgTH = (q_BNTH * q_BNTH.shape[-1] ** -0.5).unflatten(1, (keys.heads, -1))
        if options.branch_compressed:
            assert keys.compressed_BKMH
            k_BKMH, v_BKMH = keys.compressed_BKMH
            compressed, blocks_BKTn = attend_compressed(q_BKgTH, k_BKMH, v_BKMH, options, first)
            outputs.append(compressed.flatten(1, 2))
        if keys.selected_BKSH:
            if blocks_BKTn is None:
                ranking = q_BKgTH, keys.compressed_BKMH
                blocks_BKTn = chosen_blocks(*ranking, options, first, block)
            by_token = q_BKgTH.transpose(2, 3)
            inputs = (by_token, *keys.selected_BKSH, blocks_BKTn, options.select)
            if backend == "blocks":
                selected = attend_selected(*inputs)
            else:
                merged = merges_ranges(options, keys.selected_BKSH[0].shape[2])
                selected = attend_gathered(*inputs, merged, packs)
            outputs.append(selected.transpose(2, 3).flatten(1, 2))
        if keys.window_BKSH:
            # All branches share one query tensor, so that autograd saves a single copy.
            outputs.append(attend_window(q_BKgTH.flatten(1, 2), *keys.window_BKSH, options.window))
    return outputs


def attend_fused(
    q_BNTH: Tensor,
    keys: BranchKeyValues,
    options: NsaOptions,
    first: int,
    block: int,
    kernels: FusedKernels,
) -> list[Tensor]:
    """Return the outputs of ``attend_branches`` by kernels on tensors ordered by token."""
    length, scale = q_BNTH.shape[2], q_BNTH.shape[-1] ** -0.5
    q_BTKgH = q_BNTH.transpose(1, 2).unflatten(2, (keys.heads, -1)).contiguous()
    contexts: list[Tensor] = []
    blocks_BKTn = None
    if options.compresses:
        assert keys.compressed_BKMH
        k_BMKH, *rest = (x.transpose(1, 2) for x in keys.compressed_BKMH)
        sight = MaskSpec(length, k_BMKH.shape[1], first, options.compress, options.stride)
        # Ranking alone needs no values, and has no gradient.
        attended = (q_BTKgH, k_BMKH, rest[0]) if rest else (q_BTKgH.detach(), k_BMKH, k_BMKH)
        context_BTKgH, logsums_BTKg = kernels.band(*attended, sight, scale)
        if options.branch_compressed:
            contexts.append(context_BTKgH)
        if options.ranks:
            sizes = options.select, options.count
            blocks_BKTn = kernels.ranked(q_BTKgH, k_BMKH, logsums_BTKg, sight, scale, *sizes)
    if keys.selected_BKSH:
        if blocks_BKTn is None:
            blocks_BKTn = chosen_blocks(q_BTKgH.permute(0, 2, 3, 1, 4), None, options, first, block)
        k_BSKH, v_BSKH = (x.transpose(1, 2) for x in keys.selected_BKSH)
        sizes = options.select, scale
        contexts.append(kernels.selected(q_BTKgH, k_BSKH, v_BSKH, blocks_BKTn, *sizes))
    if keys.window_BKSH:
        k_BSKH, v_BSKH = (x.transpose(1, 2) for x in keys.window_BKSH)
        sight = MaskSpec(length, k_BSKH.shape[1], first, window=options.window)
        contexts.append(kernels.band(q_BTKgH, k_BSKH, v_BSKH, sight, scale)[0])
    return [context_BTKgH.flatten(2, 3).transpose(1, 2) for context_BTKgH in contexts]


def attend_window(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int) -> Tensor:
    """Return attention BNTH to the last ``window`` tokens; q is divided by √H."""
    q_BKgTH = q_BNTH.unflatten(1, (k_BKSH.shape[1], -1))
    queries, tokens = q_BNTH.shape[2], k_BKSH.shape[2]
    sight = MaskSpec(queries, tokens, tokens - queries, window=window)
    q, k, v = (x.contiguous() for x in (q_BKgTH, k_BKSH, v_BKSH))
    return attend_chunks(q, k, v, sight).flatten(1, 2)


def attend_selected(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> Tensor:
    """Return attention BKTgH to blocks of ``size`` tokens, −1 for none; q is divided by √H.

    The last query belongs to the last token; every query has selected its own block.
    """
    qkv = (x.contiguous() for x in (q_BKTgH.transpose(2, 3), k_BKSH, v_BKSH))
    context_BKgTH, _ = block_major.selected(*qkv, blocks_BKTn, size)
    return context_BKgTH.transpose(2, 3)


def _backend(options: NsaOptions, q_BNTH: Tensor) -> str:
    """Return the backend; fused kernels lack float64, and an exported model lacks them."""
    backend = resolve_backend(options, q_BNTH.device.type)
    if backend != "triton" or (q_BNTH.dtype != torch.float64 and gpu_kernels()):
        return backend
    if options.backend == "triton":
        what = "NSA_BACKEND: triton cannot compute in float64"
        raise PreflightError(Problem(what, code="gpu.unsupported"))
    return "gather"
