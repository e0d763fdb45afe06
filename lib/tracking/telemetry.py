"""Machine telemetry of a training run, sampled by a sidecar process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml

from lib.files import canonical_json, no_follow
from lib.runs.record import HardwareRecord, RunRecord
from lib.runs.run_dir import RunDir
from lib.tracking.sidecar import should_exit
from lib.units import MIB

# GPU readings in one format for all vendors.


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


class GpuMeter(Protocol):
    """Interface for reading the GPUs of a run."""

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU. Raises OSError if the driver stops responding."""


class NullGpuMeter:
    """Meter of a run on the CPU."""

    def read(self) -> Sequence[GpuReading]:
        """Return no readings."""
        return ()


def visible_gpus(variable: str, count: int) -> list[int | str]:
    """Return the GPUs listed in a ``*_VISIBLE_DEVICES`` value, by index or driver name.

    Vendor libraries count all GPUs of the machine, including GPUs that the variable hides from
    torch.
    """
    if not variable:
        return list(range(count))
    names = [name.strip() for name in variable.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]


# Resident memory and CPU time of processes, read from /proc.


def memory_and_cpu_seconds(pids: Sequence[int]) -> tuple[float, float]:
    """Return resident memory in MiB and CPU seconds, summed over ``pids``; ended ones count 0."""
    usage = [_memory_and_time(Path("/proc", str(pid))) for pid in pids]
    return sum(memory for memory, _ in usage), sum(seconds for _, seconds in usage)


def _memory_and_time(folder: Path) -> tuple[float, float]:
    try:
        pages = int((folder / "statm").read_text(encoding="utf-8").split()[1])
        # Skip the process name, which is in parentheses and may contain any character.
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    ticks = int(fields[11]) + int(fields[12])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB, ticks / os.sysconf("SC_CLK_TCK")


# Readings of NVIDIA GPUs, from the driver's management library (NVML).


class NvidiaMeter:
    """Implementation of ``lib.tracking.telemetry.GpuMeter`` for NVIDIA GPUs."""

    def __init__(self, gpus: int) -> None:
        """Select the first ``gpus`` visible GPUs. Raises OSError if there is no driver."""
        try:
            pynvml.nvmlInit()
            shown = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus)
            self._handles = [_handle(name) for name in shown[:gpus]]
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU."""
        return [_nvidia_reading(handle) for handle in self._handles]


def _handle(name: int | str) -> Any:
    if isinstance(name, int):
        return pynvml.nvmlDeviceGetHandleByIndex(name)
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _nvidia_reading(handle: Any) -> GpuReading:
    memory = _query(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _query(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    milliwatts = _query(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    sensor = pynvml.NVML_TEMPERATURE_GPU
    celsius = _query(lambda: pynvml.nvmlDeviceGetTemperature(handle, sensor))
    return GpuReading(
        index=pynvml.nvmlDeviceGetIndex(handle),
        compute_util=None if rates is None else float(rates.gpu),
        memory_used_mib=None if memory is None else memory.used / MIB,
        memory_total_mib=None if memory is None else memory.total / MIB,
        power_watts=None if milliwatts is None else milliwatts / 1000,
        temperature_celsius=None if celsius is None else float(celsius),
    )


def _query(counter: Callable[[], Any]) -> Any:
    """Return the counter's value; None if this GPU lacks the counter, as many consumer cards do."""
    try:
        return counter()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return None
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error


# Readings of AMD GPUs, from the rocm-smi program of every ROCm installation.
#
# Keys are the keys of rocm-smi's JSON. If a card lacks a counter, its key is missing or N/A.


_COMMAND = ["rocm-smi", "--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--json"]
# Key names differ between driver versions; the first key present is used.
_POWER = ("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)")
_TEMPERATURE = ("Temperature (Sensor edge) (C)", "Temperature (Sensor junction) (C)")
_TIMEOUT_SECONDS = 10


class AmdGpuMeter:
    """Implementation of ``lib.tracking.telemetry.GpuMeter`` for AMD GPUs."""

    def __init__(self, gpus: int) -> None:
        """Select the first ``gpus`` visible GPUs. Raises OSError if rocm-smi is missing or fails."""
        variable = os.environ.get("HIP_VISIBLE_DEVICES", "") or os.environ.get(
            "CUDA_VISIBLE_DEVICES", ""
        )
        self._cards = [f"card{name}" for name in visible_gpus(variable, gpus)[:gpus]]
        self.read()

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU."""
        try:
            output = subprocess.run(
                _COMMAND,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=True,
                timeout=_TIMEOUT_SECONDS,
            ).stdout
            cards = json.loads(output)
            return [
                _amd_reading(int(card.removeprefix("card")), cards[card]) for card in self._cards
            ]
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            raise OSError(f"rocm-smi: {error}") from error


def _amd_reading(index: int, card: Mapping[str, str]) -> GpuReading:
    used = _number(card, "VRAM Total Used Memory (B)")
    total = _number(card, "VRAM Total Memory (B)")
    return GpuReading(
        index=index,
        compute_util=_number(card, "GPU use (%)"),
        memory_used_mib=None if used is None else used / MIB,
        memory_total_mib=None if total is None else total / MIB,
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


# The sidecar process that samples the machine while one run trains.
#
#     python -m lib.tracking.telemetry RUN_DIRECTORY SECONDS
#
# The process appends samples to telemetry.jsonl until its standard input becomes readable or is
# closed. The run's manifest lists the processes and GPUs to sample.


# Training has priority.
_NICENESS = 10


def sample(run: RunDir, seconds: float, ended: Callable[[float], bool]) -> None:
    """Append a sample every ``seconds``, starting at once, until ``ended(seconds)`` returns true.

    Raises OSError if the GPU driver cannot be queried.
    """
    record = RunRecord(run)
    pids = record.manifest.value(list, "volatile", "pids")
    world_size = record.manifest.value(int, "processes", "world_size")
    meter = _meter(record.hardware, world_size)
    with open(run.telemetry, "a", encoding="utf-8", buffering=1, opener=no_follow) as stream:
        while True:
            stream.write(canonical_json(_sample(meter, pids)) + "\n")
            if ended(seconds):
                return


def _sample(meter: GpuMeter, pids: list[int]) -> dict[str, Any]:
    memory, cpu_seconds = memory_and_cpu_seconds(pids)
    gpus = [asdict(reading) for reading in meter.read()]
    return {
        "ts": time.time(),
        "rss_mib": memory,
        "cpu_seconds": cpu_seconds,
        "gpus": gpus,
    }


def _meter(hardware: HardwareRecord, gpus: int) -> GpuMeter:
    if hardware.gpu_name is None:
        return NullGpuMeter()
    return gpu_meter(gpus, rocm=hardware.hip_version is not None)


def gpu_meter(gpus: int, *, rocm: bool) -> GpuMeter:
    """Return the meter of the first ``gpus`` visible GPUs. Raises OSError if there is no driver."""
    return AmdGpuMeter(gpus) if rocm else NvidiaMeter(gpus)


if __name__ == "__main__":
    os.nice(_NICENESS)
    sample(RunDir(Path(sys.argv[1])), float(sys.argv[2]), should_exit)
