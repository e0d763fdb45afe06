"""Attention to selected blocks of tokens, by the block-major backend.

B batch, T queries, S tokens, K key/value heads, g query heads per key/value head, H head dim,
n selected blocks.
"""

from torch import Tensor

from gpt2.attention.nsa import ops


def attend_selected(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> Tensor:
    """Return the head outputs BKTgH.

    q must be divided by √H already, and the last query belongs to the last token. ``blocks_BKTn``
    are indices of blocks of ``size`` tokens, −1 for none. Every query must have selected its own
    block and sees this block up to its own token.
    """
    qkv = (x.contiguous() for x in (q_BKTgH.transpose(2, 3), k_BKSH, v_BKSH))
    context_BKgTH, _ = ops.selected(*qkv, blocks_BKTn, size)
    return context_BKgTH.transpose(2, 3)
