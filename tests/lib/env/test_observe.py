"""Settings as torch reports them, the kernel of attention, and non-deterministic operations."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.env.machine import grad_scaler, set_up
from lib.env.observe import (
    NondeterministicOperations,
    detect_sdpa_kernel,
    deviations,
    machine_settings,
    record_nondeterminism,
    require_no_deviations,
    selected_sdpa_backend,
)
from lib.env.ranks import ProcessRank
from lib.errors import PreflightError
from tests.lib.env.conftest import CPU as MACHINE

CPU = torch.device("cpu")


@pytest.fixture
def machine():
    """Apply and return the settings of this process."""
    plain = replace(MACHINE, cpu_threads=torch.get_num_threads())
    set_up(plain, ProcessRank())
    return plain


def observed(machine, scaler=False, device=CPU):
    found = torch.amp.GradScaler("cpu", enabled=scaler)
    return machine_settings(machine, device, ProcessRank(), found)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_threads": 2, "deterministic": "off", "matmul_precision": "medium"},
        {"deterministic": "warn", "matmul_precision": "high", "cudnn_benchmark": True},
    ],
)
def test_settings_are_applied(changes):
    machine = replace(MACHINE, **changes)
    assert set_up(machine, ProcessRank()) == CPU and deviations(observed(machine)) == []


def test_a_strict_run_refuses_what_torch_does_otherwise(machine):
    require_no_deviations(observed(machine))
    asked = replace(machine, cpu_threads=77, precision="bf16", cudnn_benchmark=True)
    found = observed(asked)
    assert found["precision_mode"] == {"requested": "bf16", "resolved": "bf16", "observed": "bf16"}
    assert found["amp_enabled"]["observed"]
    with pytest.raises(PreflightError) as refusal:
        require_no_deviations(found)
    assert refusal.value.codes == ["machine.setting-mismatch"] * 2
    problems = {problem.what.partition(":")[0]: problem.what for problem in refusal.value.problems}
    assert problems.keys() == {"cpu_threads", "cudnn_benchmark"}
    assert f"expected 77, got {torch.get_num_threads()}" in problems["cpu_threads"]


def uninitialized_memory_is_filled():
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# Settings changed behind a run's back, and the observed values.
BEHIND = {
    "float32_matmul_precision": (partial(torch.set_float32_matmul_precision, "medium"), "medium"),
    "allow_tf32_matmul": (partial(torch.set_float32_matmul_precision, "high"), True),
    "allow_tf32_cudnn": (partial(setattr, torch.backends.cudnn, "allow_tf32", True), True),
    "cudnn_benchmark": (partial(setattr, torch.backends.cudnn, "benchmark", True), True),
    "deterministic_algorithms": (
        partial(torch.use_deterministic_algorithms, True, warn_only=True),
        "warn_only",
    ),
    "fill_uninitialized_memory": (uninitialized_memory_is_filled, True),
    "cpu_threads": (partial(torch.set_num_threads, 3), 3),
}


@pytest.mark.parametrize("name", BEHIND)
def test_the_states_are_read_back(machine, name):
    change, seen = BEHIND[name]
    change()
    found = observed(machine)
    assert found[name]["observed"] == seen and name in deviations(found)


def test_a_scaler_of_half_precision_that_was_left_out_shows(machine):
    half = replace(machine, precision="fp16")
    assert grad_scaler(half).is_enabled() and not grad_scaler(machine).is_enabled()
    assert "grad_scaler_enabled" in deviations(observed(half, scaler=False))
    assert "grad_scaler_enabled" not in deviations(observed(half, scaler=True))


def test_what_is_not_read_from_torch(machine, monkeypatch):
    """A GPU's workspace is that of the environment; a setting that cannot be read is recorded."""

    def refuse():
        raise RuntimeError("mixed TF32 settings")

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr("torch.get_float32_matmul_precision", refuse)
    found = observed(replace(machine, device="cuda"), device=torch.device("cuda", 0))
    workspace = found["cublas_workspace_config"]
    assert (workspace["resolved"], workspace["observed"]) == (":4096:8", ":16:8")
    products = found["float32_matmul_precision"]["observed"]
    assert products == "unreadable: mixed TF32 settings"
    assert observed(machine)["cublas_workspace_config"]["observed"] is None


@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        ({"is_causal": True}, "flash"),
        ({"attn_mask": torch.ones(8, 8).tril().bool()}, "flash"),
        # With dropout only math is available.
        ({"is_causal": True, "dropout_p": 0.5}, "math"),
    ],
)
def test_the_kernel_is_read_from_what_came_out(arguments, kernel):
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    context = F.scaled_dot_product_attention(q, q, q, **arguments)
    assert detect_sdpa_kernel(context) == kernel
    # Operations on the output do not matter.
    shared = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True, **arguments)
    assert detect_sdpa_kernel(shared[..., :3].transpose(1, 2) * 2) == kernel
    seen = {name: value for name, value in arguments.items() if name != "dropout_p"}
    assert selected_sdpa_backend(q, 2, arguments.get("dropout_p", 0.0), seen) == kernel
    with sdpa_kernel(SDPBackend.MATH):
        assert detect_sdpa_kernel(F.scaled_dot_product_attention(q, q, q)) == "math"
    assert detect_sdpa_kernel(q * 2) == "unknown"


WARN = replace(MACHINE, deterministic="warn")


def test_each_operation_is_noted_once():
    """Such as put_ without accumulation, whose result is undefined for duplicate indices."""
    set_up(WARN, ProcessRank())
    for _ in range(2):
        # torch and Python emit some warnings once; a second run in the process must record them too.
        said = []
        with record_nondeterminism(WARN, said.append) as met, warnings.catch_warnings():
            for _ in range(2):
                torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        assert met.names == said == ["put_"]


def test_other_warnings_are_shown_as_before_and_nothing_is_noted_unless_the_setting_is_warn():
    recording = record_nondeterminism(WARN, lambda name: None)
    with pytest.warns(UserWarning, match="something else"), recording as met:
        warnings.warn("something else", stacklevel=1)
    assert met.names == []
    with record_nondeterminism(MACHINE, lambda name: None) as met:
        assert met is None


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("Flash Attention defaults to a non-deterministic algorithm. To", ["Flash Attention"]),
        (
            "Deterministic behavior was enabled with either `torch.x(True)` or `at::x(true)`, but "
            "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2.",
            ["CuBLAS"],
        ),
        ("cumsum_cuda does not have a deterministic implementation, but", ["cumsum_cuda"]),
        ("a deterministic implementation was taken", []),
    ],
)
def test_the_words_of_operations_on_gpus_are_known(message, names):
    """Messages are copied from torch's sources."""
    met = NondeterministicOperations(lambda name: None)
    assert met.meet(message) == bool(names) and met.names == names
