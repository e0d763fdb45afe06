"""The GPUs that a check may be told to think of; imports no torch."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lib.errors import ConfigError, Problem

GIB = 1024**3
# CUDA or HIP context with loaded kernels, and the workspaces of the matrix library.
CONTEXT_BYTES = GIB
# Part of the tensors' bytes that torch's caching allocator holds on top, in blocks too small for
# what is asked for next.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Gpu:
    """What it has: memory as the driver reports it to a program, and what it computes at most.

    ``tflops`` is the data sheet's peak of dense products for each precision, TFLOP/s; one that the
    hardware lacks is missing.
    """

    name: str
    memory_gib: float
    tflops: Mapping[str, float]
    # Whether torch has a flash attention kernel for it: Ampere and later, and ROCm.
    flash: bool = True
    # ``tflops`` of its PCIe form, where that is slower.
    pcie: Mapping[str, float] = field(default_factory=dict)

    def holds(self, tensor_bytes: float) -> bool:
        """Whether tensors of so many bytes fit, beside the context and the allocator's losses."""
        return tensor_bytes * (1 + FRAGMENTATION) + CONTEXT_BYTES <= self.memory_gib * GIB


def _peaks(fp32: float, tf32: float, half: float) -> dict[str, float]:
    """fp32, tf32, and bf16 and fp16 alike; 0 is left out."""
    return {"fp32": fp32, "bf16": half, "fp16": half} | ({"tf32": tf32} if tf32 else {})


_VOLTA = {"fp32": 15.7, "fp16": 125.0}
_VOLTA_PCIE = {"fp32": 14.0, "fp16": 112.0}
# Peaks are from the vendors' data sheets (SXM or OAM form where there are several; without
# sparsity). Memory is what torch.cuda.get_device_properties reports, which is less than what is
# sold: error correction and the driver take their part.
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
        Gpu("w7900", 44.9, _peaks(61.3, 0.0, 122.6)),
        Gpu("mi300x", 191.5, _peaks(163.4, 653.7, 1307.4)),
    )
}
# Words of full product names that say nothing the table needs.
_NOISE = r"nvidia|amd|geforce|radeon|instinct|tesla|pro|sxm\d?|pcie|hbm\d?e?|gib|gb|tensor|core|gpu"


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, as loosely written as ``A100 80GB`` or ``NVIDIA A10G``.

    ConfigError names the nearest ones where there is none, or several.
    """
    wanted = _key(name)
    keys = {_key(known): gpu for known, gpu in GPUS.items()}
    if wanted in keys:
        return keys[wanted]
    # A size that is no part of the name, as in ``H100 80GB``.
    shorter = re.sub(r"(?<=\D\d\d\d)\d{2,3}$", "", wanted)
    if shorter in keys:
        return keys[shorter]
    several = [gpu.name for key, gpu in keys.items() if wanted and key.startswith(wanted)]
    near = several or [
        keys[key].name for key in difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    ]
    raise ConfigError(
        Problem(
            f"GPU={name}: {'which one?' if several else 'no such GPU in the table'}",
            next=f"one of: {', '.join(near or GPUS)}; or say CHECK_GPU_MEMORY_GB=24",
        )
    )


def peak_tflops(device_name: str, precision: str, matmul_precision: str) -> float | None:
    """The data sheet's peak of dense products, TFLOP/s, of the device that a driver calls so.

    ``precision`` is fp32, bf16 or fp16; fp32 products that may be rounded are TF32's where there
    are such. None for a device that is not in the table: no number is made up.
    """
    try:
        gpu = gpu_named(device_name)
    except ConfigError:
        return None
    peaks = gpu.pcie if gpu.pcie and "pcie" in device_name.lower() else gpu.tflops
    rounded = precision == "fp32" and matmul_precision != "highest"
    return peaks["tf32"] if rounded and "tf32" in peaks else peaks.get(precision)


def gpu_with_memory(memory_gib: float) -> Gpu:
    """A GPU that is not in the table, of which only the memory is known."""
    return Gpu(f"{memory_gib:g} GiB", memory_gib, {})


def present_gpu() -> Gpu | None:
    """The first GPU of this machine, None without one; imports torch and asks the driver."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    flash = torch.version.hip is not None or properties.major >= 8
    return Gpu(properties.name, properties.total_memory / GIB, {}, flash)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(_NOISE, "", name.lower()))
