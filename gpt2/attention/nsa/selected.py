"""Attention to selected blocks of tokens.

B batch, T queries, S tokens, K key/value heads, g query heads of one, H head dim, n selected blocks.
"""

from torch import Tensor

from gpt2.attention.nsa import ops


def attend_selected(
    q_BKTgH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> Tensor:
    """Head outputs BKTgH. q is divided by √H; the last query is that of the last token.

    ``blocks`` are blocks of ``size`` tokens, −1 for none; every query has selected its own, in
    which it sees the tokens up to itself.
    """
    given = (x.contiguous() for x in (q_BKTgH.transpose(2, 3), k_BKSH, v_BKSH))
    context_BKgTH, _ = ops.selected(*given, blocks_BKTn, size)
    return context_BKgTH.transpose(2, 3)
