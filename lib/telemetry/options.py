"""Sampling intervals of telemetry and of model statistics. Imports no torch."""

import math
from dataclasses import dataclass

from lib.binding import symbol
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class TelemetryOptions:
    """Options of telemetry and model statistics; none of them changes a result."""

    # 0 disables sampling.
    interval_seconds: int = symbol("TELEMETRY_INTERVAL", identity=False)
    # Iterations; 0 disables statistics.
    statistics_interval: int = symbol("STATISTICS_INTERVAL", identity=False)
    # Number of sequences that the statistics are computed on.
    statistics_rows: int = symbol("STATISTICS_ROWS", identity=False)
    # A number, or "" for the value in the GPU table.
    peak: str = symbol("PEAK_TFLOPS", identity=False)

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
