"""Queries, keys and values, and the base class of the projections that compute them.

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
        """Return the heads with position-encoded queries and keys from position ``first`` on."""
        q_BNTH, k_BKTH = (positions(x, first) for x in (self.q_BNTH, self.k_BKTH))
        return replace(self, q_BNTH=q_BNTH, k_BKTH=k_BKTH)


class Projection(nn.Module):
    """Base class of projections. By default, decoding caches the keys and values of ``forward``."""

    def decode(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """Return queries, and keys and values to cache; q·k equals that of ``forward``."""
        heads: Heads = self(x_BTC, state)
        return heads

    def expand(self, context_BNTH: Tensor) -> Tensor:
        """Return head outputs BNTH from weighted sums of cached values."""
        return context_BNTH


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return a view [B, N, T, H] of [B, T, N·H]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
