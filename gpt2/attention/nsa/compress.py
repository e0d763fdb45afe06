"""From blocks of keys or values to one each (Yuan et al. 2025, equation 7).

B batch, S tokens, K key/value heads, H head dim, M compressed blocks, l tokens of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.nsa.options import NsaOptions
from gpt2.shape import Shape


class Phi(nn.Module):
    """W₂ gelu(W₁ (block + position)), added to a block's mean, from which it starts to learn."""

    def __init__(self, shape: Shape, options: NsaOptions) -> None:
        super().__init__()
        width = options.compress * shape.head_dim
        # As one vector, which weight decay leaves alone.
        self.position = nn.Parameter(torch.zeros(width))
        self.up = nn.Linear(width, options.hidden, bias=False)
        self.down = nn.Linear(options.hidden, shape.head_dim, bias=False)

    def forward(self, blocks_BKMlH: Tensor) -> Tensor:
        """BKMH."""
        flat = blocks_BKMlH.flatten(-2) + self.position
        correction: Tensor = self.down(F.gelu(self.up(flat)))
        return correction


def compress(x_BKSH: Tensor, options: NsaOptions, phi: Phi | None) -> Tensor:
    """BKMH: block i is made of tokens [i·d, i·d + l); M is 0 before the first is complete."""
    # A slice of no tokens keeps the graph together where there is no block yet.
    complete = x_BKSH.shape[2] >= options.compress
    blocks_BKMHl = (
        x_BKSH.unfold(2, options.compress, options.stride)
        if complete
        else x_BKSH[:, :, :0, :, None].expand(-1, -1, -1, -1, options.compress)
    )
    mean_BKMH = blocks_BKMHl.mean(-1)
    return mean_BKMH if phi is None else mean_BKMH + phi(blocks_BKMHl.mT)
