"""The cross-token formula, one pair of tokens at a time, in float64.

Shapes: B batch, T tokens (queries), S tokens (keys), M hidden units, K bottleneck (the formula's b).
"""

import torch
from torch import Tensor

from gpt2.mlp.mlp_cross_token.options import MlpCrossTokenOptions


def cross_token(
    options: MlpCrossTokenOptions, h_BTM: Tensor, weights_BTS: Tensor, a_MK: Tensor, b_MK: Tensor
) -> Tensor:
    """h_t + α (Σ_{s ≤ t} w_ts h_s) A Bᵀ [B, T, M]; A and B are M × b."""
    batch, tokens, _ = h_BTM.shape
    rows = []
    for i in range(batch):
        for t in range(tokens):
            mixed_M = torch.zeros_like(h_BTM[i, t])
            for s in range(t + 1):
                mixed_M = mixed_M + weights_BTS[i, t, s] * h_BTM[i, s]
            rows.append(h_BTM[i, t] + options.alpha * (b_MK @ (a_MK.T @ mixed_M)))
    return torch.stack(rows).view_as(h_BTM)
