"""Blocks that are drawn instead of scored: the control of the scores.

B batch, T queries, K key/value heads, J selection blocks, n selected ones.
"""

import torch
from torch import Tensor

from gpt2.attention.nsa.blocks import select_blocks
from gpt2.attention.nsa.options import NsaOptions
from lib.repro.streams import stream_seed

# Numbers of a chunk of rows.
CHUNK_ELEMENTS = 1 << 20
_MASK = 0xFFFFFFFF


def drawn_blocks(
    options: NsaOptions, layer: int, heads: int, first: int, length: int, device: torch.device
) -> Tensor:
    """1KTn like ``select_blocks``, of queries from token ``first`` on; the same for every sequence.

    Earlier blocks come evenly. What a token draws depends on its number, its layer and its key head
    alone, so a part of a sequence draws what the whole does.
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
        states_KT = _mixed(_mixed(salts_K)[:, None] ^ tokens_T)
        drawn_KTJ = _mixed(states_KT[..., None] ^ blocks_J)
        # 24 bits, all that fp32 holds.
        scores_KTJ = (drawn_KTJ >> 8).float()
        chosen.append(select_blocks(scores_KTJ[None], options, start))
    return torch.cat(chosen, 2)


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit hash (T. Mueller's, of two multiplications), in integers that do not overflow."""
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return (x >> 16) ^ x
