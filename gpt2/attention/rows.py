"""Row engine: attention by chunks of query rows, with score terms, gates and exposed weights.

The scores of a chunk are one matrix product; all other operations work on that block, which fits
into the cache. Only the inputs are saved; backward processes the same chunks and recomputes the
scores, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). No tensor of B·N·T·T elements is
created. Products and softmaxes are differentiated here, terms, statistics and factors by autograd,
whose graph ends with the chunk.

B batch, T tokens (queries), S tokens (keys), N heads, K key/value heads, H head dim; r the rows of
a chunk, c its columns. dx is the gradient of the loss with respect to x.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpt2.attention.components import Gate, QueriesKeys, RowChunk, ScoreTerm, Window
from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.projections import QKV
from gpt2.attention.sink import AttentionSink, softmax_beside
from gpt2.attention.triton import TileLaunch
from gpt2.kv_cache import BlockKVCache

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
        """Yield the rows in chunks; ``first_column`` is the first one that a row sees."""
        batch, heads, length, _ = q_BNTH.shape
        elements = self.cpu_elements if q_BNTH.device.type == "cpu" else self.gpu_elements
        highest = max(self.min_rows, elements // (batch * heads * length))
        height = math.ceil(length / math.ceil(length / highest))
        for first in range(0, length, height):
            yield RowChunk(first, min(first + height, length), first_column(first))


@dataclass(frozen=True)
class AttentionPlan:
    """Components of one attention call, dropout on its weights, and the kernels of its backend."""

    pattern: Window
    terms: Sequence[ScoreTerm] = ()
    gates: Sequence[Gate] = ()
    reader: AttentionWeightsTap | None = None
    dropout: float = 0.0
    # torch 2.11 cannot compile a default that is an instance.
    score_chunks: ScoreChunks = field(default_factory=ScoreChunks)
    tile_launch: TileLaunch | None = None
    # Kernel of torch: flash, efficient or math; any other name leaves the choice to torch.
    sdpa_kernel: str = "auto"
    sink: AttentionSink | None = None

    @property
    def sink_N(self) -> Tensor | None:
        return self.sink.logit if self.sink else None

    def parts(self) -> list[nn.Module]:
        """Return the components with inputs of the row engine: all but gates of the head output."""
        gates = (gate for gate in self.gates if gate.scales_scores)
        return [*self.terms, *gates, *([self.sink] if self.sink else [])]

    def inputs(self) -> list[Tensor]:
        return [parameter for part in self.parts() for parameter in part.parameters()]

    def chunks(self, q_BNTH: Tensor) -> Iterator[RowChunk]:
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
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def repeat_kv(x_BKTH: Tensor, heads: int) -> Tensor:
    shared = heads // x_BKTH.shape[1]
    return x_BKTH if shared == 1 else x_BKTH.repeat_interleave(shared, dim=1)


@dataclass(frozen=True)
class TermGraph:
    """Graph of a term's scores in one chunk, which were added to the last ``columns``."""

    term: ScoreTerm
    tokens: slice
    # q and k of the rows, q and k of ``tokens``, and the parameters of the term.
    leaves: Sequence[Tensor]
    columns: int
    # In place of the scores, so that they are freed.
    edge: GradientEdge


@dataclass(frozen=True)
class ChunkSoftmaxes:
    """Results of a chunk, from its scores to the weights that multiply V.

    With a graph, its leaves are ``first`` and ``inputs``, the parameters of gates that scale
    scores.
    """

    scores_BNrc: Tensor
    first_BNrc: Tensor
    statistics_BNr: Sequence[Tensor]
    inputs: Mapping[Gate, Sequence[Tensor]]
    # Product of the gates that scale scores; None without such a gate (the first softmax is last).
    factor_BNr: Tensor | None
    last_BNrc: Tensor
    # Weights of the sink in both; None without one.
    first_sink_BNr: Tensor | None
    last_sink_BNr: Tensor | None


def chunk_softmaxes(
    plan: AttentionPlan,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    chunk: RowChunk,
    graph: bool = False,
    kept: dict[Gate, Tensor] | None = None,
) -> tuple[ChunkSoftmaxes, list[TermGraph]]:
    """Compute the scores of a chunk, the softmaxes derived from them, and the graphs of terms."""
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    scores_BNrc = (q_BNTH[:, :, chunk.rows] @ k_BNTH[:, :, chunk.columns].mT).to(wide)
    terms = add_terms_(plan, scores_BNrc, q_BNTH, k_BNTH, chunk, graph)
    return softmaxes_from_scores(plan, scores_BNrc, chunk, graph, kept), terms


