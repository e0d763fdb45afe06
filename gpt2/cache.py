"""What decoding keeps from call to call. The caller holds it; modules keep nothing.

B batch, T tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor


class Run:
    """Tokens in order along one dimension. They are added in place, and never written over.

    Where the room for them is used up, what is still kept moves into twice as much: a token is
    copied a few times in all, however many follow.
    """

    def __init__(self, dim: int, unit: int = 1) -> None:
        """The room is for a multiple of ``unit`` tokens."""
        self.dim, self.unit = dim, unit
        self.room: Tensor | None = None
        self.start = self.stop = 0

    @property
    def kept(self) -> Tensor:
        """A view of all that is kept."""
        assert self.room is not None
        return self.room.narrow(self.dim, self.start, self.stop - self.start)

    def append(self, new: Tensor) -> Tensor:
        """What is kept, ``new`` at its end."""
        count = new.shape[self.dim]
        if self.room is None or self.stop + count > self.room.shape[self.dim]:
            self._move(new)
        assert self.room is not None and self.room.dtype == new.dtype
        self.room.narrow(self.dim, self.stop, count).copy_(new)
        self.stop += count
        return self.kept

    def forget(self, count: int) -> None:
        """Keep the first ``count`` no longer."""
        self.start += count

    def _move(self, new: Tensor) -> None:
        """Into room for what is kept and ``new``."""
        live = self.stop - self.start
        size = list(new.shape)
        size[self.dim] = -(-max(2 * live, live + size[self.dim]) // self.unit) * self.unit
        room = new.new_empty(size)
        if live:
            room.narrow(self.dim, 0, live).copy_(self.kept)
        self.room, self.start, self.stop = room, 0, live


class BlockCache:
    """The tensors that one block's parts keep, each under a name of its own.

    Tokens are counted from the start of the sequence: of the next token, at ``position``, those from
    ``left(position)`` on will be seen, and no earlier one is kept. Nothing that is kept has a
    gradient.
    """

    def __init__(self, left: Callable[[int], int]) -> None:
        self.left = left
        self.position = 0
        self.kept: dict[str, Tensor] = {}
        self.runs: dict[str, Run] = {}
        # Keys that a token given by itself was multiplied with, for each key/value head, by name.
        self.reads: Counter[str] = Counter()

    def extend(
        self, name: str, new: Tensor, dim: int, reach: int | None = None, unit: int = 1
    ) -> Tensor:
        """What is kept under ``name`` and ``new`` after it, a view along the token dimension.

        Of that, what later tokens may see stays: with ``reach`` at most as many tokens.
        """
        run = self.runs.setdefault(name, Run(dim, unit))
        whole = run.append(new.detach())
        last = self.position + new.shape[dim]
        visible = last - self.left(last)
        count = visible if reach is None else min(visible, reach)
        run.forget(max(0, whole.shape[dim] - count))
        self.kept[name] = run.kept
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
        """Memory of all that is kept; room for more of it is at most as much again."""
        return sum(tensor.nbytes for block in self.blocks for tensor in block.kept.values())

    def reads(self) -> Counter[str]:
        """Of all blocks together."""
        return sum((block.reads for block in self.blocks), Counter())
