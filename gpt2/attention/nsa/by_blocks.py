"""Attention to selected blocks: block after block, each with all queries that selected it.

T queries, S tokens, g query heads of one key head, H head dim, n selected blocks, x = H + 1; r the
queries of a visit, c the tokens of its block, R = r·g. Scores are those of ``by_rows``.

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

# Queries of a visit: with six heads of 64 numbers each its matrices stay in a second-level cache.
ROWS = 256


@dataclass(frozen=True)
class Visit:
    """Distinct queries at a block of tokens.

    ``later`` is what the first of them, as many as it has rows, do not see.
    """

    columns: slice
    rows_r: Tensor
    later_r1c: Tensor | None


def visits_of(blocks_Tn: Tensor, size: int, length: int) -> list[Visit]:
    """Of blocks of ``size`` tokens, −1 for none. The last query is that of token ``length`` − 1.

    A query sees of its own block, which it has to have selected, the tokens up to itself.
    """
    queries, count = blocks_Tn.shape
    first = length - queries
    # In a stable order the queries of a block ascend, so those of its own tokens come first.
    by_block, order = blocks_Tn.flatten().sort(stable=True)
    how_many = torch.bincount(by_block + 1, minlength=-(-length // size) + 1).tolist()
    found = []
    for block, rows_r in enumerate((order // count).split(how_many)[1:]):
        begin, end = block * size, min((block + 1) * size, length)
        own = max(0, end - max(first, begin))
        for start in range(0, len(rows_r), ROWS):
            token, height = max(first, begin) + start, min(own - start, ROWS)
            later = _later(token, height, begin, end, blocks_Tn.device) if height > 0 else None
            found.append(Visit(slice(begin, end), rows_r[start : start + ROWS], later))
    return found


def forward(
    q_TgH: Tensor, k_SH: Tensor, v_SH: Tensor, visits: Sequence[Visit], buffers: Buffers
) -> tuple[Tensor, Tensor]:
    """Head outputs TgH, and the log₂-sum of every row Tg. q is divided by √H."""
    keys_Sx = ending_in_minus_one(k_SH)
    own_T1H = k_SH[len(k_SH) - len(q_TgH) :, None]
    products = torch.mul(q_TgH, own_T1H, out=buffers.get("every q", *q_TgH.shape))
    shift_Tg = products.sum(-1).mul_(LOG2_E)
    context_TgH, sums_Tg = _sums(q_TgH, shift_Tg, keys_Sx, v_SH, visits, buffers)
    # Below the root no product of a weight and a value overflows either. NaN is not below it.
    limit = torch.finfo(sums_Tg.dtype).max ** 0.5
    if not bool((sums_Tg < limit).all()):
        shift_Tg = _highest(q_TgH, keys_Sx, visits, buffers)
        context_TgH, sums_Tg = _sums(q_TgH, shift_Tg, keys_Sx, v_SH, visits, buffers)
    return context_TgH.div_(sums_Tg[..., None]), sums_Tg.log2_().add_(shift_Tg)


def backward(
    dcontext_TgH: Tensor,
    q_TgH: Tensor,
    k_SH: Tensor,
    v_SH: Tensor,
    context_TgH: Tensor,
    logsums_Tg: Tensor,
    visits: Sequence[Visit],
    buffers: Buffers,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    keys_Sx, values_Sx = ending_in_minus_one(k_SH), ending_in_minus_one(v_SH)
    product = torch.mul(dcontext_TgH, context_TgH, out=buffers.get("every dout", *q_TgH.shape))
    inner_Tg = product.sum(-1)
    dout_Tgx = _every(dcontext_TgH, 1.0, inner_Tg, buffers, "every dout")
    q_Tgx = _every(q_TgH, LOG2_E, logsums_Tg, buffers, "every q")
    dq_TgH, dk_SH, dv_SH = (torch.zeros_like(x) for x in (q_TgH, k_SH, v_SH))
    for visit in visits:
        columns = visit.columns
        q_Rx = _take(q_Tgx, visit, buffers, "q")
        dout_Rx = _take(dout_Tgx, visit, buffers, "dout")
        weights_Rc = _scores(q_Rx, keys_Sx, visit, buffers).exp2_()
        dv_SH[columns].addmm_(weights_Rc.T, dout_Rx[:, :-1])
        dscores_Rc = buffers.product("dscores", dout_Rx, values_Sx[columns].T).mul_(weights_Rc)
        dk_SH[columns].addmm_(dscores_Rc.T, q_Rx[:, :-1])
        _add(dq_TgH, visit, buffers.product("found", dscores_Rc, k_SH[columns]))
    # q came with the factor of binary logarithms.
    return dq_TgH, dk_SH.div_(LOG2_E), dv_SH


def _later(token: int, height: int, begin: int, end: int, device: torch.device) -> Tensor:
    """Of tokens begin … end − 1, those after each of ``height`` queries from ``token`` on."""
    tokens_r11 = torch.arange(token, token + height, device=device)[:, None, None]
    return torch.arange(begin, end, device=device) > tokens_r11


def _sums(
    q_TgH: Tensor,
    shift_Tg: Tensor,
    keys_Sx: Tensor,
    v_SH: Tensor,
    visits: Sequence[Visit],
    buffers: Buffers,
) -> tuple[Tensor, Tensor]:
    """Σ 2^(score − shift) · v of every row, TgH, and without v, Tg."""
    q_Tgx = _every(q_TgH, LOG2_E, shift_Tg, buffers, "every q")
    context_TgH, sums_Tg = torch.zeros_like(q_TgH), torch.zeros_like(shift_Tg)
    for visit in visits:
        q_Rx = _take(q_Tgx, visit, buffers, "q")
        weights_Rc = _scores(q_Rx, keys_Sx, visit, buffers).exp2_()
        _add(sums_Tg, visit, weights_Rc.sum(-1))
        _add(context_TgH, visit, buffers.product("found", weights_Rc, v_SH[visit.columns]))
    return context_TgH, sums_Tg


def _highest(q_TgH: Tensor, keys_Sx: Tensor, visits: Sequence[Visit], buffers: Buffers) -> Tensor:
    """The highest score of every row, Tg."""
    highest_Tg = q_TgH.new_full(q_TgH.shape[:-1], -math.inf)
    q_Tgx = _every(q_TgH, LOG2_E, torch.zeros_like(highest_Tg), buffers, "every q")
    for visit in visits:
        scores_Rc = _scores(_take(q_Tgx, visit, buffers, "q"), keys_Sx, visit, buffers)
        found_rg = scores_Rc.amax(-1).view(len(visit.rows_r), -1)
        highest_Tg[visit.rows_r] = torch.maximum(highest_Tg[visit.rows_r], found_rg)
    return highest_Tg


def _every(x_TgH: Tensor, factor: float, shift_Tg: Tensor, buffers: Buffers, name: str) -> Tensor:
    """Tgx."""
    return with_shift(x_TgH, factor, shift_Tg, buffers, name).unflatten(0, x_TgH.shape[:2])


def _take(x_Tgx: Tensor, visit: Visit, buffers: Buffers, name: str) -> Tensor:
    """Rx."""
    found = buffers.get(name, len(visit.rows_r), *x_Tgx.shape[1:])
    return torch.index_select(x_Tgx, 0, visit.rows_r, out=found).flatten(0, 1)


def _scores(q_Rx: Tensor, keys_Sx: Tensor, visit: Visit, buffers: Buffers) -> Tensor:
    """Rc, −∞ where a query does not see a token."""
    scores_Rc = buffers.product("scores", q_Rx, keys_Sx[visit.columns].T)
    if (later := visit.later_r1c) is not None:
        scores_rgc = scores_Rc.unflatten(0, (len(visit.rows_r), -1))
        scores_rgc[: len(later)].masked_fill_(later, -math.inf)
    return scores_Rc


def _add(sums_Tgy: Tensor, visit: Visit, found_Ry: Tensor) -> None:
    """To the rows of the queries; y may be nothing."""
    shape = (len(visit.rows_r), *sums_Tgy.shape[1:])
    sums_Tgy.index_add_(0, visit.rows_r, found_Ry.view(shape))
