"""Reference cross-token MLP, one pair of tokens at a time.

B batch, T tokens (queries), S tokens (keys), M hidden units, K bottleneck (the formula's b).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.state import AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.mlp.mlp_cross_token.options import MlpCrossTokenOptions
from gpt2.mlp.options import LayerSpec


def request(options: MlpCrossTokenOptions) -> AttentionWeightsOptions:
    """Return the weights w: the mean over heads, sparsified and detached as the options state."""
    detach = options.detach_weights
    return AttentionWeightsOptions(options.sparsity, options.topk, options.tau, detach)  # type: ignore[arg-type]  # a member of the Kconfig choice


def apply(
    h_BTM: Tensor,
    view: AttentionOutputs,
    state: BlockState,
    weights: Mapping[str, Tensor],
    options: MlpCrossTokenOptions,
    site: LayerSpec,
) -> Tensor:
    """Return h_t + α (Σ_{s ≤ t} w_ts h_s) A Bᵀ."""
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
