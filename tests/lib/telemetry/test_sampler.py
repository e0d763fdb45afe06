"""Telemetry samples, taken by a separate process and averaged over log intervals."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lib.files import write_json
from lib.runs.record import TelemetrySample, read_json_lines
from lib.runs.run_dir import RunDir
from lib.tracking.reader import mean_metrics
from lib.tracking.telemetry import memory_and_cpu_seconds


def manifest(run: RunDir, **hardware: Any) -> None:
    facts = {"cpu_model": "a cpu", "gpu_name": None, "hip_version": None, **hardware}
    write_json(
        run.manifest,
        {
            "hardware": facts,
            "processes": {"world_size": 1},
            "volatile": {"pids": [os.getpid()]},
        },
    )


def test_a_run_on_a_cpu_is_sampled_until_it_ends(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    manifest(run)
    command = [sys.executable, "-P", "-m", "lib.tracking.telemetry", str(tmp_path), "0.05"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while not run.telemetry.exists() or len(run.telemetry.read_text().splitlines()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(20) == 0
    rows = list(read_json_lines(run.telemetry))
    assert all(row["gpus"] == [] and row["rss_mib"] > 1 for row in rows)
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)


def test_a_missing_driver_ends_the_sampler_with_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    manifest(run, gpu_name="a card", hip_version="6.4")
    command = [sys.executable, "-P", "-m", "lib.tracking.telemetry", str(tmp_path), "1"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, input=b"", capture_output=True, env=environment)
    assert done.returncode != 0
    assert b"rocm-smi" in done.stderr.splitlines()[-1]


def test_memory_and_time_of_processes_are_the_kernels() -> None:
    memory, seconds = memory_and_cpu_seconds([os.getpid()])
    status = Path("/proc/self/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    assert memory == pytest.approx(kib / 1024, rel=0.2)
    assert seconds == pytest.approx(time.process_time(), abs=0.5)
    assert memory_and_cpu_seconds([os.getpid(), os.getpid()])[0] > 1.5 * memory
    # A process that has ended.
    assert memory_and_cpu_seconds([2**22 + 1]) == (0.0, 0.0)


def gpu(index: int, **counters: float | None) -> dict[str, Any]:
    none = dict.fromkeys(("compute_util", "power_watts", "temperature_celsius"))
    return {"index": index, "memory_used_mib": None, "memory_total_mib": None, **none, **counters}


def test_averages_over_samples_and_gpus() -> None:
    def sample(ts: float, used: float, first: float, second: float) -> TelemetrySample:
        gpus = [
            gpu(0, compute_util=first, memory_used_mib=1024, memory_total_mib=8192),
            gpu(1, compute_util=second, memory_used_mib=3072, memory_total_mib=8192),
        ]
        gpus[0]["power_watts"] = 100 + ts
        return TelemetrySample(ts, 2048.0, used, gpus)

    assert mean_metrics([sample(10, 3, 100, 50), sample(20, 18, 80, 10)]) == {
        "process/rss_gb": 2.0,
        "process/cpu_cores": 1.5,
        "gpu/compute_util_avg": 60.0,
        "gpu/memory_util_avg": 25.0,
        "gpu/memory_used_avg_gb": 2.0,
        "gpu/memory_used_total_gb": 4.0,
        "gpu/memory_total_gb": 16.0,
        "gpu/0/compute_util": 90.0,
        "gpu/0/memory_util": 12.5,
        "gpu/0/memory_used_mib": 1024.0,
        "gpu/0/power_watts": 115.0,
        "gpu/1/compute_util": 30.0,
        "gpu/1/memory_util": 37.5,
        "gpu/1/memory_used_mib": 3072.0,
    }


def test_a_counter_that_is_missing_is_no_zero() -> None:
    only = TelemetrySample(1.0, 1024.0, 1.0, [gpu(0)])
    assert mean_metrics([only]) == {"process/rss_gb": 1.0}
    assert mean_metrics([]) == {}
