"""Comparison of a GPU's kernels with the same formulas in float64, before a run.

B batch, T tokens, N heads, K key/value heads, H head dim; X rows and V vocabulary of the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.attention import (
    AttentionBackend,
    attend_rows,
    attend_tiles,
    build,
)
from gpt2.attention.backends import MIN_TILE_CAPABILITY
from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.options import AttentionWeightsOptions
from gpt2.attention.projections import QKV
from gpt2.attention.rows import AttentionPlan
from gpt2.attention.sdpa_kernels import DTYPES, selected_sdpa_kernel
from gpt2.attention.triton import place_of, runs_tiles, tile_problem
from gpt2.loss import FusedLoss, fused_loss, masked_cross_entropy
from gpt2.model_config import ModelConfig
from gpt2.nsa.branches import attend_branches, attend_fused, gpu_kernels
from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.options import NsaOptions, resolve_backend
from lib.env.options import MachineConfig
from lib.env.ranks import current_process
from lib.errors import PreflightError, Problem, RunError

# Largest error relative to the norm, by type: rounding of inputs, weights and outputs, which may
# change the order of nearly equal weights in a top-k.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Tokens of the comparison of attention, if the context is longer: several tiles.
_PROBE_TOKENS = 1024
# Rows of the comparison of the loss.
_LOSS_ROWS = 64
_ROWS = "ATTENTION_BACKEND_ROWS"


def _device(machine: MachineConfig) -> torch.device:
    if machine.device == "cuda":
        return torch.device("cuda", current_process().local_rank)
    return torch.device(machine.device)


def compare_values(
    what: str,
    fallback: str,
    kernels: Callable[[], list[Tensor]],
    exact: Callable[[], list[Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    measure: Callable[[Sequence[Tensor], Sequence[Tensor]], list[float]] | None = None,
) -> None:
    """Compare the tensors that kernels compute with those of another form in float64.

    The kernels run twice, because a race changes bits. ``measure`` returns the errors; by default
    relative to the norm of each tensor. Raises PreflightError on ``what``, which names the symbol
    ``fallback``, whose form runs everywhere.
    """
    # The state of the generator is part of a run.
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):
            first, again = kernels(), kernels()
    except kernel_errors() as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise _refusal(f"{what} cannot run: {lines[0]}", fallback, "gpu.unsupported") from error
    if not all(map(torch.equal, first, again)):
        problem = "computed other bits in a second pass"
        raise _refusal(f"{what} {problem}", fallback, "gpu.wrong-values")
    errors, tolerance = (measure or relative_errors)(first, exact()), TOLERANCES[dtype]
    # A NaN is not below.
    if not all(error <= tolerance for error in errors):
        problem = f"differ from float64 by {max(errors):.1e} (expected at most {tolerance:.0e})"
        raise _refusal(f"{what} {problem}", fallback, "gpu.wrong-values")


def _refusal(what: str, fallback: str, code: str) -> PreflightError:
    symbol = fallback.rpartition("_")[0]
    return PreflightError(Problem(what, symbol, f"type: SET={fallback}=y", code=code))


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors of a kernel that cannot be compiled or launched."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, TritonError


def relative_errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the error of each tensor, relative to the norm unless that is zero."""
    pairs = zip(actual, expected, strict=True)
    norms = [(float((a.double() - e).norm()), float(e.norm())) for a, e in pairs]
    return [error / norm if norm > 1e-12 else error for error, norm in norms]


