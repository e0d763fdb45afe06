"""Attention of queries that see a run of keys: chunk of queries after chunk of queries.

T queries, M keys, g query heads of one key head, H head dim, x = H + 1; r the queries of a chunk, c
the keys that one of them sees, R = g·r.

Scores are binary logarithms, since exp2 is cheaper than exp. Backward computes the weights again
from the rows' log₂-sums, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135), so nothing of
T·M elements is kept. What is subtracted from each score there is one more number of the query, times
−1 in the key, so that the matrix product does it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.nsa.buffers import LOG2_E, Buffers, Masks, ending_in_minus_one, with_shift
from gpt2.attention.rows.parts import HIDDEN
from gpt2.attention.rows.plan import GPU_CHUNK_ELEMENTS

# Scores of a chunk on a CPU: few enough to stay near a second-level cache, and enough work for a call.
CHUNK_ELEMENTS = 1 << 19
# Fewer rows make the matrix products too thin.
FEWEST_ROWS = 64


@dataclass(frozen=True)
class Sight:
    """What queries see of ``keys`` keys: query t is that of token ``first`` + t.

    Key i stands for tokens [i·stride, i·stride + size). A query sees those that end with it or
    before, of these the last ``window``.
    """

    queries: int
    keys: int
    first: int
    size: int = 1
    stride: int = 1
    window: int | None = None

    def complete(self, tokens: int) -> int:
        """Keys that stand for none but the first ``tokens`` tokens."""
        return min(self.keys, max(0, (tokens - self.size) // self.stride + 1))

    def begin(self, tokens: int) -> int:
        """The first key that the last of ``tokens`` tokens sees."""
        return 0 if self.window is None else max(0, self.complete(tokens) - self.window)

    def chunks(self, heads: int, elements: int) -> "Iterator[Chunk]":
        """All queries in order, of about so many scores: the fewer keys they see, the more at once."""
        start, height, masks = 0, self.queries, Masks()
        if self.window is not None:
            # More of a window see less of the keys that one of them sees.
            height = min(height, max(FEWEST_ROWS, self.window // 8))
        while start < self.queries:
            first, last = self.first + start, self.first + start + height
            seen = self.complete(last) - self.begin(first + 1)
            if height > FEWEST_ROWS and heads * height * seen > elements:
                height = max(FEWEST_ROWS, height // 2)
                continue
            stop = min(start + height, self.queries)
            yield Chunk(self, slice(start, stop), masks)
            start = stop


@dataclass(frozen=True)
class Chunk:
    """Queries ``rows``, and the keys that one of them sees."""

    sight: Sight
    rows: slice
    masks: Masks

    @property
    def first(self) -> int:
        """The first query's token."""
        return self.sight.first + self.rows.start

    @property
    def last(self) -> int:
        """The token after the last query's."""
        return self.sight.first + self.rows.stop

    @property
    def columns(self) -> slice:
        """The keys."""
        return slice(self.sight.begin(self.first + 1), self.sight.complete(self.last))

    def hide_(self, scores_grc: Tensor) -> None:
        """−∞ where a query does not see a key."""
        sight, columns = self.sight, self.columns
        # All see the keys between these.
        low, high = sight.begin(self.last), sight.complete(self.first + 1)
        since = self.first + 1 - sight.size
        if high < columns.stop:
            later_grc = scores_grc[..., high - columns.start :]
            self.masks.hide_(later_grc, since - high * sight.stride, sight.stride)
        if sight.window is not None and low > columns.start:
            earlier_grc = scores_grc[..., : low - columns.start]
            since -= (columns.start + sight.window) * sight.stride
            self.masks.hide_(earlier_grc, since, sight.stride, complete=True)


# Is shown each chunk and its weights, grc.
Show = Callable[[Chunk, Tensor], None]


