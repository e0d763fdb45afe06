"""Selected blocks as token ranges. r queries, n selected blocks, f ranges, c tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranges:
    """Token ranges [start, end) visible to queries, ordered by query and token."""

    starts_f: Tensor
    ends_f: Tensor
    # Number of tokens of each query over all ranges.
    lengths_r: Tensor

    def tokens(self) -> Tensor:
        """Return the token indices of all ranges, concatenated, c."""
        sizes_f = self.ends_f - self.starts_f
        before_f = sizes_f.cumsum(0) - sizes_f
        total = int(sizes_f.sum())
        index_c = torch.arange(total, device=sizes_f.device)
        offsets_c = (self.starts_f - before_f).repeat_interleave(sizes_f, output_size=total)
        return index_c + offsets_c


def ranges_of(blocks_rn: Tensor, tokens_r: Tensor, size: int, merged: bool) -> Ranges:
    """Return one token range per selected block, or one per run of adjacent blocks if ``merged``.

    The blocks of ``size`` tokens are in ascending order, padded with −1 at the end. A query sees
    the block of its own token only up to this token.
    """
    valid_rn = blocks_rn >= 0
    starts_rn = blocks_rn * size
    ends_rn = torch.minimum(starts_rn + size, tokens_r[:, None] + 1)
    lengths_r = (ends_rn - starts_rn).masked_fill_(~valid_rn, 0).sum(1)
    first_rn, last_rn = valid_rn.clone(), valid_rn.clone()
    if merged:
        adjacent = (blocks_rn[:, 1:] == blocks_rn[:, :-1] + 1) & valid_rn[:, :-1]
        first_rn[:, 1:] &= ~adjacent
        last_rn[:, :-1] &= ~adjacent
    # Starts and ends match one to one, in the same order.
    return Ranges(starts_rn[first_rn], ends_rn[last_rn], lengths_r)
