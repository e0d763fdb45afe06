"""Gather backend of the selected branch: for every query, the visible keys of a group of heads.

FlashAttention (Dao 2023, arXiv 2307.08691) processes the packed rows if it is available; otherwise
they are padded and masked. Backward gathers again. Every query selects as many blocks as it sees,
at most n, so no size is read from a tensor.

B batch, T queries, S tokens, K key/value heads, g query heads per key/value head, H head dim, n
selected blocks; r the queries of a chunk, f ranges, c the gathered keys of a chunk, L the largest
number of keys of a query.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.nsa.options import selected_pairs
from gpt2.nsa.query_major import accumulation_dtype, head_indices


def token_ranges(
    blocks_rn: Tensor, tokens_r: Tensor, size: int, merged: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts and ends of the token ranges of queries, in order, and the tokens of a query.

    A range is a selected block, or a run of adjacent blocks if ``merged``. The blocks are in
    ascending order, padded with −1; a query sees its own block up to its token.
    """
    valid_rn = blocks_rn >= 0
    starts_rn = blocks_rn * size
    ends_rn = torch.minimum(starts_rn + size, tokens_r[:, None] + 1)
    lengths_r = (ends_rn - starts_rn).masked_fill_(~valid_rn, 0).sum(1)
    first_rn, last_rn = valid_rn.clone(), valid_rn.clone()
    if merged:
        adjacent = (blocks_rn[:, 1:] == blocks_rn[:, :-1] + 1) & valid_rn[:, :-1]
        first_rn[:, 1:] &= ~adjacent
        last_rn[:, :-1] &= ~adjacent
    # Starts and ends match one to one.
    return starts_rn[first_rn], ends_rn[last_rn], lengths_r


def range_tokens(starts_f: Tensor, ends_f: Tensor, total: int) -> Tensor:
    """Return the ``total`` token indices of all ranges, concatenated, c."""
    sizes_f = ends_f - starts_f
    before_f = sizes_f.cumsum(0) - sizes_f
    offsets_c = (starts_f - before_f).repeat_interleave(sizes_f, output_size=total)
    return torch.arange(total, device=sizes_f.device) + offsets_c


# Largest number of key elements that a chunk gathers.
CHUNK_ELEMENTS = 1 << 24


# Whether queries are packed, given q.
RowPacking = Callable[[Tensor], bool]


def packs_rows(q: Tensor) -> bool:
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and torch.backends.cuda.is_flash_attention_available()


