"""``status.json``: state of a run. A run is done if its state is SUCCESS; logs are never parsed."""

import json
import time
from dataclasses import asdict, dataclass
from enum import StrEnum

from lib.files import write_json
from lib.rundir import RunDir

SCHEMA_VERSION = 1


class State(StrEnum):
    """States of a run; a run without a status file has not been started."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    INTERRUPTED = "INTERRUPTED"
    INVALID = "INVALID"


@dataclass(frozen=True)
class Status:
    """State, exit code, one-line message, and training progress."""

    state: State
    exit_code: int = 0
    message: str = ""
    iteration: int = 0
    # Planned iterations; 0 if a time budget limits the run.
    iterations: int = 0
    # Seconds since the epoch at which this status was written.
    written_at: float = 0.0


def write_status(run: RunDir, status: Status) -> None:
    """Replace the status file atomically."""
    record = {**asdict(status), "written_at": time.time(), "schema_version": SCHEMA_VERSION}
    write_json(run.status, record)


def is_done(run: RunDir) -> bool:
    """Return whether the state is SUCCESS, which is written last."""
    status = read_status(run)
    return status is not None and status.state is State.SUCCESS


def read_status(run: RunDir) -> Status | None:
    """Return the status, or None if the run was never started or the file is unreadable."""
    try:
        record = json.loads(run.status.read_text())
        record.pop("schema_version")
        return Status(**{**record, "state": State(record["state"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
