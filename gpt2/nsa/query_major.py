"""Attention to a contiguous range of keys per query, in chunks of queries.

Scores are binary logarithms, since exp2 is cheaper than exp; backward recomputes the weights from
the log₂-sums of the rows, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). What backward
subtracts from each score is one more element of the query, multiplied by −1 in the key.

T queries, M keys, g query heads per key head, H head dim, x = H + 1; r the queries of a chunk, c
the keys that any of them sees, R = g·r.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.components import MASKED_SCORE
from gpt2.attention.rows import GPU_CHUNK_ELEMENTS

LOG2_E = math.log2(math.e)


class MaskCache:
    """Cache of attention masks. Most chunks need the same mask, so each mask is built once."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, ...], Tensor] = {}

    def hide_(
        self, scores_grc: Tensor, since: int, stride: int = 1, complete: bool = False
    ) -> None:
        """Set scores to −∞ in place for keys that are incomplete, or complete if ``complete``.

        Key c becomes complete ``stride`` tokens after key c − 1, key 0 ``since`` tokens before row
        0.
        """
        rows, keys = scores_grc.shape[-2:]
        key = (rows, keys, since, stride, complete)
        if key not in self.masks:
            device = scores_grc.device
            tokens_r1 = torch.arange(since, since + rows, device=device)[:, None]
            complete_rc = tokens_r1 >= torch.arange(keys, device=device) * stride
            hidden_rc = complete_rc if complete else ~complete_rc
            bound_rc = scores_grc.new_full((rows, keys), math.inf)
            self.masks[key] = bound_rc.masked_fill_(hidden_rc, -math.inf)
        # Several times faster than masked_fill_ with a boolean mask.
        torch.minimum(scores_grc, self.masks[key], out=scores_grc)


class ScratchBuffers:
    """Named scratch tensors that all blocks reuse, so that the memory stays in the CPU cache."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.tensors: dict[str, Tensor] = {}
        self.masks = MaskCache()

    def get(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialized tensor; it overwrites the previous tensor of the same name."""
        size = math.prod(shape)
        if name not in self.tensors or self.tensors[name].numel() < size:
            self.tensors[name] = self.like.new_empty(size)
        return self.tensors[name][:size].view(shape)

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right, out=self.get(name, len(left), right.shape[1]))


@contextmanager
def exact_products(like: Tensor) -> Iterator[None]:
    """Compute fp32 products in fp32 on a GPU too: TF32 rounds to 11 bits, also the shift of a row,
    whose weights would all have the same error, of 1 % for a shift of 20.
    """
    precision = torch.get_float32_matmul_precision()
    try:
        if like.is_cuda:
            torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def append_shift(
    rows: Tensor, factor: float, shift: Tensor, buffers: ScratchBuffers, name: str
) -> Tensor:
    """Return ``factor``·rows with ``shift`` as a last column, R × (H + 1): the product with a
    column of ``append_minus_one`` is the plain product minus the shift.
    """
    width = rows.shape[-1]
    shifted = buffers.get(name, *rows.shape[:-1], width + 1)
    torch.mul(rows, factor, out=shifted[..., :width])
    shifted[..., width] = shift
    return shifted.flatten(0, -2)


def append_minus_one(columns: Tensor) -> Tensor:
    return torch.cat([columns, columns.new_full((len(columns), 1), -1.0)], -1)


def head_indices(k_BKSH: Tensor) -> list[tuple[int, int]]:
    batch, heads = k_BKSH.shape[:2]
    return [(b, k) for b in range(batch) for k in range(heads)]


def by_head(dtype: torch.dtype, *tensors: Tensor) -> "Iterator[tuple[Any, ...]]":
    """Yield, for each sequence and key head, the index pair and the part of each tensor in
    ``dtype``.
    """
    for index in head_indices(tensors[0]):
        yield index, *(x[index].to(dtype) for x in tensors)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# Scores per chunk on a CPU: small enough for the L2 cache, large enough to amortize a kernel call.
CHUNK_ELEMENTS = 1 << 19
# Fewer rows make the matrix products too thin.
MIN_CHUNK_ROWS = 64


