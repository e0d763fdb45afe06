"""Latent coupling: the MLP reads the latent keys c_k of its block and adds to the next block's.

The formula materializes W and handles one token at a time.
Shapes: B batch, T tokens, M hidden units, R latent dim, N heads.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_state import AttentionOutputs, BlockState
from .kv_cache import BlockKVCache
from .mechanism_statistics import Statistics, norm_ratio
from .mlp_options import LayerSpec, MlpLatentOptions


class MlpLatent(nn.Module):
    """Coupling h ← h + α a Wᵀ with a = c_k, and next c_k ← c_k + α h W, with the new h."""

    def __init__(self, options: MlpLatentOptions, hidden: int, width: int, site: LayerSpec) -> None:
        super().__init__()
        self.alpha = options.alpha
        self.writes = not site.is_last
        latent = options.latent_width(site)
        if options.tying == "scalar":
            self.coupling: _Coupling | _ScalarCoupling = _ScalarCoupling(
                hidden, latent, site.shape.n_head
            )
        else:
            self.coupling = _Coupling(
                hidden, latent, untied=self.writes and options.tying == "untied"
            )

    def forward(
        self,
        h_BTM: Tensor,
        view: AttentionOutputs,
        state: BlockState,
        cache: BlockKVCache | None = None,
    ) -> Tensor:
        """Read ``view.latent_BTR``; set ``state.latent_shift_BTR`` except in the last block."""
        assert view.latent_BTR is not None, "the coupling needs a latent projection"
        h_BTM = torch.add(h_BTM, self.coupling.read(view.latent_BTR), alpha=self.alpha)
        if self.writes:
            state.latent_shift_BTR = self.alpha * self.coupling.write(h_BTM)
        return h_BTM

    def statistics(self, h_BTM: Tensor, view: AttentionOutputs, *others: Any) -> Statistics:
        assert view.latent_BTR is not None
        added_BTM = self.alpha * self.coupling.read(view.latent_BTR)
        return {"mlp_latent/share": norm_ratio(added_BTM, h_BTM)}


class _Coupling(nn.Module):
    """Full matrix W, M × R; ``untied`` adds a second one for the direction back to the latents."""

    def __init__(self, hidden: int, latent: int, untied: bool) -> None:
        super().__init__()
        self.to_hidden = nn.Linear(latent, hidden, bias=False)
        self.to_latent = nn.Linear(hidden, latent, bias=False) if untied else None

    def read(self, a_BTR: Tensor) -> Tensor:
        return self.to_hidden(a_BTR)

    def write(self, h_BTM: Tensor) -> Tensor:
        if self.to_latent is None:
            return F.linear(h_BTM, self.to_hidden.weight.t())
        return self.to_latent(h_BTM)


class _ScalarCoupling(nn.Module):
    """One factor per head: W[m, r] = s_{⌊r·N/R⌋} if m mod R = r, else 0; never materialized."""

    def __init__(self, hidden: int, latent: int, n_head: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.latent = latent
        self.factors = nn.Parameter(torch.ones(n_head))

    def read(self, a_BTR: Tensor) -> Tensor:
        copies = -(-self.hidden // self.latent)
        return (a_BTR * self._factors_R()).repeat(1, 1, copies)[..., : self.hidden]

    def write(self, h_BTM: Tensor) -> Tensor:
        padded_BTM = F.pad(h_BTM, (0, -self.hidden % self.latent))
        return padded_BTM.unflatten(-1, (-1, self.latent)).sum(-2) * self._factors_R()

    def _factors_R(self) -> Tensor:
        units_R = torch.arange(self.latent, device=self.factors.device)
        return self.factors[units_R * len(self.factors) // self.latent]


def reference_coupling(
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
    rows = []
    for m in range(hidden):
        row_R = [factors_N.new_zeros(())] * latent
        row_R[m % latent] = factors_N[(m % latent) * len(factors_N) // latent]
        rows.append(torch.stack(row_R))
    return torch.stack(rows)
