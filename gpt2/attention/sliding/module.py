"""The sliding-window pattern. r the rows of a chunk, c its columns (BNrc)."""

from typing import Any

import torch
from torch import Tensor

from gpt2.attention.rows.parts import HIDDEN, Chunk
from gpt2.attention.sliding.options import SlidingOptions


class Sliding:
    """Token i sees max(0, i − w + 1) ≤ j ≤ i."""

    def __init__(self, options: SlidingOptions) -> None:
        self.window = options.window

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """What scaled_dot_product_attention needs to see the same."""
        if length <= self.window:
            return {"is_causal": True}
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        return {"attn_mask": seen.tril_().triu_(1 - self.window)}

    def longest_row(self, length: int) -> int:
        """w, or all."""
        return min(self.window, length)

    def left(self, row: int) -> int:
        """i − w + 1, or the first token."""
        return max(0, row - self.window + 1)

    def hide_(self, scores_BNrc: Tensor, chunk: Chunk) -> None:
        """Hide later tokens and those before the window: a triangle at either end."""
        height = chunk.height
        square = scores_BNrc.new_full((height, height), HIDDEN)
        # Row i hides j < i − w + 1, counted from the chunk's first row and column.
        offset = chunk.first - self.window + 1 - chunk.left
        scores_BNrc[..., :height].add_(square.tril(offset - 1))
        scores_BNrc[..., -height:].add_(square.triu(1))

    def visible(self, chunk: Chunk, like: Tensor) -> Tensor:
        """i + 1, at most w."""
        return chunk.positions(like).clamp_max_(self.window)