def with_gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs, then the gradients of a fixed random combination of them at ``leaves``."""
    generator = torch.Generator().manual_seed(1)
    # Numbers that every type represents.
    directions = [
        torch.randn(x.shape, generator=generator).half().to(x.device, x.dtype) for x in outputs
    ]
    gradients = torch.autograd.grad(
        outputs, leaves, directions, allow_unused=True, materialize_grads=True
    )
    return [*(x.detach() for x in outputs), *gradients]


def check_attention(model: ModelConfig, machine: MachineConfig) -> None:
    """Check that the configured attention backend works on this device, or raise PreflightError.

    For a named kernel of SDPA, torch is queried with tensors of the configured shape. The Triton kernels
    are compared with the row engine, those of native sparse attention with its other backends.
    """
    options = model.attention
    if isinstance(options.pattern, NsaOptions):
        if resolve_backend(options.pattern, machine.device) == "triton":
            _compare_sparse(model, options.pattern, DTYPES[machine.precision], _device(machine))
        return
    device = _device(machine)
    # A named backend is refused below, with the GPU's capability.
    place = "gpu" if options.backend == "triton" else place_of(device, torch.float32)
    forms = model.backends(place)
    if "sdpa" in forms and model.attention.backend != "auto":
        selected_sdpa_kernel(model, machine.precision, device, model.shape.dropout)
    if "triton" in forms:
        _compare_tiles(model, DTYPES[machine.precision], device)


def _compare_tiles(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the Triton kernels with the row engine, on random tensors, forward and backward.

    Without dropout; with it, the kernels run once.
    """
    if problem := tile_problem(dtype, device):
        raise PreflightError(problem)
    if device.type == "cuda" and not runs_tiles(device):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        expected = f"compute capability {MIN_TILE_CAPABILITY}.0"
        what = f"triton: unsupported (expected {expected}, got {found})"
        raise _refusal(what, _ROWS, "gpu.unsupported")
    shape = model.shape
    tokens = min(shape.block_size, _PROBE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    heads = shape.n_head, *(model.attention.projection.kv_heads(shape),) * 2
    qkv = [
        torch.randn(1, count, tokens, shape.head_dim, generator=generator).to(device, dtype)
        for count in heads
    ]

    def run(
        kernel: AttentionBackend, dropout: float, as_type: torch.dtype | None = None
    ) -> list[Tensor]:
        # The kernels read parameters in fp32.
        plan = probe_plan(model, tokens, device, as_type or torch.float32)
        return attention_pass(kernel, replace(plan, dropout=dropout), [x.to(as_type) for x in qkv])

    def tiled() -> list[Tensor]:
        run(attend_tiles, shape.dropout)
        return run(attend_tiles, 0.0)

    what = f"the Triton kernels of attention on {device} ({dtype}, head dim {shape.head_dim})"
    exact = partial(run, attend_rows, 0.0, torch.float64)
    compare_values(what, _ROWS, tiled, exact, dtype, device)


def attention_pass(
    kernel: AttentionBackend, plan: AttentionPlan, qkv: Sequence[Tensor]
) -> list[Tensor]:
    """Return outputs of ``kernel`` and gradients, as ``with_gradients`` does.

    Outputs are head outputs, statistics and weights that are read; gradients those of q, k, v and of the
    learnable tensors of the plan.
    """
    leaves = [x.clone().requires_grad_() for x in qkv]
    result = kernel(QKV(*leaves), plan)
    read = [] if result.weights_BTS is None else [result.weights_BTS]
    return with_gradients(
        [result.context_BNTH, *result.statistics_BNT, *read], [*leaves, *plan.inputs()]
    )


def probe_plan(
    model: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> AttentionPlan:
    """Build attention to ``tokens`` tokens; if an MLP reads weights, all of them are read."""
    options, shape = model.attention, replace(model.shape, block_size=tokens)
    pattern: Any = build(shape, options.pattern, options, 0)
    terms = [build(shape, term).to(device, dtype) for term in options.terms]
    gates = [build(shape, gate).to(device, dtype) for gate in options.gates]
    sink = next((build(shape, sink).to(device, dtype) for sink in options.sinks), None)
    reader = None
    if True in model.reads_weights:
        request = AttentionWeightsOptions("none", topk=1, tau=0.0, detach=False)
        reader = AttentionWeightsTap(request, pattern)
    return AttentionPlan(pattern, terms, gates, reader, shape.dropout, sink=sink)


def _compare_sparse(
    model: ModelConfig, options: NsaOptions, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare the kernels of sparse attention with another backend, forward and backward.

    The keys and values of each branch have more blocks than a query selects. Rounding may change the
    selection of a block, so up to a tenth of the vectors of a tensor may differ.
    """
    shape, blocks = model.shape, (options.count + 4) * options.select
    length = max(2 * options.compress, 2 * options.window, blocks)
    lengths = [options.compressed(length)] * 2 if options.compresses else []
    lengths += [length] * 2 * (options.branch_selected + options.branch_window)
    kv_heads, generator = model.attention.projection.kv_heads(shape), torch.Generator()
    generator.manual_seed(0)
    inputs = [
        torch.randn(1, heads, tokens, shape.head_dim, generator=generator).to(device, dtype)
        for heads, tokens in ((shape.n_head, length), *((kv_heads, n) for n in lengths))
    ]

    def run(attend: Callable[..., list[Tensor]], as_type: torch.dtype) -> list[Tensor]:
        q_BNTH, *rest = leaves = [x.to(as_type, copy=True).requires_grad_() for x in inputs]
        pairs = iter(zip(rest[::2], rest[1::2], strict=True))
        compressed = next(pairs) if options.compresses else None
        keys = BranchKeyValues(
            # Ranking alone needs no values.
            compressed if options.branch_compressed or not compressed else compressed[:1],
            next(pairs) if options.branch_selected else None,
            next(pairs) if options.branch_window else None,
        )
        return with_gradients(attend(q_BNTH, keys), leaves)

    def fused(q_BNTH: Tensor, keys: BranchKeyValues) -> list[Tensor]:
        kernels = gpu_kernels()
        assert kernels, "the backend triton requires the package"
        return attend_fused(q_BNTH, keys, options, 0, 0, kernels)

    def exact(q_BNTH: Tensor, keys: BranchKeyValues) -> list[Tensor]:
        # Without the choice of a kernel: float64 has none.
        return attend_branches(q_BNTH, keys, options.for_any_device(), 0)

    sizes = f"head dim {shape.head_dim}, blocks of {options.select}"
    compare_values(
        f"the kernels of NSA on {device} ({dtype}, {sizes})",
        "NSA_BACKEND_GATHER",
        partial(run, fused, dtype),
        partial(run, exact, torch.float64),
        dtype,
        device,
        _typical_errors,
    )


def _typical_errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the error that nine tenths of a tensor's vectors do not exceed, per mean norm."""
    found = []
    for a, e in zip(actual, expected, strict=True):
        errors = (a.double() - e).norm(dim=-1).flatten()
        mean = e.norm() / errors.numel() ** 0.5
        found.append(float(errors.quantile(0.9) / mean.clamp_min(torch.finfo(e.dtype).tiny)))
    return found


def check_loss(model: ModelConfig, machine: MachineConfig) -> None:
    """Compare liger-kernel's loss, if it is selected, with torch's, or raise PreflightError."""
    device = _device(machine)
    try:
        fused = None if machine.compile else fused_loss(model.loss_backend, device)
    except RunError as error:
        raise PreflightError(*error.problems) from error
    if fused is None:
        return
    shape, dtype = model.shape, DTYPES[machine.precision]
    generator = torch.Generator().manual_seed(0)
    # Logits with a standard deviation of four.
    hidden_XC = torch.randn((_LOSS_ROWS, shape.n_embd), generator=generator)
    hidden_XC = hidden_XC * (4 * shape.n_embd**-0.5)
    weight_VC = torch.randn((shape.padded_vocab_size, shape.n_embd), generator=generator)
    targets_X = torch.randint(shape.vocab_size, (_LOSS_ROWS,), generator=generator).to(device)

    def values(loss: FusedLoss, as_type: torch.dtype) -> list[Tensor]:
        hidden, weight = (
            x.to(device, dtype).to(as_type, copy=True).requires_grad_()
            for x in (hidden_XC, weight_VC)
        )
        result = loss(hidden, weight, targets_X, shape.vocab_size, model.z_loss)
        return with_gradients([result], [hidden, weight])

    compare_values(
        f"the loss of liger-kernel on {device} ({dtype})",
        "LOSS_BACKEND_TORCH",
        partial(values, fused, dtype),
        partial(values, masked_cross_entropy, torch.float64),
        dtype,
        device,
    )
