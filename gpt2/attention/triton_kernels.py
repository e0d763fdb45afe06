"""Triton kernels of attention with a band of transposed scores, row statistics and dropout.

A program of ``_forward`` computes the outputs of M rows of a head, and their statistic from the same
scores; one of ``_row_gradients`` the gradients that are sums over the columns of M rows, and one of
``_column_gradients`` those that are sums over the rows of C columns, for all heads that share a key
head: no atomics, so the results do not depend on the schedule of the GPU. A program of
``_mean_weights`` computes a tile of the mean of the weights over heads. Scores are binary
logarithms, since exp2 is cheaper than exp; each kernel recomputes the weights from the log₂-sums of
the rows, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). Importing the module requires
triton.

A tile is skipped if all of its pairs are hidden, and the transposed scores if all of its pairs are
outside the band. A pair (i, j) of a head is kept by a word of Philox (Salmon et al. 2011) with the
counter (j // 4, i, head): every kernel draws the same words, whatever its tiles.

B batch, T tokens, N heads, g query heads per key/value head, H head dim; M rows and C columns of a
tile, P the padded H, L the padded number of largest scores. ``Heads`` have any strides; the other
tensors of width H are BTNH in memory, and those of a number per row are BNT.
"""

import math
from collections import namedtuple

import triton
import triton.language as tl

# Statistics of a row.
MODES = {"": 0, "entropy": 1, "rms": 2, "topk": 3}
_ENTROPY, _RMS, _TOPK = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LN_2 = tl.constexpr(math.log(2))
_LOG2_E = tl.constexpr(math.log2(math.e))
# The fewest rounds of Philox that pass all tests of its authors (Salmon et al. 2011, table 2).
_ROUNDS = tl.constexpr(7)
# Edge of the largest scores of a row with fewer scores: below every score.
_LOWEST = tl.constexpr(-1e30)
# Scores this close relative to their size are equal: kernels may sum a product in different orders.
_EQUAL = tl.constexpr(2.0**-19)


# Vectors of tokens BNTH, whose elements are adjacent: a pointer, or None, and the strides.
Heads = namedtuple("Heads", "at sequence head token")
# Rules of the scores, as in ``TileSpec``.
Scores = namedtuple("Scores", "scale window band alpha")
# Pointer to the seed, or None; the factor of a kept pair, and the lowest word that keeps it.
Dropout = namedtuple("Dropout", "seed keep threshold")
# A number for each row: pointers BNT, or None, and within a kernel the values of a tile. The slope is
# the derivative of the loss by the statistic.
PerRow = namedtuple("PerRow", "factor logsum statistic edge share slope")
# Tile of rows of a head: its place, and the offsets of numbers and vectors.
_Tile = namedtuple("_Tile", "b h head i_M at_M mask_M at_MP mask_MP")
# Vectors of tokens in a product of scores, and in the transposed one: queries and keys, or the reverse.
_Sides = namedtuple("_Sides", "first second")


@triton.jit
def _dot(left, right):  # type: ignore[no-untyped-def]
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _of_head(x, b, h):  # type: ignore[no-untyped-def]
    at = x.at + b * x.sequence + tl.cast(h, tl.int64) * x.head
    return Heads(at, x.sequence, x.head, x.token)


