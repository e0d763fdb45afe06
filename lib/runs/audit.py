"""Audit of a run directory: required files, digests, field types, and recomputed results.

``artifact_findings`` is cheap enough for every run of a table. ``consistency_findings`` recomputes
figures, rows and digests from the run's own files. Does not import torch.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.files import sha256_file, sha256_prefix
from lib.json_files import RecordError
from lib.runs.documents import evaluation_metrics, expected_calibration_error, train_loss
from lib.runs.finalize import SCHEMA_VERSION, manifest_digest, volatile_digest
from lib.runs.record import JsonRecord, RunRecord
from lib.runs.run_dir import RunDir, State


@dataclass(frozen=True)
class AuditFinding:
    """One mismatch in ``file``, a path relative to the run directory."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.found}"


def mismatch(file: str, name: str, expected: Any, found: Any) -> Iterator[AuditFinding]:
    """Yield a finding unless both values are equal in type and value; floats compare bit by bit."""
    if type(expected) is not type(found) or expected != found:
        yield AuditFinding(file, f"{name} {_shown(expected)}", _shown(found))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float | str) else json.dumps(value)


def required_files(run: RunDir) -> tuple[Path, ...]:
    """Return the files that a finished run must have."""
    return (
        run.resolved_config,
        run.manifest,
        run.metrics,
        run.per_query,
        run.summary,
        run.logs,
        run.timing,
        run.weights,
    )


def artifact_findings(record: RunRecord, *, every_byte: bool) -> list[AuditFinding]:
    """Return a finding for every missing or empty file and every digest mismatch.

    Without ``every_byte`` only the size of the weights file is checked.
    """
    findings = [*_missing_files(record)]
    if not any(finding.file == record.run.manifest.name for finding in findings):
        findings += _in_manifest(record, lambda fields: _artifacts(record, fields, every_byte))
    return findings


def damage_of(record: RunRecord) -> str:
    """Return why a run is damaged: its status cannot be read, or it is finished, and a file is missing
    or has not the recorded length; else "".

    Only status and manifest are read: a change of the same length is found by ``artifact_findings``.
    """
    status = record.status
    if status is None or status.state is not State.SUCCESS:
        return status.message if status and status.state is State.DAMAGED else ""
    findings = [*_missing_files(record)]
    if not findings:
        findings = [*_in_manifest(record, lambda fields: _other_lengths(record, fields))]
    return str(findings[0]) if findings else ""


def _in_manifest(
    record: RunRecord, check: Callable[[Mapping[str, Any]], Iterator[AuditFinding]]
) -> Iterator[AuditFinding]:
    """Yield the findings of ``check`` of the manifest, and one if it is not of a finished run."""
    try:
        yield from check(record.manifest.fields)
    except RecordError as error:
        yield _finding(error)
    except (KeyError, TypeError, AttributeError) as error:
        error_text = f"{type(error).__name__}: {error}"
        yield AuditFinding(record.run.manifest.name, "the fields of a finished run", error_text)


def _other_lengths(record: RunRecord, manifest: Mapping[str, Any]) -> Iterator[AuditFinding]:
    for name, artifact in (manifest["artifacts"] | manifest["volatile"]["artifacts"]).items():
        size, recorded = record.sizes.get(name), artifact["bytes"]
        # Trackers may append to the log after the end of the run.
        whole = name == record.run.logs.name and size is not None and size >= recorded
        if size is not None and not whole:
            yield from mismatch(name, "bytes", recorded, size)


def _missing_files(record: RunRecord) -> Iterator[AuditFinding]:
    run, status = record.run, record.status
    if status is None or status.state is not State.SUCCESS:
        state = "none" if status is None else str(status.state)
        if status and status.state is State.DAMAGED:
            state = status.message
        yield AuditFinding(run.status.name, "state SUCCESS", state)
    else:
        yield from mismatch(run.status.name, "exit_code", 0, status.exit_code)
        yield from mismatch(run.status.name, "message", "", status.message)
    for path in required_files(run):
        if path.name not in record.sizes:
            yield AuditFinding(path.name, "a file", "none")
        elif not record.sizes[path.name]:
            yield AuditFinding(path.name, "content", "0 bytes")


