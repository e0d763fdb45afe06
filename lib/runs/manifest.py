"""``manifest.json``: provenance of a run, written when it starts, resumes and ends.

Fields that depend on time, host or folder are under ``volatile``. All others are equal for two runs of
one configuration and are covered by ``manifest_digest``. The digests detect damage and accidental
edits; they are not signatures. torch is imported where a run starts.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.config.private import without_private_words
from lib.env.snapshot import hardware_digests
from lib.files import json_digest, sha256_file, write_json
from lib.json_files import RecordError
from lib.project import ROOT
from lib.runs.code import changed_since, git_state, write_code_patch
from lib.runs.lease import no_guard
from lib.runs.record import JsonRecord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 2
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


def begin_manifest(
    run: RunDir,
    device: "torch.device",
    pids: Sequence[int],
    facts: Mapping[str, Any],
    order: Mapping[str, float],
) -> None:
    """Write the manifest of a run that starts or resumes, with the digests of code before its first step.

    ``pids`` are the process ids of all ranks, ``order`` is the time at which the attempt was submitted.
    """
    import torch

    from lib.env.hardware import hardware

    record = {
        "schema_version": SCHEMA_VERSION,
        "status": State.RUNNING,
        "failure": None,
        "code": git_state() | {"diff": write_code_patch(run.path)},
        "hardware": hardware(device),
        "torch": _torch_facts(),
        "threads": {
            "intra_op": torch.get_num_threads(),
            "inter_op": torch.get_num_interop_threads(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "variables": {name: os.environ.get(name) for name in VARIABLES if name not in _VOLATILE},
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
            "variables": {name: os.environ.get(name) for name in _VOLATILE},
            "attempts": _attempts(run, order),
            "artifacts": {},
            "hardware_files": hardware_digests(run),
        },
    }
    write_manifest(run, record)


def _attempts(run: RunDir, order: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the attempts of the run, the current one last; one without a recorded end was killed."""
    try:
        attempts = JsonRecord.read(run.manifest).value(list, "volatile", "attempts")
    except RecordError:
        attempts = []
    for attempt in attempts:
        if attempt["state"] == State.RUNNING:
            attempt["state"] = "KILLED"
    return [*attempts, {**order, "state": State.RUNNING, "started_at": time.time()}]


def _torch_facts() -> dict[str, Any]:
    """Return the version of torch and of its libraries; None for a missing library."""
    import torch
    import torch.distributed as dist

    built_with = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", built_with)
    onednn = re.search(r"MKL-DNN (v\S+)", built_with)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        # Or RCCL.
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
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


def record_fallback(run: RunDir, record: Mapping[str, Any]) -> None:
    """Append the record of an out-of-memory fallback to ``oom_fallbacks``."""
    manifest = JsonRecord.read(run.manifest)
    fallbacks = [*manifest.value(list, "oom_fallbacks"), dict(record)]
    write_manifest(run, {**manifest.fields, "oom_fallbacks": fallbacks})


def finalize_run(
    run: RunDir,
    status: RunStatus,
    facts: Mapping[str, Any] | None = None,
    guard: Callable[[], None] = no_guard,
) -> None:
    """Close the manifest, with ``facts``, and write the status.

    SUCCESS is written after the manifest, any other state before it. A run that never started has no
    manifest and gets only a status. ``guard`` raises LeaseLost if the run was taken over.
    """
    if status.state is State.SUCCESS:
        _close_manifest(run, status, facts or {}, guard)
        guard()
        write_status(run, status)
    else:
        guard()
        write_status(run, status)
        # A full disk may be the cause of the failure, which the status already contains.
        with contextlib.suppress(OSError):
            _close_manifest(run, status, facts or {}, guard)


def _close_manifest(
    run: RunDir, status: RunStatus, facts: Mapping[str, Any], guard: Callable[[], None]
) -> None:
    """Record the outcome, digests of the results, and source files edited during the run."""
    try:
        record = dict(JsonRecord.read(run.manifest).fields)
        attempt = record["volatile"]["attempts"][-1]
    # Not a manifest of this program: the audit reports that.
    except (RecordError, KeyError, TypeError, IndexError):
        return
    record |= facts
    record["status"] = status.state
    record["failure"] = status.message or None
    record["code"]["changed_during_run"] = changed_since(record["origin"]["sources"])
    attempt |= {"state": status.state, "iteration": status.iteration, "ended_at": time.time()}
    finished = add_artifact_digests(run, record)
    guard()
    write_manifest(run, finished)


def add_artifact_digests(run: RunDir, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with the size and digest of every existing result file."""
    # Their bytes depend only on configuration and seed.
    deterministic = run.resolved_config, run.metrics, run.per_query, run.weights, run.sample
    volatile = {**record["volatile"], "artifacts": _table(run.summary, run.timing, run.logs)}
    return {**record, "artifacts": _table(*deterministic), "volatile": volatile}


def _table(*files: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in files
        if path.exists()
    }


def write_manifest(run: RunDir, record: Mapping[str, Any]) -> None:
    """Write ``record`` atomically, with its digests."""
    volatile = dict(record["volatile"])
    volatile["digest"] = volatile_digest(volatile)
    digest = manifest_digest(record)
    write_json(run.manifest, {**record, "volatile": volatile, "manifest_digest": digest})


def manifest_digest(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON without ``volatile`` and the digest itself."""
    return _digest_without(record, "volatile", "manifest_digest")


def volatile_digest(volatile: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of ``volatile`` without its digest."""
    return _digest_without(volatile, "digest")


def _digest_without(record: Mapping[str, Any], *names: str) -> str:
    covered = {key: value for key, value in record.items() if key not in names}
    return json_digest(covered)
