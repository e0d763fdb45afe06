"""Facts of the machine, and settings as torch reports them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from lib.env.machine import set_up
from lib.env.observe import (
    detect_sdpa_kernel,
    deviations,
    machine_settings,
    require_no_deviations,
    selected_sdpa_backend,
)
from lib.env.options import MachineConfig
from lib.env.ranks import ProcessRank
from lib.errors import PreflightError
from tests.lib.env.test_machine import CPU as MACHINE

CPU = torch.device("cpu")


@pytest.fixture
def machine() -> MachineConfig:
    """Apply and return the settings of this process."""
    plain = replace(MACHINE, cpu_threads=torch.get_num_threads())
    set_up(plain, ProcessRank())
    return plain


def observed(machine: MachineConfig, scaler: bool = False) -> dict[str, dict[str, Any]]:
    return machine_settings(
        machine, CPU, ProcessRank(), torch.amp.GradScaler("cpu", enabled=scaler)
    )


def test_what_torch_does_otherwise_is_a_deviation(machine):
    asked = replace(machine, cpu_threads=torch.get_num_threads() + 5, precision="bf16")
    found = observed(asked)
    assert found["cpu_threads"]["observed"] == torch.get_num_threads()
    assert found["precision_mode"] == {"requested": "bf16", "resolved": "bf16", "observed": "bf16"}
    assert found["amp_enabled"]["observed"]
    assert deviations(found) == ["cpu_threads"]
    assert deviations(observed(machine)) == []


def test_a_strict_run_refuses_deviations(machine):
    require_no_deviations(observed(machine))
    asked = replace(machine, cpu_threads=77, cudnn_benchmark=not machine.cudnn_benchmark)
    with pytest.raises(PreflightError) as refusal:
        require_no_deviations(observed(asked))
    assert refusal.value.codes == ["machine.setting-mismatch"] * 2
    found = {problem.what.partition(":")[0]: problem.what for problem in refusal.value.problems}
    assert found.keys() == {"cpu_threads", "cudnn_benchmark"}
    assert f"expected 77, got {torch.get_num_threads()}" in found["cpu_threads"]


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
def test_the_states_are_read_back(machine, name):
    change, seen = BEHIND[name]
    change()
    assert observed(machine)[name]["observed"] == seen
    assert name in deviations(observed(machine))


def test_a_scaler_that_was_left_out_shows(machine):
    half = replace(machine, precision="fp16")
    assert "grad_scaler_enabled" in deviations(observed(half, scaler=False))
    assert "grad_scaler_enabled" not in deviations(observed(half, scaler=True))


def test_what_is_not_read_from_torch(machine, monkeypatch):
    """A GPU's workspace is that of the environment; a setting that cannot be read is recorded."""

    def refuse() -> str:
        raise RuntimeError("mixed TF32 settings")

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr("torch.get_float32_matmul_precision", refuse)
    gpu = replace(machine, device="cuda", deterministic="strict")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found = machine_settings(gpu, torch.device("cuda", 0), ProcessRank(), scaler)
    workspace, products = found["cublas_workspace_config"], found["float32_matmul_precision"]
    assert (workspace["resolved"], workspace["observed"]) == (":4096:8", ":16:8")
    assert products["observed"] == "unreadable: mixed TF32 settings"
    assert observed(machine)["cublas_workspace_config"]["observed"] is None


def test_the_kernel_is_the_one_that_torch_selects():
    """Flash attention on a CPU; with dropout only math is available."""
    q_BNTH = torch.empty(1, 2, 16, 8, requires_grad=True)
    causal = {"is_causal": True}
    assert selected_sdpa_backend(q_BNTH, 2, 0.0, causal) == "flash"
    assert selected_sdpa_backend(q_BNTH, 2, 0.1, causal) == "math"


# Arguments of attention, and the kernel that runs.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"is_causal": True}, "flash"),
    "masked": ({"attn_mask": torch.ones(8, 8).tril().bool()}, "flash"),
    "dropout": ({"is_causal": True, "dropout_p": 0.5}, "math"),
}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_read_from_what_came_out_and_a_profile_says_the_same(call):
    arguments, kernel = CALLS[call]
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        context = F.scaled_dot_product_attention(q, q, q, **arguments)
    assert detect_sdpa_kernel(context) == kernel
    name = {"flash": "flash_attention", "math": "attention_math"}[kernel]
    assert any(f"::_scaled_dot_product_{name}" in event.name for event in seen.events())
    # Operations on the output do not matter.
    shared = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True, **arguments)
    assert detect_sdpa_kernel(shared[..., :3].transpose(1, 2) * 2) == kernel


def test_a_pinned_kernel_is_the_one():
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert detect_sdpa_kernel(F.scaled_dot_product_attention(q, q, q)) == "math"
    assert detect_sdpa_kernel(q * 2) == "unknown"
