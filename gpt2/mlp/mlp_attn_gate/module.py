"""MLP → attention gate.

Shapes: B batch, T tokens, M hidden units, G bottleneck, N heads.
"""

import torch
from torch import Tensor, nn

from gpt2.attention.state import AttentionView, BlockState
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
        bottleneck_BTG = self.down(h_BTM)
        if self.options.pooled:
            bottleneck_BTG = _running_mean(bottleneck_BTG)
        gate_BTN = torch.sigmoid(self.up(bottleneck_BTG) + self.bias)
        alpha = self.options.alpha
        state.head_scale_BTN = (1 - alpha) + alpha * gate_BTN
        return h_BTM


def _running_mean(x_BTG: Tensor) -> Tensor:
    """Mean over the tokens so far, the token itself included."""
    counts_T1 = torch.arange(1, x_BTG.size(1) + 1, device=x_BTG.device)[:, None]
    return x_BTG.cumsum(1) / counts_T1
