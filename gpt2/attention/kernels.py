"""Execution paths of attention behind one interface, and their selection.

sdpa     one call of torch's scaled_dot_product_attention
rows     chunks of query rows, with hand-written derivatives (``chunked.py``)
triton   one pass of our own kernels, with hand-written derivatives (``tiled.py``)
own      the kernel of the pattern itself
cached   new tokens against a KV cache, by the components of the row engine

B batch, T new tokens (rows), S visible tokens (columns), C n_embd, N heads, K key/value heads, H key
width; r rows and c columns as in the row engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from gpt2.attention.chunked import scores_factor, softmaxes_from_scores
from gpt2.attention.config import MIN_TILE_CAPABILITY, AttentionConfig, select_backend
from gpt2.attention.patterns import CustomAttention
from gpt2.attention.projections import QKV, Projection
from gpt2.attention.sdpa import DTYPES, kv_heads, sdpa_attention, selected_sdpa_kernel
from gpt2.attention.state import AttentionWeightsOptions
from gpt2.attention.tiled import (
    TileSpec,
    runs_tiles,
    tile_problem,
    tiled_attention,
    triton_launch,
)
from gpt2.kv_cache import BlockKVCache
from gpt2.model_config import ModelConfig
from lib.env.options import MachineConfig
from lib.env.ranks import current_process
from lib.errors import PreflightError, Problem

# Largest error relative to the norm, by type: rounding of inputs, weights and outputs, which may
# change the order of nearly equal weights in a top-k.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Tokens of the preflight check of the Triton kernels, if the context is longer: several tiles.
_PROBE_TOKENS = 1024


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
        inputs, launch = plan.by_part(plan.inputs()), plan.tile_launch or triton_launch
        window, scale = plan.pattern.longest_row(q_BNTH.shape[2]), q_BNTH.shape[-1] ** -0.5
        spec, alpha_N, factor_BNT = TileSpec(window, scale, dropout=plan.dropout), None, None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            for term in plan.terms:
                spec, alpha_N = term.tile_spec(spec, inputs[term])
            statistics: list[Tensor] = []
            for gate in plan.gates:
                gated = gate.tile_spec(spec)
                if not gate.scales_scores:
                    spec = gated
                    continue
                first = tiled_attention(q_BNTH, k, None, alpha_N, None, gated, launch)
                assert first.statistic_BNT is not None
                statistics.append(first.statistic_BNT)
                factor_BNT = scores_factor(plan, statistics, inputs)
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
            inputs = plan.by_part(plan.inputs())
            for term in plan.terms:
                term.add_(scores, queries, keys, chunk, inputs[term])
            soft = softmaxes_from_scores(plan, scores, chunk, inputs)
            context = _product(soft.last_BNrc.to(v_BKSH.dtype), v_BKSH)
            shown = plan.reader.read(soft.last_BNrc, chunk) if plan.reader else None
        statistics = [saved[..., 0] for saved in soft.known_BNrm]
        return AttentionResult(self.projection.expand(context), statistics, shown)


def _product(rows_BNrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """Return BNry; heads that share a matrix are folded into rows, so the matrix is not copied."""
    batch, heads, height, _ = rows_BNrx.shape
    grouped = rows_BNrx.reshape(batch, shared_BKxy.shape[1], -1, rows_BNrx.shape[-1])
    return (grouped @ shared_BKxy).view(batch, heads, height, -1)


# Preflight check: the configured attention can run on this machine.


def check_attention(model: ModelConfig, machine: MachineConfig) -> None:
    """Check that the configured attention backend is available on this device.

    Raises PreflightError if it is not. If a kernel of SDPA is named, torch is queried with tensors
    of the configured shape; no kernel runs. The Triton kernels are compared with the row engine.
    """
    options = model.attention
    options.pattern.check_kernels(model.shape, options.projection, machine)
    shows_weights = {model.mlp.reads_weights(site) for site in model.sites()}
    device = preflight_device(machine)
    # A named backend is refused below, with the GPU's capability.
    tiles = options.backend != "auto" or runs_tiles(device)
    forms = {
        select_backend(options, model.shape, shows, machine.device, tiles)
        for shows in shows_weights
    }
    if "sdpa" in forms and model.attention.backend != "auto":
        selected_sdpa_kernel(model, machine.precision, device, model.shape.dropout)
    if "triton" in forms:
        _check_tiles(model, DTYPES[machine.precision], device)


def preflight_device(machine: MachineConfig) -> torch.device:
    """Return the CPU, or the GPU of this process."""
    if machine.device == "cuda":
        return torch.device("cuda", current_process().local_rank)
    return torch.device(machine.device)


def _check_tiles(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the Triton kernels on this device with the row engine in float64.

    On random tensors, forward and backward, without dropout. With dropout, the kernels run once.
    """
    if problem := tile_problem(dtype, device):
        raise PreflightError(problem)
    if device.type == "cuda" and not runs_tiles(device):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        expected = f"compute capability {MIN_TILE_CAPABILITY}.0"
        what = f"triton: unsupported (expected {expected}, got {found})"
        raise _refusal(model, what, "gpu.unsupported")
    shape = model.shape
    tokens = min(shape.block_size, _PROBE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    heads = shape.n_head, *(kv_heads(model),) * 2
    qkv = [
        torch.randn(1, count, tokens, shape.head_dim, generator=generator).to(device, dtype)
        for count in heads
    ]

    def run(kernel: AttentionKernel, dropout: float, as_type: torch.dtype | None = None) -> Any:
        # The kernels read parameters in fp32.
        plan = probe_plan(model, tokens, device, as_type or torch.float32)
        parts = attention_pass(kernel, replace(plan, dropout=dropout), [x.to(as_type) for x in qkv])
        return [*parts[0], *parts[1]]

    def tiled() -> list[Tensor]:
        run(TiledKernel(), shape.dropout)
        return run(TiledKernel(), 0.0)

    what = f"the Triton kernels of attention on {device} ({dtype}, head dim {shape.head_dim})"
    compare_values(
        tiled,
        partial(run, ChunkedKernel(), 0.0, torch.float64),
        TOLERANCES[dtype],
        device,
        lambda problem, code: _refusal(model, f"{what} {problem}", code),
    )


def compare_values(
    kernels: Callable[[], list[Tensor]],
    exact: Callable[[], list[Tensor]],
    tolerance: float,
    device: torch.device,
    refusal: Callable[[str, str], PreflightError],
    measure: Callable[[Sequence[Tensor], Sequence[Tensor]], list[float]] | None = None,
) -> None:
    """Compare the tensors that kernels compute with those of another form in float64.

    The kernels run twice, because a race changes bits. ``measure`` returns the errors; by default
    relative to the norm of each tensor. Raises the refusal, given a problem and its code.
    """
    # The state of the generator is part of a run.
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):
            first, again = kernels(), kernels()
    except kernel_errors() as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise refusal(f"cannot run: {lines[0]}", "gpu.unsupported") from error
    if not all(map(torch.equal, first, again)):
        raise refusal("computed other bits in a second pass", "gpu.wrong-values")
    errors = (measure or relative_errors)(first, exact())
    # A NaN is not below.
    if not all(error <= tolerance for error in errors):
        what = f"differ from float64 by {max(errors):.1e} (expected at most {tolerance:.0e})"
        raise refusal(what, "gpu.wrong-values")


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a kernel that cannot be compiled or launched."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, TritonError


