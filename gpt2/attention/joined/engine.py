"""Attention with terms and gates by passes over windows, differentiated by autograd.

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

import torch
from torch import Tensor

from gpt2.attention.joined.scores import Branch, Scores
from gpt2.attention.rows.engine import RowResult
from gpt2.attention.rows.forward import scores_factor
from gpt2.attention.rows.plan import RowPlan, per_query_head


# The passes compile their own kernels.
@torch.compiler.disable
def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, plan: RowPlan) -> RowResult:
    """Return the row engine's result; the plan must not use features in ``joined_lacks``."""
    assert not plan.dropout and not plan.reader, "must be rejected by choose_form"
    heads, length = q_BNTH.shape[1], q_BNTH.shape[2]
    k, v = (per_query_head(x, heads) for x in (k_BKTH, v_BKTH))
    inputs = plan.by_part(plan.inputs())
    with torch.autocast(q_BNTH.device.type, enabled=False):
        branches = [Branch(q_BNTH, k, 0, plan.pattern.longest_row(length))]
        for term in plan.terms:
            branches = [
                b for base in branches for b in term.branches(base, q_BNTH, k, inputs[term])
            ]
        scores = Scores(branches, q_BNTH.shape[-1] ** -0.5)
        context, lse_BNT = scores.attend(v)
        statistics = [gate.joined_statistic(scores, lse_BNT) for gate in plan.gates]
        factor_BNT = scores_factor(plan, statistics, inputs)
        if factor_BNT is not None:
            context, _ = scores.times(factor_BNT).attend(v)
        return RowResult(context.to(v.dtype), statistics, None)
