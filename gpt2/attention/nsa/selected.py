"""Attention to selected blocks of tokens, block after block.

B batch, T queries, S tokens, K key/value heads, g query heads of one, H head dim, J selection
blocks, n selected ones; r the queries that selected a block, c its tokens.

For each block the queries that selected it are gathered, multiplied with its keys at once, and
their running softmax is carried on (Milakov and Gimelshein 2018, arXiv 1805.02867): each key is
read once. Backward computes the weights again from the log-sum-exp of every row, as FlashAttention
does (Dao et al. 2022, arXiv 2205.14135). A query meets a block once, so all writes are to distinct
rows and the result does not depend on an order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library


@dataclass(frozen=True)
class _Visit:
    """A block's tokens and the queries that selected it, ascending.

    The first ``height`` of them are tokens of the block itself, from its token ``offset`` on.
    """

    columns: slice
    rows_r: Tensor
    height: int
    offset: int

    def weights(self, scores_rgc: Tensor, shift_rg: Tensor | None = None) -> Tensor:
        """Scores with later tokens hidden; with ``shift``, exp(scores − shift)."""
        if self.height:
            tokens_c = torch.arange(scores_rgc.shape[-1], device=scores_rgc.device)
            rows_h1 = torch.arange(self.offset, self.offset + self.height, device=tokens_c.device)
            later_h1c = (tokens_c > rows_h1[:, None])[:, None]
            scores_rgc[: self.height].masked_fill_(later_h1c, -math.inf)
        return scores_rgc if shift_rg is None else scores_rgc.sub_(shift_rg[..., None]).exp_()


def attend_selected(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> Tensor:
    """Head outputs BKTgH. q is divided by √H; the last query is that of the last token.

    ``blocks`` are blocks of ``size`` tokens, −1 for none; every query has selected its own, in
    which it sees the tokens up to itself.
    """
    given = (x.contiguous() for x in (q_BKTgH, k_BKSH, v_BKSH))
    context, _ = selected(*given, blocks_BKTn, size)
    return context


@library.custom_op("kablate::selected", mutates_args=())
def selected(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Head outputs BKTgH, and the log-sum-exp of every row BKTg in fp32 or wider."""
    context = torch.empty_like(q_BKTgH)
    logsums = q_BKTgH.new_empty(q_BKTgH.shape[:-1], dtype=_wide(q_BKTgH))
    for at in _pairs(q_BKTgH):
        visits = _visits(blocks_BKTn[at], size, k_BKSH.shape[2])
        context[at], logsums[at] = _forward(q_BKTgH[at], k_BKSH[at], v_BKSH[at], visits)
    return context, logsums


