"""MLP → attention gate, and its formula, one token and one head at a time.

Shapes: B batch, T tokens, S tokens pooled over, M hidden units, G bottleneck, N heads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .attention_state import AttentionOutputs, BlockState
from .kv_cache import BlockKVCache
from .mechanism_statistics import Statistics, gate_statistics
from .mlp_options import LayerSpec, MlpAttnGateOptions
from .lib_pruning_layers import NeverPruned


class MlpAttnGate(NeverPruned):
    """Gate that scales the next block's heads by (1 − α) + α γ, γ = σ(W₂ W₁ h + b)."""

    def __init__(
        self, options: MlpAttnGateOptions, hidden: int, width: int, site: LayerSpec
    ) -> None:
        super().__init__()
        self.options = options
        self.down = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, site.shape.n_head, bias=False)
        self.bias = nn.Parameter(torch.full((site.shape.n_head,), options.bias))

    def forward(
        self,
        h_BTM: Tensor,
        view: AttentionOutputs,
        state: BlockState,
        cache: BlockKVCache | None = None,
    ) -> Tensor:
        """Set ``state.head_scale_BTN``; return h unchanged."""
        alpha = self.options.alpha
        state.head_scale_BTN = (1 - alpha) + alpha * self._gate(h_BTM, cache)
        return h_BTM

    def statistics(self, h_BTM: Tensor, *others: Any) -> Statistics:
        return gate_statistics(self.options.name, self._gate(h_BTM, None).transpose(1, 2))

    def _gate(self, h_BTM: Tensor, cache: BlockKVCache | None) -> Tensor:
        """Return γ, BTN."""
        bottleneck_BTG = self.down(h_BTM)
        if self.options.pooled:
            bottleneck_BTG = _running_mean(bottleneck_BTG, cache)
        # A mean is fp32 in a model in half precision, too.
        return torch.sigmoid(self.up(bottleneck_BTG.to(self.up.weight.dtype)) + self.bias)


def _running_mean(x_BTG: Tensor, cache: BlockKVCache | None) -> Tensor:
    """Return the mean over the tokens so far, whose sum is cached; in fp32 or wider, since bf16
    sums have three digits.
    """
    sums_BTG = x_BTG.to(torch.promote_types(x_BTG.dtype, torch.float32)).cumsum(1)
    counts_T = torch.arange(1, sums_BTG.size(1) + 1, device=sums_BTG.device)
    if cache is not None:
        if cache.position:
            sums_BTG = sums_BTG + cache.kept["mlp_attn_gate"]
        cache.kept["mlp_attn_gate"] = sums_BTG[:, -1:].clone()
        counts_T = counts_T + cache.position
    return sums_BTG / counts_T[:, None]


def reference_gate(
    h_BTM: Tensor,
    view: AttentionOutputs,
    state: BlockState,
    weights: Mapping[str, Tensor],
    options: MlpAttnGateOptions,
    site: LayerSpec,
) -> Tensor:
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
