"""Attention by FlexAttention passes over windows, merged by log-sum-exp.

A pass is softmax attention over a window, with the log-sum-exp of the scores of every row: query i
sees max(0, i − window + 1) ≤ j ≤ i, so no row is empty. On a GPU the pass is compiled FlexAttention
(Dong et al. 2024, arXiv 2412.05496) and skips blocks outside the window. On a CPU FlexAttention has
no backward; an equivalent implementation over all pairs is used there with the same arithmetic:
products in the dtype of the inputs, softmax in fp32 or wider.

Scores are branches: products of queries and keys over disjoint ranges of distances i − j. The
softmax of a row is the sum of the branches' softmaxes weighted by exp(lse_b − lse), with lse the
log-sum-exp over branches: the rule used by FlashAttention to merge blocks (Dao et al. 2022, arXiv
2205.14135).

B batch, T tokens, S keys, N heads, K key/value heads, D width of queries and keys, E width of values; i the query, j the key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from gpt2.attention.config import MIN_FLEX_HEAD_DIM

# Maximum number of compiled kernels per process: passes differ in length, widths and the need for
# a backward. torch's default of 8 is almost exceeded by two windows with a statistic.
RECOMPILE_LIMIT = 64


# Kernel of a pass: q, k, v, window and scale → context and log-sum-exp.
WindowAttention = Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


def window_attention(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return context BNTE in the dtype of v and the log-sum-exp of scaled scores, BNT.

    The log-sum-exp is in fp32 or wider. Both outputs are differentiable.
    """
    if q_BNTD.device.type == "cpu":
        return _all_pairs(q_BNTD, k_BNTD, v_BNTE, window, scale)
    return flex_window_attention(compiled_flex_attention(), q_BNTD, k_BNTD, v_BNTE, window, scale)


def flex_window_attention(
    kernel: Callable[..., tuple[Tensor, AuxOutput]],
    q_BNTD: Tensor,
    k_BNTD: Tensor,
    v_BNTE: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the pass with ``kernel``, a variant of ``flex_attention``."""
    length = q_BNTD.shape[2]
    mask = _block_mask(min(window, length), length, q_BNTD.device)
    return flex_pass(kernel, q_BNTD, k_BNTD, v_BNTE, mask, scale)


def flex_pass(
    kernel: Callable[..., tuple[Tensor, AuxOutput]],
    q_BNTD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    mask: BlockMask,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return context BNTE and log-sum-exp BNT of one pass; N is a multiple of K."""
    # Not the kernel for decoding, which torch otherwise takes for fewer than 128 queries, and which
    # has no configuration for some shapes.
    kernel_options = {"BACKEND": "TRITON"} if q_BNTD.is_cuda else None
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        context, aux = kernel(
            q_BNTD,
            k_BKSD,
            v_BKSE,
            block_mask=mask,
            scale=scale,
            enable_gqa=q_BNTD.shape[1] != k_BKSD.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options=kernel_options,
        )
    assert aux.lse is not None
    return context, aux.lse


def _all_pairs(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTE: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    length = q_BNTD.shape[2]
    wide = torch.promote_types(q_BNTD.dtype, torch.float32)
    visible = torch.ones(length, length, dtype=torch.bool, device=q_BNTD.device)
    visible = visible.tril_().triu_(1 - window)
    scores = (q_BNTD @ k_BNTD.mT).to(wide) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v_BNTE.dtype) @ v_BNTE, lse


@cache
def compiled_flex_attention() -> Callable[..., tuple[Tensor, AuxOutput]]:
    """Compile ``flex_attention`` with ``fullgraph=True``.

    Otherwise a graph break, or reaching the recompile limit, would silently fall back to computing
    all pairs.
    """
    # Its result without return_aux has another type.
    attend = cast(Callable[..., tuple[Tensor, AuxOutput]], flex_attention)
    return torch.compile(attend, fullgraph=True, dynamic=False)


@cache
def _block_mask(window: int, length: int, device: torch.device) -> BlockMask:
    """Return the block mask; cached, because all blocks and steps share it."""
    return create_block_mask(_mask_mod(window), None, None, length, length, device=str(device))


def _mask_mod(window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    return visible


@dataclass(frozen=True)
class ScoreBranch:
    """Scores q_i · k_j · scale for pairs with ``nearest`` ≤ i − j < ``beyond``."""

    q_BNTD: Tensor
    k_BNTD: Tensor
    nearest: int
    beyond: int
    kernel: WindowAttention = window_attention

    def part(self, nearest: int, beyond: int) -> "list[ScoreBranch]":
        """Return the branch restricted to the given distances; an empty list if no pair remains."""
        nearest, beyond = max(self.nearest, nearest), min(self.beyond, beyond)
        return [replace(self, nearest=nearest, beyond=beyond)] if nearest < beyond else []

    def attend(self, v_BNTE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return context BNTE and log-sum-exp BNT (−∞ in rows without visible keys).

        Those are the first ``nearest`` rows. They are excluded from the pass, and so are keys that
        no row sees; the remaining pairs form a window.
        """
        skipped, length = self.nearest, self.q_BNTD.shape[2]
        context, lse = self.kernel(
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
class BranchedScores:
    """Scores of all visible pairs; every pair belongs to exactly one branch."""

    branches: Sequence[ScoreBranch]
    scale: float

    def times(self, factor_BNT: Tensor) -> "BranchedScores":
        """Return scores with every row multiplied by its factor."""
        return BranchedScores(
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
        means = [
            torch.linalg.vecdot(k, b.q_BNTD.to(k.dtype))
            for k, b in zip(keys, self.branches, strict=True)
        ]
        return reduce(torch.add, means) * self.scale, lse_BNT

    def log_sum(self) -> Tensor:
        """Return the log-sum-exp alone, BNT, using values of the minimum width."""
        _, lse_BNT = self._attend(
            [branch.k_BNTD[..., :MIN_FLEX_HEAD_DIM] for branch in self.branches]
        )
        return lse_BNT

    def _attend(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the context contribution of each branch, and the log-sum-exp over branches."""
        passes = [b.attend(v, self.scale) for b, v in zip(self.branches, values, strict=True)]
        lse_BNT = reduce(torch.logaddexp, (lse for _, lse in passes))
        return [c * (lse - lse_BNT).exp()[..., None] for c, lse in passes], lse_BNT
