"""Reference latent coupling with W materialized, one token at a time.

B batch, T tokens, M hidden units, R latent dim, N heads.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.mlp.mlp_latent.options import MlpLatentOptions
from gpt2.mlp.options import LayerSpec


def apply(
    h_BTM: Tensor,
    view: AttentionOutputs,
    state: BlockState,
    weights: Mapping[str, Tensor],
    options: MlpLatentOptions,
    site: LayerSpec,
) -> Tensor:
    """Return h + α a Wᵀ; in all blocks but the last, shift the next c_k by α h W of the new h."""
    a_BTR = view.latent_BTR
    assert a_BTR is not None, "the coupling needs a latent projection"
    if options.tying == "scalar":
        read_MR = write_MR = _scalar_matrix(
            weights["coupling.factors"], h_BTM.shape[2], a_BTR.shape[2]
        )
    else:
        read_MR = write_MR = weights["coupling.to_hidden.weight"]
    if "coupling.to_latent.weight" in weights:
        write_MR = weights["coupling.to_latent.weight"].T
    hidden, shift = [], []
    for h_M, a_R in zip(h_BTM.flatten(0, 1), a_BTR.flatten(0, 1), strict=True):
        hidden.append(h_M + options.alpha * (a_R @ read_MR.T))
        shift.append(options.alpha * (hidden[-1] @ write_MR))
    if not site.is_last:
        state.latent_shift_BTR = torch.stack(shift).view_as(a_BTR)
    return torch.stack(hidden).view_as(h_BTM)


def _scalar_matrix(factors_N: Tensor, hidden: int, latent: int) -> Tensor:
    """Return W with W[m, r] = s_{⌊r·N/R⌋} if m mod R = r, else 0."""
    rows = []
    for m in range(hidden):
        row_R = [factors_N.new_zeros(())] * latent
        row_R[m % latent] = factors_N[(m % latent) * len(factors_N) // latent]
        rows.append(torch.stack(row_R))
    return torch.stack(rows)
