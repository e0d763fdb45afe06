"""Grouped projection (Ainslie et al. 2023, arXiv 2305.13245).

B batch, T tokens, C n_embd, H head dim.
"""

from torch import Tensor, nn

from gpt2.attention.grouped.options import GroupedOptions
from gpt2.attention.heads import Heads, Projection, split_heads
from gpt2.attention.state import BlockState
from gpt2.shape import Shape


class Grouped(Projection, nn.Linear):
    """Linear layer C → C + 2·n_kv_head·H with columns in the order q, k, v."""

    def __init__(self, shape: Shape, options: GroupedOptions) -> None:
        shared = options.n_kv_head * shape.head_dim
        super().__init__(shape.n_embd, shape.n_embd + 2 * shared, bias=shape.bias)
        self.head_dim = shape.head_dim
        self.widths = [shape.n_embd, shared, shared]

    def forward(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """Return the queries of every head and the keys and values of every group."""
        q, k, v = super().forward(x_BTC).split(self.widths, dim=-1)
        return Heads(*(split_heads(part, self.head_dim) for part in (q, k, v)))
