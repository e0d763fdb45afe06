"""Rows of the files that a run appends to: metrics, speed, telemetry and heartbeats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lib.files import regular_file
from lib.json_files import DamagedRecord, parse_json_line, typed

T = TypeVar("T")


@dataclass(frozen=True)
class TrainRow:
    """One optimizer step."""

    iteration: int
    tokens: int
    # Nats per token.
    loss: float
    lr: float
    # None after a step that was skipped because of an fp16 overflow.
    grad_norm: float | None


@dataclass(frozen=True)
class EvalRow:
    """One evaluation."""

    iteration: int
    tokens: int
    val_loss: float
    sparsity: float


@dataclass(frozen=True)
class StatisticsRow:
    """Statistics of the mechanisms after one step."""

    iteration: int
    # Name → one value per layer; None if the layer has none.
    values: Mapping[str, Sequence[float | None]]


MetricsRow = TrainRow | EvalRow | StatisticsRow
_METRICS_ROWS: Mapping[str, type[MetricsRow]] = {
    "train": TrainRow,
    "eval": EvalRow,
    "statistics": StatisticsRow,
}

_NUMBERS = {int, float, type(None)}


@dataclass(frozen=True)
class TimingRow:
    """Speed at one log line."""

    iteration: int
    tokens_per_second: float
    # Seconds since the epoch.
    written_at: float
    # In all steps so far.
    train_seconds: float = 0.0
    # Model FLOPs utilisation; None if the device's peak is unknown.
    mfu: float | None = None
    eta_seconds: float | None = None


@dataclass(frozen=True)
class TelemetrySample:
    """Usage of memory, CPU and GPUs at one moment."""

    # Seconds since the epoch.
    ts: float
    rss_mib: float
    cpu_seconds: float
    # Counters of each GPU by name; None for a counter that the driver lacks.
    gpus: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class HeartbeatRow:
    """Sign of life of one rank; fields that only some heartbeats have are None in the others."""

    # Seconds since the epoch.
    ts: float
    step: int
    mem_reserved_mib: float
    toks_per_s: float | None = None
    eta_s: float | None = None
    # Number of fallbacks after running out of memory.
    fallbacks: int | None = None
    # Means over the gates of the newest statistics.
    gate_entropy: float | None = None
    gate_max: float | None = None


class RowTail:
    """Reader of the complete lines that a growing file gained; skips the first ``skip`` lines."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path = path
        self._skip = skip
        self._offset = 0
        self._line = 1

    def metrics(self) -> list[MetricsRow]:
        """Return the new rows of metrics.jsonl."""
        return parse_metrics(self._path, *self._new())

    def rows(self, kind: type[T]) -> list[T]:
        """Return the new rows of a file of one kind."""
        return typed_rows(kind, self._path, *self._new())

    def _new(self) -> tuple[list[dict[str, Any]], int]:
        """Return the new rows and the line number of the first."""
        if not self._path.exists():
            return [], self._line
        with open(self._path, "rb", opener=regular_file) as stream:
            stream.seek(self._offset)
            complete, newline, _ = stream.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        lines = complete.split(b"\n") if newline else []
        skipped = min(self._skip, len(lines))
        first = self._line + skipped
        self._skip -= skipped
        self._line += len(lines)
        rows = [
            parse_json_line(self._path, n, line) for n, line in enumerate(lines[skipped:], first)
        ]
        return rows, first


def parse_metrics(
    file: Path, rows: Iterable[Mapping[str, Any]], first_line: int = 1
) -> list[MetricsRow]:
    """Return the rows of metrics.jsonl. Raises DamagedRecord."""
    parsed: list[MetricsRow] = []
    for line, row in enumerate(rows, first_line):
        kind = _METRICS_ROWS.get(str(row.get("kind")))
        if kind is None:
            kinds = ", ".join(_METRICS_ROWS)
            raise DamagedRecord(file, f"kind in {kinds}", repr(row.get("kind")), line)
        parsed.append(typed(kind, row, file, (), line))
        if kind is StatisticsRow:
            for name, layers in row["values"].items():
                numbers = isinstance(layers, list) and {*map(type, layers)} <= _NUMBERS
                if not numbers:
                    expected = f"values.{name} of numbers or null"
                    raise DamagedRecord(file, expected, repr(layers)[:60], line)
    return parsed


def typed_rows(
    kind: type[T], file: Path, rows: Iterable[Mapping[str, Any]], first_line: int = 1
) -> list[T]:
    return [typed(kind, row, file, (), line) for line, row in enumerate(rows, first_line)]
