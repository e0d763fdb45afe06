"""GPU groups and their environment variables; no GPU needed."""

from lib.env.gpu import gpu_groups


def test_each_group_has_gpus_of_its_own() -> None:
    pairs = [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert gpu_groups(4, 2, rocm=False, variables={}) == pairs
    assert gpu_groups(5, 2, rocm=False, variables={}) == pairs
    assert gpu_groups(2, 1, rocm=True, variables={}) == [
        {"HIP_VISIBLE_DEVICES": "0"},
        {"HIP_VISIBLE_DEVICES": "1"},
    ]
    assert gpu_groups(1, 2, rocm=False, variables={}) == []


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
