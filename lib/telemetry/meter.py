"""What a reading of the machine holds, whoever made the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment. A counter that the driver does not have is None."""

    # Its place among all of the machine's GPUs.
    index: int
    # Share of the last sampling period in which a kernel ran, in percent.
    compute_util: float | None
    memory_used_mib: float | None
    memory_total_mib: float | None
    power_watts: float | None
    temperature_celsius: float | None


class Meter(Protocol):
    """The GPUs of a run."""

    def read(self) -> Sequence[GpuReading]:
        """One reading for each. OSError where the driver does not answer any more."""


class NoGpus:
    """Of a run on the CPU."""

    def read(self) -> Sequence[GpuReading]:
        """None."""
        return ()


def visible(variable: str, count: int) -> list[int | str]:
    """The GPUs that a ``*_VISIBLE_DEVICES`` value shows, by index or by the driver's own name.

    Vendor libraries count all GPUs of the machine, whatever the variable hides from torch.
    """
    if not variable:
        return list(range(count))
    names = [name.strip() for name in variable.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]
