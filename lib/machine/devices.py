"""What computes here, as far as that can be known without loading torch."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

_CUDA = "CUDA_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def gpu_groups(
    count: int, size: int, rocm: bool, variables: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """For each group of ``size`` of the ``count`` visible GPUs, the variable that shows it alone.

    GPUs that the user has hidden stay hidden; what is left over after the last group is not used.
    ROCm has a variable of its own, but takes CUDA's too where its own is not set.
    """
    given = variables.get(_CUDA, "")
    if rocm:
        given = variables.get(_HIP, "") or given
    names = [n.strip() for n in given.split(",")] if given else [str(i) for i in range(count)]
    groups = [names[i : i + size] for i in range(0, count - size + 1, size)]
    return [{_HIP if rocm else _CUDA: ",".join(group)} for group in groups]