@selected.register_fake
def _(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    logsums = q_BKTgH.new_empty(q_BKTgH.shape[:-1], dtype=_wide(q_BKTgH))
    return torch.empty_like(q_BKTgH), logsums


@library.custom_op("kablate::selected_backward", mutates_args=())
def selected_backward(
    dcontext_BKTgH: Tensor,
    q_BKTgH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    blocks_BKTn: Tensor,
    size: int,
    context_BKTgH: Tensor,
    logsums_BKTg: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(x) for x in (q_BKTgH, k_BKSH, v_BKSH))
    wide = logsums_BKTg.dtype
    inner_BKTg = (dcontext_BKTgH.to(wide) * context_BKTgH.to(wide)).sum(-1)
    for at in _pairs(q_BKTgH):
        visits = _visits(blocks_BKTn[at], size, k_BKSH.shape[2])
        rows = (q_BKTgH[at], dcontext_BKTgH[at], logsums_BKTg[at], inner_BKTg[at])
        dq[at], dk[at], dv[at] = _backward(rows, k_BKSH[at], v_BKSH[at], visits)
    return dq, dk, dv


@selected_backward.register_fake
def _(
    dcontext_BKTgH: Tensor,
    q_BKTgH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    blocks_BKTn: Tensor,
    size: int,
    context_BKTgH: Tensor,
    logsums_BKTg: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BKTgH), torch.empty_like(k_BKSH), torch.empty_like(v_BKSH)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.size = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dcontext: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, blocks, context, logsums = ctx.saved_tensors
    given = (dcontext.to(q.dtype).contiguous(), q, k, v, blocks, ctx.size, context, logsums)
    return *selected_backward(*given), None, None


selected.register_autograd(_differentiate, setup_context=_keep)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _pairs(q_BKTgH: Tensor) -> Iterator[tuple[int, int]]:
    batch, heads = q_BKTgH.shape[:2]
    return ((b, k) for b in range(batch) for k in range(heads))


def _visits(blocks_Tn: Tensor, size: int, length: int) -> list[_Visit]:
    """One for each block that a query selected, in order."""
    queries, count = blocks_Tn.shape
    first = length - queries
    # In a stable order the queries of a block ascend, so those of its own tokens come first.
    by_block, order = blocks_Tn.flatten().sort(stable=True)
    how_many = torch.bincount(by_block + 1, minlength=-(-length // size) + 1).tolist()
    found = []
    for block, rows_r in enumerate((order // count).split(how_many)[1:]):
        begin, end = block * size, min((block + 1) * size, length)
        height = max(0, end - max(first, begin))
        if len(rows_r):
            found.append(_Visit(slice(begin, end), rows_r, height, max(0, first - begin)))
    return found


def _forward(
    q_TgH: Tensor, k_SH: Tensor, v_SH: Tensor, visits: list[_Visit]
) -> tuple[Tensor, Tensor]:
    """Head outputs TgH, and the log-sum-exp of every row Tg."""
    highest_Tg = q_TgH.new_full(q_TgH.shape[:-1], -math.inf, dtype=_wide(q_TgH))
    sums_Tg, sums_TgH = torch.zeros_like(highest_Tg), torch.zeros_like(q_TgH, dtype=_wide(q_TgH))
    for visit in visits:
        rows = visit.rows_r
        scores_rgc = _scores(q_TgH.index_select(0, rows), k_SH[visit.columns])
        scores_rgc = visit.weights(scores_rgc)
        before_rg = highest_Tg.index_select(0, rows)
        now_rg = torch.maximum(before_rg, scores_rgc.amax(-1))
        weights_rgc = scores_rgc.sub_(now_rg[..., None]).exp_()
        fading_rg = before_rg.sub_(now_rg).exp_()
        highest_Tg.index_copy_(0, rows, now_rg)
        sum_rg = sums_Tg.index_select(0, rows).mul_(fading_rg).add_(weights_rgc.sum(-1))
        sums_Tg.index_copy_(0, rows, sum_rg)
        found_rgH = _by_rows(weights_rgc.to(v_SH.dtype), v_SH[visit.columns])
        sum_rgH = sums_TgH.index_select(0, rows).mul_(fading_rg[..., None]).add_(found_rgH)
        sums_TgH.index_copy_(0, rows, sum_rgH)
    return sums_TgH.div_(sums_Tg[..., None]), highest_Tg.add_(sums_Tg.log_())


def _backward(
    by_query: tuple[Tensor, ...], k_SH: Tensor, v_SH: Tensor, visits: list[_Visit]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``by_query`` are q, the context's gradient, log-sum-exp, Σ do·o."""
    q_TgH = by_query[0]
    dq_TgH = torch.zeros_like(q_TgH, dtype=_wide(q_TgH))
    dk_SH, dv_SH = torch.zeros_like(k_SH), torch.zeros_like(v_SH)
    for visit in visits:
        q_rgH, dout_rgH, logsum_rg, inner_rg = (x.index_select(0, visit.rows_r) for x in by_query)
        weights_rgc = visit.weights(_scores(q_rgH, k_SH[visit.columns]), logsum_rg)
        dv_SH[visit.columns] = _over_rows(weights_rgc.to(q_rgH.dtype), dout_rgH)
        dscores_rgc = _scores(dout_rgH, v_SH[visit.columns])
        dscores_rgc = dscores_rgc.sub_(inner_rg[..., None]).mul_(weights_rgc).to(q_rgH.dtype)
        dk_SH[visit.columns] = _over_rows(dscores_rgc, q_rgH)
        found_rgH = _by_rows(dscores_rgc, k_SH[visit.columns])
        dq_TgH.index_add_(0, visit.rows_r, found_rgH.to(dq_TgH.dtype))
    return dq_TgH, dk_SH, dv_SH


def _scores(rows_rgH: Tensor, columns_cH: Tensor) -> Tensor:
    """rgc in fp32 or wider."""
    return _by_rows(rows_rgH, columns_cH.mT).to(_wide(rows_rgH))


def _by_rows(rows_rgx: Tensor, shared_xy: Tensor) -> Tensor:
    return (rows_rgx.flatten(0, 1) @ shared_xy).unflatten(0, rows_rgx.shape[:2])


def _over_rows(left_rgx: Tensor, right_rgy: Tensor) -> Tensor:
    return left_rgx.flatten(0, 1).mT @ right_rgy.flatten(0, 1)
