"""Attention to selected blocks: block after block, each with all queries that selected it.

T queries, S tokens, g query heads of one key head, H head dim, n selected blocks, x = H + 1; t the
queries of a band, r those of a visit, c the tokens of its block, R = r·g. Scores are those of
``by_rows``.

A row's weights are taken relative to the score of the query with its own key, which it always sees:
they sum to 1 or more without a maximum that would have to be carried from block to block. Where
another key scores so much higher that the sum overflows, the rows' maxima are looked up first.
A query meets a block once, so all writes are to distinct rows and the result does not depend on an
order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.nsa.buffers import LOG2_E, Buffers, ending_in_minus_one, with_shift

# Queries of a band: with six heads of 64 numbers each, they and their outputs take 12 MiB, which stay
# in a third-level cache while block after block comes by.
BAND = 4096
# Queries of a visit: its matrices stay in a second-level cache.
ROWS = 512


@dataclass(frozen=True)
class Visit:
    """Distinct queries of a band at a block of tokens; the band's first is query 0.

    Queries that follow each other are a slice: they need not be gathered. The first ``own`` of them
    are the block's own tokens from ``since`` on: each sees those up to itself.
    """

    columns: slice
    rows: slice | Tensor
    height: int
    own: int
    since: int


@dataclass(frozen=True)
class Band:
    """Queries ``rows``, and their visits in the order of blocks."""

    rows: slice
    visits: list[Visit]


def bands_of(blocks_Tn: Tensor, size: int, length: int) -> list[Band]:
    """Of blocks of ``size`` tokens, −1 for none. The last query is that of token ``length`` − 1.

    A query sees of its own block, which it has to have selected, the tokens up to itself.
    """
    first = length - len(blocks_Tn)
    bands = []
    for start, blocks_tn in zip(range(0, len(blocks_Tn), BAND), blocks_Tn.split(BAND)):
        visits = _visits(blocks_tn, size, first + start, length)
        bands.append(Band(slice(start, start + len(blocks_tn)), visits))
    return bands


def forward(
    q_TgH: Tensor,
    k_SH: Tensor,
    v_SH: Tensor,
    bands: Sequence[Band],
    buffers: Buffers,
    context_TgH: Tensor,
    logsums_Tg: Tensor,
) -> None:
    """Writes head outputs, and the log₂-sum of every row. q is divided by √H."""
    keys_Sx = ending_in_minus_one(k_SH)
    own_T1H = k_SH[len(k_SH) - len(q_TgH) :, None]
    for band in bands:
        q_tgH = q_TgH[band.rows]
        products = torch.mul(q_tgH, own_T1H[band.rows], out=buffers.get("out", *q_tgH.shape))
        shift_tg = products.sum(-1).mul_(LOG2_E)
        out_tgH, sums_tg = _sums(q_tgH, shift_tg, keys_Sx, v_SH, band, buffers)
        # Below the root no product of a weight and a value overflows either. NaN is not below it.
        limit = torch.finfo(sums_tg.dtype).max ** 0.5
        if not bool((sums_tg < limit).all()):
            shift_tg = _highest(q_tgH, keys_Sx, band, buffers)
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
    bands: Sequence[Band],
    buffers: Buffers,
    dq_TgH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; writes that of q."""
    keys_Sx, values_Sx = ending_in_minus_one(k_SH), ending_in_minus_one(v_SH)
    dk_SH, dv_SH = torch.zeros_like(k_SH), torch.zeros_like(v_SH)
    for band in bands:
        dout_tgH = dcontext_TgH[band.rows]
        found_tgH = buffers.get("out", *dout_tgH.shape)
        inner_tg = torch.mul(dout_tgH, context_TgH[band.rows], out=found_tgH).sum(-1)
        dout_tgx = _every(dout_tgH, 1.0, inner_tg, buffers, "every dout")
        q_tgx = _every(q_TgH[band.rows], LOG2_E, logsums_Tg[band.rows], buffers, "every q")
        found_tgH.zero_()
        for visit in band.visits:
            columns = visit.columns
            q_Rx = _take(q_tgx, visit, buffers, "q")
            dout_Rx = _take(dout_tgx, visit, buffers, "dout")
            weights_Rc = _scores(q_Rx, keys_Sx, visit, buffers).exp2_()
            dv_SH[columns].addmm_(weights_Rc.T, dout_Rx[:, :-1])
            dscores_Rc = buffers.product("dscores", dout_Rx, values_Sx[columns].T)
            dscores_Rc.mul_(weights_Rc)
            dk_SH[columns].addmm_(dscores_Rc.T, q_Rx[:, :-1])
            _add_product(found_tgH, visit, dscores_Rc, k_SH[columns], buffers)
        dq_TgH[band.rows] = found_tgH
    # q came with the factor of binary logarithms.
    return dk_SH.div_(LOG2_E), dv_SH


