"""Readings of AMD GPUs, through the program that every ROCm has.

Keys are those of rocm-smi's JSON; a card that lacks a counter leaves its key out, or says N/A.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from lib.telemetry.meter import GpuReading, visible

_MIB = 1 << 20
_COMMAND = ["rocm-smi", "--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--json"]
# Names have changed with the driver; the first that is there is taken.
_POWER = ("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)")
_TEMPERATURE = ("Temperature (Sensor edge) (C)", "Temperature (Sensor junction) (C)")
_SECONDS = 10


class AmdMeter:
    """Keeps ``lib.telemetry.meter.Meter``."""

    def __init__(self, gpus: int) -> None:
        """The first ``gpus`` that this process sees. OSError where there is no rocm-smi."""
        shown = os.environ.get("HIP_VISIBLE_DEVICES", "") or os.environ.get(
            "CUDA_VISIBLE_DEVICES", ""
        )
        self._cards = [f"card{name}" for name in visible(shown, gpus)[:gpus]]
        self.read()

    def read(self) -> Sequence[GpuReading]:
        """One reading for each GPU."""
        try:
            output = subprocess.run(
                _COMMAND, capture_output=True, text=True, check=True, timeout=_SECONDS
            ).stdout
            cards = json.loads(output)
            return [_reading(int(card.removeprefix("card")), cards[card]) for card in self._cards]
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            raise OSError(f"rocm-smi: {error}") from error


def _reading(index: int, card: Mapping[str, str]) -> GpuReading:
    used = _number(card, "VRAM Total Used Memory (B)")
    total = _number(card, "VRAM Total Memory (B)")
    return GpuReading(
        index=index,
        compute_util=_number(card, "GPU use (%)"),
        memory_used_mib=None if used is None else used / _MIB,
        memory_total_mib=None if total is None else total / _MIB,
        power_watts=_number(card, *_POWER),
        temperature_celsius=_number(card, *_TEMPERATURE),
    )


def _number(card: Mapping[str, str], *names: str) -> float | None:
    """The first of ``names`` that the card tells as a number."""
    for name in names:
        try:
            return float(card[name])
        except (KeyError, ValueError):
            continue
    return None
