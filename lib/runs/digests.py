"""Whether the files of a finished run are those that its manifest lists: digests of all of them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lib.files import sha256_file, sha256_prefix
from lib.json_files import RecordError
from lib.runs.manifest import SCHEMA_VERSION, manifest_digest, volatile_digest
from lib.runs.record import Finding, RunRecord

# File, name of the value, expected and recorded value.
Check = tuple[str, str, Any, Any]


def mismatches(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield a finding unless both values are equal in type and value; floats compare bit by bit."""
    for file, name, *values in checks:
        if type(values[0]) is not type(values[1]) or values[0] != values[1]:
            expected, found = (
                repr(v) if type(v) in (float, str) else json.dumps(v) for v in values
            )
            yield Finding(file, f"{name} {expected}", found)


def digest_findings(record: RunRecord, *, weights: bool = True) -> Iterator[Finding]:
    """Yield a finding for every other digest of a run whose files have the recorded lengths.

    Without ``weights`` their digest is not compared: cheap enough for every run of a table.
    """
    try:
        yield from mismatches(_digests(record, weights))
    except RecordError as error:
        yield Finding.of(error)
    except OSError as error:
        yield Finding(Path(error.filename).name, "a file", error.strerror or str(error))
    except (KeyError, TypeError, AttributeError) as error:
        error_text = f"{type(error).__name__}: {error}"
        yield Finding(record.run.manifest.name, "the fields of a finished run", error_text)


def _digests(record: RunRecord, weights: bool) -> Iterator[Check]:
    run, manifest = record.run, record.manifest.fields
    volatile, name = manifest["volatile"], run.manifest.name
    yield name, "schema_version", SCHEMA_VERSION, manifest["schema_version"]
    yield name, "status", "SUCCESS", manifest["status"]
    yield name, "manifest_digest", manifest_digest(manifest), manifest["manifest_digest"]
    yield name, "volatile.digest", volatile_digest(volatile), volatile["digest"]
    snapshot = {**manifest["environment"].get("snapshot", {}), **volatile.get("hardware_files", {})}
    digests = {f"{run.environment.name}/{file}": digest for file, digest in snapshot.items()}
    if diff := manifest["code"].get("diff"):
        digests[diff["file"]] = diff["sha256"]
    for name, digest in digests.items():
        path = run.path / name
        yield name, "SHA-256", digest, sha256_file(path) if path.is_file() else "no file"
    for name, artifact in record.artifacts.items():
        size = record.sizes.get(name, -1)
        if name == run.logs.name and size >= artifact.bytes:
            digest = sha256_prefix(run.logs, artifact.bytes)
            yield name, f"SHA-256 of the first {artifact.bytes} bytes", artifact.sha256, digest
        elif size == artifact.bytes and (weights or name != run.weights.name):
            yield name, "SHA-256", artifact.sha256, sha256_file(run.path / name)
