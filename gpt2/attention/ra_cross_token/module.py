"""RA-CT: g = σ(scale_h · statistic + bias_h) per row; rows are scaled by (1 − α) + α g.

B batch, T tokens, N heads; r the rows of a chunk, c its columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpt2.attention.joined.scores import Scores
from gpt2.attention.ra_cross_token.joined import JOINED
from gpt2.attention.ra_cross_token.options import RaCrossTokenOptions
from gpt2.attention.ra_cross_token.statistics import STATISTICS
from gpt2.attention.rows.parts import Rows
from gpt2.shape import Shape


class RaCrossToken(nn.Module):
    """Gate per head and query, computed from the concentration of attention weights."""

    def __init__(self, shape: Shape, options: RaCrossTokenOptions) -> None:
        super().__init__()
        self.alpha = options.alpha
        self.head_average = options.head_average
        self.detach_stats = options.detach_stats
        self.scales_scores = options.apply == "weights"
        self._mode = options.mode
        self._statistic = STATISTICS[options.mode](options)
        self.scale = nn.Parameter(torch.full((shape.n_head,), options.scale))
        self.bias = nn.Parameter(torch.full((shape.n_head,), options.bias))

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the scale and bias per head."""
        return (self.scale, self.bias)

    def statistic(self, rows: Rows) -> Tensor:
        """Return the statistic of every row and the values needed for the gradient: BNrm."""
        return self._statistic.of(rows)

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: Rows, known_BNrm: Tensor
    ) -> None:
        """Add the gradient of the statistic to the gradient of the weights, in place."""
        self._statistic.add_slope_(dweights_BNrc, dstatistic_BNr1, rows, known_BNrm)

    def joined_statistic(self, scores: Scores, lse_BNT: Tensor) -> Tensor:
        """Return the differentiable statistic of every row, BNT; for modes in ``JOINED`` only."""
        # A detached statistic does not need a backward pass.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_stats):
            return JOINED[self._mode](scores, lse_BNT)

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