def _artifacts(
    record: RunRecord, manifest: Mapping[str, Any], every_byte: bool
) -> Iterator[AuditFinding]:
    """Check the digests of the manifest, and those of other files that it records."""
    run, volatile, name = record.run, manifest["volatile"], record.run.manifest.name
    digest = manifest_digest(manifest)
    yield from mismatch(name, "schema_version", SCHEMA_VERSION, manifest["schema_version"])
    yield from mismatch(name, "status", "SUCCESS", manifest["status"])
    yield from mismatch(name, "manifest_digest", digest, manifest["manifest_digest"])
    yield from mismatch(name, "volatile.digest", volatile_digest(volatile), volatile["digest"])
    tables = manifest["artifacts"] | volatile["artifacts"]
    required = [path.name for path in required_files(run)]
    for name in required:
        if name != run.manifest.name and name not in tables:
            yield AuditFinding(run.manifest.name, f"a digest of {name}", "none")
    for name, artifact in tables.items():
        path = run.path / name
        if not (name in record.sizes or path.is_file()):
            # _missing_files has reported the required files.
            if name not in required:
                yield AuditFinding(name, "a file", "none")
        elif name == run.logs.name:
            # Trackers may append to the log after the end of the run.
            expected = f"SHA-256 of the first {artifact['bytes']} bytes"
            prefix = sha256_prefix(path, artifact["bytes"])
            yield from mismatch(name, expected, artifact["sha256"], prefix)
        else:
            if name == run.weights.name:
                yield from mismatch(name, "bytes", artifact["bytes"], record.sizes[name])
            if name != run.weights.name or every_byte:
                yield from mismatch(name, "SHA-256", artifact["sha256"], record.sha256(path))
    snapshot = {
        **manifest["environment"].get("snapshot", {}),
        **volatile.get("hardware_files", {}),
    }
    digests = {f"{run.environment.name}/{name}": digest for name, digest in snapshot.items()}
    if diff := manifest["code"].get("diff"):
        digests[diff["file"]] = diff["sha256"]
    for name, digest in digests.items():
        path = run.path / name
        if path.is_file():
            yield from mismatch(name, "SHA-256", digest, sha256_file(path))
        else:
            yield AuditFinding(name, "a file", "none")


# Field of the manifest.
_WEIGHTS_DIGEST = "final_weights_digest"
RecordSchema = Mapping[str, type | tuple[type, ...]]

