"""The records of a run as metrics, each once, also when the run or the reader was killed between.

``metrics.jsonl`` is cut back when a run resumes, and the same rows are made again: rows are counted,
and those that were told are passed over.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lib.files import read_json_lines, write_json
from lib.rundir import RunDir
from lib.telemetry.layers import each_layer, over_layers
from lib.telemetry.metrics import averages

# A sample is on the disk so long after it was taken, at the latest.
_SAMPLE_SECONDS = 0.5

SCHEMA_VERSION = 1


@dataclass
class Position:
    """What a tracker has been told."""

    # Rows of metrics.jsonl.
    rows: int = 0
    # The newest iteration, and the newest with a timing.
    iteration: int = 0
    timed: int = 0
    # Everything, the end included.
    complete: bool = False
    # Told by a process that has not closed the tracker: some of it may be lost.
    open: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """The one that was written, or the beginning."""
        if not path.exists():
            return cls()
        record = json.loads(path.read_text())
        record.pop("schema_version")
        return cls(**record)

    def back_to(self, iteration: int, run: RunDir) -> None:
        """Count as told only what stands up to ``iteration`` in the run's records."""
        if iteration < self.iteration:
            rows = read_json_lines(run.metrics)
            self.rows = sum(row["iteration"] <= iteration for row in rows)
            self.iteration, self.timed = iteration, min(self.timed, iteration)

    def write(self, path: Path) -> None:
        """Replace the file."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})


class Feed:
    """Reads what a run has written since the last time."""

    def __init__(self, run: RunDir, position: Position) -> None:
        self._position = position
        self._metrics = _Tail(run.metrics, position.rows)
        self._timing = _Tail(run.timing)
        self._telemetry = _Tail(run.telemetry)
        # Samples of the log interval that is not over yet.
        self._samples: list[dict[str, Any]] = []
        # Rows and timings that were seen too early to be told.
        self._held: list[dict[str, Any]] = []
        self._early: list[dict[str, Any]] = []

    def new(self, *, ended: bool = True) -> Iterator[tuple[int, dict[str, float]]]:
        """Iteration → metrics, in order. Moves the position when it is exhausted.

        While the run has not ``ended``, the newest timings wait for their interval's last sample.
        """
        position = self._position
        rows = [*self._held, *self._metrics.new()]
        # Read after the rows: a timing is written after its iteration's row, so none is missed.
        timings = [*self._early, *self._timing.new()]
        # Read last: what was sampled before a settled timing is on the disk now.
        self._samples += self._telemetry.new()
        limit = math.inf if ended else _first_unsettled(timings)
        self._held = [row for row in rows if row["iteration"] >= limit]
        del rows[len(rows) - len(self._held) :]
        newest = max((row["iteration"] for row in rows), default=position.iteration)
        found: dict[int, dict[str, float]] = {}
        for row in rows:
            found.setdefault(row["iteration"], {}).update(_metrics(row))
        self._early = [t for t in timings if t["iteration"] > newest or t["iteration"] >= limit]
        timed = position.timed
        for timing in timings:
            if timing in self._early:
                continue
            iteration = timing["iteration"]
            machine = averages(self._sampled_before(timing["written_at"]))
            if position.iteration <= iteration <= newest and iteration > position.timed:
                found.setdefault(iteration, {"iteration": iteration})
                found[iteration].update(_speed(timing) | machine)
                timed = max(timed, iteration)
        for iteration in sorted(found):
            yield iteration, found[iteration]
        position.rows += len(rows)
        position.iteration, position.timed = newest, timed

    def _sampled_before(self, moment: float) -> list[dict[str, Any]]:
        """Takes the samples up to ``moment`` away from those that wait."""
        taken = [sample for sample in self._samples if sample["ts"] <= moment]
        self._samples = self._samples[len(taken) :]
        return taken


def final_metrics(run: RunDir) -> dict[str, float]:
    """The best validation of a finished run."""
    losses = [row["val_loss"] for row in read_json_lines(run.metrics) if row["kind"] == "eval"]
    best = min(losses)
    return {"final/best_val_loss": best, **_perplexity("final/best_val_perplexity", best)}


def _first_unsettled(timings: Sequence[Mapping[str, Any]]) -> float:
    """The first iteration with a timing so new that a sample before it may still be missing."""
    settled = time.time() - _SAMPLE_SECONDS
    return min((t["iteration"] for t in timings if t["written_at"] > settled), default=math.inf)


class _Tail:
    """The whole lines of a growing file, each parsed once; the first ``passed`` are passed over."""

    def __init__(self, path: Path, passed: int = 0) -> None:
        self._path = path
        self._passed = passed
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        """The records since the last time; none while there is no file."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as stream:
            stream.seek(self._at)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        told, self._passed = lines[self._passed :], max(0, self._passed - len(lines))
        return [json.loads(line) for line in told]


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    if row["kind"] == "eval":
        losses = {"val_loss": row["val_loss"], **_perplexity("val_perplexity", row["val_loss"])}
        return {"iteration": row["iteration"], **losses, "sparsity": row["sparsity"]}
    if row["kind"] == "statistics":
        values = row["values"]
        return {"iteration": row["iteration"], **over_layers(values), **each_layer(values)}
    # fp16 overflowed: the step was skipped and has no norm.
    norm = {} if row["grad_norm"] is None else {"grad_norm": row["grad_norm"]}
    return {
        "iteration": row["iteration"],
        "train_loss": row["loss"],
        **_perplexity("train_perplexity", row["loss"]),
        "learning_rate": row["lr"],
        **norm,
    }


def _speed(timing: Mapping[str, Any]) -> dict[str, float]:
    """Without ``mfu`` where the device's peak is not known."""
    names = ("tokens_per_second", "mfu")
    return {name: timing[name] for name in names if timing.get(name) is not None}


def _perplexity(name: str, loss: float) -> dict[str, float]:
    """exp(loss); nothing where that is beyond floating point."""
    try:
        return {name: math.exp(loss)}
    except OverflowError:
        return {}
