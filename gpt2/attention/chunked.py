"""Row engine: attention by chunks of query rows, with score terms, gates and exposed weights.

The scores of a chunk are one matrix product; all other operations work on that block, which fits
into the cache. Only the inputs and a few values per row are saved; backward processes the same
chunks and recomputes the scores, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). No
tensor of B·N·T·T elements is created.

B batch, T tokens (queries), S tokens (keys), N heads, K key/value heads, H head dim; r the rows of
a chunk, c its columns, m the saved values of a gate per row. dx is the gradient of the loss with
respect to x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.chunk_parts import (
    AttentionPlan,
    AttentionResult,
    Inputs,
    RowChunk,
    ScoredRows,
    default_generator,
    repeat_kv,
)


@dataclass(frozen=True)
class ChunkSoftmaxes:
    """Intermediate results of a chunk, from its scores to the weights that multiply V."""

    first: ScoredRows
    # Saved values per row of each gate, the statistic first.
    known_BNrm: Sequence[Tensor]
    # Product of the gates that scale scores; None without such a gate (the first softmax is last).
    factor_BNr1: Tensor | None
    last_BNrc: Tensor


def chunk_softmaxes(
    plan: AttentionPlan,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    chunk: RowChunk,
    inputs: Inputs,
    known_BNrm: Sequence[Tensor] | None = None,
) -> ChunkSoftmaxes:
    """Compute the scores of a chunk and the softmaxes derived from them."""
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    scores = (q_BNTH[:, :, chunk.rows] @ k_BNTH[:, :, chunk.columns].mT).to(wide)
    for term in plan.terms:
        term.add_(scores, q_BNTH, k_BNTH, chunk, inputs[term])
    return softmaxes_from_scores(plan, scores, chunk, inputs, known_BNrm)


def softmaxes_from_scores(
    plan: AttentionPlan,
    scores: Tensor,
    chunk: RowChunk,
    inputs: Inputs,
    known_BNrm: Sequence[Tensor] | None = None,
) -> ChunkSoftmaxes:
    """Compute first softmax, statistics, factor and last softmax; ``scores`` is modified in place.

    Statistics are not recomputed if ``known_BNrm`` is given.
    """
    plan.pattern.hide_(scores, chunk)
    first = ScoredRows(chunk, scores, scores.softmax(-1))
    if known_BNrm is None:
        known_BNrm = [gate.statistic(first) for gate in plan.gates]
    factor = scores_factor(plan, [saved[..., 0] for saved in known_BNrm], inputs)
    if factor is None:
        return ChunkSoftmaxes(first, known_BNrm, None, first.weights_BNrc)
    factor_BNr1 = factor[..., None]
    scaled = scores * factor_BNr1
    # A small factor must not unmask hidden pairs.
    plan.pattern.hide_(scaled, chunk)
    return ChunkSoftmaxes(first, known_BNrm, factor_BNr1, scaled.softmax(-1))


def scores_factor(
    plan: AttentionPlan, statistics_BNr: Sequence[Tensor], inputs: Inputs
) -> Tensor | None:
    """Return the product of the factors of score-scaling gates, BNr; None without such a gate."""
    product = None
    for gate, statistic in zip(plan.gates, statistics_BNr, strict=True):
        if gate.scales_scores:
            factor = gate.factor(statistic, inputs[gate])
            product = factor if product is None else product * factor
    return product


def forward(
    plan: AttentionPlan, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, inputs: Inputs
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return head outputs BNTH, exposed weights BTS, and the saved values of each gate, BNTm."""
    batch, heads, length, width = q_BNTH.shape
    k, v = (repeat_kv(x, heads) for x in (k_BKTH, v_BKTH))
    generator = default_generator(q_BNTH.device) if plan.dropout else None
    # Memory layout B, T, N, H: the output projection reads the tensor without a copy.
    context = q_BNTH.new_empty(batch, length, heads, width).transpose(1, 2)
    shown = q_BNTH.new_zeros(batch, length, length) if plan.reader else None
    saved: list[list[Tensor]] = [[] for _ in plan.gates]
    for chunk in plan.chunks(q_BNTH):
        soft = chunk_softmaxes(plan, q_BNTH, k, chunk, inputs)
        mask = plan.drop(soft.last_BNrc, generator)
        weights = soft.last_BNrc if mask is None else soft.last_BNrc * mask
        context[:, :, chunk.rows] = weights.to(v.dtype) @ v[:, :, chunk.columns]
        if plan.reader and shown is not None:
            shown[:, chunk.rows, chunk.columns] = plan.reader.read(soft.last_BNrc, chunk)
        for chunks, values in zip(saved, soft.known_BNrm, strict=True):
            chunks.append(values)
    return context, shown, [torch.cat(chunks, dim=2) for chunks in saved]


