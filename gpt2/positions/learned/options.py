"""Options of learned positions."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape


@dataclass(frozen=True)
class LearnedOptions:
    """Options of GPT-2's ``wpe``: one embedding per position."""

    name: ClassVar[str] = "learned"
    rotates: ClassVar[bool] = False

    def num_params(self, shape: Shape) -> int:
        """Return ``block_size`` · C."""
        return shape.block_size * shape.n_embd
