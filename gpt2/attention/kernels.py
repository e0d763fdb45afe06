"""Execution paths of attention behind one interface, and their selection.

sdpa     one call of torch's scaled_dot_product_attention
rows     chunks of query rows (``chunked.py``)
triton   one pass of our own kernels, with hand-written derivatives (``tiled.py``)
own      the kernel of the pattern itself
cached   new tokens against a KV cache, by the components of the row engine

B batch, T new tokens (rows), S visible tokens (columns), C n_embd, N heads, K key/value heads, H key
width; r rows and c columns as in the row engine.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention import chunked
from gpt2.attention.chunk_parts import (
    AttentionPlan,
    AttentionResult,
    AttentionWeightsTap,
    Pattern,
    RowChunk,
    repeat_kv,
)
from gpt2.attention.chunked import add_terms_, softmaxes_from_scores
from gpt2.attention.config import AttentionConfig
from gpt2.attention.patterns import CustomAttention
from gpt2.attention.projections import QKV, Projection
from gpt2.attention.sdpa import sdpa_attention
from gpt2.attention.tiled import TileSpec, runs_tiles, tiled_attention, triton_launch
from gpt2.kv_cache import BlockKVCache


class AttentionKernel(Protocol):
    """Execution path of attention.

    ``qkv`` are the position-encoded heads of the new tokens, ``x`` the input that they were
    projected from, and ``cache`` the earlier tokens, or None for a whole sequence.
    """

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Return head outputs, BNTH, with the statistics and weights that the plan requires."""


@dataclass(frozen=True)
class AttentionKernels:
    """Kernels of one attention module: for a whole sequence, and for decoding with a cache."""

    sequence: AttentionKernel
    cached: AttentionKernel


def build_kernels(
    backend: str,
    options: AttentionConfig,
    scale: float,
    projection: Projection,
    pattern: Pattern | CustomAttention,
) -> AttentionKernels:
    """Return the kernels of ``backend``, a name returned by ``select_backend``, or "triton or rows".

    ``scale`` multiplies q·k when decoding.
    """
    if isinstance(pattern, CustomAttention):
        own = CustomKernel(pattern)
        return AttentionKernels(own, own)
    kernels: dict[str, AttentionKernel] = {
        "sdpa": SdpaKernel(options.backend),
        "rows": ChunkedKernel(),
        "triton": TiledKernel(),
        "triton or rows": TiledOrChunkedKernel(),
    }
    return AttentionKernels(kernels[backend], CachedKernel(projection, scale, options.reach))


@dataclass(frozen=True)
class SdpaKernel:
    """A call of scaled_dot_product_attention, restricted to the configured torch kernel."""

    backend: str

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Attend within a whole sequence. Raises RunError if the torch kernel cannot run."""
        return AttentionResult(
            sdpa_attention(qkv, plan.pattern, self.backend, plan.dropout), (), None
        )


@dataclass(frozen=True)
class ChunkedKernel:
    """The row engine."""

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Attend within a whole sequence."""
        return chunked.attend(qkv.q_BNTH, qkv.k_BKTH, qkv.v_BKTH, plan)


@dataclass(frozen=True)
class TiledKernel:
    """Triton kernels; the plan must not use features in ``unsupported_by_triton``."""

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Attend within a whole sequence. Raises RunError if the kernels cannot run."""
        q_BNTH = qkv.q_BNTH
        k, v = (x.to(q_BNTH.dtype) for x in (qkv.k_BKTH, qkv.v_BKTH))
        launch = plan.tile_launch or triton_launch
        window, scale = plan.pattern.longest_row(q_BNTH.shape[2]), q_BNTH.shape[-1] ** -0.5
        spec, alpha_N, factor_BNT = TileSpec(window, scale, dropout=plan.dropout), None, None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            for term in plan.terms:
                spec, alpha_N = term.tile_spec(spec)
            statistics: list[Tensor] = []
            for gate in plan.gates:
                gated = gate.tile_spec(spec)
                if not gate.scales_scores:
                    spec = gated
                    continue
                first = tiled_attention(q_BNTH, k, None, alpha_N, None, gated, launch)
                assert first.statistic_BNT is not None
                statistics.append(first.statistic_BNT)
                factor_BNT = gate.factor(first.statistic_BNT, list(gate.parameters()))
            reads = plan.reader is not None
            context, statistic, mean_BTS = tiled_attention(
                q_BNTH, k, v, alpha_N, factor_BNT, spec, launch, reads
            )
        weights = None
        if plan.reader:
            (weights,) = _SelectedWeights.apply(mean_BTS, plan.reader, q_BNTH.dtype)
        if statistic is not None:
            statistics.append(statistic)
        assert context is not None
        return AttentionResult(context, statistics, weights)


@dataclass(frozen=True)
class TiledOrChunkedKernel:
    """The Triton kernels on a GPU that supports them, else the row engine."""

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Attend within a whole sequence; float64, of validations, by the row engine."""
        q_BNTH = qkv.q_BNTH
        runs = plan.tile_launch or (runs_tiles(q_BNTH.device) and q_BNTH.dtype != torch.float64)
        kernel = TiledKernel() if runs else ChunkedKernel()
        return kernel(qkv, plan, x_BTC, cache)


