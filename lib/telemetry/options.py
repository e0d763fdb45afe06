"""How often the machine and the model's parts are looked at; imports no torch."""

import math
from dataclasses import dataclass

from lib.binding import symbol
from lib.errors import ConfigError


@dataclass(frozen=True)
class TelemetryOptions:
    """None of them changes a result."""

    # 0 takes no samples.
    interval_seconds: int = symbol("TELEMETRY_INTERVAL", identity=False)
    # Iterations; 0 makes no statistics.
    statistics_interval: int = symbol("STATISTICS_INTERVAL", identity=False)
    # Sequences that they are made of.
    statistics_rows: int = symbol("STATISTICS_ROWS", identity=False)
    # A number, or nothing: then the table of GPUs decides.
    peak: str = symbol("PEAK_TFLOPS", identity=False)

    def __post_init__(self) -> None:
        if self.peak and not _is_peak(self.peak):
            raise ConfigError(f"PEAK_TFLOPS: {self.peak!r} is no number above 0, such as 989.4")

    @property
    def peak_tflops(self) -> float | None:
        """What the user says of one device."""
        return float(self.peak) if self.peak else None


def _is_peak(text: str) -> bool:
    try:
        return 0.0 < float(text) < math.inf
    except ValueError:
        return False
