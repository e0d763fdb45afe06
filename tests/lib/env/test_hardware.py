"""Hardware record on machines with and without GPUs; no GPU needed."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lib.env.hardware import device_name, probe_hardware
from lib.env.preflight import pinned_gpu_problems

CPU = torch.device("cpu")
GIB = 1024**3


def test_a_machine_without_a_gpu_says_so(tmp_path, program):
    shutil.rmtree(tmp_path / "programs")
    found = probe_hardware(tmp_path / "new", CPU)
    assert json.loads((tmp_path / "new" / "hw.json").read_text()) == found
    meminfo = Path("/proc/meminfo").read_text().split()[1]
    assert found["ram_gib"] == pytest.approx(int(meminfo) / 2**20, abs=0.1)
    free = os.statvfs(tmp_path)
    assert found["disk_free_gib"] == pytest.approx(free.f_bavail * free.f_frsize / GIB, abs=1)
    assert (found["gpus"], found["gpu_name"]) == ([], None)
    assert found["cpu_model"] == device_name(CPU) != "" and found["cpu_cores"] <= os.cpu_count()
    if not shutil.which("nvidia-smi"):
        assert (tmp_path / "new" / "nvidia_smi.txt").read_text().startswith("absent: ")
        assert not (tmp_path / "new" / "rocm_smi.txt").exists()


def test_every_visible_gpu_and_what_the_programs_say(tmp_path, program, monkeypatch):
    gpus = [SimpleNamespace(name=f"G{i}", total_memory=(24 + i) * GIB) for i in range(2)]
    by_device = {0: gpus[0], 1: gpus[1], torch.device("cuda", 0): gpus[0]}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", by_device.__getitem__)
    program("nvidia-smi", {"*": "| Driver Version: 595.1 |\n"})
    program("rocm-smi", {"*": 2})
    found = probe_hardware(tmp_path, torch.device("cuda", 0))
    assert found["gpus"] == [{"name": "G0", "vram_gib": 24}, {"name": "G1", "vram_gib": 25}]
    assert (found["gpu_name"], found["vram_gib"]) == ("G0", 24)
    assert (tmp_path / "nvidia_smi.txt").read_text() == "| Driver Version: 595.1 |\n"
    assert (tmp_path / "rocm_smi.txt").read_text() == "failed: exit 2\n"


@pytest.mark.parametrize(
    ("visible", "pinned", "processes", "hip", "advice"),
    [
        (4, True, 2, "7.0", ["type: HIP_VISIBLE_DEVICES=0,1 make"]),
        *((2, pinned, processes, None, []) for pinned, processes in ((False, 1), (True, 2))),
    ],
)
def test_gpus_that_a_run_leaves_unused(monkeypatch, visible, pinned, processes, hip, advice):
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.version.hip", hip)
    problems = pinned_gpu_problems(pinned, processes)
    assert [problem.next for problem in problems] == advice
    assert all(problem.code == "gpu.not-pinned" for problem in problems)
    assert all(f"GPUS={processes}, got {visible}" in problem.what for problem in problems)
