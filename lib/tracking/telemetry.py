"""Machine telemetry of a training run: samples of its GPUs, memory and CPU time.

    python -m lib.tracking.telemetry RUN_DIRECTORY SECONDS

This sidecar process appends samples to telemetry.jsonl until its standard input becomes readable or
is closed. The run's manifest lists the processes and GPUs to sample.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from lib.env.gpu import selected_gpus
from lib.files import canonical_json, no_follow
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.tracking.sidecar import NICENESS, should_exit
from lib.units import MIB

# Counter → value of one GPU; None for a counter that the driver lacks.
GpuReading = Mapping[str, Any]

_ROCM_SMI = [
    *("rocm-smi", "--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--json"),
]
# Key names differ between driver versions; the first key present is used.
_POWER = ("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)")
_TEMPERATURE = ("Temperature (Sensor edge) (C)", "Temperature (Sensor junction) (C)")
_TIMEOUT_SECONDS = 10


def read_gpus(gpus: int, *, rocm: bool) -> list[GpuReading]:
    """Return one reading for each of the first ``gpus`` visible GPUs.

    Vendor libraries count all GPUs of the machine, including GPUs that a variable hides from torch;
    ``index`` is the place among these. Raises OSError if the driver does not respond.
    """
    selected = selected_gpus(rocm)
    names = selected.split(",") if selected else list(map(str, range(gpus)))
    names = [name.strip() for name in names[:gpus]]
    return _read_rocm(names) if rocm else _read_nvidia(names)


def _read_nvidia(names: Sequence[str]) -> list[GpuReading]:
    """Read GPUs, by index or driver name, with the driver's management library (NVML)."""
    try:
        pynvml.nvmlInit()
        return [_nvidia_reading(name) for name in names]
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error


def _nvidia_reading(name: str) -> GpuReading:
    by_index, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    gpu = by_index(int(name)) if name.isdecimal() else by_name(name)

    def value(counter: Callable[..., Any], *more: Any) -> Any:
        # Many consumer cards lack some.
        with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
            return counter(gpu, *more)

    memory, rates = value(pynvml.nvmlDeviceGetMemoryInfo), value(
        pynvml.nvmlDeviceGetUtilizationRates
    )
    milliwatts = value(pynvml.nvmlDeviceGetPowerUsage)
    return {
        "index": pynvml.nvmlDeviceGetIndex(gpu),
        # Percent of the last sampling period during which a kernel was running.
        "compute_util": rates and float(rates.gpu),
        "memory_used_mib": memory and memory.used / MIB,
        "memory_total_mib": memory and memory.total / MIB,
        "power_watts": None if milliwatts is None else milliwatts / 1000,
        "temperature_celsius": value(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    }


def _read_rocm(names: Sequence[str]) -> list[GpuReading]:
    """Read AMD GPUs with rocm-smi; a counter that a card lacks is missing in its JSON, or N/A."""
    try:
        done = subprocess.run(_ROCM_SMI, capture_output=True, check=True, timeout=_TIMEOUT_SECONDS)
        cards = json.loads(done.stdout)
        return [_rocm_reading(int(name), cards[f"card{name}"]) for name in names]
    except (subprocess.SubprocessError, ValueError, KeyError) as error:
        raise OSError(f"rocm-smi: {error}") from error


def _rocm_reading(index: int, card: Mapping[str, str]) -> GpuReading:
    def value(*keys: str, unit: int = 1) -> float | None:
        for key in keys:
            with suppress(KeyError, ValueError):
                return float(card[key]) / unit
        return None

    return {
        "index": index,
        "compute_util": value("GPU use (%)"),
        "memory_used_mib": value("VRAM Total Used Memory (B)", unit=MIB),
        "memory_total_mib": value("VRAM Total Memory (B)", unit=MIB),
        "power_watts": value(*_POWER),
        "temperature_celsius": value(*_TEMPERATURE),
    }


def memory_and_cpu_seconds(pids: Sequence[int]) -> tuple[float, float]:
    """Return resident memory in MiB and CPU seconds, summed over ``pids``; ended ones count 0."""
    pages = ticks = 0
    for folder in (Path("/proc", str(pid)) for pid in pids):
        try:
            pages += int((folder / "statm").read_text(encoding="utf-8").split()[1])
            # Skip the process name, which is in parentheses and may contain any character.
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB, ticks / os.sysconf("SC_CLK_TCK")


def sample(run: RunDir, seconds: float, ended: Callable[[float], bool]) -> None:
    """Append a sample every ``seconds``, at first at once, until ``ended(seconds)``. Raises OSError."""
    record = RunRecord(run)
    pids = record.manifest.value(list, "volatile", "pids")
    gpus = record.manifest.value(int, "processes", "world_size")
    hardware = record.hardware
    rocm = hardware.hip_version is not None
    with open(run.telemetry, "a", encoding="utf-8", buffering=1, opener=no_follow) as stream:
        while True:
            memory, cpu_seconds = memory_and_cpu_seconds(pids)
            readings = [] if hardware.gpu_name is None else read_gpus(gpus, rocm=rocm)
            row = {"ts": time.time(), "rss_mib": memory, "cpu_seconds": cpu_seconds}
            stream.write(canonical_json(row | {"gpus": readings}) + "\n")
            if ended(seconds):
                return


if __name__ == "__main__":
    os.nice(NICENESS)
    sample(RunDir(Path(sys.argv[1])), float(sys.argv[2]), should_exit)
