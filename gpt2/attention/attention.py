"""Attention of a few new tokens to the tokens in a KV cache.

B batch, T new tokens (rows), S visible tokens (columns), N heads, K key/value heads, H key width; r
rows and c columns as in the row engine.

The components are those of the row engine: the new tokens are one chunk of rows. Components take
positions from the chunk, so missing earlier queries do not matter.
"""

from functools import reduce
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention import chunked as rows
from gpt2.attention.backend import select_backend
from gpt2.attention.chunk_parts import AttentionPlan, AttentionWeightsTap, RowChunk, repeat_kv
from gpt2.attention.chunked import AttentionResult, scores_factor, softmaxes_from_scores
from gpt2.attention.config import AttentionConfig
from gpt2.attention.flex import BranchedScores, ScoreBranch
from gpt2.attention.patterns import CustomAttention
from gpt2.attention.sdpa import sdpa_attention
from gpt2.attention.state import QKV, AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.attention.statistics import attention_statistics
from gpt2.kv_cache import BlockKVCache
from gpt2.mechanism_statistics import Statistics
from gpt2.shape import ModelShape


def attend_cached(
    heads: QKV, plan: AttentionPlan, scale: float, reach: int, cache: BlockKVCache
) -> AttentionResult:
    """Return the same result as the row engine's ``attend`` for new rows, and update ``cache``.

    ``heads`` contains the new rows only. ``scale`` multiplies q·k. ``reach`` is the number of
    earlier queries that score terms read; that many queries are cached. ``weights_BTS`` has one
    column per token visible to the first new row, plus the new tokens.
    """
    first = cache.position
    last = first + heads.q_BNTH.shape[2]
    q_BNTH = heads.q_BNTH * scale
    k_BKSH = cache.extend("k", heads.k_BKTH, dim=2)
    v_BKSH = cache.extend("v", heads.v_BKTH, dim=2)
    if last - first == 1:
        cache.reads["keys"] += k_BKSH.shape[2]
    queries = cache.extend("q", q_BNTH, dim=2, reach=reach) if reach else q_BNTH
    chunk = RowChunk(first, last, cache.left(first), origin=last - queries.shape[2])
    with torch.autocast(q_BNTH.device.type, enabled=False):
        wide = torch.promote_types(q_BNTH.dtype, torch.float32)
        scores = _product(q_BNTH, k_BKSH.mT).to(wide)
        keys = repeat_kv(k_BKSH[:, :, chunk.origin - chunk.left :], q_BNTH.shape[1])
        inputs = plan.by_part(plan.inputs())
        for term in plan.terms:
            term.add_(scores, queries, keys, chunk, inputs[term])
        soft = softmaxes_from_scores(plan, scores, chunk, inputs)
        context = _product(soft.last_BNrc.to(v_BKSH.dtype), v_BKSH)
        shown = plan.reader.read(soft.last_BNrc, chunk) if plan.reader else None
    return AttentionResult(context, [saved[..., 0] for saved in soft.known_BNrm], shown)


def _product(rows_BNrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """Return BNry; heads that share a matrix are folded into rows, so the matrix is not copied."""
    batch, heads, height, _ = rows_BNrx.shape
    grouped = rows_BNrx.reshape(batch, shared_BKxy.shape[1], -1, rows_BNrx.shape[-1])
    return (grouped @ shared_BKxy).view(batch, heads, height, -1)


# Attention with terms and gates by passes over windows, differentiated by autograd.
#
# B batch, T tokens, N heads, K key/value heads, H head dim.


# The passes compile their own kernels.
@torch.compiler.disable
def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, plan: AttentionPlan) -> AttentionResult:
    """Return the row engine's result; the plan must not use features in ``joined_lacks``."""
    assert not plan.dropout and not plan.reader, "must be rejected by choose_form"
    heads, length = q_BNTH.shape[1], q_BNTH.shape[2]
    k, v = (repeat_kv(x, heads) for x in (k_BKTH, v_BKTH))
    inputs = plan.by_part(plan.inputs())
    with torch.autocast(q_BNTH.device.type, enabled=False):
        branches = [ScoreBranch(q_BNTH, k, 0, plan.pattern.longest_row(length))]
        for term in plan.terms:
            branches = [
                b for base in branches for b in term.branches(base, q_BNTH, k, inputs[term])
            ]
        scores = BranchedScores(branches, q_BNTH.shape[-1] ** -0.5)
        context, lse_BNT = scores.attend(v)
        statistics = [gate.joined_statistic(scores, lse_BNT) for gate in plan.gates]
        factor_BNT = scores_factor(plan, statistics, inputs)
        if factor_BNT is not None:
            context, _ = scores.times(factor_BNT).attend(v)
        return AttentionResult(context.to(v.dtype), statistics, None)


