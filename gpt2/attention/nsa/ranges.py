"""Selected blocks as ranges of tokens. r queries, n selected blocks, f ranges, c tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranges:
    """Tokens [start, end) that queries see, in the order of queries and tokens."""

    starts_f: Tensor
    ends_f: Tensor
    # Tokens of each query, of all its ranges.
    lengths_r: Tensor

    def tokens(self) -> Tensor:
        """All of them one after the other, c."""
        sizes_f = self.ends_f - self.starts_f
        before_f = sizes_f.cumsum(0) - sizes_f
        total = int(sizes_f.sum())
        places_c = torch.arange(total, device=sizes_f.device)
        offsets_c = (self.starts_f - before_f).repeat_interleave(sizes_f, output_size=total)
        return places_c + offsets_c


def ranges_of(blocks_rn: Tensor, tokens_r: Tensor, size: int, merged: bool) -> Ranges:
    """A range for each block, or with ``merged`` one for each run of blocks that touch.

    Blocks are of ``size`` tokens and ascend, −1 for none at the end; of the block of its own token a
    query sees what is not later.
    """
    there_rn = blocks_rn >= 0
    starts_rn = blocks_rn * size
    ends_rn = torch.minimum(starts_rn + size, tokens_r[:, None] + 1)
    lengths_r = (ends_rn - starts_rn).masked_fill_(~there_rn, 0).sum(1)
    first_rn, last_rn = there_rn.clone(), there_rn.clone()
    if merged:
        touch = (blocks_rn[:, 1:] == blocks_rn[:, :-1] + 1) & there_rn[:, :-1]
        first_rn[:, 1:] &= ~touch
        last_rn[:, :-1] &= ~touch
    # As many begin as end, in the same order.
    return Ranges(starts_rn[first_rn], ends_rn[last_rn], lengths_r)
