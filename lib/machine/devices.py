"""CPU model, core count and GPU groups, as far as they are available without importing torch."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

_CUDA = "CUDA_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"


def cpu_model() -> str:
    """Return the processor name reported by the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_groups(
    count: int, size: int, rocm: bool, variables: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Return one environment per group of ``size`` GPUs that makes only this group visible.

    ``count`` is the number of visible GPUs. GPUs hidden by the user stay hidden; GPUs beyond the
    last full group are unused. ROCm uses HIP_VISIBLE_DEVICES and falls back to
    CUDA_VISIBLE_DEVICES.
    """
    visible = variables.get(_CUDA, "")
    if rocm:
        visible = variables.get(_HIP, "") or visible
    names = [n.strip() for n in visible.split(",")] if visible else [str(i) for i in range(count)]
    groups = [names[i : i + size] for i in range(0, count - size + 1, size)]
    return [{_HIP if rocm else _CUDA: ",".join(group)} for group in groups]
