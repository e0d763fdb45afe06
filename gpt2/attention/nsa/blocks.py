"""Block scores and top-k block selection (Yuan et al. 2025, equations 9 to 12), without gradients.

B batch, T queries, K key/value heads, g query heads per key/value head, M compressed blocks,
J selection blocks, n selected blocks. The last query belongs to the last token.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.attention.nsa.options import NsaOptions


def score_blocks(weights_BKgTM: Tensor, options: NsaOptions, blocks: int) -> Tensor:
    """Return the score of every selection block, BKTJ in fp32, summed over query heads.

    The score of block j is Σ_m Σ_n p[a j + m − n] for m < a = l'/d and n < b = l/d, so each
    compressed block is weighted by the number of tokens shared with block j, divided by d. The
    paper prints −m, which is off by one block.
    """
    weights_BKTM = weights_BKgTM.detach().sum(2, dtype=torch.float32)
    per_block = options.select // options.stride
    reach = options.compress // options.stride
    padded = F.pad(weights_BKTM, (reach - 1, per_block * blocks - weights_BKTM.shape[-1]))
    scores_BKTJ = padded.new_zeros(*padded.shape[:-1], blocks)
    for offset in range(1 - reach, per_block):
        # Number of pairs (m, n) with m − n equal to the offset.
        pairs = min(offset + reach, per_block - offset, reach, per_block)
        begin = offset + reach - 1
        scores_BKTJ.add_(padded[..., begin : begin + per_block * blocks : per_block], alpha=pairs)
    return scores_BKTJ


def select_blocks(scores_BKTJ: Tensor, options: NsaOptions, first: int) -> Tensor:
    """Return the selected block indices BKTn in ascending order, padded with −1 at the end.

    ``first`` is the token of the first query. The first block, the block of the query and the
    previous block are always selected. The others have the highest scores ≥ 0; ties go to the
    lower index. Blocks after the query's block are never selected.
    """
    length, blocks = scores_BKTJ.shape[-2:]
    device = scores_BKTJ.device
    own_T = torch.arange(first, first + length, device=device) // options.select
    forced_T3 = torch.stack([torch.zeros_like(own_T), (own_T - 1).clamp_(min=0), own_T], 1)
    scores_BKTJ = scores_BKTJ.float()
    scores_BKTJ = scores_BKTJ.scatter(
        -1, forced_T3.expand(*scores_BKTJ.shape[:2], -1, -1), math.inf
    )
    # Every query sees the first query's block and all earlier blocks.
    seen = first // options.select + 1
    later_TJ = torch.arange(seen, blocks, device=device) > own_T[:, None]
    scores_BKTJ[..., seen:].masked_fill_(later_TJ, -1.0)
    # The bit patterns of floats ≥ 0 sort like the floats, so one integer encodes score and index.
    before_J = torch.arange(blocks - 1, -1, -1, device=device)
    rank = torch.add(before_J, scores_BKTJ.view(torch.int32), alpha=blocks)
    best = rank.topk(min(options.count, blocks), sorted=False)
    chosen_BKTn = best.indices.masked_fill(best.values < 0, blocks).sort(-1).values
    chosen_BKTn = chosen_BKTn.masked_fill_(chosen_BKTn == blocks, -1)
    return F.pad(chosen_BKTn, (0, options.count - chosen_BKTn.shape[-1]), value=-1)
