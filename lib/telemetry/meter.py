"""GPU readings in one format for all vendors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment. A counter that the driver lacks is None."""

    # Index among all GPUs of the machine.
    index: int
    # Percent of the last sampling period during which a kernel was running.
    compute_util: float | None
    memory_used_mib: float | None
    memory_total_mib: float | None
    power_watts: float | None
    temperature_celsius: float | None


class Meter(Protocol):
    """Interface for reading the GPUs of a run."""

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU. Raises OSError if the driver stops responding."""


class NoGpus:
    """Meter of a run on the CPU."""

    def read(self) -> Sequence[GpuReading]:
        """Return no readings."""
        return ()


def visible(variable: str, count: int) -> list[int | str]:
    """Return the GPUs listed in a ``*_VISIBLE_DEVICES`` value, by index or driver name.

    Vendor libraries count all GPUs of the machine, including GPUs that the variable hides from
    torch.
    """
    if not variable:
        return list(range(count))
    names = [name.strip() for name in variable.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]
