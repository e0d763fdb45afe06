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
tile, P the padded H, L the padded number of largest scores. Queries, keys and values have any
strides (qb of a sequence, qn of a head, qt of a token); the other tensors of width H are BTNH in
memory, and those of a number per row are BNT.
"""

import math

import triton
import triton.language as tl

# Statistics of a row.
MODES = {"": 0, "entropy": 1, "rms": 2, "topk": 3}
_ENTROPY, _RMS, _TOPK = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LN_2 = tl.constexpr(math.log(2))
# The fewest rounds of Philox that pass all tests of its authors (Salmon et al. 2011, table 2).
_ROUNDS = tl.constexpr(7)
# Edge of the largest scores of a row with fewer scores: below every score.
_LOWEST = tl.constexpr(-1e30)
# Scores this close relative to their size are equal: kernels may sum a product in different orders.
_EQUAL = tl.constexpr(2.0**-19)


@triton.jit
def _dot(left, right):  # type: ignore[no-untyped-def]
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _load(x, tokens, stride, dims, T, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the vectors of tokens; zeros for tokens that do not exist."""
    at = tokens.to(tl.int64)[:, None] * stride + dims[None, :]
    return tl.load(x + at, mask=(tokens[:, None] < T) & (dims[None, :] < H), other=0.0)


@triton.jit
def _mask(  # type: ignore[no-untyped-def]
    seed, i_XY, start, head, keep, threshold, C: tl.constexpr, BY_ROW: tl.constexpr
):
    """Return the dropout mask, 0 or ``keep``, of rows ``i_XY`` and C columns from ``start`` on."""
    quads_Q = start // 4 + tl.arange(0, C // 4)
    column_XY = (quads_Q[None, :] if BY_ROW else quads_Q[:, None]) + i_XY * 0
    zero_XY = column_XY * 0
    a, b, c, d = tl.philox(
        tl.load(seed), column_XY, i_XY + zero_XY, head + zero_XY, zero_XY, n_rounds=_ROUNDS
    )
    # The four words of a counter are those of four columns.
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.int32, bitcast=True)
    # Not a bit: AMD's compiler cannot exchange bits between threads.
    mask = tl.where(words >= threshold, keep, 0.0)
    if BY_ROW:
        mask_XY = tl.reshape(mask, [i_XY.shape[0], C])
    else:
        mask_XY = tl.reshape(tl.permute(mask, (0, 2, 3, 1)), [C, i_XY.shape[1]])
    return mask_XY


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    first_XP, second_XP, first_YP, second_YP, alpha, factor_XY, i_XY, j_XY, scale, window, band,
    BAND: tl.constexpr,
):  # fmt: skip
    """Return the scores before and after the factor of the row; −∞ after it for hidden pairs.

    Those are products of the first vectors, and in the band ``alpha`` times those of the second.
    """
    distance_XY = i_XY - j_XY
    raw_XY = _dot(first_XP, tl.trans(first_YP))
    if BAND:
        transposed_XY = _dot(second_XP, tl.trans(second_YP)) * alpha
        raw_XY += tl.where(distance_XY <= band, transposed_XY, 0.0)
    raw_XY = raw_XY * scale
    seen_XY = (distance_XY >= 0) & (distance_XY < window)
    return raw_XY, tl.where(seen_XY, raw_XY * factor_XY, -float("inf"))


@triton.jit
def _load_mean(dmean, at_XY, i_XY, j_XY, T):  # type: ignore[no-untyped-def]
    return tl.load(dmean + at_XY + j_XY, mask=(i_XY < T) & (j_XY <= i_XY), other=0.0)


