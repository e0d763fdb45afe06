"""Typed reader of a run directory; no other module parses the files that a run writes.

``RunRecord`` reads each file once, on first use. A file that does not exist raises MissingRecord. A
file that cannot be read or parsed, or lacks a field that is used, raises DamagedRecord, which names
the file and the field: runs of older code, and runs that have not ended, may lack fields that the
caller does not use. Imports no torch.
"""

import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lib.files import regular_file, sha256_file
from lib.json_files import (
    MAX_OBJECT_BYTES,
    DamagedRecord,
    parse_json_line,
    parse_json_lines,
    parse_json_object,
    read_json_object,
    read_record,
    read_text,
    typed,
    unreadable,
)
from lib.runs.documents import DocumentResult, parse_document_results
from lib.runs.lease import current_holder
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, RunStatus, State, read_status

# A longer text sample is damaged: it would fill a report.
_MAX_SAMPLE_BYTES = 1 << 20

# Value of a fact that was not recorded.
UNKNOWN = "unknown"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class CodeRecord:
    """Commit of the code that trained the run."""

    git_sha: str | None
    # "unknown" if git failed.
    dirty_tree: bool | str


@dataclass(frozen=True)
class HardwareRecord:
    """Devices of the machine; the GPU is None on a CPU."""

    cpu_model: str
    gpu_name: str | None
    hip_version: str | None


@dataclass(frozen=True)
class AttemptRecord:
    """One start of the run."""

    state: str
    # Seconds since the epoch: start of the worker, its submission by the runner, which starts the runs
    # of a study one after another, and its end; None if unknown.
    started_at: float
    submitted_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class FinalResults:
    """Results of a finished run. Losses are in nats per token."""

    val_loss: float
    unigram_entropy: float
    parameters: int
    tokens: int
    iterations: int
    # Fraction of the prunable weights that is zero, and the fraction of each weight matrix.
    sparsity: float
    sparsity_by_layer: Mapping[str, float]
    # Elements of each prunable weight matrix.
    prunable_weights: Mapping[str, int]


@dataclass(frozen=True)
class RunTiming:
    """Speed of a finished run."""

    train_seconds: float
    # Of the iterations after the warm-up.
    tokens_per_second: float
    mean_step_seconds: float
    # Of the first log line, with compilation in it; 0 if no iteration follows.
    warmup_iterations: int = 0
    warmup_seconds: float = 0.0


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