def attend_gathered(
    q_BKTgH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    blocks_BKTn: Tensor,
    size: int,
    merged: bool,
    packs: RowPacking = packs_rows,
) -> Tensor:
    """Return the outputs of ``attend_selected``; ``merged``: adjacent blocks are one range."""
    context: Tensor = _Gathered.apply(q_BKTgH, k_BKSH, v_BKSH, blocks_BKTn, size, merged, packs)
    return context


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        size: int,
        merged: bool,
        packs: RowPacking,
    ) -> Tensor:
        context = torch.empty_like(q)
        for keys in _chunks(q, k, v, blocks, size, merged):
            context[keys.chunk] = _attend(*keys.qkv, keys, packs)
        ctx.save_for_backward(q, k, v, blocks)
        ctx.settings = size, merged, packs
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks = ctx.saved_tensors
        size, merged, packs = ctx.settings
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=accumulation_dtype(x)) for x in (k, v))
        for keys in _chunks(q, k, v, blocks, size, merged):
            with torch.enable_grad():
                q_rgH, k_cH, v_cH = leaves = [x.detach().requires_grad_() for x in keys.qkv]
                out = _attend(q_rgH, k_cH, v_cH, keys, packs)
            dq[keys.chunk], *gradients = torch.autograd.grad(out, leaves, dcontext[keys.chunk])
            for sums, gradient in zip((dk, dv), gradients, strict=True):
                sums[keys.chunk[:2]].index_add_(0, keys.tokens_c, gradient.to(sums.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class GatheredKeys(NamedTuple):
    """A sequence, a key head and queries of it, with the tokens that they see, ordered by query.

    ``longest`` is the largest of the lengths.
    """

    chunk: tuple[int, int, slice]
    qkv: tuple[Tensor, Tensor, Tensor]
    tokens_c: Tensor
    lengths_r: Tensor
    longest: int


def _chunks(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int, merged: bool
) -> Iterator[GatheredKeys]:
    length, count = blocks_BKTn.shape[2:]
    first = k_BKSH.shape[2] - length
    height = max(1, CHUNK_ELEMENTS // (count * size * q_BKTgH.shape[-1]))
    for b, k in head_indices(k_BKSH):
        for start in range(0, length, height):
            stop = min(start + height, length)
            chunk = b, k, slice(start, stop)
            tokens_r = torch.arange(first + start, first + stop, device=k_BKSH.device)
            starts, ends, lengths_r = token_ranges(blocks_BKTn[chunk], tokens_r, size, merged)
            total, longest = visible_tokens(first + start, first + stop, size, count)
            tokens_c = range_tokens(starts, ends, total)
            qkv = q_BKTgH[chunk], k_BKSH[b, k][tokens_c], v_BKSH[b, k][tokens_c]
            yield GatheredKeys(chunk, qkv, tokens_c, lengths_r, longest)


def visible_tokens(start: int, stop: int, size: int, count: int) -> tuple[int, int]:
    """Return how many tokens the queries [start, stop) see in all, and the most that one sees."""
    total = selected_pairs(stop, size, count) - selected_pairs(start, size, count)
    longest = selected_pairs(stop, size, count) - selected_pairs(stop - 1, size, count)
    complete = stop // size
    if complete * size > start:
        # The last query of a block sees more than the next ones.
        longest = max(longest, min(complete, count) * size)
    return total, longest


def _attend(
    q_rgH: Tensor, k_cH: Tensor, v_cH: Tensor, keys: GatheredKeys, packs: RowPacking
) -> Tensor:
    if packs(q_rgH):
        return _attend_packed(q_rgH, k_cH, v_cH, keys)
    lengths_r = keys.lengths_r
    offsets_L = torch.arange(keys.longest, device=q_rgH.device)
    visible_rL = offsets_L < lengths_r[:, None]
    begins_r1 = (lengths_r.cumsum(0) - lengths_r)[:, None]
    # Padding repeats the last key and is masked.
    index_rL = (begins_r1 + offsets_L).clamp_(max=len(k_cH) - 1)
    k_r1LH, v_r1LH = (x[index_rL][:, None] for x in (k_cH, v_cH))
    return F.scaled_dot_product_attention(
        q_rgH[:, None], k_r1LH, v_r1LH, attn_mask=visible_rL[:, None, None], scale=1.0
    )[:, 0]


def _attend_packed(q_rgH: Tensor, k_cH: Tensor, v_cH: Tensor, keys: GatheredKeys) -> Tensor:
    # A slow import that torch without CUDA does not need.
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, width = q_rgH.shape
    queries = torch.arange(rows + 1, device=q_rgH.device, dtype=torch.int32) * heads
    ends = F.pad(keys.lengths_r.cumsum(0), (1, 0)).to(torch.int32)
    # Without a scale, as torch 2.11, it divides by √H again; to multiply first rounds once more.
    scales = "scale" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": 1.0} if scales else {}
    packed_R1H = (q_rgH if scales else q_rgH * width**0.5).reshape(-1, 1, width)
    k_c1H, v_c1H = (x[:, None].contiguous() for x in (k_cH, v_cH))
    out_R1H = varlen_attn(packed_R1H, k_c1H, v_c1H, queries, ends, heads, keys.longest, **options)
    assert isinstance(out_R1H, Tensor), "the log-sum-exp is not requested"
    return out_R1H.view(rows, heads, width)