class _SelectedWeights(torch.autograd.Function):
    """Selection of mean weights by the reader of the row engine, whose only chunk is all rows."""

    @staticmethod
    def forward(
        ctx: Any, mean_BTS: Tensor, reader: AttentionWeightsTap, dtype: torch.dtype
    ) -> tuple[Tensor]:
        ctx.reader = reader
        ctx.chunk = RowChunk(0, mean_BTS.shape[1], 0)
        ctx.save_for_backward(mean_BTS)
        # A copy: compiled by torch 2.11, a result that was changed in place has no gradient.
        weights = reader.read(mean_BTS[:, None], ctx.chunk).to(dtype, copy=True)
        if reader.request.detach:
            ctx.mark_non_differentiable(weights)
        # torch.compile expects a tuple.
        return (weights,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_BTS: Tensor) -> tuple[Tensor | None, ...]:
        (mean_BTS,) = ctx.saved_tensors
        dmean_B1TS = ctx.reader.backward(dweights_BTS, mean_BTS[:, None], ctx.chunk)
        return dmean_B1TS[:, 0], None, None


@dataclass(frozen=True)
class CustomKernel:
    """The kernel of a pattern that attends itself."""

    pattern: CustomAttention

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Call the pattern, with the cache if there is one."""
        return AttentionResult(self.pattern(x_BTC, qkv, cache), (), None)


@dataclass(frozen=True)
class CachedKernel:
    """Attention of new tokens to the tokens of a cache.

    The new tokens are one chunk of rows. Components take positions from the chunk, so missing
    earlier queries do not matter. ``scale`` multiplies q·k. ``reach`` is the number of earlier
    queries that score terms read; that many queries are cached.
    """

    projection: Projection
    scale: float
    reach: int

    def __call__(
        self, qkv: QKV, plan: AttentionPlan, x_BTC: Tensor, cache: BlockKVCache | None
    ) -> AttentionResult:
        """Return the same result as the row engine for the new rows, and update ``cache``.

        ``weights_BTS`` has one column per token visible to the first new row, plus the new tokens.
        """
        assert cache is not None
        first = cache.position
        last = first + qkv.q_BNTH.shape[2]
        q_BNTH = qkv.q_BNTH * self.scale
        k_BKSH = cache.extend("k", qkv.k_BKTH, dim=2)
        v_BKSH = cache.extend("v", qkv.v_BKTH, dim=2)
        if last - first == 1:
            cache.reads["keys"] += k_BKSH.shape[2]
        reach = self.reach
        queries = cache.extend("q", q_BNTH, dim=2, reach=reach) if reach else q_BNTH
        chunk = RowChunk(first, last, cache.left(first), origin=last - queries.shape[2])
        with torch.autocast(q_BNTH.device.type, enabled=False):
            wide = torch.promote_types(q_BNTH.dtype, torch.float32)
            scores = _product(q_BNTH, k_BKSH.mT).to(wide)
            keys = repeat_kv(k_BKSH[:, :, chunk.origin - chunk.left :], q_BNTH.shape[1])
            add_terms_(plan, scores, queries, keys, chunk)
            soft = softmaxes_from_scores(plan, scores, chunk)
            context = _product(soft.last_BNrc.to(v_BKSH.dtype), v_BKSH)
            shown = plan.reader.read(soft.last_BNrc, chunk) if plan.reader else None
        return AttentionResult(self.projection.expand(context), soft.statistics_BNr, shown)


def _product(rows_BNrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """Return BNry; heads that share a matrix are folded into rows, so the matrix is not copied."""
    batch, heads, height, _ = rows_BNrx.shape
    grouped = rows_BNrx.reshape(batch, shared_BKxy.shape[1], -1, rows_BNrx.shape[-1])
    return (grouped @ shared_BKxy).view(batch, heads, height, -1)
