"""How often the machine and the model's parts are looked at; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class TelemetryOptions:
    """None of them changes a result."""

    # 0 takes no samples.
    interval_seconds: int = symbol("TELEMETRY_INTERVAL", identity=False)
    # Iterations; 0 makes no statistics.
    statistics_interval: int = symbol("STATISTICS_INTERVAL", identity=False)
    # Sequences that they are made of.
    statistics_rows: int = symbol("STATISTICS_ROWS", identity=False)
