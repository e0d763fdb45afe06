"""The artifact contract: the files of a finished run, and the digests that the manifest has of them.

Cheap enough for every run of a table; imports no torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.audit.finding import Finding, differing, read_json
from lib.files import sha256, sha256_of_start
from lib.repro.seal import SCHEMA_VERSION, manifest_digest, volatile_digest
from lib.rundir import RunDir
from lib.status import State, read_status

# Files that the environment's snapshot is made of, below the run.
_SNAPSHOT = "environment"


def required(run: RunDir) -> tuple[Path, ...]:
    """What every finished run has."""
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
    """Files that are missing or empty, and digests that do not agree.

    Without ``every_byte`` the weights are judged by their size.
    """
    missing = [*_missing(run)]
    if any(finding.file == run.manifest.name for finding in missing):
        return missing
    try:
        manifest = read_json(run.manifest)
    except (OSError, ValueError) as error:
        return [*missing, Finding(run.manifest.name, "a JSON object", str(error))]
    try:
        return [*missing, *_manifest(run, manifest), *_artifacts(run, manifest, every_byte)]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        return [*missing, Finding(run.manifest.name, "the fields of a finished run", what)]


def _missing(run: RunDir) -> Iterator[Finding]:
    status = read_status(run)
    if status is None or status.state is not State.SUCCESS:
        found = "none" if status is None else status.state
        yield Finding(run.status.name, "state SUCCESS", found)
    for path in required(run):
        if not path.is_file():
            yield Finding(path.name, "a file", "none")
        elif not path.stat().st_size:
            yield Finding(path.name, "content", "0 bytes")


def _manifest(run: RunDir, manifest: Mapping[str, Any]) -> Iterator[Finding]:
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
    for name, facts in tables.items():
        path = run.path / name
        if not path.is_file():
            # Said already of what every run has.
            if path not in required(run):
                yield Finding(name, "a file", "none")
        elif path == run.logs:
            yield from _beginning(path, facts)
        elif path == run.weights and not every_byte:
            yield from differing(name, "bytes", facts["bytes"], path.stat().st_size)
        else:
            yield from differing(name, "SHA-256", facts["sha256"], sha256(path))
    others = {
        **manifest["environment"].get("snapshot", {}),
        **volatile.get("hardware_files", {}),
    }
    yield from _recorded({f"{_SNAPSHOT}/{name}": digest for name, digest in others.items()}, run)
    if diff := manifest["code"].get("diff"):
        yield from _recorded({diff["file"]: diff["sha256"]}, run)


def _beginning(path: Path, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """A log may grow after the run's end: a tracker that is lost then is told there."""
    found = sha256_of_start(path, facts["bytes"])
    expected = f"SHA-256 of the first {facts['bytes']} bytes"
    yield from differing(path.name, expected, facts["sha256"], found)


def _recorded(digests: Mapping[str, str], run: RunDir) -> Iterator[Finding]:
    for name, digest in digests.items():
        path = run.path / name
        if path.is_file():
            yield from differing(name, "SHA-256", digest, sha256(path))
        else:
            yield Finding(name, "a file", "none")
