"""Reference dense projection, head by head. B batch, T tokens, C n_embd, N heads, H head dim."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.dense.options import DenseOptions


def heads(
    x_BTC: Tensor, parameters: Mapping[str, Tensor], n_head: int, options: DenseOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, BNTH: head n of each is H columns of ``weight``."""
    weight, bias = parameters["weight"], parameters.get("bias")
    width = x_BTC.shape[-1] // n_head
    stacked = []
    for part in range(3):
        columns = []
        for head in range(n_head):
            start = (part * n_head + head) * width
            column = torch.einsum("btc,hc->bth", x_BTC, weight[start : start + width])
            columns.append(column if bias is None else column + bias[start : start + width])
        stacked.append(torch.stack(columns, 1))
    q, k, v = stacked
    return q, k, v
