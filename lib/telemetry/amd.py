"""Readings of AMD GPUs, from the rocm-smi program of every ROCm installation.

Keys are the keys of rocm-smi's JSON. If a card lacks a counter, its key is missing or N/A.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from lib.telemetry.meter import GpuReading, visible

_MIB = 1 << 20
_COMMAND = ["rocm-smi", "--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--json"]
# Key names differ between driver versions; the first key present is used.
_POWER = ("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)")
_TEMPERATURE = ("Temperature (Sensor edge) (C)", "Temperature (Sensor junction) (C)")
_TIMEOUT_SECONDS = 10


class AmdMeter:
    """Implementation of ``lib.telemetry.meter.Meter`` for AMD GPUs."""

    def __init__(self, gpus: int) -> None:
        """Select the first ``gpus`` visible GPUs. Raises OSError if rocm-smi is missing or fails."""
        variable = os.environ.get("HIP_VISIBLE_DEVICES", "") or os.environ.get(
            "CUDA_VISIBLE_DEVICES", ""
        )
        self._cards = [f"card{name}" for name in visible(variable, gpus)[:gpus]]
        self.read()

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU."""
        try:
            output = subprocess.run(
                _COMMAND, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS
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
    """Return the first of ``names`` with a numeric value."""
    for name in names:
        try:
            return float(card[name])
        except (KeyError, ValueError):
            continue
    return None
