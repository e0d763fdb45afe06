"""The kernel of SDPA that torch may select, selects, and runs for a model on this machine.

N heads, H head dim.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.components import Window
from gpt2.attention.projections import QKV
from gpt2.attention.sdpa import allowing, attend, only_backend, with_sink
from gpt2.model_config import ModelConfig
from lib.env.observe import detect_sdpa_kernel, selected_sdpa_backend
from lib.errors import PreflightError

# Kernel name → function that returns whether torch may select the kernel.
KERNELS = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Enough to identify the CPU kernel; a whole long sequence would take seconds.
_CPU_PROBE_TOKENS = 128


def allowed_kernels(backend: str) -> list[str]:
    """Return the kernels that torch may select under ``backend``."""
    with only_backend(backend):
        return sorted(name for name, enabled in KERNELS.items() if enabled())


def selected_sdpa_kernel(
    model: ModelConfig, precision: str, device: torch.device, dropout: float
) -> str:
    """Return the kernel that torch selects; raises PreflightError if it cannot run."""
    options, shape = model.attention, model.shape
    kv_heads = options.projection.kv_heads(shape)
    q, k = (
        _zeros(model, count, shape.block_size, precision, device)
        for count in (shape.n_head, kv_heads)
    )
    heads = QKV(q, k, k)
    mask: Mapping[str, Any] = Window(options.pattern.width).sdpa_arguments(shape.block_size, device)
    if options.sinks:
        heads, mask = with_sink(heads, mask, q.new_zeros(shape.n_head))
    with allowing(options.backend, heads.q_BNTH, dropout, PreflightError):
        return selected_sdpa_backend(heads.q_BNTH, kv_heads, dropout, mask)


def observed_sdpa_kernel(
    model: ModelConfig, precision: str, device: torch.device, dropout: float
) -> str:
    """Run plain attention once and return the kernel; the state of the generator is restored."""
    options, length = model.attention, model.shape.block_size
    group = model.shape.n_head // options.projection.kv_heads(model.shape)
    mask = Window(options.pattern.width).sdpa_arguments(length, device)
    if device.type == "cpu" and length > _CPU_PROBE_TOKENS:
        length = _CPU_PROBE_TOKENS
        # Whether there is a mask affects kernel selection, so the mask is cropped, never omitted.
        mask = {n: v[:length, :length] if isinstance(v, Tensor) else v for n, v in mask.items()}
    q, k, v = (_zeros(model, heads, length, precision, device) for heads in (group, 1, 1))
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.enable_grad():
        sink_N = q.new_zeros(group) if options.sinks else None
        return detect_sdpa_kernel(attend(QKV(q, k, v), mask, options.backend, dropout, sink_N))


def _zeros(
    model: ModelConfig, heads: int, length: int, precision: str, device: torch.device
) -> Tensor:
    """Return zero heads [1, heads, length, H] that require gradients, as in training."""
    sizes = (1, heads, length, model.shape.head_dim)
    return torch.zeros(sizes, device=device, dtype=DTYPES[precision], requires_grad=True)
