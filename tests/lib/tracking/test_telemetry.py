"""Telemetry: readings of GPUs and processes, the sampler, and the means of its samples."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from lib.files import write_json
from lib.runs.run_dir import RunDir
from lib.tracking import telemetry
from lib.tracking.reader import ReadCursor, RecordReader
from lib.tracking.telemetry import memory_and_cpu_seconds, read_gpus
from tests.json_rows import read_rows


def test_statistics_are_reduced_over_layers_and_of_each_layer(tmp_path):
    values = {
        "attention/entropy": [1.0, 2.0, 6.0],
        "nsa/gate_entropy_min": [0.5, 0.25, 0.75],
        "nsa/gate_largest_max": [0.5, 0.9, 0.75],
        "mlp_attn_gate/gate_mean": [0.25, 0.5, None],
        "nsa/distance": [None, None, None],
    }
    row = {"kind": "statistics", "iteration": 1, "values": values}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    ((_, found),) = RecordReader(RunDir(tmp_path), ReadCursor()).new()
    reduced = dict(zip(values, (3.0, 0.25, 0.9, 0.375), strict=False))
    layers = {
        f"layer/{i}/{name}": value
        for name, of_layers in values.items()
        for i, value in enumerate(of_layers)
        if value is not None
    }
    assert found == {"iteration": 1, **reduced, **layers}


GIB = 1 << 30


def raising(error):
    def call(*arguments):
        raise error

    return call


# Functions of NVML for two GPUs; the second lacks a counter, like many consumer cards.
NVML = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetHandleByUUID": {"GPU-b": 1}.__getitem__,
    "nvmlDeviceGetIndex": lambda gpu: gpu,
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(
        used=(gpu + 1) * 6 * GIB, total=24 * GIB
    ),
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=(90, 40)[gpu]),
    "nvmlDeviceGetPowerUsage": lambda gpu: (lambda: 251500, raising(pynvml.NVMLError_NotSupported))[
        gpu
    ](),
    "nvmlDeviceGetTemperature": lambda gpu, sensor: (61, 55)[gpu],
}


COUNTERS = (
    *("index", "compute_util", "memory_used_mib", "memory_total_mib"),
    *("power_watts", "temperature_celsius"),
)
FIRST, SECOND = (0, 90.0, 6144.0, 24576.0, 251.5, 61.0), (1, 40.0, 12288.0, 24576.0, None, 55.0)


def readings(gpus, *, rocm):
    found = read_gpus(gpus, rocm=rocm)
    assert all(tuple(gpu) == COUNTERS for gpu in found)
    return [tuple(gpu.values()) for gpu in found]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("", [FIRST, SECOND]), ("1", [SECOND]), ("0, GPU-b", [FIRST, SECOND]), ("1,0", [SECOND])],
)
def test_nvidia(monkeypatch, shown, expected):
    for name, function in NVML.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert readings(len(expected), rocm=False) == expected


def test_nvidia_without_a_driver_raises(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVMLError_DriverNotLoaded))
    with pytest.raises(OSError, match="NVML: Driver Not Loaded"):
        read_gpus(1, rocm=False)


def card(use, gib, watts, sensor, temperature):
    """Return the counters of one GPU in the JSON of rocm-smi."""
    return {
        f"Temperature (Sensor {sensor}) (C)": temperature,
        "Average Graphics Package Power (W)": watts,
        "GPU use (%)": use,
        "VRAM Total Memory (B)": str(48 * GIB),
        "VRAM Total Used Memory (B)": str(gib * GIB),
    }


@pytest.fixture
def rocm_smi(tmp_path, monkeypatch):
    """Install a rocm-smi for two GPUs; the second has no power and no edge sensor."""
    cards = {"card0": card("73", 12, "95.0", "edge", "48.0")}
    cards["card1"] = card("0", 1, "N/A", "junction", "50.0")
    program = tmp_path / "rocm-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(cards)}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return program


def test_amd(rocm_smi, monkeypatch):
    assert readings(2, rocm=True) == [
        (0, 73.0, 12288.0, 49152.0, 95.0, 48.0),
        (1, 0.0, 1024.0, 49152.0, None, 50.0),
    ]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert [gpu["index"] for gpu in read_gpus(1, rocm=True)] == [1]


@pytest.mark.parametrize("trouble", ["exit 2", "echo nonsense", "echo '{}'"])
def test_amd_without_a_valid_answer_raises(rocm_smi, trouble):
    rocm_smi.write_text(f"#!/bin/sh\n{trouble}\n")
    with pytest.raises(OSError, match="rocm-smi: "):
        read_gpus(1, rocm=True)


def manifest(run, **hardware):
    facts = {"cpu_model": "a cpu", "gpu_name": None, "hip_version": None, **hardware}
    facts = {"hardware": facts, "processes": {"world_size": 1}, "volatile": {"pids": [os.getpid()]}}
    write_json(run.manifest, facts)


def test_a_run_on_a_cpu_is_sampled_until_it_ends(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    manifest(run)
    moments = iter([False, False, True])
    telemetry.sample(run, 0.05, lambda seconds: next(moments))
    rows = list(read_rows(run.telemetry))
    assert len(rows) == 3 and all(row["gpus"] == [] and row["rss_mib"] > 1 for row in rows)
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
    # A missing driver ends the sampler with an error.
    manifest(run, gpu_name="a card", hip_version="6.4")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="rocm-smi"):
        telemetry.sample(run, 1.0, lambda seconds: True)


def test_memory_and_time_of_processes_are_the_kernels():
    memory, seconds = memory_and_cpu_seconds([os.getpid()])
    status = Path("/proc/self/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    assert memory == pytest.approx(kib / 1024, rel=0.2)
    assert seconds == pytest.approx(time.process_time(), abs=0.5)
    assert memory_and_cpu_seconds([os.getpid(), os.getpid()])[0] > 1.5 * memory
    # A process that has ended.
    assert memory_and_cpu_seconds([2**22 + 1]) == (0.0, 0.0)
