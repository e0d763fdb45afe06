"""Selected branch on a CPU, a custom torch operator: each block with all queries that selected it.

The weights of a row are relative to the score of the query with its own key, which every query
sees, so that no running maximum is carried from block to block; if the sum overflows, the maximum
of each row is computed first and the band is repeated. A query visits a block once: all writes go
to distinct rows. Scores are binary logarithms; products and sums are in fp32 or wider; q is divided
by √H, and the last query belongs to the last token.

B batch, T queries, S tokens, K key/value heads, g query heads per key/value head, H head dim, n
selected blocks; x = H + 1, t the queries of a band, r those of a visit, c the tokens of the visited
block, R = r·g.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library

from gpt2.nsa.query_major import (
    LOG2_E,
    ScratchBuffers,
    accumulation_dtype,
    append_minus_one,
    append_shift,
    by_head,
    exact_products,
)

# Queries per band. With six heads of 64 elements, a band and its outputs take 12 MiB and stay in
# the L3 cache while all blocks are processed.
QUERIES_PER_TILE = 4096
# Queries per visit. The matrices of a visit stay in the L2 cache.
QUERIES_PER_VISIT = 512


@dataclass(frozen=True)
class BlockVisit:
    """Distinct queries of a band that attend to one block; consecutive ones are a slice, without a
    gather.

    The first ``own`` of ``height`` queries belong to tokens of the block itself, from its token
    ``since`` on, and see the block's tokens up to their own.
    """

    columns: slice
    rows: slice | Tensor
    height: int
    own: int
    since: int


@dataclass(frozen=True)
class QueryTile:
    """Queries ``rows`` and the visits of these queries, in block order."""

    rows: slice
    visits: list[BlockVisit]


def query_tiles(blocks_Tn: Tensor, size: int, length: int) -> list[QueryTile]:
    """Split the queries, of which the last belongs to token ``length`` − 1, into bands, and group
    each band's queries by the selected block of ``size`` tokens; every query has selected its own
    block.
    """
    first = length - len(blocks_Tn)
    bands = []
    for start, blocks_tn in zip(
        range(0, len(blocks_Tn), QUERIES_PER_TILE), blocks_Tn.split(QUERIES_PER_TILE), strict=True
    ):
        visits = _visits(blocks_tn, size, first + start, length)
        bands.append(QueryTile(slice(start, start + len(blocks_tn)), visits))
    return bands


def forward(
    q_TgH: Tensor,
    k_SH: Tensor,
    v_SH: Tensor,
    bands: Sequence[QueryTile],
    buffers: ScratchBuffers,
    context_TgH: Tensor,
    logsums_Tg: Tensor,
) -> None:
    """Write the head outputs and the log₂-sum of every row. q must be divided by √H already."""
    keys_Sx = append_minus_one(k_SH)
    own_T1H = k_SH[len(k_SH) - len(q_TgH) :, None]
    for band in bands:
        q_tgH = q_TgH[band.rows]
        products = torch.mul(q_tgH, own_T1H[band.rows], out=buffers.get("out", *q_tgH.shape))
        shift_tg = products.sum(-1).mul_(LOG2_E)
        out_tgH, sums_tg = _sums(q_tgH, shift_tg, keys_Sx, v_SH, band, buffers)
        # Below the square root, products of weights and values cannot overflow either. NaN compares
        # as False and is recomputed too.
        limit = torch.finfo(sums_tg.dtype).max ** 0.5
        if not bool((sums_tg < limit).all()):
            shift_tg = _row_maxima(q_tgH, keys_Sx, band, buffers)
            out_tgH, sums_tg = _sums(q_tgH, shift_tg, keys_Sx, v_SH, band, buffers)
        context_TgH[band.rows] = out_tgH.div_(sums_tg[..., None])
        logsums_Tg[band.rows] = sums_tg.log2_().add_(shift_tg)


def backward(
    dcontext_TgH: Tensor,
    q_TgH: Tensor,
    context_TgH: Tensor,
    logsums_Tg: Tensor,
    k_SH: Tensor,
    v_SH: Tensor,
    bands: Sequence[QueryTile],
    buffers: ScratchBuffers,
    dq_TgH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v, and write the gradient of q to ``dq_TgH``."""
    keys_Sx, values_Sx = append_minus_one(k_SH), append_minus_one(v_SH)
    dk_SH, dv_SH = torch.zeros_like(k_SH), torch.zeros_like(v_SH)
    for band in bands:
        dout_tgH = dcontext_TgH[band.rows]
        dq_tgH = buffers.get("out", *dout_tgH.shape)
        inner_tg = torch.mul(dout_tgH, context_TgH[band.rows], out=dq_tgH).sum(-1)
        dout_tgx = _shifted(dout_tgH, 1.0, inner_tg, buffers, "band dout")
        q_tgx = _shifted(q_TgH[band.rows], LOG2_E, logsums_Tg[band.rows], buffers, "band q")
        dq_tgH.zero_()
        for visit in band.visits:
            columns = visit.columns
            q_Rx = _take(q_tgx, visit, buffers, "q")
            dout_Rx = _take(dout_tgx, visit, buffers, "dout")
            weights_Rc = _scores(q_Rx, keys_Sx, visit, buffers).exp2_()
            dv_SH[columns].addmm_(weights_Rc.T, dout_Rx[:, :-1])
            dscores_Rc = buffers.product("dscores", dout_Rx, values_Sx[columns].T)
            dscores_Rc.mul_(weights_Rc)
            dk_SH[columns].addmm_(dscores_Rc.T, q_Rx[:, :-1])
            _add_product(dq_tgH, visit, dscores_Rc, k_SH[columns], buffers)
        dq_TgH[band.rows] = dq_tgH
    # The rows of q were scaled by log₂ e.
    return dk_SH.div_(LOG2_E), dv_SH


