"""Triton kernels of the selected branch: selection of blocks, and attention to the selected blocks.

A program of ``_rank`` selects the blocks of one query for one key head from the weights of the
compressed branch, which it recomputes from the log-sum-exp of the rows: nothing larger than the
lists is stored. A program of ``_forward`` and ``_query_gradients`` processes all heads of one key
head at one query: these heads share the list, so each block is loaded once for all of them. A
program of ``_key_gradients`` processes one block with up to ``SEGMENT`` of the queries that selected
the block, and ``_reduce`` adds the segments of each block in order: no atomics, so the results do
not depend on the schedule of the GPU. Scores are binary logarithms, since exp2 is cheaper than exp;
backward recomputes the weights from the log₂-sums of the rows, as FlashAttention does (Dao et al.
2022, arXiv 2205.14135). Importing the module requires triton.

B batch, K key/value heads, T queries, S tokens, g query heads per key/value head, H head dim, n
selected blocks, J blocks, M compressed blocks, L blocks of a tile; G, P and C are g, H and the size
of a block, padded to powers of two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.nsa.query_major import MaskSpec
from gpt2.nsa.select import SEGMENT, queries_by_block, segment_owners

# Smallest side of a matrix product.
_MIN_SIDE = 16
# Rows (query heads) of a matrix product of ``_key_gradients``, and bytes of these rows, at most.
_ROWS, _ROW_BYTES = 64, 8192
_LOG2_E = math.log2(math.e)
_EXP2 = tl.constexpr(_LOG2_E)
# Above the index of every block.
_ABSENT = tl.constexpr((1 << 31) - 1)
# Warps of a program of keys; bytes of keys for each warp of a program of one query, and their limit.
_WARPS, _WARP_BYTES, _MAX_WARPS = 4, 4096, 8


@torch.no_grad()
def rank_blocks(
    q_BKTgH: Tensor,
    k_BKMH: Tensor,
    lse_BNT: Tensor,
    sight: MaskSpec,
    scale: float,
    size: int,
    count: int,
) -> Tensor:
    """Return the selected blocks BKTn in ascending order, padded with −1 at the end.

    These are ``count`` blocks of ``size`` tokens, ranked as by ``score_blocks`` and
    ``select_blocks``. ``lse_BNT`` are the log-sum-exp of the scores of the compressed blocks in
    ``sight``, which are products times ``scale``.
    """
    q, k, lse = q_BKTgH.contiguous(), k_BKMH.contiguous(), lse_BNT.contiguous()
    batch, heads, length, group, width = q.shape
    blocks = q.new_empty(batch, heads, length, count, dtype=torch.int64)
    _rank[(length, batch * heads)](
        q, k, lse, blocks, scale * _LOG2_E, length, k.shape[2], sight.first,
        group, width, count, size, sight.size, sight.stride,
        **launch_constants(_rank, q.dtype, group, width, size, count),
    )  # fmt: skip
    return blocks


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
            group, width, blocks.shape[-1], size,
            **launch_constants(_forward, q.dtype, group, width, size, blocks.shape[-1]),
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
        sizes = (length, tokens, group, width, count, size)

        def constants(kernel: Any) -> dict[str, int]:
            return launch_constants(kernel, q.dtype, group, width, size, count)

        _query_gradients[(length, batch * heads)](
            q, k, v, blocks, context, dcontext, logsums, inner, dq, scale, scale * _LOG2_E,
            *sizes, **constants(_query_gradients),
        )  # fmt: skip
        rows, starts, segments = queries_by_block(blocks, -(-tokens // size), length, SEGMENT)
        owners = segment_owners(segments, blocks.numel(), SEGMENT)
        partial_k, partial_v = k.new_empty(2, len(owners), size, width, dtype=torch.float32)
        total = -(-tokens // size)
        _key_gradients[(len(owners),)](
            q, k, v, dcontext, logsums, inner, rows, starts, segments, owners,
            partial_k, partial_v, scale, scale * _LOG2_E, batch * heads, total, *sizes,
            **constants(_key_gradients),
        )  # fmt: skip
        _reduce[(total, batch * heads)](
            partial_k, partial_v, segments, dk, dv, tokens, width, size,
            **constants(_reduce),
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def launch_constants(
    kernel: Any, dtype: torch.dtype, group: int, width: int, size: int, count: int
) -> dict[str, int]:
    """Return the padded sides and the number of warps with which ``kernel`` is launched.

    Fewer warps or more rows would not have enough registers (tests compile them).
    """
    sides = {"G": group, "P": width, "C": size, "L": count}
    sides = {name: max(_MIN_SIDE, triton.next_power_of_2(side)) for name, side in sides.items()}
    warps = _WARPS
    if kernel in (_rank, _forward, _query_gradients):
        tile_bytes = sides["P"] * sides["L" if kernel is _rank else "C"] * dtype.itemsize
        warps = min(_MAX_WARPS, max(1, tile_bytes // _WARP_BYTES))
    rows = min(_ROWS, _ROW_BYTES // (sides["P"] * dtype.itemsize))
    sides |= {"QUERIES": max(1, rows // sides["G"]), "SEGMENT": SEGMENT}
    constants = {name: side for name, side in sides.items() if name in kernel.arg_names}
    return constants | {"num_warps": warps}


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
def _rank(  # type: ignore[no-untyped-def]
    q, k, lse, blocks, scale, T, M, first,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr,
    compress: tl.constexpr, stride: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = first + t
    last = token // size
    heads, dims, lanes = tl.arange(0, G), tl.arange(0, P), tl.arange(0, L)
    at_GP = (head * T + t) * g * H + heads[:, None] * H + dims[None, :]
    q_GP = tl.load(q + at_GP, mask=(heads[:, None] < g) & (dims[None, :] < H), other=0.0)
    lse_G = tl.load(lse + (head * g + heads) * T + t, mask=heads < g, other=0.0) * _EXP2
    # Score and index of the best blocks so far in one integer each, in descending order.
    best_L = tl.full([L], -1, tl.int64)
    for start in range(0, last + 1, L):
        block_L = start + lanes
        score_L = tl.zeros([L], tl.float32)
        # The compressed blocks with a token of a block, by their distance to the first one in it.
        for offset in range(1 - compress // stride, size // stride):
            m_L = block_L * (size // stride) + offset
            seen_L = (m_L >= 0) & (m_L < M) & (m_L * stride + compress <= token + 1)
            at_LP = (head * M + m_L[:, None]) * H + dims[None, :]
            mask_LP = seen_L[:, None] & (dims[None, :] < H)
            k_LP = tl.load(k + at_LP, mask=mask_LP, other=0.0)
            weights_GL = tl.exp2(_dot(q_GP, tl.trans(k_LP)) * scale - lse_G[:, None])
            weights_GL = tl.where(seen_L[None, :] & (heads[:, None] < g), weights_GL, 0.0)
            pairs = tl.minimum(offset + compress // stride, size // stride - offset)
            score_L += tl.sum(weights_GL, 0) * tl.minimum(pairs, min(compress, size) // stride)
        # The first, the previous and the own block are always selected; a NaN counts as infinite.
        forced_L = (block_L == 0) | (block_L == last) | (block_L == last - 1)
        score_L = tl.where(forced_L | (score_L != score_L), float("inf"), score_L)
        # The bit patterns of floats ≥ 0 sort like the floats; of equal scores, the lower index wins.
        bits_L = score_L.to(tl.int32, bitcast=True).to(tl.int64)
        code_L = tl.where(block_L <= last, (bits_L << 32) | (_ABSENT - block_L), -1)
        # Of a descending and an ascending sequence, the element-wise maxima are the best of both.
        best_L = tl.sort(tl.maximum(best_L, tl.sort(code_L)), descending=True)
    chosen_L = tl.where((lanes < n) & (best_L >= 0), _ABSENT - (best_L & _ABSENT), _ABSENT)
    chosen_L = tl.sort(chosen_L)
    chosen_L = tl.where(chosen_L == _ABSENT, -1, chosen_L)
    tl.store(blocks + (head * T + t) * n + lanes, chosen_L, mask=lanes < n)


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


KERNELS = (_rank, _forward, _query_gradients, _key_gradients, _reduce)
