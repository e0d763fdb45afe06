"""Table of GPUs: memory and peak throughput of each; imports no torch."""

import difflib
import functools
import os
import platform
import re
import resource
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lib.errors import ConfigError, Problem
from lib.units import GIB

if TYPE_CHECKING:
    import torch


# CUDA or HIP context with loaded kernels, and workspaces of the BLAS library.
CONTEXT_BYTES = GIB
# Overhead of torch's caching allocator relative to the tensors' bytes: free blocks that are too
# small for the next allocation.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Gpu:
    """Memory and peak throughput of a GPU model."""

    name: str
    # As the driver reports it to a program.
    memory_gib: float
    # Supported precision → the data sheet's peak of dense products in TFLOP/s.
    tflops: Mapping[str, float]
    # Whether torch has a flash attention kernel for this GPU: Ampere and later, and ROCm.
    flash: bool = True
    # ``tflops`` of the PCIe variant, if slower.
    pcie: Mapping[str, float] = field(default_factory=dict)

    def holds(self, tensor_bytes: float) -> bool:
        """Return whether tensors of ``tensor_bytes`` fit beside context and allocator overhead."""
        return tensor_bytes * (1 + FRAGMENTATION) + CONTEXT_BYTES <= self.memory_gib * GIB


def _peaks(fp32: float, tf32: float, half: float) -> dict[str, float]:
    """Return peaks for fp32, tf32 (omitted if 0), bf16 and fp16 (both ``half``)."""
    return {"fp32": fp32, "bf16": half, "fp16": half} | ({"tf32": tf32} if tf32 else {})


