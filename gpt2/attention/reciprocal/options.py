"""Options of reciprocal attention: s_ij ← s_ij + α (q_j · k_i)/√H for i − W ≤ j ≤ i."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import ModelShape
from lib.config.field import kconfig_field


@dataclass(frozen=True)
class ReciprocalOptions:
    """Options of reciprocal attention; α = 0 disables it (scores are unchanged)."""

    name: ClassVar[str] = "reciprocal"
    lacks_joined: ClassVar[str] = ""

    alpha: float = kconfig_field("RECIPROCAL_ALPHA", low=0.0, high=2.0)
    # W: the band reaches this many tokens back.
    window: int = kconfig_field("RECIPROCAL_WINDOW")
    # One learnable α per head, starting at ``alpha``.
    learnable: bool = kconfig_field("RECIPROCAL_LEARNABLE")

    def num_params(self, shape: ModelShape) -> int:
        """Return one α per head if it is learnable."""
        return shape.n_head if self.learnable else 0

    def flops_per_token(self, shape: ModelShape, keys: float) -> float:
        """Return the FLOPs of one more dot product of width C per key of the band."""
        return 2 * shape.n_embd * min(self.window + 1, keys)

    @property
    def reach(self) -> int:
        """Return W."""
        return self.window
