"""What a kind of positions declares; imports no torch."""

from typing import Protocol

from gpt2.shape import Shape


class PositionOptions(Protocol):
    """How a model knows where a token stands."""

    name: str
    # Whether queries and keys are rotated, in the place of a table that is added to x.
    rotates: bool

    def num_params(self, shape: Shape) -> int:
        """Parameters of the whole model."""
