"""Forward pass of the row engine.

B batch, T tokens, N heads, K key/value heads, H head dim; r the rows of a chunk, c its columns, m
the saved values of a gate per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.rows.parts import Chunk, Rows
from gpt2.attention.rows.plan import Inputs, RowPlan, default_generator, per_query_head


@dataclass(frozen=True)
class Softmaxes:
    """Intermediate results of a chunk, from its scores to the weights that multiply V."""

    first: Rows
    # Saved values per row of each gate, the statistic first.
    known_BNrm: Sequence[Tensor]
    # Product of the gates that scale scores; None without such a gate (the first softmax is last).
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
    """Compute the scores of a chunk and the softmaxes derived from them."""
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
    """Compute first softmax, statistics, factor and last softmax; ``scores`` is modified in place.

    Statistics are not recomputed if ``known_BNrm`` is given.
    """
    plan.pattern.hide_(scores, chunk)
    first = Rows(chunk, scores, scores.softmax(-1))
    if known_BNrm is None:
        known_BNrm = [gate.statistic(first) for gate in plan.gates]
    factor = scores_factor(plan, [saved[..., 0] for saved in known_BNrm], inputs)
    if factor is None:
        return Softmaxes(first, known_BNrm, None, first.weights_BNrc)
    factor_BNr1 = factor[..., None]
    scaled = scores * factor_BNr1
    # A small factor must not unmask hidden pairs.
    plan.pattern.hide_(scaled, chunk)
    return Softmaxes(first, known_BNrm, factor_BNr1, scaled.softmax(-1))


def scores_factor(plan: RowPlan, statistics_BNr: Sequence[Tensor], inputs: Inputs) -> Tensor | None:
    """Return the product of the factors of score-scaling gates, BNr; None without such a gate."""
    product = None
    for gate, statistic in zip(plan.gates, statistics_BNr):
        if gate.scales_scores:
            factor = gate.factor(statistic, inputs[gate])
            product = factor if product is None else product * factor
    return product


def forward(
    plan: RowPlan, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, inputs: Inputs
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return head outputs BNTH, exposed weights BTS, and the saved values of each gate, BNTm."""
    batch, heads, length, width = q_BNTH.shape
    k, v = (per_query_head(x, heads) for x in (k_BKTH, v_BKTH))
    generator = default_generator(q_BNTH.device) if plan.dropout else None
    # Memory layout B, T, N, H: the output projection reads the tensor without a copy.
    context = q_BNTH.new_empty(batch, length, heads, width).transpose(1, 2)
    shown = q_BNTH.new_zeros(batch, length, length) if plan.reader else None
    saved: list[list[Tensor]] = [[] for _ in plan.gates]
    for chunk in plan.chunks(q_BNTH):
        soft = softmaxes(plan, q_BNTH, k, chunk, inputs)
        mask = plan.drop(soft.last_BNrc, generator)
        weights = soft.last_BNrc if mask is None else soft.last_BNrc * mask
        context[:, :, chunk.rows] = weights.to(v.dtype) @ v[:, :, chunk.columns]
        if plan.reader and shown is not None:
            shown[:, chunk.rows, chunk.columns] = plan.reader.read(soft.last_BNrc, chunk)
        for chunks, values in zip(saved, soft.known_BNrm):
            chunks.append(values)
    return context, shown, [torch.cat(chunks, dim=2) for chunks in saved]
