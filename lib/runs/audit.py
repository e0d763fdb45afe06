"""Audit of a run directory against its own records: files, digests, types, recomputed results.

Imports no torch, except for the weights.
"""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

from lib.files import sha256_file, sha256_prefix
from lib.json_files import RecordError
from lib.runs.documents import evaluation_metrics, expected_calibration_error, train_loss
from lib.runs.manifest import SCHEMA_VERSION, manifest_digest, volatile_digest
from lib.runs.record import Finding, RunRecord
from lib.runs.run_dir import State

# What the records of a finished run contain, by the name of the property of ``RunRecord``.
_CONTENTS = (
    *("code", "sources", "hardware", "attempts", "final", "timing"),
    *("hash8", "identity", "settings", "symbols", "metrics", "documents"),
)


def mismatch(file: str, name: str, expected: Any, found: Any) -> Iterator[Finding]:
    """Yield a finding unless both values are equal in type and value; floats compare bit by bit."""
    if type(expected) is not type(found) or expected != found:
        yield Finding(file, f"{name} {_shown(expected)}", _shown(found))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float | str) else json.dumps(value)


def artifact_findings(record: RunRecord, *, weights: bool = True) -> Iterator[Finding]:
    """Yield a finding for every missing or empty file, and every other length or digest.

    Without ``weights`` their digest is not compared: cheap enough for every run of a table.
    """
    run, status = record.run, record.status
    if status is None:
        yield Finding(run.status.name, "state SUCCESS", "none")
    elif status.state is not State.SUCCESS:
        state = status.message if status.state is State.DAMAGED else str(status.state)
        yield Finding(run.status.name, "state SUCCESS", state)
    yield from record.file_findings()
    if not record.sizes.get(run.manifest.name):
        return
    try:
        yield from _manifest_findings(record)
        yield from _digest_findings(record, weights)
    except RecordError as error:
        yield Finding.of(error)
    except (KeyError, TypeError, AttributeError) as error:
        error_text = f"{type(error).__name__}: {error}"
        yield Finding(run.manifest.name, "the fields of a finished run", error_text)


def _manifest_findings(record: RunRecord) -> Iterator[Finding]:
    """Check the manifest's own digests, and those of the files beside the results."""
    run, manifest = record.run, record.manifest.fields
    volatile = manifest["volatile"]
    for field, expected, found in (
        ("schema_version", SCHEMA_VERSION, manifest["schema_version"]),
        ("status", "SUCCESS", manifest["status"]),
        ("manifest_digest", manifest_digest(manifest), manifest["manifest_digest"]),
        ("volatile.digest", volatile_digest(volatile), volatile["digest"]),
    ):
        yield from mismatch(run.manifest.name, field, expected, found)
    snapshot = {**manifest["environment"].get("snapshot", {}), **volatile.get("hardware_files", {})}
    digests = {f"{run.environment.name}/{name}": digest for name, digest in snapshot.items()}
    if diff := manifest["code"].get("diff"):
        digests[diff["file"]] = diff["sha256"]
    for name, digest in digests.items():
        if (run.path / name).is_file():
            yield from mismatch(name, "SHA-256", digest, sha256_file(run.path / name))
        else:
            yield Finding(name, "a file", "none")


def _digest_findings(record: RunRecord, weights: bool) -> Iterator[Finding]:
    """Compare the results that have the recorded lengths with their recorded digests."""
    run = record.run
    for name, artifact in record.artifacts.items():
        size = record.sizes.get(name, -1)
        if name == run.logs.name and size >= artifact.bytes:
            expected = f"SHA-256 of the first {artifact.bytes} bytes"
            digest = sha256_prefix(run.logs, artifact.bytes)
            yield from mismatch(name, expected, artifact.sha256, digest)
        elif size == artifact.bytes and (weights or name != run.weights.name):
            yield from mismatch(name, "SHA-256", artifact.sha256, record.sha256(run.path / name))


def unreadable_contents(
    record: RunRecord, names: tuple[str, ...] = _CONTENTS
) -> Iterator[RecordError]:
    """Yield the error of every content of the records that cannot be read."""
    for name in names:
        try:
            getattr(record, name)
        except RecordError as error:
            yield error


def consistency_findings(record: RunRecord) -> Iterator[Finding]:
    """Yield the findings of all cross-checks between the files of a run."""
    yield from _figures(record)
    yield from _rows(record)
    manifest, symbols = record.manifest, record.symbols
    seed, profile = symbols.get("SEED"), symbols.get("RUN_PROFILE")
    for content, place, expected in (
        (manifest, ("seeds", "seed"), seed),
        (manifest, ("run", "run_profile"), profile),
        (manifest, ("run", "hash8"), record.hash8),
        (manifest, ("config", "overrides"), record.settings),
        (record.summary, ("seed",), seed),
        (record.summary, ("run_profile",), profile),
    ):
        yield from mismatch(content.file.name, ".".join(place), expected, content.find(*place))
    if len(set(manifest.value(list, "init_weights_digest"))) != 1:
        expected = "equal initial weights on all ranks"
        yield Finding(manifest.file.name, expected, "different digests")


