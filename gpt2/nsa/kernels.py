"""Triton kernels of native sparse attention.

Compressed blocks and the window are bands: every query sees the last complete keys. A program of
``_band_forward`` and ``_band_query_gradients`` processes a tile of queries with all heads of one key head, so
a tile of keys is loaded once for all of them. ``_rank`` selects the blocks of such a tile from the
weights of the compressed blocks, which it recomputes from the log-sums of the rows: nothing larger
than the lists is stored.

In the selected branch the queries of a tile would share few blocks, so the unit is a block with up
to ``SEGMENT`` of the queries that selected the block: a block is loaded once for all of them, and a
query once for each of its blocks. ``_block_forward`` writes a partial context for each, which
``_combine`` weights by their log-sums. ``_key_gradients`` does the same for gradients of queries,
and is also the backward pass of bands, where a tile of keys has consecutive queries. Sums are in a
fixed order, without atomics, so the results do not depend on the schedule of the GPU.

Scores are binary logarithms, since exp2 is cheaper than exp; backward recomputes the weights from
the log₂-sums of the rows, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). Products of
fp32 inputs are computed in fp32, not in TF32. Importing the module requires triton.

B batch, K key/value heads, T queries, S tokens, g query heads per key/value head, H head dim, n
selected blocks, J blocks, M keys of a band, t queries of a chunk; in a program R rows (queries and
heads), C keys, L blocks, G and P heads and dims, padded to powers of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gpt2.attention.tile_sizes import kernel_target

# Smallest side of a matrix product.
_MIN_SIDE = 16
# Bytes of a tile of 64 rows, at most.
_TILE_BYTES = 16384
# Above the index of every block.
_ABSENT = tl.constexpr((1 << 31) - 1)


class Launch(NamedTuple):
    """Rows of a tile of a kernel, its warps, and the stages of its loop."""

    rows: int
    warps: int
    stages: int


@triton.jit
def _dot(left, right):  # type: ignore[no-untyped-def]
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _complete(token, M, size: tl.constexpr, stride: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.minimum(M, tl.where(token + 1 >= size, (token + 1 - size) // stride + 1, 0))


@triton.jit
def _seen(index_C, end_R, window: tl.constexpr):  # type: ignore[no-untyped-def]
    seen_RC = index_C[None, :] < end_R[:, None]
    if window > 0:
        seen_RC = seen_RC & (index_C[None, :] >= end_R[:, None] - window)
    return seen_RC


@triton.jit
def _seeing(  # type: ignore[no-untyped-def]
    low, high, T, first, size: tl.constexpr, stride: tl.constexpr, window: tl.constexpr
):
    begin = tl.maximum(0, low * stride + size - 1 - first)
    stop = T
    if window > 0:
        stop = tl.minimum(T, (high - 1 + window) * stride + size - 1 - first)
    return begin, stop


@triton.jit
def _vectors(  # type: ignore[no-untyped-def]
    pair, index_X, lane_X, held_X, length, K, g: tl.constexpr, H: tl.constexpr, P: tl.constexpr
):
    """Return the rows of vectors of a key head, given tokens and query heads, and places and mask."""
    batch, head = (pair // K).to(tl.int64), pair % K
    row_X = ((batch * length + index_X) * K + head) * g + lane_X
    dims = tl.arange(0, P)
    return row_X, row_X[:, None] * H + dims[None, :], held_X[:, None] & (dims[None, :] < H)


@triton.jit
def _query_tile(  # type: ignore[no-untyped-def]
    T, K, g: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr
):
    """Return the first query of the program's tile, and the queries, mask and places of its rows."""
    # Late queries first, which see most keys.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    lines = tl.arange(0, QUERIES * G)
    t_R, lane_R = start + lines // G, lines % G
    mask_R = (t_R < T) & (lane_R < g)
    row_R, at_RP, mask_RP = _vectors(tl.program_id(1), t_R, lane_R, mask_R, T, K, g, H, P)
    return start, t_R, mask_R, row_R, at_RP, mask_RP


