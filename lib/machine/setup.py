"""Making the machine do what the configuration says, and refusing where it cannot.

Three moments: ``environment`` before torch starts, ``preflight`` before anything is written, and
``set_up`` in the process that trains.
"""

import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

from lib.errors import PreflightError, Problem
from lib.machine.options import MachineConfig
from lib.machine.process import Process, missing_variables

if TYPE_CHECKING:
    import torch

# glibc gives large blocks back to the kernel as soon as they are freed, and the next step faults
# every page in anew: 7 to 13 % of a bf16 step at 124M. These keep the memory in the process.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

# cuBLAS is deterministic only with a fixed workspace: eight buffers of 4096 KiB.
WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def environment(machine: MachineConfig) -> dict[str, str]:
    """Variables that a worker must be started with: libraries read them once, at their start."""
    variables = {"OMP_NUM_THREADS": str(machine.cpu_threads)}
    if machine.device == "cpu":
        variables |= KEEP_MEMORY
    return {**variables, **_gpu_environment(machine)}


def preflight(machine: MachineConfig, processes: int = 1) -> None:
    """Refuse what this machine cannot run; writes nothing and starts nothing.

    Imports torch and asks the GPU driver, so call it in a process that may use the GPU. Raises
    PreflightError with every reason at once.
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


def set_up(machine: MachineConfig, process: Process, processes: int = 1) -> "torch.device":
    """Apply threads, determinism and GPU habits; return the device of this process.

    PreflightError when the launcher started another number of processes than the configuration
    says, or left out a variable that a library has already read.
    """
    import torch

    require_processes(process, processes)
    if missing := missing_variables(_gpu_environment(machine)):
        raise PreflightError(
            f"this process was started without {' '.join(missing)}; set it before Python starts"
        )
    torch.set_num_threads(machine.cpu_threads)
    torch.use_deterministic_algorithms(machine.repeats, warn_only=machine.deterministic == "warn")
    # Deterministic mode would fill every new tensor with NaN first: a write of all memory once more.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision(machine.matmul_precision)
    # torch leaves this one on by itself, whatever the precision of matrix products.
    torch.backends.cudnn.allow_tf32 = machine.matmul_precision != "highest"
    torch.backends.cudnn.benchmark = machine.cudnn_benchmark
    if machine.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


def require_processes(process: Process, processes: int) -> None:
    """PreflightError unless ``process`` is one of as many as the configuration says."""
    if process.world_size == processes:
        return
    if process.world_size == 1:
        what = f"GPUS={processes} trains in {processes} processes, and this is one"
    else:
        what = f"WORLD_SIZE={process.world_size} in the environment, but GPUS={processes}"
    torchrun = f"torchrun --standalone --nproc-per-node {processes} scripts/train.py"
    advice = f"type: make, which starts them itself, or: {torchrun}"
    raise PreflightError(Problem(what, next=advice))


def autocast(machine: MachineConfig) -> "torch.autocast":
    """The context of a forward pass: matrix products in ``PRECISION``, weights stay fp32."""
    import torch

    enabled = machine.precision != "fp32"
    dtype = torch.float16 if machine.precision == "fp16" else torch.bfloat16
    return torch.autocast(machine.device, dtype=dtype, enabled=enabled)


def grad_scaler(machine: MachineConfig) -> "torch.amp.GradScaler":
    """The loss scaler that fp16 needs; passes everything through at other precisions."""
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
    built = torch.version.cuda or torch.version.hip
    reason = "the driver shows none" if built else f"torch {torch.__version__} is built for the CPU"
    return Problem(
        f"DEVICE=cuda, but there is no GPU: {reason}",
        next="type: make defconfig-NAME+cpu   (or add SET=DEVICE_CPU=y)",
    )


def _gpu_problems(torch: Any, machine: MachineConfig, processes: int) -> list[Problem]:
    problems = []
    if torch.cuda.device_count() < processes:
        problems.append(
            Problem(f"GPUS={processes}, but {torch.cuda.device_count()} GPU(s) are visible")
        )
    if machine.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(0)
        problems.append(
            Problem(f"PRECISION=bf16: {name} has no bf16", next="type: SET=PRECISION_FP16=y")
        )
    return problems


def _compiler_problems(device: str) -> list[Problem]:
    """torch.compile writes C++ for a CPU and Triton for a GPU; both need their compiler."""
    if device == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return [Problem("COMPILE=y: no C++ compiler found", next="type: apt-get install g++")]
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return [Problem("COMPILE=y: the package triton is missing", next="type: SET=COMPILE=n")]
    return []
