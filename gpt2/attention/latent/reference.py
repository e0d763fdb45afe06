"""Reference latent projection, head by head.

B batch, T tokens, C n_embd, H head dim, R latent dim.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.latent.options import LatentOptions


def latent(
    x_BTC: Tensor, parameters: Mapping[str, Tensor], shift_BTR: Tensor | None = None
) -> Tensor:
    """Return c_k = x W_dk plus the shift from the previous block."""
    c_k = torch.einsum("btc,rc->btr", x_BTC, parameters["c_k.weight"])
    return c_k if shift_BTR is None else c_k + shift_BTR


def heads(
    x_BTC: Tensor,
    parameters: Mapping[str, Tensor],
    n_head: int,
    options: LatentOptions,
    shift_BTR: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, BNTH, computed head by head."""
    width = x_BTC.shape[-1] // n_head
    c_k = latent(x_BTC, parameters, shift_BTR)
    c_v = torch.einsum("btc,rc->btr", x_BTC, parameters["c_v.weight"])
    stacked: tuple[list[Tensor], ...] = ([], [], [])
    for head in range(n_head):
        rows = slice(head * width, (head + 1) * width)
        expansion = slice(None) if options.shared_expansion else rows
        stacked[0].append(torch.einsum("btc,hc->bth", x_BTC, parameters["c_q.weight"][rows]))
        for into, c, name in ((stacked[1], c_k, "expand_k"), (stacked[2], c_v, "expand_v")):
            K_HR = parameters[f"{name}.weight"][expansion]
            into.append(torch.einsum("btr,hr->bth", c, K_HR))
    q, k, v = (torch.stack(part, 1) for part in stacked)
    return q, k, v
