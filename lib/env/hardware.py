"""Hardware of this machine: facts of the manifest, ``hw.json`` and the output of nvidia-smi."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lib.env.gpu import cpu_model, usable_cores
from lib.env.snapshot import run_program, write_error
from lib.errors import PreflightError
from lib.files import write_atomic, write_json
from lib.units import GIB

SCHEMA_VERSION = 1
# Program → file. The file of nvidia-smi is always written, the file of rocm-smi only if present.
_PROGRAMS = {"nvidia-smi": "nvidia_smi.txt", "rocm-smi": "rocm_smi.txt"}


def hardware(device: torch.device) -> dict[str, Any]:
    """Return processor, memory and, on a GPU, name, memory and driver; None for missing facts."""
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_properties(device) if on_gpu else None
    return {
        "cpu_model": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_cores": usable_cores(),
        "ram_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "cuda_version": torch.version.cuda,
        "hip_version": torch.version.hip,
        "gpu_name": gpu and gpu.name,
        "vram_gib": gpu and round(gpu.total_memory / GIB, 1),
        "driver_version": _driver_version() if on_gpu else None,
    }


def device_name(device: torch.device) -> str:
    """Return the model of the training device, which can affect the bits of a run."""
    return cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _driver_version() -> str | None:
    """Return the version of the NVIDIA or AMD kernel driver, or None if unavailable."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError, IndexError):
            first = Path(path).read_text(encoding="utf-8").splitlines()[0]
            return first.removeprefix("NVRM version:").strip()
    return None


def probe_hardware(folder: Path, device: torch.device) -> dict[str, Any]:
    """Write the hardware record to ``folder``; return the content of hw.json. Raises PreflightError."""
    record = describe_hardware(folder, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "hw.json", record)
        for program, name in _PROGRAMS.items():
            if shutil.which(program) or name == "nvidia_smi.txt":
                write_atomic(folder / name, _program_output(program))
    except OSError as error:
        raise write_error(folder, error) from error
    return record


def describe_hardware(folder: Path, device: torch.device) -> dict[str, Any]:
    """Return hardware facts, each visible GPU, and the free disk space of ``folder``."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "schema_version": SCHEMA_VERSION,
        **hardware(device),
        "gpus": [{"name": g.name, "vram_gib": round(g.total_memory / GIB, 1)} for g in gpus],
        "disk_free_gib": round(shutil.disk_usage(existing).free / GIB, 1),
    }


def _program_output(program: str) -> str:
    """Return the output of ``program``, or a line that records its absence or failure."""
    if shutil.which(program) is None:
        return f"absent: no program {program} on this machine\n"
    try:
        code, output, errors = run_program([program])
    except PreflightError as error:
        return f"failed: {error.problems[0].what}\n"
    return output if code == 0 and output.strip() else f"failed: exit {code}\n{output}{errors}"
