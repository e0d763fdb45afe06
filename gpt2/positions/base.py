"""Base class of position encodings applied to queries and keys.

B batch, N heads, T tokens, H head dim.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class Positions(ABC):
    """Position encoding, applied to the queries and to the keys of a block before scores."""

    @abstractmethod
    def __call__(self, x_BNTH: Tensor, first: int = 0, step: int = 1) -> Tensor:
        """Encode ``x``, with tokens at positions ``first``, ``first`` + ``step`` and so on."""
