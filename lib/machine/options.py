"""Options of the machine: device, precision and kernels; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class MachineConfig:
    """Device, precision and kernel options; each field is a Kconfig symbol."""

    # cpu or cuda; ROCm builds of torch call their devices cuda too.
    device: str = symbol("DEVICE")
    # fp32, bf16 or fp16 (fp16 with a gradient scaler)
    precision: str = symbol("PRECISION")
    # Threads per process; part of the identity because sums depend on how work is split.
    cpu_threads: int = symbol("CPU_THREADS", form=True)
    compile: bool = symbol("COMPILE", form=True)
    # Operations without a deterministic implementation: off, warn or strict.
    deterministic: str = symbol("DETERMINISTIC")
    # Precision inside fp32 matrix products: highest, high (TF32) or medium (bf16).
    matmul_precision: str = symbol("MATMUL_PRECISION")
    cudnn_benchmark: bool = symbol("CUDNN_BENCHMARK")
    expandable_segments: bool = symbol("EXPANDABLE_SEGMENTS", identity=False)
    # Iterations before timing starts, on a copy: weights, optimizer and RNG are unaffected.
    warmup_iterations: int = symbol("WARMUP_ITERATIONS", identity=False)
    # Conservative gradient synchronization; may change the order of sums.
    ddp_safe: bool = symbol("DDP_SAFE")

    @property
    def repeats(self) -> bool:
        """Return whether deterministic implementations are used if available."""
        return self.deterministic != "off"
