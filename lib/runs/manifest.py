"""``manifest.json``: provenance of a run, for auditing and for reproducing the run.

Fields that depend on time, host or folder are stored under ``volatile``. Only a fixed list of
environment variables is recorded, because other variables may contain secrets.
"""

import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lib.config.private import without_private_words
from lib.env.observe import hardware
from lib.env.packages import installed_packages
from lib.env.snapshot import hardware_digests
from lib.json_files import RecordError
from lib.project import ROOT
from lib.runs.code import git_state, write_code_patch
from lib.runs.finalize import SCHEMA_VERSION, write_manifest
from lib.runs.record import read_manifest
from lib.runs.run_dir import RunDir, State

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
        # A property of the module object, which type checkers do not see.
        "fill_uninitialized_memory": (
            torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        ),
        "reduced_precision_reduction": {
            "bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        },
    }


def variables(*, volatile: bool) -> dict[str, str | None]:
    """Return the recorded environment variables; None for an unset variable."""
    return {name: os.environ.get(name) for name in VARIABLES if (name in _VOLATILE) is volatile}


def _nccl() -> str | None:
    """Return the version of NCCL (or RCCL), or None if torch was built without it."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def begin_manifest(
    run: RunDir,
    device: torch.device,
    pids: Sequence[int],
    facts: Mapping[str, Any],
    order: Mapping[str, float],
) -> None:
    """Write the manifest of a run that starts or resumes.

    ``pids`` are the process ids of all ranks, ``facts`` additional entries from the caller, ``order``
    the place of this attempt in the training order of the study. Code and data are digested before
    the first step, so that edits during the run are not attributed to it.
    """
    record = {
        "schema_version": SCHEMA_VERSION,
        "status": State.RUNNING,
        "failure": None,
        "code": git_state() | {"diff": write_code_patch(run.path)},
        "hardware": hardware(device),
        "torch": torch_facts(),
        "threads": {
            "intra_op": torch.get_num_threads(),
            "inter_op": torch.get_num_interop_threads(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "variables": variables(volatile=False),
        "oom_fallbacks": [],
        **facts,
        "artifacts": {},
        "volatile": {
            "name": run.path.name,
            "host": platform.node(),
            "pids": [*pids],
            "git_root": str(ROOT),
            "argv": without_private_words(sys.argv),
            "working_directory": os.getcwd(),
            "variables": variables(volatile=True),
            "attempts": _attempts(run, order),
            "artifacts": {},
            "hardware_files": hardware_digests(run),
        },
    }
    write_manifest(run, record)


def record_fallback(run: RunDir, record: Mapping[str, Any]) -> None:
    """Append the record of an out-of-memory fallback to ``oom_fallbacks``."""
    manifest = read_manifest(run)
    fallbacks = [*manifest.value(list, "oom_fallbacks"), dict(record)]
    write_manifest(run, {**manifest.fields, "oom_fallbacks": fallbacks})


def software_versions() -> dict[str, Any]:
    """Return versions of Python, torch and its libraries, and every installed package."""
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "torch_git": torch.version.git_version,
        "cudnn_version": torch.backends.cudnn.version(),
        "packages": installed_packages(),
    }


def _attempts(run: RunDir, order: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the attempts of the run so far, the current attempt last.

    An earlier attempt without a recorded end was killed.
    """
    try:
        attempts = read_manifest(run).value(list, "volatile", "attempts")
    except RecordError:
        attempts = []
    for attempt in attempts:
        if attempt["state"] == State.RUNNING:
            attempt["state"] = "KILLED"
    return [*attempts, {**order, "state": State.RUNNING, "started_at": time.time()}]
