"""A pattern that attends by itself. B batch, T tokens, C n_embd, N heads, H head dim."""

from abc import abstractmethod
from torch import Tensor, nn

from gpt2.attention.heads import Heads
from gpt2.cache import BlockCache


class OwnAttention(nn.Module):
    """A pattern with parameters, or with more than one softmax for a row.

    It is built from the shape, the whole ``AttentionConfig`` and the number of its layer. No term, no
    gate and no reader of weights goes with it.
    """

    @abstractmethod
    def kernel(self, device: str) -> str:
        """How scores are computed on a ``device`` of this type, for the first line of a run."""

    @abstractmethod
    def forward(self, x_BTC: Tensor, heads: Heads, cache: BlockCache | None = None) -> Tensor:
        """Head outputs, BNTH; ``heads`` are the projection's of ``x``.

        With a cache, ``x`` are the tokens after those that it was given before, and are added.
        """

    @abstractmethod
    def new_cache(self) -> BlockCache:
        """An empty cache for the block."""