def add_terms_(
    plan: AttentionPlan,
    scores_BNrc: Tensor,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    chunk: RowChunk,
    graph: bool = False,
) -> list[TermGraph]:
    """Add the score terms in place; return the graph of each that has a gradient, if required."""
    graphs = []
    for term in plan.terms:
        tokens = chunk.slice(max(chunk.left, chunk.first - term.reach))
        leaves = [x[:, :, each] for each in (chunk.rows, tokens) for x in (q_BNTH, k_BNTH)]
        leaves += term.parameters()
        if graph:
            leaves = _leaves(leaves)
        with torch.set_grad_enabled(graph):
            rows, band = QueriesKeys(*leaves[:2]), QueriesKeys(*leaves[2:4])
            added = term.scores(rows, band, chunk, leaves[4:])
            columns = added.shape[-1]
            scores_BNrb = scores_BNrc[..., -columns:]
            added_BNrb = added.expand_as(scores_BNrb)
        scores_BNrb.add_(added_BNrb.detach())
        if added_BNrb.requires_grad:
            edge = get_gradient_edge(added_BNrb)
            graphs.append(TermGraph(term, tokens, leaves, columns, edge))
    return graphs


def softmaxes_from_scores(
    plan: AttentionPlan,
    scores_BNrc: Tensor,
    chunk: RowChunk,
    graph: bool = False,
    kept: dict[Gate, Tensor] | None = None,
) -> ChunkSoftmaxes:
    """Compute first softmax, statistics, factor and last softmax; scores are masked in place.

    ``kept`` holds what gates compute in forward and would compute again in backward.
    """
    kept = {} if kept is None else kept
    plan.pattern.hide_(scores_BNrc, chunk)
    first_BNrc, first_sink_BNr = softmax_beside(scores_BNrc, plan.sink)
    gates = [gate for gate in plan.gates if gate.scales_scores]
    inputs: dict[Gate, list[Tensor]] = {gate: list(gate.parameters()) for gate in gates}
    if graph:
        first_BNrc.requires_grad_()
        inputs = {gate: _leaves(inputs[gate]) for gate in gates}
    factor_BNr: Tensor | None = None
    with torch.set_grad_enabled(graph):
        statistics_BNr = [
            gate.statistic(first_BNrc, scores_BNrc, chunk, kept, first_sink_BNr)
            for gate in plan.gates
        ]
        for gate, statistic_BNr in zip(plan.gates, statistics_BNr, strict=True):
            if gate.scales_scores:
                factor = gate.factor(statistic_BNr, inputs[gate])
                factor_BNr = factor if factor_BNr is None else factor_BNr * factor
    last_BNrc, last_sink_BNr = first_BNrc, first_sink_BNr
    if factor_BNr is not None:
        scaled_BNrc = scores_BNrc * factor_BNr.detach()[..., None]
        # A small factor must not unmask hidden pairs.
        plan.pattern.hide_(scaled_BNrc, chunk)
        last_BNrc, last_sink_BNr = softmax_beside(scaled_BNrc, plan.sink)
    return ChunkSoftmaxes(
        *(scores_BNrc, first_BNrc, statistics_BNr, inputs, factor_BNr, last_BNrc),
        *(first_sink_BNr, last_sink_BNr),
    )


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


