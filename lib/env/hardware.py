"""Hardware record of a run: ``hw.json`` and the output of nvidia-smi and rocm-smi."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.env.observe import hardware
from lib.env.snapshot import run_program, write_error
from lib.errors import PreflightError
from lib.files import write_atomic, write_json
from lib.units import GIB

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
HARDWARE_FILE = "hw.json"
# Program → file. The file of nvidia-smi is always written, the file of rocm-smi only if present.
_PROGRAMS = {"nvidia-smi": "nvidia_smi.txt", "rocm-smi": "rocm_smi.txt"}


def probe_hardware(folder: Path, device: "torch.device") -> dict[str, Any]:
    """Write the hardware record to ``folder`` and return the content of ``hw.json``.

    GPUs are queried only if ``device`` is a GPU, because this creates a context on it. Raises
    PreflightError if the folder is not writable.
    """
    record = describe_hardware(folder, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / HARDWARE_FILE, record)
        for program, name in _PROGRAMS.items():
            if shutil.which(program) or name == "nvidia_smi.txt":
                write_atomic(folder / name, _program_output(program))
    except OSError as error:
        raise write_error(folder, error) from error
    return record


def describe_hardware(folder: Path, device: "torch.device") -> dict[str, Any]:
    """Return hardware facts, each visible GPU, and the free disk space of ``folder``."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return {
        "schema_version": SCHEMA_VERSION,
        **hardware(device),
        "gpus": _gpus() if device.type == "cuda" else [],
        "disk_free_gib": round(shutil.disk_usage(existing).free / GIB, 1),
    }


def _gpus() -> list[Mapping[str, Any]]:
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": gpu.name, "vram_gib": round(gpu.total_memory / GIB, 1)} for gpu in properties]


def _program_output(program: str) -> str:
    """Return the output of ``program``, or a line that records its absence or failure."""
    if shutil.which(program) is None:
        return f"absent: no program {program} on this machine\n"
    try:
        code, output, errors = run_program([program])
    except PreflightError as error:
        return f"failed: {error.problems[0].what}\n"
    return output if code == 0 and output.strip() else f"failed: exit {code}\n{output}{errors}"
