"""Attention scores as branches: products of queries and keys over disjoint ranges of distances.

B batch, T tokens, N heads, D width of queries and keys, E width of values; i the query, j the key.

The distances i − j of the branches do not overlap, so the softmax of a row is the sum of the
branches' softmaxes weighted by exp(lse_b − lse), with lse the log-sum-exp over branches: the rule
used by FlashAttention to merge blocks (Dao et al. 2022, arXiv 2205.14135).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.attention.forms import NARROWEST_HEAD
from gpt2.attention.joined.window import window_attention


@dataclass(frozen=True)
class Branch:
    """Scores q_i · k_j · scale for pairs with ``nearest`` ≤ i − j < ``beyond``."""

    q_BNTD: Tensor
    k_BNTD: Tensor
    nearest: int
    beyond: int

    def part(self, nearest: int, beyond: int) -> "list[Branch]":
        """Return the branch restricted to the given distances; an empty list if no pair remains."""
        nearest, beyond = max(self.nearest, nearest), min(self.beyond, beyond)
        return [replace(self, nearest=nearest, beyond=beyond)] if nearest < beyond else []

    def attend(self, v_BNTE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return context BNTE and log-sum-exp BNT (−∞ in rows without visible keys).

        Those are the first ``nearest`` rows. They are excluded from the pass, and so are keys that
        no row sees; the remaining pairs form a window.
        """
        skipped, length = self.nearest, self.q_BNTD.shape[2]
        context, lse = window_attention(
            self.q_BNTD[:, :, skipped:],
            self.k_BNTD[:, :, : length - skipped],
            v_BNTE[:, :, : length - skipped],
            self.beyond - skipped,
            scale,
        )
        if not skipped:
            return context, lse
        return F.pad(context, (0, 0, skipped, 0)), F.pad(lse, (skipped, 0), value=-torch.inf)


@dataclass(frozen=True)
class Scores:
    """Scores of all visible pairs; every pair belongs to exactly one branch."""

    branches: Sequence[Branch]
    scale: float

    def times(self, factor_BNT: Tensor) -> "Scores":
        """Return scores with every row multiplied by its factor."""
        return Scores(
            [
                replace(b, q_BNTD=(b.q_BNTD * factor_BNT[..., None]).to(b.q_BNTD.dtype))
                for b in self.branches
            ],
            self.scale,
        )

    def attend(self, v_BNTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return context BNTE in fp32 or wider, and the log-sum-exp, BNT."""
        contexts, lse_BNT = self._attend([v_BNTE] * len(self.branches))
        return reduce(torch.add, contexts), lse_BNT

    def mean(self) -> tuple[Tensor, Tensor]:
        """Return Σ_j p_ij s_ij and the log-sum-exp, both BNT.

        The mean score of a branch is the product of the query with its mean key Σ_j p_ij k_j: a
        pass that uses keys as values.
        """
        keys, lse_BNT = self._attend([branch.k_BNTD for branch in self.branches])
        means = [torch.linalg.vecdot(k, b.q_BNTD.to(k.dtype)) for k, b in zip(keys, self.branches)]
        return reduce(torch.add, means) * self.scale, lse_BNT

    def log_sum(self) -> Tensor:
        """Return the log-sum-exp alone, BNT, using values of the minimum width."""
        _, lse_BNT = self._attend([branch.k_BNTD[..., :NARROWEST_HEAD] for branch in self.branches])
        return lse_BNT

    def _attend(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the context contribution of each branch, and the log-sum-exp over branches."""
        passes = [b.attend(v, self.scale) for b, v in zip(self.branches, values, strict=True)]
        lse_BNT = reduce(torch.logaddexp, (lse for _, lse in passes))
        return [c * (lse - lse_BNT).exp()[..., None] for c, lse in passes], lse_BNT
