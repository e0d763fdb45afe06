"""Readings of both vendors' GPUs, from recorded answers of the vendor libraries."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.tracking import telemetry
from lib.tracking.telemetry import AmdGpuMeter, GpuReading, NvidiaMeter, visible_gpus

GIB = 1 << 30


class NVMLError(Exception):
    """Stand-in for pynvml.NVMLError."""


class NotSupported(NVMLError):
    """A counter that this GPU lacks."""


class FakeNvml:
    """Fake of two GPUs; the second has no power counter, like many consumer cards."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_NoPermission = type("NoPermission", (NVMLError,), {})
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost

    def nvmlInit(self) -> None:
        if self.lost:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-b": 1}[name]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * 6 * GIB, total=24 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=(90, 40)[handle], memory=5)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise NotSupported("Not Supported")
        return 251500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return (61, 55)[handle]


FIRST = GpuReading(0, 90.0, 6144.0, 24576.0, 251.5, 61.0)
SECOND = GpuReading(1, 40.0, 12288.0, 24576.0, None, 55.0)


@pytest.mark.parametrize(
    ("shown", "gpus", "expected"),
    [("", 2, [FIRST, SECOND]), ("1", 1, [SECOND]), ("GPU-b", 1, [SECOND]), ("1,0", 1, [SECOND])],
)
def test_nvidia(
    monkeypatch: pytest.MonkeyPatch, shown: str, gpus: int, expected: list[GpuReading]
) -> None:
    monkeypatch.setattr(telemetry, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert NvidiaMeter(gpus).read() == expected


def test_nvidia_without_a_driver_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "pynvml", FakeNvml(lost=True))
    with pytest.raises(OSError, match="NVML: Driver Not Loaded"):
        NvidiaMeter(1)


# rocm-smi JSON of two cards; the second has power N/A and no edge sensor.
ROCM = {
    "card0": {
        "Temperature (Sensor edge) (C)": "48.0",
        "Average Graphics Package Power (W)": "95.0",
        "GPU use (%)": "73",
        "VRAM Total Memory (B)": str(48 * GIB),
        "VRAM Total Used Memory (B)": str(12 * GIB),
    },
    "card1": {
        "Temperature (Sensor junction) (C)": "50.0",
        "Average Graphics Package Power (W)": "N/A",
        "GPU use (%)": "0",
        "VRAM Total Memory (B)": str(48 * GIB),
        "VRAM Total Used Memory (B)": str(GIB),
    },
}


@pytest.fixture
def rocm_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a rocm-smi that prints the recorded JSON."""
    program = tmp_path / "rocm-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(ROCM)}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    return program


def test_amd(rocm_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert AmdGpuMeter(2).read() == [
        GpuReading(0, 73.0, 12288.0, 49152.0, 95.0, 48.0),
        GpuReading(1, 0.0, 1024.0, 49152.0, None, 50.0),
    ]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert [reading.index for reading in AmdGpuMeter(1).read()] == [1]


@pytest.mark.parametrize("trouble", ["exit 2", "echo nonsense", "echo '{}'"])
def test_amd_without_a_valid_answer_raises(rocm_smi: Path, trouble: str) -> None:
    rocm_smi.write_text(f"#!/bin/sh\n{trouble}\n")
    with pytest.raises(OSError, match="rocm-smi: "):
        AmdGpuMeter(1)


def test_the_variable_names_gpus_by_index_or_by_name() -> None:
    assert visible_gpus("", 2) == [0, 1]
    assert visible_gpus("3, GPU-b", 2) == [3, "GPU-b"]
