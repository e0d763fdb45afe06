"""Attention sink: a learnable logit b per head in the denominator of the softmax; and its formula.

p_ij = exp(s_ij) / (exp(b_h) + Σ_j exp(s_ij)). The sink has no value, so its weight multiplies none.

B batch, N heads; r the rows of a chunk, c its columns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gpt2.attention.options import AttentionSinkOptions
from gpt2.shape import ModelShape


class AttentionSink(nn.Module):
    """Logit per head, which starts at 0: the softmax off by one."""

    def __init__(self, shape: ModelShape, options: AttentionSinkOptions) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(shape.n_head))


def softmax_beside(scores_BNrc: Tensor, sink: AttentionSink | None) -> tuple[Tensor, Tensor | None]:
    """Return the weights of the keys and that of the sink, BNr, if there is one; without a graph."""
    weights_BNrc = scores_BNrc.softmax(-1)
    if sink is None:
        return weights_BNrc, None
    over_BNr = scores_BNrc.logsumexp(-1) - sink.logit.detach().to(scores_BNrc.dtype)[:, None]
    return weights_BNrc.mul_(over_BNr.sigmoid()[..., None]), torch.sigmoid(-over_BNr)


def reference_weights(
    scores_BNc: Tensor, parameters: Mapping[str, Tensor], options: AttentionSinkOptions
) -> Tensor:
    """Return exp(s_j) / (exp(b) + Σ_j exp(s_j)) for the scores of a row: BNc."""
    logit_N1 = parameters["logit"][:, None]
    largest_BN1 = scores_BNc.detach().max(-1, keepdim=True).values.maximum(logit_N1.detach())
    keys_BNc = torch.exp(scores_BNc - largest_BN1)
    return keys_BNc / (torch.exp(logit_N1 - largest_BN1) + keys_BNc.sum(-1, keepdim=True))
