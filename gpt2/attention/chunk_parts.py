"""Components of chunked attention: pattern, score term, gate, chunk of rows, and their plan.

Scores and weights are fp32 (fp64 for fp64 inputs).

B batch, T tokens (queries), S tokens (keys), N heads, H head dim; r the rows of a chunk, c its
columns, b the last of them. Scores and weights of a chunk are BNrc, one value per row is BNr1.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, library, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gpt2.attention.state import AttentionWeightsOptions
from gpt2.attention.tiled import TileLaunch, TileSpec

# Added to the score of a masked pair: exp() of it is exactly 0, but unlike −inf its product with a
# weight of 0 or a small gradient is finite.
MASKED_SCORE = -1e30


@dataclass(frozen=True)
class RowChunk:
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


class Pattern(Protocol):
    """Pattern: which earlier tokens a token sees."""

    def sdpa_arguments(self, length: int, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""

    def left(self, row: int) -> int:
        """Return the first column visible to ``row``."""

    def hide_(self, scores_BNrc: Tensor, chunk: RowChunk) -> None:
        """Add MASKED_SCORE to the score of every masked pair, in place."""

    def longest_row(self, length: int) -> int:
        """Return w such that row i of ``length`` rows sees max(0, i − w + 1) ≤ j ≤ i."""

    def visible(self, chunk: RowChunk, like: Tensor) -> Tensor:
        """Return the number of columns visible to each row, [r, 1]."""


class QueriesKeys(NamedTuple):
    """Queries, divided by √H, and keys of the same tokens, BNTH."""

    q: Tensor
    k: Tensor


class ScoreTerm(nn.Module):
    """Term added to the scores, differentiated by autograd within a chunk.

    ``reach`` earlier tokens of every row, besides its own, are those that the formula reads.
    """

    reach: int = 0

    @abstractmethod
    def scores(
        self, rows: QueriesKeys, band: QueriesKeys, chunk: RowChunk, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Return the addition to the scores of the chunk's last columns, BNrb.

        ``band`` are the visible tokens from ``reach`` before the first row to the last row.
        ``inputs`` are the parameters, in order.
        """

    def tile_spec(self, spec: TileSpec) -> tuple[TileSpec, Tensor | None]:
        """Return the specification with the term added, and a learnable factor per head, if any.

        Not called if ``lacks_triton`` of the term's options is set.
        """
        raise NotImplementedError


class Gate(nn.Module):
    """Gate: a factor per row, computed from a statistic of the first softmax of the row.

    A gate either scales the scores of the row, followed by a second softmax (``scales_scores``), or
    scales the head output outside the engine.
    """

    scales_scores: bool

    @abstractmethod
    def statistic(self, weights_BNrc: Tensor, scores_BNrc: Tensor, chunk: RowChunk) -> Tensor:
        """Return the statistic of every row, BNr.

        It is differentiated by autograd with respect to ``weights``; ``scores``, of which ``weights``
        is the softmax, are a constant near MASKED_SCORE in masked pairs. The derivative may lack a
        constant per row, which cancels in the gradient of the softmax.
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


# numpy sorts short rows with SIMD instructions, about eight times faster on a CPU than torch.topk.
# Maximum row length for the SIMD sort; longer rows are reduced piece by piece.
SORT_WIDTH = 256


@library.custom_op("kablate::largest", mutates_args=(), device_types="cpu")
def topk_values(weights: Tensor, k: int) -> Tensor:
    """Return the k largest elements of the last dimension, unordered (all if there are fewer).

    ``weights`` must be ≥ 0. Not differentiable.
    """
    while weights.shape[-1] > SORT_WIDTH and 2 * k <= SORT_WIDTH:
        padded = F.pad(weights, (0, -weights.shape[-1] % SORT_WIDTH))
        weights = _largest_sorted(padded.unflatten(-1, (-1, SORT_WIDTH)), k).flatten(-2)
    return _largest_sorted(weights, k)


def _largest_sorted(weights: Tensor, k: int) -> Tensor:
    ordered = np.sort(weights.numpy(), axis=-1)
    return torch.from_numpy(ordered[..., -k:].copy())


@topk_values.register_kernel("cuda")
def _(weights: Tensor, k: int) -> Tensor:
    return weights.topk(min(k, weights.shape[-1]), sorted=False).values


@topk_values.register_fake
def _(weights: Tensor, k: int) -> Tensor:
    return weights.new_empty(*weights.shape[:-1], min(k, weights.shape[-1]))


class _LargestSum(Function):
    """Sum of the k largest elements; ties with the k-th share its derivative."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, k: int) -> Tensor:
        largest = topk_values(weights, k)
        ctx.save_for_backward(weights, largest.amin(-1, keepdim=True))
        ctx.k = k
        return largest.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None]:
        weights, edge = ctx.saved_tensors
        # Float comparison results are several times faster on a CPU than bool results.
        above = torch.gt(weights, edge, out=torch.empty_like(weights))
        level = torch.eq(weights, edge, out=torch.empty_like(weights))
        places = min(ctx.k, weights.shape[-1]) - above.sum(-1, keepdim=True)
        share = places / level.sum(-1, keepdim=True).clamp_min(1)
        return above.addcmul_(level, share).mul_(dsum[..., None]), None


def largest_sum(weights: Tensor, k: int) -> Tensor:
    """Return the sum of the k largest elements of the last dimension; ``weights`` must be ≥ 0.

    Differentiable: elements equal to the k-th largest share the derivatives of their places.
    """
    total: Tensor = _LargestSum.apply(weights, k)
    return total


