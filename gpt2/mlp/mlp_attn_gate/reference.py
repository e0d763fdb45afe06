"""The gate's formula, one token and one head at a time, in float64.

Shapes: B batch, T tokens, M hidden units, G bottleneck, N heads.
"""

import torch
from torch import Tensor

from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions


def head_scale(
    options: MlpAttnGateOptions, h_BTM: Tensor, down_GM: Tensor, up_NG: Tensor, bias_N: Tensor
) -> Tensor:
    """(1 − α) + α σ(W₂ W₁ h + b) [B, T, N]; pooled, W₁ h is the mean of it over tokens ≤ t."""
    batch, tokens, _ = h_BTM.shape
    scale_BTN = h_BTM.new_empty(batch, tokens, len(bias_N))
    for b in range(batch):
        for t in range(tokens):
            inputs_SM = h_BTM[b, : t + 1] if options.pooled else h_BTM[b, t : t + 1]
            bottleneck_G = torch.stack([down_GM @ h_M for h_M in inputs_SM]).mean(0)
            for n in range(len(bias_N)):
                gamma = 1 / (1 + torch.exp(-(up_NG[n] @ bottleneck_G + bias_N[n])))
                scale_BTN[b, t, n] = (1 - options.alpha) + options.alpha * gamma
    return scale_BTN
