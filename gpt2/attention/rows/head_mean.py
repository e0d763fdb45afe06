"""Attention weights for an MLP: mean over heads per row, sparsified and renormalized.

B batch, N heads; r the rows of a chunk, c its columns.
"""

import torch
from torch import Tensor

from gpt2.attention.rows.largest import largest
from gpt2.attention.rows.parts import Chunk, Pattern
from gpt2.attention.state import WeightsRequest


class HeadMean:
    """Reader of the last softmax of a chunk. The selection of weights is not differentiated."""

    def __init__(self, request: WeightsRequest, pattern: Pattern) -> None:
        self.request = request
        self.pattern = pattern

    def read(self, weights_BNrc: Tensor, chunk: Chunk) -> Tensor:
        """Return the exposed rows, Brc; each sums to one, or to zero if no weight was selected."""
        weights, total = self._kept(weights_BNrc, chunk)
        return weights.div_(total)

    def backward(self, drows_Brc: Tensor, weights_BNrc: Tensor, chunk: Chunk) -> Tensor:
        """Return the gradient of the weights, B1rc: identical for every head."""
        weights, total = self._kept(weights_BNrc, chunk)
        drows = drows_Brc.to(weights.dtype)
        # Gradient of w / Σ w over the selected weights.
        mean = torch.linalg.vecdot(drows, weights)[..., None] / total
        dmean = (drows - mean).mul_(weights > 0).div_(total)
        return dmean.div_(weights_BNrc.shape[1])[:, None]

    def _kept(self, weights_BNrc: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the selected mean weights and their clamped sum per row."""
        mean_Brc = weights_BNrc.mean(1)
        if self.request.sparsity == "topk":
            mean_Brc.mul_(mean_Brc >= largest(mean_Brc, self.request.topk).amin(-1, keepdim=True))
        elif self.request.sparsity == "rms":
            visible = self.pattern.visible(chunk, mean_Brc)
            rms = torch.linalg.vector_norm(mean_Brc, dim=-1, keepdim=True)
            rms.mul_(visible.rsqrt())
            mean_Brc.mul_(mean_Brc >= self.request.tau * rms)
        total = mean_Brc.sum(-1, keepdim=True)
        return mean_Brc, total.clamp_min(torch.finfo(total.dtype).tiny)
