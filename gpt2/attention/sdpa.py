"""Plain attention: one call of torch's scaled_dot_product_attention.

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.attention import PATTERNS
from gpt2.attention.grouped.options import GroupedOptions
from gpt2.attention.heads import Heads
from gpt2.attention.rows.parts import Pattern
from gpt2.config import ModelConfig
from lib.errors import KablateError, PreflightError, Problem, RunError
from lib.machine.observe import sdpa_choice
from lib.machine.routing import kernel_that_made

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Each kernel's name, and how torch says whether it may be taken.
KERNELS = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Enough to see which kernel of a CPU runs; whole long sequences take it seconds.
_CPU_TOKENS = 128
# How torch says that no kernel of those allowed can run.
REFUSALS = ("No available kernel", "No viable backend")


def plain_attention(heads: Heads, pattern: Pattern, backend: str, dropout: float) -> Tensor:
    """Head outputs, BNTH. RunError where the kernel asked for cannot run here."""
    seen = pattern.sdpa_arguments(heads.q_BNTH.shape[2], heads.q_BNTH.device)
    return _attend(heads, seen, backend, dropout)


def allowed_kernels(backend: str) -> list[str]:
    """The kernels among which torch may choose under ``backend``, as torch says it then."""
    with _only(backend):
        return sorted(name for name, enabled in KERNELS.items() if enabled())


def torch_kernel(model: ModelConfig, precision: str, device: torch.device, dropout: float) -> str:
    """The kernel that torch takes for plain attention with ``dropout``: flash, efficient, cudnn or
    math.

    PreflightError where the one that is configured cannot run.
    """
    options, shape = model.attention, model.shape
    q = _zeros(model, shape.n_head, shape.block_size, precision, device)
    pattern = PATTERNS.module(options.pattern.name)(options.pattern)
    seen = pattern.sdpa_arguments(shape.block_size, device)
    with _allowed(options.backend, q, dropout, PreflightError):
        return sdpa_choice(q, _kv_heads(model), dropout, seen)


def kernel_at_work(model: ModelConfig, precision: str, device: torch.device, dropout: float) -> str:
    """The kernel that ran: flash, efficient, cudnn or math, by one pass of plain attention.

    Of one sequence and the heads that share a key; on a CPU, whose kernel does not go by the
    length, of a piece of it. Draws nothing that anybody else would draw.
    """
    options, length = model.attention, model.shape.block_size
    group = model.shape.n_head // _kv_heads(model)
    pattern = PATTERNS.module(options.pattern.name)(options.pattern)
    seen = pattern.sdpa_arguments(length, device)
    if device.type == "cpu" and length > _CPU_TOKENS:
        length = _CPU_TOKENS
        # Whether there is a mask may decide: it is that of the whole length.
        seen = {n: v[:length, :length] if isinstance(v, Tensor) else v for n, v in seen.items()}
    q, k, v = (_zeros(model, heads, length, precision, device) for heads in (group, 1, 1))
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.enable_grad():
        return kernel_that_made(_attend(Heads(q, k, v), seen, options.backend, dropout))


def _attend(heads: Heads, seen: Mapping[str, Any], backend: str, dropout: float) -> Tensor:
    q, k, v = heads.q_BNTH, heads.k_BKTH, heads.v_BKTH
    with _allowed(backend, q, dropout, RunError):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, enable_gqa=k.shape[1] < q.shape[1], **seen
        )


def _zeros(
    model: ModelConfig, heads: int, length: int, precision: str, device: torch.device
) -> Tensor:
    """``length`` tokens of so many heads that want a gradient, as in training."""
    sizes = (1, heads, length, model.shape.head_dim)
    return torch.zeros(sizes, device=device, dtype=_DTYPES[precision], requires_grad=True)


def _kv_heads(model: ModelConfig) -> int:
    shared = model.attention.projection
    return shared.n_kv_head if isinstance(shared, GroupedOptions) else model.shape.n_head


def _only(backend: str) -> AbstractContextManager[None]:
    """Inside, torch takes the kernel ``backend``, or chooses where that names none."""
    return sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else nullcontext()


@contextmanager
def _allowed(
    backend: str, q_BNTH: Tensor, dropout: float, refused: type[KablateError]
) -> Iterator[None]:
    """Inside, torch takes the configured kernel; ``refused`` is raised where that cannot run."""
    try:
        with _only(backend):
            yield
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        raise refused(
            Problem(
                f"the kernel {backend!r} cannot run this attention on {q_BNTH.device.type} "
                f"({q_BNTH.dtype}, head dim {q_BNTH.shape[-1]}, dropout {dropout})",
                where=f"ATTENTION_BACKEND_{backend.upper()}",
                next="type: SET=ATTENTION_BACKEND_ROWS=y, or turn off what the kernel lacks",
            )
        ) from error
