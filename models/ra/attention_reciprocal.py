"""Reciprocal attention: s_ij ← s_ij + α (q_j · k_i)/√H for i − W ≤ j ≤ i; and its formula row by
row.

B batch, T tokens, N heads, H head dim; r the rows of a chunk, b the columns of its band.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .attention_components import QueriesKeys, RowChunk, ScoreTerm
from .attention_options import ReciprocalOptions
from .attention_triton import TileSpec
from .shape import ModelShape


class Reciprocal(ScoreTerm):
    """Score term that adds the score of the transposed pair inside a causal band."""

    def __init__(self, shape: ModelShape, options: ReciprocalOptions) -> None:
        super().__init__()
        self.reach = options.window
        self.constant = options.alpha
        start = torch.full((shape.n_head,), options.alpha)
        self.alpha = nn.Parameter(start) if options.learnable else None

    def scores(
        self, rows: QueriesKeys, band: QueriesKeys, chunk: RowChunk, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Return α k_i · q_j for the columns of the band."""
        if inputs:
            keys_BNrH = (rows.k * inputs[0][:, None, None]).to(rows.k.dtype)
        else:
            keys_BNrH = rows.k * self.constant
        reverse_BNrb = (keys_BNrH @ band.q.mT).to(torch.promote_types(rows.k.dtype, torch.float32))
        # Zero columns before the band of a row, j < i − W; the pattern masks later tokens.
        before = chunk.first - self.reach - (chunk.last - band.q.shape[2])
        return reverse_BNrb.triu_(before) if before > -chunk.height else reverse_BNrb

    def tile_spec(self, spec: TileSpec) -> tuple[TileSpec, Tensor | None]:
        alpha = self.constant if self.alpha is None else None
        return spec._replace(band=self.reach, alpha=alpha), self.alpha


def reference_scores(
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    i: int,
    columns: Sequence[int],
    parameters: Mapping[str, Tensor],
    options: ReciprocalOptions,
) -> Tensor:
    """Return α (q_j · k_i)/√H for i − W ≤ j ≤ i, else 0, for every j in ``columns``: BNc."""
    alpha_N1 = parameters["alpha"][:, None] if options.learnable else options.alpha
    dots_BNc = (q_BNTH[:, :, columns] * k_BNTH[:, :, i : i + 1]).sum(-1) / q_BNTH.shape[-1] ** 0.5
    inside_c = [float(i - options.window <= j <= i) for j in columns]
    return alpha_N1 * dots_BNc * dots_BNc.new_tensor(inside_c)
