"""Variables, conditions and ranks of the processes of a machine, and its products of bf16 matrices."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from lib.env.machine import NarrowProducts, set_up, worker_environment
from lib.env.preflight import require_machine
from lib.env.ranks import ProcessRank, current_process, missing_variables, rank_environment
from lib.errors import PreflightError
from tests.lib.env.conftest import CPU

GPU = replace(CPU, device="cuda")


def test_libraries_are_told_before_they_start(monkeypatch):
    spinning = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in spinning:
        monkeypatch.delenv(name, raising=False)
    on_cpu = worker_environment(replace(CPU, cpu_threads=3))
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["MALLOC_MMAP_MAX_"]) == ("3", "0")
    assert int(on_cpu["GOMP_SPINCOUNT"]) > 0
    # Whole blocks of weights are returned to the kernel.
    sharded = worker_environment(replace(CPU, data_parallel="fsdp"))
    assert "MALLOC_MMAP_MAX_" not in sharded and int(sharded["MALLOC_MMAP_THRESHOLD_"]) > 0
    assert worker_environment(replace(GPU, expandable_segments=True)) == {
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert "CUBLAS_WORKSPACE_CONFIG" not in worker_environment(replace(GPU, deterministic="off"))
    for name in spinning:
        with monkeypatch.context() as exported:
            exported.setenv(name, "7")
            assert "GOMP_SPINCOUNT" not in worker_environment(CPU)


def test_all_that_a_machine_lacks_is_listed(monkeypatch):
    def refused(machine, processes=1):
        with pytest.raises(PreflightError) as refusal:
            require_machine(machine, processes)
        assert refusal.value.exit_code == 3
        return refusal.value

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = refused(GPU)
    assert error.codes == ["gpu.missing"] and "+cpu" in error.problems[0].next

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Old GPU")
    error = refused(replace(GPU, precision="bf16"), processes=4)
    assert error.codes == ["gpu.too-few", "gpu.unsupported"]
    assert "GPUS=4" in str(error) and "Old GPU" in str(error)

    monkeypatch.setenv("PATH", "")
    error = refused(replace(CPU, compile=True))
    assert error.codes == ["env.missing-compiler"] and "COMPILE=y" in str(error)


@pytest.mark.parametrize(
    ("machine", "process", "code", "words"),
    [
        (CPU, ProcessRank(world_size=2), "ranks.count-mismatch", ["GPUS=1", "WORLD_SIZE=2"]),
        (GPU, ProcessRank(), "env.missing-variable", ["CUBLAS_WORKSPACE_CONFIG=:4096:8"]),
    ],
)
def test_what_the_launcher_omitted_is_refused(monkeypatch, machine, process, code, words):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(PreflightError) as refusal:
        set_up(machine, process)
    assert refusal.value.codes == [code]
    assert all(word in str(refusal.value) for word in words)


# One unit in the last place of bf16.
_ULP = 2.0**-7


def layers(dtype):
    """Return outputs and gradients of linear layers with and without a bias."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((2, 9, 16), (24, 16), (24,))]
    x, w, b = (each.to(dtype).requires_grad_() for each in tensors)
    outputs = [F.linear(x, w, b), F.linear(x, w)]
    gradients = torch.autograd.grad([out.sum() for out in outputs], (x, w, b))
    return [*(out.detach() for out in outputs), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_keep_their_bits_or_narrow_ones_but_for_one_rounding(dtype):
    before = layers(dtype)
    products = NarrowProducts()
    after = layers(dtype)
    products.restore()
    tolerance = {"rtol": _ULP, "atol": 1e-6} if dtype is torch.bfloat16 else {"rtol": 0, "atol": 0}
    for expected, actual in zip(before, after, strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)


def test_a_narrow_product_is_the_rounded_exact_one_and_two_types_are_refused(monkeypatch):
    products = NarrowProducts()
    x, w = torch.tensor([[1.0, 2.0**-8]]).bfloat16(), torch.tensor([[1.0], [1.0]]).bfloat16()
    # Half a unit, rounded to even, and with a third term a little more than half.
    assert float(x @ w) == 1.0
    x, w = (torch.cat([x, x[:, 1:]], 1), torch.cat([w, w[1:]]))
    assert float(x @ w) == 1.0 + _ULP
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.zeros(2, 2).bfloat16() @ torch.zeros(2, 2)
    products.restore()
    # Then the kernels of torch are used again, also those of other objects.
    monkeypatch.setattr("lib.env.machine._product", pytest.fail)
    products = NarrowProducts()
    products.restore()
    assert float(x @ w) == 1.0 + _ULP


def test_a_process_without_and_with_a_launcher(tmp_path):
    alone = current_process({})
    assert alone == ProcessRank(rank=0, world_size=1, local_rank=0) and alone.is_main
    found = current_process({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert found == ProcessRank(rank=5, world_size=8, local_rank=1) and not found.is_main
    # torchrun sets variables that torch reads; processes of one machine meet at a file.
    assert found.rendezvous == "env://"
    here = current_process(rank_environment(1, 4, tmp_path / "meeting"))
    assert here == ProcessRank(1, 4, 1, f"file://{tmp_path}/meeting")


def test_a_rank_that_is_not_a_number_is_named_and_missing_variables_are_listed():
    with pytest.raises(PreflightError, match="RANK='zero'") as caught:
        current_process({"RANK": "zero"})
    assert caught.value.codes == ["env.invalid-variable"]
    wanted = {"A": "1", "B": "2", "C": "3"}
    assert missing_variables(wanted, {"A": "1", "B": "0"}) == ["B=2", "C=3"]
