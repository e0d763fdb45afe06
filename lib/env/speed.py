"""Estimate of the training speed from a matrix product, in a process that sets its threads, without torch."""

import os
import subprocess
import timeit
from functools import cache
from pathlib import Path

from lib.console import show
from lib.env.options import MachineConfig
from lib.project import python_module_command

# Training speed on a CPU relative to the matrix product, in FLOPs as counted by a plan. Measured on
# two kinds of cores: 0.5 with a byte vocabulary and width 128, 0.8 at 124M.
_CPU_EFFICIENCY = 0.65
# Speed of a bf16 step at 124M relative to fp32 on a processor with bf16 instructions.
_BF16_SPEEDUP = 1.8
# Warning of runs in bf16 on a processor without instructions for it.
EMULATED = (
    "PRECISION_BF16=y: this processor has no bf16 instructions and may take 10 times as long as in "
    "fp32: type make SET=PRECISION_FP32=y"
)
_SIZE = 768
_REPETITIONS = 5


def flops_per_second(machine: MachineConfig) -> float | None:
    """Estimate FLOP/s of one run within a factor of two; None for a GPU and emulated bf16."""
    if machine.device != "cpu" or emulates_bf16(machine):
        return None
    speedup = _BF16_SPEEDUP if machine.precision == "bf16" else 1.0
    return _CPU_EFFICIENCY * speedup * _measure(machine.cpu_threads)


@cache
def _measure(threads: int) -> float:
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads))
    command = python_module_command(__name__)
    return float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def emulates_bf16(machine: MachineConfig) -> bool:
    """Return whether runs compute in bf16 on a processor without instructions for it."""
    return (machine.device, machine.precision) == ("cpu", "bf16") and not has_bf16_instructions()


@cache
def has_bf16_instructions() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    # The last one is an ARM processor's.
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


if __name__ == "__main__":
    import numpy as np

    a = np.random.default_rng(0).random((_SIZE, _SIZE), dtype=np.float32)
    fastest = min(timeit.repeat(lambda: a @ a, number=1, repeat=_REPETITIONS))
    show(f"{2 * _SIZE**3 / fastest}\n")
