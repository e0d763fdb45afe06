"""What a run asks of the machine; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class MachineConfig:
    """Device, precision and the habits of a GPU, each a symbol that acts."""

    # cpu or cuda; ROCm builds of torch call their devices cuda too.
    device: str = symbol("DEVICE")
    # fp32, bf16 or fp16 (fp16 with a gradient scaler)
    precision: str = symbol("PRECISION")
    # Threads of each process of a run; part of the identity because sums depend on how work is split.
    cpu_threads: int = symbol("CPU_THREADS", form=True)
    compile: bool = symbol("COMPILE", form=True)
    # Of operations without a deterministic form: off, warn or strict
    deterministic: str = symbol("DETERMINISTIC")
    # Inside fp32 matrix products: highest, high (TF32) or medium (bf16).
    matmul_precision: str = symbol("MATMUL_PRECISION")
    cudnn_benchmark: bool = symbol("CUDNN_BENCHMARK")
    expandable_segments: bool = symbol("EXPANDABLE_SEGMENTS", identity=False)
    # Iterations run before timing starts, on a copy: no trace in weights, optimizer or RNG.
    warmup_iterations: int = symbol("WARMUP_ITERATIONS", identity=False)
    # How gradients are shared among processes; the order of their sums may depend on it.
    ddp_safe: bool = symbol("DDP_SAFE")

    @property
    def repeats(self) -> bool:
        """Whether the deterministic form of an operation is taken where there is one."""
        return self.deterministic != "off"
