"""RA-CT: g = σ(scale_h · statistic + bias_h) per row; rows are scaled by (1 − α) + α g.

B batch, T tokens, N heads; r the rows of a chunk, c its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gpt2.attention.chunk_parts import Gate, ScoredRows, topk_values
from gpt2.attention.ra_cross_token.options import RaCrossTokenOptions
from gpt2.attention.tiled import TileSpec
from gpt2.shape import ModelShape

# Statistics of attention rows that RA-CT reads, each with its derivative.
#
# B batch, N heads; r the rows of a chunk, c its columns, m the saved values per row.
#
# ``of`` returns the statistic followed by the values that ``add_slope_`` needs. ``add_slope_`` adds
# the derivative, up to a constant per row, to the gradient of the weights.


class Topk:
    """Sum of the k largest weights; ties with the k-th share its derivative."""

    def __init__(self, options: RaCrossTokenOptions) -> None:
        self.k = options.topk

    def of(self, rows: ScoredRows) -> Tensor:
        """Return the sum and the k-th largest weight."""
        topk = topk_values(rows.weights_BNrc, self.k)
        return torch.stack((topk.sum(-1), topk.amin(-1)), -1)

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: ScoredRows, known_BNrm: Tensor
    ) -> None:
        """Add 1 above the k-th largest weight; ties with it share the remaining places evenly."""
        weights, edge = rows.weights_BNrc, known_BNrm[..., 1:]
        # Float comparison results are several times faster on a CPU than bool results.
        above = torch.gt(weights, edge, out=torch.empty_like(weights))
        level = torch.eq(weights, edge, out=torch.empty_like(weights))
        places = min(self.k, weights.shape[-1]) - above.sum(-1, keepdim=True)
        share = places / level.sum(-1, keepdim=True).clamp_min(1)
        dweights_BNrc.addcmul_(above.addcmul_(level, share), dstatistic_BNr1)


class Max:
    """Largest weight; ties share its derivative."""

    def __init__(self, options: RaCrossTokenOptions) -> None:
        pass

    def of(self, rows: ScoredRows) -> Tensor:
        """Return the largest weight."""
        return rows.weights_BNrc.amax(-1, keepdim=True)

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: ScoredRows, known_BNrm: Tensor
    ) -> None:
        """Add 1 at the largest weight."""
        weights = rows.weights_BNrc
        level = torch.eq(weights, weights.amax(-1, keepdim=True), out=torch.empty_like(weights))
        dweights_BNrc.addcmul_(level, dstatistic_BNr1 / level.sum(-1, keepdim=True))


class Entropy:
    """Entropy −Σ p ln p / ln(i+1), and 1 at i = 0 (a row with a single weight)."""

    def __init__(self, options: RaCrossTokenOptions) -> None:
        pass

    def of(self, rows: ScoredRows) -> Tensor:
        """Return (ln Σ exp s − Σ p s) / ln(i+1), which avoids a logarithm per pair."""
        log_sum = rows.scores_BNrc.amax(-1) - rows.weights_BNrc.amax(-1).log()
        entropy = log_sum - torch.linalg.vecdot(rows.weights_BNrc, rows.scores_BNrc)
        normalised = entropy[..., None] / rows.chunk.positions(entropy).log()
        return torch.where(rows.chunk.positions(entropy) == 1, 1.0, normalised)

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: ScoredRows, known_BNrm: Tensor
    ) -> None:
        """Add −(ln p + 1)/ln(i+1), equal to −s/ln(i+1) up to a constant per row."""
        log_positions = rows.chunk.positions(rows.scores_BNrc).log()
        slope = torch.where(log_positions == 0, 0.0, dstatistic_BNr1 / log_positions)
        dweights_BNrc.addcmul_(rows.scores_BNrc, slope, value=-1)


class Rms:
    """Root of the sum of squares, √Σ p²; independent of the length of the row."""

    def __init__(self, options: RaCrossTokenOptions) -> None:
        pass

    def of(self, rows: ScoredRows) -> Tensor:
        """Return the Euclidean norm of the row."""
        return torch.linalg.vector_norm(rows.weights_BNrc, dim=-1, keepdim=True)

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: ScoredRows, known_BNrm: Tensor
    ) -> None:
        """Add p / √Σ p²."""
        dweights_BNrc.addcmul_(rows.weights_BNrc, dstatistic_BNr1 / known_BNrm)


class RowStatistic(Protocol):
    """Statistic of attention rows."""

    def of(self, rows: ScoredRows) -> Tensor:
        """Return the statistic followed by the values that ``add_slope_`` needs."""

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: ScoredRows, known_BNrm: Tensor
    ) -> None:
        """Add the derivative, up to a constant per row, to the gradient of the weights."""


STATISTICS: dict[str, Callable[[RaCrossTokenOptions], RowStatistic]] = {
    "topk": Topk,
    "max": Max,
    "entropy": Entropy,
    "rms": Rms,
}


class RaCrossToken(Gate):
    """Gate per head and query, computed from the concentration of attention weights."""

    def __init__(self, shape: ModelShape, options: RaCrossTokenOptions) -> None:
        super().__init__()
        self.alpha = options.alpha
        self.head_average = options.head_average
        self.detach_stats = options.detach_stats
        self.scales_scores = options.scales_scores
        self._mode, self._topk = options.mode, options.topk
        self._statistic = STATISTICS[options.mode](options)
        self.scale = nn.Parameter(torch.full((shape.n_head,), options.scale))
        self.bias = nn.Parameter(torch.full((shape.n_head,), options.bias))

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the scale and bias per head."""
        return (self.scale, self.bias)

    def statistic(self, rows: ScoredRows) -> Tensor:
        """Return the statistic of every row and the values needed for the gradient: BNrm."""
        return self._statistic.of(rows)

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: ScoredRows, known_BNrm: Tensor
    ) -> None:
        """Add the gradient of the statistic to the gradient of the weights, in place."""
        self._statistic.add_slope_(dweights_BNrc, dstatistic_BNr1, rows, known_BNrm)

    def tile_spec(self, spec: TileSpec) -> TileSpec:
        """Return the specification with the statistic; the largest weight is a top-k of one."""
        if self._mode == "max":
            return replace(spec, statistic="topk", top=1)
        return replace(spec, statistic=self._mode, top=self._topk)

    def factor(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return (1 − α) + α g, BNT."""
        return (1 - self.alpha) + self.alpha * self.gate(statistic_BNT, inputs)

    def gate(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return g = σ(scale · statistic + bias), BNT."""
        scale, bias = inputs
        if self.detach_stats:
            statistic_BNT = statistic_BNT.detach()
        if self.head_average:
            statistic_BNT = statistic_BNT.mean(1, keepdim=True)
        return torch.sigmoid(scale[:, None] * statistic_BNT + bias[:, None])
