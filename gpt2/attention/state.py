"""What blocks hand on and what a block's attention shows to its MLP.

B batch, T tokens (queries), S tokens (keys), N heads, R latent dim.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass
class BlockState:
    """What one block hands to the next; created in every forward call."""

    # Multiplies the next block's head outputs at query position t.
    head_scale_BTN: Tensor | None = None
    # Added to the next block's c_k.
    latent_shift_BTR: Tensor | None = None


@dataclass(frozen=True)
class AttentionView:
    """What a block's attention shows to its MLP."""

    # Mean over heads of the last softmax, thinned out and renormalised as WeightsRequest asked.
    weights_BTS: Tensor | None = None
    # This block's c_k, after the shift; None without a latent projection.
    latent_BTR: Tensor | None = None


@dataclass(frozen=True)
class WeightsRequest:
    """How an MLP wants to see the attention weights.

    ``topk`` keeps a row's k largest weights (those equal to the k-th too), ``rms`` those of at
    least ``tau`` times the root mean square over the row's visible tokens, ``none`` all. With
    ``detach`` no gradient flows back into attention.
    """

    sparsity: Literal["topk", "rms", "none"]
    topk: int
    tau: float
    detach: bool