class ChunkedBackward:
    """Accumulator of the gradients of q, k, v and the parameters of components."""

    def __init__(self, plan: AttentionPlan, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor) -> None:
        self.plan = plan
        self.kv_heads = k_BKTH.shape[1]
        self.q = q_BNTH
        self.k, self.v = (repeat_kv(x, q_BNTH.shape[1]) for x in (k_BKTH, v_BKTH))
        # Accumulate over chunks in fp32 or wider, even if the products are not.
        wide = torch.promote_types(q_BNTH.dtype, torch.float32)
        self.dq, self.dk, self.dv = (
            torch.zeros_like(x, dtype=wide) for x in (self.q, self.k, self.v)
        )
        self.dinputs = {
            part: [torch.zeros_like(x) for x in part.parameters()] for part in plan.parts()
        }

    def run(
        self,
        dcontext_BNTH: Tensor,
        dshown_BTS: Tensor | None,
        dstatistics_BNT: Sequence[Tensor | None],
        generator: Generator | None,
        kept: Sequence[dict[Gate, Tensor]],
    ) -> list[Tensor]:
        """Process all chunks; return the gradients of q, k, v and the parameters, in their dtypes.

        ``generator`` is in the state it had before forward, ``kept`` forward's, by chunk.
        """
        reached = [
            (gate, d)
            for gate, d in zip(self.plan.gates, dstatistics_BNT, strict=True)
            if gate.scales_scores or d is not None
        ]
        plan = replace(self.plan, gates=[gate for gate, _ in reached])
        for chunk, known in zip(plan.chunks(self.q), kept, strict=True):
            soft, terms = chunk_softmaxes(plan, self.q, self.k, chunk, True, known)
            # Through dropout(weights) @ v.
            dcontext = dcontext_BNTH[:, :, chunk.rows].contiguous()
            mask = self.plan.drop(soft.last_BNrc, generator)
            weights = soft.last_BNrc if mask is None else soft.last_BNrc * mask
            self.dv[:, :, chunk.columns].add_(weights.to(dcontext.dtype).mT @ dcontext)
            dlast = (dcontext @ self.v[:, :, chunk.columns].mT).to(soft.last_BNrc.dtype)
            if mask is not None:
                dlast.mul_(mask)
            if dshown_BTS is not None and plan.reader:
                drows = dshown_BTS[:, chunk.rows, chunk.columns]
                dlast += plan.reader.backward(drows, soft.last_BNrc, chunk)
            dstatistics = [d if d is None else d[:, :, chunk.rows] for _, d in reached]
            self._scores(self._softmaxes(soft, dlast, dstatistics), terms, chunk)
        dk, dv = (
            x.unflatten(1, (self.kv_heads, -1)).sum(2) if self.kv_heads < x.shape[1] else x
            for x in (self.dk, self.dv)
        )
        dqkv = [x.to(self.q.dtype) for x in (self.dq, dk, dv)]
        return dqkv + [d for part in self.dinputs.values() for d in part]

    def _softmaxes(
        self, soft: ChunkSoftmaxes, dlast_BNrc: Tensor, dstatistics_BNr: Sequence[Tensor | None]
    ) -> Tensor:
        """Backpropagate through softmaxes, factor and statistics; return dscores."""
        if soft.factor_BNr is None:
            dgates = self._gates(soft, soft.statistics_BNr, dstatistics_BNr)
            dfirst = dlast_BNrc if dgates is None else dlast_BNrc.add_(dgates)
            return self._softmax(soft.first_BNrc, dfirst, soft.first_sink_BNr)
        dscaled = self._softmax(soft.last_BNrc, dlast_BNrc, soft.last_sink_BNr)
        dfactor_BNr = torch.linalg.vecdot(dscaled, soft.scores_BNrc)
        roots = [*soft.statistics_BNr, soft.factor_BNr]
        dgates = self._gates(soft, roots, [*dstatistics_BNr, dfactor_BNr])
        dscaled *= soft.factor_BNr.detach()[..., None]
        if dgates is None:
            return dscaled
        return self._softmax(soft.first_BNrc, dgates, soft.first_sink_BNr).add_(dscaled)

    def _softmax(
        self, weights_BNrc: Tensor, dweights_BNrc: Tensor, sink_BNr: Tensor | None
    ) -> Tensor:
        """Backpropagate through a softmax; return the gradient of its scores."""
        mean_BNr = torch.linalg.vecdot(weights_BNrc, dweights_BNrc)
        if self.plan.sink and sink_BNr is not None:
            # The weight of the sink itself has no gradient.
            self.dinputs[self.plan.sink][0] -= (sink_BNr * mean_BNr).sum((0, 2))
        return dweights_BNrc.sub_(mean_BNr[..., None]).mul_(weights_BNrc)

    def _gates(
        self, soft: ChunkSoftmaxes, roots: Sequence[Tensor], droots: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Backpropagate statistics and factor; return the gradient of the first softmax."""
        pairs = zip(roots, droots, strict=True)
        reached = [(x, dx) for x, dx in pairs if dx is not None and x.requires_grad]
        if not reached:
            return None
        leaves = [soft.first_BNrc, *(x for tensors in soft.inputs.values() for x in tensors)]
        dfirst, *dinputs = torch.autograd.grad(
            [x for x, _ in reached], leaves, [dx for _, dx in reached], allow_unused=True
        )
        _add_([total for gate in soft.inputs for total in self.dinputs[gate]], dinputs)
        return dfirst

    def _scores(self, dscores_BNrc: Tensor, terms: Sequence[TermGraph], chunk: RowChunk) -> None:
        for graph in terms:
            dadded_BNrb = dscores_BNrc[..., -graph.columns :]
            gradients = torch.autograd.grad(
                [graph.edge], graph.leaves, [dadded_BNrb], allow_unused=True
            )
            totals = [
                x[:, :, each] for each in (chunk.rows, graph.tokens) for x in (self.dq, self.dk)
            ]
            _add_([*totals, *self.dinputs[graph.term]], gradients)
        low = dscores_BNrc.to(self.q.dtype)
        self.dq[:, :, chunk.rows].add_(low @ self.k[:, :, chunk.columns])
        self.dk[:, :, chunk.columns].add_(low.mT @ self.q[:, :, chunk.rows])


def _add_(totals: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient)


@torch.compiler.disable
def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, plan: AttentionPlan) -> AttentionResult:
    """Compute causal attention; products are in the dtype of q, softmaxes in fp32 or wider."""
    scaled = (q_BNTH * q_BNTH.shape[-1] ** -0.5).contiguous()
    context, weights, *statistics = _RowAttention.apply(
        plan, scaled, k_BKTH.contiguous(), v_BKTH.contiguous(), *plan.inputs()
    )
    return AttentionResult(context, statistics, weights)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: AttentionPlan,
        q_BNTH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.kept, device = plan, [], q_BNTH.device
        # Save the generator state, so that backward draws the same dropout masks.
        generator = default_generator(device) if plan.dropout else None
        ctx.generator = generator and generator.clone_state()
        batch, heads, length, width = q_BNTH.shape
        k, v = (repeat_kv(x, heads) for x in (k_BKTH, v_BKTH))
        # Memory layout B, T, N, H: the output projection reads the tensor without a copy.
        context = q_BNTH.new_empty(batch, length, heads, width).transpose(1, 2)
        shown = q_BNTH.new_zeros(batch, length, length) if plan.reader else None
        statistics: list[list[Tensor]] = [[] for _ in plan.gates]
        with torch.autocast(device.type, enabled=False):
            for chunk in plan.chunks(q_BNTH):
                ctx.kept.append({})
                soft, _ = chunk_softmaxes(plan, q_BNTH, k, chunk, kept=ctx.kept[-1])
                mask = plan.drop(soft.last_BNrc, generator)
                weights = soft.last_BNrc if mask is None else soft.last_BNrc * mask
                context[:, :, chunk.rows] = weights.to(v.dtype) @ v[:, :, chunk.columns]
                if plan.reader and shown is not None:
                    shown[:, chunk.rows, chunk.columns] = plan.reader.read(soft.last_BNrc, chunk)
                for chunks, values in zip(statistics, soft.statistics_BNr, strict=True):
                    chunks.append(values)
        # Inputs are saved so that torch reports a change between forward and backward.
        ctx.save_for_backward(q_BNTH, k_BKTH, v_BKTH, *inputs)
        ctx.set_materialize_grads(False)
        if plan.reader and plan.reader.request.detach:
            ctx.mark_non_differentiable(shown)
        return context, shown, *(torch.cat(chunks, dim=2) for chunks in statistics)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        dcontext_BNTH: Tensor | None,
        dshown_BTS: Tensor | None,
        *dstatistics_BNT: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        dcontext = torch.zeros_like(q) if dcontext_BNTH is None else dcontext_BNTH
        with torch.autocast(q.device.type, enabled=False):
            walk = ChunkedBackward(ctx.plan, q, k, v)
            generator = ctx.generator and ctx.generator.clone_state()
            return None, *walk.run(dcontext, dshown_BTS, dstatistics_BNT, generator, ctx.kept)


def attend_cached(
    qkv: QKV, plan: AttentionPlan, cache: BlockKVCache, scale: float
) -> AttentionResult:
    """Compute attention of new tokens, one chunk of rows, to the tokens of ``cache``; append the
    new ones.

    Components take positions from the chunk; queries that terms reach are cached. ``scale``
    multiplies q·k. ``weights_BTS`` has a column per token visible to the first new row, plus the
    new tokens.
    """
    first = cache.position
    last = first + qkv.q_BNTH.shape[2]
    q_BNTH = qkv.q_BNTH * scale
    k_BKSH = cache.extend("k", qkv.k_BKTH, dim=2)
    v_BKSH = cache.extend("v", qkv.v_BKTH, dim=2)
    reach = max((term.reach for term in plan.terms), default=0)
    queries = cache.extend("q", q_BNTH, dim=2, reach=reach) if reach else q_BNTH
    chunk = RowChunk(first, last, cache.left(first), origin=last - queries.shape[2])
    with torch.autocast(q_BNTH.device.type, enabled=False):
        wide = torch.promote_types(q_BNTH.dtype, torch.float32)
        scores = _shared_product(q_BNTH, k_BKSH.mT).to(wide)
        keys = repeat_kv(k_BKSH[:, :, chunk.origin - chunk.left :], q_BNTH.shape[1])
        add_terms_(plan, scores, queries, keys, chunk)
        soft = softmaxes_from_scores(plan, scores, chunk)
        context = _shared_product(soft.last_BNrc.to(v_BKSH.dtype), v_BKSH)
        shown = plan.reader.read(soft.last_BNrc, chunk) if plan.reader else None
    return AttentionResult(context, soft.statistics_BNr, shown)


def _shared_product(rows_BNrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """Return BNry; heads that share a matrix are folded into rows, so the matrix is not copied."""
    batch, heads, height, _ = rows_BNrx.shape
    grouped = rows_BNrx.reshape(batch, shared_BKxy.shape[1], -1, rows_BNrx.shape[-1])
    return (grouped @ shared_BKxy).view(batch, heads, height, -1)