class ChunkedBackward:
    """Accumulator of the gradients of q, k, v and the learnable inputs of terms and gates."""

    def __init__(
        self,
        plan: AttentionPlan,
        q_BNTH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        known_BNTm: Sequence[Tensor],
        inputs: Inputs,
    ) -> None:
        self.plan, self.saved, self.inputs = plan, known_BNTm, inputs
        self.kv_heads = k_BKTH.shape[1]
        self.q = q_BNTH
        self.k, self.v = (repeat_kv(x, q_BNTH.shape[1]) for x in (k_BKTH, v_BKTH))
        # Accumulate over chunks in fp32 or wider, even if the products are not.
        wide = torch.promote_types(q_BNTH.dtype, torch.float32)
        self.dq, self.dk, self.dv = (
            torch.zeros_like(x, dtype=wide) for x in (self.q, self.k, self.v)
        )
        self.dinputs = {part: [torch.zeros_like(x) for x in inputs[part]] for part in inputs}

    def run(
        self,
        dcontext_BNTH: Tensor,
        dshown_BTS: Tensor | None,
        dstatistics_BNT: Sequence[Tensor | None],
        generator: Generator | None,
    ) -> None:
        """Process all chunks; ``generator`` is in the state it had before forward."""
        for chunk in self.plan.chunks(self.q):
            saved = [rows[:, :, chunk.rows] for rows in self.saved]
            soft = chunk_softmaxes(self.plan, self.q, self.k, chunk, self.inputs, saved)
            dlast = self._values(soft, dcontext_BNTH[:, :, chunk.rows], chunk, generator)
            if dshown_BTS is not None and self.plan.reader:
                drows = dshown_BTS[:, chunk.rows, chunk.columns]
                dlast += self.plan.reader.backward(drows, soft.last_BNrc, chunk)
            dstatistics = [d if d is None else d[:, :, chunk.rows, None] for d in dstatistics_BNT]
            self._scores(self._softmaxes(soft, dlast, dstatistics), chunk)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of q, k, v and the inputs, in that order and in their dtypes."""
        dk, dv = (
            x.unflatten(1, (self.kv_heads, -1)).sum(2) if self.kv_heads < x.shape[1] else x
            for x in (self.dk, self.dv)
        )
        dqkv = [x.to(self.q.dtype) for x in (self.dq, dk, dv)]
        return dqkv + [d for part in self.dinputs.values() for d in part]

    def _values(
        self,
        soft: ChunkSoftmaxes,
        dcontext_BNrH: Tensor,
        chunk: RowChunk,
        generator: Generator | None,
    ) -> Tensor:
        """Backpropagate through dropout(weights) @ v; return the gradient of the last softmax."""
        dcontext = dcontext_BNrH.contiguous()
        mask = self.plan.drop(soft.last_BNrc, generator)
        weights = soft.last_BNrc if mask is None else soft.last_BNrc * mask
        self.dv[:, :, chunk.columns].add_(weights.to(dcontext.dtype).mT @ dcontext)
        dlast = (dcontext @ self.v[:, :, chunk.columns].mT).to(soft.last_BNrc.dtype)
        return dlast if mask is None else dlast.mul_(mask)

    def _softmaxes(
        self,
        soft: ChunkSoftmaxes,
        dlast_BNrc: Tensor,
        dstatistics_BNr1: list[Tensor | None],
    ) -> Tensor:
        """Backpropagate through softmaxes, factor and statistics; return dscores."""
        dfirst, dscaled = dlast_BNrc, None
        if soft.factor_BNr1 is not None:
            dscaled = _through_softmax(soft.last_BNrc, dlast_BNrc)
            dfactor_BNr = torch.linalg.vecdot(dscaled, soft.first.scores_BNrc)
            dstatistics_BNr1 = self._factor(soft, dfactor_BNr, dstatistics_BNr1)
            dscaled *= soft.factor_BNr1
            dfirst = torch.zeros_like(dlast_BNrc)
        for gate, saved, dstatistic in zip(
            self.plan.gates, soft.known_BNrm, dstatistics_BNr1, strict=True
        ):
            if dstatistic is not None:
                gate.add_slope_(dfirst, dstatistic, soft.first, saved)
        dscores = _through_softmax(soft.first.weights_BNrc, dfirst)
        return dscores if dscaled is None else dscores.add_(dscaled)

    def _factor(
        self, soft: ChunkSoftmaxes, dfactor_BNr: Tensor, dstatistics_BNr1: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Backpropagate through the factor by autograd (few elements per row).

        Returns ``dstatistics_BNr1`` with the gradients of the factor added.
        """
        statistics = [saved[..., 0].detach().requires_grad_() for saved in soft.known_BNrm]
        inputs = {p: [x.detach().requires_grad_() for x in self.inputs[p]] for p in self.inputs}
        gates = [gate for gate in self.plan.gates if gate.scales_scores]
        leaves = statistics + [x for gate in gates for x in inputs[gate]]
        with torch.enable_grad():
            factor = scores_factor(self.plan, statistics, inputs)
            assert factor is not None
            gradients = torch.autograd.grad(factor, leaves, dfactor_BNr, allow_unused=True)
        totals = [x for gate in gates for x in self.dinputs[gate]]
        for total, gradient in zip(totals, gradients[len(statistics) :], strict=True):
            total += gradient
        return [
            _sum(d, None if gradient is None else gradient[..., None])
            for d, gradient in zip(dstatistics_BNr1, gradients[: len(statistics)], strict=True)
        ]

    def _scores(self, dscores_BNrc: Tensor, chunk: RowChunk) -> None:
        """Backpropagate through the terms and scores = q @ kᵀ."""
        for term in self.plan.terms:
            gradients = term.backward_(
                dscores_BNrc, self.q, self.k, chunk, self.inputs[term], self.dq, self.dk
            )
            for total, gradient in zip(self.dinputs[term], gradients, strict=True):
                total += gradient
        low = dscores_BNrc.to(self.q.dtype)
        self.dq[:, :, chunk.rows].add_(low @ self.k[:, :, chunk.columns])
        self.dk[:, :, chunk.columns].add_(low.mT @ self.q[:, :, chunk.rows])


