"""Memory and FLOPs of a step on a target, predicted before a GPU is used.

    python -m gpt2.memory.predict GPU < VALUES.json
    python -m gpt2.memory.predict limits < VALUES.json

read configurations (symbol values), and print as JSON the peak bytes of a step of each, or the largest
micro-batch of each on this machine's device.
"""

import dataclasses
import json
import os
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpt2.config import Config
from gpt2.memory.fake_step import FakeTrainingStep
from gpt2.memory.micro_batch import LIMITS
from gpt2.memory.tracker import CATEGORIES
from lib.console import show
from lib.env.gpu import CONTEXT_BYTES, Gpu, find_gpu, local_gpu, usable_cores
from lib.errors import EXIT_DONE, EXIT_PREFLIGHT
from lib.units import GIB, format_size

# Resident memory of a training process on a CPU relative to its tensors: fragmentation, and buffers
# of matrix products. 3 to 20 % in five cases of 124M.
CPU_OVERHEAD = 0.11
# A GPU with this much less memory than the others is left to the programs that use it.
_IN_USE_BYTES = 2 * GIB


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted needs of one process of a run.

    ``peak_bytes`` are the tensors at peak memory, by category, which is reached in ``stage``; only
    ``fits`` adds the overhead of a GPU's context and allocator. ``flops_per_token`` includes
    recomputation. ``largest_micro_batch`` is the largest divisor of a process's share of GLOBAL_BATCH
    that fits, or 0 if a single sequence does not fit.
    """

    parameters: int
    flops_per_token: float
    peak_bytes: Mapping[str, int]
    stage: str
    # Resident memory of the same step on a CPU, with the CPU's kernels and allocator.
    cpu_peak_bytes: int
    memory_gib: float
    largest_micro_batch: int
    fits: bool

    @property
    def total_bytes(self) -> int:
        return sum(self.peak_bytes.values())

    def row(self) -> dict[str, str]:
        """Return the columns of a line of a table."""
        memory = f"{format_size(self.total_bytes)} of {format_size(self.memory_gib * GIB)}"
        return {
            "params": f"{self.parameters:,}",
            "MFLOP/token": f"{self.flops_per_token / 1e6:,.0f}",
            "peak of GPU memory": memory,
            "largest micro-batch": str(self.largest_micro_batch),
            "CPU memory": format_size(self.cpu_peak_bytes),
        }


def estimate(config: Config, target: Gpu | Literal["cpu"]) -> MemoryEstimate:
    """Return the footprint of ``config`` on ``target``, from a step of fake tensors on the CPU.

    Model, batch, sequence and precision are the configured ones; torch.compile is ignored. The
    GPU's table entry determines kernels and memory; "cpu" uses this machine's. Raises RunError with
    the source line if dimensions do not fit.
    """
    gpu = None if target == "cpu" else target
    training = FakeTrainingStep(config)
    batch = config.train.batch_size
    needs = training.needs(gpu, batch)
    peak, stage = needs.highest()
    attention = config.model.attention
    # Without kernels of GPUs alone.
    backend = "auto" if attention.backend in ("efficient", "triton") else attention.backend
    pattern, on_cpu = attention.pattern.for_any_device(), training
    if gpu and (backend, pattern) != (attention.backend, attention.pattern):
        attention = dataclasses.replace(attention, backend=backend, pattern=pattern)
        model = dataclasses.replace(config.model, attention=attention)
        on_cpu = FakeTrainingStep(dataclasses.replace(config, model=model))
    cpu_peak, _ = (on_cpu.needs(None, batch) if gpu else needs).highest()
    memory = gpu or _this_machine()
    fits = memory.holds(peak.total())
    return MemoryEstimate(
        parameters=training.parameters,
        flops_per_token=needs.flops / (batch * config.model.shape.block_size),
        peak_bytes={name: peak[name] for name in CATEGORIES},
        stage=stage,
        cpu_peak_bytes=round(cpu_peak.total() * (1 + CPU_OVERHEAD)),
        memory_gib=memory.memory_gib,
        largest_micro_batch=largest_that_fits(training, gpu, memory, batch if fits else 0),
        fits=fits,
    )


def largest_that_fits(
    training: FakeTrainingStep, gpu: Gpu | None, memory: Gpu, least: int = 0
) -> int:
    """Return the largest micro-batch of a step with the kernels of ``gpu`` that fits in ``memory``.

    It divides the share of GLOBAL_BATCH of a process; 0 if no sequence fits. Memory grows with the
    micro-batch, so only sizes above ``least``, which fits, are simulated.
    """
    sizes = [size for size in range(least + 1, training.share + 1) if training.share % size == 0]

    def exceeds(size: int) -> bool:
        return not memory.holds(training.needs(gpu, size).highest()[0].total())

    # A step of all sequences often fits.
    if sizes and not exceeds(sizes[-1]):
        return sizes[-1]
    return [least, *sizes][bisect_left(sizes[:-1], True, key=exceeds)]


def free_memory(config: Config) -> Gpu | None:
    """Return the memory for one process of a run on this machine's device; None without its GPU.

    On a CPU, processes side by side divide the memory. On GPUs, the least of those that are free.
    """
    if config.machine.device == "cpu":
        memory = _this_machine()
        processes = max(config.train.gpus, usable_cores() // config.machine.cpu_threads)
        return dataclasses.replace(memory, memory_gib=memory.memory_gib / processes)
    gpu = local_gpu()
    if gpu is None:
        return None
    free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    # Other programs may use some of the GPUs. The context of this process counts as used.
    least = min(size for size in free if size > max(free) - _IN_USE_BYTES) + CONTEXT_BYTES
    return dataclasses.replace(gpu, memory_gib=min(gpu.memory_gib, least / GIB))


def _this_machine() -> Gpu:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Gpu("cpu", memory_bytes / GIB, {})


def micro_batch_limits(configs: Mapping[str, Config]) -> dict[str, Any] | None:
    """Predict the limits of this machine; None without the GPU that the configurations require.

    ``sizes`` has the largest micro-batch of each run by its name, ``shares`` the sequences of
    GLOBAL_BATCH of a process, ``memory_gib`` the memory of ``device`` for one process.
    """
    device = free_memory(next(iter(configs.values())))
    if device is None:
        return None
    sizes, shares = {}, []
    for name, config in configs.items():
        training = FakeTrainingStep(config)
        gpu = None if config.machine.device == "cpu" else device
        sizes[name] = largest_that_fits(training, gpu, device)
        shares.append(training.share)
    memory = {"device": device.name, "memory_gib": device.memory_gib}
    return {**memory, "sizes": sizes, "shares": shares}


def main() -> int:
    (name,) = sys.argv[1:]
    values = json.load(sys.stdin)
    if name == LIMITS:
        limits = micro_batch_limits({run: Config.from_values(each) for run, each in values.items()})
        show(json.dumps(limits))
        return EXIT_DONE if limits else EXIT_PREFLIGHT
    gpu, peaks = find_gpu(name), []
    for config in map(Config.from_values, values):
        needs = FakeTrainingStep(config).needs(gpu, config.train.batch_size)
        peaks.append(needs.highest()[0].total())
    show(json.dumps(peaks))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
