"""Readings of NVIDIA GPUs, through the driver's management library."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from lib.telemetry.meter import GpuReading, visible

_MIB = 1 << 20


class NvidiaMeter:
    """Keeps ``lib.telemetry.meter.Meter``."""

    def __init__(self, gpus: int) -> None:
        """The first ``gpus`` that this process sees. OSError where there is no driver."""
        try:
            pynvml.nvmlInit()
            shown = visible(os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus)
            self._handles = [_handle(name) for name in shown[:gpus]]
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> Sequence[GpuReading]:
        """One reading for each GPU."""
        return [_reading(handle) for handle in self._handles]


def _handle(name: int | str) -> Any:
    if isinstance(name, int):
        return pynvml.nvmlDeviceGetHandleByIndex(name)
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _reading(handle: Any) -> GpuReading:
    memory = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    milliwatts = _ask(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    sensor = pynvml.NVML_TEMPERATURE_GPU
    celsius = _ask(lambda: pynvml.nvmlDeviceGetTemperature(handle, sensor))
    return GpuReading(
        index=pynvml.nvmlDeviceGetIndex(handle),
        compute_util=None if rates is None else float(rates.gpu),
        memory_used_mib=None if memory is None else memory.used / _MIB,
        memory_total_mib=None if memory is None else memory.total / _MIB,
        power_watts=None if milliwatts is None else milliwatts / 1000,
        temperature_celsius=None if celsius is None else float(celsius),
    )


def _ask(counter: Callable[[], Any]) -> Any:
    """None where this GPU has no such counter, which is so for some in most consumer cards."""
    try:
        return counter()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return None
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error