@dataclass(frozen=True)
class JsonRecord:
    """A JSON object of a run; a field is checked when it is read."""

    file: Path
    fields: Mapping[str, Any]

    def find(self, *place: str, default: Any = UNKNOWN) -> Any:
        """Return the value at the key path ``place``, or ``default``."""
        value: Any = self.fields
        for key in place:
            # A dictionary: isinstance of an abstract class takes ten times as long.
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def value(self, kind: type[T], *place: str) -> T:
        """Return the value at the key path ``place``. Raises DamagedRecord unless it is a ``kind``."""
        value = self._required(place)
        if not isinstance(value, kind):
            raise DamagedRecord(
                self.file, f"{'.'.join(place)} of type {kind.__name__}", repr(value)
            )
        return value

    def section(self, kind: type[T], *place: str) -> T:
        """Return the object at the key path ``place`` as the dataclass ``kind``.

        Raises DamagedRecord if a field of ``kind`` is missing or of another type.
        """
        return typed(kind, self._required(place), self.file, place)

    def _required(self, place: Sequence[str]) -> Any:
        value = self.find(*place, default=...)
        if value is ...:
            raise DamagedRecord(self.file, f"a field {'.'.join(place)}", "none")
        return value


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory: each file is read at most once, on first use, and kept."""

    run: RunDir
    # The run whose directory this is; None if no plan has it.
    planned: Run[Any] | None = field(default=None, compare=False)
    # Content of files that were read for their digests and are not parsed yet.
    _contents: dict[Path, bytes] = field(default_factory=dict, repr=False, compare=False)
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def status(self) -> RunStatus | None:
        return read_status(self.run)

    @cached_property
    def state(self) -> str:
        """Return new, running, done, failed, interrupted, damaged or replaced.

        A run with status RUNNING that no process trains is interrupted.
        """
        if self.run.is_replaced:
            return "replaced"
        if self.status is None:
            return "new"
        if self.status.state is State.RUNNING and current_holder(self.run) is None:
            return State.INTERRUPTED.word
        return self.status.state.word

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Return name → bytes of the regular files directly in the directory; empty if none can be
        listed.
        """
        try:
            with os.scandir(self.run.path) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file()}
        except OSError:
            return {}

    @cached_property
    def manifest(self) -> JsonRecord:
        """Return ``manifest.json``: code, environment, machine, data, settings and file digests."""
        return read_manifest(self.run)

    @cached_property
    def code(self) -> CodeRecord:
        return self.manifest.section(CodeRecord, "code")

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Return file → SHA-256 of all loaded code; empty if it was not recorded."""
        sources = self.manifest.find("origin", "sources")
        if not isinstance(sources, Mapping):
            return {}
        if not set(map(type, sources.values())) <= {str}:
            raise DamagedRecord(self.run.manifest, "origin.sources of digests", "another type")
        return sources

    @cached_property
    def hardware(self) -> HardwareRecord:
        return self.manifest.section(HardwareRecord, "hardware")

    @property
    def attempts(self) -> list[AttemptRecord]:
        attempts = self.manifest.value(list, "volatile", "attempts")
        place = ("volatile", "attempts")
        return [typed(AttemptRecord, each, self.run.manifest, place) for each in attempts]

    @cached_property
    def summary(self) -> JsonRecord:
        """Return ``summary.json``: final results, and volatile results under ``timing``."""
        return self._object(self.run.summary)

    @cached_property
    def final(self) -> FinalResults:
        return self.summary.section(FinalResults, "final")

    @cached_property
    def timing(self) -> RunTiming:
        return self.summary.section(RunTiming, "timing")

    @cached_property
    def config(self) -> JsonRecord:
        """Return ``resolved_config.yaml``: JSON, which is valid YAML."""
        return self._object(self.run.resolved_config)

    @property
    def hash8(self) -> str:
        """Return the first eight hex digits of the identity's digest."""
        return self.config.value(str, "hash8")

    @property
    def identity(self) -> dict[str, Any]:
        """Return all settings that can change a bit of the result."""
        return self.config.value(dict, "identity")

    @property
    def symbols(self) -> dict[str, Any]:
        return self.config.value(dict, "symbols")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the non-default settings and their sources by symbol."""
        return self.config.value(dict, "settings")

    @cached_property
    def documents(self) -> Sequence[DocumentResult]:
        path = self.run.per_query
        return parse_document_results(path, self._read(path, "rows"))

    @cached_property
    def sample(self) -> str:
        """Return the text generated by the trained model. Raises MissingRecord without a sample."""
        return read_text(self.run.sample, _MAX_SAMPLE_BYTES)

    @cached_property
    def metrics_fields(self) -> Sequence[Mapping[str, Any]]:
        """Return every row of metrics.jsonl with all its fields.

        An incomplete last line is damage if the run is finished.
        """
        done = self.status is not None and self.status.state is State.SUCCESS
        return self._lines(self.run.metrics, growing=not done)

    @cached_property
    def metrics(self) -> Sequence[MetricsRow]:
        return parse_metrics(self.run.metrics, self.metrics_fields)

    @cached_property
    def train_rows(self) -> Sequence[TrainRow]:
        return [row for row in self.metrics if isinstance(row, TrainRow)]

    @cached_property
    def eval_rows(self) -> Sequence[EvalRow]:
        return [row for row in self.metrics if isinstance(row, EvalRow)]

    @cached_property
    def timings(self) -> Sequence[TimingRow]:
        return _rows(TimingRow, self.run.timing, self._lines(self.run.timing))

    @cached_property
    def telemetry(self) -> Sequence[TelemetrySample]:
        return _rows(TelemetrySample, self.run.telemetry, self._lines(self.run.telemetry))

    @cached_property
    def heartbeats(self) -> Mapping[int, Sequence[HeartbeatRow]]:
        """Return the heartbeats of each rank, the newest last; empty before the first one."""
        files = self.run.heartbeats().items()
        return {rank: _rows(HeartbeatRow, path, self._lines(path)) for rank, path in files}

    def sha256(self, path: Path) -> str:
        """Return the digest of a file of the run; the content of a record is kept until it is parsed.

        Raises MissingRecord or DamagedRecord.
        """
        run = self.run
        if path in (run.metrics, run.per_query, run.resolved_config, run.summary, run.timing):
            self._contents[path] = content = read_record(path, "a file")
            return hashlib.sha256(content).hexdigest()
        try:
            return sha256_file(path)
        except OSError as error:
            raise unreadable(path, "a file", error) from None

    def forget_rows(self) -> None:
        """Free the rows and contents of files; what was derived from them stays.

        The rows of all runs of a study would fill the memory.
        """
        self._contents.clear()
        for name in _ROWS:
            vars(self).pop(name, None)

    def _read(self, path: Path, expected: str, max_bytes: int = 0) -> bytes:
        content = self._contents.pop(path, None)
        return read_record(path, expected, max_bytes) if content is None else content

    def _object(self, path: Path) -> JsonRecord:
        content = self._read(path, "a JSON object", MAX_OBJECT_BYTES)
        return JsonRecord(path, parse_json_object(path, content))

    def _lines(self, path: Path, *, growing: bool = True) -> list[dict[str, Any]]:
        content = self._read(path, "one JSON object per line")
        return parse_json_lines(path, content, growing=growing)


_ROWS = (
    *("documents", "metrics_fields", "metrics", "train_rows", "eval_rows", "timings", "telemetry"),
    "heartbeats",
)


def derived(
    compute: Callable[Concatenate[RunRecord, P], T],
) -> Callable[Concatenate[RunRecord, P], T]:
    """Decorate a function of a run's record: the record keeps its value for the same arguments."""

    @functools.wraps(compute)
    def value(record: RunRecord, *args: P.args, **options: P.kwargs) -> T:
        key = compute, args, *options.items()
        if key not in record._derived:
            record._derived[key] = compute(record, *args, **options)
        return record._derived[key]

    return value


