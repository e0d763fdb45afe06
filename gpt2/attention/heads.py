"""What a projection makes.

B batch, T tokens, C n_embd, N heads, K key/value heads, H head dim, R latent dim.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from gpt2.attention.state import BlockState
from gpt2.positions.base import Positions


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values; K divides N, and query head n reads key/value head n·K // N."""

    q_BNTH: Tensor
    k_BKTH: Tensor
    v_BKTH: Tensor
    # c_k of a latent projection.
    latent_BTR: Tensor | None = None

    def at(self, positions: Positions, first: int) -> "Heads":
        """With queries and keys as they are scored, the first of them those of token ``first``."""
        q_BNTH, k_BKTH = (positions(x, first) for x in (self.q_BNTH, self.k_BKTH))
        return replace(self, q_BNTH=q_BNTH, k_BKTH=k_BKTH)


class Projection(nn.Module):
    """What makes ``Heads``. As it stands, decoding keeps keys and values as ``forward`` makes them."""

    def decode(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """Queries to attend with, and the keys and values to keep. q·k is that of ``forward``."""
        heads: Heads = self(x_BTC, state)
        return heads

    def expand(self, context_BNTH: Tensor) -> Tensor:
        """Head outputs BNTH from the sum of values that were kept."""
        return context_BNTH


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, N·H] → [B, N, T, H], a view."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
