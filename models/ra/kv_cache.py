"""KV cache for decoding; created and owned by the caller, modules are stateless.

B batch, T tokens.
"""

from collections.abc import Callable, Sequence

from torch import Tensor


class TokenBuffer:
    """Growing buffer of tokens along one dimension; stored tokens are never overwritten.

    When the buffer is full, the live tokens move into a buffer of twice the size, so the amortized
    number of copies per token is constant.
    """

    def __init__(self, dim: int, unit: int = 1) -> None:
        """Set the token dimension; the capacity is a multiple of ``unit`` tokens."""
        self.dim, self.unit = dim, unit
        self.room: Tensor | None = None
        self.start = self.stop = 0

    @property
    def kept(self) -> Tensor:
        """Return a view of all live tokens."""
        assert self.room is not None
        return self.room.narrow(self.dim, self.start, self.stop - self.start)

    def append(self, new: Tensor) -> Tensor:
        """Append ``new`` and return a view of all live tokens."""
        count = new.shape[self.dim]
        if self.room is None or self.stop + count > self.room.shape[self.dim]:
            self._move(new)
        assert self.room is not None and self.room.dtype == new.dtype
        self.room.narrow(self.dim, self.stop, count).copy_(new)
        self.stop += count
        return self.kept

    def forget(self, count: int) -> None:
        """Drop the first ``count`` tokens."""
        self.start += count

    def _move(self, new: Tensor) -> None:
        """Move the live tokens into a larger buffer with room for ``new``."""
        live = self.stop - self.start
        size = list(new.shape)
        size[self.dim] = -(-max(2 * live, live + size[self.dim]) // self.unit) * self.unit
        room = new.new_empty(size)
        if live:
            room.narrow(self.dim, 0, live).copy_(self.kept)
        self.room, self.start, self.stop = room, 0, live


class BlockKVCache:
    """Cached tensors of one block, by name.

    Positions count from the start of the sequence. The next token, at ``position``, sees tokens
    from ``left(position)`` on; earlier ones are dropped. Cached tensors have no gradient.
    """

    def __init__(self, left: Callable[[int], int]) -> None:
        self.left = left
        self.position = 0
        self.kept: dict[str, Tensor] = {}
        self.runs: dict[str, TokenBuffer] = {}

    def extend(
        self, name: str, new: Tensor, dim: int, reach: int | None = None, unit: int = 1
    ) -> Tensor:
        """Append ``new`` under ``name`` and return a view of old and new tokens.

        Afterwards only tokens that later tokens can see are kept, at most ``reach`` of them if
        given.
        """
        run = self.runs.setdefault(name, TokenBuffer(dim, unit))
        tokens = run.append(new.detach())
        last = self.position + new.shape[dim]
        visible = last - self.left(last)
        count = visible if reach is None else min(visible, reach)
        run.forget(max(0, tokens.shape[dim] - count))
        self.kept[name] = run.kept
        return tokens


class KVCache:
    """KV cache of a model: one ``BlockKVCache`` per block, with the batch size of the first call."""

    def __init__(self, blocks: Sequence[BlockKVCache]) -> None:
        self.blocks = blocks
        # Tokens decoded so far.
        self.position = 0

    def advance(self, tokens: int) -> None:
        """Advance the position of every block by ``tokens``."""
        self.position += tokens
        for block in self.blocks:
            block.position = self.position
