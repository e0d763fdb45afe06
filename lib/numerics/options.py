"""Options for the detection of non-finite values; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class NumericsOptions:
    """Debug flags of a run. Each flag costs time, so timings record the active flags."""

    # Check loss and gradients before clipping, every ``every`` iterations.
    check: bool = symbol("CHECK_NUMERICS", identity=False)
    every: int = symbol("CHECK_NUMERICS_EVERY", identity=False)
    detect_anomaly: bool = symbol("DETECT_ANOMALY", identity=False)

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
