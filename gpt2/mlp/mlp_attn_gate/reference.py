"""Reference gate, one token and one head at a time.

B batch, T tokens, S tokens pooled over, M hidden units, G bottleneck, N heads.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions
from gpt2.mlp.options import LayerSpec


def apply(
    h_BTM: Tensor,
    view: AttentionOutputs,
    state: BlockState,
    weights: Mapping[str, Tensor],
    options: MlpAttnGateOptions,
    site: LayerSpec,
) -> Tensor:
    """Return h unchanged; set the next block's scale to (1 − α) + α σ(W₂ W₁ h + b)."""
    w1_GM, w2_NG, bias_N = weights["down.weight"], weights["up.weight"], weights["bias"]
    batch, tokens, _ = h_BTM.shape
    state.head_scale_BTN = h_BTM.new_empty(batch, tokens, len(bias_N))
    for b in range(batch):
        for t in range(tokens):
            inputs_SM = h_BTM[b, : t + 1] if options.pooled else h_BTM[b, t : t + 1]
            bottleneck_G = torch.stack([w1_GM @ h_M for h_M in inputs_SM]).mean(0)
            for n in range(len(bias_N)):
                gamma = 1 / (1 + torch.exp(-(w2_NG[n] @ bottleneck_G + bias_N[n])))
                state.head_scale_BTN[b, t, n] = (1 - options.alpha) + options.alpha * gamma
    return h_BTM
