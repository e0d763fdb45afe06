"""Data passed between blocks, and from the attention of a block to its MLP.

B batch, T tokens (queries), S tokens (keys), N heads, R latent dim, K key/value
heads, H head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from gpt2.attention.positions import Rotation


@dataclass
class BlockState:
    """State passed from one block to the next; created in every forward call."""

    # Multiplies the next block's head outputs at query position t.
    head_scale_BTN: Tensor | None = None
    # Added to the next block's c_k.
    latent_shift_BTR: Tensor | None = None
    # Cosines and sines of rotary positions, [T, H/2], the same in every block; None: not computed.
    rotation: Rotation | None = None
    # Values of the first block, if later ones mix theirs with them.
    values_BKTH: Tensor | None = None


@dataclass(frozen=True)
class AttentionOutputs:
    """Attention data that the MLP of the same block can read."""

    # Mean over heads of the last softmax, sparsified as AttentionWeightsOptions say.
    weights_BTS: Tensor | None = None
    # This block's c_k, after the shift; None without a latent projection.
    latent_BTR: Tensor | None = None
    # For the state of the next block.
    values_BKTH: Tensor | None = None
