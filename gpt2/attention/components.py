"""Base classes of the components of attention, and the pattern of a window.

Scores and weights are fp32 (fp64 for fp64 inputs).

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, H head dim; r the rows of a chunk,
c its columns, b the last of them. Scores and weights of a chunk are BNrc, one value per row is
BNr1.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt2.attention.projections import QKV
from gpt2.attention.triton import TileSpec
from gpt2.kv_cache import BlockKVCache

# Added to the score of a masked pair: exp() of it is exactly 0, but unlike −inf its product with a
# weight of 0 or a small gradient is finite.
MASKED_SCORE = -1e30


@dataclass(frozen=True)
class RowChunk:
    """Chunk of query rows ``first`` ≤ i < ``last``, which see columns ``left`` ≤ j ≤ i of the
    sequence.

    The tensors start at token ``origin``, which is non-zero when decoding with a cache.
    """

    first: int
    last: int
    left: int
    origin: int = 0

    @property
    def height(self) -> int:
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


class Window:
    """Pattern: token i sees max(0, i − width + 1) ≤ j ≤ i, or all of j ≤ i if the width is None."""

    def __init__(self, width: int | None) -> None:
        self.width = width

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""
        if self.width is None or length <= self.width:
            return {"is_causal": True}
        visible = torch.ones(length, length, dtype=torch.bool, device=device)
        return {"attn_mask": visible.tril_().triu_(1 - self.width)}

    def longest_row(self, length: int) -> int:
        return length if self.width is None else min(self.width, length)

    def left(self, row: int) -> int:
        """Return the first column visible to ``row``."""
        return 0 if self.width is None else max(0, row - self.width + 1)

    def hide_(self, scores_BNrc: Tensor, chunk: RowChunk) -> None:
        """Add MASKED_SCORE to the score of every masked pair, in place: a triangle at each end."""
        height = chunk.height
        square = scores_BNrc.new_full((height, height), MASKED_SCORE)
        if self.width is not None:
            # Row i hides j < i − w + 1, counted from the chunk's first row and column.
            offset = chunk.first - self.width + 1 - chunk.left
            scores_BNrc[..., :height].add_(square.tril(offset - 1))
        scores_BNrc[..., -height:].add_(square.triu_(1))

    def visible(self, chunk: RowChunk, like: Tensor) -> Tensor:
        """Return the number of columns visible to each row, [r, 1]."""
        positions_r1 = chunk.positions(like)
        return positions_r1 if self.width is None else positions_r1.clamp_max_(self.width)


class QueryKeyTransform(nn.Module):
    """Transformation of queries and keys of every head, before positions are applied."""

    @abstractmethod
    def queries(self, q_BNTH: Tensor) -> Tensor:
        """Return the transformed queries."""

    @abstractmethod
    def keys(self, k_BKTH: Tensor) -> Tensor:
        """Return the transformed keys."""


class QueriesKeys(NamedTuple):
    """Queries, divided by √H, and keys of the same tokens, BNTH."""

    q: Tensor
    k: Tensor


class ScoreTerm(nn.Module):
    """Term added to the scores, differentiated by autograd within a chunk; ``reach`` tokens before
    every row are read.
    """

    reach: int = 0

    @abstractmethod
    def scores(
        self, rows: QueriesKeys, band: QueriesKeys, chunk: RowChunk, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Return the addition to the scores of the last columns, of a shape that broadcasts to
        BNrb.

        ``band`` are the visible tokens from ``reach`` before the first row to the last; ``inputs``
        the parameters, in order.
        """

    def tile_spec(self, spec: TileSpec) -> tuple[TileSpec, Tensor | None]:
        """Return the specification with the term, and a learnable factor per head, if any."""
        raise NotImplementedError


class Gate(nn.Module):
    """Factor per row from a statistic of the first softmax. It scales the scores of the row,
    followed by a second softmax (``scales_scores``), or the head output outside the engine.
    """

    scales_scores: bool

    @abstractmethod
    def statistic(
        self,
        weights_BNrc: Tensor,
        scores_BNrc: Tensor,
        chunk: RowChunk,
        kept: dict["Gate", Tensor],
        sink_BNr: Tensor | None = None,
    ) -> Tensor:
        """Return the statistic of every row, BNr, differentiated by autograd with respect to
        ``weights``.

        ``scores``, of which ``weights`` is the softmax, are a constant near MASKED_SCORE in masked
        pairs. The derivative may lack a constant per row, which cancels in the gradient of the
        softmax. Backward computes the chunk again and finds in ``kept`` what forward put there. With
        a sink, whose weight is ``sink``, weights sum to less than 1, and no constant cancels.
        """

    @abstractmethod
    def tile_spec(self, spec: TileSpec) -> TileSpec:
        """Return the specification with the statistic, if the Triton kernels support the gate."""

    @abstractmethod
    def factor(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the factor of every row, BNT, differentiable; ``inputs`` are the parameters."""

    @abstractmethod
    def gate(self, statistic_BNT: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the openness of the gate per row, between 0 and 1, BNT; input of ``factor``."""


class CustomAttention(nn.Module):
    """Pattern with its own kernel: it has parameters, or more than one softmax per row.

    Queries and keys of the projection are transformed already; ``transforms`` are for other keys,
    and a part of the attention, not of the pattern.
    """

    transforms: tuple[QueryKeyTransform, ...] = ()

    def transformed(self, k_BKTH: Tensor) -> Tensor:
        for transform in self.transforms:
            k_BKTH = transform.keys(k_BKTH)
        return k_BKTH

    @abstractmethod
    def kernel(self, device: str) -> str:
        """Return the name of the kernel on a ``device`` of this type."""

    @abstractmethod
    def forward(self, x_BTC: Tensor, heads: QKV, cache: BlockKVCache | None = None) -> Tensor:
        """Return head outputs, BNTH; with a cache, ``x`` and ``heads`` are of new tokens."""

    @abstractmethod
    def new_cache(self) -> BlockKVCache:
        """Return an empty cache for the block."""
