"""Options of the training environment; imports no torch."""

from dataclasses import dataclass

from lib.config.field import kconfig_field


@dataclass(frozen=True)
class EnvironmentConfig:
    """Conditions checked before training starts. None of them affects results."""

    # any, conda, uv or venv.
    policy: str = kconfig_field("ENV_POLICY", identity=False)
    # Last component of the environment's path; "" accepts any.
    name: str = kconfig_field("ENV_NAME", identity=False)
    # Python version or a prefix of it; "" accepts any.
    python: str = kconfig_field("ENV_PYTHON", identity=False)
    forbid_foreign: bool = kconfig_field("ENV_FORBID_FOREIGN", identity=False)
    # Relative to the tree; "" if there is no lock file.
    lock_file: str = kconfig_field("ENV_LOCK_FILE", identity=False)
    lock_enforce: bool = kconfig_field("ENV_LOCK_ENFORCE", identity=False)
    snapshot: bool = kconfig_field("ENV_SNAPSHOT", identity=False)
    snapshot_max_age_hours: int = kconfig_field("ENV_SNAPSHOT_MAX_AGE_HOURS", identity=False)
    gpu_pinned: bool = kconfig_field("GPU_PINNED", identity=False)
    min_disk_gib: int = kconfig_field("MIN_DISK_GIB", identity=False)


@dataclass(frozen=True)
class MachineConfig:
    """Device, precision and kernel options; each field is a Kconfig symbol."""

    # cpu or cuda; ROCm builds of torch call their devices cuda too.
    device: str = kconfig_field("DEVICE")
    # fp32, bf16 or fp16 (fp16 with a gradient scaler)
    precision: str = kconfig_field("PRECISION")
    # Threads per process; part of the identity because sums depend on how work is split.
    cpu_threads: int = kconfig_field("CPU_THREADS", form=True)
    compile: bool = kconfig_field("COMPILE", form=True)
    # Operations without a deterministic implementation: off, warn or strict.
    deterministic: str = kconfig_field("DETERMINISTIC")
    # Precision inside fp32 matrix products: highest, high (TF32) or medium (bf16).
    matmul_precision: str = kconfig_field("MATMUL_PRECISION")
    cudnn_benchmark: bool = kconfig_field("CUDNN_BENCHMARK")
    expandable_segments: bool = kconfig_field("EXPANDABLE_SEGMENTS", identity=False)
    # Iterations before timing starts, on a copy: weights, optimizer and RNG are unaffected.
    warmup_iterations: int = kconfig_field("WARMUP_ITERATIONS", identity=False)
    # ddp or fsdp, of a run with several processes.
    data_parallel: str = kconfig_field("DATA_PARALLEL", form=True, off="ddp")
    # Conservative gradient synchronization; may change the order of sums.
    ddp_safe: bool = kconfig_field("DDP_SAFE")

    @property
    def repeats(self) -> bool:
        return self.deterministic != "off"


@dataclass(frozen=True)
class NumericsOptions:
    """Debug flags of a run. Each flag costs time, so timings record the active flags."""

    # Check loss and gradients before clipping, every ``every`` iterations.
    check: bool = kconfig_field("CHECK_NUMERICS", identity=False)
    every: int = kconfig_field("CHECK_NUMERICS_EVERY", identity=False)
    detect_anomaly: bool = kconfig_field("DETECT_ANOMALY", identity=False)

    def due(self, iteration: int) -> bool:
        """Return whether ``iteration``, counted from 1, is checked before its update."""
        return self.check and iteration % self.every == 0

    @property
    def flags(self) -> dict[str, bool]:
        """Return all debug flags by their name in records."""
        return {"check_numerics": self.check, "detect_anomaly": self.detect_anomaly}

    @property
    def debug_flags(self) -> list[str]:
        """Return the names of active flags; speed measured with a flag is not representative."""
        return [name for name, on in self.flags.items() if on]
