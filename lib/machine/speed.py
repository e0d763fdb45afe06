"""How fast this machine may train, from a matrix product of a tenth of a second; without torch.

Run as a module it measures, in a process of its own: the library that multiplies reads the number
of its threads once, when it is loaded.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from lib.machine.options import MachineConfig
from lib.modules import module_command

# Share of the matrix product's speed that training reaches on a CPU, in the FLOPs that a plan
# counts. Seen on two kinds of cores: 0.5 with a byte vocabulary and 128 columns, 0.8 at 124M.
_CPU_SHARE = 0.65
# A bf16 step at 124M against fp32, where the processor multiplies bf16 itself.
_BF16_GAIN = 1.8
_SIZE = 768
_REPETITIONS = 5


def flops_per_second(machine: MachineConfig) -> float | None:
    """Training speed to expect of one run, right within a factor of two or so.

    None for a GPU: nothing short of a run tells.
    """
    if machine.device != "cpu":
        return None
    gain = _BF16_GAIN if machine.precision == "bf16" and _multiplies_bf16() else 1.0
    return _CPU_SHARE * gain * _measured(machine.cpu_threads)


def _measured(threads: int) -> float:
    """fp32 FLOPs a second of a matrix product on ``threads`` threads."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads))
    command = module_command(__name__)
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(run.stdout)


def _multiplies_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _multiply() -> float:
    """FLOPs a second of the fastest of a few products."""
    import numpy as np

    a = np.random.default_rng(0).random((_SIZE, _SIZE), dtype=np.float32)
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    return 2 * _SIZE**3 / min(seconds)


if __name__ == "__main__":
    sys.stdout.write(f"{_multiply()}\n")
