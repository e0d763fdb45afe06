"""What the machine is, and what torch reports of its own state: facts read back, not requests."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from lib.machine.devices import cpu_model, usable_cores
from lib.machine.options import MachineConfig
from lib.machine.process import Process, missing_variables
from lib.machine.setup import autocast

GIB = 1024**3


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, memory and, on a GPU, its name, memory and driver. Absent facts are None."""
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
    """The model of the device that computes: what a run's bits may depend on."""
    return cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)


def knobs(machine: MachineConfig, device: torch.device, process: Process) -> dict[str, Any]:
    """Each setting as requested, as resolved for this machine, and as torch then reports it."""
    scaler = "GradScaler" if machine.precision == "fp16" else "none"
    matmul = machine.matmul_precision
    tf32 = matmul != "highest"
    on_gpu = device.type == "cuda"
    table = {
        "device": (machine.device, str(device), _observed_device),
        "precision_mode": (machine.precision, machine.precision, lambda: _precision(machine)),
        "grad_scaler": (scaler, scaler, lambda: scaler),
        "cpu_threads": (machine.cpu_threads, machine.cpu_threads, torch.get_num_threads),
        "world_size": (process.world_size, process.world_size, lambda: process.world_size),
        "torch_compile_enabled": (machine.compile, machine.compile, lambda: machine.compile),
        "deterministic_algorithms": (
            machine.deterministic,
            machine.deterministic,
            torch.are_deterministic_algorithms_enabled,
        ),
        "float32_matmul_precision": (matmul, matmul, torch.get_float32_matmul_precision),
        "allow_tf32_cudnn": (
            tf32,
            tf32,
            lambda: torch.backends.cudnn.allow_tf32,
        ),
        "cudnn_benchmark": (
            machine.cudnn_benchmark,
            machine.cudnn_benchmark,
            lambda: torch.backends.cudnn.benchmark,
        ),
    }
    if on_gpu:
        segments = machine.expandable_segments
        table["expandable_segments"] = (segments, segments, _expandable_segments)
    return {
        name: {"requested": asked, "resolved": resolved, "observed": _observe(read)}
        for name, (asked, resolved, read) in table.items()
    }


def deviations(found: dict[str, Any]) -> list[str]:
    """Names of the knobs that torch reports otherwise than they were resolved."""
    return [name for name, knob in found.items() if knob["resolved"] != knob["observed"]]


def sdpa_choice(
    q_BNTH: torch.Tensor, kv_heads: int, dropout: float, seen: Mapping[str, Any]
) -> str:
    """The kernel torch picks for plain attention: flash, efficient, cudnn or math.

    RuntimeError where none can run of those that ``torch.nn.attention.sdpa_kernel`` allows here.
    ``seen`` says which keys a query sees, as arguments of ``scaled_dot_product_attention``. Asks
    torch with tensors of that shape, rather than guessing from versions.
    """
    batch, heads, length, width = q_BNTH.shape
    k, v = (q_BNTH.new_empty(batch, kv_heads, length, width).requires_grad_() for _ in "kv")
    choice = torch._fused_sdp_choice(
        q_BNTH, k, v, dropout_p=dropout, enable_gqa=kv_heads < heads, **seen
    )
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def _observe(read: Callable[[], Any]) -> Any:
    """torch refuses to read old TF32 switches once new ones were set; the refusal is the fact."""
    try:
        return read()
    except RuntimeError as error:
        return f"unreadable: {error}"


def _observed_device() -> str:
    """Where a new tensor of the training device lands."""
    if not torch.cuda.is_initialized():
        return "cpu"
    return str(torch.device("cuda", torch.cuda.current_device()))


def _precision(machine: MachineConfig) -> str:
    """The precision of a matrix product inside the forward pass's context."""
    with autocast(machine):
        if not torch.is_autocast_enabled(machine.device):
            return "fp32"
        dtype = torch.get_autocast_dtype(machine.device)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _expandable_segments() -> bool:
    return not missing_variables({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def _driver_version() -> str | None:
    """Of the NVIDIA or AMD kernel driver, or None where the kernel does not say."""
    nvidia = _read_text(Path("/proc/driver/nvidia/version"))
    if nvidia:
        return nvidia.splitlines()[0].removeprefix("NVRM version:").strip()
    return _read_text(Path("/sys/module/amdgpu/version")).strip() or None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
