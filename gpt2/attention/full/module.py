"""The full causal pattern. r the rows of a chunk, c its columns (BNrc)."""

from typing import Any

import torch
from torch import Tensor

from gpt2.attention.full.options import FullOptions
from gpt2.attention.rows.parts import HIDDEN, Chunk


class Full:
    """Token i sees j ≤ i."""

    def __init__(self, options: FullOptions) -> None:
        pass

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """What scaled_dot_product_attention needs to see the same."""
        return {"is_causal": True}

    def longest_row(self, length: int) -> int:
        """All of the sequence."""
        return length

    def left(self, row: int) -> int:
        """Every row sees the first token."""
        return 0

    def hide_(self, scores_BNrc: Tensor, chunk: Chunk) -> None:
        """Hide later tokens: the upper triangle of the last columns."""
        height = chunk.height
        later = scores_BNrc.new_full((height, height), HIDDEN).triu_(1)
        scores_BNrc[..., -height:].add_(later)

    def visible(self, chunk: Chunk, like: Tensor) -> Tensor:
        """i + 1."""
        return chunk.positions(like)
