"""Sliding-window pattern. r the rows of a chunk, c its columns (BNrc)."""

from typing import Any

import torch
from torch import Tensor

from gpt2.attention.rows.parts import HIDDEN, Chunk
from gpt2.attention.sliding.options import SlidingOptions


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

    def hide_(self, scores_BNrc: Tensor, chunk: Chunk) -> None:
        """Mask later tokens and tokens before the window: one triangle at each end."""
        height = chunk.height
        square = scores_BNrc.new_full((height, height), HIDDEN)
        # Row i hides j < i − w + 1, counted from the chunk's first row and column.
        offset = chunk.first - self.window + 1 - chunk.left
        scores_BNrc[..., :height].add_(square.tril(offset - 1))
        scores_BNrc[..., -height:].add_(square.triu(1))

    def visible(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return i + 1, at most w, for every row."""
        return chunk.positions(like).clamp_max_(self.window)
