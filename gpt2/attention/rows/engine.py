"""Row engine: attention by chunks of query rows, with score terms, gates and exposed weights.

B batch, T tokens (queries), S tokens (keys), N heads, K key/value heads, H head dim.

The scores of a chunk are one matrix product; all other operations work on that block, which fits
into the cache. Only the inputs and a few values per row are saved; backward processes the same
chunks and recomputes the scores, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). No
tensor of B·N·T·T elements is created.
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
    """Head outputs, the statistic of every gate, and the weights exposed to the MLP."""

    context_BNTH: Tensor
    statistics_BNT: Sequence[Tensor]
    weights_BTS: Tensor | None


@torch.compiler.disable
def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, plan: RowPlan) -> RowResult:
    """Compute causal attention according to ``plan``; query head n reads key/value head n·K // N.

    Matrix products use the dtype of q, k and v, as chosen by autocast; softmax and statistics use
    fp32 or wider.
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
            walk = Backward(ctx.plan, q, k, v, saved, ctx.plan.by_part(inputs))
            generator = ctx.generator and ctx.generator.clone_state()
            walk.run(dcontext, dshown_BTS, dstatistics_BNT, generator)
        return None, *walk.gradients()
