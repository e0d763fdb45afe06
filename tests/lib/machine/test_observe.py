"""Facts of the machine, and settings as torch reports them."""

import os
from dataclasses import replace

import pytest
import torch

from lib.machine.observe import deviations, device_name, hardware, knobs, sdpa_choice
from lib.machine.options import MachineConfig
from lib.machine.process import Process

CPU = torch.device("cpu")


@pytest.fixture
def machine() -> MachineConfig:
    """What this process is set to."""
    return MachineConfig(
        device="cpu",
        precision="fp32",
        cpu_threads=torch.get_num_threads(),
        compile=False,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        matmul_precision=torch.get_float32_matmul_precision(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        expandable_segments=False,
        warmup_iterations=0,
    )


def test_hardware_is_plausible() -> None:
    found = hardware(CPU)
    assert found["cpu_model"] == device_name(CPU) != ""
    assert 1 <= found["cpu_cores"] <= os.cpu_count()
    assert found["ram_gib"] > 0.1
    assert found["gpu_name"] is None


def test_what_torch_does_otherwise_is_a_deviation(machine: MachineConfig) -> None:
    asked = replace(machine, cpu_threads=torch.get_num_threads() + 5, precision="bf16")
    found = knobs(asked, CPU, Process())
    assert found["cpu_threads"]["observed"] == torch.get_num_threads()
    assert found["precision_mode"] == {"requested": "bf16", "resolved": "bf16", "observed": "bf16"}
    assert "cpu_threads" in deviations(found)
    assert "precision_mode" not in deviations(found)
    assert "cpu_threads" not in deviations(knobs(machine, CPU, Process()))


def test_a_setting_that_cannot_be_read_is_recorded_as_such(
    machine: MachineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("mixed TF32 settings")

    monkeypatch.setattr("torch.get_float32_matmul_precision", refuse)
    found = knobs(machine, CPU, Process())["float32_matmul_precision"]
    assert found["observed"] == "unreadable: mixed TF32 settings"


def test_the_kernel_is_the_one_torch_picks() -> None:
    """On a CPU, flash attention; with dropout there is only the plain one."""
    q_BNTH = torch.empty(1, 2, 16, 8, requires_grad=True)
    causal = {"is_causal": True}
    assert sdpa_choice(q_BNTH, 2, 0.0, causal) == "flash"
    assert sdpa_choice(q_BNTH, 2, 0.1, causal) == "math"
