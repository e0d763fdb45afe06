"""Reciprocal attention: s_ij ← s_ij + α (q_j · k_i)/√H for i − W ≤ j ≤ i.

B batch, T tokens, N heads, H head dim; r the rows of a chunk, b the columns of its band.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpt2.attention.chunk_parts import RowChunk, ScoreTerm
from gpt2.attention.reciprocal.options import ReciprocalOptions
from gpt2.attention.tiled import TileSpec
from gpt2.shape import ModelShape


class Reciprocal(ScoreTerm):
    """Score term that adds the score of the transposed pair inside a causal band."""

    def __init__(self, shape: ModelShape, options: ReciprocalOptions) -> None:
        super().__init__()
        self.window = options.window
        self.constant = options.alpha
        start = torch.full((shape.n_head,), options.alpha)
        self.alpha = nn.Parameter(start) if options.learnable else None

    def inputs(self) -> tuple[Tensor, ...]:
        """Return α per head if it is learnable."""
        return () if self.alpha is None else (self.alpha,)

    def add_(
        self,
        scores_BNrc: Tensor,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        chunk: RowChunk,
        inputs: Sequence[Tensor],
    ) -> None:
        """Add α k_i · q_j to the columns of the band; q is already divided by √H."""
        left = self._left(chunk)
        queries = q_BNTH[:, :, chunk.slice(left)]
        reverse = (self._scaled_keys(k_BNTH[:, :, chunk.rows], inputs) @ queries.mT).to(
            scores_BNrc.dtype
        )
        self._cut_(reverse, chunk, left)
        scores_BNrc[..., left - chunk.left :].add_(reverse)

    def backward_(
        self,
        dscores_BNrc: Tensor,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        chunk: RowChunk,
        inputs: Sequence[Tensor],
        dq_BNTH: Tensor,
        dk_BNTH: Tensor,
    ) -> tuple[Tensor, ...]:
        """Backpropagate through the columns of the band; return the gradient of a learnable α."""
        left = self._left(chunk)
        band = chunk.slice(left)
        dreverse = dscores_BNrc[..., left - chunk.left :].clone()
        self._cut_(dreverse, chunk, left)
        dreverse = dreverse.to(q_BNTH.dtype)
        keys = self._scaled_keys(k_BNTH[:, :, chunk.rows], inputs)
        dq_BNTH[:, :, band].add_(dreverse.mT @ keys)
        dkeys = (dreverse @ q_BNTH[:, :, band]).to(dk_BNTH.dtype)
        if not inputs:
            dk_BNTH[:, :, chunk.rows].add_(dkeys, alpha=self.constant)
            return ()
        (alpha,) = inputs
        dk_BNTH[:, :, chunk.rows].add_(dkeys * alpha[:, None, None])
        return ((dkeys * k_BNTH[:, :, chunk.rows]).sum((0, 2, 3)),)

    def tile_spec(self, spec: TileSpec, inputs: Sequence[Tensor]) -> tuple[TileSpec, Tensor | None]:
        """Return the specification with the band, and α per head if it is learnable."""
        alpha = None if inputs else self.constant
        return replace(spec, band=self.window, alpha=alpha), inputs[0] if inputs else None

    def _left(self, chunk: RowChunk) -> int:
        """Return the first visible column inside the band of any row of the chunk."""
        return max(chunk.left, chunk.first - self.window)

    def _scaled_keys(self, keys: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return (keys * inputs[0][:, None, None]).to(keys.dtype) if inputs else keys * self.constant

    def _cut_(self, reverse_BNrb: Tensor, chunk: RowChunk, left: int) -> None:
        """Zero columns before the band of a row, j < i − W; the pattern masks later tokens."""
        reverse_BNrb[..., : chunk.height].triu_(chunk.first - self.window - left)
