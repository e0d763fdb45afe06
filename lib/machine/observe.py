"""Hardware facts, and settings read back from torch to compare them with the requested ones."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from lib.errors import PreflightError, Problem
from lib.machine.devices import cpu_model, usable_cores
from lib.machine.options import MachineConfig
from lib.machine.process import Process, missing_variables
from lib.machine.setup import WORKSPACE, WORKSPACE_VARIABLE, autocast

GIB = 1024**3
# Three states of a setting: requested, resolved, observed.
Knob = dict[str, Any]
_ADVICE = (
    "paper_repro allows no deviation; type: SET=RUN_PROFILE_MAXOUT_SPEED=y to record it instead"
)


def hardware(device: torch.device) -> dict[str, Any]:
    """Return processor, memory and, on a GPU, name, memory and driver; None for missing facts."""
    facts: dict[str, Any] = {
        "cpu_model": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_cores": usable_cores(),
        "ram_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "cuda_version": torch.version.cuda,
        "hip_version": torch.version.hip,
        "gpu_name": None,
        "vram_gib": None,
        "driver_version": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu_name"] = properties.name
        facts["vram_gib"] = round(properties.total_memory / GIB, 1)
        facts["driver_version"] = _driver_version()
    return facts


def device_name(device: torch.device) -> str:
    """Return the model of the training device, which can affect the bits of a run."""
    return cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)


def knob(requested: Any, resolved: Any, read: Callable[[], Any]) -> Knob:
    """Return a setting in three states: requested, resolved for this machine, and read back.

    torch raises RuntimeError for old TF32 switches once new ones were set; the error is recorded as
    the observed value.
    """
    try:
        observed = read()
    except RuntimeError as error:
        observed = f"unreadable: {error}"
    return {"requested": requested, "resolved": resolved, "observed": observed}


def knobs(
    machine: MachineConfig, device: torch.device, process: Process, scaler: torch.amp.GradScaler
) -> dict[str, Knob]:
    """Return the settings of the machine and of torch, by name."""
    mixed, on_gpu = machine.precision != "fp32", device.type == "cuda"
    requested: dict[str, tuple[Any, Callable[[], Any]]] = {
        "precision_mode": (machine.precision, lambda: _precision(machine)),
        "amp_enabled": (mixed, lambda: _autocasts(machine)),
        "grad_scaler_enabled": (machine.precision == "fp16", scaler.is_enabled),
        "cpu_threads": (machine.cpu_threads, torch.get_num_threads),
        "world_size": (process.world_size, _world_size),
        "float32_matmul_precision": (
            machine.matmul_precision,
            torch.get_float32_matmul_precision,
        ),
        "cudnn_benchmark": (machine.cudnn_benchmark, lambda: torch.backends.cudnn.benchmark),
        "fill_uninitialized_memory": (
            False,
            lambda: torch.utils.deterministic.fill_uninitialized_memory,
        ),
    }
    tf32 = machine.matmul_precision != "highest"
    workspace = WORKSPACE if on_gpu and machine.repeats else None
    warns = machine.deterministic == "warn"
    settings = {name: knob(value, value, read) for name, (value, read) in requested.items()}
    # Settings derived from other settings or from the device.
    settings |= {
        "device": knob(machine.device, str(device), _observed_device),
        "allow_tf32_matmul": knob(
            machine.matmul_precision, tf32, lambda: torch.backends.cuda.matmul.allow_tf32
        ),
        "allow_tf32_cudnn": knob(
            machine.matmul_precision, tf32, lambda: torch.backends.cudnn.allow_tf32
        ),
        "deterministic_algorithms": knob(
            machine.deterministic, "warn_only" if warns else machine.repeats, _deterministic
        ),
        "cublas_workspace_config": knob(
            machine.deterministic, workspace, lambda: _variable(WORKSPACE_VARIABLE, workspace)
        ),
    }
    if on_gpu:
        segments = machine.expandable_segments
        settings["expandable_segments"] = knob(segments, segments, _expandable_segments)
    return settings


def deviations(settings: Mapping[str, Knob]) -> list[str]:
    """Return the names of settings whose observed value differs from the resolved value."""
    return [name for name, state in settings.items() if state["resolved"] != state["observed"]]


def refuse_deviations(settings: Mapping[str, Knob]) -> None:
    """Raise PreflightError listing every deviation with both values."""
    problems = [
        f"{name}: setting differs (expected {settings[name]['resolved']}, "
        f"got {settings[name]['observed']})"
        for name in deviations(settings)
    ]
    if problems:
        code = "machine.setting-mismatch"
        raise PreflightError(*(Problem(what, next=_ADVICE, code=code) for what in problems))


def sdpa_choice(
    q_BNTH: torch.Tensor, kv_heads: int, dropout: float, seen: Mapping[str, Any]
) -> str:
    """Return the kernel torch selects for attention: flash, efficient, cudnn or math.

    ``seen`` contains the mask arguments of ``scaled_dot_product_attention``. torch itself is
    queried with tensors of that shape, because the choice depends on versions. Raises RuntimeError
    if no kernel allowed by ``torch.nn.attention.sdpa_kernel`` supports the input.
    """
    batch, heads, length, width = q_BNTH.shape
    k, v = (q_BNTH.new_empty(batch, kv_heads, length, width).requires_grad_() for _ in "kv")
    choice = torch._fused_sdp_choice(
        q_BNTH, k, v, dropout_p=dropout, enable_gqa=kv_heads < heads, **seen
    )
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def _observed_device() -> str:
    """Return the device of a new tensor on the training device."""
    if not torch.cuda.is_initialized():
        return "cpu"
    return str(torch.device("cuda", torch.cuda.current_device()))


def _autocasts(machine: MachineConfig) -> bool:
    """Return whether autocast is enabled in the context of the forward pass."""
    with autocast(machine):
        return torch.is_autocast_enabled(machine.device)


def _precision(machine: MachineConfig) -> str:
    """Return the precision of a matrix product in the context of the forward pass."""
    with autocast(machine):
        if not torch.is_autocast_enabled(machine.device):
            return "fp32"
        dtype = torch.get_autocast_dtype(machine.device)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _deterministic() -> bool | str:
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return "warn_only"
    return torch.are_deterministic_algorithms_enabled()


def _world_size() -> int:
    """Return the size of the joined process group, or 1 if there is none."""
    joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if joined else 1


def _variable(name: str, resolved: str | None) -> str | None:
    """Return the environment variable, or None if this run does not use it."""
    return os.environ.get(name) if resolved is not None else None


def _expandable_segments() -> bool:
    return not missing_variables({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def _driver_version() -> str | None:
    """Return the version of the NVIDIA or AMD kernel driver, or None if unavailable."""
    nvidia = _read_text(Path("/proc/driver/nvidia/version"))
    if nvidia:
        return nvidia.splitlines()[0].removeprefix("NVRM version:").strip()
    return _read_text(Path("/sys/module/amdgpu/version")).strip() or None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
