"""The row engine: attention by chunks of query rows, with terms, gates and a reader of weights.

B batch, T tokens (queries), S tokens (keys), N heads, K key/value heads, H head dim.

A chunk's scores are one matrix product; everything else happens in that block, which is small
enough to stay in cache. Only the inputs and a few numbers per row are saved; backward walks the
same chunks and computes the scores again, as FlashAttention does (Dao et al. 2022, arXiv
2205.14135). No tensor of B·N·T·T elements is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.rows.backward import Backward
from gpt2.attention.rows.forward import forward
from gpt2.attention.rows.plan import RowPlan, default_generator


@dataclass(frozen=True)
class RowResult:
    """Head outputs, the statistic of every gate, and the rows that the reader made."""

    context_BNTH: Tensor
    statistics_BNT: Sequence[Tensor]
    weights_BTS: Tensor | None


@torch.compiler.disable
def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, plan: RowPlan) -> RowResult:
    """Causal attention as ``plan`` says; query head n reads key/value head n·K // N.

    Matrix products take the type of q, k and v, which autocast has chosen; softmax and statistics
    are in fp32 or wider.
    """
    scaled = (q_BNTH * q_BNTH.shape[-1] ** -0.5).contiguous()
    context, weights, *statistics = _RowAttention.apply(
        plan, scaled, k_BKTH.contiguous(), v_BKTH.contiguous(), *plan.inputs()
    )
    return RowResult(context, statistics, weights)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: RowPlan, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *inputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.plan = plan
        # Backward draws the same dropout from where the generator stands now.
        ctx.generator = default_generator(q_BNTH.device).clone_state() if plan.dropout else None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            context, shown, known = forward(plan, q_BNTH, k_BKTH, v_BKTH, plan.by_part(inputs))
        ctx.save_for_backward(q_BNTH, k_BKTH, v_BKTH, *known, *inputs)
        ctx.set_materialize_grads(False)
        if plan.reader and plan.reader.request.detach:
            ctx.mark_non_differentiable(shown)
        return context, shown, *(rows[..., 0] for rows in known)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        dcontext_BNTH: Tensor | None,
        dshown_BTS: Tensor | None,
        *dstatistics_BNT: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        known, inputs = rest[: len(ctx.plan.gates)], rest[len(ctx.plan.gates) :]
        dcontext = torch.zeros_like(q) if dcontext_BNTH is None else dcontext_BNTH
        with torch.autocast(q.device.type, enabled=False):
            walk = Backward(ctx.plan, q, k, v, known, ctx.plan.by_part(inputs))
            generator = ctx.generator and ctx.generator.clone_state()
            walk.run(dcontext, dshown_BTS, dstatistics_BNT, generator)
        return None, *walk.gradients()
