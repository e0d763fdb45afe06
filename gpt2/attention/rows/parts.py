"""What the engines compose: a pattern, score terms, gates, and a reader of weights.

B batch, T tokens (queries), S tokens (keys), N heads, H head dim; r the rows of a chunk, c its
columns. Scores and weights of a chunk are BNrc, a number per row is BNr1.

Scores and weights are given in fp32 (fp64 for fp64 inputs). The row engine differentiates by hand,
so every part brings its derivative; tests compare each with autograd through a naive reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gpt2.attention.joined.scores import Branch, Scores

# Added to the score of a hidden pair: exp() of it is an exact 0, and it stays finite when it is
# multiplied by a weight of 0 or by a small gradient.
HIDDEN = -1e30


@dataclass(frozen=True)
class Chunk:
    """Query rows ``first`` ≤ i < ``last``, which see columns ``left`` ≤ j ≤ i.

    All count from the start of the sequence. The tensors begin with token ``origin`` of it, which is
    not the first when tokens are decoded one after the other.
    """

    first: int
    last: int
    left: int
    origin: int = 0

    @property
    def height(self) -> int:
        """Number of rows."""
        return self.last - self.first

    @property
    def rows(self) -> slice:
        """The rows, in q and k."""
        return self.slice(self.first)

    @property
    def columns(self) -> slice:
        """The columns, in k and v."""
        return self.slice(self.left)

    def slice(self, start: int) -> slice:
        """Tokens from ``start`` to the last row's, in q, k and v."""
        assert start >= self.origin, "reads tokens that decoding does not keep: see reach"
        return slice(start - self.origin, self.last - self.origin)

    def positions(self, like: Tensor) -> Tensor:
        """i + 1 for every row, [r, 1], in the type and on the device of ``like``."""
        one_based = torch.arange(
            self.first + 1, self.last + 1, dtype=like.dtype, device=like.device
        )
        return one_based[:, None]


@dataclass(frozen=True)
class Rows:
    """A chunk's scores, hidden pairs at about HIDDEN, and their softmax: what a gate reads."""

    chunk: Chunk
    scores_BNrc: Tensor
    weights_BNrc: Tensor


class Pattern(Protocol):
    """Which earlier tokens a token sees."""

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """What scaled_dot_product_attention needs to see the same."""

    def left(self, row: int) -> int:
        """The first column that ``row`` sees."""

    def hide_(self, scores_BNrc: Tensor, chunk: Chunk) -> None:
        """Add HIDDEN to every pair that must not be seen, in place."""

    def longest_row(self, length: int) -> int:
        """w, where row i of ``length`` sees max(0, i − w + 1) ≤ j ≤ i."""

    def visible(self, chunk: Chunk, like: Tensor) -> Tensor:
        """How many columns each row sees, [r, 1]."""


class ScoreTerm(Protocol):
    """Something added to the scores. ``inputs`` are the tensors it is differentiable in."""

    def inputs(self) -> tuple[Tensor, ...]:
        """Learnable tensors."""

    def add_(
        self,
        scores_BNrc: Tensor,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        chunk: Chunk,
        inputs: Sequence[Tensor],
    ) -> None:
        """Add the term to the chunk's scores, in place. q is already divided by √H."""

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
        """The pairs of ``branch`` with the term in their scores. q is not divided by √H."""


class Gate(Protocol):
    """A factor for every row, from a statistic of the row's first softmax.

    A gate either scales the row's scores, after which the softmax is taken again
    (``scales_scores``), or its factor is multiplied to the head's output outside the engine.
    """

    scales_scores: bool

    def inputs(self) -> tuple[Tensor, ...]:
        """Learnable tensors of ``factor``."""

    def statistic(self, rows: Rows) -> Tensor:
        """The statistic, and after it whatever ``add_slope_`` wants to know of a row: BNrm."""

    def add_slope_(
        self, dweights_BNrc: Tensor, dstatistic_BNr1: Tensor, rows: Rows, known_BNrm: Tensor
    ) -> None:
        """Add the statistic's gradient to that of the weights, in place.

        A constant per row may be left out: the softmax's gradient takes it out again.
        """

    def joined_statistic(self, scores: "Scores", lse_BNT: Tensor) -> Tensor:
        """The statistic from the rows' log-sum-exps, BNT; of gates whose options are ``joined``."""

    def factor(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The factor of every row, BNT, by differentiable operations."""

    def gate(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """How open the gate is in every row, from 0 to 1, BNT: what the factor is made of."""
