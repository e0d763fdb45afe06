"""Writes ``manifest.json`` with digests of the results and of itself; imports no torch.

What two runs of one configuration share stands outside ``volatile``, and ``manifest_digest`` covers
it; ``volatile`` has a digest of its own. Neither is a signature: they show damage and careless
edits, not somebody who computes them again.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.files import canonical_json, sha256, write_json
from lib.repro.source import changed_since
from lib.rundir import RunDir
from lib.status import State, Status, write_status

SCHEMA_VERSION = 2
# Not covered by the manifest's own digest.
_OUTSIDE = ("volatile", "manifest_digest")


def write_manifest(run: RunDir, record: Mapping[str, Any]) -> None:
    """Write ``record`` atomically, with its digests."""
    volatile = dict(record["volatile"])
    volatile["digest"] = volatile_digest(volatile)
    digest = manifest_digest(record)
    write_json(run.manifest, {**record, "volatile": volatile, "manifest_digest": digest})


def manifest_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of all but ``volatile`` and the digest itself."""
    return _digest({key: value for key, value in record.items() if key not in _OUTSIDE})


def volatile_digest(volatile: Mapping[str, Any]) -> str:
    """The same of what stands under ``volatile``, but for its own digest."""
    return _digest({key: value for key, value in volatile.items() if key != "digest"})


def with_artifacts(run: RunDir, record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with size and digest of every result that is there."""
    volatile = {**record["volatile"], "artifacts": _table(volatile_files(run))}
    return {**record, "artifacts": _table(deterministic_files(run)), "volatile": volatile}


def end_run(run: RunDir, status: Status, facts: Mapping[str, Any] | None = None) -> None:
    """Close the manifest and write the status: SUCCESS last of all, any other end at once.

    ``facts`` are added to the manifest. A run that never began has none, and gets a status alone.
    """
    if status.state is State.SUCCESS:
        _close_manifest(run, status, facts or {})
        write_status(run, status)
    else:
        write_status(run, status)
        # A full disk may be why it failed, and the status says so already.
        with contextlib.suppress(OSError):
            _close_manifest(run, status, facts or {})


def deterministic_files(run: RunDir) -> tuple[Path, ...]:
    """Results whose every byte follows from configuration and seed."""
    return (run.resolved_config, run.metrics, run.per_query, run.weights, run.sample)


def volatile_files(run: RunDir) -> tuple[Path, ...]:
    """Results that the machine or the hour has a part in."""
    return (run.summary, run.timing, run.logs)


def _close_manifest(run: RunDir, status: Status, facts: Mapping[str, Any]) -> None:
    """How it ended, digests of what it left, and the source files edited while it was at work."""
    try:
        record = json.loads(run.manifest.read_text())
        attempt = record["volatile"]["attempts"][-1]
    # Whatever it is, it is no manifest of this program: the audit says so.
    except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
        return
    record |= facts
    record["status"] = status.state
    record["failure"] = status.message or None
    record["code"]["changed_during_run"] = changed_since(record["origin"]["sources"])
    attempt |= {"state": status.state, "iteration": status.iteration, "ended_at": time.time()}
    write_manifest(run, with_artifacts(run, record))


def _table(files: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
        if path.exists()
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
