"""Options of rotary positions (Su et al. 2021, arXiv 2104.09864)."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape
from lib.binding import symbol


@dataclass(frozen=True)
class RopeOptions:
    """Options of RoPE: pair j of H elements is rotated by t · ``base``^(−2j/H) at token t."""

    name: ClassVar[str] = "rope"
    rotates: ClassVar[bool] = True

    base: float = symbol("ROPE_BASE", low=2.0, high=1e9)

    def num_params(self, shape: Shape) -> int:
        """Return 0."""
        return 0
