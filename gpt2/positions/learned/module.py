"""Learned positions: queries and keys are left unchanged.

B batch, N heads, T tokens, H head dim.
"""

from torch import Tensor

from gpt2.positions.base import Positions
from gpt2.positions.learned.options import LearnedOptions
from gpt2.shape import Shape


class Learned(Positions):
    """Identity: position embeddings are added to x before attention."""

    def __init__(self, shape: Shape, options: LearnedOptions) -> None:
        pass

    def __call__(self, x_BNTH: Tensor, first: int = 0, step: int = 1) -> Tensor:
        """Return ``x`` unchanged."""
        return x_BNTH
