"""Facts of the machine, and settings as torch reports them."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib.env.hardware import device_name, hardware
from lib.env.machine import set_up
from lib.env.observe import (
    deviations,
    machine_settings,
    require_no_deviations,
    selected_sdpa_backend,
)
from lib.env.options import MachineConfig
from lib.env.ranks import ProcessRank
from lib.errors import PreflightError

CPU = torch.device("cpu")


@pytest.fixture
def machine() -> MachineConfig:
    """Apply and return the settings of this process."""
    plain = MachineConfig(
        device="cpu",
        precision="fp32",
        cpu_threads=torch.get_num_threads(),
        compile=False,
        deterministic="strict",
        matmul_precision="highest",
        cudnn_benchmark=False,
        expandable_segments=False,
        warmup_iterations=0,
        data_parallel="ddp",
        ddp_safe=False,
    )
    set_up(plain, ProcessRank())
    return plain


def test_hardware_is_plausible() -> None:
    found = hardware(CPU)
    assert found["cpu_model"] == device_name(CPU) != ""
    assert 1 <= found["cpu_cores"] <= os.cpu_count()
    assert found["ram_gib"] > 0.1
    assert found["gpu_name"] is None


def observed(machine: MachineConfig, scaler: bool = False) -> dict[str, dict[str, Any]]:
    return machine_settings(
        machine, CPU, ProcessRank(), torch.amp.GradScaler("cpu", enabled=scaler)
    )


def test_what_torch_does_otherwise_is_a_deviation(machine: MachineConfig) -> None:
    asked = replace(machine, cpu_threads=torch.get_num_threads() + 5, precision="bf16")
    found = observed(asked)
    assert found["cpu_threads"]["observed"] == torch.get_num_threads()
    assert found["precision_mode"] == {"requested": "bf16", "resolved": "bf16", "observed": "bf16"}
    assert found["amp_enabled"]["observed"]
    assert deviations(found) == ["cpu_threads"]
    assert deviations(observed(machine)) == []


def test_a_strict_run_refuses_deviations(machine: MachineConfig) -> None:
    require_no_deviations(observed(machine))
    asked = replace(machine, cpu_threads=77, cudnn_benchmark=not machine.cudnn_benchmark)
    with pytest.raises(PreflightError) as refusal:
        require_no_deviations(observed(asked))
    assert refusal.value.codes == ["machine.setting-mismatch"] * 2
    threads, benchmark = (problem.what for problem in refusal.value.problems)
    assert threads.startswith("cpu_threads: ") and benchmark.startswith("cudnn_benchmark: ")
    assert f"expected 77, got {torch.get_num_threads()}" in threads


# Settings changed behind a run's back, and the observed values.
BEHIND: dict[str, tuple[Callable[[], None], Any]] = {
    "float32_matmul_precision": (lambda: torch.set_float32_matmul_precision("medium"), "medium"),
    "allow_tf32_matmul": (lambda: torch.set_float32_matmul_precision("high"), True),
    "allow_tf32_cudnn": (lambda: setattr(torch.backends.cudnn, "allow_tf32", True), True),
    "cudnn_benchmark": (lambda: setattr(torch.backends.cudnn, "benchmark", True), True),
    "deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        "warn_only",
    ),
    "fill_uninitialized_memory": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", True),
        True,
    ),
    "cpu_threads": (lambda: torch.set_num_threads(3), 3),
}


@pytest.mark.parametrize("name", BEHIND)
def test_the_states_are_read_back(machine: MachineConfig, name: str) -> None:
    change, seen = BEHIND[name]
    change()
    assert observed(machine)[name]["observed"] == seen
    assert name in deviations(observed(machine))


def test_a_scaler_that_was_left_out_shows(machine: MachineConfig) -> None:
    half = replace(machine, precision="fp16")
    assert "grad_scaler_enabled" in deviations(observed(half, scaler=False))
    assert "grad_scaler_enabled" not in deviations(observed(half, scaler=True))


def test_a_gpu_s_workspace_is_read_from_the_environment(
    machine: MachineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = replace(machine, device="cuda", deterministic="strict")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found = machine_settings(gpu, torch.device("cuda", 0), ProcessRank(), scaler)[
        "cublas_workspace_config"
    ]
    assert (found["resolved"], found["observed"]) == (":4096:8", ":16:8")
    assert observed(machine)["cublas_workspace_config"]["observed"] is None


def test_a_setting_that_cannot_be_read_is_recorded_as_such(
    machine: MachineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("mixed TF32 settings")

    monkeypatch.setattr("torch.get_float32_matmul_precision", refuse)
    found = observed(machine)["float32_matmul_precision"]
    assert found["observed"] == "unreadable: mixed TF32 settings"


def test_the_kernel_is_the_one_torch_picks() -> None:
    """Flash attention on a CPU; with dropout only math is available."""
    q_BNTH = torch.empty(1, 2, 16, 8, requires_grad=True)
    causal = {"is_causal": True}
    assert selected_sdpa_backend(q_BNTH, 2, 0.0, causal) == "flash"
    assert selected_sdpa_backend(q_BNTH, 2, 0.1, causal) == "math"
