"""Attention to selected blocks: query after query, each with the keys that it sees gathered.

B batch, T queries, S tokens, K key/value heads, g query heads of one, H head dim, n selected blocks;
r the queries of a chunk, c all keys of a chunk one after the other, L the most keys of a query.

The heads that share a selection are queries of one attention, so keys are gathered once for all of
them, and exactly those that are seen: nothing is causal any more. FlashAttention takes such packed
rows (Dao 2023, arXiv 2307.08691) where it can run; elsewhere they are padded and masked. Backward
gathers again, so nothing of T·n keys is kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.nsa.buffers import heads_of, wide
from gpt2.attention.nsa.ranges import Ranges, ranges_of

# Numbers of the keys that a chunk gathers at most.
CHUNK_NUMBERS = 1 << 24


@dataclass
class Fallbacks:
    """How often chunks on a GPU were padded, for want of a kernel for packed rows."""

    count: int = 0


def attend_gathered(
    q_BKTgH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    blocks_BKTn: Tensor,
    size: int,
    merged: bool,
    fallbacks: Fallbacks,
) -> Tensor:
    """What ``attend_selected`` gives. ``merged`` takes blocks that touch as one range of tokens."""
    given = (blocks_BKTn, size, merged, fallbacks)
    context: Tensor = _Gathered.apply(q_BKTgH, k_BKSH, v_BKSH, *given)
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
        fallbacks: Fallbacks,
    ) -> Tensor:
        context = torch.empty_like(q)
        for at in heads_of(k):
            for rows in _chunks(q, blocks, size):
                here = (*at, rows)
                ranges = _ranges(k, blocks[here], rows, q.shape[2], size, merged)
                tokens_c = ranges.tokens()
                given = (q[here], k[at][tokens_c], v[at][tokens_c])
                context[here] = _attend(*given, ranges.lengths_r, fallbacks)
        ctx.save_for_backward(q, k, v, blocks)
        ctx.given = size, merged, fallbacks
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks = ctx.saved_tensors
        size, merged, fallbacks = ctx.given
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=wide(x)) for x in (k, v))
        for at in heads_of(k):
            for rows in _chunks(q, blocks, size):
                here = (*at, rows)
                ranges = _ranges(k, blocks[here], rows, q.shape[2], size, merged)
                tokens_c = ranges.tokens()
                taken = [q[here], k[at][tokens_c], v[at][tokens_c]]
                with torch.enable_grad():
                    leaves = [x.detach().requires_grad_() for x in taken]
                    out = _attend(*leaves, ranges.lengths_r, fallbacks)
                found = torch.autograd.grad(out, leaves, dcontext[here])
                dq[here] = found[0]
                for sums, part in zip((dk, dv), found[1:]):
                    sums[at].index_add_(0, tokens_c, part.to(sums.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _chunks(q_BKTgH: Tensor, blocks_BKTn: Tensor, size: int) -> list[slice]:
    length, width = q_BKTgH.shape[2], q_BKTgH.shape[-1]
    height = max(1, CHUNK_NUMBERS // (blocks_BKTn.shape[-1] * size * width))
    return [slice(start, min(start + height, length)) for start in range(0, length, height)]


def _ranges(
    k_BKSH: Tensor, blocks_rn: Tensor, rows: slice, queries: int, size: int, merged: bool
) -> Ranges:
    first = k_BKSH.shape[2] - queries
    tokens_r = torch.arange(first + rows.start, first + rows.stop, device=k_BKSH.device)
    return ranges_of(blocks_rn, tokens_r, size, merged)


def _attend(
    q_rgH: Tensor, k_cH: Tensor, v_cH: Tensor, lengths_r: Tensor, fallbacks: Fallbacks
) -> Tensor:
    """Head outputs rgH; row r sees the next ``lengths_r`` of the keys. q is divided by √H."""
    if _packs(q_rgH):
        return _packed(q_rgH, k_cH, v_cH, lengths_r)
    if q_rgH.is_cuda:
        fallbacks.count += 1
    longest = int(lengths_r.max())
    places_L = torch.arange(longest, device=q_rgH.device)
    seen_rL = places_L < lengths_r[:, None]
    begins_r1 = (lengths_r.cumsum(0) - lengths_r)[:, None]
    # Padding repeats the last key, and is masked.
    index_rL = (begins_r1 + places_L).clamp_(max=len(k_cH) - 1)
    k_r1LH, v_r1LH = (x[index_rL][:, None] for x in (k_cH, v_cH))
    return F.scaled_dot_product_attention(
        q_rgH[:, None], k_r1LH, v_r1LH, attn_mask=seen_rL[:, None, None], scale=1.0
    )[:, 0]


def _packs(q: Tensor) -> bool:
    """Whether FlashAttention runs here: on a GPU, in half precision."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and torch.backends.cuda.is_flash_attention_available()


def _packed(q_rgH: Tensor, k_cH: Tensor, v_cH: Tensor, lengths_r: Tensor) -> Tensor:
    # Its import takes time, and torch without CUDA has no use for it.
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, width = q_rgH.shape
    queries = torch.arange(rows + 1, device=q_rgH.device, dtype=torch.int32) * heads
    keys = F.pad(lengths_r.cumsum(0), (1, 0)).to(torch.int32)
    # It divides by √H itself.
    packed_R1H = (q_rgH * width**0.5).reshape(-1, 1, width)
    columns = (x[:, None].contiguous() for x in (k_cH, v_cH))
    longest = int(lengths_r.max())
    out_R1H: Tensor = varlen_attn(packed_R1H, *columns, queries, keys, heads, longest)
    return out_R1H.view(rows, heads, width)
