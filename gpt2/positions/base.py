"""What attention does to queries and keys for their positions. B batch, N heads, T tokens, H head dim."""

from abc import ABC, abstractmethod

from torch import Tensor


class Positions(ABC):
    """Is asked for queries and keys of one block, once for each, before a score is computed."""

    @abstractmethod
    def __call__(self, x_BNTH: Tensor, first: int = 0, step: int = 1) -> Tensor:
        """``x`` as it is scored: its tokens stand at ``first``, ``first`` + ``step`` and so on."""