@triton.jit
def _key_range(  # type: ignore[no-untyped-def]
    start, T, M, first, size: tl.constexpr, stride: tl.constexpr, window: tl.constexpr,
    C: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Return the range of keys that any query of a tile sees, which begins with a tile of keys."""
    low = 0
    if window > 0:
        low = tl.maximum(0, _complete(first + start, M, size, stride) - window) // C * C
    return low, _complete(first + tl.minimum(start + QUERIES, T) - 1, M, size, stride)


@triton.jit
def _band_forward(  # type: ignore[no-untyped-def]
    q, k, v, context, logsums, scale, T, M, K, first,
    g: tl.constexpr, H: tl.constexpr,
    size: tl.constexpr, stride: tl.constexpr, window: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    start, t_R, mask_R, row_R, at_RP, mask_RP = _query_tile(T, K, g, H, G, P, QUERIES)
    low, high = _key_range(start, T, M, first, size, stride, window, C, QUERIES)
    end_R = _complete(first + t_R, M, size, stride)
    q_RP = tl.load(q + at_RP, mask=mask_RP, other=0.0)
    out_RP = tl.zeros([QUERIES * G, P], tl.float32)
    highest_R = tl.full([QUERIES * G], -1e30, tl.float32)
    sum_R = tl.zeros([QUERIES * G], tl.float32)
    for at in range(low, high, C):
        index_C = at + tl.arange(0, C)
        _row_C, at_CP, mask_CP = _vectors(
            tl.program_id(1), index_C, 0, index_C < high, M, K, 1, H, P
        )
        k_CP = tl.load(k + at_CP, mask=mask_CP, other=0.0)
        v_CP = tl.load(v + at_CP, mask=mask_CP, other=0.0)
        scores_RC = _dot(q_RP, tl.trans(k_CP)) * scale
        seen_RC = _seen(index_C, end_R, window)
        scores_RC = tl.where(seen_RC, scores_RC, -float("inf"))
        top_R = tl.maximum(highest_R, tl.max(scores_RC, 1))
        decay_R = tl.exp2(highest_R - top_R)
        weights_RC = tl.exp2(scores_RC - top_R[:, None])
        sum_R = sum_R * decay_R + tl.sum(weights_RC, 1)
        out_RP = out_RP * decay_R[:, None] + _dot(weights_RC.to(v_CP.dtype), v_CP)
        highest_R = top_R
    # 0 for queries that see no key.
    sum_R = tl.where(sum_R > 0, sum_R, 1.0)
    out_RP = out_RP / sum_R[:, None]
    tl.store(context + at_RP, out_RP.to(context.dtype.element_ty), mask=mask_RP)
    tl.store(logsums + row_R, highest_R + tl.log2(sum_R), mask=mask_R)


@triton.jit
def _inner_products(  # type: ignore[no-untyped-def]
    context, dcontext, inner, rows, H: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, P)
    at_RP = row_R[:, None] * H + dims[None, :]
    mask_RP = (row_R < rows)[:, None] & (dims[None, :] < H)
    out_RP = tl.load(context + at_RP, mask=mask_RP, other=0.0).to(tl.float32)
    dout_RP = tl.load(dcontext + at_RP, mask=mask_RP, other=0.0).to(tl.float32)
    tl.store(inner + row_R, tl.sum(out_RP * dout_RP, 1), mask=row_R < rows)


@triton.jit
def _band_query_gradients(  # type: ignore[no-untyped-def]
    q, k, v, dcontext, logsums, inner, dq, scale, scale2, T, M, K, first,
    g: tl.constexpr, H: tl.constexpr,
    size: tl.constexpr, stride: tl.constexpr, window: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    start, t_R, mask_R, row_R, at_RP, mask_RP = _query_tile(T, K, g, H, G, P, QUERIES)
    low, high = _key_range(start, T, M, first, size, stride, window, C, QUERIES)
    end_R = _complete(first + t_R, M, size, stride)
    q_RP = tl.load(q + at_RP, mask=mask_RP, other=0.0)
    dout_RP = tl.load(dcontext + at_RP, mask=mask_RP, other=0.0)
    logsum_R = tl.load(logsums + row_R, mask=mask_R, other=0.0)
    inner_R = tl.load(inner + row_R, mask=mask_R, other=0.0)
    dq_RP = tl.zeros([QUERIES * G, P], tl.float32)
    for at in range(low, high, C):
        index_C = at + tl.arange(0, C)
        _row_C, at_CP, mask_CP = _vectors(
            tl.program_id(1), index_C, 0, index_C < high, M, K, 1, H, P
        )
        k_CP = tl.load(k + at_CP, mask=mask_CP, other=0.0)
        v_CP = tl.load(v + at_CP, mask=mask_CP, other=0.0)
        seen_RC = _seen(index_C, end_R, window)
        weights_RC = tl.exp2(_dot(q_RP, tl.trans(k_CP)) * scale2 - logsum_R[:, None])
        weights_RC = tl.where(seen_RC, weights_RC, 0.0)
        dscores_RC = weights_RC * (_dot(dout_RP, tl.trans(v_CP)) - inner_R[:, None])
        dq_RP += _dot(dscores_RC.to(k_CP.dtype), k_CP)
    tl.store(dq + at_RP, (dq_RP * scale).to(dq.dtype.element_ty), mask=mask_RP)


@triton.jit
def _segment(starts, segments, owners, first_owner, segment, SEGMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block of a segment of its queries, counted from ``first_owner``, and its entries."""
    segment += tl.load(segments + first_owner)
    owner = tl.load(owners + segment)
    begin = tl.load(starts + owner) + (segment - tl.load(segments + owner)) * SEGMENT
    return owner, begin, tl.minimum(begin + SEGMENT, tl.load(starts + owner + 1))


@triton.jit
def _key_gradients(  # type: ignore[no-untyped-def]
    q, k, v, dcontext, logsums, inner, entries, starts, segments, owners,
    partial_q, partial_k, partial_v, scale, T, M, K, first, J, BK,
    first_owner, stop_owner, offset, chunk, span,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr, stride: tl.constexpr,
    window: tl.constexpr, keys: tl.constexpr, LISTED: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if LISTED:
        if program >= tl.load(segments + stop_owner) - tl.load(segments + first_owner):
            return
        owner, begin, stop = _segment(starts, segments, owners, first_owner, program, SEGMENT)
        pair, tile = owner // J % BK, owner % J
    else:
        # Of J tiles of keys, each with chunks of ``span`` queries.
        pair, tile = tl.program_id(2), program
        begin, end = _seeing(tile * keys, (tile + 1) * keys, T, first, size, stride, window)
        begin += tl.program_id(1) * span
        stop = tl.minimum(begin + span, end)
        program = (pair * J + tile) * tl.num_programs(1) + tl.program_id(1)
    lines, columns = tl.arange(0, QUERIES * G), tl.arange(0, C)
    index_C, lane_R = tile * keys + columns, lines % G
    held_C = (columns < keys) & (index_C < M)
    _row_C, at_CP, mask_CP = _vectors(pair, index_C, 0, held_C, M, K, 1, H, P)
    k_CP = tl.load(k + at_CP, mask=mask_CP, other=0.0)
    v_CP = tl.load(v + at_CP, mask=mask_CP, other=0.0)
    dk_CP, dv_CP = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32)
    for index in range(begin, stop, QUERIES):
        at_R = index + lines // G
        mask_R = (at_R < stop) & (lane_R < g)
        t_R = at_R
        if LISTED:
            entry_R = tl.load(entries + at_R, mask=at_R < stop, other=0)
            t_R = entry_R // n % T
        row_R, at_RP, mask_RP = _vectors(pair, t_R, lane_R, mask_R, T, K, g, H, P)
        q_RP = tl.load(q + at_RP, mask=mask_RP, other=0.0)
        dout_RP = tl.load(dcontext + at_RP, mask=mask_RP, other=0.0)
        logsum_R = tl.load(logsums + row_R, mask=mask_R, other=0.0)
        inner_R = tl.load(inner + row_R, mask=mask_R, other=0.0)
        seen_RC = _seen(index_C, _complete(first + t_R, M, size, stride), window)
        seen_RC = seen_RC & mask_R[:, None] & held_C[None, :]
        weights_RC = tl.exp2(_dot(q_RP, tl.trans(k_CP)) * scale - logsum_R[:, None])
        weights_RC = tl.where(seen_RC, weights_RC, 0.0)
        dv_CP += _dot(tl.trans(weights_RC.to(dout_RP.dtype)), dout_RP)
        dweights_RC = _dot(dout_RP, tl.trans(v_CP)) - inner_R[:, None]
        dscores_RC = (weights_RC * dweights_RC).to(q_RP.dtype)
        dk_CP += _dot(tl.trans(dscores_RC), q_RP)
        if LISTED:
            slot_R = _slot(entry_R, pair, T, offset, chunk, n)
            at_RP = (slot_R.to(tl.int64) * g + lane_R)[:, None] * H + tl.arange(0, P)[None, :]
            dq_RP = _dot(dscores_RC, k_CP).to(partial_q.dtype.element_ty)
            tl.store(partial_q + at_RP, dq_RP, mask=mask_RP)
    at_CP = (program.to(tl.int64) * keys + columns[:, None]) * H + tl.arange(0, P)[None, :]
    tl.store(partial_k + at_CP, dk_CP, mask=mask_CP)
    tl.store(partial_v + at_CP, dv_CP, mask=mask_CP)


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    partial_k, partial_v, segments, dk, dv, S, K, first_owner, stop_owner, scale,
    H: tl.constexpr, size: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, pair, columns = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    J, BK = tl.num_programs(0), tl.num_programs(1)
    token_C = block * size + columns
    _row_C, to_CP, mask_CP = _vectors(
        pair, token_C, 0, (columns < size) & (token_C < S), S, K, 1, H, P
    )
    dk_CP, dv_CP = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32)
    before = tl.load(segments + first_owner)
    for owner in range(first_owner + pair * J + block, stop_owner, BK * J):
        for segment in range(tl.load(segments + owner), tl.load(segments + owner + 1)):
            row_C = (segment - before) * size + columns.to(tl.int64)
            at_CP = row_C[:, None] * H + tl.arange(0, P)[None, :]
            dk_CP += tl.load(partial_k + at_CP, mask=mask_CP, other=0.0)
            dv_CP += tl.load(partial_v + at_CP, mask=mask_CP, other=0.0)
    dk_CP = dk_CP * scale + tl.load(dk + to_CP, mask=mask_CP, other=0.0)
    dv_CP += tl.load(dv + to_CP, mask=mask_CP, other=0.0)
    tl.store(dk + to_CP, dk_CP, mask=mask_CP)
    tl.store(dv + to_CP, dv_CP, mask=mask_CP)


