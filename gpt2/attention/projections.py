"""Queries, keys and values, and the projections that compute them.

B batch, T tokens, C n_embd, N heads, K key/value heads, H head dim, R latent dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt2.attention.options import LatentOptions, ProjectionOptions
from gpt2.attention.state import BlockState
from gpt2.shape import ModelShape
from lib.pruning.layers import StackedLinear


@dataclass(frozen=True)
class QKV:
    """Queries, keys and values; K divides N, and query head n reads key/value head n·K // N."""

    q_BNTH: Tensor
    k_BKTH: Tensor
    v_BKTH: Tensor
    # c_k of a latent projection.
    latent_BTR: Tensor | None = None


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
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class ZeroInitLinear(nn.Linear):
    """Linear layer with zero initial weights, so that a new branch starts without effect."""


class AdaptableLinear(StackedLinear):
    """Linear layer of a block; ``gpt2/lora.py`` may add an adapter, and store its matrix as codes."""

    def __init__(self, inputs: int, rows: Sequence[int], bias: bool) -> None:
        super().__init__(inputs, rows, bias)
        self.adapter: nn.Module | None = None
        # Returns the matrix, which is then no parameter.
        self.codes: nn.Module | None = None
        # Those that are not elements of the parameters of ``codes``.
        self.elements_in_codes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.codes is None:
            out = super().forward(x)
        else:
            # Backward decodes again instead of keeping the matrix.
            out = checkpoint(self._product, x, use_reentrant=False, preserve_rng_state=False)
        return out if self.adapter is None else out + self.adapter(x)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the matrix."""
        matrix = self.weight if self.codes is None else self.codes.get_parameter("scales")
        return matrix.dtype

    def _product(self, x: Tensor) -> Tensor:
        assert self.codes is not None
        return F.linear(x, self.codes(), self.bias)


class Dense(Projection, AdaptableLinear):
    """Linear layer C → C + 2·K·H with columns in the order q, k, v: GPT-2's c_attn if K = N."""

    def __init__(self, shape: ModelShape, options: ProjectionOptions) -> None:
        shared = options.kv_heads(shape) * shape.head_dim
        super().__init__(shape.n_embd, (shape.n_embd, shared, shared), shape.bias)
        self.head_dim = shape.head_dim

    # Not nn.Linear's signature: parameters are named as in GPT-2, where c_attn is a linear layer.
    def forward(self, x_BTC: Tensor, state: BlockState) -> QKV:  # type: ignore[override]
        q, k, v = super().forward(x_BTC).split(self.rows, dim=-1)
        return QKV(*(split_heads(part, self.head_dim) for part in (q, k, v)))


class Latent(Projection):
    """Latent projection after multi-head latent attention (arXiv 2405.04434): c_k and c_v of width
    R.

    ``expand_k`` and ``expand_v`` stack the matrices K_h and U_h, or have one for all heads.
    """

    def __init__(self, shape: ModelShape, options: LatentOptions) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, n_embd = options.width(shape), shape.n_embd
        expanded = shape.head_dim if options.shared_expansion else n_embd
        self.c_q = nn.Linear(n_embd, n_embd, bias=False)
        self.c_k = nn.Linear(n_embd, width, bias=False)
        self.c_v = nn.Linear(n_embd, width, bias=False)
        self.expand_k = nn.Linear(width, expanded, bias=False)
        self.expand_v = nn.Linear(width, expanded, bias=False)

    def forward(self, x_BTC: Tensor, state: BlockState) -> QKV:
        latent_BTR = self._latent_keys(x_BTC, state)
        wide = self.c_q(x_BTC), self.expand_k(latent_BTR), self.expand_v(self.c_v(x_BTC))
        q, k, v = (split_heads(part, self.head_dim) for part in wide)
        return QKV(q, k, v, latent_BTR)

    def decode(self, x_BTC: Tensor, state: BlockState) -> QKV:
        """Return absorbed queries q_h K_hᵀ, and c_k and c_v of all heads as keys and values."""
        latent_BTR = self._latent_keys(x_BTC, state)
        q_BNTH = split_heads(self.c_q(x_BTC), self.head_dim)
        q_BNTR = q_BNTH @ self._per_head(self.expand_k)
        # A shift may be wider than the autocast dtype of products; in forward expand_k casts it.
        cached_BTR = latent_BTR.to(q_BNTR.dtype)
        return QKV(q_BNTR, cached_BTR[:, None], self.c_v(x_BTC)[:, None], latent_BTR)

    def expand(self, context_BNTR: Tensor) -> Tensor:
        """Return (Σ p c_v) U_h = Σ p v_h."""
        return context_BNTR @ self._per_head(self.expand_v).mT

    def _latent_keys(self, x_BTC: Tensor, state: BlockState) -> Tensor:
        latent_BTR = self.c_k(x_BTC)
        if state.latent_shift_BTR is None:
            return latent_BTR
        return latent_BTR + state.latent_shift_BTR

    def _per_head(self, expansion: nn.Linear) -> Tensor:
        """Return the expansion as NHR, or 1HR if all heads share it."""
        return expansion.weight.unflatten(0, (-1, self.head_dim))
