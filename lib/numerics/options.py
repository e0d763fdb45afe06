"""How closely a run watches its numbers; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class NumericsOptions:
    """The debug flags of a run. Either one costs time, so a timing says which were on."""

    # Look at loss and gradients before they are clipped, each ``every`` iterations.
    check: bool = symbol("CHECK_NUMERICS", identity=False)
    every: int = symbol("CHECK_NUMERICS_EVERY", identity=False)
    detect_anomaly: bool = symbol("DETECT_ANOMALY", identity=False)

    def due(self, iteration: int) -> bool:
        """Whether ``iteration``, counted from 1, is looked at before its update."""
        return self.check and iteration % self.every == 0

    @property
    def flags(self) -> dict[str, bool]:
        """What looks for faults while training, and slows it down, as records call it."""
        return {"check_numerics": self.check, "detect_anomaly": self.detect_anomaly}

    @property
    def debug_flags(self) -> list[str]:
        """Names of the flags that are on: a speed measured under one is no claim."""
        return [name for name, on in self.flags.items() if on]