@dataclass(frozen=True)
class MaskSpec:
    """Mask of ``queries`` queries over ``keys`` keys; query t belongs to token ``first`` + t.

    Key i covers the tokens [i·stride, i·stride + size). A query sees the keys that end at or before
    its token, and only the last ``window`` of these if it is set.
    """

    queries: int
    keys: int
    first: int
    size: int = 1
    stride: int = 1
    window: int | None = None

    def complete(self, tokens: int) -> int:
        """Return the number of keys that cover only the first ``tokens`` tokens."""
        return min(self.keys, max(0, (tokens - self.size) // self.stride + 1))

    def begin(self, tokens: int) -> int:
        """Return the first key that the last of ``tokens`` tokens sees."""
        return 0 if self.window is None else max(0, self.complete(tokens) - self.window)

    def chunks(self, heads: int, elements: int) -> "Iterator[QueryChunk]":
        """Yield all queries in chunks of about ``elements`` scores."""
        start, height, masks = 0, self.queries, MaskCache()
        if self.window is not None:
            # In a taller chunk, each query sees a smaller share of the keys loaded for the chunk.
            height = min(height, max(MIN_CHUNK_ROWS, self.window // 8))
        while start < self.queries:
            first, last = self.first + start, self.first + start + height
            seen = self.complete(last) - self.begin(first + 1)
            if height > MIN_CHUNK_ROWS and heads * height * seen > elements:
                height = max(MIN_CHUNK_ROWS, height // 2)
                continue
            stop = min(start + height, self.queries)
            yield QueryChunk(self, slice(start, stop), masks)
            start = stop


@dataclass(frozen=True)
class QueryChunk:
    """Queries ``rows`` and the keys that any of these queries sees."""

    sight: MaskSpec
    rows: slice
    masks: MaskCache

    @property
    def first(self) -> int:
        return self.sight.first + self.rows.start

    @property
    def last(self) -> int:
        return self.sight.first + self.rows.stop

    @property
    def columns(self) -> slice:
        return slice(self.sight.begin(self.first + 1), self.sight.complete(self.last))

    def hide_(self, scores_grc: Tensor) -> None:
        sight, columns = self.sight, self.columns
        # Every query of the chunk sees the keys [low, high).
        low, high = sight.begin(self.last), sight.complete(self.first + 1)
        since = self.first + 1 - sight.size
        if high < columns.stop:
            later_grc = scores_grc[..., high - columns.start :]
            self.masks.hide_(later_grc, since - high * sight.stride, sight.stride)
        if sight.window is not None and low > columns.start:
            earlier_grc = scores_grc[..., : low - columns.start]
            since -= (columns.start + sight.window) * sight.stride
            self.masks.hide_(earlier_grc, since, sight.stride, complete=True)


# Callback that receives each chunk and the attention weights of the chunk, grc.
WeightsCallback = Callable[[QueryChunk, Tensor], None]


def attend_chunks(
    q_BKgTH: Tensor,
    k_BKMH: Tensor,
    v_BKMH: Tensor,
    sight: MaskSpec,
    show: WeightsCallback | None = None,
) -> Tensor:
    """Return the head outputs BKgTH, 0 if a query sees no key; q must be divided by √H already.

    ``show`` is called with each chunk and its weights, key head by key head.
    """
    context: Tensor = _ChunkedAttention.apply(q_BKgTH, k_BKMH, v_BKMH, sight, show)
    return context


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: MaskSpec, show: WeightsCallback | None
    ) -> Tensor:
        ctx.sight = sight
        context = q.new_empty(*q.shape[:-1], v.shape[-1])
        logsums = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q))
        with exact_products(q):
            for index, q_gTH, k_MH, v_MH in by_head(logsums.dtype, q, k, v):
                forward(q_gTH, k_MH, v_MH, sight, context[index], logsums[index], show)
        ctx.save_for_backward(q, k, v, context, logsums)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcontext: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        with exact_products(q):
            for index, dout, *qkv, out in by_head(logsums.dtype, dcontext, q, k, v, context):
                rest = out, logsums[index], ctx.sight, dq[index]
                dk[index], dv[index] = backward(dout, qkv[0], qkv[1], qkv[2], *rest)
        return dq, dk, dv, None, None


def forward(
    q_gTH: Tensor,
    k_MH: Tensor,
    v_MH: Tensor,
    sight: MaskSpec,
    context_gTH: Tensor,
    logsums_gT: Tensor,
    show: WeightsCallback | None = None,
) -> None:
    """Write the head outputs (0 if a query sees no key) and the log₂-sums of the rows."""
    buffers = ScratchBuffers(q_gTH)
    for chunk in _chunks(q_gTH, sight):
        q_grH = q_gTH[:, chunk.rows]
        q_RH = torch.mul(q_grH, LOG2_E, out=buffers.get("q", *q_grH.shape)).flatten(0, 1)
        weights_grc = _scores(q_RH, k_MH, chunk, buffers)
        logsums_gT[:, chunk.rows], inverse_gr1 = _exponentials_(weights_grc)
        out_RH = buffers.product("out", weights_grc.flatten(0, 1), v_MH[chunk.columns])
        out_grH = out_RH.view(*q_grH.shape[:-1], -1)
        torch.mul(out_grH, inverse_gr1, out=context_gTH[:, chunk.rows])
        if show:
            show(chunk, weights_grc.mul_(inverse_gr1))


def backward(
    dcontext_gTH: Tensor,
    q_gTH: Tensor,
    k_MH: Tensor,
    v_MH: Tensor,
    context_gTH: Tensor,
    logsums_gT: Tensor,
    sight: MaskSpec,
    dq_gTH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v, and write the gradient of q to ``dq_gTH``."""
    dk_MH, dv_MH = torch.zeros_like(k_MH), torch.zeros_like(v_MH)
    k_Mx, v_Mx = append_minus_one(k_MH), append_minus_one(v_MH)
    buffers = ScratchBuffers(q_gTH)
    for chunk in _chunks(q_gTH, sight):
        rows, columns = chunk.rows, chunk.columns
        q_Rx = append_shift(q_gTH[:, rows], LOG2_E, logsums_gT[:, rows], buffers, "q")
        weights_Rc = _scores(q_Rx, k_Mx, chunk, buffers).exp2_().flatten(0, 1)
        dout = dcontext_gTH[:, rows]
        inner_gr = (dout * context_gTH[:, rows]).sum(-1)
        dout_Rx = append_shift(dout, 1.0, inner_gr, buffers, "dcontext")
        dv_MH[columns].addmm_(weights_Rc.T, dout_Rx[:, :-1])
        dscores_Rc = buffers.product("dscores", dout_Rx, v_Mx[columns].T).mul_(weights_Rc)
        dk_MH[columns].addmm_(dscores_Rc.T, q_Rx[:, :-1])
        dq_RH = buffers.product("dq", dscores_Rc, k_MH[columns])
        dq_gTH[:, rows] = dq_RH.view_as(dout)
    # The rows of q were scaled by log₂ e.
    return dk_MH.div_(LOG2_E), dv_MH


def _chunks(q_gTH: Tensor, sight: MaskSpec) -> Iterator[QueryChunk]:
    elements = GPU_CHUNK_ELEMENTS if q_gTH.is_cuda else CHUNK_ELEMENTS
    return sight.chunks(len(q_gTH), elements)


def _scores(q_Rx: Tensor, k_Mx: Tensor, chunk: QueryChunk, buffers: ScratchBuffers) -> Tensor:
    """Return the masked scores of a chunk, grc, before the softmax, which ranks keys."""
    scores_Rc = buffers.product("scores", q_Rx, k_Mx[chunk.columns].T)
    scores_grc = scores_Rc.unflatten(0, (-1, chunk.rows.stop - chunk.rows.start))
    chunk.hide_(scores_grc)
    return scores_grc


def _exponentials_(scores_grc: Tensor) -> tuple[Tensor, Tensor]:
    """Replace scores by 2^(score − row maximum) in place, 0 in rows of −∞; return the log₂-sums gr,
    and the factors gr1 that normalize the exponentials.
    """
    if not scores_grc.shape[-1]:
        zeros_gr = scores_grc.sum(-1)
        return zeros_gr, zeros_gr[..., None]
    highest_gr = scores_grc.amax(-1).clamp_(min=MASKED_SCORE)
    sums_gr = scores_grc.sub_(highest_gr[..., None]).exp2_().sum(-1).clamp_(min=1)
    inverse_gr1 = sums_gr.reciprocal()[..., None]
    return sums_gr.log2_().add_(highest_gr), inverse_gr1
