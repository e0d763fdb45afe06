"""Finalization of ``manifest.json``: digests of the results and of the manifest; imports no torch.

Fields outside ``volatile`` are equal for two runs of one configuration and are covered by
``manifest_digest``; ``volatile`` has a separate digest. The digests detect damage and accidental
edits. They are not signatures: anybody can recompute them.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib.files import canonical_json, sha256_file, write_json
from lib.json_files import RecordError
from lib.runs.code import changed_since
from lib.runs.lease import no_guard
from lib.runs.record import read_manifest
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

SCHEMA_VERSION = 2
# Keys that the manifest digest does not cover.
_NOT_DIGESTED = ("volatile", "manifest_digest")


def write_manifest(run: RunDir, record: Mapping[str, Any]) -> None:
    """Write ``record`` atomically, with its digests."""
    volatile = dict(record["volatile"])
    volatile["digest"] = volatile_digest(volatile)
    digest = manifest_digest(record)
    write_json(run.manifest, {**record, "volatile": volatile, "manifest_digest": digest})


def manifest_digest(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON without ``volatile`` and the digest itself."""
    return _digest({key: value for key, value in record.items() if key not in _NOT_DIGESTED})


def volatile_digest(volatile: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of ``volatile`` without its digest."""
    return _digest({key: value for key, value in volatile.items() if key != "digest"})


def add_artifact_digests(run: RunDir, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with the size and digest of every existing result file."""
    # Their bytes depend only on configuration and seed.
    deterministic = run.resolved_config, run.metrics, run.per_query, run.weights, run.sample
    volatile = {**record["volatile"], "artifacts": _table(run.summary, run.timing, run.logs)}
    return {**record, "artifacts": _table(*deterministic), "volatile": volatile}


def finalize_run(
    run: RunDir,
    status: RunStatus,
    facts: Mapping[str, Any] | None = None,
    guard: Callable[[], None] = no_guard,
) -> None:
    """Close the manifest and write the status.

    SUCCESS is written after the manifest, any other state before it. ``facts`` are added to the
    manifest. A run that never started has no manifest and gets only a status. ``guard`` is called
    before each write, and raises LeaseLost if the run was taken over.
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
        record = dict(read_manifest(run).fields)
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


def _table(*files: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in files
        if path.exists()
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
