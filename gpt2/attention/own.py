"""Base class of attention patterns with their own kernel.

B batch, T tokens, C n_embd, N heads, H head dim.
"""

from abc import abstractmethod

from torch import Tensor, nn

from gpt2.attention.heads import Heads
from gpt2.cache import BlockCache


class OwnAttention(nn.Module):
    """Pattern with its own kernel: it has parameters, or more than one softmax per row.

    Constructed from the shape, the whole ``AttentionConfig`` and the layer index. Cannot be
    combined with score terms, gates or an MLP that reads attention weights.
    """

    @abstractmethod
    def kernel(self, device: str) -> str:
        """Return the name of the kernel used on a ``device`` of this type, for the run header."""

    @abstractmethod
    def forward(self, x_BTC: Tensor, heads: Heads, cache: BlockCache | None = None) -> Tensor:
        """Return head outputs, BNTH; ``heads`` is the projection of ``x``.

        With a cache, ``x`` contains only the tokens that follow the cached ones; they are appended.
        """

    @abstractmethod
    def new_cache(self) -> BlockCache:
        """Return an empty cache for the block."""