class AttentionWeightsTap:
    """Reader of the last softmax of a chunk. The selection of weights is not differentiated."""

    def __init__(self, request: AttentionWeightsOptions, pattern: Pattern) -> None:
        self.request = request
        self.pattern = pattern

    def read(self, weights_BNrc: Tensor, chunk: RowChunk) -> Tensor:
        """Return the attention weights that the MLP reads, Brc; a row sums to one, or to zero if
        none of its weights is selected.
        """
        weights, total = self._kept(weights_BNrc, chunk)
        return weights.div_(total)

    def backward(self, drows_Brc: Tensor, weights_BNrc: Tensor, chunk: RowChunk) -> Tensor:
        """Return the gradient of the weights, B1rc: identical for every head."""
        weights, total = self._kept(weights_BNrc, chunk)
        drows = drows_Brc.to(weights.dtype)
        # Gradient of w / Σ w over the selected weights.
        mean = torch.linalg.vecdot(drows, weights)[..., None] / total
        dmean = (drows - mean).mul_(weights > 0).div_(total)
        return dmean.div_(weights_BNrc.shape[1])[:, None]

    def _kept(self, weights_BNrc: Tensor, chunk: RowChunk) -> tuple[Tensor, Tensor]:
        """Return the selected mean weights and their clamped sum per row."""
        mean_Brc = weights_BNrc.mean(1)
        if self.request.sparsity == "topk":
            mean_Brc.mul_(
                mean_Brc >= topk_values(mean_Brc, self.request.topk).amin(-1, keepdim=True)
            )
        elif self.request.sparsity == "rms":
            visible = self.pattern.visible(chunk, mean_Brc)
            rms = torch.linalg.vector_norm(mean_Brc, dim=-1, keepdim=True)
            rms.mul_(visible.rsqrt())
            mean_Brc.mul_(mean_Brc >= self.request.tau * rms)
        total = mean_Brc.sum(-1, keepdim=True)
        return mean_Brc, total.clamp_min(torch.finfo(total.dtype).tiny)


# Elements of a chunk's scores: on a CPU a chunk should fit into the L2 cache, on a GPU it should be
# large enough to saturate the device.
CPU_CHUNK_ELEMENTS = 1 << 18
GPU_CHUNK_ELEMENTS = 1 << 25
# Minimum rows per chunk: matrix products with fewer rows are inefficient.
MIN_CHUNK_ROWS = 32


@dataclass(frozen=True)
class ScoreChunks:
    """Division of the query rows into chunks, by the elements of a chunk's scores."""

    cpu_elements: int = CPU_CHUNK_ELEMENTS
    gpu_elements: int = GPU_CHUNK_ELEMENTS
    min_rows: int = MIN_CHUNK_ROWS

    def chunks(self, q_BNTH: Tensor, first_column: Callable[[int], int]) -> Iterator[RowChunk]:
        """Yield the rows in order, in chunks of similar height.

        ``first_column`` returns the first column visible to a row.
        """
        batch, heads, length, _ = q_BNTH.shape
        elements = self.cpu_elements if q_BNTH.device.type == "cpu" else self.gpu_elements
        highest = max(self.min_rows, elements // (batch * heads * length))
        height = math.ceil(length / math.ceil(length / highest))
        for first in range(0, length, height):
            yield RowChunk(first, min(first + height, length), first_column(first))


@dataclass(frozen=True)
class AttentionPlan:
    """Components of one attention call, dropout on its weights, and the kernels of its backend.

    Chunk sizes are those of the row engine. ``tile_launch`` launches the Triton kernels; if it is
    None, they run on a GPU that supports them.
    """

    pattern: Pattern
    terms: Sequence[ScoreTerm] = ()
    gates: Sequence[Gate] = ()
    reader: AttentionWeightsTap | None = None
    dropout: float = 0.0
    # torch 2.11 cannot compile a default that is an instance.
    score_chunks: ScoreChunks = field(default_factory=ScoreChunks)
    tile_launch: TileLaunch | None = None

    def parts(self) -> list[ScoreTerm | Gate]:
        """Return the components with inputs of the row engine: terms, and gates that scale scores."""
        return [*self.terms, *(gate for gate in self.gates if gate.scales_scores)]

    def inputs(self) -> list[Tensor]:
        """Return the parameters of ``parts``, in order."""
        return [parameter for part in self.parts() for parameter in part.parameters()]

    def chunks(self, q_BNTH: Tensor) -> Iterator[RowChunk]:
        """Yield the chunks of rows in order."""
        return self.score_chunks.chunks(q_BNTH, self.pattern.left)

    def drop(self, weights_BNrc: Tensor, generator: Generator | None) -> Tensor | None:
        """Return a dropout mask (0 or 1/(1−p)) for the weights; None without dropout."""
        if not self.dropout:
            return None
        keep = 1 - self.dropout
        return torch.empty_like(weights_BNrc).bernoulli_(keep, generator=generator).div_(keep)


@dataclass(frozen=True)
class AttentionResult:
    """Head outputs, the statistic of every gate, and the weights exposed to the MLP."""

    context_BNTH: Tensor
    statistics_BNT: Sequence[Tensor]
    weights_BTS: Tensor | None


def default_generator(device: torch.device) -> Generator:
    """Return the generator used by dropout; checkpoints contain its state."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def repeat_kv(x_BKTH: Tensor, heads: int) -> Tensor:
    """Return key or value heads repeated for the query heads that share them: BNTH."""
    shared = heads // x_BKTH.shape[1]
    return x_BKTH if shared == 1 else x_BKTH.repeat_interleave(shared, dim=1)
