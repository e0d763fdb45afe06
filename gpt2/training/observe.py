"""Every setting that trades speed, memory or bits, as it is at work in an open session."""

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

# torch.compile's own, which nothing here changes.
_COMPILER = {"backend": "inductor", "mode": "default", "options": None}
# torch's own, too.
_BUCKET_MIB = 25
MIB = 1 << 20


def run_knobs(session: Session) -> dict[str, Knob]:
    """The settings of the machine, the compiler, attention, memory and the loader, by name."""
    machine = session.config.machine
    found = knobs(machine, session.device, session.group.process, session.scaler)
    found |= _compiler(session) | _sharing(session) | _attention(session)
    return found | _memory(session) | _loader(session)


def require_observed(session: Session) -> None:
    """PreflightError where a strict profile's run has another setting at work than was resolved."""
    if session.config.repro.strict:
        refuse_deviations(run_knobs(session))


def _compiler(session: Session) -> dict[str, Knob]:
    machine, forward = session.config.machine, session.forward
    if isinstance(forward, DistributedDataParallel):
        forward = forward.module
    # The class is torch._dynamo's, whose import takes seconds.
    compiled = type(forward).__name__ == "OptimizedModule"
    wanted, found = (_COMPILER if on else {} for on in (machine.compile, compiled))
    steps = machine.warmup_iterations
    return {
        "torch_compile_enabled": knob(machine.compile, machine.compile, lambda: compiled),
        **{
            f"torch_compile_{name}": _state(wanted.get(name), found.get(name)) for name in _COMPILER
        },
        "compile_warmup_steps": _state(steps, steps),
    }


def _sharing(session: Session) -> dict[str, Knob]:
    """How gradients travel; nothing where a process is alone."""
    asked, forward = session.config.machine.ddp_safe, session.forward
    shares = isinstance(forward, DistributedDataParallel)
    mib = forward.bucket_bytes_cap / MIB if shares else None
    wanted = (SAFE_BUCKET_MIB if asked else _BUCKET_MIB) if session.group.size > 1 else None
    copied = not forward.gradient_as_bucket_view if shares else None
    return {
        "ddp_bucket_cap_mib": _state(wanted, mib, asked),
        "ddp_gradients_copied": _state(True if session.group.size > 1 else None, copied, asked),
    }


def _attention(session: Session) -> dict[str, Knob]:
    """Which form every block has; of plain attention the kernel for each distinct shape.

    Resolved is what torch says it will take, observed what ran.
    """
    model, device = session.config.model, session.device
    asked, shape = model.attention.backend, model.shape
    forms = sorted({block.attn.form(device.type) for block in session.model.h})
    chosen: dict[str, str] = {}
    ran: dict[str, str] = {}
    allowed: tuple[list[str], list[str]] = ([], [])
    if "sdpa" in forms:
        allowed = ([asked] if asked in BACKENDS else sorted(KERNELS), allowed_kernels(asked))
        # Training, and evaluation, which drops nothing.
        for dropout in (shape.dropout, 0.0):
            name = f"{shape.n_head}x{shape.block_size}x{shape.head_dim}, dropout {dropout:g}"
            precision = session.config.machine.precision
            chosen[name] = torch_kernel(model, precision, device, dropout)
            ran[name] = kernel_at_work(model, precision, device, dropout)
    # Without a pinned kernel, what torch chooses is what was asked for.
    resolved = {name: asked if asked in BACKENDS else kernel for name, kernel in chosen.items()}
    return {
        **_own_attention(session),
        "attention_impl": _state("+".join(forms), "+".join(forms), asked),
        "sdpa_backends_allowed": _state(*allowed, asked),
        "sdpa_backend_selected": _state(resolved, ran, asked),
        "flash_attention_enabled": _state(
            "flash" in resolved.values(), "flash" in ran.values(), asked
        ),
    }


def _own_attention(session: Session) -> dict[str, Knob]:
    """Of native sparse attention, how the selected branch is computed."""
    options, device = session.config.model.attention.pattern, session.device.type
    if not isinstance(options, NsaOptions) or not options.branch_selected:
        # Said of every run, so that one without the pattern can be compared with one that has it.
        return {"nsa_backend": _state("none", "none")}
    kernels = {block.attn.pattern.kernel(device) for block in session.model.h}
    observed = "+".join(sorted(kernel.removeprefix("nsa by ") for kernel in kernels))
    return {"nsa_backend": _state(resolve_backend(options, device), observed, options.backend)}


def _memory(session: Session) -> dict[str, Knob]:
    again = session.config.model.grad_checkpointing
    return {
        "gradient_checkpointing_enabled": _state(again, session.model.grad_checkpointing),
        # What is computed again draws the same dropout; there is no other way here.
        "checkpoint_preserve_rng_state": _state(True, True),
        "checkpoint_use_reentrant": _state(False, False),
        # Of training: nothing here trains in other numbers.
        "quantization_enabled": _state(False, False),
        "quantization_scheme": _state("none", "none"),
    }


def _loader(session: Session) -> dict[str, Knob]:
    """Read from a loader that is made as the one in use is, and started by nobody."""
    data, on_gpu = session.config.data, session.device.type == "cuda"
    length = session.config.model.shape.block_size
    sampler = TrainSampler(session.dataset.train, length, session.config.seed)
    loader: Iterable[Any] = batches(sampler, data, [], on_gpu)
    found: dict[str, Any]
    if isinstance(loader, DataLoader):
        found = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    else:
        found = {"num_workers": 0, "pin_memory": vars(loader)["pin"], "prefetch_factor": None}
        found["persistent_workers"] = False
    ahead = data.loader_workers > 0
    return {
        "num_workers": _state(data.loader_workers, found["num_workers"]),
        "pin_memory": _state(data.pin_memory and on_gpu, found["pin_memory"], data.pin_memory),
        "prefetch_factor": _state(
            data.prefetch_factor if ahead else None, found["prefetch_factor"], data.prefetch_factor
        ),
        "persistent_workers": _state(
            ahead and data.persistent_workers, found["persistent_workers"], data.persistent_workers
        ),
    }


def _state(resolved: Any, observed: Any, requested: Any = None) -> Knob:
    """``requested`` where it is not what it resolves to."""
    asked = resolved if requested is None else requested
    return {"requested": asked, "resolved": resolved, "observed": observed}
