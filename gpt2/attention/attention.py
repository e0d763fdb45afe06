"""Attention: one projection × any transformations of queries and keys × one pattern × one position
encoding × any score terms × any gates × a sink or none × a mix of values or none.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, K key/value heads, H head dim, R
latent dim; r the rows of a chunk, c its columns.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2.attention import rows, sdpa
from gpt2.attention.backends import choose_backend
from gpt2.attention.components import (
    CustomAttention,
    Gate,
    QueryKeyTransform,
    RowChunk,
    ScoreTerm,
    Window,
)
from gpt2.attention.config import AttentionConfig
from gpt2.attention.cross_token import RaCrossToken
from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.options import (
    AttentionSinkOptions,
    AttentionWeightsOptions,
    DenseOptions,
    FullOptions,
    GroupedOptions,
    LatentOptions,
    LearnedOptions,
    QkNormOptions,
    RaCrossTokenOptions,
    ReciprocalOptions,
    RopeOptions,
    SlidingOptions,
    ValueResidualOptions,
)
from gpt2.attention.positions import PositionEncoding, Rope
from gpt2.attention.projections import QKV, AdaptableLinear, Dense, Latent
from gpt2.attention.qk_norm import QkNorm
from gpt2.attention.reciprocal import Reciprocal
from gpt2.attention.rows import (
    AttentionPlan,
    AttentionResult,
    add_terms_,
    chunk_softmaxes,
    repeat_kv,
)
from gpt2.attention.sink import AttentionSink
from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.attention.triton import (
    TileLaunch,
    TileSpec,
    place_of,
    tiled_attention,
    triton_launch,
)
from gpt2.attention.value_residual import ValueResidual
from gpt2.kv_cache import BlockKVCache
from gpt2.mechanism_statistics import Statistics, gate_statistics
from gpt2.nsa.options import NsaOptions
from gpt2.shape import ModelShape


def _nsa(
    shape: ModelShape, pattern: NsaOptions, options: AttentionConfig, block: int
) -> CustomAttention:
    # Loaded by models with this pattern only.
    from gpt2.nsa.module import Nsa

    return Nsa(shape, pattern, options.projection, build(shape, options.positions), block)


# Module of each class of options, called with the shape and the options; a pattern also with the
# options of the attention and the index of the layer.
MODULES: dict[type[Any], Callable[..., Any]] = {
    DenseOptions: Dense,
    GroupedOptions: Dense,
    LatentOptions: Latent,
    LearnedOptions: lambda shape, options: PositionEncoding(),
    RopeOptions: Rope,
    FullOptions: lambda shape, pattern, *_: Window(pattern.width),
    SlidingOptions: lambda shape, pattern, *_: Window(pattern.width),
    NsaOptions: _nsa,
    ReciprocalOptions: Reciprocal,
    RaCrossTokenOptions: RaCrossToken,
    QkNormOptions: QkNorm,
    AttentionSinkOptions: AttentionSink,
    ValueResidualOptions: ValueResidual,
}


def build(shape: ModelShape, options: Any, *context: Any) -> Any:
    return MODULES[type(options)](shape, options, *context)


class Attention(nn.Module):
    """Causal self-attention of block ``block``; ``backend`` is the choice of ``backends.py``, made
    again if parameters move or change their dtype. Raises ConfigError if the configured one is
    unsupported.
    """

    def __init__(
        self,
        shape: ModelShape,
        options: AttentionConfig,
        request: AttentionWeightsOptions | None = None,
        block: int = 0,
    ) -> None:
        super().__init__()
        self.options, self.shape = options, shape
        self.dropout = shape.dropout
        self.c_attn = build(shape, options.projection)
        self.c_proj = AdaptableLinear(shape.n_embd, [shape.n_embd], shape.bias)
        self.terms = nn.ModuleDict({term.name: build(shape, term) for term in options.terms})
        self.gates = nn.ModuleDict({gate.name: build(shape, gate) for gate in options.gates})
        self.sinks = nn.ModuleDict({sink.name: build(shape, sink) for sink in options.sinks})
        mixes = {mix.name: build(shape, mix) for mix in options.mixes(block)}
        self.value_mixes = nn.ModuleDict(mixes)
        # The first block hands its values on.
        self.gives_values = bool(options.value_mixes) and block == 0
        modules = {each.name: build(shape, each) for each in options.transforms}
        self.transforms = nn.ModuleDict(modules)
        # A pattern with its own kernel encodes positions itself.
        positions = LearnedOptions() if options.pattern.attends else options.positions
        self.positions: PositionEncoding = build(shape, positions)
        self.pattern: Any = build(shape, options.pattern, options, block)
        if isinstance(self.pattern, CustomAttention):
            self.pattern.transforms = tuple(modules.values())
        needs_weights = options.terms or options.gates or options.sinks or request
        assert not (
            options.pattern.attends and needs_weights
        ), "pattern does not expose attention weights"
        self.reader = AttentionWeightsTap(request, self.pattern) if request else None
        self.set_execution(rows.ScoreChunks())

    def set_execution(self, chunks: rows.ScoreChunks, launch: TileLaunch | None = None) -> None:
        """Use these chunks and this launch of Triton kernels from the next forward pass on."""
        self.score_chunks, self.tile_launch = chunks, launch
        device = next(self.c_proj.parameters()).device
        # A launch that is given stands for a GPU.
        place = "gpu" if launch else place_of(device, self.c_proj.dtype)
        shows_weights = self.reader is not None
        self.backend = choose_backend(self.options, self.shape, shows_weights, place)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.set_execution(self.score_chunks, self.tile_launch)
        return self

    def new_cache(self) -> BlockKVCache:
        if isinstance(self.pattern, CustomAttention):
            return self.pattern.new_cache()
        return BlockKVCache(self.pattern.left)

    def forward(
        self, x_BTC: Tensor, state: BlockState, cache: BlockKVCache | None = None
    ) -> tuple[Tensor, AttentionOutputs]:
        """Return the output, BTC, and what the MLP reads; with a cache, ``x`` are new tokens."""
        # Absorbed keys and values have no heads that could be transformed or mixed.
        heads = self.transforms or self.options.value_mixes
        absorbs = cache is not None and not heads
        qkv = self._heads(x_BTC, state, cache.position if cache else 0, absorbs)
        plan = self._plan(self.dropout if self.training else 0.0)
        if isinstance(self.pattern, CustomAttention):
            result = AttentionResult(self.pattern(x_BTC, qkv, cache), (), None)
        elif cache is None:
            result = BACKENDS[self.backend](qkv, plan)
        else:
            result = rows.attend_cached(qkv, plan, cache, self.shape.head_dim**-0.5)
            if absorbs:
                context_BNTH = self.c_attn.expand(result.context_BNTH)
                result = replace(result, context_BNTH=context_BNTH)
        context_BNTH = self._scaled(result, state)
        out_BTC = self.c_proj(context_BNTH.transpose(1, 2).flatten(-2))
        out_BTC = F.dropout(out_BTC, self.dropout, self.training)
        values_BKTH = qkv.v_BKTH if self.gives_values else state.values_BKTH
        return out_BTC, AttentionOutputs(result.weights_BTS, qkv.latent_BTR, values_BKTH)

    def statistics(
        self, x_BTC: Tensor, state: BlockState, cache: BlockKVCache | None = None
    ) -> Statistics:
        """Return means over all rows of the weights p that multiply V, before dropout.

        The row engine computes the rows in chunks for every backend, so no B×N×T×T tensor is
        created and the statistics do not depend on the backend. Empty for a pattern with its own
        kernel.

        attention/entropy   −Σ_j p_ij ln p_ij, nats
        attention_sink/share  1 − Σ_j p_ij, the weight of the sink
        <term>/share        Σ_j p_ij |r_ij| / (|r_ij| + |s_ij|): r the term's addition to the score s
        <term>/moved        ½ Σ_j |p_ij − p⁰_ij|: p⁰ the weights without the term
        <gate>/gate_*       see ``gate_statistics``
        """
        if self.options.pattern.attends:
            return {}
        qkv, plan = self._heads(x_BTC, state, 0, absorbs=False), self._plan(0.0)
        sums: dict[str, list[Tensor]] = defaultdict(list)
        statistics: dict[str, list[Tensor]] = defaultdict(list)
        with torch.autocast(x_BTC.device.type, enabled=False):
            q_BNTH = qkv.q_BNTH * self.shape.head_dim**-0.5
            k_BNTH = repeat_kv(qkv.k_BKTH, self.shape.n_head)
            for chunk in plan.chunks(q_BNTH):
                soft, _ = chunk_softmaxes(plan, q_BNTH, k_BNTH, chunk)
                p_BNrc = soft.last_BNrc
                sums["attention/entropy"].append(torch.special.entr(p_BNrc).sum())
                if soft.last_sink_BNr is not None:
                    sums["attention_sink/share"].append(soft.last_sink_BNr.sum())
                for name, term in zip(self.terms, plan.terms, strict=True):
                    others = replace(plan, terms=[each for each in plan.terms if each is not term])
                    without, _ = chunk_softmaxes(others, q_BNTH, k_BNTH, chunk)
                    added_BNrc = torch.zeros_like(p_BNrc)
                    add_terms_(replace(plan, terms=[term]), added_BNrc, q_BNTH, k_BNTH, chunk)
                    added_BNrc.abs_()
                    # Masked pairs have a huge score and weight 0, so their share is 0.
                    both_BNrc = added_BNrc + without.scores_BNrc.abs()
                    tiny = torch.finfo(both_BNrc.dtype).tiny
                    sums[f"{name}/share"].append(
                        (p_BNrc * added_BNrc / both_BNrc.clamp_min(tiny)).sum()
                    )
                    sums[f"{name}/moved"].append((p_BNrc - without.last_BNrc).abs().sum() / 2)
                for name, statistic_BNr in zip(self.gates, soft.statistics_BNr, strict=True):
                    statistics[name].append(statistic_BNr)
            rows = q_BNTH.shape[:3].numel()
            means = {name: torch.stack(each).double().sum() / rows for name, each in sums.items()}
            for name, gate in zip(self.gates, plan.gates, strict=True):
                gate_BNT = gate.gate(torch.cat(statistics[name], 2), list(gate.parameters()))
                means |= gate_statistics(name, gate_BNT)
        return means

    def _heads(self, x_BTC: Tensor, state: BlockState, first: int, absorbs: bool) -> QKV:
        """Return the heads of tokens from ``first`` on; ``absorbs``: in the form that is cached."""
        qkv: QKV = self.c_attn.decode(x_BTC, state) if absorbs else self.c_attn(x_BTC, state)
        for transform in cast(list[QueryKeyTransform], list(self.transforms.values())):
            q_BNTH, k_BKTH = transform.queries(qkv.q_BNTH), transform.keys(qkv.k_BKTH)
            qkv = replace(qkv, q_BNTH=q_BNTH, k_BKTH=k_BKTH)
        for mix in self.value_mixes.values():
            qkv = replace(qkv, v_BKTH=mix(qkv.v_BKTH, state.values_BKTH))
        heads = qkv.q_BNTH, qkv.k_BKTH
        q_BNTH, k_BKTH = self.positions.encode_all(heads, first, rotation=state.rotation)
        return replace(qkv, q_BNTH=q_BNTH, k_BKTH=k_BKTH)

    def _plan(self, dropout: float) -> AttentionPlan:
        terms = cast(list[ScoreTerm], list(self.terms.values()))
        gates = cast(list[Gate], list(self.gates.values()))
        kernels = self.score_chunks, self.tile_launch, self.options.backend
        sink = cast(AttentionSink | None, next(iter(self.sinks.values()), None))
        return AttentionPlan(self.pattern, terms, gates, self.reader, dropout, *kernels, sink)

    def _scaled(self, result: AttentionResult, state: BlockState) -> Tensor:
        """Return the head outputs, multiplied by the gates outside the kernel and by ``state``."""
        context_BNTH = result.context_BNTH
        gates = cast(list[Gate], list(self.gates.values()))
        factors_BNT = [
            gate.factor(statistic_BNT, list(gate.parameters()))
            for gate, statistic_BNT in zip(gates, result.statistics_BNT, strict=True)
            if not gate.scales_scores
        ]
        if state.head_scale_BTN is not None:
            factors_BNT.append(state.head_scale_BTN.transpose(1, 2))
        if not factors_BNT:
            return context_BNTH
        return (context_BNTH * reduce(mul, factors_BNT)[..., None]).to(context_BNTH.dtype)


# Attends within a whole sequence, whose heads are position-encoded.
AttentionBackend = Callable[[QKV, AttentionPlan], AttentionResult]


def attend_sdpa(qkv: QKV, plan: AttentionPlan) -> AttentionResult:
    mask = plan.pattern.sdpa_arguments(qkv.q_BNTH.shape[2], qkv.q_BNTH.device)
    context_BNTH = sdpa.attend(qkv, mask, plan.sdpa_kernel, plan.dropout, plan.sink_N)
    return AttentionResult(context_BNTH, (), None)


def attend_rows(qkv: QKV, plan: AttentionPlan) -> AttentionResult:
    return rows.attend(qkv.q_BNTH, qkv.k_BKTH, qkv.v_BKTH, plan)


def attend_tiles(qkv: QKV, plan: AttentionPlan) -> AttentionResult:
    """Attend by Triton kernels; raises RunError if they cannot run."""
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
            first = tiled_attention(q_BNTH, k, None, alpha_N, None, plan.sink_N, gated, launch)
            assert first.statistic_BNT is not None
            statistics.append(first.statistic_BNT)
            factor_BNT = gate.factor(first.statistic_BNT, list(gate.parameters()))
        learns = plan.reader is not None and not plan.reader.request.detach
        context, statistic, mean_BTS = tiled_attention(
            *(q_BNTH, k, v, alpha_N, factor_BNT, plan.sink_N, spec, launch),
            *(plan.reader is not None, learns),
        )
    weights = None
    if plan.reader:
        (weights,) = _SelectedWeights.apply(mean_BTS, plan.reader, q_BNTH.dtype)
    if statistic is not None:
        statistics.append(statistic)
    assert context is not None
    return AttentionResult(context, statistics, weights)


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


BACKENDS: Mapping[str, AttentionBackend] = {
    "sdpa": attend_sdpa,
    "rows": attend_rows,
    "triton": attend_tiles,
}
