"""Compression of blocks of keys or values to one vector per block (Yuan et al. 2025, equation 7).

B batch, S tokens, K key/value heads, H head dim, M compressed blocks, l tokens per block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.nsa.options import NsaOptions
from gpt2.shape import Shape


class Phi(nn.Module):
    """MLP W₂ gelu(W₁ (block + position)), a learned correction that is added to the block mean."""

    def __init__(self, shape: Shape, options: NsaOptions) -> None:
        super().__init__()
        width = options.compress * shape.head_dim
        # One flat vector, so that weight decay does not apply.
        self.position = nn.Parameter(torch.zeros(width))
        self.up = nn.Linear(width, options.hidden, bias=False)
        self.down = nn.Linear(options.hidden, shape.head_dim, bias=False)

    def forward(self, blocks_BKMlH: Tensor) -> Tensor:
        """Return the correction of every block, BKMH."""
        flat = blocks_BKMlH.flatten(-2) + self.position
        correction: Tensor = self.down(F.gelu(self.up(flat)))
        return correction


def compress(x_BKSH: Tensor, options: NsaOptions, phi: Phi | None) -> Tensor:
    """Return the compressed blocks BKMH; block i covers the tokens [i·d, i·d + l).

    M is 0 until the first block is complete. A block is the mean of its tokens, plus ``phi`` of the
    block if ``phi`` is given.
    """
    # Without a complete block, an empty slice keeps the result connected to the autograd graph.
    complete = x_BKSH.shape[2] >= options.compress
    blocks_BKMHl = (
        x_BKSH.unfold(2, options.compress, options.stride)
        if complete
        else x_BKSH[:, :, :0, :, None].expand(-1, -1, -1, -1, options.compress)
    )
    mean_BKMH = blocks_BKMHl.mean(-1)
    return mean_BKMH if phi is None else mean_BKMH + phi(blocks_BKMHl.mT)
