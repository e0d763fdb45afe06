"""The hardware as files: ``hw.json``, and what the GPU's own program says of it."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.environment.programs import run
from lib.environment.snapshot import unwritable
from lib.errors import PreflightError, Problem
from lib.files import write_atomic, write_json
from lib.machine.observe import GIB, hardware

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
HARDWARE = "hw.json"
# Program → file: of NVIDIA's driver, which is looked for everywhere, and of AMD's.
_PROGRAMS = {"nvidia-smi": "nvidia_smi.txt", "rocm-smi": "rocm_smi.txt"}


def probe_hardware(folder: Path, device: "torch.device") -> dict[str, Any]:
    """Write what the machine is into ``folder``, and return the content of ``hw.json``.

    GPUs are looked at where ``device`` is one: that begins a context on it. PreflightError where the
    folder cannot be written to.
    """
    found = describe_hardware(folder, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / HARDWARE, found)
        for program, name in _PROGRAMS.items():
            if shutil.which(program) or name == "nvidia_smi.txt":
                write_atomic(folder / name, _words(program))
    except OSError as error:
        raise unwritable(folder, error) from error
    return found


def describe_hardware(folder: Path, device: "torch.device") -> dict[str, Any]:
    """The machine's facts, each visible GPU, and the free space where ``folder`` is or will be."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return {
        "schema_version": SCHEMA_VERSION,
        **hardware(device),
        "gpus": _gpus() if device.type == "cuda" else [],
        "disk_free_gib": round(shutil.disk_usage(existing).free / GIB, 1),
    }


def gpu_problems(pinned: bool, processes: int) -> list[Problem]:
    """More visible GPUs than a run's ``processes`` use, where ``pinned`` forbids them."""
    import torch

    visible = torch.cuda.device_count()
    if not pinned or visible <= processes:
        return []
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    names = ",".join(map(str, range(processes)))
    what = f"GPU_PINNED=y and GPUS={processes}, but {visible} GPUs are visible"
    return [Problem(what, next=f"type: {variable}={names} make")]


def _gpus() -> list[Mapping[str, Any]]:
    import torch

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": gpu.name, "vram_gib": round(gpu.total_memory / GIB, 1)} for gpu in found]


def _words(program: str) -> str:
    """What ``program`` prints; its absence or failure in words, which is a fact as well."""
    if shutil.which(program) is None:
        return f"absent: no program {program} on this machine\n"
    try:
        code, output, errors = run([program])
    except PreflightError as error:
        return f"failed: {error.problems[0].what}\n"
    return output if code == 0 and output.strip() else f"failed: exit {code}\n{output}{errors}"
