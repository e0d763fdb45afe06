"""The records that a run appends to while it trains, and its stop.

``metrics.jsonl`` contains what the configuration and the seed determine, and is truncated to the
checkpoint when a run resumes; ``timing.jsonl`` contains values that vary from run to run.
"""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib.errors import EXIT_INTERRUPTED, EXIT_TIME_LIMIT, Problem
from lib.files import canonical_json, naming, no_follow, sha256_prefix, write_atomic
from lib.runs.lease import no_guard
from lib.runs.run_dir import RunDir

# A statistics row has about thirty values per layer.
_MAX_RECORD_BYTES = 1 << 20
# Callback of the runner for events: a log line, or the progress of a run.
EventCallback = Callable[[dict[str, Any]], None]


class RecordWriter:
    """Record files of one run, and its events; without ``opened`` every method does nothing."""

    def __init__(
        self,
        run: RunDir,
        report: EventCallback = lambda event: None,
        guard: Callable[[], None] = no_guard,
        opened: bool = True,
    ) -> None:
        self.run = run
        self.guard = guard
        self._report = report
        self._doing = ""
        paths = (run.metrics, run.timing, run.logs) if opened else ()
        self._files = {path: _open(path) for path in paths}

    def metrics(self, **record: Any) -> None:
        """Append one deterministic record to metrics.jsonl; floats in their shortest exact form."""
        self._append(self.run.metrics, canonical_json(record))

    def timing(self, **record: Any) -> None:
        """Append one non-deterministic record with a time stamp to timing.jsonl."""
        self._append(self.run.timing, canonical_json({**record, "written_at": time.time()}))

    def line(self, tag: str, text: str) -> None:
        """Write one line to logs.txt and display it; the runner adds the run's name."""
        self.log(tag, text)
        self._event(kind="line", tag=tag, text=text)

    def nondeterministic(self, operation: str) -> None:
        what = "no deterministic implementation, results may differ between runs"
        self.line("WARN", f"{what}: {operation}")

    def log(self, tag: str, text: str) -> None:
        """Write one line to logs.txt only."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._append(self.run.logs, f"{stamp} {tag:<7} {text}")

    def progress(self, **event: Any) -> None:
        """Display the progress of the run without writing a record."""
        self._event(kind="progress", **event)

    def alive(self) -> None:
        """Report that the run makes progress between two optimizer steps."""
        self._event(kind="alive")

    def doing(self, text: str) -> None:
        """Display what the run does between two optimizer steps, such as ``writing a sample``."""
        if text != self._doing:
            self._doing = text
            self._event(kind="doing", text=text)

    def evaluated(self, share: float) -> None:
        """Display the share of an evaluation that is done, in tenths."""
        self.doing(f"evaluating {10 * int(10 * share)} %")

    def position(self) -> dict[str, Any]:
        """Sync metrics.jsonl and timing.jsonl to the disk; return the size and digest of each."""
        position = {}
        for path, descriptor in self._files.items():
            if path != self.run.logs:
                with naming(path):
                    os.fsync(descriptor)
                size = path.stat().st_size
                position[path.name] = {"bytes": size, "sha256": sha256_prefix(path, size)}
        return position

    def mismatch(self, position: Mapping[str, Any]) -> Problem | None:
        """Return the problem if a file is shorter, or has changed, since its ``position``."""
        for path in self._files:
            if path.name not in position:
                continue
            expected, size = position[path.name]["bytes"], path.stat().st_size
            if size < expected:
                what = f"shorter than at the checkpoint (expected at least {expected} bytes, got {size})"
            elif sha256_prefix(path, expected) != position[path.name]["sha256"]:
                what = (
                    f"changed since the checkpoint (digest mismatch of the first {expected} bytes)"
                )
            else:
                continue
            remedy = f"type: make rerun RUNS={self.run.path.name}"
            return Problem(what, str(path), remedy, code="run.damaged")
        return None

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Truncate metrics.jsonl to its ``position`` at a checkpoint, empty at the start."""
        if self._files:
            metrics = position.get(self.run.metrics.name, {"bytes": 0})
            os.ftruncate(self._files[self.run.metrics], metrics["bytes"])

    def write(self, path: Path, content: bytes | str) -> None:
        """Write a result file atomically."""
        if self._files:
            self.guard()
            write_atomic(path, content)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def _event(self, **event: Any) -> None:
        if self._files:
            self._report(event)

    def _append(self, path: Path, line: str) -> None:
        if self._files:
            data = line.encode() + b"\n"
            self.guard()
            with naming(path):
                if os.write(self._files[path], data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open(path: Path) -> int:
    """Open ``path`` for appending, without the truncated last line of a killed process."""
    descriptor = no_follow(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _MAX_RECORD_BYTES, max(0, size - _MAX_RECORD_BYTES))
    os.ftruncate(descriptor, size - len(tail) + tail.rfind(b"\n") + 1)
    return descriptor


class StopCondition:
    """Stop of a run by an interrupt or its time limit, polled between steps and batches; it latches."""

    def __init__(
        self,
        requested: Callable[[], bool],
        limit_seconds: int,
        agree: Callable[[float], float] = lambda number: number,
    ) -> None:
        """Start the time limit of ``limit_seconds`` (0: none). ``agree`` returns rank 0's value."""
        self._requested, self._agree = requested, agree
        self._limit_seconds = limit_seconds
        self._deadline = time.monotonic() + limit_seconds if limit_seconds else float("inf")
        # 0 until the run must stop.
        self.exit_code = 0

    def __call__(self) -> bool:
        if not self.exit_code:
            late = EXIT_TIME_LIMIT if time.monotonic() > self._deadline else 0
            self.exit_code = int(self._agree(EXIT_INTERRUPTED if self._requested() else late))
        return self.exit_code != 0

    @property
    def reason(self) -> str:
        limit = f"RUN_TIME_LIMIT_SECONDS={self._limit_seconds} reached"
        return "stop requested" if self.exit_code == EXIT_INTERRUPTED else limit
