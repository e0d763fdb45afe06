"""Options of the latent projection, after multi-head latent attention (arXiv 2405.04434).

c_k = x W_dk and c_v = x W_dv have width R and are shared by the heads; per head k_h = c_k K_h and
v_h = c_v U_h. Neither positions nor biases are used.
"""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape, nearest_multiple
from lib.binding import symbol


@dataclass(frozen=True)
class LatentOptions:
    """Options of the latent projection; ``latent_dim`` 0 selects C/6 rounded to a multiple of 8."""

    name: ClassVar[str] = "latent"

    latent_dim: int = symbol("LATENT_DIM")
    # One K and one U for all heads instead of one each.
    shared_expansion: bool = symbol("LATENT_SHARED_EXPANSION")

    def width(self, shape: Shape) -> int:
        """Return R, with 0 resolved."""
        return self.latent_dim or nearest_multiple(shape.n_embd / 6, 8)

    def weights(self, shape: Shape) -> int:
        """Return C² + 2CR down + 2·N·R·H = 2CR up (2RH if the heads share K and U)."""
        heads = 1 if self.shared_expansion else shape.n_head
        down = 2 * shape.n_embd * self.width(shape)
        up = 2 * heads * self.width(shape) * shape.head_dim
        return shape.n_embd**2 + down + up

    def num_params(self, shape: Shape) -> int:
        """Return the weights: the latent projection has no bias."""
        return self.weights(shape)

    def flops_per_token(self, shape: Shape) -> int:
        """Return two FLOPs per weight; a shared expansion is applied once."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: Shape) -> int:
        """Return 2R: c_k and c_v, shared by the heads."""
        return 2 * self.width(shape)

    def query_numbers(self, shape: Shape) -> int:
        """Return N·R: the absorbed queries q_h K_hᵀ have width R."""
        return shape.n_head * self.width(shape)
