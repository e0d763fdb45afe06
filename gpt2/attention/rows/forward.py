"""The forward walk of the row engine.

B batch, T tokens, N heads, K key/value heads, H head dim; r the rows of a chunk, c its columns,
m the numbers that a gate keeps of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.rows.parts import Chunk, Rows
from gpt2.attention.rows.plan import Inputs, RowPlan, default_generator, per_query_head


@dataclass(frozen=True)
class Softmaxes:
    """A chunk from its scores to the weights that multiply V."""

    first: Rows
    # What each gate knows of the rows, the statistic first.
    known_BNrm: Sequence[Tensor]
    # The product of the gates that scale scores; None without one: then last is first.
    factor_BNr1: Tensor | None
    last_BNrc: Tensor


def softmaxes(
    plan: RowPlan,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    chunk: Chunk,
    inputs: Inputs,
    known_BNrm: Sequence[Tensor] | None = None,
) -> Softmaxes:
    """Scores of a chunk, and what follows from them."""
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    scores = (q_BNTH[:, :, chunk.rows] @ k_BNTH[:, :, chunk.columns].mT).to(wide)
    for term in plan.terms:
        term.add_(scores, q_BNTH, k_BNTH, chunk, inputs[term])
    return weigh(plan, scores, chunk, inputs, known_BNrm)


def weigh(
    plan: RowPlan,
    scores: Tensor,
    chunk: Chunk,
    inputs: Inputs,
    known_BNrm: Sequence[Tensor] | None = None,
) -> Softmaxes:
    """First softmax, statistics (unless known), factor and last softmax; writes to ``scores``."""
    plan.pattern.hide_(scores, chunk)
    first = Rows(chunk, scores, scores.softmax(-1))
    if known_BNrm is None:
        known_BNrm = [gate.statistic(first) for gate in plan.gates]
    factor = scores_factor(plan, [known[..., 0] for known in known_BNrm], inputs)
    if factor is None:
        return Softmaxes(first, known_BNrm, None, first.weights_BNrc)
    factor_BNr1 = factor[..., None]
    scaled = scores * factor_BNr1
    # A small factor must not bring hidden pairs back into sight.
    plan.pattern.hide_(scaled, chunk)
    return Softmaxes(first, known_BNrm, factor_BNr1, scaled.softmax(-1))


def scores_factor(plan: RowPlan, statistics_BNr: Sequence[Tensor], inputs: Inputs) -> Tensor | None:
    """The product of the factors of gates that scale scores, BNr; None without such a gate."""
    product = None
    for gate, statistic in zip(plan.gates, statistics_BNr):
        if gate.scales_scores:
            factor = gate.factor(statistic, inputs[gate])
            product = factor if product is None else product * factor
    return product


def forward(
    plan: RowPlan, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, inputs: Inputs
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Head outputs BNTH, the reader's rows BTS, and what each gate knows of all rows BNTm."""
    batch, heads, length, width = q_BNTH.shape
    k, v = (per_query_head(x, heads) for x in (k_BKTH, v_BKTH))
    generator = default_generator(q_BNTH.device) if plan.dropout else None
    # Laid out as B, T, N, H: the output projection reads it without a copy.
    context = q_BNTH.new_empty(batch, length, heads, width).transpose(1, 2)
    shown = q_BNTH.new_zeros(batch, length, length) if plan.reader else None
    known: list[list[Tensor]] = [[] for _ in plan.gates]
    for chunk in plan.chunks(q_BNTH):
        soft = softmaxes(plan, q_BNTH, k, chunk, inputs)
        mask = plan.drop(soft.last_BNrc, generator)
        weights = soft.last_BNrc if mask is None else soft.last_BNrc * mask
        context[:, :, chunk.rows] = weights.to(v.dtype) @ v[:, :, chunk.columns]
        if plan.reader and shown is not None:
            shown[:, chunk.rows, chunk.columns] = plan.reader.read(soft.last_BNrc, chunk)
        for rows, found in zip(known, soft.known_BNrm):
            rows.append(found)
    return context, shown, [torch.cat(rows, dim=2) for rows in known]
