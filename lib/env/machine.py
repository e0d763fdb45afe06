"""Setup of the machine according to the configuration, and preflight checks of the machine.

There are three stages: ``environment`` before torch starts, ``preflight`` before anything is
written, and ``set_up`` in the training process.
"""

import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

from lib.env.options import MachineConfig
from lib.env.ranks import ProcessRank, missing_variables
from lib.errors import PreflightError, Problem

if TYPE_CHECKING:
    import torch

# glibc returns large blocks to the kernel when they are freed, and the next step faults every page
# in again: 7 to 13 % of a bf16 step at 124M. These variables keep the memory in the process.
MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

# cuBLAS is deterministic only with a fixed workspace: eight buffers of 4096 KiB.
WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def worker_environment(machine: MachineConfig) -> dict[str, str]:
    """Return the environment variables of a worker.

    They must be set before a worker starts, because libraries read them once, when they are loaded.
    """
    variables = {"OMP_NUM_THREADS": str(machine.cpu_threads)}
    if machine.device == "cpu":
        variables |= MALLOC_VARIABLES
    return {**variables, **_gpu_environment(machine)}


def preflight(machine: MachineConfig, processes: int = 1) -> None:
    """Check that this machine supports the configuration; writes and starts nothing.

    Imports torch and queries the GPU driver, so call it in a process that may use the GPU. Raises
    PreflightError with all problems at once.
    """
    import torch

    if machine.device == "cpu":
        problems = []
    elif not torch.cuda.is_available():
        problems = [_no_gpu(torch)]
    else:
        problems = _gpu_problems(torch, machine, processes)
    if machine.compile:
        problems += _compiler_problems(machine.device)
    if problems:
        raise PreflightError(*problems)


def set_up(machine: MachineConfig, process: ProcessRank, processes: int = 1) -> "torch.device":
    """Apply thread, determinism and GPU settings; return the device of this process.

    Raises PreflightError if the launcher started a different number of processes than configured,
    or omitted a variable that a library has already read.
    """
    import torch

    require_world_size(process, processes)
    if missing := missing_variables(_gpu_environment(machine)):
        what = f"environment variables not set: {' '.join(missing)}"
        advice = "set them before Python starts"
        raise PreflightError(Problem(what, next=advice, code="env.missing-variable"))
    torch.set_num_threads(machine.cpu_threads)
    torch.use_deterministic_algorithms(machine.repeats, warn_only=machine.deterministic == "warn")
    # Deterministic mode would first fill every new tensor with NaN, an extra write of all memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision(machine.matmul_precision)
    # Enabled by default in torch, independent of the precision of matrix products.
    torch.backends.cudnn.allow_tf32 = machine.matmul_precision != "highest"
    torch.backends.cudnn.benchmark = machine.cudnn_benchmark
    if machine.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


def require_world_size(process: ProcessRank, processes: int) -> None:
    """Raise PreflightError unless the world size of ``process`` equals ``processes``."""
    if process.world_size == processes:
        return
    if process.world_size == 1:
        what = f"GPUS={processes}: run requires {processes} processes, got 1"
    else:
        what = f"GPUS={processes}: process count mismatch, got WORLD_SIZE={process.world_size}"
    torchrun = f"torchrun --standalone --nproc-per-node {processes} scripts/train.py"
    advice = f"type: make, which starts the processes, or: {torchrun}"
    raise PreflightError(Problem(what, next=advice, code="ranks.count-mismatch"))


def autocast(machine: MachineConfig) -> "torch.autocast":
    """Return the context of a forward pass: matrix products in ``PRECISION``, weights stay fp32."""
    import torch

    enabled = machine.precision != "fp32"
    dtype = torch.float16 if machine.precision == "fp16" else torch.bfloat16
    return torch.autocast(machine.device, dtype=dtype, enabled=enabled)


def grad_scaler(machine: MachineConfig) -> "torch.amp.GradScaler":
    """Return the loss scaler required by fp16; disabled at other precisions."""
    import torch

    return torch.amp.GradScaler(machine.device, enabled=machine.precision == "fp16")


def _gpu_environment(machine: MachineConfig) -> dict[str, str]:
    variables = {}
    if machine.device == "cuda" and machine.repeats:
        variables[WORKSPACE_VARIABLE] = WORKSPACE
    if machine.device == "cuda" and machine.expandable_segments:
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return variables


def _no_gpu(torch: Any) -> Problem:
    gpu_build = torch.version.cuda or torch.version.hip
    reason = (
        "no GPU reported by the driver"
        if gpu_build
        else f"torch {torch.__version__} is gpu_build for the CPU"
    )
    return Problem(
        f"DEVICE=cuda: no GPU available ({reason})",
        next="type: make defconfig-NAME+cpu   (or add SET=DEVICE_CPU=y)",
        code="gpu.missing",
    )


def _gpu_problems(torch: Any, machine: MachineConfig, processes: int) -> list[Problem]:
    problems = []
    if torch.cuda.device_count() < processes:
        what = f"GPUS={processes}: not enough GPUs ({torch.cuda.device_count()} visible)"
        problems.append(Problem(what, code="gpu.too-few"))
    if machine.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(0)
        what = f"PRECISION=bf16: {name} does not support bf16"
        problems.append(Problem(what, next="type: SET=PRECISION_FP16=y", code="gpu.unsupported"))
    return problems


def _compiler_problems(device: str) -> list[Problem]:
    """Return missing compilers: torch.compile requires C++ on a CPU and Triton on a GPU."""
    if device == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        what = "COMPILE=y: no C++ compiler found"
        return [Problem(what, next="type: apt-get install g++", code="env.missing-compiler")]
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        what = "COMPILE=y: package triton is missing"
        return [Problem(what, next="type: SET=COMPILE=n", code="env.missing-package")]
    return []
