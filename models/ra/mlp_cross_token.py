"""Cross-token MLP, h ← h + α (W h) A Bᵀ, and its formula, one pair of tokens at a time.

B batch, T tokens (queries), S tokens (keys), M hidden units, K bottleneck (the formula's b).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .attention_state import AttentionOutputs, BlockState
from .kv_cache import BlockKVCache
from .mechanism_statistics import Statistics, norm_ratio
from .mlp_options import LayerSpec, MlpCrossTokenOptions


class MlpCrossToken(nn.Module):
    """Mixing term h ← h + α (W h) A Bᵀ with W the sparsified mean attention weights."""

    def __init__(
        self, options: MlpCrossTokenOptions, hidden: int, width: int, site: LayerSpec
    ) -> None:
        super().__init__()
        self.alpha = options.alpha
        self.down = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)

    def forward(
        self,
        h_BTM: Tensor,
        view: AttentionOutputs,
        state: BlockState,
        cache: BlockKVCache | None = None,
    ) -> Tensor:
        """Mix tokens in the bottleneck, M / b times cheaper than (W h) A; cache h A."""
        down_BSK = self.down(h_BTM)
        if cache is not None:
            down_BSK = cache.extend("mlp_cross_token", down_BSK, dim=1)
        return torch.add(h_BTM, self._gathered(down_BSK, view), alpha=self.alpha)

    def statistics(self, h_BTM: Tensor, view: AttentionOutputs, *others: Any) -> Statistics:
        """Return the relative size of the mix, weights kept per row, and weight on other tokens."""
        weights_BTS = view.weights_BTS
        assert weights_BTS is not None
        diagonal_BT = weights_BTS.diagonal(dim1=1, dim2=2)
        added_BTM = self.alpha * self._gathered(self.down(h_BTM), view)
        return {
            "mlp_cross_token/share": norm_ratio(added_BTM, h_BTM),
            "mlp_cross_token/kept": (weights_BTS > 0).sum(-1).double().mean(),
            "mlp_cross_token/others": (weights_BTS.sum(-1) - diagonal_BT).mean(),
        }

    def _gathered(self, down_BSK: Tensor, view: AttentionOutputs) -> Tensor:
        assert view.weights_BTS is not None, "attention did not return its weights"
        # Attention against a cache returns fp32 in a model in half precision.
        gathered_BTM: Tensor = self.up(view.weights_BTS.to(down_BSK.dtype) @ down_BSK)
        return gathered_BTM


def reference_mix(
    h_BTM: Tensor,
    view: AttentionOutputs,
    state: BlockState,
    weights: Mapping[str, Tensor],
    options: MlpCrossTokenOptions,
    site: LayerSpec,
) -> Tensor:
    weights_BTS = view.weights_BTS
    assert weights_BTS is not None, "the mechanism reads attention weights"
    a_MK, b_MK = weights["down.weight"].T, weights["up.weight"]
    rows = []
    for b in range(h_BTM.shape[0]):
        for t in range(h_BTM.shape[1]):
            mixed_M = torch.zeros_like(h_BTM[b, t])
            for s in range(t + 1):
                mixed_M = mixed_M + weights_BTS[b, t, s] * h_BTM[b, s]
            rows.append(h_BTM[b, t] + options.alpha * (mixed_M @ a_MK @ b_MK.T))
    return torch.stack(rows).view_as(h_BTM)
