"""Dense projection. B batch, T tokens, C n_embd, N heads, H head dim."""

from torch import Tensor, nn

from gpt2.attention.dense.options import DenseOptions
from gpt2.attention.heads import Heads, Projection, split_heads
from gpt2.attention.state import BlockState
from gpt2.shape import Shape


class Dense(Projection, nn.Linear):
    """Linear layer C → 3C with columns in the order q, k, v: GPT-2's c_attn."""

    def __init__(self, shape: Shape, options: DenseOptions) -> None:
        super().__init__(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.head_dim = shape.head_dim

    def forward(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """Return queries, keys and values of every head."""
        q, k, v = super().forward(x_BTC).split(self.in_features, dim=-1)
        return Heads(*(split_heads(part, self.head_dim) for part in (q, k, v)))
