"""The artifact contract: required files of a finished run and their digests in the manifest.

The check is cheap enough for every run of a table and does not import torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.audit.finding import Finding, differing, read_json
from lib.files import sha256, sha256_of_start
from lib.repro.seal import SCHEMA_VERSION, manifest_digest, volatile_digest
from lib.rundir import RunDir
from lib.status import State, read_status

# Folder of the environment snapshot in a run directory.
_SNAPSHOT = "environment"


def required(run: RunDir) -> tuple[Path, ...]:
    """Return the files that every finished run must have."""
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


def broken_contract(run: RunDir, *, every_byte: bool) -> list[Finding]:
    """Return a finding for every missing or empty file and every digest mismatch.

    Without ``every_byte`` only the size of the weights file is checked.
    """
    findings = [*_missing_files(run)]
    if any(finding.file == run.manifest.name for finding in findings):
        return findings
    try:
        manifest = read_json(run.manifest)
    except (OSError, ValueError) as error:
        return [*findings, Finding(run.manifest.name, "a JSON object", str(error))]
    try:
        return [
            *findings,
            *_manifest_digests(run, manifest),
            *_artifacts(run, manifest, every_byte),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        error_text = f"{type(error).__name__}: {error}"
        return [*findings, Finding(run.manifest.name, "the fields of a finished run", error_text)]


def _missing_files(run: RunDir) -> Iterator[Finding]:
    status = read_status(run)
    if status is None or status.state is not State.SUCCESS:
        state = "none" if status is None else status.state
        yield Finding(run.status.name, "state SUCCESS", state)
    for path in required(run):
        if not path.is_file():
            yield Finding(path.name, "a file", "none")
        elif not path.stat().st_size:
            yield Finding(path.name, "content", "0 bytes")


def _manifest_digests(run: RunDir, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    name = run.manifest.name
    yield from differing(name, "schema_version", SCHEMA_VERSION, manifest["schema_version"])
    yield from differing(name, "status", "SUCCESS", manifest["status"])
    volatile = manifest["volatile"]
    for field, expected, found in (
        ("manifest_digest", manifest_digest(manifest), manifest["manifest_digest"]),
        ("volatile.digest", volatile_digest(volatile), volatile["digest"]),
    ):
        yield from differing(name, field, expected, found)


def _artifacts(run: RunDir, manifest: Mapping[str, Any], every_byte: bool) -> Iterator[Finding]:
    volatile = manifest["volatile"]
    tables = manifest["artifacts"] | volatile["artifacts"]
    for path in required(run):
        if path != run.manifest and path.name not in tables:
            yield Finding(run.manifest.name, f"a digest of {path.name}", "none")
    for name, record in tables.items():
        path = run.path / name
        if not path.is_file():
            # _missing_files has already reported the required files.
            if path not in required(run):
                yield Finding(name, "a file", "none")
        elif path == run.logs:
            yield from _log_prefix(path, record)
        elif path == run.weights and not every_byte:
            yield from differing(name, "bytes", record["bytes"], path.stat().st_size)
        else:
            yield from differing(name, "SHA-256", record["sha256"], sha256(path))
    snapshot = {
        **manifest["environment"].get("snapshot", {}),
        **volatile.get("hardware_files", {}),
    }
    yield from _digest_mismatches(
        {f"{_SNAPSHOT}/{name}": digest for name, digest in snapshot.items()}, run
    )
    if diff := manifest["code"].get("diff"):
        yield from _digest_mismatches({diff["file"]: diff["sha256"]}, run)


def _log_prefix(path: Path, record: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the digest of the log's recorded length; trackers may append to the log after the run's
    end.
    """
    digest = sha256_of_start(path, record["bytes"])
    expected = f"SHA-256 of the first {record['bytes']} bytes"
    yield from differing(path.name, expected, record["sha256"], digest)


def _digest_mismatches(digests: Mapping[str, str], run: RunDir) -> Iterator[Finding]:
    for name, digest in digests.items():
        path = run.path / name
        if path.is_file():
            yield from differing(name, "SHA-256", digest, sha256(path))
        else:
            yield Finding(name, "a file", "none")
