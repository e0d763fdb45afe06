"""Attention: one projection × one pattern × one position encoding × any score terms × any gates.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, H head dim, R latent dim.
"""

from functools import reduce
from operator import mul

import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention import GATES, PATTERNS, PROJECTIONS, TERMS
from gpt2.attention.decode import attend_cached
from gpt2.attention.forms import choose_form
from gpt2.attention.heads import Heads
from gpt2.attention.joined import engine as joined
from gpt2.attention.options import AttentionConfig
from gpt2.attention.own import OwnAttention
from gpt2.attention.rows import engine as rows
from gpt2.attention.rows.engine import RowResult
from gpt2.attention.rows.head_mean import HeadMean
from gpt2.attention.rows.plan import RowPlan
from gpt2.attention.sdpa import plain_attention
from gpt2.attention.state import AttentionView, BlockState, WeightsRequest
from gpt2.attention.statistics import row_statistics
from gpt2.cache import BlockCache
from gpt2.mechanism_statistics import Values
from gpt2.positions import POSITIONS
from gpt2.shape import Shape


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
        shape: Shape,
        options: AttentionConfig,
        request: WeightsRequest | None = None,
        block: int = 0,
    ) -> None:
        super().__init__()
        self.c_attn = PROJECTIONS.module(options.projection.name)(shape, options.projection)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)
        self.terms = nn.ModuleDict({t.name: TERMS.module(t.name)(shape, t) for t in options.terms})
        self.gates = nn.ModuleDict({g.name: GATES.module(g.name)(shape, g) for g in options.gates})
        positions = options.positions
        self.positions = POSITIONS.module(positions.name)(shape, positions)
        has_kernel = options.pattern.attends
        args = (shape, options, block) if has_kernel else (options.pattern,)
        self.pattern = PATTERNS.module(options.pattern.name)(*args)
        needs_weights = options.terms or options.gates or request
        assert not (has_kernel and needs_weights), "pattern does not expose attention weights"
        self.reader = HeadMean(request, self.pattern) if request else None
        self.options, self.shape = options, shape
        self.dropout = shape.dropout
        self.scale = shape.head_dim**-0.5
        self.reach = options.reach

    def form(self, device: str) -> str:
        """Return the backend for a whole sequence on ``device``: sdpa, rows, joined or own."""
        return choose_form(self.options, self.shape, self.reader is not None, device)

    def new_cache(self) -> BlockCache:
        """Return an empty cache for the block."""
        if isinstance(self.pattern, OwnAttention):
            return self.pattern.new_cache()
        return BlockCache(self.pattern.left)

    def forward(
        self, x_BTC: Tensor, state: BlockState, cache: BlockCache | None = None
    ) -> tuple[Tensor, AttentionView]:
        """Return the attention output, BTC, and the view of attention that the MLP may read.

        With a cache, ``x`` contains only the tokens that follow the cached ones.
        """
        if isinstance(self.pattern, OwnAttention):
            heads = self.c_attn(x_BTC, state)
            result = RowResult(self.pattern(x_BTC, heads, cache), (), None)
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
        return out_BTC, AttentionView(result.weights_BTS, heads.latent_BTR)

    def statistics(
        self, x_BTC: Tensor, state: BlockState, cache: BlockCache | None = None
    ) -> Values:
        """Return ``row_statistics``; empty for a pattern with its own kernel."""
        if isinstance(self.pattern, OwnAttention):
            return {}
        heads = self.c_attn(x_BTC, state).at(self.positions, 0)
        terms, gates = dict(self.terms.items()), dict(self.gates.items())
        return row_statistics(heads.q_BNTH, heads.k_BKTH, self._plan(0.0), terms, gates)

    def _attend(self, heads: Heads) -> RowResult:
        """Attend within a whole sequence, without a cache."""
        dropout = self.dropout if self.training else 0.0
        form = self.form(heads.q_BNTH.device.type)
        if form == "sdpa":
            context = plain_attention(heads, self.pattern, self.options.backend, dropout)
            return RowResult(context, (), None)
        attend = rows.attend if form == "rows" else joined.attend
        return attend(heads.q_BNTH, heads.k_BKTH, heads.v_BKTH, self._plan(dropout))

    def _plan(self, dropout: float) -> RowPlan:
        terms, gates = list(self.terms.values()), list(self.gates.values())
        return RowPlan(self.pattern, terms, gates, self.reader, dropout)
