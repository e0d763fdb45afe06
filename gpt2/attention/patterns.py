"""Base class of attention patterns with their own kernel.

B batch, T tokens, C n_embd, N heads, H head dim.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.attention.chunk_parts import MASKED_SCORE, RowChunk
from gpt2.attention.options import SlidingOptions
from gpt2.attention.projections import QKV
from gpt2.kv_cache import BlockKVCache


class CustomAttention(nn.Module):
    """Pattern with its own kernel: it has parameters, or more than one softmax per row.

    It cannot be combined with score terms, gates or an MLP that reads attention weights.
    """

    @abstractmethod
    def kernel(self, device: str) -> str:
        """Return the name of the kernel used on a ``device`` of this type, for the run header."""

    @abstractmethod
    def forward(self, x_BTC: Tensor, heads: QKV, cache: BlockKVCache | None = None) -> Tensor:
        """Return head outputs, BNTH; ``heads`` is the projection of ``x``.

        With a cache, ``x`` contains only the tokens that follow the cached ones; they are appended.
        """

    @abstractmethod
    def new_cache(self) -> BlockKVCache:
        """Return an empty cache for the block."""


class Full:
    """Full causal pattern: token i sees j ≤ i."""

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""
        return {"is_causal": True}

    def longest_row(self, length: int) -> int:
        """Return ``length``: the last row sees the whole sequence."""
        return length

    def left(self, row: int) -> int:
        """Return 0: every row sees the first token."""
        return 0

    def hide_(self, scores_BNrc: Tensor, chunk: RowChunk) -> None:
        """Mask later tokens, the upper triangle of the last columns, in place."""
        height = chunk.height
        later = scores_BNrc.new_full((height, height), MASKED_SCORE).triu_(1)
        scores_BNrc[..., -height:].add_(later)

    def visible(self, chunk: RowChunk, like: Tensor) -> Tensor:
        """Return i + 1 for every row."""
        return chunk.positions(like)


class Sliding:
    """Sliding-window pattern: token i sees max(0, i − w + 1) ≤ j ≤ i."""

    def __init__(self, options: SlidingOptions) -> None:
        self.window = options.window

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""
        if length <= self.window:
            return {"is_causal": True}
        visible = torch.ones(length, length, dtype=torch.bool, device=device)
        return {"attn_mask": visible.tril_().triu_(1 - self.window)}

    def longest_row(self, length: int) -> int:
        """Return w, or ``length`` if it is smaller."""
        return min(self.window, length)

    def left(self, row: int) -> int:
        """Return i − w + 1, or 0 near the start of the sequence."""
        return max(0, row - self.window + 1)

    def hide_(self, scores_BNrc: Tensor, chunk: RowChunk) -> None:
        """Mask later tokens and tokens before the window: one triangle at each end."""
        height = chunk.height
        square = scores_BNrc.new_full((height, height), MASKED_SCORE)
        # Row i hides j < i − w + 1, counted from the chunk's first row and column.
        offset = chunk.first - self.window + 1 - chunk.left
        scores_BNrc[..., :height].add_(square.tril(offset - 1))
        scores_BNrc[..., -height:].add_(square.triu(1))

    def visible(self, chunk: RowChunk, like: Tensor) -> Tensor:
        """Return i + 1, at most w, for every row."""
        return chunk.positions(like).clamp_max_(self.window)
