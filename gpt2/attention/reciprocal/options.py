"""Options of reciprocal attention: s_ij ← s_ij + α (q_j · k_i)/√H for i − W ≤ j ≤ i."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import ModelShape
from lib.config.field import SymbolValue, kconfig_field
from lib.config.small_form import scale_tokens


@dataclass(frozen=True)
class ReciprocalOptions:
    """Options of reciprocal attention; α = 0 disables it (scores are unchanged)."""

    name: ClassVar[str] = "reciprocal"
    lacks_triton: ClassVar[str] = ""
    # A learnable α would start at 0 and be trained.
    off: ClassVar[Mapping[str, SymbolValue]] = {
        "RECIPROCAL_ALPHA": "0.0",
        "RECIPROCAL_LEARNABLE": False,
    }

    alpha: float = kconfig_field("RECIPROCAL_ALPHA", low=0.0, high=2.0)
    # W: the band reaches this many tokens back.
    window: int = kconfig_field("RECIPROCAL_WINDOW", small=scale_tokens)
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