@triton.jit
def _block_forward(  # type: ignore[no-untyped-def]
    q, k, v, entries, starts, segments, owners, partial, partial_logsums,
    scale, T, S, K, J, BK, first_owner, stop_owner, offset, chunk,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program >= tl.load(segments + stop_owner) - tl.load(segments + first_owner):
        return
    owner, begin, stop = _segment(starts, segments, owners, first_owner, program, SEGMENT)
    pair = owner // J % BK
    lines, columns = tl.arange(0, QUERIES * G), tl.arange(0, C)
    lane_R = lines % G
    token_C = owner % J * size + columns
    held_C = (columns < size) & (token_C < S)
    _row_C, at_CP, mask_CP = _vectors(pair, token_C, 0, held_C, S, K, 1, H, P)
    k_CP = tl.load(k + at_CP, mask=mask_CP, other=0.0)
    v_CP = tl.load(v + at_CP, mask=mask_CP, other=0.0)
    for index in range(begin, stop, QUERIES):
        at_R = index + lines // G
        mask_R = (at_R < stop) & (lane_R < g)
        entry_R = tl.load(entries + at_R, mask=at_R < stop, other=0)
        t_R = entry_R // n % T
        _row_R, at_RP, mask_RP = _vectors(pair, t_R, lane_R, mask_R, T, K, g, H, P)
        q_RP = tl.load(q + at_RP, mask=mask_RP, other=0.0)
        scores_RC = _dot(q_RP, tl.trans(k_CP)) * scale
        seen_RC = held_C[None, :] & (token_C[None, :] <= (t_R + S - T)[:, None])
        scores_RC = tl.where(seen_RC, scores_RC, -float("inf"))
        # A block after the query has the weight 0.
        top_R = tl.maximum(tl.max(scores_RC, 1), -1e30)
        weights_RC = tl.exp2(scores_RC - top_R[:, None])
        sum_R = tl.maximum(tl.sum(weights_RC, 1), 1e-30)
        out_RP = _dot(weights_RC.to(v_CP.dtype), v_CP) / sum_R[:, None]
        row_R = _slot(entry_R, pair, T, offset, chunk, n).to(tl.int64) * g + lane_R
        at_RP = row_R[:, None] * H + tl.arange(0, P)[None, :]
        tl.store(partial + at_RP, out_RP.to(partial.dtype.element_ty), mask=mask_RP)
        tl.store(partial_logsums + row_R, top_R + tl.log2(sum_R), mask=mask_R)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    partial, partial_logsums, blocks, out, logsums, scale, T, K, offset,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, WEIGHTED: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    chunk, pair = tl.num_programs(0), tl.program_id(1)
    t = offset + tl.program_id(0)
    heads, lanes = tl.arange(0, G), tl.arange(0, L)
    listed = (pair * T + t) * n
    slot = _slot(listed, pair, T, offset, chunk, n).to(tl.int64)
    row_G, to_GP, mask_GP = _vectors(pair, t, heads, heads < g, T, K, g, H, P)
    logsum_G = tl.zeros([G], tl.float32)
    if WEIGHTED:
        held_L = (lanes < n) & (tl.load(blocks + listed + lanes, mask=lanes < n, other=-1) >= 0)
        at_LG = (slot + lanes)[:, None] * g + heads[None, :]
        mask_LG = held_L[:, None] & (heads < g)[None, :]
        logsum_LG = tl.load(partial_logsums + at_LG, mask=mask_LG, other=-float("inf"))
        top_G = tl.maximum(tl.max(logsum_LG, 0), -1e30)
        logsum_G = top_G + tl.log2(tl.sum(tl.exp2(logsum_LG - top_G[None, :]), 0))
        tl.store(logsums + row_G, logsum_G, mask=heads < g)
    sum_GP = tl.zeros([G, P], tl.float32)
    for i in range(n):
        held_G = (heads < g) & (tl.load(blocks + listed + i + 0 * heads) >= 0)
        part_row_G = (slot + i) * g + heads
        at_GP = part_row_G[:, None] * H + tl.arange(0, P)[None, :]
        part_GP = tl.load(partial + at_GP, mask=mask_GP & held_G[:, None], other=0.0)
        if WEIGHTED:
            part_G = tl.load(partial_logsums + part_row_G, mask=held_G, other=-float("inf"))
            sum_GP += part_GP.to(tl.float32) * tl.exp2(part_G - logsum_G)[:, None]
        else:
            sum_GP += part_GP.to(tl.float32)
    tl.store(out + to_GP, (sum_GP * scale).to(out.dtype.element_ty), mask=mask_GP)


@triton.jit
def _slot(entry, pair, T, offset, chunk, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place, among the parts of ``chunk`` queries from ``offset`` on, of a list entry."""
    return entry + n * (pair * (chunk - T) - offset)


@triton.jit
def _rank(  # type: ignore[no-untyped-def]
    q, k, logsums, blocks, scale, T, M, K, first,
    g: tl.constexpr, H: tl.constexpr, n: tl.constexpr, size: tl.constexpr,
    compress: tl.constexpr, stride: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, L: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    start, t_R, mask_R, row_R, at_RP, mask_RP = _query_tile(T, K, g, H, G, P, QUERIES)
    pair, lanes = tl.program_id(1), tl.arange(0, L)
    queries = start + tl.arange(0, QUERIES)
    q_RP = tl.load(q + at_RP, mask=mask_RP, other=0.0)
    logsum_R = tl.load(logsums + row_R, mask=mask_R, other=0.0)
    end_R = _complete(first + t_R, M, compress, stride)
    last_Q1 = ((first + queries) // size)[:, None]
    highest = (first + tl.minimum(start + QUERIES, T) - 1) // size
    # Score and index of the best blocks so far in one integer each, in descending order.
    best_QL = tl.full([QUERIES, L], -1, tl.int64)
    for at in range(0, highest + 1, L):
        block_L = at + lanes
        score_QL = tl.zeros([QUERIES, L], tl.float32)
        for shift in range(1 - compress // stride, size // stride):
            m_L = block_L * (size // stride) + shift
            held_L = (m_L >= 0) & (m_L < M)
            _row_L, at_LP, mask_LP = _vectors(pair, m_L, 0, held_L, M, K, 1, H, P)
            k_LP = tl.load(k + at_LP, mask=mask_LP, other=0.0)
            weights_RL = tl.exp2(_dot(q_RP, tl.trans(k_LP)) * scale - logsum_R[:, None])
            seen_RL = mask_R[:, None] & (m_L[None, :] >= 0) & (m_L[None, :] < end_R[:, None])
            weights_RL = tl.where(seen_RL, weights_RL, 0.0)
            pairs = tl.minimum(shift + compress // stride, size // stride - shift)
            pairs = tl.minimum(pairs, min(compress, size) // stride)
            score_QL += tl.sum(tl.reshape(weights_RL, [QUERIES, G, L]), 1) * pairs
        block_1L = block_L[None, :]
        forced_QL = (block_1L == 0) | (block_1L == last_Q1) | (block_1L == last_Q1 - 1)
        score_QL = tl.where(forced_QL | (score_QL != score_QL), float("inf"), score_QL)
        bits_QL = score_QL.to(tl.int32, bitcast=True).to(tl.int64)
        code_QL = tl.where(block_1L <= last_Q1, (bits_QL << 32) | (_ABSENT - block_1L), -1)
        best_QL = tl.sort(tl.maximum(best_QL, tl.sort(code_QL)), descending=True)
    held_QL = (lanes < n)[None, :] & (best_QL >= 0)
    chosen_QL = tl.where(held_QL, _ABSENT - (best_QL & _ABSENT), _ABSENT)
    chosen_QL = tl.sort(chosen_QL)
    chosen_QL = tl.where(chosen_QL == _ABSENT, -1, chosen_QL)
    at_QL = ((pair.to(tl.int64) * T + queries) * n)[:, None] + lanes[None, :]
    tl.store(blocks + at_QL, chosen_QL, mask=(queries < T)[:, None] & (lanes < n)[None, :])


KERNELS: dict[str, Any] = {
    "band_forward": _band_forward,
    "band_query_gradients": _band_query_gradients,
    "rank": _rank,
    "block_forward": _block_forward,
    "key_gradients": _key_gradients,
    "combine": _combine,
    "reduce": _reduce,
    "inner_products": _inner_products,
}
# The fastest on an H200 (docs/mechanisms/nsa.md), of the kernels by tiles.
LAUNCHES = {
    "band_forward": Launch(64, 4, 2),
    "band_query_gradients": Launch(64, 4, 2),
    "key_gradients": Launch(64, 4, 1),
    "block_forward": Launch(64, 4, 3),
    "rank": Launch(64, 4, 2),
}
# On NVIDIA's GPUs of other compute capabilities than 9.0, whose products need more registers.
OTHER_LAUNCHES = LAUNCHES | {"key_gradients": Launch(32, 8, 1)}


def tile_constants(kernel: str, q_BTKgH: Tensor, keys: int = 0) -> dict[str, int]:
    """Return the padded sides, warps and stages with which ``kernel`` is launched.

    Larger tiles would not have enough registers or shared memory (tests compile them).
    """
    backend, architecture = kernel_target()
    is_other = backend == "cuda" and architecture != 90
    rows, warps, stages = (OTHER_LAUNCHES if is_other else LAUNCHES)[kernel]
    group, width = q_BTKgH.shape[-2:]
    sides = {"G": triton.next_power_of_2(group), "P": triton.next_power_of_2(width)}
    sides["P"] = max(_MIN_SIDE, sides["P"])
    if keys:
        sides["C"] = max(_MIN_SIDE, triton.next_power_of_2(keys))
    fitting = rows * _TILE_BYTES // (64 * sides["P"] * q_BTKgH.element_size())
    rows = max(_MIN_SIDE, min(rows, fitting))
    return sides | {
        "QUERIES": max(1, rows // sides["G"]),
        "num_warps": warps,
        # Tiles of fp32 fill the shared memory of GPUs such as the RTX 4090.
        "num_stages": stages if q_BTKgH.element_size() < 4 else 1,
    }
