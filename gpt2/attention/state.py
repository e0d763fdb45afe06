"""Data passed between blocks, and from the attention of a block to its MLP.

B batch, T tokens (queries), S tokens (keys), N heads, R latent dim.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from gpt2.attention.positions import PositionEncoding


@dataclass
class BlockState:
    """State passed from one block to the next; created in every forward call."""

    # Multiplies the next block's head outputs at query position t.
    head_scale_BTN: Tensor | None = None
    # Added to the next block's c_k.
    latent_shift_BTR: Tensor | None = None


@dataclass(frozen=True)
class AttentionOutputs:
    """Attention data that the MLP of the same block can read."""

    # Mean over heads of the last softmax, sparsified and renormalized according to WeightsRequest.
    weights_BTS: Tensor | None = None
    # This block's c_k, after the shift; None without a latent projection.
    latent_BTR: Tensor | None = None


@dataclass(frozen=True)
class AttentionWeightsOptions:
    """Attention weights required by an MLP.

    ``topk`` keeps the k largest weights of a row (and ties with the k-th), ``rms`` weights of at
    least ``tau`` times the root mean square over the visible tokens of the row, ``none`` all
    weights. With ``detach`` no gradient flows back into attention.
    """

    sparsity: Literal["topk", "rms", "none"]
    topk: int
    tau: float
    detach: bool


# Queries, keys and values, and the base class of the projections that compute them.
#
# B batch, T tokens, C n_embd, N heads, K key/value heads, H head dim, R latent dim.


@dataclass(frozen=True)
class QKV:
    """Queries, keys and values; K divides N, and query head n reads key/value head n·K // N."""

    q_BNTH: Tensor
    k_BKTH: Tensor
    v_BKTH: Tensor
    # c_k of a latent projection.
    latent_BTR: Tensor | None = None

    def at(self, positions: PositionEncoding, first: int) -> "QKV":
        """Return the heads with position-encoded queries and keys from position ``first`` on."""
        q_BNTH, k_BKTH = (positions(x, first) for x in (self.q_BNTH, self.k_BKTH))
        return replace(self, q_BNTH=q_BNTH, k_BKTH=k_BKTH)


class Projection(nn.Module):
    """Base class of projections. By default, decoding caches the keys and values of ``forward``."""

    def decode(self, x_BTC: Tensor, state: BlockState) -> QKV:
        """Return queries, and keys and values to cache; q·k equals that of ``forward``."""
        heads: QKV = self(x_BTC, state)
        return heads

    def expand(self, context_BNTH: Tensor) -> Tensor:
        """Return head outputs BNTH from weighted sums of cached values."""
        return context_BNTH


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return a view [B, N, T, H] of [B, T, N·H]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
