"""Settings that affect speed, memory or last bits, as observed in an open session."""

from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from gpt2.attention.nsa.backend import resolve_backend
from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.sdpa import (
    BACKENDS,
    KERNELS,
    allowed_kernels,
    kernel_at_work,
    torch_kernel,
)
from gpt2.data.loader import batches
from gpt2.data.sampler import TrainSampler
from gpt2.training.session import Session
from lib.machine.group import SAFE_BUCKET_MIB
from lib.machine.observe import Knob, knob, knobs, refuse_deviations

# Defaults of torch.compile, never changed here.
_COMPILER = {"backend": "inductor", "mode": "default", "options": None}
# Default of DistributedDataParallel.
_DEFAULT_BUCKET_MIB = 25
MIB = 1 << 20


def run_knobs(session: Session) -> dict[str, Knob]:
    """Return the settings of machine, compiler, attention, memory and loader, by name."""
    machine = session.config.machine
    settings = knobs(machine, session.device, session.group.process, session.scaler)
    settings |= _compiler(session) | _gradient_exchange(session) | _attention(session)
    return settings | _memory(session) | _loader(session)


def require_observed(session: Session) -> None:
    """Check in a strict profile that every observed setting equals the resolved one.

    Raises PreflightError listing the deviations.
    """
    if session.config.repro.strict:
        refuse_deviations(run_knobs(session))


def _compiler(session: Session) -> dict[str, Knob]:
    machine, forward = session.config.machine, session.forward
    if isinstance(forward, DistributedDataParallel):
        forward = forward.module
    # By name: importing the class from torch._dynamo takes seconds.
    compiled = type(forward).__name__ == "OptimizedModule"
    resolved, observed = (_COMPILER if on else {} for on in (machine.compile, compiled))
    steps = machine.warmup_iterations
    return {
        "torch_compile_enabled": knob(machine.compile, machine.compile, lambda: compiled),
        **{
            f"torch_compile_{name}": _state(resolved.get(name), observed.get(name))
            for name in _COMPILER
        },
        "compile_warmup_steps": _state(steps, steps),
    }


def _gradient_exchange(session: Session) -> dict[str, Knob]:
    """Return the settings of DistributedDataParallel; null values in a single process."""
    requested, forward = session.config.machine.ddp_safe, session.forward
    is_ddp = isinstance(forward, DistributedDataParallel)
    mib = forward.bucket_bytes_cap / MIB if is_ddp else None
    resolved = (
        (SAFE_BUCKET_MIB if requested else _DEFAULT_BUCKET_MIB) if session.group.size > 1 else None
    )
    copied = not forward.gradient_as_bucket_view if is_ddp else None
    return {
        "ddp_bucket_cap_mib": _state(resolved, mib, requested),
        "ddp_gradients_copied": _state(True if session.group.size > 1 else None, copied, requested),
    }


def _attention(session: Session) -> dict[str, Knob]:
    """Return the attention backend of all blocks and, for SDPA, the kernel of each distinct shape.

    Resolved is the kernel that torch reports it will select, observed the kernel that ran.
    """
    model, device = session.config.model, session.device
    requested, shape = model.attention.backend, model.shape
    forms = sorted({block.attn.form(device.type) for block in session.model.h})
    selected: dict[str, str] = {}
    observed: dict[str, str] = {}
    allowed: tuple[list[str], list[str]] = ([], [])
    if "sdpa" in forms:
        allowed = (
            [requested] if requested in BACKENDS else sorted(KERNELS),
            allowed_kernels(requested),
        )
        # Training, and evaluation without dropout.
        for dropout in (shape.dropout, 0.0):
            name = f"{shape.n_head}x{shape.block_size}x{shape.head_dim}, dropout {dropout:g}"
            precision = session.config.machine.precision
            selected[name] = torch_kernel(model, precision, device, dropout)
            observed[name] = kernel_at_work(model, precision, device, dropout)
    # Without a pinned kernel, torch's selection is the resolved setting.
    resolved = {
        name: requested if requested in BACKENDS else kernel for name, kernel in selected.items()
    }
    return {
        **_nsa_backend(session),
        "attention_impl": _state("+".join(forms), "+".join(forms), requested),
        "sdpa_backends_allowed": _state(*allowed, requested),
        "sdpa_backend_selected": _state(resolved, observed, requested),
        "flash_attention_enabled": _state(
            "flash" in resolved.values(), "flash" in observed.values(), requested
        ),
    }


def _nsa_backend(session: Session) -> dict[str, Knob]:
    """Return the backend of the selected branch of native sparse attention."""
    options, device = session.config.model.attention.pattern, session.device.type
    if not isinstance(options, NsaOptions) or not options.branch_selected:
        # Recorded for every run, so that runs with and without the pattern are comparable.
        return {"nsa_backend": _state("none", "none")}
    kernels = {block.attn.pattern.kernel(device) for block in session.model.h}
    observed = "+".join(sorted(kernel.removeprefix("nsa by ") for kernel in kernels))
    return {"nsa_backend": _state(resolve_backend(options, device), observed, options.backend)}


def _memory(session: Session) -> dict[str, Knob]:
    resolved = session.config.model.grad_checkpointing
    return {
        "gradient_checkpointing_enabled": _state(resolved, session.model.grad_checkpointing),
        # Fixed: recomputation always uses the same dropout masks.
        "checkpoint_preserve_rng_state": _state(True, True),
        "checkpoint_use_reentrant": _state(False, False),
        # Of training, which is never quantized.
        "quantization_enabled": _state(False, False),
        "quantization_scheme": _state("none", "none"),
    }


def _loader(session: Session) -> dict[str, Knob]:
    """Return the settings of a loader built like the one in use, without starting its workers."""
    data, on_gpu = session.config.data, session.device.type == "cuda"
    length = session.config.model.shape.block_size
    sampler = TrainSampler(session.dataset.train, length, session.config.seed)
    loader: Iterable[Any] = batches(sampler, data, [], on_gpu)
    observed: dict[str, Any]
    if isinstance(loader, DataLoader):
        observed = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    else:
        observed = {
            "num_workers": 0,
            "pin_memory": vars(loader)["pin"],
            "prefetch_factor": None,
            "persistent_workers": False,
        }
    prefetches = data.loader_workers > 0
    return {
        "num_workers": _state(data.loader_workers, observed["num_workers"]),
        "pin_memory": _state(data.pin_memory and on_gpu, observed["pin_memory"], data.pin_memory),
        "prefetch_factor": _state(
            data.prefetch_factor if prefetches else None,
            observed["prefetch_factor"],
            data.prefetch_factor,
        ),
        "persistent_workers": _state(
            prefetches and data.persistent_workers,
            observed["persistent_workers"],
            data.persistent_workers,
        ),
    }


def _state(resolved: Any, observed: Any, requested: Any = None) -> Knob:
    """Build a setting; ``requested`` defaults to the resolved value."""
    if requested is None:
        requested = resolved
    return {"requested": requested, "resolved": resolved, "observed": observed}
