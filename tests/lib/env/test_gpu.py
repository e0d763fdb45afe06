"""GPU and CPU facts, the GPUs of each run, and their environment variables; no GPU needed."""

import pytest

from lib.env.gpu import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GIB,
    GPUS,
    find_gpu,
    gpu_groups,
    gpu_with_memory,
    peak_tflops,
)
from tests.errors import error_of


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a10g", "a10g"),
        ("A100-SXM4-80GB", "a100-80"),
        ("a100_40", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("GeForce RTX 4090", "rtx4090"),
        ("AMD Radeon PRO W7900", "w7900"),
    ],
)
def test_a_name_is_found_however_it_is_written(written, name):
    assert find_gpu(written) is GPUS[name]


@pytest.mark.parametrize(
    ("written", "nearest", "code"),
    [
        ("gtx9999", ["rtx"], "gpu.unknown-name"),
        ("a100", ["a100-40, a100-80"], "gpu.ambiguous-name"),
        ("w7800", ["w7900"], "gpu.unknown-name"),
        # No name.
        *((name, GPUS, "gpu.unknown-name") for name in ("", "nvidia")),
    ],
)
def test_an_unknown_or_doubtful_name_lists_the_nearest(written, nearest, code):
    (problem,) = error_of(find_gpu, written).problems
    assert problem.code == code and f"GPU={written}" in problem.what
    assert all(name in problem.next for name in nearest)


def test_what_context_and_allocator_take_is_left_free():
    gpu = gpu_with_memory(10)
    most = (10 * GIB - CONTEXT_BYTES) / (1 + FRAGMENTATION)
    assert gpu.holds(most * 0.9999)
    assert not gpu.holds(most * 1.0001)


def test_peaks_are_in_order():
    """Dense peaks: half precision is at least as fast as TF32, and that as fp32."""
    for gpu in GPUS.values():
        peaks = gpu.tflops
        assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) <= peaks["fp16"], gpu.name
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], gpu.name
        assert ("bf16" in peaks) == gpu.flash, gpu.name


# Names as reported by torch; dense TFLOP/s of the data sheets.
@pytest.mark.parametrize(
    ("name", "precision", "products", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", "highest", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", "highest", 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", "high", 156.0),
        ("NVIDIA H100 PCIe", "fp32", "medium", 378.0),
        ("Tesla V100-SXM2-32GB", "fp16", "highest", 125.0),
        # Without TF32, fp32 products stay fp32.
        ("AMD Radeon PRO W7900", "fp32", "high", 61.3),
        # The hardware lacks the type; other devices, whose peak is unknown.
        *((name, "bf16", "highest", None) for name in ("Tesla T4", "NVIDIA H100 NVL", "")),
    ],
)
def test_peaks_of_devices_by_the_drivers_name(name, precision, products, peak):
    assert peak_tflops(name, precision, products) == peak


HIDDEN = {"CUDA_VISIBLE_DEVICES": "3, GPU-8f2a,1"}
BOTH = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize(
    ("count", "size", "rocm", "variables", "busy", "groups"),
    [
        (5, 2, False, {}, (), ["0,1", "2,3"]),
        (2, 1, True, {}, (), ["0", "1"]),
        (1, 2, False, {}, (), []),
        # Used by others; the index is that of the driver.
        (4, 1, False, {}, (1,), ["0", "2", "3"]),
        (4, 2, True, {}, (0, 2), ["1,3"]),
        # Those that the user hid stay hidden.
        (3, 1, False, HIDDEN, (), ["3", "GPU-8f2a", "1"]),
        (3, 3, True, HIDDEN, (), ["3,GPU-8f2a,1"]),
        (2, 2, True, BOTH, (), ["6,7"]),
    ],
)
def test_each_group_has_free_gpus_of_its_own(count, size, rocm, variables, busy, groups):
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if busy and not rocm else {}
    name = "HIP_VISIBLE_DEVICES" if rocm else "CUDA_VISIBLE_DEVICES"
    expected = [{name: group, **order} for group in groups]
    assert gpu_groups(count, size, rocm, variables=variables, busy=busy) == expected
