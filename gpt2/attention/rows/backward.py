"""Backward pass of the row engine, chunk by chunk, from the tensors saved by forward.

B batch, T tokens, N heads, K key/value heads, H head dim; r the rows of a chunk, c its columns, m
the saved values of a gate per row. dx is the gradient of the loss with respect to x.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from gpt2.attention.rows.forward import Softmaxes, scores_factor, softmaxes
from gpt2.attention.rows.parts import Chunk
from gpt2.attention.rows.plan import Inputs, RowPlan, per_query_head


class Backward:
    """Accumulator of the gradients of q, k, v and the learnable inputs of terms and gates."""

    def __init__(
        self,
        plan: RowPlan,
        q_BNTH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        known_BNTm: Sequence[Tensor],
        inputs: Inputs,
    ) -> None:
        self.plan, self.saved, self.inputs = plan, known_BNTm, inputs
        self.kv_heads = k_BKTH.shape[1]
        self.q = q_BNTH
        self.k, self.v = (per_query_head(x, q_BNTH.shape[1]) for x in (k_BKTH, v_BKTH))
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
            soft = softmaxes(self.plan, self.q, self.k, chunk, self.inputs, saved)
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
        self, soft: Softmaxes, dcontext_BNrH: Tensor, chunk: Chunk, generator: Generator | None
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
        soft: Softmaxes,
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
        for gate, saved, dstatistic in zip(self.plan.gates, soft.known_BNrm, dstatistics_BNr1):
            if dstatistic is not None:
                gate.add_slope_(dfirst, dstatistic, soft.first, saved)
        dscores = _through_softmax(soft.first.weights_BNrc, dfirst)
        return dscores if dscaled is None else dscores.add_(dscaled)

    def _factor(
        self, soft: Softmaxes, dfactor_BNr: Tensor, dstatistics_BNr1: list[Tensor | None]
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
            gradients = torch.autograd.grad(factor, leaves, dfactor_BNr, allow_unused=True)
        totals = [x for gate in gates for x in self.dinputs[gate]]
        for total, gradient in zip(totals, gradients[len(statistics) :], strict=True):
            total += gradient
        return [
            _sum(d, None if gradient is None else gradient[..., None])
            for d, gradient in zip(dstatistics_BNr1, gradients)
        ]

    def _scores(self, dscores_BNrc: Tensor, chunk: Chunk) -> None:
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
