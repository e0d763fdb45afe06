"""Triton kernels of the selected branch: attention of each query to a list of key blocks.

A program of ``_forward`` and ``_query_gradients`` processes all heads of one key head at one query:
these heads share the list, so each block is loaded once for all of them. A program of
``_key_gradients`` processes one block with up to ``SEGMENT`` of the queries that selected the
block, and ``_reduce`` adds the segments of each block in order: no atomics, so the results do not
depend on the schedule of the GPU. Scores are binary logarithms, since exp2 is cheaper than exp;
backward recomputes the weights from the log₂-sums of the rows, as FlashAttention does (Dao et al.
2022, arXiv 2205.14135). Importing the module requires triton.

B batch, K key/value heads, T queries, S tokens, g query heads per key/value head, H head dim, n
selected blocks, J blocks; G, P and C are g, H and the size of a block, padded to powers of two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.nsa.select import SEGMENT, queries_by_block, segment_owners

# Smallest side of a matrix product.
_MIN_SIDE = 16
# Rows (query heads) of a matrix product of ``_key_gradients``.
_ROWS = 64
_LOG2_E = math.log2(math.e)


def attend_blocks(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int, scale: float
) -> Tensor:
    """Return the head outputs BKTgH of attention to the selected blocks of ``size`` tokens.

    Scores are products times ``scale``. ``blocks_BKTn`` are distinct block indices, −1 for none;
    the last query belongs to the last token, and sees the tokens of its blocks up to its own.
    Every query must have selected at least one block with a visible token. Products of fp32 inputs
    are computed in fp32, not in TF32.
    """
    qkv = (x.contiguous() for x in (q_BKTgH, k_BKSH, v_BKSH))
    context: Tensor = _BlockAttention.apply(*qkv, blocks_BKTn.contiguous(), size, scale)
    return context


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, scale: float
    ) -> Tensor:
        batch, heads, length, group, width = q.shape
        context = torch.empty_like(q)
        logsums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        _forward[(length, batch * heads)](
            q, k, v, blocks, context, logsums, scale * _LOG2_E, length, k.shape[2],
            group, width, blocks.shape[-1], size, **_sides(group, width, size),
            num_warps=NUM_WARPS[_forward],
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, blocks, context, logsums)
        ctx.settings = size, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks, context, logsums = ctx.saved_tensors
        size, scale = ctx.settings
        batch, heads, length, group, width = q.shape
        tokens, count = k.shape[2], blocks.shape[-1]
        dcontext = dcontext.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        inner = torch.empty_like(logsums)
        sides = _sides(group, width, size)
        sizes = (length, tokens, group, width, count, size)
        _query_gradients[(length, batch * heads)](
            q, k, v, blocks, context, dcontext, logsums, inner, dq, scale, scale * _LOG2_E,
            *sizes, **sides, num_warps=NUM_WARPS[_query_gradients],
        )  # fmt: skip
        rows, starts, segments = queries_by_block(blocks, -(-tokens // size), length, SEGMENT)
        owners = segment_owners(segments, blocks.numel(), SEGMENT)
        partial_k, partial_v = k.new_empty(2, len(owners), size, width, dtype=torch.float32)
        total = -(-tokens // size)
        _key_gradients[(len(owners),)](
            q, k, v, dcontext, logsums, inner, rows, starts, segments, owners,
            partial_k, partial_v, scale, scale * _LOG2_E, batch * heads, total, *sizes,
            **sides, QUERIES=_queries(sides), SEGMENT=SEGMENT,
            num_warps=NUM_WARPS[_key_gradients],
        )  # fmt: skip
        _reduce[(total, batch * heads)](
            partial_k, partial_v, segments, dk, dv, tokens, width, size,
            P=sides["P"], C=sides["C"], num_warps=NUM_WARPS[_reduce],
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def _sides(group: int, width: int, size: int) -> dict[str, int]:
    """Return the padded sides of the matrix products."""
    names = {"G": group, "P": width, "C": size}
    return {name: max(_MIN_SIDE, triton.next_power_of_2(side)) for name, side in names.items()}


def _queries(sides: dict[str, int]) -> int:
    """Return the number of queries in a matrix product of ``_key_gradients``."""
    return max(1, _ROWS // sides["G"])


@triton.jit
def _dot(left, right):  # type: ignore[no-untyped-def]
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _load_block(k, v, head, tokens, held_C, dims, S, H: tl.constexpr):  # type: ignore[no-untyped-def]
    at_CP = (head * S + tokens[:, None]) * H + dims[None, :]
    mask_CP = held_C[:, None] & (dims[None, :] < H)
    k_CP = tl.load(k + at_CP, mask=mask_CP, other=0.0)
    v_CP = tl.load(v + at_CP, mask=mask_CP, other=0.0)
    return k_CP, v_CP


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, blocks, context, logsums, scale, T, S,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = head * T + t
    last = t + S - T
    heads, dims, columns = tl.arange(0, G), tl.arange(0, P), tl.arange(0, C)
    at_GP = row * g * H + heads[:, None] * H + dims[None, :]
    mask_GP = (heads[:, None] < g) & (dims[None, :] < H)
    q_GP = tl.load(q + at_GP, mask=mask_GP, other=0.0)
    out_GP = tl.zeros([G, P], tl.float32)
    highest_G = tl.full([G], -1e30, tl.float32)
    sum_G = tl.zeros([G], tl.float32)
    for i in range(n):
        block = tl.load(blocks + row * n + i).to(tl.int64)
        start = block * size
        if (block >= 0) & (start <= last):
            tokens = start + columns
            seen_C = (columns < size) & (tokens <= last)
            k_CP, v_CP = _load_block(k, v, head, tokens, seen_C, dims, S, H)
            scores_GC = _dot(q_GP, tl.trans(k_CP)) * scale
            scores_GC = tl.where(seen_C[None, :], scores_GC, -float("inf"))
            top_G = tl.maximum(highest_G, tl.max(scores_GC, 1))
            decay_G = tl.exp2(highest_G - top_G)
            weights_GC = tl.exp2(scores_GC - top_G[:, None])
            sum_G = sum_G * decay_G + tl.sum(weights_GC, 1)
            out_GP = out_GP * decay_G[:, None] + _dot(weights_GC.to(v_CP.dtype), v_CP)
            highest_G = top_G
    out_GP = out_GP / sum_G[:, None]
    tl.store(context + at_GP, out_GP.to(context.dtype.element_ty), mask=mask_GP)
    tl.store(logsums + row * g + heads, highest_G + tl.log2(sum_G), mask=heads < g)


@triton.jit
def _query_gradients(  # type: ignore[no-untyped-def]
    q, k, v, blocks, context, dcontext, logsums, inner, dq, scale, scale2, T, S,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = head * T + t
    last = t + S - T
    heads, dims, columns = tl.arange(0, G), tl.arange(0, P), tl.arange(0, C)
    at_GP = row * g * H + heads[:, None] * H + dims[None, :]
    mask_GP = (heads[:, None] < g) & (dims[None, :] < H)
    q_GP = tl.load(q + at_GP, mask=mask_GP, other=0.0)
    dout_GP = tl.load(dcontext + at_GP, mask=mask_GP, other=0.0)
    out_GP = tl.load(context + at_GP, mask=mask_GP, other=0.0)
    inner_G = tl.sum(out_GP.to(tl.float32) * dout_GP.to(tl.float32), 1)
    tl.store(inner + row * g + heads, inner_G, mask=heads < g)
    logsum_G = tl.load(logsums + row * g + heads, mask=heads < g, other=0.0)
    dq_GP = tl.zeros([G, P], tl.float32)
    for i in range(n):
        block = tl.load(blocks + row * n + i).to(tl.int64)
        start = block * size
        if (block >= 0) & (start <= last):
            tokens = start + columns
            seen_C = (columns < size) & (tokens <= last)
            k_CP, v_CP = _load_block(k, v, head, tokens, seen_C, dims, S, H)
            scores_GC = _dot(q_GP, tl.trans(k_CP)) * scale2
            weights_GC = tl.exp2(scores_GC - logsum_G[:, None])
            weights_GC = tl.where(seen_C[None, :], weights_GC, 0.0)
            dweights_GC = _dot(dout_GP, tl.trans(v_CP))
            dscores_GC = weights_GC * (dweights_GC - inner_G[:, None])
            dq_GP += _dot(dscores_GC.to(k_CP.dtype), k_CP)
    tl.store(dq + at_GP, (dq_GP * scale).to(dq.dtype.element_ty), mask=mask_GP)


@triton.jit
def _key_gradients(  # type: ignore[no-untyped-def]
    q, k, v, dcontext, logsums, inner, rows, starts, segments, owners,
    partial_k, partial_v, scale, scale2, BK, J, T, S,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    QUERIES: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + segment)
    if owner >= BK * J:
        return
    first_segment = tl.load(segments + owner)
    head, block = (owner // J).to(tl.int64), (owner % J).to(tl.int64)
    begin = tl.load(starts + owner) + (segment - first_segment) * SEGMENT
    end = tl.minimum(begin + SEGMENT, tl.load(starts + owner + 1))
    dims, columns, lines = tl.arange(0, P), tl.arange(0, C), tl.arange(0, QUERIES * G)
    tokens = block * size + columns
    held_C = (columns < size) & (tokens < S)
    k_CP, v_CP = _load_block(k, v, head, tokens, held_C, dims, S, H)
    dk_CP, dv_CP = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32)
    for index in range(begin, end, QUERIES):
        at_R = index + lines // G
        mask_R = (at_R < end) & (lines % G < g)
        t_R = tl.load(rows + at_R, mask=mask_R, other=0).to(tl.int64)
        line_R = (head * T + t_R) * g + lines % G
        at_RP = line_R[:, None] * H + dims[None, :]
        mask_RP = mask_R[:, None] & (dims[None, :] < H)
        q_RP = tl.load(q + at_RP, mask=mask_RP, other=0.0)
        dout_RP = tl.load(dcontext + at_RP, mask=mask_RP, other=0.0)
        logsum_R = tl.load(logsums + line_R, mask=mask_R, other=0.0)
        inner_R = tl.load(inner + line_R, mask=mask_R, other=0.0)
        seen_RC = mask_R[:, None] & held_C[None, :] & (tokens[None, :] <= (t_R + S - T)[:, None])
        weights_RC = tl.exp2(_dot(q_RP, tl.trans(k_CP)) * scale2 - logsum_R[:, None])
        weights_RC = tl.where(seen_RC, weights_RC, 0.0)
        dv_CP += _dot(tl.trans(weights_RC.to(dout_RP.dtype)), dout_RP)
        dscores_RC = weights_RC * (_dot(dout_RP, tl.trans(v_CP)) - inner_R[:, None])
        dk_CP += _dot(tl.trans(dscores_RC.to(q_RP.dtype)), q_RP)
    at_CP = (segment * size + columns[:, None]) * H + dims[None, :]
    mask_CP = (columns[:, None] < size) & (dims[None, :] < H)
    tl.store(partial_k + at_CP, dk_CP * scale, mask=mask_CP)
    tl.store(partial_v + at_CP, dv_CP, mask=mask_CP)


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    partial_k, partial_v, segments, dk, dv, S, H: tl.constexpr, size: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    owner = head * tl.num_programs(0) + block
    dims, columns = tl.arange(0, P), tl.arange(0, C)
    mask_CP = (columns[:, None] < size) & (dims[None, :] < H)
    dk_CP, dv_CP = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32)
    for segment in range(tl.load(segments + owner), tl.load(segments + owner + 1)):
        at_CP = (segment * size + columns.to(tl.int64)[:, None]) * H + dims[None, :]
        dk_CP += tl.load(partial_k + at_CP, mask=mask_CP, other=0.0)
        dv_CP += tl.load(partial_v + at_CP, mask=mask_CP, other=0.0)
    tokens = block * size + columns
    at_CP = (head * S + tokens[:, None]) * H + dims[None, :]
    mask_CP = mask_CP & (tokens[:, None] < S)
    tl.store(dk + at_CP, dk_CP.to(dk.dtype.element_ty), mask=mask_CP)
    tl.store(dv + at_CP, dv_CP.to(dv.dtype.element_ty), mask=mask_CP)


# Warps of a program.
NUM_WARPS = {_forward: 1, _query_gradients: 1, _key_gradients: 4, _reduce: 4}
