"""Environment variables, preflight checks and applied settings of the machine."""

from dataclasses import replace

import pytest

from lib.env.machine import set_up, worker_environment
from lib.env.preflight import require_machine
from lib.env.ranks import ProcessRank
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
