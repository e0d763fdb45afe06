"""Attention: one projection × one pattern × one position encoding × any score terms × any gates.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, K key/value heads, H head dim, R
latent dim; r the rows of a chunk, c its columns.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.chunk_parts import (
    AttentionPlan,
    AttentionResult,
    AttentionWeightsTap,
    Gate,
    Pattern,
    RowChunk,
    ScoreTerm,
    repeat_kv,
)
from gpt2.attention.chunked import ChunkSoftmaxes, add_terms_, chunk_softmaxes
from gpt2.attention.components import build, build_pattern
from gpt2.attention.config import AttentionConfig, select_backend
from gpt2.attention.kernels import build_kernels
from gpt2.attention.options import LearnedOptions
from gpt2.attention.patterns import CustomAttention
from gpt2.attention.positions import PositionEncoding
from gpt2.attention.state import AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.execution import DEFAULT_EXECUTION, Execution
from gpt2.kv_cache import BlockKVCache
from gpt2.mechanism_statistics import Statistics, gate_statistics
from gpt2.shape import ModelShape


class Attention(nn.Module):
    """Causal self-attention of one block.

    ``c_attn`` is the projection of any kind, ``c_proj`` the output projection into the residual
    stream. Without terms, gates or an MLP that reads attention weights, attention is one SDPA call;
    the other execution paths are listed in ``kernels.py``. ``block`` is the index of the layer.
    ``execution`` may be changed between forward passes.
    """

    def __init__(
        self,
        shape: ModelShape,
        options: AttentionConfig,
        request: AttentionWeightsOptions | None = None,
        block: int = 0,
        execution: Execution = DEFAULT_EXECUTION,
    ) -> None:
        super().__init__()
        self.options, self.shape = options, shape
        self.dropout, self.execution = shape.dropout, execution
        self.c_attn = build(shape, options.projection)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)
        self.terms = nn.ModuleDict({term.name: build(shape, term) for term in options.terms})
        self.gates = nn.ModuleDict({gate.name: build(shape, gate) for gate in options.gates})
        # A pattern with its own kernel encodes positions itself.
        positions = LearnedOptions() if options.pattern.attends else options.positions
        self.positions: PositionEncoding = build(shape, positions)
        self.pattern = build_pattern(shape, options, block)
        needs_weights = options.terms or options.gates or request
        assert not (
            options.pattern.attends and needs_weights
        ), "pattern does not expose attention weights"
        self.reader = AttentionWeightsTap(request, self._visible) if request else None
        backend = self.backend("cpu")
        if options.backend == "auto" and self.backend("cuda") == "triton":
            backend = "triton or rows"
        scale = shape.head_dim**-0.5
        self.kernels = build_kernels(backend, options, scale, self.c_attn, self.pattern)

    @property
    def _visible(self) -> Pattern:
        """Return the pattern for kernels that read one; the pattern's own kernel reads no plan."""
        return cast(Pattern, self.pattern)

    def backend(self, device: str, tiles: bool = True) -> str:
        """Return the backend for a whole sequence on ``device``: sdpa, rows, triton or own.

        ``tiles`` is true if the GPU can run the Triton kernels. Raises ConfigError if the
        configured backend does not support the components there.
        """
        return select_backend(self.options, self.shape, self.reader is not None, device, tiles)

    def new_cache(self) -> BlockKVCache:
        """Return an empty cache for the block."""
        if isinstance(self.pattern, CustomAttention):
            return self.pattern.new_cache()
        return BlockKVCache(self.pattern.left)

    def forward(
        self, x_BTC: Tensor, state: BlockState, cache: BlockKVCache | None = None
    ) -> tuple[Tensor, AttentionOutputs]:
        """Return the attention output, BTC, and the view of attention that the MLP may read.

        With a cache, ``x`` contains only the tokens that follow the cached ones.
        """
        if cache is None:
            first, qkv, kernel = 0, self.c_attn(x_BTC, state), self.kernels.sequence
        else:
            first, kernel = cache.position, self.kernels.cached
            qkv = self.c_attn.decode(x_BTC, state)
        qkv = qkv.with_positions(self.positions, first, state.rotation)
        dropout = self.dropout if self.training else 0.0
        result = kernel(qkv, self._plan(dropout), x_BTC, cache)
        context_BNTH = self._scaled(result, state)
        out_BTC = self.c_proj(context_BNTH.transpose(1, 2).flatten(-2))
        out_BTC = F.dropout(out_BTC, self.dropout, self.training)
        return out_BTC, AttentionOutputs(result.weights_BTS, qkv.latent_BTR)

    def statistics(
        self, x_BTC: Tensor, state: BlockState, cache: BlockKVCache | None = None
    ) -> Statistics:
        """Return ``attention_statistics``; empty for a pattern with its own kernel."""
        if self.options.pattern.attends:
            return {}
        qkv = self.c_attn(x_BTC, state).with_positions(self.positions, 0)
        plan = self._plan(0.0)
        terms = dict(zip(self.terms, plan.terms, strict=True))
        gates = dict(zip(self.gates, plan.gates, strict=True))
        return attention_statistics(qkv.q_BNTH, qkv.k_BKTH, plan, terms, gates)

    def _plan(self, dropout: float) -> AttentionPlan:
        terms = cast(list[ScoreTerm], list(self.terms.values()))
        gates = cast(list[Gate], list(self.gates.values()))
        execution = self.execution
        kernels = execution.score_chunks, execution.tile_launch
        return AttentionPlan(self._visible, terms, gates, self.reader, dropout, *kernels)

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