def _through_softmax(weights_BNrc: Tensor, dweights_BNrc: Tensor) -> Tensor:
    """Return the gradient of the scores, w ⊙ (dw − Σ w·dw), computed in place."""
    mean = torch.linalg.vecdot(weights_BNrc, dweights_BNrc)[..., None]
    return dweights_BNrc.sub_(mean).mul_(weights_BNrc)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@torch.compiler.disable
def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, plan: AttentionPlan) -> AttentionResult:
    """Compute causal attention according to ``plan``; query head n reads key/value head n·K // N.

    Matrix products use the dtype of q, k and v, as chosen by autocast; softmax and statistics use
    fp32 or wider.
    """
    scaled = (q_BNTH * q_BNTH.shape[-1] ** -0.5).contiguous()
    context, weights, *statistics = _RowAttention.apply(
        plan, scaled, k_BKTH.contiguous(), v_BKTH.contiguous(), *plan.inputs()
    )
    return AttentionResult(context, statistics, weights)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: AttentionPlan,
        q_BNTH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.plan = plan
        # Save the generator state, so that backward draws the same dropout masks.
        ctx.generator = default_generator(q_BNTH.device).clone_state() if plan.dropout else None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            context, shown, saved = forward(plan, q_BNTH, k_BKTH, v_BKTH, plan.by_part(inputs))
        ctx.save_for_backward(q_BNTH, k_BKTH, v_BKTH, *saved, *inputs)
        ctx.set_materialize_grads(False)
        if plan.reader and plan.reader.request.detach:
            ctx.mark_non_differentiable(shown)
        return context, shown, *(rows[..., 0] for rows in saved)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        dcontext_BNTH: Tensor | None,
        dshown_BTS: Tensor | None,
        *dstatistics_BNT: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        saved, inputs = rest[: len(ctx.plan.gates)], rest[len(ctx.plan.gates) :]
        dcontext = torch.zeros_like(q) if dcontext_BNTH is None else dcontext_BNTH
        with torch.autocast(q.device.type, enabled=False):
            walk = ChunkedBackward(ctx.plan, q, k, v, saved, ctx.plan.by_part(inputs))
            generator = ctx.generator and ctx.generator.clone_state()
            walk.run(dcontext, dshown_BTS, dstatistics_BNT, generator)
        return None, *walk.gradients()
