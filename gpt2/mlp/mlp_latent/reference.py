"""The coupling's formula with W written out, one token at a time, in float64.

Shapes: B batch, T tokens, M hidden units, R latent dim, N heads.
"""

import torch
from torch import Tensor

from gpt2.mlp.mlp_latent.options import MlpLatentOptions


def scalar_matrix(factors_N: Tensor, hidden: int, latent: int) -> Tensor:
    """W [M, R] of the scalar tying: s_{⌊r·N/R⌋} where m mod R = r."""
    rows = []
    for m in range(hidden):
        row = [factors_N.new_zeros(())] * latent
        row[m % latent] = factors_N[(m % latent) * len(factors_N) // latent]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def couple(
    options: MlpLatentOptions, h_BTM: Tensor, a_BTR: Tensor, read_MR: Tensor, write_MR: Tensor
) -> tuple[Tensor, Tensor]:
    """(h + α a Wᵀ, α h W) with the new h in the second [B, T, M and R]; tied passes W twice."""
    hidden, shift = [], []
    for h_M, a_R in zip(h_BTM.flatten(0, 1), a_BTR.flatten(0, 1), strict=True):
        hidden.append(h_M + options.alpha * torch.stack([row_R @ a_R for row_R in read_MR]))
        shift.append(options.alpha * torch.stack([hidden[-1] @ col_M for col_M in write_MR.T]))
    return torch.stack(hidden).view_as(h_BTM), torch.stack(shift).view_as(a_BTR)
