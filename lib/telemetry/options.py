"""How often the machine is sampled; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class TelemetryOptions:
    """Sampling changes no result."""

    # 0 takes no samples.
    interval_seconds: int = symbol("TELEMETRY_INTERVAL", identity=False)