_VOLTA = {"fp32": 15.7, "fp16": 125.0}
_VOLTA_PCIE = {"fp32": 14.0, "fp16": 112.0}
# Peaks are from the vendors' data sheets (SXM or OAM variant if there are several; without
# sparsity). Memory is the value of torch.cuda.get_device_properties, below the nominal size because
# of error correction and the driver.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a10g", 22.0, _peaks(31.5, 35.0, 70.0)),
        Gpu("l4", 22.0, _peaks(30.3, 60.0, 121.0)),
        Gpu("l40s", 44.3, _peaks(91.6, 183.0, 362.0)),
        Gpu("rtx3090", 23.6, _peaks(35.6, 35.6, 71.0)),
        Gpu("rtx4090", 23.5, _peaks(82.6, 82.6, 165.2)),
        Gpu("t4", 14.5, {"fp32": 8.1, "fp16": 65.0}, flash=False),
        Gpu("v100-16", 15.7, _VOLTA, flash=False, pcie=_VOLTA_PCIE),
        Gpu("v100-32", 31.7, _VOLTA, flash=False, pcie=_VOLTA_PCIE),
        Gpu("a100-40", 39.3, _peaks(19.5, 156.0, 312.0)),
        Gpu("a100-80", 79.1, _peaks(19.5, 156.0, 312.0)),
        Gpu("h100", 79.1, _peaks(66.9, 494.7, 989.4), pcie=_peaks(51.2, 378.0, 756.0)),
        Gpu("h200", 139.7, _peaks(66.9, 494.7, 989.4)),
        Gpu("b200", 178.3, _peaks(75.0, 1125.0, 2250.0)),
        Gpu("rtx5090", 31.4, _peaks(104.8, 104.8, 209.5)),
        Gpu("w7900", 44.9, _peaks(61.3, 0.0, 122.6)),
        Gpu("mi300x", 191.5, _peaks(163.4, 653.7, 1307.4)),
    )
}
# Words of full product names that do not identify a GPU of the table.
_NOISE = r"nvidia|amd|geforce|radeon|instinct|tesla|pro|sxm\d?|pcie|hbm\d?e?|gib|gb|tensor|core|gpu"


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, in any common spelling. Raises ConfigError with the closest names."""
    key = _key(name)
    keys = {_key(gpu_name): gpu for gpu_name, gpu in GPUS.items()}
    if key in keys:
        return keys[key]
    # A memory size that is not part of the name, as in ``H100 80GB``.
    if (short_key := re.sub(r"(?<=\D\d\d\d)\d{2,3}$", "", key)) in keys:
        return keys[short_key]
    matches = [gpu.name for other, gpu in keys.items() if key and other.startswith(key)]
    candidates = matches or [
        keys[match].name for match in difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    ]
    kind = "ambiguous" if matches else "unknown"
    advice = f"use one of: {', '.join(candidates or GPUS)}; or set CHECK_GPU_MEMORY_GB=24"
    raise ConfigError(Problem(f"GPU={name}: {kind} GPU name", next=advice, code=f"gpu.{kind}-name"))


def peak_tflops(device_name: str, precision: str, matmul_precision: str) -> float | None:
    """Return the data sheet's peak of dense products in TFLOP/s for a driver's device name.

    If ``matmul_precision`` allows rounding fp32 products, it is the peak of TF32 if there is one.
    Returns None for a device that is not in the table.
    """
    try:
        gpu = find_gpu(device_name)
    except ConfigError:
        return None
    peaks = gpu.pcie if gpu.pcie and "pcie" in device_name.lower() else gpu.tflops
    rounded = precision == "fp32" and matmul_precision != "highest"
    return peaks["tf32"] if rounded and "tf32" in peaks else peaks.get(precision)


def gpu_with_memory(memory_gib: float) -> Gpu:
    """Return a GPU outside the table of which only the memory is specified."""
    return Gpu(f"{memory_gib:g} GiB", memory_gib, {})


# Devices of the drivers of NVIDIA, AMD, and either under WSL.
_GPU_DEVICES, _GPU_NODES = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def count_gpus() -> int:
    """Return the number of GPUs that this process may use; 0 if unknown. Imports no torch."""
    # Each GPU is a device of NVIDIA's driver, or a node of AMD's with an id other than 0.
    nodes = _GPU_NODES.glob("*/gpu_id")
    count = sum(1 for _ in _GPU_DEVICES.glob("nvidia[0-9]*"))
    count += sum(path.read_text(encoding="ascii").strip() != "0" for path in nodes)
    selected = selected_gpus(rocm=not any(_GPU_DEVICES.glob("nvidia[0-9]*")))
    return min(count, len(selected.split(","))) if selected else count


def local_gpu() -> Gpu | None:
    """Return the first GPU of this machine, or None; imports torch if there is a driver."""
    if not any(os.path.exists(path) for path in _DRIVERS):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    flash = torch.version.hip is not None or properties.major >= 8
    return Gpu(properties.name, properties.total_memory / GIB, {}, flash)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(_NOISE, "", name.lower()))


_CUDA = "CUDA_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"
# Variables that select the GPUs of a process.
VISIBLE = frozenset((_HIP, _CUDA))
# Variables that hide all GPUs: a process on the CPU then starts no thread of a GPU's driver, and
# its forks can run autograd.
NO_GPUS = {_CUDA: "-1", _HIP: "-1"}


@functools.cache
def cpu_model() -> str:
    """Return the processor name reported by the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def booted_machine() -> str:
    """Return an id of this machine since its boot and of its process ids; its name without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def usable_cores() -> int:
    """Return the number of cores that this process may use; of a SLURM job, those it was given."""
    cores, given = len(os.sched_getaffinity(0)), os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(cores, int(given)) if given.isdecimal() and int(given) else cores


def gpu_groups(
    count: int,
    size: int,
    rocm: bool,
    variables: Mapping[str, str] = os.environ,
    busy: Collection[int] = (),
) -> list[dict[str, str]]:
    """Return one environment per group of ``size`` GPUs that makes only this group visible.

    ``count`` is the number of visible GPUs. GPUs hidden by the user stay hidden; unused are those
    beyond the last full group, and those of ``busy``, by their index for the driver.
    """
    visible = selected_gpus(rocm, variables)
    indices = [str(i) for i in range(count) if i not in busy]
    names = [n.strip() for n in visible.split(",")][:count] if visible else indices
    groups = [names[i : i + size] for i in range(0, len(names) - size + 1, size)]
    # The driver counts the GPUs by their bus, CUDA by their speed unless this variable is set.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if busy and not rocm else {}
    return [{_HIP if rocm else _CUDA: ",".join(group), **order} for group in groups]


def selected_gpus(rocm: bool, variables: Mapping[str, str] = os.environ) -> str:
    """Return the GPUs that the user or a batch system made visible; "" for all."""
    return (variables.get(_HIP, "") if rocm else "") or variables.get(_CUDA, "")


def peak_memory_bytes(device: "torch.device") -> int:
    """Return the peak so far, of tensors on a GPU, of the resident set of this process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Bytes on macOS, KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
