"""Full causal pattern. r the rows of a chunk, c its columns (BNrc)."""

from typing import Any

import torch
from torch import Tensor

from gpt2.attention.full.options import FullOptions
from gpt2.attention.rows.parts import HIDDEN, Chunk


class Full:
    """Full causal pattern: token i sees j ≤ i."""

    def __init__(self, options: FullOptions) -> None:
        pass

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""
        return {"is_causal": True}

    def longest_row(self, length: int) -> int:
        """Return ``length``: the last row sees the whole sequence."""
        return length

    def left(self, row: int) -> int:
        """Return 0: every row sees the first token."""
        return 0

    def hide_(self, scores_BNrc: Tensor, chunk: Chunk) -> None:
        """Mask later tokens, the upper triangle of the last columns, in place."""
        height = chunk.height
        later = scores_BNrc.new_full((height, height), HIDDEN).triu_(1)
        scores_BNrc[..., -height:].add_(later)

    def visible(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return i + 1 for every row."""
        return chunk.positions(like)
