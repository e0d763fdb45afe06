"""Typed reader of a run directory; no other module parses the files that a run writes.

A file that does not exist raises MissingRecord. A file that cannot be read or parsed, or lacks a field
that is used, raises DamagedRecord: runs of older code may lack other fields. Imports no torch.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lib.errors import Problem
from lib.json_files import (
    DamagedRecord,
    RecordError,
    parse_json_lines,
    read_json_object,
    read_record,
    read_text,
    typed,
)
from lib.runs.documents import DocumentResult, parse_document_results
from lib.runs.lease import current_holder
from lib.runs.rows import (
    EvalRow,
    HeartbeatRow,
    MetricsRow,
    TelemetrySample,
    TimingRow,
    TrainRow,
    parse_metrics,
    typed_rows,
)
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
class ArtifactRecord:
    """Length and digest of a result file at the end of the run."""

    bytes: int
    sha256: str


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
class JsonRecord:
    """A JSON object of a run; a field is checked when it is read, by its key path ``place``."""

    file: Path
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> "JsonRecord":
        """Return the content of a file. Raises MissingRecord or DamagedRecord."""
        return cls(file, read_json_object(file))

    def find(self, *place: str, default: Any = UNKNOWN) -> Any:
        value: Any = self.fields
        for key in place:
            # A dictionary: isinstance of an abstract class takes ten times as long.
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def value(self, kind: type[T], *place: str) -> T:
        """Return the value. Raises DamagedRecord unless it is a ``kind``."""
        value = self.find(*place, default=...)
        if value is ...:
            raise DamagedRecord(self.file, f"a field {'.'.join(place)}", "none")
        if not isinstance(value, kind):
            raise DamagedRecord(
                self.file, f"{'.'.join(place)} of type {kind.__name__}", repr(value)
            )
        return value

    def section(self, kind: type[T], *place: str) -> T:
        """Return the object as the dataclass ``kind``. Raises DamagedRecord."""
        return typed(kind, self.value(object, *place), self.file, place)


@dataclass(frozen=True)
class Finding:
    """One mismatch in ``file``, a path relative to the run directory."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.found}"

    @classmethod
    def of(cls, error: RecordError) -> "Finding":
        name = f"{error.file.name}:{error.line}" if error.line else error.file.name
        return cls(name, error.expected, error.actual)


def required_files(run: RunDir) -> tuple[Path, ...]:
    """Return the files of a finished run."""
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


