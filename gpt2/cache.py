"""What decoding keeps from call to call. The caller holds it; modules keep nothing.

B batch, T tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class BlockCache:
    """The tensors that one block's parts keep, each under a name of its own.

    Tokens are counted from the start of the sequence: of the next token, at ``position``, those from
    ``left(position)`` on will be seen, and no earlier one is kept. A tensor that is kept is replaced
    and never written to.
    """

    def __init__(self, left: Callable[[int], int]) -> None:
        self.left = left
        self.position = 0
        self.kept: dict[str, Tensor] = {}

    def extend(self, name: str, new: Tensor, dim: int, reach: int | None = None) -> Tensor:
        """What is kept under ``name`` and ``new`` after it, joined along the token dimension.

        Of that, what later tokens may see stays: with ``reach`` at most as many tokens.
        """
        last = self.position + new.shape[dim]
        visible = last - self.left(last)
        count = visible if reach is None else min(visible, reach)
        earlier = [self.kept[name]] if name in self.kept else []
        whole = torch.cat([*earlier, new], dim)
        # A copy, so that what was cut off is not held in memory.
        cut = whole.shape[dim] - count
        self.kept[name] = whole.narrow(dim, cut, count).clone() if cut else whole
        return whole


class Cache:
    """One cache for each block, of as many sequences as the first call had rows."""

    def __init__(self, blocks: Sequence[BlockCache]) -> None:
        self.blocks = blocks
        # Tokens decoded so far.
        self.position = 0

    def advance(self, tokens: int) -> None:
        """Count tokens that every block has seen."""
        self.position += tokens
        for block in self.blocks:
            block.position = self.position

    def num_bytes(self) -> int:
        """Memory of all that is kept."""
        tensors = (tensor for block in self.blocks for tensor in block.kept.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
