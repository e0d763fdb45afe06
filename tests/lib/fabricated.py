"""Fabricated directories of finished runs, for tests that need no training."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from lib.files import canonical_json
from lib.json_files import read_json_object
from lib.runs.documents import DocumentResult, to_csv
from lib.runs.manifest import SCHEMA_VERSION, add_artifact_digests, write_manifest
from lib.runs.record import required_files
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

IDENTITY: dict[str, Any] = {
    "machine": {"compile": False, "device": "cpu", "precision": "fp32"},
    "model": {
        "attention": {"terms": [], "backend": "auto"},
        "shape": {"n_layer": 2, "vocab_size": 257},
    },
    "optimizer": {"name": "adamw", "beta2": 0.95},
    "repro": {"profile": "paper_repro"},
    "schedule": {"warmup_steps": 2},
    "seed": 1,
    "train": {"batch_size": 2, "global_batch": 4, "gpus": 1},
}
# The settings that the stability of a training depends on.
WARMUP: Mapping[str, Any] = {
    "model": {"shape": {"vocab_size": 257}},
    "schedule": {"warmup_steps": 2},
}
MANIFEST: dict[str, Any] = {
    "attention": {"backend_requested": "auto", "kernel": "sdpa math"},
    "batch": {"micro_batch": 2, "accumulation": 2, "global_sequences": 4},
    "code": {"changed_during_run": [], "dirty_tree": False, "git_sha": "0" * 40},
    "data": {"digest": "d1", "split": {"id": "s1"}, "tokenizer": {"digest": "t1"}},
    "debug_flags": {"check_numerics": False, "detect_anomaly": False},
    "environment": {"cudnn_version": None},
    "hardware": {
        "cpu_model": "a cpu",
        "cpu_capability": "AVX2",
        "cuda_version": None,
        "hip_version": None,
        "gpu_name": None,
        "driver_version": None,
    },
    "knobs": {
        name: {"requested": value, "resolved": value, "observed": value}
        for name, value in {
            "allow_tf32_cudnn": False,
            "cpu_threads": 1,
            "precision_mode": "fp32",
            "torch_compile_enabled": False,
        }.items()
    },
    "volatile": {"attempts": [{"state": "SUCCESS", "started_at": 1.5}]},
    "oom_fallbacks": [],
    "nondeterministic_ops_warned": None,
    "origin": {"torch": "2.13.0", "device": "a cpu", "sources": {"gpt2/train.py": "a" * 64}},
    "processes": {"world_size": 1, "backend": "none"},
    "init_weights_digest": ["i1"],
    "torch": {"build_digest": "b1", "reduced_precision_reduction": {"bf16": True}},
    "variables": {
        **dict.fromkeys(("CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "NCCL_ALGO", "NCCL_PROTO")),
        "NVIDIA_TF32_OVERRIDE": None,
    },
}
# Loss, right tokens and length of each document.
DOCUMENTS: Mapping[str, tuple[float, int, int]] = {"x": (31.4, 5, 10), "y": (29.0, 6, 10)}


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return the digest of a configuration with this identity."""
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def changed(record: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return a deep copy; ``knobs__cpu_threads=2`` sets the value at that key path, ``...`` removes it."""
    copy: dict[str, Any] = json.loads(json.dumps(record))
    for path, value in values.items():
        *place, last = path.split("__")
        target = copy
        for key in place:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return copy


def seal(run: RunDir, record: Mapping[str, Any]) -> None:
    """Write a manifest that is consistent with the files beside it."""
    state = {"schema_version": SCHEMA_VERSION, "status": State.SUCCESS, "volatile": {}}
    write_manifest(run, add_artifact_digests(run, {**state, **record}))


def reseal(run: RunDir) -> None:
    """Record the present lengths and digests of the files, as if the run had written them so."""
    write_manifest(run, add_artifact_digests(run, read_json_object(run.manifest)))


def complete(run: RunDir, manifest: Mapping[str, Any] = MANIFEST, iterations: int = 0) -> None:
    """Write the files that a finished run has and ``run`` lacks, its manifest, and its status."""
    for path in required_files(run):
        if not path.exists():
            path.write_text("a line\n")
    seal(run, manifest)
    write_status(run, RunStatus(State.SUCCESS, 0, "", iterations, iterations))


def _item(name: str, loss: float, right: int, tokens: int) -> DocumentResult:
    digest = hashlib.sha256(name.encode()).hexdigest()
    sizes = tokens, 4 * tokens, 0, 0
    return DocumentResult(name, "demo", digest, digest, "val", *sizes, loss, right, 2)


def write_run(
    path: Path,
    *,
    identity: Mapping[str, Any] = IDENTITY,
    manifest: Mapping[str, Any] = MANIFEST,
    symbols: Mapping[str, Any] | None = None,
    documents: Mapping[str, tuple[float, int, int]] = DOCUMENTS,
    losses: Sequence[float] = (3.5, 3.2),
    weight: float = 0.5,
    final: Mapping[str, Any] | None = None,
) -> RunDir:
    """Write a finished run's directory; ``final`` overrides figures computed from the rows."""
    path.mkdir(parents=True, exist_ok=True)
    run = RunDir(path)
    record = {"identity": identity, "symbols": symbols or {"SEED": 1}}
    run.resolved_config.write_text(json.dumps(record))
    tokens = sum(n for _, _, n in documents.values())
    figures = {
        "val_loss": sum(loss for loss, _, _ in documents.values()) / tokens,
        "unigram_entropy": 3.145,
        "parameters": 1000,
        "tokens": 2048,
        "iterations": len(losses),
        "sparsity": 0.0,
        "sparsity_by_layer": {},
        "prunable_weights": {},
    }
    timing = {"train_seconds": 61.0, "tokens_per_second": 33.6, "mean_step_seconds": 30.5}
    flags = {"check_numerics": False, "detect_anomaly": False}
    summary = {"final": figures | dict(final or {}), "numerics": flags, "timing": timing}
    run.summary.write_text(json.dumps(summary))
    run.per_query.write_text(to_csv(_item(name, *row) for name, row in documents.items()))
    lines = [
        {"kind": "train", "iteration": i, "lr": 0.1, "loss": loss, "grad_norm": 1.0, "tokens": i}
        for i, loss in enumerate(losses, 1)
    ]
    last = {"iteration": len(losses), "tokens": 2048, "val_loss": figures["val_loss"]}
    lines.append({"kind": "eval", **last, "token_accuracy": 0.5, "sparsity": figures["sparsity"]})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    weights = {"wte.weight": np.full((2, 3), weight, np.float32)}
    run.weights.write_bytes(safetensors.numpy.save(weights))
    speed = {"iteration": len(losses), "tokens_per_second": 33.6, "written_at": 1.0}
    run.timing.write_text(json.dumps(speed) + "\n")
    run.logs.write_text("a line\n")
    seal(run, manifest)
    write_status(run, RunStatus(State.SUCCESS))
    return run
