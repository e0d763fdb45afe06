"""Random block selection, the baseline for score-based selection.

B batch, T queries, K key/value heads, J selection blocks, n selected blocks.
"""

import torch
from torch import Tensor

from gpt2.attention.nsa.blocks import select_blocks
from gpt2.attention.nsa.options import NsaOptions
from lib.repro.streams import stream_seed

# Elements of the scores of a chunk of rows.
CHUNK_ELEMENTS = 1 << 20
_MASK = 0xFFFFFFFF


def drawn_blocks(
    options: NsaOptions, layer: int, heads: int, first: int, length: int, device: torch.device
) -> Tensor:
    """Return random blocks 1KTn in the format of ``select_blocks``, the same for every sequence.

    The ``length`` queries start at token ``first``. Earlier blocks are drawn uniformly, by a hash
    of token index, layer and key head alone, so a part of a sequence draws the same blocks as the
    whole sequence.
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
    """Return Thomas Mueller's 32-bit hash of ``x``, computed in int64 so that nothing overflows."""
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return (x >> 16) ^ x
