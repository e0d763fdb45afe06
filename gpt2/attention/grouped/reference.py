"""Reference grouped projection, head by head. B batch, T tokens, C n_embd, N heads, H head dim."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.grouped.options import GroupedOptions


def heads(
    x_BTC: Tensor, parameters: Mapping[str, Tensor], n_head: int, options: GroupedOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, BNTH: query head n uses the key and value head of its group."""
    weight, bias = parameters["weight"], parameters.get("bias")
    width = x_BTC.shape[-1] // n_head
    group = n_head // options.n_kv_head

    def head(index: int) -> Tensor:
        rows = slice(index * width, (index + 1) * width)
        out = torch.einsum("btc,hc->bth", x_BTC, weight[rows])
        return out if bias is None else out + bias[rows]

    first_v = n_head + options.n_kv_head
    q = torch.stack([head(n) for n in range(n_head)], 1)
    k = torch.stack([head(n_head + n // group) for n in range(n_head)], 1)
    v = torch.stack([head(first_v + n // group) for n in range(n_head)], 1)
    return q, k, v
