"""Reference RA-CT, row by row. B batch, N heads, c visible columns."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.ra_cross_token.options import RaCrossTokenOptions


def statistic(p_BNc: Tensor, i: int, options: RaCrossTokenOptions) -> Tensor:
    """Return the configured statistic of the weights of row i, BN."""
    if options.mode == "topk":
        return p_BNc.sort(-1, descending=True).values[..., : options.topk].sum(-1)
    if options.mode == "max":
        return p_BNc.max(-1).values
    if options.mode == "rms":
        return (p_BNc**2).sum(-1).sqrt()
    if i == 0:
        return torch.ones_like(p_BNc[..., 0])
    return -(p_BNc * p_BNc.log()).sum(-1) / math.log(i + 1)


def factor(
    p_BNc: Tensor, i: int, parameters: Mapping[str, Tensor], options: RaCrossTokenOptions
) -> Tensor:
    """Return (1 − α) + α σ(scale_h · statistic + bias_h), BN."""
    value = statistic(p_BNc, i, options)
    if options.detach_stats:
        value = value.detach()
    if options.head_average:
        value = value.mean(1, keepdim=True)
    gate = 1 / (1 + torch.exp(-(parameters["scale"] * value + parameters["bias"])))
    return (1 - options.alpha) + options.alpha * gate
