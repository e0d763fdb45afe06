"""Interface of position-encoding options; does not import torch."""

from typing import Protocol

from gpt2.shape import Shape


class PositionOptions(Protocol):
    """Options of a position encoding."""

    name: str
    # True if queries and keys are rotated instead of adding position embeddings to x.
    rotates: bool

    def num_params(self, shape: Shape) -> int:
        """Return the parameters of the whole model."""