def _visits(blocks_tn: Tensor, size: int, first: int, length: int) -> list[BlockVisit]:
    """Group the queries of a band, which starts at token ``first``, by selected block."""
    _queries, count = blocks_tn.shape
    # A stable sort lists the queries of a block in ascending order: first the queries of its own
    # tokens, then those of the next block, which usually select the previous block too and are
    # therefore consecutive.
    by_block, order = blocks_tn.flatten().sort(stable=True)
    rows = order // count
    near = by_block[(first + rows) // size - by_block < 2]
    blocks = -(-length // size)
    counts, near_counts = (
        torch.bincount(x + 1, minlength=blocks + 1).tolist() for x in (by_block, near)
    )
    spans, start = list[tuple[int, int, int]](), counts[0]
    for block, (near_count, total) in enumerate(zip(near_counts[1:], counts[1:], strict=True)):
        spans += _even_spans(block, start, start + near_count)
        spans += _even_spans(block, start + near_count, start + total)
        start += total
    starts = rows[[start for _, start, _ in spans]].tolist()
    lasts = rows[[stop - 1 for *_, stop in spans]].tolist()
    visits = []
    for (block, start, stop), low, last in zip(spans, starts, lasts, strict=True):
        begin, end = block * size, min((block + 1) * size, length)
        consecutive = last - low == stop - start - 1
        # All queries of the block's own tokens have selected the block.
        own = min(stop - start, end - first - low)
        queries_r = slice(low, last + 1) if consecutive else rows[start:stop]
        columns, since = slice(begin, end), first + low - begin
        visits.append(BlockVisit(columns, queries_r, stop - start, max(0, own), since))
    return visits


def _even_spans(block: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Split [start, stop) into spans of similar size, at most ``QUERIES_PER_VISIT``; thin products
    are slow.
    """
    parts = max(1, -(-(stop - start) // QUERIES_PER_VISIT))
    step = max(1, -(-(stop - start) // parts))
    return [(block, begin, min(begin + step, stop)) for begin in range(start, stop, step)]


def _sums(
    q_tgH: Tensor,
    shift_tg: Tensor,
    keys_Sx: Tensor,
    v_SH: Tensor,
    band: QueryTile,
    buffers: ScratchBuffers,
) -> tuple[Tensor, Tensor]:
    """Return Σ 2^(score − shift) · v (tgH) and Σ 2^(score − shift) (tg) of every row."""
    q_tgx = _shifted(q_tgH, LOG2_E, shift_tg, buffers, "band q")
    out_tgH, sums_tg = buffers.get("out", *q_tgH.shape).zero_(), torch.zeros_like(shift_tg)
    for visit in band.visits:
        q_Rx = _take(q_tgx, visit, buffers, "q")
        weights_Rc = _scores(q_Rx, keys_Sx, visit, buffers).exp2_()
        _add(sums_tg, visit, weights_Rc.sum(-1))
        _add_product(out_tgH, visit, weights_Rc, v_SH[visit.columns], buffers)
    return out_tgH, sums_tg


def _row_maxima(q_tgH: Tensor, keys_Sx: Tensor, band: QueryTile, buffers: ScratchBuffers) -> Tensor:
    highest_tg = q_tgH.new_full(q_tgH.shape[:-1], -math.inf)
    q_tgx = _shifted(q_tgH, LOG2_E, torch.zeros_like(highest_tg), buffers, "band q")
    for visit in band.visits:
        scores_Rc = _scores(_take(q_tgx, visit, buffers, "q"), keys_Sx, visit, buffers)
        maxima_rg = scores_Rc.amax(-1).view(visit.height, -1)
        highest_tg[visit.rows] = torch.maximum(highest_tg[visit.rows], maxima_rg)
    return highest_tg


def _shifted(
    x_tgH: Tensor, factor: float, shift_tg: Tensor, buffers: ScratchBuffers, name: str
) -> Tensor:
    return append_shift(x_tgH, factor, shift_tg, buffers, name).unflatten(0, x_tgH.shape[:2])


def _take(x_tgx: Tensor, visit: BlockVisit, buffers: ScratchBuffers, name: str) -> Tensor:
    """Return the rows of ``x_tgx`` of the queries of a visit, by query and head: Rx."""
    if isinstance(visit.rows, slice):
        return x_tgx[visit.rows].flatten(0, 1)
    rows_rgx = buffers.get(name, visit.height, *x_tgx.shape[1:])
    return torch.index_select(x_tgx, 0, visit.rows, out=rows_rgx).flatten(0, 1)


def _scores(q_Rx: Tensor, keys_Sx: Tensor, visit: BlockVisit, buffers: ScratchBuffers) -> Tensor:
    """Return the scores of a visit, Rc, with −∞ for tokens that a query must not see."""
    scores_Rc = buffers.product("scores", q_Rx, keys_Sx[visit.columns].T)
    if visit.own:
        scores_rgc = scores_Rc.unflatten(0, (visit.height, -1))[: visit.own]
        buffers.masks.hide_(scores_rgc.transpose(0, 1), visit.since)
    return scores_Rc


def _add(sums_tg: Tensor, visit: BlockVisit, values_R: Tensor) -> None:
    values_rg = values_R.view(visit.height, -1)
    if isinstance(visit.rows, slice):
        sums_tg[visit.rows].add_(values_rg)
    else:
        sums_tg.index_add_(0, visit.rows, values_rg)


def _add_product(
    sums_tgH: Tensor, visit: BlockVisit, left_Rc: Tensor, right_cH: Tensor, buffers: ScratchBuffers
) -> None:
    if isinstance(visit.rows, slice):
        sums_tgH[visit.rows].flatten(0, 1).addmm_(left_Rc, right_cH)
    else:
        product_RH = buffers.product("product", left_Rc, right_cH)
        product_rgH = product_RH.view(visit.height, *sums_tgH.shape[1:])
        sums_tgH.index_add_(0, visit.rows, product_rgH)


@library.custom_op("kablate::selected", mutates_args=())
def selected(
    q_BKgTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return attention to selected blocks of ``size`` tokens (−1 for none): BKgTH and BKgT."""
    context, logsums = _outputs(q_BKgTH)
    buffers = ScratchBuffers(logsums)
    with exact_products(q_BKgTH):
        for index, q_gTH, k_SH, v_SH in by_head(logsums.dtype, q_BKgTH, k_BKSH, v_BKSH):
            bands = query_tiles(blocks_BKTn[index], size, len(k_SH))
            outputs = (x[index].transpose(0, 1) for x in (context, logsums))
            forward(q_gTH.transpose(0, 1), k_SH, v_SH, bands, buffers, *outputs)
    return context, logsums


@library.custom_op("kablate::selected_backward", mutates_args=())
def selected_backward(
    dcontext_BKgTH: Tensor,
    q_BKgTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    context_BKgTH: Tensor,
    logsums_BKgT: Tensor,
    blocks_BKTn: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x) for x in (q_BKgTH, k_BKSH, v_BKSH))
    buffers, by_row = ScratchBuffers(logsums_BKgT), (dcontext_BKgTH, q_BKgTH, context_BKgTH)
    with exact_products(q_BKgTH):
        for index, *rows, k_SH, v_SH in by_head(logsums_BKgT.dtype, *by_row, k_BKSH, v_BKSH):
            bands = query_tiles(blocks_BKTn[index], size, len(k_SH))
            dout, q, context, logsums, dq_TgH = (
                x.transpose(0, 1) for x in (*rows, logsums_BKgT[index], dq[index])
            )
            dk[index], dv[index] = backward(
                dout, q, context, logsums, k_SH, v_SH, bands, buffers, dq_TgH
            )
    return dq, dk, dv


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q))


def _gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, blocks, ctx.size = inputs
    ctx.save_for_backward(q, k, v, *output, blocks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dcontext: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, *saved = ctx.saved_tensors
    gradients = selected_backward(dcontext.to(q.dtype).contiguous(), q, *saved, ctx.size)
    # Block indices and the block size have no gradient.
    return *gradients, None, None


selected.register_fake(_outputs)
selected_backward.register_fake(_gradients)
selected.register_autograd(_differentiate, setup_context=_save_for_backward)