def attention_pass(
    kernel: AttentionKernel, plan: AttentionPlan, qkv: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs of ``kernel``, and the gradients of a random combination of them.

    Outputs are head outputs, statistics and, if they are read, weights; gradients those of q, k, v
    and of the learnable tensors that the plan gives to the kernel.
    """
    leaves = [x.clone().requires_grad_() for x in qkv]
    result = kernel(QKV(*leaves), plan, leaves[0], None)
    read = [] if result.weights_BTS is None else [result.weights_BTS]
    outputs = [result.context_BNTH, *result.statistics_BNT, *read]
    generator = torch.Generator().manual_seed(1)
    # Numbers that every type represents.
    directions = [
        torch.randn(x.shape, generator=generator).half().to(x.device, x.dtype) for x in outputs
    ]
    leaves += plan.inputs()
    gradients = list(torch.autograd.grad(outputs, leaves, directions))
    return [x.detach() for x in outputs], gradients


def relative_errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the error of each tensor relative to the norm; the error if nothing is expected."""
    pairs = zip(actual, expected, strict=True)
    norms = [(float((a.double() - e).norm()), float(e.norm())) for a, e in pairs]
    return [error / norm if norm > 1e-12 else error for error, norm in norms]


def probe_plan(
    model: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> AttentionPlan:
    """Build the components of attention to ``tokens`` tokens, with initial parameters.

    If an MLP reads weights, all of them are read, and their gradient is computed.
    """
    options, shape = model.attention, replace(model.shape, block_size=tokens)
    pattern: Any = options.pattern.build(shape, options.projection, options.positions, 0)
    terms = [term.build(shape).to(device, dtype) for term in options.terms]
    gates = [gate.build(shape).to(device, dtype) for gate in options.gates]
    reader = None
    if any(model.mlp.reads_weights(site) for site in model.sites()):
        request = AttentionWeightsOptions("none", topk=1, tau=0.0, detach=False)
        reader = AttentionWeightsTap(request, pattern)
    return AttentionPlan(pattern, terms, gates, reader, shape.dropout)


def _refusal(model: ModelConfig, what: str, code: str) -> PreflightError:
    where = f"ATTENTION_BACKEND_{model.attention.backend.upper()}"
    next_ = "type: SET=ATTENTION_BACKEND_ROWS=y"
    return PreflightError(Problem(what, where=where, next=next_, code=code))
