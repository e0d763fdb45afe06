"""Options of telemetry and trackers. Imports neither torch nor a tracker library."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import ClassVar

from lib.config.field import SymbolValue, from_symbols, kconfig_field
from lib.config.registry import Registry
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class TelemetryOptions:
    """Options of telemetry, model statistics and alarms; none of them changes a result."""

    # 0 disables sampling.
    interval_seconds: int = kconfig_field("TELEMETRY_INTERVAL", identity=False)
    # Iterations; 0 disables statistics.
    statistics_interval: int = kconfig_field("STATISTICS_INTERVAL", identity=False)
    # Number of sequences that the statistics are computed on.
    statistics_rows: int = kconfig_field("STATISTICS_ROWS", identity=False)
    # A number, or "" for the value in the GPU table.
    peak: str = kconfig_field("PEAK_TFLOPS", identity=False)
    # Without a heartbeat, for make watch.
    stall_seconds: int = kconfig_field("WATCH_STALL", identity=False)

    def __post_init__(self) -> None:
        try:
            valid = self.peak_tflops is None or 0.0 < self.peak_tflops < math.inf
        except ValueError:
            valid = False
        if not valid:
            what = f"PEAK_TFLOPS: invalid value (expected a number > 0, got {self.peak!r})"
            raise ConfigError(Problem(what, code="config.invalid-value"))

    @property
    def peak_tflops(self) -> float | None:
        """Return the user's value for one device in TFLOP/s; None if not set."""
        return float(self.peak) if self.peak else None


@dataclass(frozen=True)
class TrackerOptions:
    """Options of a tracker; only W&B has any."""

    # tracker_ and the name of the Python package.
    name: ClassVar[str]


@dataclass(frozen=True)
class TrackerWandbOptions(TrackerOptions):
    """Mode and entity of the Weights & Biases tracker."""

    name = "tracker_wandb"
    # online or offline
    mode: str = kconfig_field("TRACKER_WANDB_MODE", identity=False)
    # "" selects the account's default entity.
    entity: str = kconfig_field("TRACKER_WANDB_ENTITY", identity=False)


class TrackerTrackioOptions(TrackerOptions):
    """Options of the trackio tracker."""

    name = "tracker_trackio"


class TrackerTensorboardOptions(TrackerOptions):
    """Options of the TensorBoard tracker."""

    name = "tracker_tensorboard"


TRACKERS: Registry[TrackerOptions] = Registry(
    "tracker", TrackerWandbOptions, TrackerTrackioOptions, TrackerTensorboardOptions
)


@dataclass(frozen=True)
class TrackingConfig:
    """Any number of trackers; none of these settings can change a run's result."""

    trackers: tuple[TrackerOptions, ...]
    # "" selects a name derived from the study and the run directory.
    project: str = kconfig_field("TRACKER_PROJECT", identity=False)
    run_name: str = kconfig_field("TRACKER_RUN_NAME", identity=False)

    @classmethod
    def from_values(cls, values: Mapping[str, SymbolValue]) -> "TrackingConfig":
        """Select the trackers and fill in their options. Raises ConfigError for an invalid symbol."""
        return from_symbols(cls, values, trackers=TRACKERS.bind(values))

    def missing_packages(self) -> list[Problem]:
        """Return a problem for each tracker package that is not installed."""
        problems = []
        for package in (each.name.removeprefix("tracker_") for each in self.trackers):
            # Looking for the module is not enough: wandb leaves a folder of that name behind.
            if not any(distributions(name=package)):
                what = f"TRACKER_{package.upper()}=y, but the package {package} is not installed"
                # All other packages are extras of pyproject.toml.
                extras = "" if package == "wandb" else f" EXTRAS={package}"
                advice = f"type: make setup{extras}"
                problems.append(Problem(what, next=advice, code="env.missing-package"))
        return problems
