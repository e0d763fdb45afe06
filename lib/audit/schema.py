"""Required fields and their types in the JSON files of a finished run."""

from collections.abc import Iterator, Mapping
from typing import Any

from lib.audit.finding import Finding

Schema = Mapping[str, type | tuple[type, ...]]

_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))
# A dot in a name separates the keys of nested objects.
MANIFEST: Schema = {
    "schema_version": int,
    "status": str,
    "failure": _TEXT_OR_NONE,
    "run.run_id": str,
    "run.run_profile": str,
    "run.hash8": str,
    "config.config_digest": str,
    "config.defconfig": list,
    "config.overrides": dict,
    "code.git_sha": _TEXT_OR_NONE,
    "code.branch": _TEXT_OR_NONE,
    "code.dirty_tree": (bool, str),
    "code.changed_during_run": list,
    "origin.sources": dict,
    "origin.torch": str,
    "origin.device": str,
    "environment.python_version": str,
    "environment.packages": dict,
    "environment.torch_git": _TEXT_OR_NONE,
    "torch.version": str,
    "torch.build_digest": str,
    "hardware.cpu_model": str,
    "hardware.cpu_capability": str,
    "threads.intra_op": int,
    "threads.inter_op": int,
    "variables": dict,
    "knobs": dict,
    "deviations": list,
    "oom_fallbacks": list,
    "nondeterministic_ops_warned": (list, type(None)),
    "debug_flags.check_numerics": bool,
    "debug_flags.detect_anomaly": bool,
    "attention.kernel": str,
    "batch.global_sequences": int,
    "batch.micro_batch": int,
    "batch.accumulation": int,
    "processes.world_size": int,
    "seeds.seed": int,
    "seeds.dataloader_seed_policy": str,
    "rng.algorithms": dict,
    "rng.streams": dict,
    "rng_state_at_start": dict,
    "rng_state_at_end": dict,
    "init_weights_digest": list,
    "final_weights_digest": str,
    "optimizer_state_digest": str,
    "data.digest": str,
    "data.files": dict,
    "data.split": dict,
    "data.tokenizer": dict,
    "artifacts": dict,
    "manifest_digest": str,
    "volatile.host": str,
    "volatile.attempts": list,
    "volatile.argv": list,
    "volatile.rerun": str,
    "volatile.artifacts": dict,
    "volatile.digest": str,
}
SUMMARY: Schema = {
    "schema_version": int,
    "seed": int,
    "run_profile": str,
    "final.val_loss": float,
    "final.val_perplexity": (float, str),
    "final.bits_per_byte": (float, type(None)),
    "final.token_accuracy": float,
    "final.expected_calibration_error": float,
    "final.eval_tokens": int,
    "final.eval_documents": int,
    "final.train_loss": float,
    "final.iterations": int,
    "final.tokens": int,
    "final.unigram_entropy": float,
    "final.parameters": int,
    "final.budget_stretch": float,
    "final.sparsity": _NUMBER,
    "final.sparsity_by_layer": dict,
    "final.prunable_weights": dict,
    "final.data_order_digest": str,
    "calibration.n_tokens": list,
    "calibration.n_correct": list,
    "calibration.confidence_sum": list,
    "numerics.check_numerics": bool,
    "numerics.detect_anomaly": bool,
    "timing.total_seconds": float,
    "timing.train_seconds": float,
    "timing.mean_step_seconds": float,
    "timing.tokens_per_second": float,
    "timing.debug_flags": list,
}
RESOLVED: Schema = {
    "schema_version": int,
    "hash8": str,
    "identity": dict,
    "settings": dict,
    "symbols": dict,
}
# Rows of metrics.jsonl by kind, in their order within an iteration.
ROWS: Mapping[str, Schema] = {
    "train": {
        "iteration": int,
        "tokens": int,
        "progress": float,
        "lr": _NUMBER,
        "loss": float,
        "grad_norm": (float, type(None)),
    },
    "statistics": {
        "iteration": int,
        "tokens": int,
        "values": dict,
    },
    "eval": {
        "iteration": int,
        "tokens": int,
        "val_loss": float,
        "token_accuracy": float,
        "sparsity": _NUMBER,
    },
}


def misfits(file: str, record: Mapping[str, Any], schema: Schema) -> Iterator[Finding]:
    """Yield a finding for every field that is missing or of the wrong type."""
    for name, kinds in schema.items():
        value: Any = record
        for part in name.split("."):
            value = value.get(part, ...) if isinstance(value, dict) else ...
        if value is ...:
            yield Finding(file, f"a field {name}", "none")
        elif not isinstance(value, kinds) or (isinstance(value, bool) and not _accepts_bool(kinds)):
            yield Finding(file, f"{name} of type {_type_names(kinds)}", repr(value)[:60])


def _accepts_bool(kinds: type | tuple[type, ...]) -> bool:
    """Return whether bool is an accepted type; in Python a bool is also an int."""
    return bool in (kinds if isinstance(kinds, tuple) else (kinds,))


def _type_names(kinds: type | tuple[type, ...]) -> str:
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in listed)