@triton.jit
def _load(x, tokens, dims, T, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the vectors of tokens; zeros for tokens that do not exist."""
    at = tokens.to(tl.int64)[:, None] * x.token + dims[None, :]
    return tl.load(x.at + at, mask=(tokens[:, None] < T) & (dims[None, :] < H), other=0.0)


@triton.jit
def _across(x_M, BY_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    return x_M[:, None] if BY_ROW else x_M[None, :]


@triton.jit
def _mask(  # type: ignore[no-untyped-def]
    drop, i_XY, start, head, C: tl.constexpr, BY_ROW: tl.constexpr
):
    """Return the dropout mask, 0 or ``keep``, of rows ``i_XY`` and C columns from ``start`` on."""
    quads_Q = start // 4 + tl.arange(0, C // 4)
    column_XY = (quads_Q[None, :] if BY_ROW else quads_Q[:, None]) + i_XY * 0
    zero_XY = column_XY * 0
    a, b, c, d = tl.philox(
        tl.load(drop.seed), column_XY, i_XY + zero_XY, head + zero_XY, zero_XY, n_rounds=_ROUNDS
    )
    # The four words of a counter are those of four columns.
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.int32, bitcast=True)
    # Not a bit: AMD's compiler cannot exchange bits between threads.
    mask = tl.where(words >= drop.threshold, drop.keep, 0.0)
    if BY_ROW:
        mask_XY = tl.reshape(mask, [i_XY.shape[0], C])
    else:
        mask_XY = tl.reshape(tl.permute(mask, (0, 2, 3, 1)), [C, i_XY.shape[1]])
    return mask_XY


@triton.jit
def _of_scores(score, alphas, h):  # type: ignore[no-untyped-def]
    """Return the rules of the scores of a head, whose alpha may be learnable."""
    alpha = score.alpha
    if alphas is not None:
        alpha = tl.load(alphas + h)
    return Scores(score.scale, score.window, score.band, alpha)


@triton.jit
def _scores(x, y, score, factor_XY, i_XY, j_XY, BAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores before and after the factor of the row; −∞ after it for hidden pairs.

    Those are products of the first sides, and in the band alpha times those of the second.
    """
    distance_XY = i_XY - j_XY
    raw_XY = _dot(x.first, tl.trans(y.first))
    if BAND:
        transposed_XY = _dot(x.second, tl.trans(y.second)) * score.alpha
        raw_XY += tl.where(distance_XY <= score.band, transposed_XY, 0.0)
    raw_XY = raw_XY * score.scale
    seen_XY = (distance_XY >= 0) & (distance_XY < score.window)
    return raw_XY, tl.where(seen_XY, raw_XY * factor_XY, -float("inf"))


@triton.jit
def _sink_weight(sinks, h, logsum_M):  # type: ignore[no-untyped-def]
    """Return the weight of the sink of a head in each row."""
    return tl.exp2(tl.load(sinks + h) * _LOG2_E - logsum_M)


@triton.jit
def _load_mean(dmean, at_XY, i_XY, j_XY, T):  # type: ignore[no-untyped-def]
    return tl.load(dmean + at_XY + j_XY, mask=(i_XY < T) & (j_XY <= i_XY), other=0.0)


@triton.jit
def _load_factor(row, at_M, mask_M, M: tl.constexpr):  # type: ignore[no-untyped-def]
    factor_M = tl.full([M], 1.0, tl.float32)
    if row.factor is not None:
        factor_M = tl.load(row.factor + at_M, mask=mask_M, other=1.0)
    return factor_M


@triton.jit
def _tile(T, N, H: tl.constexpr, M: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tile of rows of this program; the longest rows come first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = tl.program_id(2) * N + h
    i_M, dims = first + tl.arange(0, M), tl.arange(0, P)
    at_M, mask_M = head.to(tl.int64) * T + i_M, i_M < T
    at_MP = ((b * T + i_M[:, None]) * N + h) * H + dims[None, :]
    mask_MP = mask_M[:, None] & (dims[None, :] < H)
    return first, _Tile(b, h, head, i_M, at_M, mask_M, at_MP, mask_MP)


@triton.jit
def _sides(  # type: ignore[no-untyped-def]
    first, second, tokens, T, H: tl.constexpr, BAND: tl.constexpr, P: tl.constexpr
):
    """Load both sides of tokens; outside the band, the second is not read."""
    dims = tl.arange(0, P)
    first_XP = _load(first, tokens, dims, T, H)
    second_XP = first_XP
    if BAND:
        second_XP = _load(second, tokens, dims, T, H)
    return _Sides(first_XP, second_XP)


@triton.jit
def _columns(first, score, T, BAND: tl.constexpr, M: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the columns that M rows see: the first, the first in the band, and the end."""
    low = tl.maximum(0, first - score.window + 1) // C * C
    split = tl.maximum(low, tl.maximum(0, first - score.band) // C * C) if BAND else low
    return low, split, tl.minimum(first + M, T)


@triton.jit
def _nth(best_ML, n: tl.constexpr, L: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the n-th element of each descending list."""
    return tl.sum(tl.where(tl.arange(0, L)[None, :] == n - 1, best_ML, 0.0), 1)


@triton.jit
def _visit(  # type: ignore[no-untyped-def]
    low, high, tile, own, factor_M, q, k, v, score, drop, sums, T,
    H: tl.constexpr, n: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Add the columns low ≤ j < high to the running sums of a tile of rows."""
    top_M, sum_M, out_MP, moment_M, best_ML, level_M = sums
    dims = tl.arange(0, P)
    for start in range(low, high, C):
        columns_C = start + tl.arange(0, C)
        other = _sides(k, q, columns_C, T, H, BAND, P)
        i_MC, j_MC = tile.i_M[:, None], columns_C[None, :]
        _, scores_MC = _scores(own, other, score, factor_M[:, None], i_MC, j_MC, BAND)
        peak_M = tl.maximum(top_M, tl.max(scores_MC, 1))
        decay_M = tl.exp2(top_M - peak_M)
        weights_MC = tl.exp2(scores_MC - peak_M[:, None])
        top_M = peak_M
        sum_M = sum_M * decay_M + tl.sum(weights_MC, 1)
        if MODE == _ENTROPY:
            products_MC = tl.where(weights_MC > 0, weights_MC * scores_MC, 0.0)
            moment_M = moment_M * decay_M + tl.sum(products_MC, 1)
        if MODE == _RMS:
            moment_M = moment_M * decay_M * decay_M + tl.sum(weights_MC * weights_MC, 1)
        if MODE == _TOPK:
            edge_M = _nth(best_ML, n, L)
            # Of a descending and an ascending sequence, the element-wise maxima are the best of both.
            ascending_ML = tl.flip(tl.topk(scores_MC, L), 1)
            merged_ML = tl.sort(tl.maximum(best_ML, ascending_ML), descending=True)
            next_M = _nth(merged_ML, n, L)
            # All earlier scores above the former edge are in the list.
            listed_M = tl.sum((best_ML == next_M[:, None]).to(tl.float32), 1)
            level_M = tl.where(next_M == edge_M, level_M, listed_M)
            level_M += tl.sum((scores_MC == next_M[:, None]).to(tl.float32), 1)
            best_ML = merged_ML
        if v.at is not None:
            v_CP = _load(v, columns_C, dims, T, H)
            out_MP = out_MP * decay_M[:, None]
            if drop.seed is not None:
                weights_MC *= _mask(drop, i_MC, start, tile.head, C, True)
            out_MP += _dot(weights_MC.to(v_CP.dtype), v_CP)
    return top_M, sum_M, out_MP, moment_M, best_ML, level_M


@triton.jit
def _store_statistic(  # type: ignore[no-untyped-def]
    tile, row, sinks, logsum_M, sums, n: tl.constexpr, MODE: tl.constexpr, L: tl.constexpr
):
    _, sum_M, _, moment_M, best_ML, level_M = sums
    at_M, mask_M = tile.at_M, tile.mask_M
    if MODE == _ENTROPY:
        all_M = logsum_M
        if sinks is not None:
            all_M = logsum_M * (1 - _sink_weight(sinks, tile.h, logsum_M))
        entropy_M = (all_M - moment_M / sum_M) / tl.log2(tile.i_M + 1.0)
        tl.store(row.statistic + at_M, tl.where(tile.i_M == 0, 1.0, entropy_M), mask=mask_M)
    if MODE == _RMS:
        tl.store(row.statistic + at_M, tl.sqrt(moment_M) / sum_M, mask=mask_M)
    if MODE == _TOPK:
        lanes = tl.arange(0, L)[None, :]
        largest_ML = tl.where(lanes < n, tl.exp2(best_ML - logsum_M[:, None]), 0.0)
        tl.store(row.statistic + at_M, tl.sum(largest_ML, 1), mask=mask_M)
        edge_M = tl.maximum(_nth(best_ML, n, L), _LOWEST)
        above_M = tl.sum((best_ML > edge_M[:, None]).to(tl.float32), 1)
        tl.store(row.edge + at_M, edge_M, mask=mask_M)
        tl.store(row.share + at_M, (n - above_M) / tl.maximum(level_M, 1.0), mask=mask_M)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, score, alphas, sinks, drop, row, context, T, N, g,
    H: tl.constexpr, n: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    first, tile = _tile(T, N, H, M, P)
    q, k = _of_head(q, tile.b, tile.h), _of_head(k, tile.b, tile.h // g)
    if v.at is not None:
        v = _of_head(v, tile.b, tile.h // g)
    score = _of_scores(score, alphas, tile.h)
    own = _sides(q, k, tile.i_M, T, H, BAND, P)
    factor_M = _load_factor(row, tile.at_M, tile.mask_M, M)
    zero_M = tl.zeros([M], tl.float32)
    best_ML = tl.full([M, L], -float("inf"), tl.float32)
    top_M, sum_M = zero_M + _LOWEST, zero_M
    if sinks is not None:
        top_M, sum_M = zero_M + tl.load(sinks + tile.h) * _LOG2_E, zero_M + 1.0
    sums = top_M, sum_M, tl.zeros([M, P], tl.float32), zero_M, best_ML, zero_M
    low, split, high = _columns(first, score, T, BAND, M, C)
    # Outside the band, then inside.
    for near in tl.static_range(not BAND, 2):
        sums = _visit(
            split if near else low, high if near else split, tile, own, factor_M, q, k, v,
            score, drop, sums, T, H, n, MODE, BAND and near == 1, C, P, L,
        )  # fmt: skip
    top_M, sum_M, out_MP, _, _, _ = sums
    logsum_M = top_M + tl.log2(sum_M)
    tl.store(row.logsum + tile.at_M, logsum_M, mask=tile.mask_M)
    if v.at is not None:
        out_MP = (out_MP / sum_M[:, None]).to(context.dtype.element_ty)
        tl.store(context + tile.at_MP, out_MP, mask=tile.mask_MP)
    _store_statistic(tile, row, sinks, logsum_M, sums, n, MODE, L)


@triton.jit
def _weights_and_gradient(  # type: ignore[no-untyped-def]
    scores_XY, i_XY, j_XY, start, head, dout_XP, v_YP, numbers, delta_M, dmean, mean_at_XY, drop,
    N, T, MODE: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Return the weights after dropout, and the gradient of the scores.

    ``dout_XP`` and ``v_YP`` are the vectors of the first and of the second dimension, whichever these
    are.
    """
    log_XY = scores_XY - _across(numbers.logsum, BY_ROW)
    weights_XY = tl.exp2(log_XY)
    dropped_XY, gradient_XY = weights_XY, weights_XY * 0
    if VALUES:
        gradient_XY = _dot(dout_XP, tl.trans(v_YP))
        if drop.seed is not None:
            mask_XY = _mask(drop, i_XY, start, head, C, BY_ROW)
            gradient_XY *= mask_XY
            dropped_XY *= mask_XY
    if dmean is not None:
        gradient_XY += _load_mean(dmean, mean_at_XY, i_XY, j_XY, T) / N
    slope_XY = _across(numbers.slope, BY_ROW)
    if MODE == _ENTROPY:
        information_XY = tl.where(weights_XY > 0, -log_XY, 0.0)
        positions_XY = tl.maximum(i_XY + 1, 2).to(tl.float32)
        gradient_XY += information_XY * (slope_XY / tl.log2(positions_XY))
    if MODE == _RMS:
        gradient_XY += weights_XY * (slope_XY / _across(numbers.statistic, BY_ROW))
    if MODE == _TOPK:
        edge_XY = _across(numbers.edge, BY_ROW)
        over_XY = scores_XY - edge_XY
        equal_XY = tl.maximum(tl.abs(edge_XY), 1.0) * _EQUAL
        level_XY = tl.where(over_XY >= -equal_XY, _across(numbers.share, BY_ROW), 0.0)
        gradient_XY += tl.where(over_XY > equal_XY, 1.0, level_XY) * slope_XY
    return dropped_XY, weights_XY * (gradient_XY - _across(delta_M, BY_ROW))


@triton.jit
def _numbers(  # type: ignore[no-untyped-def]
    row, i_M, at_M, mask_M, MODE: tl.constexpr, M: tl.constexpr
):
    """Load the factor, the log₂-sum, and the derivatives of the statistic of each row."""
    zero_M = tl.zeros([M], tl.float32)
    slope_M, statistic_M, edge_M, share_M = zero_M, zero_M, zero_M, zero_M
    factor_M = _load_factor(row, at_M, mask_M, M)
    logsum_M = tl.load(row.logsum + at_M, mask=mask_M, other=float("inf"))
    if MODE > 0:
        slope_M = tl.load(row.slope + at_M, mask=mask_M, other=0.0)
        statistic_M = tl.load(row.statistic + at_M, mask=mask_M, other=1.0)
    if MODE == _ENTROPY:
        # The entropy of a single weight is 1 by definition.
        slope_M = tl.where(i_M == 0, 0.0, slope_M)
    if MODE == _TOPK:
        edge_M = tl.load(row.edge + at_M, mask=mask_M, other=0.0)
        share_M = tl.load(row.share + at_M, mask=mask_M, other=0.0)
    return PerRow(factor_M, logsum_M, statistic_M, edge_M, share_M, slope_M)


@triton.jit
def _visit_columns(  # type: ignore[no-untyped-def]
    low, high, tile, own, numbers, delta_M, dout_MP, q, k, v, score, drop, dmean, mean_row_M,
    dq_MP, dk_MP, dfactor_M, T, N,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add the columns low ≤ j < high to the gradients of a tile of rows."""
    dims = tl.arange(0, P)
    for start in range(low, high, C):
        columns_C = start + tl.arange(0, C)
        other = _sides(k, q, columns_C, T, H, BAND, P)
        v_CP = other.first
        if v.at is not None:
            v_CP = _load(v, columns_C, dims, T, H)
        i_MC, j_MC = tile.i_M[:, None], columns_C[None, :]
        factor_MC = numbers.factor[:, None]
        raw_MC, scores_MC = _scores(own, other, score, factor_MC, i_MC, j_MC, BAND)
        _, dscores_MC = _weights_and_gradient(
            scores_MC, i_MC, j_MC, start, tile.head, dout_MP, v_CP, numbers, delta_M, dmean,
            mean_row_M[:, None], drop, N, T, MODE, v.at is not None, C, True,
        )  # fmt: skip
        dfactor_M += tl.sum(dscores_MC * raw_MC, 1)
        dq_MP += _dot(dscores_MC.to(other.first.dtype), other.first)
        if BAND:
            near_MC = tl.where(i_MC - j_MC <= score.band, dscores_MC, 0.0)
            dk_MP += _dot(near_MC.to(other.second.dtype), other.second)
    return dq_MP, dk_MP, dfactor_M


@triton.jit
def _mean_inner(  # type: ignore[no-untyped-def]
    low, high, inner_M, tile, own, numbers, q, k, score, dmean, mean_row_M, T, N,
    H: tl.constexpr, BAND: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add Σ_j p_ij dmean_ij / N of the columns low ≤ j < high to ``inner_M``."""
    for start in range(low, high, C):
        columns_C = start + tl.arange(0, C)
        other = _sides(k, q, columns_C, T, H, BAND, P)
        i_MC, j_MC = tile.i_M[:, None], columns_C[None, :]
        factor_MC = numbers.factor[:, None]
        _, scores_MC = _scores(own, other, score, factor_MC, i_MC, j_MC, BAND)
        dmean_MC = _load_mean(dmean, mean_row_M[:, None], i_MC, j_MC, T)
        inner_M += tl.sum(tl.exp2(scores_MC - numbers.logsum[:, None]) * dmean_MC, 1) / N
    return inner_M


@triton.jit
def _store_row_gradients(  # type: ignore[no-untyped-def]
    dq_MP, dk_MP, dfactor_M, tile, own, factor_M, score, dq, dq_rows, dk_rows, dfactor, dalphas,
    BAND: tl.constexpr,
):  # fmt: skip
    """Store the sums over columns; those of a band are scaled where they are completed."""
    at_M, mask_M, at_MP, mask_MP = tile.at_M, tile.mask_M, tile.at_MP, tile.mask_MP
    scale = score.scale * _LN_2
    dq_MP = dq_MP * factor_M[:, None]
    if dfactor is not None:
        tl.store(dfactor + at_M, dfactor_M * _LN_2, mask=mask_M)
    if BAND:
        dk_MP = dk_MP * factor_M[:, None]
        tl.store(dq_rows + at_MP, dq_MP, mask=mask_MP)
        tl.store(dk_rows + at_MP, dk_MP * score.alpha, mask=mask_MP)
        if dalphas is not None:
            dalpha_M = tl.sum(dk_MP * own.second.to(tl.float32), 1) * scale
            tl.store(dalphas + at_M, dalpha_M, mask=mask_M)
    else:
        tl.store(dq + at_MP, (dq_MP * scale).to(dq.dtype.element_ty), mask=mask_MP)


@triton.jit
def _row_gradients(  # type: ignore[no-untyped-def]
    q, k, v, score, alphas, sinks, drop, row, context, dcontext, dmean, deltas, dq, dq_rows, dk_rows,
    dfactor, dalphas, dsinks, T, N, g,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    first, tile = _tile(T, N, H, M, P)
    mean_row_M = (tile.b * T + tile.i_M) * T
    q, k = _of_head(q, tile.b, tile.h), _of_head(k, tile.b, tile.h // g)
    score = _of_scores(score, alphas, tile.h)
    own = _sides(q, k, tile.i_M, T, H, BAND, P)
    numbers = _numbers(row, tile.i_M, tile.at_M, tile.mask_M, MODE, M)
    low, split, high = _columns(first, score, T, BAND, M, C)
    # Σ_j p_ij times the gradient of p_ij.
    zero_M = tl.zeros([M], tl.float32)
    delta_M, dout_MP = numbers.slope * numbers.statistic, own.first
    if v.at is not None:
        v = _of_head(v, tile.b, tile.h // g)
        dout_MP = tl.load(dcontext + tile.at_MP, mask=tile.mask_MP, other=0.0)
        out_MP = tl.load(context + tile.at_MP, mask=tile.mask_MP, other=0.0)
        delta_M += tl.sum(out_MP.to(tl.float32) * dout_MP.to(tl.float32), 1)
    if dmean is not None:
        for near in tl.static_range(not BAND, 2):
            delta_M = _mean_inner(
                split if near else low, high if near else split, delta_M, tile, own, numbers,
                q, k, score, dmean, mean_row_M, T, N, H, BAND and near == 1, C, P,
            )  # fmt: skip
    if sinks is not None:
        weight_M, shift_M = _sink_weight(sinks, tile.h, numbers.logsum), zero_M
        if MODE == _ENTROPY:
            # The derivative −ln p − 1 of −p ln p lacks its 1 elsewhere, which cancels without a sink.
            shift_M = numbers.slope * _LOG2_E / tl.log2(tl.maximum(tile.i_M + 1, 2).to(tl.float32))
        delta_M += weight_M * shift_M
        tl.store(dsinks + tile.at_M, weight_M * (shift_M - delta_M), mask=tile.mask_M)
    tl.store(deltas + tile.at_M, delta_M, mask=tile.mask_M)
    dfactor_M, dq_MP = zero_M, tl.zeros([M, P], tl.float32)
    dk_MP = dq_MP
    for near in tl.static_range(not BAND, 2):
        dq_MP, dk_MP, dfactor_M = _visit_columns(
            split if near else low, high if near else split, tile, own, numbers, delta_M, dout_MP,
            q, k, v, score, drop, dmean, mean_row_M, dq_MP, dk_MP, dfactor_M, T, N,
            H, MODE, BAND and near == 1, C, P,
        )  # fmt: skip
    _store_row_gradients(
        dq_MP, dk_MP, dfactor_M, tile, own, numbers.factor, score, dq, dq_rows, dk_rows, dfactor,
        dalphas, BAND,
    )  # fmt: skip


@triton.jit
def _visit_rows(  # type: ignore[no-untyped-def]
    low, high, other, v_CP, start, q, k, dout, score, drop, row, deltas, head, dmean,
    dmean_at, dk_CP, dv_CP, dq_CP, T, N,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr, VALUES: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add the rows low ≤ i < high of a head to the gradients of a tile of columns."""
    dims, columns_C = tl.arange(0, P), start + tl.arange(0, C)
    for first in range(low, high, M):
        i_M = first + tl.arange(0, M)
        at_M, mask_M = head.to(tl.int64) * T + i_M, i_M < T
        own = _sides(q, k, i_M, T, H, BAND, P)
        dout_MP = own.first
        if VALUES:
            dout_MP = _load(dout, i_M, dims, T, H)
        numbers = _numbers(row, i_M, at_M, mask_M, MODE, M)
        delta_M = tl.load(deltas + at_M, mask=mask_M, other=0.0)
        i_CM, j_CM = i_M[None, :], columns_C[:, None]
        factor_CM = numbers.factor[None, :]
        _, scores_CM = _scores(other, own, score, factor_CM, i_CM, j_CM, BAND)
        dropped_CM, dscores_CM = _weights_and_gradient(
            scores_CM, i_CM, j_CM, start, head, v_CP, dout_MP, numbers, delta_M, dmean,
            dmean_at + i_CM.to(tl.int64) * T, drop, N, T, MODE, VALUES, C, False,
        )  # fmt: skip
        if VALUES:
            dv_CP += _dot(dropped_CM.to(dout_MP.dtype), dout_MP)
        dscores_CM = dscores_CM * factor_CM
        dk_CP += _dot(dscores_CM.to(own.first.dtype), own.first)
        if BAND:
            near_CM = tl.where(i_CM - j_CM <= score.band, dscores_CM, 0.0)
            dq_CP += _dot(near_CM.to(own.second.dtype), own.second)
    return dk_CP, dv_CP, dq_CP


@triton.jit
def _column_gradients(  # type: ignore[no-untyped-def]
    q, k, v, score, alphas, drop, row, dcontext, dmean, deltas, dq_rows, dk_rows, dq, dk, dv,
    T, N, g,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    # The first columns have the most rows.
    start = tl.program_id(0) * C
    key_head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    columns_C, dims = start + tl.arange(0, C), tl.arange(0, P)
    mask_CP = (columns_C[:, None] < T) & (dims[None, :] < H)
    k = _of_head(k, b, key_head)
    k_CP = _load(k, columns_C, dims, T, H)
    v_CP, dout = k_CP, q
    if v.at is not None:
        v_CP = _load(_of_head(v, b, key_head), columns_C, dims, T, H)
        dout = Heads(dcontext + b * T * N * H, 0, H, N * H)
    dk_CP, dv_CP = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32)
    low, high = start // M * M, tl.minimum(T, start + C - 1 + score.window)
    split = high
    if BAND:
        split = tl.minimum(high, (start + C + score.band + M - 1) // M * M)
    for h in range(key_head * g, key_head * g + g):
        head = tl.program_id(2) * N + h
        at_CP = ((b * T + columns_C[:, None]) * N + h) * H + dims[None, :]
        q_h, score_h = _of_head(q, b, h), _of_scores(score, alphas, h)
        other, dq_CP = _sides(k, q_h, columns_C, T, H, BAND, P), tl.zeros([C, P], tl.float32)
        for near in tl.static_range(not BAND, 2):
            dk_CP, dv_CP, dq_CP = _visit_rows(
                low if near else split, split if near else high, other, v_CP, start, q_h, k,
                _of_head(dout, 0, h), score_h, drop, row, deltas, head, dmean, b * T * T,
                dk_CP, dv_CP, dq_CP, T, N, H, MODE, BAND and near == 1, v.at is not None, M, C, P,
            )  # fmt: skip
        if BAND:
            dq_CP = dq_CP * score_h.alpha + tl.load(dq_rows + at_CP, mask=mask_CP, other=0.0)
            dq_CP = dq_CP * score.scale * _LN_2
            tl.store(dq + at_CP, dq_CP.to(dq.dtype.element_ty), mask=mask_CP)
            dk_CP += tl.load(dk_rows + at_CP, mask=mask_CP, other=0.0)
    at_CP = ((b * T + columns_C[:, None]) * tl.num_programs(1) + key_head) * H + dims[None, :]
    dk_CP = dk_CP * score.scale * _LN_2
    tl.store(dk + at_CP, dk_CP.to(dk.dtype.element_ty), mask=mask_CP)
    if v.at is not None:
        tl.store(dv + at_CP, dv_CP.to(dv.dtype.element_ty), mask=mask_CP)


@triton.jit
def _mean_weights(  # type: ignore[no-untyped-def]
    q, k, score, alphas, row, mean, T, N, g,
    H: tl.constexpr, BAND: tl.constexpr, M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    first, start, b = tl.program_id(0) * M, tl.program_id(1) * C, tl.program_id(2).to(tl.int64)
    i_M, columns_C = first + tl.arange(0, M), start + tl.arange(0, C)
    mean_MC = tl.zeros([M, C], tl.float32)
    if (start < first + M) & (start + C > first - score.window + 1):
        for h in range(N):
            at_M, mask_M = (b * N + h) * T + i_M, i_M < T
            q_h, k_h = _of_head(q, b, h), _of_head(k, b, h // g)
            own = _sides(q_h, k_h, i_M, T, H, BAND, P)
            other = _sides(k_h, q_h, columns_C, T, H, BAND, P)
            factor_MC = _load_factor(row, at_M, mask_M, M)[:, None]
            _, scores_MC = _scores(
                own, other, _of_scores(score, alphas, h), factor_MC, i_M[:, None],
                columns_C[None, :], BAND,
            )  # fmt: skip
            logsum_M = tl.load(row.logsum + at_M, mask=mask_M, other=float("inf"))
            mean_MC += tl.exp2(scores_MC - logsum_M[:, None])
    at_MC = (b * T + i_M[:, None]) * T + columns_C[None, :]
    mask_MC = (i_M[:, None] < T) & (columns_C[None, :] < T)
    tl.store(mean + at_MC, mean_MC / N, mask=mask_MC)


KERNELS = {
    "forward": _forward,
    "row_gradients": _row_gradients,
    "column_gradients": _column_gradients,
    "mean_weights": _mean_weights,
}
