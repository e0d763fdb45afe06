"""Interfaces of the attention engines: pattern, score term, gate, and chunk of rows.

B batch, T tokens (queries), S tokens (keys), N heads, H head dim; r the rows of a chunk, c its
columns. Scores and weights of a chunk are BNrc, one value per row is BNr1.

Scores and weights are fp32 (fp64 for fp64 inputs). The row engine has hand-written derivatives, so
every component provides its own; tests compare each with autograd through a naive reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gpt2.attention.joined.scores import Branch, Scores

# Added to the score of a masked pair: exp() of it is exactly 0, but unlike −inf its product with a
# weight of 0 or a small gradient is finite.
HIDDEN = -1e30


@dataclass(frozen=True)
class Chunk:
    """Chunk of query rows ``first`` ≤ i < ``last``, which see columns ``left`` ≤ j ≤ i.

    All positions count from the start of the sequence. The tensors start at token ``origin``, which
    is non-zero when decoding with a cache.
    """

    first: int
    last: int
    left: int
    origin: int = 0

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return self.last - self.first

    @property
    def rows(self) -> slice:
        """Return the slice of the rows in q and k."""
        return self.slice(self.first)

    @property
    def columns(self) -> slice:
        """Return the slice of the columns in k and v."""
        return self.slice(self.left)

    def slice(self, start: int) -> slice:
        """Return the slice of q, k and v from token ``start`` to the last row."""
        assert start >= self.origin, "token is not cached: declare a larger reach"
        return slice(start - self.origin, self.last - self.origin)

    def positions(self, like: Tensor) -> Tensor:
        """Return i + 1 for every row, [r, 1], in the dtype and on the device of ``like``."""
        one_based = torch.arange(
            self.first + 1, self.last + 1, dtype=like.dtype, device=like.device
        )
        return one_based[:, None]


@dataclass(frozen=True)
class Rows:
    """Scores of a chunk (masked pairs near HIDDEN) and their softmax: the input of a gate."""

    chunk: Chunk
    scores_BNrc: Tensor
    weights_BNrc: Tensor


class Pattern(Protocol):
    """Pattern: which earlier tokens a token sees."""

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""

    def left(self, row: int) -> int:
        """Return the first column visible to ``row``."""

    def hide_(self, scores_BNrc: Tensor, chunk: Chunk) -> None:
        """Add HIDDEN to the score of every masked pair, in place."""

    def longest_row(self, length: int) -> int:
        """Return w such that row i of ``length`` rows sees max(0, i − w + 1) ≤ j ≤ i."""

    def visible(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return the number of columns visible to each row, [r, 1]."""


class ScoreTerm(Protocol):
    """Term added to the scores; differentiable with respect to ``inputs``."""

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the learnable tensors."""

    def add_(
        self,
        scores_BNrc: Tensor,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        chunk: Chunk,
        inputs: Sequence[Tensor],
    ) -> None:
        """Add the term to the scores of the chunk, in place. q is already divided by √H."""

    def backward_(
        self,
        dscores_BNrc: Tensor,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        chunk: Chunk,
        inputs: Sequence[Tensor],
        dq_BNTH: Tensor,
        dk_BNTH: Tensor,
    ) -> tuple[Tensor, ...]:
        """Add to dq and dk in place; return the gradients of ``inputs``."""

    def branches(
        self, branch: "Branch", q_BNTH: Tensor, k_BNTH: Tensor, inputs: Sequence[Tensor]
    ) -> "list[Branch]":
        """Return the pairs of ``branch`` with the term added. q is not divided by √H."""


class Gate(Protocol):
    """Gate: a factor per row, computed from a statistic of the first softmax of the row.

    A gate either scales the scores of the row, followed by a second softmax (``scales_scores``), or
    scales the head output outside the engine.
    """

    scales_scores: bool

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the learnable tensors of ``factor``."""

    def statistic(self, rows: Rows) -> Tensor:
        """Return the statistic followed by the values per row that ``add_slope_`` needs: BNrm."""

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: Rows, known_BNrm: Tensor
    ) -> None:
        """Add the gradient of the statistic to the gradient of the weights, in place.

        A constant per row may be omitted: it cancels in the gradient of the softmax.
        """

    def joined_statistic(self, scores: "Scores", lse_BNT: Tensor) -> Tensor:
        """Return the statistic from log-sum-exps, BNT, if joined passes support the gate."""

    def factor(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the factor of every row, BNT, by differentiable operations."""

    def gate(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the openness of the gate per row, between 0 and 1, BNT; input of ``factor``."""
