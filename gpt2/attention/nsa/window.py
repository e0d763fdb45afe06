"""Attention to a window of recent tokens.

B batch, T queries, S tokens, N heads, K key/value heads, g query heads per key/value head, H head
dim.
"""

from torch import Tensor

from gpt2.attention.nsa import ops


def attend_window(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int) -> Tensor:
    """Return the head outputs BNTH of attention to the last ``window`` tokens.

    The window includes the query's own token. q must be divided by √H already, and the last query
    belongs to the last token.
    """
    q_BKgTH = q_BNTH.unflatten(1, (k_BKSH.shape[1], -1))
    qkv = (x.contiguous() for x in (q_BKgTH, k_BKSH, v_BKSH))
    context_BKgTH, _ = ops.window(*qkv, window)
    return context_BKgTH.flatten(1, 2)
