"""Attention to a window of recent tokens.

B batch, T queries, S tokens, N heads, K key/value heads, g query heads of one, H head dim.
"""

from torch import Tensor

from gpt2.attention.nsa import ops


def attend_window(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int) -> Tensor:
    """Head outputs BNTH: the last ``window`` tokens, the query's own included.

    q is divided by √H; the last query is that of the last token.
    """
    q_BKgTH = q_BNTH.unflatten(1, (k_BKSH.shape[1], -1))
    given = (x.contiguous() for x in (q_BKgTH, k_BKSH, v_BKSH))
    context_BKgTH, _ = ops.window(*given, window)
    return context_BKgTH.flatten(1, 2)
