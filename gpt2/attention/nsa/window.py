"""Attention to a window of recent tokens.

B batch, T queries, S tokens, N heads, K key/value heads, H head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.attention.rows.engine import attend
from gpt2.attention.rows.plan import RowPlan
from gpt2.attention.sliding.module import Sliding
from gpt2.attention.sliding.options import SlidingOptions


def attend_window(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, window: int) -> Tensor:
    """Head outputs BNTH: the last ``window`` tokens, the query's own included.

    The last query is that of the last token.
    """
    queries, tokens = q_BNTH.shape[2], k_BKSH.shape[2]
    if queries == tokens:
        plan = RowPlan(Sliding(SlidingOptions(window)))
        return attend(q_BNTH, k_BKSH, v_BKSH, plan).context_BNTH
    seen_TS = torch.ones(queries, tokens, dtype=torch.bool, device=q_BNTH.device)
    seen_TS = seen_TS.tril_(tokens - queries).triu_(tokens - queries - window + 1)
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, attn_mask=seen_TS, enable_gqa=q_BNTH.shape[1] > k_BKSH.shape[1]
    )
