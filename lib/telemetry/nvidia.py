"""Readings of NVIDIA GPUs, from the driver's management library (NVML)."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from lib.telemetry.meter import GpuReading, visible

_MIB = 1 << 20


class NvidiaMeter:
    """Implementation of ``lib.telemetry.meter.Meter`` for NVIDIA GPUs."""

    def __init__(self, gpus: int) -> None:
        """Select the first ``gpus`` visible GPUs. Raises OSError if there is no driver."""
        try:
            pynvml.nvmlInit()
            shown = visible(os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus)
            self._handles = [_handle(name) for name in shown[:gpus]]
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> Sequence[GpuReading]:
        """Return one reading per GPU."""
        return [_reading(handle) for handle in self._handles]


def _handle(name: int | str) -> Any:
    if isinstance(name, int):
        return pynvml.nvmlDeviceGetHandleByIndex(name)
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _reading(handle: Any) -> GpuReading:
    memory = _query(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _query(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    milliwatts = _query(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    sensor = pynvml.NVML_TEMPERATURE_GPU
    celsius = _query(lambda: pynvml.nvmlDeviceGetTemperature(handle, sensor))
    return GpuReading(
        index=pynvml.nvmlDeviceGetIndex(handle),
        compute_util=None if rates is None else float(rates.gpu),
        memory_used_mib=None if memory is None else memory.used / _MIB,
        memory_total_mib=None if memory is None else memory.total / _MIB,
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
