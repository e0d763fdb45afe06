"""The weights that an MLP asked for: a row's mean over heads, thinned out and renormalised.

B batch, N heads; r the rows of a chunk, c its columns.
"""

import torch
from torch import Tensor

from gpt2.attention.rows.largest import largest
from gpt2.attention.rows.parts import Chunk, Pattern
from gpt2.attention.state import WeightsRequest


class HeadMean:
    """Reads a chunk's last softmax. What is kept is chosen without a gradient."""

    def __init__(self, request: WeightsRequest, pattern: Pattern) -> None:
        self.request = request
        self.pattern = pattern

    def read(self, weights_BNrc: Tensor, chunk: Chunk) -> Tensor:
        """The rows to show, Brc; each sums to one, or to zero where nothing was kept."""
        kept, total = self._kept(weights_BNrc, chunk)
        return kept.div_(total)

    def backward(self, drows_Brc: Tensor, weights_BNrc: Tensor, chunk: Chunk) -> Tensor:
        """The gradient of the weights, B1rc: the same for every head."""
        kept, total = self._kept(weights_BNrc, chunk)
        drows = drows_Brc.to(kept.dtype)
        # Of w / Σ w over the weights that were kept.
        mean = torch.linalg.vecdot(drows, kept)[..., None] / total
        dmean = (drows - mean).mul_(kept > 0).div_(total)
        return dmean.div_(weights_BNrc.shape[1])[:, None]

    def _kept(self, weights_BNrc: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        mean_Brc = weights_BNrc.mean(1)
        if self.request.sparsity == "topk":
            mean_Brc.mul_(mean_Brc >= largest(mean_Brc, self.request.topk).amin(-1, keepdim=True))
        elif self.request.sparsity == "rms":
            visible = self.pattern.visible(chunk, mean_Brc)
            root_mean_square = torch.linalg.vector_norm(mean_Brc, dim=-1, keepdim=True)
            root_mean_square.mul_(visible.rsqrt())
            mean_Brc.mul_(mean_Brc >= self.request.tau * root_mean_square)
        total = mean_Brc.sum(-1, keepdim=True)
        return mean_Brc, total.clamp_min(torch.finfo(total.dtype).tiny)