def _visits(blocks_tn: Tensor, size: int, first: int, length: int) -> list[Visit]:
    """Of the queries from token ``first`` on."""
    queries, count = blocks_tn.shape
    # In a stable order the queries of a block ascend: first those of its own tokens, then those of
    # the next block's, which as a rule take the block before theirs too and follow each other.
    by_block, order = blocks_tn.flatten().sort(stable=True)
    rows = order // count
    near = by_block[(first + rows) // size - by_block < 2]
    blocks = -(-length // size)
    how_many, how_near = (
        torch.bincount(x + 1, minlength=blocks + 1).tolist() for x in (by_block, near)
    )
    spans, start = list[tuple[int, int, int]](), how_many[0]
    for block, (near_ones, all_ones) in enumerate(zip(how_near[1:], how_many[1:])):
        spans += _even(block, start, start + near_ones)
        spans += _even(block, start + near_ones, start + all_ones)
        start += all_ones
    starts = rows[[start for _, start, _ in spans]].tolist()
    lasts = rows[[stop - 1 for *_, stop in spans]].tolist()
    found = []
    for (block, start, stop), low, last in zip(spans, starts, lasts):
        begin, end = block * size, min((block + 1) * size, length)
        follow = last - low == stop - start - 1
        # Every query of the block's own tokens is there.
        own = min(stop - start, end - first - low)
        here = slice(low, last + 1) if follow else rows[start:stop]
        visit = Visit(slice(begin, end), here, stop - start, max(0, own), first + low - begin)
        found.append(visit)
    return found


def _even(block: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Parts of at most ``ROWS``, of about the same height, since thin products are slow."""
    parts = max(1, -(-(stop - start) // ROWS))
    step = max(1, -(-(stop - start) // parts))
    return [(block, begin, min(begin + step, stop)) for begin in range(start, stop, step)]


def _sums(
    q_tgH: Tensor, shift_tg: Tensor, keys_Sx: Tensor, v_SH: Tensor, band: Band, buffers: Buffers
) -> tuple[Tensor, Tensor]:
    """Σ 2^(score − shift) · v of every row, tgH, and without v, tg."""
    q_tgx = _every(q_tgH, LOG2_E, shift_tg, buffers, "every q")
    out_tgH, sums_tg = buffers.get("out", *q_tgH.shape).zero_(), torch.zeros_like(shift_tg)
    for visit in band.visits:
        q_Rx = _take(q_tgx, visit, buffers, "q")
        weights_Rc = _scores(q_Rx, keys_Sx, visit, buffers).exp2_()
        _add(sums_tg, visit, weights_Rc.sum(-1))
        _add_product(out_tgH, visit, weights_Rc, v_SH[visit.columns], buffers)
    return out_tgH, sums_tg


def _highest(q_tgH: Tensor, keys_Sx: Tensor, band: Band, buffers: Buffers) -> Tensor:
    """The highest score of every row, tg."""
    highest_tg = q_tgH.new_full(q_tgH.shape[:-1], -math.inf)
    q_tgx = _every(q_tgH, LOG2_E, torch.zeros_like(highest_tg), buffers, "every q")
    for visit in band.visits:
        scores_Rc = _scores(_take(q_tgx, visit, buffers, "q"), keys_Sx, visit, buffers)
        found_rg = scores_Rc.amax(-1).view(visit.height, -1)
        highest_tg[visit.rows] = torch.maximum(highest_tg[visit.rows], found_rg)
    return highest_tg


def _every(x_tgH: Tensor, factor: float, shift_tg: Tensor, buffers: Buffers, name: str) -> Tensor:
    """tgx."""
    return with_shift(x_tgH, factor, shift_tg, buffers, name).unflatten(0, x_tgH.shape[:2])


def _take(x_tgx: Tensor, visit: Visit, buffers: Buffers, name: str) -> Tensor:
    """Rx."""
    if isinstance(visit.rows, slice):
        return x_tgx[visit.rows].flatten(0, 1)
    found = buffers.get(name, visit.height, *x_tgx.shape[1:])
    return torch.index_select(x_tgx, 0, visit.rows, out=found).flatten(0, 1)


def _scores(q_Rx: Tensor, keys_Sx: Tensor, visit: Visit, buffers: Buffers) -> Tensor:
    """Rc, −∞ where a query does not see a token."""
    scores_Rc = buffers.product("scores", q_Rx, keys_Sx[visit.columns].T)
    if visit.own:
        scores_rgc = scores_Rc.unflatten(0, (visit.height, -1))[: visit.own]
        buffers.masks.hide_(scores_rgc.transpose(0, 1), visit.since)
    return scores_Rc


def _add(sums_tg: Tensor, visit: Visit, found_R: Tensor) -> None:
    """To the rows of the queries."""
    found_rg = found_R.view(visit.height, -1)
    if isinstance(visit.rows, slice):
        sums_tg[visit.rows].add_(found_rg)
    else:
        sums_tg.index_add_(0, visit.rows, found_rg)


def _add_product(
    sums_tgH: Tensor, visit: Visit, left_Rc: Tensor, right_cH: Tensor, buffers: Buffers
) -> None:
    """To the rows of the queries."""
    if isinstance(visit.rows, slice):
        sums_tgH[visit.rows].flatten(0, 1).addmm_(left_Rc, right_cH)
    else:
        found_RH = buffers.product("found", left_Rc, right_cH)
        found_rgH = found_RH.view(visit.height, *sums_tgH.shape[1:])
        sums_tgH.index_add_(0, visit.rows, found_rgH)
