"""Options of telemetry, alarm rules and trackers. Imports neither torch nor a tracker library."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from lib.config.field import kconfig_field
from lib.config.registry import Registry
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class TelemetryOptions:
    """Options of telemetry and model statistics; none of them changes a result."""

    # 0 disables sampling.
    interval_seconds: int = kconfig_field("TELEMETRY_INTERVAL", identity=False)
    # Iterations; 0 disables statistics.
    statistics_interval: int = kconfig_field("STATISTICS_INTERVAL", identity=False)
    # Number of sequences that the statistics are computed on.
    statistics_rows: int = kconfig_field("STATISTICS_ROWS", identity=False)
    # A number, or "" for the value in the GPU table.
    peak: str = kconfig_field("PEAK_TFLOPS", identity=False)

    def __post_init__(self) -> None:
        if self.peak and not _is_peak(self.peak):
            what = f"PEAK_TFLOPS: invalid value (expected a number > 0, got {self.peak!r})"
            raise ConfigError(Problem(what, code="config.invalid-value"))

    @property
    def peak_tflops(self) -> float | None:
        """Return the user's value for one device in TFLOP/s; None if not set."""
        return float(self.peak) if self.peak else None


def _is_peak(text: str) -> bool:
    try:
        return 0.0 < float(text) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True)
class WatchOptions:
    """Thresholds of the alarm rules; none of them changes a result."""

    stall_seconds: int = kconfig_field("WATCH_STALL", identity=False)
    plateau_iterations: int = kconfig_field("WATCH_PLATEAU", identity=False)
    speed_percent: int = kconfig_field("WATCH_SPEED", identity=False)
    memory_percent: int = kconfig_field("WATCH_MEMORY", identity=False)
    gate_entropy: float = kconfig_field("WATCH_GATE_ENTROPY", low=0.0, high=100.0, identity=False)
    gate_max: float = kconfig_field("WATCH_GATE_MAX", low=0.0, high=1.0, identity=False)


class TrackerOptions(Protocol):
    """Options of a tracker."""

    name: ClassVar[str]
    # Python package that the tracker imports.
    package: ClassVar[str]


@dataclass(frozen=True)
class TrackerWandbOptions:
    """Mode and entity of the Weights & Biases tracker."""

    name: ClassVar[str] = "tracker_wandb"
    package: ClassVar[str] = "wandb"
    # online or offline
    mode: str = kconfig_field("TRACKER_WANDB_MODE", identity=False)
    # "" selects the account's default entity.
    entity: str = kconfig_field("TRACKER_WANDB_ENTITY", identity=False)


@dataclass(frozen=True)
class TrackerTrackioOptions:
    """Options of the trackio tracker; it has none."""

    name: ClassVar[str] = "tracker_trackio"
    package: ClassVar[str] = "trackio"


@dataclass(frozen=True)
class TrackerTensorboardOptions:
    """Options of the TensorBoard tracker; it has none."""

    name: ClassVar[str] = "tracker_tensorboard"
    package: ClassVar[str] = "tensorboard"


TRACKERS: Registry[TrackerOptions] = Registry(
    "tracker", TrackerWandbOptions, TrackerTrackioOptions, TrackerTensorboardOptions
)