def forward(
    q_gTH: Tensor,
    k_MH: Tensor,
    v_MH: Tensor,
    sight: Sight,
    context_gTH: Tensor,
    logsums_gT: Tensor,
    show: Show | None = None,
) -> None:
    """Writes head outputs, 0 where a query sees no key, and log₂-sums. q is divided by √H."""
    buffers = Buffers(q_gTH)
    for chunk in _chunks(q_gTH, sight):
        part = q_gTH[:, chunk.rows]
        q_RH = torch.mul(part, LOG2_E, out=buffers.get("q", *part.shape)).flatten(0, 1)
        weights_grc = _scores(q_RH, k_MH, chunk, buffers)
        logsums_gT[:, chunk.rows], inverse_gr1 = _exponentials_(weights_grc)
        found_RH = buffers.product("found", weights_grc.flatten(0, 1), v_MH[chunk.columns])
        found_grH = found_RH.view(*part.shape[:-1], -1)
        torch.mul(found_grH, inverse_gr1, out=context_gTH[:, chunk.rows])
        if show:
            show(chunk, weights_grc.mul_(inverse_gr1))


def backward(
    dcontext_gTH: Tensor,
    q_gTH: Tensor,
    k_MH: Tensor,
    v_MH: Tensor,
    context_gTH: Tensor,
    logsums_gT: Tensor,
    sight: Sight,
    dq_gTH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; writes that of q."""
    dk_MH, dv_MH = torch.zeros_like(k_MH), torch.zeros_like(v_MH)
    k_Mx, v_Mx = ending_in_minus_one(k_MH), ending_in_minus_one(v_MH)
    buffers = Buffers(q_gTH)
    for chunk in _chunks(q_gTH, sight):
        rows, columns = chunk.rows, chunk.columns
        q_Rx = with_shift(q_gTH[:, rows], LOG2_E, logsums_gT[:, rows], buffers, "q")
        weights_Rc = _scores(q_Rx, k_Mx, chunk, buffers).exp2_().flatten(0, 1)
        dout = dcontext_gTH[:, rows]
        inner_gr = (dout * context_gTH[:, rows]).sum(-1)
        dout_Rx = with_shift(dout, 1.0, inner_gr, buffers, "dcontext")
        dv_MH[columns].addmm_(weights_Rc.T, dout_Rx[:, :-1])
        dscores_Rc = buffers.product("dscores", dout_Rx, v_Mx[columns].T).mul_(weights_Rc)
        dk_MH[columns].addmm_(dscores_Rc.T, q_Rx[:, :-1])
        found_RH = buffers.product("found", dscores_Rc, k_MH[columns])
        dq_gTH[:, rows] = found_RH.view_as(dout)
    # q came with the factor of binary logarithms.
    return dk_MH.div_(LOG2_E), dv_MH


def _chunks(q_gTH: Tensor, sight: Sight) -> Iterator[Chunk]:
    elements = GPU_CHUNK_ELEMENTS if q_gTH.is_cuda else CHUNK_ELEMENTS
    return sight.chunks(len(q_gTH), elements)


def _scores(q_Rx: Tensor, k_Mx: Tensor, chunk: Chunk, buffers: Buffers) -> Tensor:
    """grc. Hidden before the softmax: a later key must not change how earlier ones compare."""
    found_Rc = buffers.product("scores", q_Rx, k_Mx[chunk.columns].T)
    scores_grc = found_Rc.unflatten(0, (-1, chunk.rows.stop - chunk.rows.start))
    chunk.hide_(scores_grc)
    return scores_grc


def _exponentials_(scores_grc: Tensor) -> tuple[Tensor, Tensor]:
    """In place, to base 2, the highest 1 or, in rows of −∞, 0; log₂-sums gr of the scores, and what to
    multiply the exponentials with that they sum to 1."""
    if not scores_grc.shape[-1]:
        nothing_gr = scores_grc.sum(-1)
        return nothing_gr, nothing_gr[..., None]
    highest_gr = scores_grc.amax(-1).clamp_(min=HIDDEN)
    sums_gr = scores_grc.sub_(highest_gr[..., None]).exp2_().sum(-1).clamp_(min=1)
    inverse_gr1 = sums_gr.reciprocal()[..., None]
    return sums_gr.log2_().add_(highest_gr), inverse_gr1