def attention_statistics(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    plan: AttentionPlan,
    terms: Mapping[str, ScoreTerm],
    gates: Mapping[str, Gate],
) -> dict[str, Tensor]:
    """Return means over all rows of the weights p that multiply V, before dropout.

    The row engine computes the rows in chunks for every backend, so no B×N×T×T tensor is created
    and the statistics do not depend on the backend.

    attention/entropy   −Σ_j p_ij ln p_ij, nats
    <term>/share        Σ_j p_ij |r_ij| / (|r_ij| + |s_ij|): r the term's addition to the score s
    <term>/moved        ½ Σ_j |p_ij − p⁰_ij|: p⁰ the weights without the term
    <gate>/gate_*       see ``gate_statistics``
    """
    sums: dict[str, list[Tensor]] = defaultdict(list)
    statistics: dict[str, list[Tensor]] = defaultdict(list)
    with torch.autocast(q_BNTH.device.type, enabled=False):
        q_BNTH = q_BNTH * q_BNTH.shape[-1] ** -0.5
        k_BNTH = repeat_kv(k_BKTH, q_BNTH.shape[1])
        for chunk in plan.chunks(q_BNTH):
            soft = chunk_softmaxes(plan, q_BNTH, k_BNTH, chunk)
            sums["attention/entropy"].append(torch.special.entr(soft.last_BNrc).sum())
            for name, term in terms.items():
                for statistic, total in _term_sums(term, plan, q_BNTH, k_BNTH, chunk, soft):
                    sums[f"{name}/{statistic}"].append(total)
            for name, statistic_BNr in zip(gates, soft.statistics_BNr, strict=True):
                statistics[name].append(statistic_BNr)
        rows = q_BNTH.shape[:3].numel()
        means = {name: torch.stack(each).double().sum() / rows for name, each in sums.items()}
        for name, gate in gates.items():
            gate_BNT = gate.gate(torch.cat(statistics[name], 2), list(gate.parameters()))
            means |= gate_statistics(name, gate_BNT)
    return means


def _term_sums(
    term: ScoreTerm,
    plan: AttentionPlan,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    chunk: RowChunk,
    soft: ChunkSoftmaxes,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the statistics of a term, summed over the rows of a chunk."""
    others = replace(plan, terms=[each for each in plan.terms if each is not term])
    without = chunk_softmaxes(others, q_BNTH, k_BNTH, chunk)
    weights_BNrc = soft.last_BNrc
    added_BNrc = torch.zeros_like(weights_BNrc)
    add_terms_(replace(plan, terms=[term]), added_BNrc, q_BNTH, k_BNTH, chunk)
    added_BNrc.abs_()
    # Masked pairs have a huge score and weight 0, so their share is 0.
    both_BNrc = added_BNrc + without.scores_BNrc.abs()
    tiny = torch.finfo(both_BNrc.dtype).tiny
    yield "share", (weights_BNrc * added_BNrc / both_BNrc.clamp_min(tiny)).sum()
    yield "moved", (weights_BNrc - without.last_BNrc).abs().sum() / 2
