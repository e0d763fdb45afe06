"""Statistics of attention rows computed from log-sum-exps, BNT, without materializing rows.

B batch, T tokens, N heads. s are scores, p their softmax, lse the log Σ exp of the scores of a row.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gpt2.attention.joined.scores import Scores


def entropy(scores: Scores, lse_BNT: Tensor) -> Tensor:
    """Return (lse − Σ p s) / ln(i+1), and 1 at i = 0, using ln p = s − lse."""
    mean_BNT, lse_BNT = scores.mean()
    positions = torch.arange(1, lse_BNT.shape[-1] + 1, device=lse_BNT.device)
    # The first row is overwritten below; dividing by ln 2 there keeps the gradient finite.
    normalised = (lse_BNT - mean_BNT) / positions.clamp_min(2).to(lse_BNT.dtype).log()
    return torch.where(positions == 1, 1.0, normalised)


def rms(scores: Scores, lse_BNT: Tensor) -> Tensor:
    """Return √Σ p², using Σ p² = Σ exp(2s) / (Σ exp s)²."""
    doubled_BNT = replace(scores, scale=2 * scores.scale).log_sum()
    return (doubled_BNT / 2 - lse_BNT).exp()


JOINED = {"entropy": entropy, "rms": rms}
