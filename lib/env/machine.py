"""Setup of the machine: variables that torch reads when it starts, and settings of a training process."""

import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from lib.env.options import MachineConfig
from lib.env.ranks import ProcessRank, missing_variables
from lib.errors import PreflightError, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# glibc returns large blocks to the kernel when they are freed, and the next step faults every page
# in again: 7 to 13 % of a bf16 step at 124M. These variables keep the memory in the process.
MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
# A sharded run frees and allocates whole blocks of weights. In one heap, the gaps between them double
# its memory; with this variable, large blocks are returned to the kernel.
SHARDED_MALLOC_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

# A thread of libgomp that waits spins for milliseconds, also if another process uses the core of the
# thread that it waits for. With this limit, a step of two threads beside two busy processes took 0.6
# times as long, and one on idle cores as long as before; sleeping at once took 1.4 times as long there.
SPIN_VARIABLE, SPINS = "GOMP_SPINCOUNT", "10000"

# cuBLAS is deterministic only with a fixed workspace: eight buffers of 4096 KiB.
WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def worker_environment(machine: MachineConfig) -> dict[str, str]:
    """Return the variables of a worker, read once by libraries; the user's on waiting threads remain."""
    variables = {"OMP_NUM_THREADS": str(machine.cpu_threads)}
    if machine.device == "cpu":
        if not {SPIN_VARIABLE, "OMP_WAIT_POLICY"} & os.environ.keys():
            variables[SPIN_VARIABLE] = SPINS
        sharded = machine.data_parallel == "fsdp"
        variables |= SHARDED_MALLOC_VARIABLES if sharded else MALLOC_VARIABLES
    return {**variables, **_gpu_environment(machine)}


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
    # A property that torch adds to the class of the module, which mypy cannot see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision(machine.matmul_precision)
    # Enabled by default in torch, independent of the precision of matrix products.
    torch.backends.cudnn.allow_tf32 = machine.matmul_precision != "highest"
    torch.backends.cudnn.benchmark = machine.cudnn_benchmark
    if machine.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


class NarrowProducts:
    """Replacement of torch's kernels on a CPU: fp32 products of bf16 values, rounded to bf16 once.

    Without instructions for bf16, torch's scalar loop takes ten times as long.
    """

    def __init__(self) -> None:
        from torch import library

        self._kernels = library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch reports that its own kernels are replaced, which is the purpose.
            warnings.simplefilter("ignore", UserWarning)
            for name in ("mm", "addmm"):
                product = partial(_product, library.get_kernel(f"aten::{name}", "CPU"))
                self._kernels.impl(name, product, "CPU", with_keyset=True, allow_override=True)

    def restore(self) -> None:
        self._kernels._destroy()


def _product(kernel: Any, keys: Any, *tensors: "Tensor", **factors: float) -> "Tensor":
    import torch

    # torch's kernel raises an error if types differ.
    if not all(each.dtype is torch.bfloat16 for each in tensors):
        result: Tensor = kernel.call_boxed(keys, *tensors, **factors)
        return result
    wide: Tensor = kernel.call_boxed(keys, *(each.float() for each in tensors), **factors)
    return wide.bfloat16()


def require_world_size(process: ProcessRank, processes: int) -> None:
    if process.world_size == processes:
        return
    what = f"GPUS={processes}: process count mismatch, got WORLD_SIZE={process.world_size}"
    torchrun = f"torchrun --standalone --nproc-per-node {processes}"
    script = "gpt2/train_ra_mla.py --in-process"
    advice = f"type: make, which starts the processes, or: {torchrun} {script}"
    raise PreflightError(Problem(what, next=advice, code="ranks.count-mismatch"))


def autocast(machine: MachineConfig) -> "torch.autocast":
    """Return the context of a forward pass: matrix products in ``PRECISION``, weights stay fp32."""
    import torch

    enabled = machine.precision != "fp32"
    dtype = torch.float16 if machine.precision == "fp16" else torch.bfloat16
    # A cached cast refers to the gathered parameter of the first micro-batch, so that gradients of
    # sharded parameters would miss all others.
    cache = machine.data_parallel != "fsdp"
    return torch.autocast(machine.device, dtype=dtype, enabled=enabled, cache_enabled=cache)


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