_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))
# A dot in a name separates the keys of nested objects.
MANIFEST_SCHEMA: RecordSchema = {
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
    _WEIGHTS_DIGEST: str,
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
SUMMARY_SCHEMA: RecordSchema = {
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
RESOLVED_CONFIG_SCHEMA: RecordSchema = {
    "schema_version": int,
    "hash8": str,
    "identity": dict,
    "settings": dict,
    "symbols": dict,
}
# Rows of metrics.jsonl by kind, in their order within an iteration.
METRICS_ROW_SCHEMAS: Mapping[str, RecordSchema] = {
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


def schema_findings(
    file: str, record: Mapping[str, Any], schema: RecordSchema
) -> Iterator[AuditFinding]:
    """Yield a finding for every field that is missing or of the wrong type."""
    for name, kinds in schema.items():
        accepted = kinds if isinstance(kinds, tuple) else (kinds,)
        value: Any = record
        for part in name.split("."):
            value = value.get(part, ...) if isinstance(value, dict) else ...
        if value is ...:
            yield AuditFinding(file, f"a field {name}", "none")
        # In Python a bool is also an int.
        elif not isinstance(value, kinds) or (isinstance(value, bool) and bool not in accepted):
            types = ("null" if kind is type(None) else kind.__name__ for kind in accepted)
            yield AuditFinding(file, f"{name} of type {' or '.join(types)}", repr(value)[:60])


def schema_problems(record: RunRecord) -> list[AuditFinding]:
    """Return a finding for every unreadable file, and for every field of an unexpected type."""
    findings: list[AuditFinding] = []
    readers: Sequence[tuple[Callable[[], JsonRecord], RecordSchema]] = (
        (lambda: record.manifest, MANIFEST_SCHEMA),
        (lambda: record.summary, SUMMARY_SCHEMA),
        (lambda: record.config, RESOLVED_CONFIG_SCHEMA),
    )
    for read, required_fields in readers:
        try:
            content = read()
        except RecordError as error:
            findings.append(_finding(error))
        else:
            findings += schema_findings(content.file.name, content.fields, required_fields)
    findings += _metrics_problems(record)
    try:
        _ = record.documents
    except RecordError as error:
        findings.append(_finding(error))
    return findings


def consistency_findings(record: RunRecord) -> list[AuditFinding]:
    """Return the findings of all cross-checks between the files of a run."""
    return [*_figures(record), *_rows(record), *_shared(record)]


def _finding(error: RecordError) -> AuditFinding:
    name = f"{error.file.name}:{error.line}" if error.line else error.file.name
    return AuditFinding(name, error.expected, error.actual)


def _metrics_problems(record: RunRecord) -> Iterator[AuditFinding]:
    try:
        rows = record.metrics_fields
    except RecordError as error:
        yield _finding(error)
        return
    for number, row in enumerate(rows, 1):
        where, kind = f"{record.run.metrics.name}:{number}", row.get("kind")
        if isinstance(kind, str) and kind in METRICS_ROW_SCHEMAS:
            yield from schema_findings(where, row, METRICS_ROW_SCHEMAS[kind])
        else:
            yield AuditFinding(where, f"kind in {', '.join(METRICS_ROW_SCHEMAS)}", repr(kind))


def _figures(record: RunRecord) -> Iterator[AuditFinding]:
    """Recompute the summary from the rows; floats must be equal to the last bit."""
    run, summary = record.run, record.summary.fields
    final, timing, name = summary["final"], summary["timing"], run.summary.name
    expected = evaluation_metrics(record.documents)
    if not _gap(record):
        expected["train_loss"] = train_loss(record.metrics_fields, final["iterations"])
    for field, value in expected.items():
        yield from mismatch(name, f"final.{field}", value, final[field])
    steps = {item.eval_step for item in record.documents}
    yield from mismatch(run.per_query.name, "eval_step", [final["iterations"]], [*steps])
    seconds, bins = timing["train_seconds"], summary["calibration"]
    error, tokens = "expected_calibration_error", sum(bins["n_tokens"])
    accuracy = sum(bins["n_correct"]) / final["eval_tokens"]
    for field, recomputed, recorded in (
        ("timing.mean_step_seconds", seconds / final["iterations"], timing["mean_step_seconds"]),
        ("timing.tokens_per_second", final["tokens"] / seconds, timing["tokens_per_second"]),
        (f"final.{error}", expected_calibration_error(bins), final[error]),
        ("Σ calibration.n_tokens", final["eval_tokens"], tokens),
        ("accuracy of calibration", final["token_accuracy"], accuracy),
    ):
        yield from mismatch(name, field, recomputed, recorded)


def _rows(record: RunRecord) -> Iterator[AuditFinding]:
    """Check that each iteration has one row and that the last evaluation equals the summary."""
    name, final = record.run.metrics.name, record.summary.fields["final"]
    order = [*METRICS_ROW_SCHEMAS]
    keys = [(row["iteration"], order.index(row["kind"])) for row in record.metrics_fields]
    if keys != sorted(set(keys)):
        yield AuditFinding(name, "rows in order of iteration without duplicates", "another order")
    if missing := _gap(record):
        yield AuditFinding(name, f"one row for each of {final['iterations']} iterations", missing)
    else:
        tokens = max(row["tokens"] for row in record.metrics_fields)
        yield from mismatch(name, "tokens", final["tokens"], tokens)
    last = record.metrics_fields[-1]
    if last["kind"] != "eval":
        yield AuditFinding(name, "an eval row at the end", last["kind"])
        return
    yield from mismatch(name, "last iteration", final["iterations"], last["iteration"])
    for field in ("val_loss", "token_accuracy", "sparsity"):
        yield from mismatch(name, f"last {field}", final[field], last[field])
    if (status := record.status) and status.state is State.SUCCESS:
        file = record.run.status.name
        yield from mismatch(file, "iteration", final["iterations"], status.iteration)
        # 0 if a time budget limits the run.
        planned = status.iterations and final["iterations"]
        yield from mismatch(file, "iterations", planned, status.iterations)


def _gap(record: RunRecord) -> str:
    """Return a description of the first missing or extra training row; "" if there is none."""
    iterations = [row["iteration"] for row in record.metrics_fields if row["kind"] == "train"]
    planned = record.summary.fields["final"]["iterations"]
    for expected, recorded in itertools.zip_longest(range(1, planned + 1), iterations):
        if expected != recorded:
            return f"iteration {recorded} in place of {expected}"
    return ""


def _shared(record: RunRecord) -> Iterator[AuditFinding]:
    """Compare the facts that two files record, the log of the run included."""
    run, manifest, summary = record.run, record.manifest.fields, record.summary.fields
    symbols, flags, checks = record.symbols, manifest["debug_flags"], summary["numerics"]
    seed, profile = symbols.get("SEED"), symbols.get("RUN_PROFILE")
    in_manifest, in_summary = run.manifest.name, run.summary.name
    for file, field, expected, found in (
        (in_manifest, "seeds.seed", seed, manifest["seeds"]["seed"]),
        (in_manifest, "run.run_profile", profile, manifest["run"]["run_profile"]),
        (in_manifest, "run.hash8", record.hash8, manifest["run"]["hash8"]),
        (in_manifest, "config.overrides", record.settings, manifest["config"]["overrides"]),
        (in_summary, "seed", seed, summary["seed"]),
        (in_summary, "run_profile", profile, summary["run_profile"]),
        *(
            (in_summary, f"numerics.{flag}", flags[flag], checks[flag])
            for flag in ("check_numerics", "detect_anomaly")
        ),
    ):
        yield from mismatch(file, field, expected, found)
    if len(set(manifest["init_weights_digest"])) != 1:
        yield AuditFinding(in_manifest, "equal initial weights on all ranks", "different digests")
    if not run.logs.is_file():
        return
    text = run.logs.read_text(encoding="utf-8", errors="replace")
    device = str(manifest["knobs"]["device"]["observed"])
    for phrase in (f"seed {manifest['seeds']['seed']} ", manifest["run"]["run_profile"], device):
        if phrase not in text:
            yield AuditFinding(run.logs.name, f"the text {phrase!r}", "none")


def weight_findings(record: RunRecord) -> list[AuditFinding]:
    """Recompute digest, parameter count, finiteness and sparsity of the final weights."""
    # Damaged files are reported without the delay of this import.
    import safetensors.torch
    import torch

    from lib.runs.checkpoint import weights_digest

    file, recorded_digest = record.run.weights.name, record.manifest.value(str, _WEIGHTS_DIGEST)
    try:
        weights = safetensors.torch.load_file(record.run.weights)
    except (OSError, safetensors.SafetensorError) as error:
        return [AuditFinding(file, "weights", str(error))]
    final, elements = record.final, {name: each.numel() for name, each in weights.items()}
    findings = [
        *mismatch(file, _WEIGHTS_DIGEST, recorded_digest, weights_digest(weights)),
        *mismatch(file, "parameters", final.parameters, sum(elements.values())),
    ]
    for name, weight in weights.items():
        if count := int((~torch.isfinite(weight)).sum()):
            findings.append(AuditFinding(file, f"finite elements in {name}", f"{count} non-finite"))
    # The summary lists every prunable matrix, so no model has to be built.
    layers = final.sparsity_by_layer
    if missing := layers.keys() - weights.keys():
        return [
            *findings,
            AuditFinding(file, "every prunable matrix", f"{min(missing)} is missing"),
        ]
    zeros = {name: int((weights[name] == 0).sum()) for name in layers}
    for name, recorded in layers.items():
        sparsity = zeros[name] / elements[name]
        findings += mismatch(file, f"sparsity of {name}", recorded, sparsity)
    total = sum(zeros.values()) / max(1, sum(elements[name] for name in layers))
    if total != final.sparsity:
        findings += mismatch(file, "sparsity", final.sparsity, total)
    return findings