def _of(
    file: Callable[["RunRecord"], JsonRecord], kind: type[T], *place: str
) -> "cached_property[T]":
    """Return a property: the part of a record's ``file`` at ``place``, a section if ``kind`` is one."""

    def read(record: "RunRecord") -> T:
        part = JsonRecord.section if is_dataclass(kind) else JsonRecord.value
        return part(file(record), kind, *place)

    return cached_property(read)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory: each file is read at most once, on first use, and kept."""

    run: RunDir
    # The run (``lib.runs.run``) that the directory was planned for; None if no plan has it.
    planned: object = field(default=None, compare=False)
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    manifest = cached_property(lambda record: JsonRecord.read(record.run.manifest))
    # Final results, and volatile results under ``timing``.
    summary = cached_property(lambda record: JsonRecord.read(record.run.summary))
    # JSON, which is valid YAML.
    config = cached_property(lambda record: JsonRecord.read(record.run.resolved_config))
    code = _of(lambda record: record.manifest, CodeRecord, "code")
    hardware = _of(lambda record: record.manifest, HardwareRecord, "hardware")
    final = _of(lambda record: record.summary, FinalResults, "final")
    timing = _of(lambda record: record.summary, RunTiming, "timing")
    # First eight hex digits of the identity's digest.
    hash8 = _of(lambda record: record.config, str, "hash8")
    # All settings that can change a bit of the result.
    identity = _of(lambda record: record.config, dict, "identity")
    symbols = _of(lambda record: record.config, dict, "symbols")
    # The non-default settings and their sources by symbol.
    settings = _of(lambda record: record.config, dict, "settings")

    @cached_property
    def status(self) -> RunStatus | None:
        return read_status(self.run)

    @cached_property
    def state(self) -> str:
        """Return new, running, done, failed, interrupted (also if no process trains it), damaged or replaced."""
        if self.run.is_replaced:
            return "replaced"
        if self.status is None:
            return "new"
        if self.damage:
            return State.DAMAGED.word
        if self.status.state is State.RUNNING and current_holder(self.run) is None:
            return State.INTERRUPTED.word
        return self.status.state.word

    @property
    def is_done(self) -> bool:
        """Return whether the run is finished, with all of its files."""
        return self.status is not None and self.status.state is State.SUCCESS and not self.damage

    @cached_property
    def damage(self) -> str:
        """Return why the run is damaged, from status, manifest and lengths of files; else ""."""
        status = self.status
        if status is None or status.state is not State.SUCCESS:
            return status.message if status and status.state is State.DAMAGED else ""
        return str(next(self.file_findings(), ""))

    @property
    def unfinished(self) -> Problem | None:
        """Return why the run has no complete result; None if it has one."""
        status, where = self.status, str(self.run.path)
        if status is None:
            what = "the run has not been trained"
            return Problem(what, where, "type: make", code="run.not-found")
        if self.damage:
            retrain = f"type: make rerun RUNS={self.run.path.name}"
            advice = f"to train it again (the old folder is kept), {retrain}"
            return Problem(self.damage, where, advice, code="run.damaged")
        if self.is_done:
            return None
        what = f"the run is not finished: {status.state} at iteration {status.iteration:,}"
        return Problem(what, where, "type: make, to resume the run", code="run.not-finished")

    def file_findings(self) -> Iterator[Finding]:
        """Yield the missing and empty files of a finished run, and those of another length."""
        run, sizes = self.run, self.sizes
        if self.status and self.status.exit_code:
            yield Finding(run.status.name, "exit_code 0", str(self.status.exit_code))
        elif self.status and self.status.message:
            yield Finding(run.status.name, "no message", self.status.message)
        for path in required_files(run):
            if path.name not in sizes:
                yield Finding(path.name, "a file", "none")
            elif not sizes[path.name]:
                yield Finding(path.name, "content", "0 bytes")
        if not sizes.get(run.manifest.name):
            return
        try:
            artifacts = self.artifacts
        except RecordError as error:
            yield Finding.of(error)
            return
        for path in required_files(run):
            if path.name not in artifacts and path != run.manifest:
                yield Finding(run.manifest.name, f"a digest of {path.name}", "none")
        for name, artifact in artifacts.items():
            size = sizes.get(name)
            if size is None and run.path / name not in required_files(run):
                yield Finding(name, "a file", "none")
            # Trackers may append to the log after the end of the run.
            elif size and (
                size < artifact.bytes or (size > artifact.bytes and name != run.logs.name)
            ):
                yield Finding(name, f"bytes {artifact.bytes}", str(size))

    @cached_property
    def artifacts(self) -> Mapping[str, ArtifactRecord]:
        """Return file name → recorded length and digest."""
        places = ("artifacts",), ("volatile", "artifacts")
        tables = [(place, self.manifest.value(dict, *place)) for place in places]
        return {
            name: typed(ArtifactRecord, entry, self.run.manifest, (*place, name))
            for place, table in tables
            for name, entry in table.items()
        }

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Return name → bytes of the regular files directly in the directory."""
        try:
            with os.scandir(self.run.path) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file()}
        except OSError:
            return {}

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Return file → SHA-256 of all loaded code; empty if it was not recorded."""
        sources = self.manifest.find("origin", "sources")
        if not isinstance(sources, Mapping):
            return {}
        if not set(map(type, sources.values())) <= {str}:
            raise DamagedRecord(self.run.manifest, "origin.sources of digests", "another type")
        return sources

    @property
    def attempts(self) -> list[AttemptRecord]:
        attempts = self.manifest.value(list, "volatile", "attempts")
        place = ("volatile", "attempts")
        return [typed(AttemptRecord, each, self.run.manifest, place) for each in attempts]

    @cached_property
    def documents(self) -> Sequence[DocumentResult]:
        path = self.run.per_query
        return parse_document_results(path, read_record(path, "rows"))

    @cached_property
    def sample(self) -> str:
        """Return the text generated by the trained model."""
        return read_text(self.run.sample, _MAX_SAMPLE_BYTES)

    @cached_property
    def metrics_fields(self) -> Sequence[Mapping[str, Any]]:
        """Return every row of metrics.jsonl; an incomplete last one is damage if the run is finished."""
        growing = self.status is None or self.status.state is not State.SUCCESS
        return self._lines(self.run.metrics, growing=growing)

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
        return self._rows(TimingRow, self.run.timing)

    @cached_property
    def telemetry(self) -> Sequence[TelemetrySample]:
        return self._rows(TelemetrySample, self.run.telemetry)

    @cached_property
    def heartbeats(self) -> Mapping[int, Sequence[HeartbeatRow]]:
        """Return the heartbeats of each rank, the newest last."""
        files = self.run.heartbeats().items()
        return {rank: self._rows(HeartbeatRow, path) for rank, path in files}

    def forget_rows(self) -> None:
        """Free the rows of files, which of a whole study would fill the memory."""
        metrics = "metrics_fields", "metrics", "train_rows", "eval_rows"
        for name in (*metrics, "documents", "timings", "telemetry", "heartbeats"):
            vars(self).pop(name, None)

    def _rows(self, kind: type[T], path: Path) -> Sequence[T]:
        return typed_rows(kind, path, self._lines(path))

    def _lines(self, path: Path, *, growing: bool = True) -> list[dict[str, Any]]:
        content = read_record(path, "one JSON object per line")
        return parse_json_lines(path, content, growing=growing)


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
