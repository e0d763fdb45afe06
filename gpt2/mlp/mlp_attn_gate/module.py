"""MLP → attention gate.

Shapes: B batch, T tokens, M hidden units, G bottleneck, N heads.
"""

import torch
from torch import Tensor, nn

from gpt2.attention.state import AttentionView, BlockState
from gpt2.cache import BlockCache
from gpt2.mechanism_statistics import Values, gate_values
from gpt2.mlp.base import MlpMechanism
from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions
from gpt2.mlp.options import BlockSite
from lib.pruning.mask import Unprunable


class MlpAttnGate(MlpMechanism, Unprunable):
    """Scales the next block's heads by (1 − α) + α γ, γ = σ(W₂ W₁ h + b); h itself stays."""

    def __init__(
        self, options: MlpAttnGateOptions, hidden: int, width: int, site: BlockSite
    ) -> None:
        super().__init__()
        self.options = options
        self.down = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, site.shape.n_head, bias=False)
        self.bias = nn.Parameter(torch.full((site.shape.n_head,), options.bias))

    def forward(self, h_BTM: Tensor, view: AttentionView, state: BlockState) -> Tensor:
        """Sets ``state.head_scale_BTN``."""
        self._hand_on(self._pooled(h_BTM), state)
        return h_BTM

    def decode(
        self, h_BTM: Tensor, view: AttentionView, state: BlockState, cache: BlockCache
    ) -> Tensor:
        """Keeps the sum of W₁ h where it is pooled, and nothing otherwise."""
        if not self.options.pooled:
            return self(h_BTM, view, state)
        bottleneck_BTG = self.down(h_BTM)
        # A sum that is kept in bf16 stops growing after some hundred tokens.
        wide = torch.promote_types(bottleneck_BTG.dtype, torch.float32)
        sums_BTG = bottleneck_BTG.cumsum(1, dtype=wide)
        if cache.position:
            sums_BTG = sums_BTG + cache.kept["mlp_attn_gate"]
        cache.kept["mlp_attn_gate"] = sums_BTG[:, -1:].clone()
        self._hand_on(_mean_so_far(sums_BTG, cache.position), state)
        return h_BTM

    def statistics(self, h_BTM: Tensor, view: AttentionView, state: BlockState) -> Values:
        """Of γ."""
        return gate_values(self.options.name, self._gate(self._pooled(h_BTM)).transpose(1, 2))

    def _pooled(self, h_BTM: Tensor) -> Tensor:
        """W₁ h, BTG."""
        bottleneck_BTG = self.down(h_BTM)
        if not self.options.pooled:
            return bottleneck_BTG
        return _mean_so_far(bottleneck_BTG.cumsum(1), 0)

    def _gate(self, bottleneck_BTG: Tensor) -> Tensor:
        """γ, BTN."""
        return torch.sigmoid(self.up(bottleneck_BTG) + self.bias)

    def _hand_on(self, bottleneck_BTG: Tensor, state: BlockState) -> None:
        alpha = self.options.alpha
        state.head_scale_BTN = (1 - alpha) + alpha * self._gate(bottleneck_BTG)


def _mean_so_far(sums_BTG: Tensor, position: int) -> Tensor:
    """Mean over the tokens so far, the token itself included; the first is at ``position``."""
    counts_T = torch.arange(1, sums_BTG.size(1) + 1, device=sums_BTG.device) + position
    return sums_BTG / counts_T[:, None]