def _figures(record: RunRecord) -> Iterator[Finding]:
    """Recompute the summary from the rows; floats must be equal to the last bit."""
    run, summary, final, timing = record.run, record.summary, record.final, record.timing
    summary.value(float, "final", "budget_stretch")
    names = ("n_tokens", "n_correct", "confidence_sum")
    bins = {name: summary.value(list, "calibration", name) for name in names}
    figures = evaluation_metrics(record.documents)
    figures["expected_calibration_error"] = expected_calibration_error(bins)
    if not _gap(record):
        figures["train_loss"] = train_loss(record.metrics_fields, final.iterations)
    counted = final.iterations - timing.warmup_iterations
    step_seconds = (timing.train_seconds - timing.warmup_seconds) / max(counted, 1)
    speeds = {
        "mean_step_seconds": step_seconds,
        "tokens_per_second": final.tokens / final.iterations / (step_seconds or math.nan),
    }
    for section, expected in (("final", figures), ("timing", speeds)):
        for field, value in expected.items():
            found = summary.find(section, field)
            yield from mismatch(run.summary.name, f"{section}.{field}", value, found)
    steps = {item.eval_step for item in record.documents}
    yield from mismatch(run.per_query.name, "eval_step", [final.iterations], [*steps])


def _rows(record: RunRecord) -> Iterator[Finding]:
    """Check that each iteration has one row and that the last evaluation equals the summary."""
    name, final, status = record.run.metrics.name, record.final, record.status
    # Of an iteration.
    order = ("train", "statistics", "eval")
    keys = [(row["iteration"], order.index(row["kind"])) for row in record.metrics_fields]
    if keys != sorted(set(keys)):
        yield Finding(name, "rows in order of iteration without duplicates", "another order")
    if missing := _gap(record):
        yield Finding(name, f"one row for each of {final.iterations} iterations", missing)
    else:
        tokens = max(row["tokens"] for row in record.metrics_fields)
        yield from mismatch(name, "tokens", final.tokens, tokens)
    last = record.metrics_fields[-1]
    if last["kind"] != "eval":
        yield Finding(name, "an eval row at the end", last["kind"])
        return
    yield from mismatch(name, "last iteration", final.iterations, last["iteration"])
    for field in ("val_loss", "token_accuracy", "sparsity"):
        yield from mismatch(name, f"last {field}", record.summary.find("final", field), last[field])
    if status and status.state is State.SUCCESS:
        file = record.run.status.name
        yield from mismatch(file, "iteration", final.iterations, status.iteration)
        # 0 if a time budget limits the run.
        planned = status.iterations and final.iterations
        yield from mismatch(file, "iterations", planned, status.iterations)


def _gap(record: RunRecord) -> str:
    """Return a description of the first missing or extra training row; "" if there is none."""
    iterations = (row.iteration for row in record.train_rows)
    planned = range(1, record.final.iterations + 1)
    for expected, recorded in itertools.zip_longest(planned, iterations):
        if expected != recorded:
            return f"iteration {recorded} in place of {expected}"
    return ""


def weight_findings(record: RunRecord) -> Iterator[Finding]:
    """Recompute digest, parameter count, finiteness and sparsity of the final weights."""
    # Damaged files are reported without the delay of this import.
    import safetensors.torch
    import torch

    from lib.runs.checkpoint import weights_digest

    file = record.run.weights.name
    recorded_digest = record.manifest.value(str, "final_weights_digest")
    try:
        weights = safetensors.torch.load_file(record.run.weights)
    except (OSError, safetensors.SafetensorError) as error:
        yield Finding(file, "weights", str(error))
        return
    final, elements = record.final, {name: each.numel() for name, each in weights.items()}
    yield from mismatch(file, "final_weights_digest", recorded_digest, weights_digest(weights))
    yield from mismatch(file, "parameters", final.parameters, sum(elements.values()))
    for name, weight in weights.items():
        if count := int((~torch.isfinite(weight)).sum()):
            yield Finding(file, f"finite elements in {name}", f"{count} non-finite")
    # The summary lists every prunable matrix, so no model has to be built.
    layers = final.sparsity_by_layer
    if missing := layers.keys() - weights.keys():
        yield Finding(file, "every prunable matrix", f"{min(missing)} is missing")
        return
    zeros = {name: int((weights[name] == 0).sum()) for name in layers}
    for name, recorded in layers.items():
        sparsity = zeros[name] / elements[name]
        yield from mismatch(file, f"sparsity of {name}", recorded, sparsity)
    total = sum(zeros.values()) / max(1, sum(elements[name] for name in layers))
    if total != final.sparsity:
        yield from mismatch(file, "sparsity", final.sparsity, total)
