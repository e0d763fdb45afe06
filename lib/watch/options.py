"""Thresholds of the alarm rules. Imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class WatchOptions:
    """Thresholds of the alarm rules; none of them changes a result."""

    stall_seconds: int = symbol("WATCH_STALL", identity=False)
    plateau_iterations: int = symbol("WATCH_PLATEAU", identity=False)
    speed_percent: int = symbol("WATCH_SPEED", identity=False)
    memory_percent: int = symbol("WATCH_MEMORY", identity=False)
    gate_entropy: float = symbol("WATCH_GATE_ENTROPY", low=0.0, high=100.0, identity=False)
    gate_max: float = symbol("WATCH_GATE_MAX", low=0.0, high=1.0, identity=False)
