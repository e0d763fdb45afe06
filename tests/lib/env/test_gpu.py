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
from lib.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a10g", "a10g"),
        ("NVIDIA A10G", "a10g"),
        ("A100-SXM4-80GB", "a100-80"),
        ("a100_40", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("GeForce RTX 4090", "rtx4090"),
        ("AMD Radeon PRO W7900", "w7900"),
        ("MI300X", "mi300x"),
        ("V100-32GB", "v100-32"),
    ],
)
def test_a_name_is_found_however_it_is_written(written: str, name: str) -> None:
    assert find_gpu(written) is GPUS[name]


@pytest.mark.parametrize(
    ("written", "nearest", "code"),
    [
        ("gtx9999", "rtx", "gpu.unknown-name"),
        ("a100", "a100-40, a100-80", "gpu.ambiguous-name"),
        ("h10", "h100", "gpu.ambiguous-name"),
        ("w7800", "w7900", "gpu.unknown-name"),
    ],
)
def test_an_unknown_or_doubtful_name_lists_the_nearest(
    written: str, nearest: str, code: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(written)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert f"GPU={written}" in problem.what
    assert nearest in problem.next


@pytest.mark.parametrize("written", ["", "nvidia", "-"])
def test_no_name_lists_the_table(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(written)
    assert caught.value.codes == ["gpu.unknown-name"]
    assert all(name in str(caught.value) for name in GPUS)


def test_what_context_and_allocator_take_is_left_free() -> None:
    gpu = gpu_with_memory(10)
    most = (10 * GIB - CONTEXT_BYTES) / (1 + FRAGMENTATION)
    assert gpu.holds(most * 0.9999)
    assert not gpu.holds(most * 1.0001)


def test_peaks_are_in_order() -> None:
    """Dense peaks: half precision is at least as fast as TF32, and that as fp32."""
    for gpu in GPUS.values():
        peaks = gpu.tflops
        assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) <= peaks["fp16"], gpu.name
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], gpu.name
        assert ("bf16" in peaks) == gpu.flash, gpu.name


# Names as reported by torch; dense TFLOP/s of the data sheets.
PEAKS = [
    ("NVIDIA A100-SXM4-80GB", "bf16", "highest", 312.0),
    ("NVIDIA A100-PCIE-40GB", "fp16", "highest", 312.0),
    ("NVIDIA A100-SXM4-80GB", "fp32", "highest", 19.5),
    ("NVIDIA A100-SXM4-80GB", "fp32", "high", 156.0),
    ("NVIDIA H100 80GB HBM3", "bf16", "highest", 989.4),
    ("NVIDIA H100 PCIe", "bf16", "highest", 756.0),
    ("NVIDIA H100 PCIe", "fp32", "medium", 378.0),
    ("Tesla V100-PCIE-16GB", "fp16", "highest", 112.0),
    ("Tesla V100-SXM2-32GB", "fp16", "highest", 125.0),
    # Without TF32, fp32 products stay fp32.
    ("AMD Radeon PRO W7900", "fp32", "high", 61.3),
    ("AMD Instinct MI300X", "bf16", "highest", 1307.4),
    # The hardware lacks the type.
    ("Tesla T4", "bf16", "highest", None),
    # Other devices, whose peak is unknown.
    ("NVIDIA H100 NVL", "bf16", "highest", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", "highest", None),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", "highest", None),
    ("NVIDIA RTX A6000", "bf16", "highest", None),
    ("AMD EPYC 7B13", "bf16", "highest", None),
    ("", "bf16", "highest", None),
]


@pytest.mark.parametrize(("name", "precision", "products", "peak"), PEAKS)
def test_peaks_of_devices_by_the_drivers_name(
    name: str, precision: str, products: str, peak: float | None
) -> None:
    assert peak_tflops(name, precision, products) == peak


def test_each_group_has_gpus_of_its_own() -> None:
    pairs = [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert gpu_groups(4, 2, rocm=False, variables={}) == pairs
    assert gpu_groups(5, 2, rocm=False, variables={}) == pairs
    assert gpu_groups(2, 1, rocm=True, variables={}) == [
        {"HIP_VISIBLE_DEVICES": "0"},
        {"HIP_VISIBLE_DEVICES": "1"},
    ]
    assert gpu_groups(1, 2, rocm=False, variables={}) == []


def test_gpus_in_use_by_others_are_left_alone() -> None:
    groups = gpu_groups(4, 1, rocm=False, variables={}, busy={1})
    assert [group["CUDA_VISIBLE_DEVICES"] for group in groups] == ["0", "2", "3"]
    # The index is that of the driver.
    assert {group["CUDA_DEVICE_ORDER"] for group in groups} == {"PCI_BUS_ID"}
    assert gpu_groups(4, 2, rocm=True, variables={}, busy={0, 2}) == [
        {"HIP_VISIBLE_DEVICES": "1,3"}
    ]
    assert gpu_groups(1, 1, rocm=False, variables={}, busy={0}) == []
    # The user has selected this one.
    chosen = {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpu_groups(1, 1, rocm=False, variables=chosen) == [chosen]


def test_gpus_that_the_user_hid_stay_hidden() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "3, GPU-8f2a,1"}
    assert gpu_groups(3, 1, rocm=False, variables=visible) == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("3", "GPU-8f2a", "1")
    ]
    both = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "6,7"}
    assert gpu_groups(2, 2, rocm=True, variables=both) == [{"HIP_VISIBLE_DEVICES": "6,7"}]
    assert gpu_groups(3, 3, rocm=True, variables=visible) == [
        {"HIP_VISIBLE_DEVICES": "3,GPU-8f2a,1"}
    ]