@triton.jit
def _nth(best_ML, n: tl.constexpr, L: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the n-th element of each descending list."""
    return tl.sum(tl.where(tl.arange(0, L)[None, :] == n - 1, best_ML, 0.0), 1)


@triton.jit
def _visit(  # type: ignore[no-untyped-def]
    low, high, q_MP, k_MP, rows_M, head, alpha, factor_M, q, k, v, seed,
    top_M, sum_M, out_MP, moment_M, best_ML, level_M,
    scale, keep, threshold, T, window, band, qt, kt, vt,
    H: tl.constexpr, n: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Add the columns low ≤ j < high to the running sums of a tile of rows."""
    dims = tl.arange(0, P)
    for start in range(low, high, C):
        columns_C = start + tl.arange(0, C)
        k_CP = _load(k, columns_C, kt, dims, T, H)
        t_CP = k_CP
        if BAND:
            t_CP = _load(q, columns_C, qt, dims, T, H)
        _, scores_MC = _scores(
            q_MP, k_MP, k_CP, t_CP, alpha, factor_M[:, None], rows_M[:, None], columns_C[None, :],
            scale, window, band, BAND,
        )  # fmt: skip
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
        if v is not None:
            v_CP = _load(v, columns_C, vt, dims, T, H)
            out_MP = out_MP * decay_M[:, None]
            if seed is not None:
                weights_MC *= _mask(seed, rows_M[:, None], start, head, keep, threshold, C, True)
            out_MP += _dot(weights_MC.to(v_CP.dtype), v_CP)
    return top_M, sum_M, out_MP, moment_M, best_ML, level_M


@triton.jit
def _store_statistic(  # type: ignore[no-untyped-def]
    rows_M, at_M, mask_M, logsum_M, sum_M, moment_M, best_ML, level_M, statistic, edges, shares,
    n: tl.constexpr, MODE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    if MODE == _ENTROPY:
        entropy_M = (logsum_M - moment_M / sum_M) / tl.log2(rows_M + 1.0)
        tl.store(statistic + at_M, tl.where(rows_M == 0, 1.0, entropy_M), mask=mask_M)
    if MODE == _RMS:
        tl.store(statistic + at_M, tl.sqrt(moment_M) / sum_M, mask=mask_M)
    if MODE == _TOPK:
        lanes = tl.arange(0, L)[None, :]
        largest_ML = tl.where(lanes < n, tl.exp2(best_ML - logsum_M[:, None]), 0.0)
        tl.store(statistic + at_M, tl.sum(largest_ML, 1), mask=mask_M)
        edge_M = tl.maximum(_nth(best_ML, n, L), _LOWEST)
        above_M = tl.sum((best_ML > edge_M[:, None]).to(tl.float32), 1)
        tl.store(edges + at_M, edge_M, mask=mask_M)
        tl.store(shares + at_M, (n - above_M) / tl.maximum(level_M, 1.0), mask=mask_M)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, alphas, factor, seed, context, logsums, statistic, edges, shares,
    scale, alpha, keep, threshold, T, N, g, window, band, qb, qn, qt, kb, kn, kt, vb, vn, vt,
    H: tl.constexpr, n: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    # The longest rows first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = tl.program_id(2) * N + h
    rows_M, dims = first + tl.arange(0, M), tl.arange(0, P)
    at_M, mask_M = head.to(tl.int64) * T + rows_M, rows_M < T
    q += b * qb + h.to(tl.int64) * qn
    k += b * kb + (h // g).to(tl.int64) * kn
    q_MP = _load(q, rows_M, qt, dims, T, H)
    k_MP = q_MP
    if BAND:
        k_MP = _load(k, rows_M, kt, dims, T, H)
        if alphas is not None:
            alpha = tl.load(alphas + h)
    if v is not None:
        v += b * vb + (h // g).to(tl.int64) * vn
    factor_M = tl.full([M], 1.0, tl.float32)
    if factor is not None:
        factor_M = tl.load(factor + at_M, mask=mask_M, other=1.0)
    top_M, sum_M = tl.full([M], _LOWEST, tl.float32), tl.zeros([M], tl.float32)
    out_MP = tl.zeros([M, P], tl.float32)
    moment_M, level_M = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    best_ML = tl.full([M, L], -float("inf"), tl.float32)
    low = tl.maximum(0, first - window + 1) // C * C
    high = tl.minimum(first + M, T)
    split = tl.maximum(low, tl.maximum(0, first - band) // C * C) if BAND else low
    # Outside the band, then inside.
    for near in tl.static_range(not BAND, 2):
        top_M, sum_M, out_MP, moment_M, best_ML, level_M = _visit(
            split if near else low, high if near else split,
            q_MP, k_MP, rows_M, head, alpha, factor_M, q, k, v, seed,
            top_M, sum_M, out_MP, moment_M, best_ML, level_M, scale, keep, threshold, T, window,
            band, qt, kt, vt, H, n, MODE, BAND and near == 1, C, P, L,
        )  # fmt: skip
    logsum_M = top_M + tl.log2(sum_M)
    tl.store(logsums + at_M, logsum_M, mask=mask_M)
    if v is not None:
        at_MP = ((b * T + rows_M[:, None]) * N + h) * H + dims[None, :]
        out_MP = out_MP / sum_M[:, None]
        mask_MP = mask_M[:, None] & (dims[None, :] < H)
        tl.store(context + at_MP, out_MP.to(context.dtype.element_ty), mask=mask_MP)
    _store_statistic(
        rows_M, at_M, mask_M, logsum_M, sum_M, moment_M, best_ML, level_M,
        statistic, edges, shares, n, MODE, L,
    )  # fmt: skip


@triton.jit
def _weights_and_gradient(  # type: ignore[no-untyped-def]
    scores_XY, i_XY, j_XY, start, head, dout_XP, v_YP, logsum_XY, delta_XY, slope_XY,
    statistic_XY, edge_XY, share_XY, dmean, mean_at_XY, seed, keep, threshold, N, T,
    MODE: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Return the weights after dropout, and the gradient of the scores.

    ``dout_XP`` and ``v_YP`` are the vectors of the first and of the second dimension, whichever these
    are.
    """
    log_XY = scores_XY - logsum_XY
    weights_XY = tl.exp2(log_XY)
    dropped_XY, gradient_XY = weights_XY, weights_XY * 0
    if VALUES:
        gradient_XY = _dot(dout_XP, tl.trans(v_YP))
        if seed is not None:
            mask_XY = _mask(seed, i_XY, start, head, keep, threshold, C, BY_ROW)
            gradient_XY *= mask_XY
            dropped_XY *= mask_XY
    if dmean is not None:
        gradient_XY += _load_mean(dmean, mean_at_XY, i_XY, j_XY, T) / N
    if MODE == _ENTROPY:
        information_XY = tl.where(weights_XY > 0, -log_XY, 0.0)
        positions_XY = tl.maximum(i_XY + 1, 2).to(tl.float32)
        gradient_XY += information_XY * (slope_XY / tl.log2(positions_XY))
    if MODE == _RMS:
        gradient_XY += weights_XY * (slope_XY / statistic_XY)
    if MODE == _TOPK:
        over_XY = scores_XY - edge_XY
        equal_XY = tl.maximum(tl.abs(edge_XY), 1.0) * _EQUAL
        level_XY = tl.where(over_XY >= -equal_XY, share_XY, 0.0)
        gradient_XY += tl.where(over_XY > equal_XY, 1.0, level_XY) * slope_XY
    return dropped_XY, weights_XY * (gradient_XY - delta_XY)


@triton.jit
def _row_numbers(  # type: ignore[no-untyped-def]
    rows_M, at_M, mask_M, factor, logsums, statistic, edges, shares, dstatistic,
    MODE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Load the factor, the log₂-sum, and the derivatives of the statistic of each row."""
    zero_M = tl.zeros([M], tl.float32)
    factor_M, slope_M, statistic_M, edge_M, share_M = zero_M + 1.0, zero_M, zero_M, zero_M, zero_M
    if factor is not None:
        factor_M = tl.load(factor + at_M, mask=mask_M, other=1.0)
    logsum_M = tl.load(logsums + at_M, mask=mask_M, other=float("inf"))
    if MODE > 0:
        slope_M = tl.load(dstatistic + at_M, mask=mask_M, other=0.0)
        statistic_M = tl.load(statistic + at_M, mask=mask_M, other=1.0)
    if MODE == _ENTROPY:
        # The entropy of a single weight is 1 by definition.
        slope_M = tl.where(rows_M == 0, 0.0, slope_M)
    if MODE == _TOPK:
        edge_M = tl.load(edges + at_M, mask=mask_M, other=0.0)
        share_M = tl.load(shares + at_M, mask=mask_M, other=0.0)
    return factor_M, logsum_M, slope_M, statistic_M, edge_M, share_M


@triton.jit
def _visit_columns(  # type: ignore[no-untyped-def]
    low, high, q_MP, k_MP, rows_M, head, alpha, factor_M, q, k, v, seed,
    dout_MP, logsum_M, delta_M, slope_M, statistic_M, edge_M, share_M, dmean, mean_row_M,
    dq_MP, dk_MP, dfactor_M,
    scale, keep, threshold, T, N, window, band, qt, kt, vt,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add the columns low ≤ j < high to the gradients of a tile of rows."""
    dims = tl.arange(0, P)
    for start in range(low, high, C):
        columns_C = start + tl.arange(0, C)
        k_CP = _load(k, columns_C, kt, dims, T, H)
        t_CP, v_CP = k_CP, k_CP
        if BAND:
            t_CP = _load(q, columns_C, qt, dims, T, H)
        if v is not None:
            v_CP = _load(v, columns_C, vt, dims, T, H)
        i_MC, j_MC = rows_M[:, None], columns_C[None, :]
        raw_MC, scores_MC = _scores(
            q_MP, k_MP, k_CP, t_CP, alpha, factor_M[:, None], i_MC, j_MC, scale, window, band, BAND
        )
        _, dscores_MC = _weights_and_gradient(
            scores_MC, i_MC, j_MC, start, head, dout_MP, v_CP, logsum_M[:, None],
            delta_M[:, None], slope_M[:, None], statistic_M[:, None], edge_M[:, None],
            share_M[:, None], dmean, mean_row_M[:, None], seed, keep, threshold, N, T,
            MODE, v is not None, C, True,
        )  # fmt: skip
        dfactor_M += tl.sum(dscores_MC * raw_MC, 1)
        dq_MP += _dot(dscores_MC.to(k_CP.dtype), k_CP)
        if BAND:
            near_MC = tl.where(i_MC - j_MC <= band, dscores_MC, 0.0)
            dk_MP += _dot(near_MC.to(t_CP.dtype), t_CP)
    return dq_MP, dk_MP, dfactor_M


@triton.jit
def _mean_inner(  # type: ignore[no-untyped-def]
    low, high, inner_M, q_MP, k_MP, rows_M, alpha, factor_M, q, k, logsum_M, dmean, mean_row_M,
    scale, T, N, window, band, qt, kt,
    H: tl.constexpr, BAND: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add Σ_j p_ij dmean_ij / N of the columns low ≤ j < high to ``inner_M``."""
    dims = tl.arange(0, P)
    for start in range(low, high, C):
        columns_C = start + tl.arange(0, C)
        k_CP = _load(k, columns_C, kt, dims, T, H)
        t_CP = k_CP
        if BAND:
            t_CP = _load(q, columns_C, qt, dims, T, H)
        i_MC, j_MC = rows_M[:, None], columns_C[None, :]
        _, scores_MC = _scores(
            q_MP, k_MP, k_CP, t_CP, alpha, factor_M[:, None], i_MC, j_MC, scale, window, band, BAND
        )
        dmean_MC = _load_mean(dmean, mean_row_M[:, None], i_MC, j_MC, T)
        inner_M += tl.sum(tl.exp2(scores_MC - logsum_M[:, None]) * dmean_MC, 1) / N
    return inner_M


@triton.jit
def _store_row_gradients(  # type: ignore[no-untyped-def]
    dq_MP, dk_MP, dfactor_M, k_MP, factor_M, alpha, alphas, at_M, mask_M, at_MP, mask_MP,
    dq, dq_rows, dk_rows, dfactor, dalphas, scale, BAND: tl.constexpr,
):  # fmt: skip
    """Store the sums over columns; those of a band are scaled where they are completed."""
    dq_MP = dq_MP * factor_M[:, None]
    if dfactor is not None:
        tl.store(dfactor + at_M, dfactor_M * _LN_2, mask=mask_M)
    if BAND:
        dk_MP = dk_MP * factor_M[:, None]
        tl.store(dq_rows + at_MP, dq_MP, mask=mask_MP)
        tl.store(dk_rows + at_MP, dk_MP * alpha, mask=mask_MP)
        if alphas is not None:
            dalpha_M = tl.sum(dk_MP * k_MP.to(tl.float32), 1) * scale
            tl.store(dalphas + at_M, dalpha_M, mask=mask_M)
    else:
        tl.store(dq + at_MP, (dq_MP * scale).to(dq.dtype.element_ty), mask=mask_MP)


@triton.jit
def _row_gradients(  # type: ignore[no-untyped-def]
    q, k, v, alphas, factor, seed, context, dcontext, logsums, statistic, edges, shares,
    dstatistic, dmean, deltas, dq, dq_rows, dk_rows, dfactor, dalphas,
    scale, alpha, keep, threshold, T, N, g, window, band, qb, qn, qt, kb, kn, kt, vb, vn, vt,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = tl.program_id(2) * N + h
    rows_M, dims = first + tl.arange(0, M), tl.arange(0, P)
    at_M, mask_M = head.to(tl.int64) * T + rows_M, rows_M < T
    mean_row_M = (b * T + rows_M) * T
    at_MP = ((b * T + rows_M[:, None]) * N + h) * H + dims[None, :]
    mask_MP = mask_M[:, None] & (dims[None, :] < H)
    q += b * qb + h.to(tl.int64) * qn
    k += b * kb + (h // g).to(tl.int64) * kn
    q_MP = _load(q, rows_M, qt, dims, T, H)
    k_MP = q_MP
    if BAND:
        k_MP = _load(k, rows_M, kt, dims, T, H)
        if alphas is not None:
            alpha = tl.load(alphas + h)
    factor_M, logsum_M, slope_M, statistic_M, edge_M, share_M = _row_numbers(
        rows_M, at_M, mask_M, factor, logsums, statistic, edges, shares, dstatistic, MODE, M
    )
    low = tl.maximum(0, first - window + 1) // C * C
    high = tl.minimum(first + M, T)
    split = tl.maximum(low, tl.maximum(0, first - band) // C * C) if BAND else low
    # Σ_j p_ij times the gradient of p_ij.
    delta_M, dout_MP = slope_M * statistic_M, q_MP
    if v is not None:
        v += b * vb + (h // g).to(tl.int64) * vn
        dout_MP = tl.load(dcontext + at_MP, mask=mask_MP, other=0.0)
        out_MP = tl.load(context + at_MP, mask=mask_MP, other=0.0)
        delta_M += tl.sum(out_MP.to(tl.float32) * dout_MP.to(tl.float32), 1)
    if dmean is not None:
        for near in tl.static_range(not BAND, 2):
            delta_M = _mean_inner(
                split if near else low, high if near else split, delta_M, q_MP, k_MP, rows_M,
                alpha, factor_M, q, k, logsum_M, dmean, mean_row_M, scale, T, N, window, band,
                qt, kt, H, BAND and near == 1, C, P,
            )  # fmt: skip
    tl.store(deltas + at_M, delta_M, mask=mask_M)
    dfactor_M, dq_MP = tl.zeros([M], tl.float32), tl.zeros([M, P], tl.float32)
    dk_MP = dq_MP
    for near in tl.static_range(not BAND, 2):
        dq_MP, dk_MP, dfactor_M = _visit_columns(
            split if near else low, high if near else split,
            q_MP, k_MP, rows_M, head, alpha, factor_M, q, k, v, seed, dout_MP, logsum_M, delta_M,
            slope_M, statistic_M, edge_M, share_M, dmean, mean_row_M, dq_MP, dk_MP, dfactor_M,
            scale, keep, threshold, T, N, window, band, qt, kt, vt, H, MODE,
            BAND and near == 1, C, P,
        )  # fmt: skip
    _store_row_gradients(
        dq_MP, dk_MP, dfactor_M, k_MP, factor_M, alpha, alphas, at_M, mask_M, at_MP, mask_MP,
        dq, dq_rows, dk_rows, dfactor, dalphas, scale * _LN_2, BAND,
    )  # fmt: skip


@triton.jit
def _visit_rows(  # type: ignore[no-untyped-def]
    low, high, k_CP, t_CP, v_CP, start, alpha, q, k, head, factor, seed, dcontext,
    logsums, deltas, statistic, edges, shares, dstatistic, dmean, dmean_at,
    dk_CP, dv_CP, dq_CP,
    scale, keep, threshold, T, N, window, band, qt, kt,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr, VALUES: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add the rows low ≤ i < high of a head to the gradients of a tile of columns."""
    dims, columns_C = tl.arange(0, P), start + tl.arange(0, C)
    for first in range(low, high, M):
        rows_M = first + tl.arange(0, M)
        at_M, mask_M = head.to(tl.int64) * T + rows_M, rows_M < T
        q_MP = _load(q, rows_M, qt, dims, T, H)
        k_MP, dout_MP = q_MP, q_MP
        if BAND:
            k_MP = _load(k, rows_M, kt, dims, T, H)
        if VALUES:
            dout_MP = _load(dcontext, rows_M, N * H, dims, T, H)
        factor_M, logsum_M, slope_M, statistic_M, edge_M, share_M = _row_numbers(
            rows_M, at_M, mask_M, factor, logsums, statistic, edges, shares, dstatistic, MODE, M
        )
        delta_M = tl.load(deltas + at_M, mask=mask_M, other=0.0)
        i_CM, j_CM = rows_M[None, :], columns_C[:, None]
        _, scores_CM = _scores(
            k_CP, t_CP, q_MP, k_MP, alpha, factor_M[None, :], i_CM, j_CM, scale, window, band, BAND
        )
        dropped_CM, dscores_CM = _weights_and_gradient(
            scores_CM, i_CM, j_CM, start, head, v_CP, dout_MP, logsum_M[None, :],
            delta_M[None, :], slope_M[None, :], statistic_M[None, :], edge_M[None, :],
            share_M[None, :], dmean, dmean_at + i_CM.to(tl.int64) * T, seed, keep, threshold, N, T,
            MODE, VALUES, C, False,
        )  # fmt: skip
        if VALUES:
            dv_CP += _dot(dropped_CM.to(dout_MP.dtype), dout_MP)
        dscores_CM = dscores_CM * factor_M[None, :]
        dk_CP += _dot(dscores_CM.to(q_MP.dtype), q_MP)
        if BAND:
            near_CM = tl.where(i_CM - j_CM <= band, dscores_CM, 0.0)
            dq_CP += _dot(near_CM.to(k_MP.dtype), k_MP)
    return dk_CP, dv_CP, dq_CP


@triton.jit
def _column_gradients(  # type: ignore[no-untyped-def]
    q, k, v, alphas, factor, seed, dcontext, logsums, statistic, edges, shares,
    dstatistic, dmean, deltas, dq_rows, dk_rows, dq, dk, dv,
    scale, alpha, keep, threshold, T, N, g, window, band, qb, qn, qt, kb, kn, kt, vb, vn, vt,
    H: tl.constexpr, MODE: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    # The first columns have the most rows.
    start = tl.program_id(0) * C
    key_head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    columns_C, dims = start + tl.arange(0, C), tl.arange(0, P)
    mask_CP = (columns_C[:, None] < T) & (dims[None, :] < H)
    k += b * kb + key_head.to(tl.int64) * kn
    k_CP = _load(k, columns_C, kt, dims, T, H)
    v_CP = k_CP
    if v is not None:
        v += b * vb + key_head.to(tl.int64) * vn
        v_CP = _load(v, columns_C, vt, dims, T, H)
    dk_CP, dv_CP = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32)
    low, high = start // M * M, tl.minimum(T, start + C - 1 + window)
    split = high
    if BAND:
        split = tl.minimum(high, (start + C + band + M - 1) // M * M)
    for h in range(key_head * g, key_head * g + g):
        head = tl.program_id(2) * N + h
        at_CP = ((b * T + columns_C[:, None]) * N + h) * H + dims[None, :]
        q_h = q + b * qb + tl.cast(h, tl.int64) * qn
        dout_h = dcontext
        if v is not None:
            dout_h = dcontext + (b * T * N + h) * H
        t_CP, dq_CP = k_CP, tl.zeros([C, P], tl.float32)
        if BAND:
            t_CP = _load(q_h, columns_C, qt, dims, T, H)
            if alphas is not None:
                alpha = tl.load(alphas + h)
        for near in tl.static_range(not BAND, 2):
            dk_CP, dv_CP, dq_CP = _visit_rows(
                low if near else split, split if near else high,
                k_CP, t_CP, v_CP, start, alpha, q_h, k, head, factor, seed, dout_h, logsums,
                deltas, statistic, edges, shares, dstatistic, dmean, b * T * T, dk_CP, dv_CP,
                dq_CP, scale, keep, threshold, T, N, window, band, qt, kt, H, MODE,
                BAND and near == 1, v is not None, M, C, P,
            )  # fmt: skip
        if BAND:
            dq_CP = dq_CP * alpha + tl.load(dq_rows + at_CP, mask=mask_CP, other=0.0)
            dq_CP = dq_CP * scale * _LN_2
            tl.store(dq + at_CP, dq_CP.to(dq.dtype.element_ty), mask=mask_CP)
            dk_CP += tl.load(dk_rows + at_CP, mask=mask_CP, other=0.0)
    at_CP = ((b * T + columns_C[:, None]) * tl.num_programs(1) + key_head) * H + dims[None, :]
    dk_CP = dk_CP * scale * _LN_2
    tl.store(dk + at_CP, dk_CP.to(dk.dtype.element_ty), mask=mask_CP)
    if v is not None:
        tl.store(dv + at_CP, dv_CP.to(dv.dtype.element_ty), mask=mask_CP)


@triton.jit
def _mean_weights(  # type: ignore[no-untyped-def]
    q, k, alphas, factor, logsums, mean,
    scale, alpha, T, N, g, window, band, qb, qn, qt, kb, kn, kt,
    H: tl.constexpr, BAND: tl.constexpr, M: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    first, start, b = tl.program_id(0) * M, tl.program_id(1) * C, tl.program_id(2).to(tl.int64)
    rows_M, columns_C = first + tl.arange(0, M), start + tl.arange(0, C)
    dims = tl.arange(0, P)
    mean_MC = tl.zeros([M, C], tl.float32)
    if (start < first + M) & (start + C > first - window + 1):
        for h in range(N):
            at_M = (b * N + h) * T + rows_M
            q_h = q + b * qb + tl.cast(h, tl.int64) * qn
            k_h = k + b * kb + tl.cast(h // g, tl.int64) * kn
            q_MP, k_CP = _load(q_h, rows_M, qt, dims, T, H), _load(k_h, columns_C, kt, dims, T, H)
            k_MP, t_CP = q_MP, k_CP
            if BAND:
                k_MP = _load(k_h, rows_M, kt, dims, T, H)
                t_CP = _load(q_h, columns_C, qt, dims, T, H)
                if alphas is not None:
                    alpha = tl.load(alphas + h)
            factor_M = tl.full([M], 1.0, tl.float32)
            if factor is not None:
                factor_M = tl.load(factor + at_M, mask=rows_M < T, other=1.0)
            _, scores_MC = _scores(
                q_MP, k_MP, k_CP, t_CP, alpha, factor_M[:, None], rows_M[:, None],
                columns_C[None, :], scale, window, band, BAND,
            )  # fmt: skip
            logsum_M = tl.load(logsums + at_M, mask=rows_M < T, other=float("inf"))
            mean_MC += tl.exp2(scores_MC - logsum_M[:, None])
    at_MC = (b * T + rows_M[:, None]) * T + columns_C[None, :]
    mask_MC = (rows_M[:, None] < T) & (columns_C[None, :] < T)
    tl.store(mean + at_MC, mean_MC / N, mask=mask_MC)


KERNELS = {
    "forward": _forward,
    "row_gradients": _row_gradients,
    "column_gradients": _column_gradients,
    "mean_weights": _mean_weights,
}
