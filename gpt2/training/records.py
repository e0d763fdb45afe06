"""The append-only records of a run.

``metrics.jsonl`` holds what the configuration and the seed decide, and is cut back to the
checkpoint when a run resumes; ``timing.jsonl`` holds what the machine and the hour decide. A record
is one line and one write, so a killed process leaves at most one torn line, at the end.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.errors import Problem, RunError
from lib.files import canonical_json
from lib.rundir import RunDir

# Bytes; a row of statistics has some thirty numbers for each layer.
_LONGEST_RECORD = 1 << 20
# What the runner shows: a line, or the progress of a run.
Report = Callable[[dict[str, Any]], None]


class Records:
    """The open records of one run, and the way to whoever watches it."""

    def __init__(self, run: RunDir, report: Report) -> None:
        self.run = run
        self._report = report
        self._metrics = _open(run.metrics)
        self._timing = _open(run.timing)
        self._logs = _open(run.logs)

    def metrics(self, **record: Any) -> None:
        """Append one deterministic record; floats in their shortest exact form."""
        _append(self._metrics, canonical_json(record), self.run.metrics)

    def timing(self, **record: Any) -> None:
        """Append one volatile record, stamped with the time."""
        stamped = {**record, "written_at": time.time()}
        _append(self._timing, canonical_json(stamped), self.run.timing)

    def line(self, tag: str, text: str) -> None:
        """Write one line to logs.txt and show it; whoever shows it adds the run's name."""
        self.log(tag, text)
        self._report({"kind": "line", "tag": tag, "text": text})

    def log(self, tag: str, text: str) -> None:
        """Write one line to logs.txt alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        _append(self._logs, f"{stamp} {tag:<7} {text}", self.run.logs)

    def progress(self, **event: Any) -> None:
        """Show how far the run is; leaves nothing on the disk."""
        self._report({"kind": "progress", **event})

    def position(self) -> int:
        """Bytes of metrics.jsonl, all of them safe on the disk."""
        os.fsync(self._metrics)
        return os.fstat(self._metrics).st_size

    def rewind(self, position: int) -> None:
        """Cut metrics.jsonl back to a checkpoint's ``position``. RunError when it is shorter."""
        size = os.fstat(self._metrics).st_size
        if size < position:
            what = f"{size} bytes, but the checkpoint was written at {position}"
            remedy = f"type: make rerun RUNS={self.run.path.name}"
            raise RunError(Problem(what, str(self.run.metrics), remedy))
        os.ftruncate(self._metrics, position)

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._metrics, self._timing, self._logs):
            os.close(descriptor)


class NoRecords(Records):
    """What a rank other than 0 writes and says: nothing."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def metrics(self, **record: Any) -> None:
        """Rank 0 writes it."""

    def timing(self, **record: Any) -> None:
        """Rank 0 writes it."""

    def line(self, tag: str, text: str) -> None:
        """Rank 0 says it."""

    def log(self, tag: str, text: str) -> None:
        """Rank 0 writes it."""

    def progress(self, **event: Any) -> None:
        """Rank 0 shows it."""

    def position(self) -> int:
        """Rank 0 knows it."""
        return 0

    def rewind(self, position: int) -> None:
        """Rank 0 does it."""

    def close(self) -> None:
        """There is nothing to close."""


def _open(path: Path) -> int:
    """A descriptor that appends; a torn last line of a killed process is cut off first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _LONGEST_RECORD, max(0, size - _LONGEST_RECORD))
    os.ftruncate(descriptor, size - len(tail) + tail.rfind(b"\n") + 1)
    return descriptor


def _append(descriptor: int, line: str, path: Path) -> None:
    data = line.encode() + b"\n"
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
