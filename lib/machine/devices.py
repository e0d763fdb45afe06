"""What computes here, as far as that can be known without loading torch."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"


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


def gpu_slots(count: int, variables: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """The variable that gives a process one of the ``count`` visible GPUs, for each of them."""
    given = variables.get(_VISIBLE, "")
    names = given.split(",") if given else [str(i) for i in range(count)]
    return [{_VISIBLE: name.strip()} for name in names[:count]]
