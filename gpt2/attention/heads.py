"""What a projection makes. B batch, T tokens, N heads, K key/value heads, H head dim, R latent."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values; K divides N, and query head n reads key/value head n·K // N."""

    q_BNTH: Tensor
    k_BKTH: Tensor
    v_BKTH: Tensor
    # c_k of a latent projection.
    latent_BTR: Tensor | None = None


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, N·H] → [B, N, T, H], a view."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