class RowTail:
    """Reader of the complete lines that a growing file gained; skips the first ``skip`` lines."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path = path
        self._skip = skip
        self._offset = 0
        self._line = 1

    def metrics(self) -> list[MetricsRow]:
        """Return the new rows of metrics.jsonl; none while the file does not exist."""
        return parse_metrics(self._path, *self._new())

    def rows(self, kind: type[T]) -> list[T]:
        """Return the new rows of a file of one kind; none while the file does not exist."""
        return _rows(kind, self._path, *self._new())

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


def read_manifest(run: RunDir) -> JsonRecord:
    """Return the current manifest. Raises MissingRecord or DamagedRecord."""
    path = run.manifest
    fields = read_json_object(path)
    origin = fields.get("origin")
    if isinstance(origin, dict) and "sources" in origin:
        origin["sources"] = _shared(origin["sources"])
    return JsonRecord(path, fields)


# Sources of the last distinct manifests: the runs of a study record the same hundreds of digests.
_known_sources: deque[Mapping[str, str]] = deque(maxlen=8)


def _shared(sources: Any) -> Any:
    """Return the equal object of an earlier manifest, if there is one."""
    # Numbers of other types may be equal: 1 and True.
    if not isinstance(sources, dict) or not set(map(type, sources.values())) <= {str}:
        return sources
    for known in _known_sources:
        if known == sources:
            return known
    _known_sources.append(sources)
    return sources


def parse_metrics(
    file: Path, rows: Iterable[Mapping[str, Any]], first_line: int = 1
) -> list[MetricsRow]:
    """Return the rows of metrics.jsonl with their types. Raises DamagedRecord."""
    parsed: list[MetricsRow] = []
    for line, row in enumerate(rows, first_line):
        kind = _METRICS_ROWS.get(str(row.get("kind")))
        if kind is None:
            kinds = ", ".join(_METRICS_ROWS)
            raise DamagedRecord(file, f"kind in {kinds}", repr(row.get("kind")), line)
        parsed.append(typed(kind, row, file, (), line))
        if kind is StatisticsRow:
            _require_numbers(row["values"], file, line)
    return parsed


def _require_numbers(values: Mapping[str, Any], file: Path, line: int) -> None:
    for name, layers in values.items():
        if not isinstance(layers, list) or any(
            value is not None and type(value) not in (int, float) for value in layers
        ):
            raise DamagedRecord(file, f"values.{name} of numbers or null", repr(layers)[:60], line)


def _rows(
    kind: type[T], file: Path, rows: Iterable[Mapping[str, Any]], first_line: int = 1
) -> list[T]:
    return [typed(kind, row, file, (), line) for line, row in enumerate(rows, first_line)]
