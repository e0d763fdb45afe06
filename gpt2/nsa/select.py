"""Block selection by score (Yuan et al. 2025, equations 9 to 12) or at random, without gradients;
and attention to compressed blocks, whose weights rank the blocks of each chunk.

B batch, T queries, K key/value heads, g query heads per key/value head, H head dim, M compressed
blocks, J selection blocks, n selected blocks; r the rows of a chunk, c the blocks that they see.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.nsa.options import NsaOptions
from gpt2.nsa.query_major import MaskSpec, QueryChunk, attend_chunks
from lib.runs.seeds import stream_seed


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
    """Return the selected blocks BKTn in ascending order, padded with −1, also if scores are NaN.

    The first block, the query's and the one before are forced; of the others up to the query's,
    those of the highest scores ≥ 0, ties to the lower index. The first query is token ``first``.
    """
    length, blocks = scores_BKTJ.shape[-2:]
    device = scores_BKTJ.device
    own_T = torch.arange(first, first + length, device=device) // options.select
    forced_T3 = torch.stack([torch.zeros_like(own_T), (own_T - 1).clamp_(min=0), own_T], 1)
    scores_BKTJ = scores_BKTJ.float()
    scores_BKTJ = scores_BKTJ.scatter(
        -1, forced_T3.expand(*scores_BKTJ.shape[:2], -1, -1), math.inf
    )
    # A NaN with a sign would exclude its block.
    scores_BKTJ.nan_to_num_(nan=math.inf, posinf=math.inf)
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


# Elements of the scores of a chunk of rows.
CHUNK_ELEMENTS = 1 << 20
_MASK = 0xFFFFFFFF


def random_blocks(
    options: NsaOptions, layer: int, heads: int, first: int, length: int, device: torch.device
) -> Tensor:
    """Return random blocks 1KTn in the format of ``select_blocks``, the same for every sequence.

    Earlier blocks are drawn uniformly by a hash of token, layer and key head alone, so a part of a
    sequence draws the same blocks as the whole sequence.
    """
    salts = [stream_seed(0, f"nsa/{layer}/{head}") & _MASK for head in range(heads)]
    salts_K = torch.tensor(salts, device=device)
    columns = -(-(first + length) // options.select)
    height = max(1, CHUNK_ELEMENTS // (heads * columns))
    chosen = []
    for start in range(first, first + length, height):
        stop = min(start + height, first + length)
        tokens_T = torch.arange(start, stop, device=device)
        blocks_J = torch.arange(-(-stop // options.select), device=device)
        states_KT = _hash(_hash(salts_K)[:, None] ^ tokens_T)
        drawn_KTJ = _hash(states_KT[..., None] ^ blocks_J)
        # 24 bits, the largest integers that fp32 represents exactly.
        scores_KTJ = (drawn_KTJ >> 8).float()
        chosen.append(select_blocks(scores_KTJ[None], options, start))
    return torch.cat(chosen, 2)


def _hash(x: Tensor) -> Tensor:
    """Return Thomas Mueller's 32-bit hash of ``x``, in int64 so that nothing overflows."""
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return (x >> 16) ^ x


def attend_compressed(
    q_BKgTH: Tensor, k_BKMH: Tensor, v_BKMH: Tensor, options: NsaOptions, first: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return the head outputs BKgTH, 0 before the first complete block, and the selected blocks
    BKTn if ``options.ranks``. q must be divided by √H already; its first query is token ``first``.
    """
    sight = MaskSpec(q_BKgTH.shape[3], k_BKMH.shape[2], first, options.compress, options.stride)
    chosen_rn: list[Tensor] = []

    def choose(chunk: QueryChunk, weights_grc: Tensor) -> None:
        blocks = -(-chunk.last // options.select)
        scores_11rJ = score_blocks(weights_grc[None, None], options, blocks)
        chosen_rn.append(select_blocks(scores_11rJ, options, chunk.first)[0, 0])

    ranked = choose if options.ranks else None
    context_BKgTH = attend_chunks(q_BKgTH, k_BKMH, v_BKMH, sight, ranked)
    if not options.ranks:
        return context_BKgTH, None
    return context_BKgTH, torch.cat(chosen_rn).view(*k_BKMH.shape[:2], -1, options.count)


@torch.no_grad()
def chosen_blocks(
    q_BKgTH: Tensor,
    compressed_BKMH: tuple[Tensor, ...] | None,
    options: NsaOptions,
    first: int,
    layer: int,
) -> Tensor:
    """Return the blocks BKTn that compressed keys rank, or random ones; q is divided by √H."""
    if options.ranks:
        assert compressed_BKMH
        k_BKMH = compressed_BKMH[0]
        # Values of width 0, so that the product with the weights costs nothing.
        _, chosen_BKTn = attend_compressed(q_BKgTH, k_BKMH, k_BKMH[..., :0], options, first)
        assert chosen_BKTn is not None
        return chosen_BKTn
    batch, heads, _, length = q_BKgTH.shape[:4]
    drawn = random_blocks(options, layer, heads, first, length, q_BKgTH.device)
    return drawn.expand(batch, -1, -1, -1)
