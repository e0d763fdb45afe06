"""Value residual: v ← λ v + (1 − λ) v₁, with the values v₁ of the first block; and its formula.

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gpt2.attention.options import ValueResidualOptions
from gpt2.mechanism_statistics import Statistics, norm_ratio
from gpt2.shape import ModelShape


class ValueResidual(nn.Module):
    """Mix of a block's values with those of the first block; λ is a constant or learned."""

    def __init__(self, shape: ModelShape, options: ValueResidualOptions) -> None:
        super().__init__()
        self.constant = options.share
        # Not a scalar, which FSDP does not shard.
        start = torch.full((1,), options.share)
        self.share = nn.Parameter(start) if options.learnable else None

    def forward(self, v_BKTH: Tensor, first_BKTH: Tensor) -> Tensor:
        own_BKTH, residual_BKTH = self._parts(v_BKTH, first_BKTH)
        return (own_BKTH + residual_BKTH).to(v_BKTH.dtype)

    def statistics(self, v_BKTH: Tensor, first_BKTH: Tensor) -> Statistics:
        own_BKTH, residual_BKTH = self._parts(v_BKTH, first_BKTH)
        return {"value_residual/share": norm_ratio(residual_BKTH, own_BKTH)}

    def _parts(self, v_BKTH: Tensor, first_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return λ v and (1 − λ) v₁, in the type of λ if it is learned."""
        share = self.constant if self.share is None else self.share
        return share * v_BKTH, (1 - share) * first_BKTH


def reference_values(
    v_BNTH: Tensor,
    first_BNTH: Tensor,
    parameters: Mapping[str, Tensor],
    options: ValueResidualOptions,
) -> Tensor:
    """Return the values of a later block: the first ones, moved by λ toward its own."""
    share = parameters["share"] if options.learnable else options.share
    return first_BNTH + share * (v_BNTH - first_BNTH)
