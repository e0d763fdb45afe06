"""RA-CT: g = σ(scale_h · statistic + bias_h) per row; rows are scaled by (1 − α) + α g; and the
formula row by row.

B batch, T tokens, N heads; r the rows of a chunk, c its columns.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gpt2.attention.components import Gate, RowChunk
from gpt2.attention.exposed import largest_sum, sum_and_edge
from gpt2.attention.options import RaCrossTokenOptions
from gpt2.attention.triton import TileSpec
from gpt2.shape import ModelShape


def entropy(
    weights_BNrc: Tensor, scores_BNrc: Tensor, chunk: RowChunk, sink_BNr: Tensor | None = None
) -> Tensor:
    """Return −Σ p ln p / ln(i+1), BNr, and 1 at i = 0, as (ln Σ exp s − Σ p s) / ln(i+1).

    This avoids a logarithm per pair. The derivatives by s cancel: that of ln Σ exp s is p. With a
    sink, which is in that sum, it is multiplied by Σ p; and the derivative by p_j is −ln p_j − 1.
    """
    log_sum = scores_BNrc.amax(-1) - weights_BNrc.detach().amax(-1).log()
    if sink_BNr is not None:
        total_BNr = weights_BNrc.sum(-1)
        log_sum = log_sum * total_BNr - (total_BNr - total_BNr.detach())
    entropy_BNr1 = (log_sum - torch.linalg.vecdot(weights_BNrc, scores_BNrc))[..., None]
    positions_r1 = chunk.positions(entropy_BNr1)
    # Not ln 1 = 0, by which the gradient of a single weight would be divided.
    logs_r1 = positions_r1.clamp_min(2).log()
    return torch.where(positions_r1 == 1, 1.0, entropy_BNr1 / logs_r1)[..., 0]


class RaCrossToken(Gate):
    """Gate per head and query, computed from the concentration of attention weights."""

    def __init__(self, shape: ModelShape, options: RaCrossTokenOptions) -> None:
        super().__init__()
        self.alpha = options.alpha
        self.head_average = options.head_average
        self.detach_stats = options.detach_stats
        self.scales_scores = options.scales_scores
        self.mode, self.topk = options.mode, options.topk
        self.scale = nn.Parameter(torch.full((shape.n_head,), options.scale))
        self.bias = nn.Parameter(torch.full((shape.n_head,), options.bias))

    def statistic(
        self,
        weights_BNrc: Tensor,
        scores_BNrc: Tensor,
        chunk: RowChunk,
        kept: dict[Gate, Tensor],
        sink_BNr: Tensor | None = None,
    ) -> Tensor:
        if self.mode == "topk":
            if self not in kept:
                kept[self] = sum_and_edge(weights_BNrc.detach(), self.topk)
            return largest_sum(weights_BNrc, self.topk, kept[self])
        if self.mode == "max":
            return weights_BNrc.amax(-1)
        if self.mode == "rms":
            # The root of the sum of squares.
            return torch.linalg.vector_norm(weights_BNrc, dim=-1)
        return entropy(weights_BNrc, scores_BNrc, chunk, sink_BNr)

    def tile_spec(self, spec: TileSpec) -> TileSpec:
        if self.mode == "max":
            return spec._replace(statistic="topk", top=1)
        return spec._replace(statistic=self.mode, top=self.topk)

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


def _reference_statistic(p_BNc: Tensor, i: int, options: RaCrossTokenOptions) -> Tensor:
    if options.mode == "topk":
        return p_BNc.sort(-1, descending=True).values[..., : options.topk].sum(-1)
    if options.mode == "max":
        return p_BNc.max(-1).values
    if options.mode == "rms":
        return (p_BNc**2).sum(-1).sqrt()
    if i == 0:
        return torch.ones_like(p_BNc[..., 0])
    return -(p_BNc * p_BNc.log()).sum(-1) / math.log(i + 1)


def reference_factor(
    p_BNc: Tensor, i: int, parameters: Mapping[str, Tensor], options: RaCrossTokenOptions
) -> Tensor:
    """Return (1 − α) + α σ(scale_h · statistic + bias_h), BN."""
    value = _reference_statistic(p_BNc, i, options)
    if options.detach_stats:
        value = value.detach()
    if options.head_average:
        value = value.mean(1, keepdim=True)
    gate = 1 / (1 + torch.exp(-(parameters["scale"] * value + parameters["bias"])))
    return (1 - options.alpha) + options.alpha * gate
