"""Facts for the manifest: libraries of torch, numbers of threads and environment variables."""

import hashlib
import os
import re
from typing import Any

import torch

# The only environment variables recorded: each can affect results, none is a secret.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
)
# Variables that do not affect results: identical runs may differ in them.
_VOLATILE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTHONHASHSEED")


def torch_facts() -> dict[str, Any]:
    """Return the version of torch and of its libraries; None for a missing library."""
    built_with = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", built_with)
    onednn = re.search(r"MKL-DNN (v\S+)", built_with)
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl(),
        "blas": blas[1] if blas else None,
        "onednn": onednn[1] if onednn else None,
        "build_digest": hashlib.sha256(built_with.encode()).hexdigest(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "reduced_precision_reduction": {
            "bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        },
    }


def thread_facts() -> dict[str, Any]:
    """Return intra-op threads, inter-op threads and OMP_NUM_THREADS."""
    return {
        "intra_op": torch.get_num_threads(),
        "inter_op": torch.get_num_interop_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def variables(*, volatile: bool) -> dict[str, str | None]:
    """Return the recorded environment variables; None for an unset variable."""
    return {name: os.environ.get(name) for name in VARIABLES if (name in _VOLATILE) is volatile}


def _nccl() -> str | None:
    """Return the version of NCCL (or RCCL), or None if torch was built without it."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
