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
from typing import Literal

import torch

from gpt2.config import Config
from gpt2.memory.fake_step import FakeTrainingStep, StepNeeds
from gpt2.memory.micro_batch import LIMITS, Limits
from gpt2.memory.tracker import CATEGORIES, BytesByCategory
from lib.console import show
from lib.env.gpu import CONTEXT_BYTES, Gpu, find_gpu, local_gpu, usable_cores
from lib.errors import EXIT_DONE, EXIT_PREFLIGHT
from lib.units import GIB, format_size

# Resident memory of a training process on a CPU relative to its tensors: fragmentation, and buffers
# of matrix products. 3 to 20 % in five cases (gpt2.memory.measure).
CPU_OVERHEAD = 0.11
# A GPU with this much less memory than the others is left to the programs that use it.
_IN_USE_BYTES = 2 * GIB
HEADINGS = ("params", "MFLOP/token", "peak of GPU memory", "largest micro-batch", "CPU memory")


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted needs of one process of a run.

    ``peak_bytes`` are the tensors at peak memory, which is reached in ``stage``; only ``fits`` adds
    the overhead of a GPU's context and allocator (``lib.env.gpu``). ``flops_per_token`` is
    counted in the fake step and includes recomputation; ``declared_flops_per_token`` is the model's
    own count without recomputation. ``largest_micro_batch`` is the largest divisor of a process's
    share of GLOBAL_BATCH that fits, or 0 if a single sequence does not fit.
    """

    parameters: int
    flops_per_token: float
    declared_flops_per_token: float
    peak_bytes: Mapping[str, int]
    stage: str
    # Resident memory of the same step on a CPU, with the CPU's kernels and allocator.
    cpu_peak_bytes: int
    memory_gib: float
    largest_micro_batch: int
    fits: bool

    @property
    def total_bytes(self) -> int:
        """Return the sum over all categories."""
        return sum(self.peak_bytes.values())

    def row(self) -> tuple[str, ...]:
        """Return one line of a table with the columns ``HEADINGS``."""
        return (
            f"{self.parameters:,}",
            f"{self.flops_per_token / 1e6:,.0f}",
            f"{format_size(self.total_bytes)} of {format_size(self.memory_gib * GIB)}",
            str(self.largest_micro_batch),
            format_size(self.cpu_peak_bytes),
        )


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
    peak, stage = _highest(needs)
    cpu_peak, _ = _highest(training.needs(None, batch)) if gpu else (peak, stage)
    memory = gpu or _this_machine()
    largest = _largest_micro_batch(config, training, needs, gpu, memory)
    shape = config.model.shape
    return MemoryEstimate(
        parameters=training.parameters,
        flops_per_token=needs.flops / (batch * shape.block_size),
        declared_flops_per_token=config.model.flops_per_token(),
        peak_bytes={name: peak[name] for name in CATEGORIES},
        stage=stage,
        cpu_peak_bytes=round(cpu_peak.total() * (1 + CPU_OVERHEAD)),
        memory_gib=memory.memory_gib,
        largest_micro_batch=largest,
        fits=memory.holds(peak.total()),
    )


def peak_bytes(config: Config, gpu: Gpu) -> int:
    """Return the peak bytes of the tensors of a step on ``gpu``.

    Raises RunError with the source line if dimensions do not fit.
    """
    return _highest(FakeTrainingStep(config).needs(gpu, config.train.batch_size))[0].total()


def _largest_micro_batch(
    config: Config, training: FakeTrainingStep, needs: StepNeeds, gpu: Gpu | None, memory: Gpu
) -> int:
    """Extrapolate linearly from two micro-batch sizes, separately for every stage's peak."""
    train, batch = config.train, config.train.batch_size
    other = batch // 2 or 2
    points = training.needs(gpu, other)
    share = train.global_batch // train.gpus
    # Micro-batches smaller than the whole share accumulate gradients.
    ranks = training.sharded.ranks
    gradients = 0 if train.grad_accumulation > 1 else 4 * training.parameters // ranks

    def peak(size: int) -> float:
        at_batch = {stage: bytes_.total() for stage, bytes_ in needs.peaks.items()}
        slopes = {s: (at_batch[s] - points.peaks[s].total()) / (batch - other) for s in at_batch}
        highest = max(at_batch[s] + slopes[s] * (size - batch) for s in at_batch)
        return highest + (gradients if size < share else 0)

    sizes = (size for size in range(share, 0, -1) if share % size == 0)
    return next((size for size in sizes if memory.holds(peak(size))), 0)


def largest_that_fits(config: Config, device: Gpu) -> int:
    """Return the largest micro-batch that fits the memory of ``device``; 0 if no sequence does.

    The kernels are those of the configured device.
    """
    gpu = None if config.machine.device == "cpu" else device
    training = FakeTrainingStep(config)
    share = config.train.global_batch // config.train.gpus
    sizes = [size for size in range(1, share + 1) if share % size == 0]

    def exceeds(size: int) -> bool:
        return not device.holds(_highest(training.needs(gpu, size))[0].total())

    return [0, *sizes][bisect_left(sizes, True, key=exceeds)]


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


def _highest(needs: StepNeeds) -> tuple[BytesByCategory, str]:
    """Return the bytes of the stage with the highest peak, and the stage's name."""
    stage = max(needs.peaks, key=lambda stage: needs.peaks[stage].total())
    return needs.peaks[stage], stage


def _this_machine() -> Gpu:
    """Return the memory of this machine as a Gpu."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Gpu("cpu", memory_bytes / GIB, {})


def micro_batch_limits(configs: Mapping[str, Config]) -> Limits | None:
    """Predict the limits of this machine; None without the GPU that the configurations require."""
    device = free_memory(next(iter(configs.values())))
    if device is None:
        return None
    sizes = {name: largest_that_fits(config, device) for name, config in configs.items()}
    shares = [c.train.global_batch // c.train.gpus for c in configs.values()]
    return Limits(device.name, device.memory_gib, sizes, shares)


def main() -> int:
    """Predict the memory, or the limits, of each configuration on stdin."""
    (name,) = sys.argv[1:]
    values = json.load(sys.stdin)
    if name == LIMITS:
        limits = micro_batch_limits({run: Config.from_values(each) for run, each in values.items()})
        show(json.dumps(limits and dataclasses.asdict(limits)))
        return EXIT_DONE if limits else EXIT_PREFLIGHT
    gpu = find_gpu(name)
    show(json.dumps([peak_bytes(Config.from_values(each), gpu) for each in values]))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