# Attention: one projection × one pattern × one position encoding × any score terms × any gates.
#
# B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, H head dim, R latent dim.


class Attention(nn.Module):
    """Causal self-attention of one block.

    ``c_attn`` is the projection of any kind, ``c_proj`` the output projection into the residual
    stream. Without terms, gates or an MLP that reads attention weights, attention is one SDPA call;
    otherwise it is computed by the row engine or by joined passes (see ``forms.py``). A pattern
    with its own kernel replaces all of these. Decoding uses the components of the row engine.
    ``block`` is the index of the layer.
    """

    def __init__(
        self,
        shape: ModelShape,
        options: AttentionConfig,
        request: AttentionWeightsOptions | None = None,
        block: int = 0,
    ) -> None:
        super().__init__()
        self.c_attn = options.projection.build(shape)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)
        self.terms = nn.ModuleDict({term.name: term.build(shape) for term in options.terms})
        self.gates = nn.ModuleDict({gate.name: gate.build(shape) for gate in options.gates})
        self.positions = options.positions.build(shape)
        self.pattern = options.pattern.build(shape, options.projection, options.positions, block)
        needs_weights = options.terms or options.gates or request
        assert not (
            options.pattern.attends and needs_weights
        ), "pattern does not expose attention weights"
        self.reader = AttentionWeightsTap(request, self.pattern) if request else None
        self.options, self.shape = options, shape
        self.dropout = shape.dropout
        self.scale = shape.head_dim**-0.5
        self.reach = options.reach

    def form(self, device: str) -> str:
        """Return the backend for a whole sequence on ``device``: sdpa, rows, joined or own."""
        return select_backend(self.options, self.shape, self.reader is not None, device)

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
        if isinstance(self.pattern, CustomAttention):
            heads = self.c_attn(x_BTC, state)
            result = AttentionResult(self.pattern(x_BTC, heads, cache), (), None)
            context_BNTH = result.context_BNTH
        elif cache is None:
            heads = self.c_attn(x_BTC, state).at(self.positions, 0)
            result = self._attend(heads)
            context_BNTH = result.context_BNTH
        else:
            heads = self.c_attn.decode(x_BTC, state).at(self.positions, cache.position)
            result = attend_cached(heads, self._plan(0.0), self.scale, self.reach, cache)
            context_BNTH = self.c_attn.expand(result.context_BNTH)
        factors_BNT = [
            gate.factor(statistic_BNT, gate.inputs())
            for gate, statistic_BNT in zip(self.gates.values(), result.statistics_BNT)
            if not gate.scales_scores
        ]
        if state.head_scale_BTN is not None:
            factors_BNT.append(state.head_scale_BTN.transpose(1, 2))
        if factors_BNT:
            scaled = context_BNTH * reduce(mul, factors_BNT)[..., None]
            context_BNTH = scaled.to(context_BNTH.dtype)
        out_BTC = self.c_proj(context_BNTH.transpose(1, 2).flatten(-2))
        out_BTC = F.dropout(out_BTC, self.dropout, self.training)
        return out_BTC, AttentionOutputs(result.weights_BTS, heads.latent_BTR)

    def statistics(
        self, x_BTC: Tensor, state: BlockState, cache: BlockKVCache | None = None
    ) -> Statistics:
        """Return ``row_statistics``; empty for a pattern with its own kernel."""
        if isinstance(self.pattern, CustomAttention):
            return {}
        heads = self.c_attn(x_BTC, state).at(self.positions, 0)
        terms, gates = dict(self.terms.items()), dict(self.gates.items())
        return attention_statistics(heads.q_BNTH, heads.k_BKTH, self._plan(0.0), terms, gates)

    def _attend(self, heads: QKV) -> AttentionResult:
        """Attend within a whole sequence, without a cache."""
        dropout = self.dropout if self.training else 0.0
        form = self.form(heads.q_BNTH.device.type)
        if form == "sdpa":
            context = sdpa_attention(heads, self.pattern, self.options.backend, dropout)
            return AttentionResult(context, (), None)
        attend_heads = rows.attend if form == "rows" else attend
        return attend_heads(heads.q_BNTH, heads.k_BKTH, heads.v_BKTH, self._plan(dropout))

    def _plan(self, dropout: float) -> AttentionPlan:
        terms, gates = list(self.terms.values()), list(self.gates.values())
        return AttentionPlan(self.pattern, terms, gates, self.reader, dropout)
