"""Running trainings: alarm rules over their records, and a live screen with one line per run.

An alarm rule without data returns "". Imports no torch.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from lib.console import is_ascii_only
from lib.errors import visible
from lib.json_files import RecordError
from lib.report.render import json_document, text_lines
from lib.runs.record import RunRecord
from lib.runs.rows import EvalRow, HeartbeatRow, TrainRow
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, RunStatus, State, read_status
from lib.tracking.stability import UnstableStep, describe_unstable, unstable_steps
from lib.units import format_duration


@dataclass(frozen=True)
class WatchedRecords:
    """Records of one run at one moment."""

    # None before the first step.
    status: RunStatus | None
    # Seconds since 1970.
    now: float
    # Heartbeats of each rank, newest last.
    heartbeats: Mapping[int, Sequence[HeartbeatRow]]
    # Rows of metrics.jsonl, in order.
    train: Sequence[TrainRow]
    evals: Sequence[EvalRow]
    unstable: Sequence[UnstableStep] = ()

    @property
    def is_running(self) -> bool:
        return self.status is not None and self.status.state is State.RUNNING

    @property
    def beats(self) -> Sequence[HeartbeatRow]:
        return self.heartbeats.get(0, ())


def read_watched_records(run: RunDir, now: float) -> WatchedRecords:
    record = RunRecord(run)
    rows = record.metrics if run.metrics.exists() else ()
    return WatchedRecords(
        status=record.status,
        now=now,
        heartbeats=record.heartbeats,
        train=record.train_rows if rows else (),
        evals=record.eval_rows if rows else (),
        unstable=unstable_steps(record) if rows else (),
    )


# The first log intervals contain compilation and allocator growth.
_WARMUP_BEATS = 2
_MIN_BEATS = 5
# A plateau or the check of the first steps spans at most this share of a run, and at least this many
# steps.
_RUN_SHARE = 4
_MIN_SPAN = 20

# Iterations without a lower mean loss.
_PLATEAU = 1000
_SPEED_PERCENT = _MEMORY_PERCENT = 10
# Nats, and the share of one branch.
_GATE_ENTROPY, _GATE_MAX = 0.5, 0.9


def raised_alarms(facts: WatchedRecords, stall_seconds: int) -> dict[str, str]:
    """Return rule name → alarm text; empty for a healthy run."""
    return dict([*_machine_alarms(facts, stall_seconds), *_training_alarms(facts)])


def _machine_alarms(facts: WatchedRecords, stall_seconds: int) -> Iterator[tuple[str, str]]:
    """Yield the alarms of heartbeats, speed and memory."""
    silent = {rank: facts.now - beats[-1].ts for rank, beats in facts.heartbeats.items() if beats}
    stalled = {rank: s for rank, s in silent.items() if s > stall_seconds}
    if stalled and facts.is_running:
        ranks = ", ".join(map(str, stalled))
        yield "stall", f"no heartbeat of rank {ranks} for {format_duration(max(stalled.values()))}"
    speeds = _values(facts.beats, "toks_per_s")
    if speeds and speeds[-1] <= 0:
        yield "zero-throughput", "0 tokens per second"
    elif facts.is_running and len(speeds) >= _WARMUP_BEATS + _MIN_BEATS:
        usual = median(speeds[_WARMUP_BEATS:])
        percent = 100 * (speeds[-1] / usual - 1)
        if abs(percent) > _SPEED_PERCENT:
            text = f"{speeds[-1]:,.0f} tok/s, {percent:+.0f} % from the median {usual:,.0f}"
            yield "throughput", text
    for rank, beats in facts.heartbeats.items():
        reserved = _values(beats, "mem_reserved_mib")
        quarter = len(reserved) // 4
        if quarter >= _WARMUP_BEATS:
            before, after = median(reserved[quarter : 2 * quarter]), median(reserved[-quarter:])
            if after > before * (1 + _MEMORY_PERCENT / 100):
                text = f"rank {rank} reserves {after:,.0f} MiB, {before:,.0f} near the start"
                yield "memory-creep", text
    # Fallbacks after running out of memory.
    counts = _values(facts.beats, "fallbacks")
    if counts and counts[-1] > counts[0]:
        yield "fallbacks", f"{counts[-1]:.0f} fallbacks, {counts[0]:.0f} at the start"


def _training_alarms(facts: WatchedRecords) -> Iterator[tuple[str, str]]:
    """Yield the alarms of losses, gradients and gates."""
    count = scaled_span(_PLATEAU, facts.status.iterations if facts.status else 0)
    losses = [row.loss for row in facts.train[-2 * count :]]
    if len(losses) == 2 * count:
        before, after = fmean(losses[:count]), fmean(losses[count:])
        if not after < before:
            text = f"mean loss {after:.4f} over the last {count} iterations, {before:.4f} before"
            yield "plateau", text
    if facts.unstable:
        yield "unstable", describe_unstable(facts.unstable)
    if facts.train and facts.train[-1].grad_norm == 0.0:
        yield "zero-gradient", "the gradient is 0"
    entropies, largest = (_values(facts.beats, name) for name in ("gate_entropy", "gate_max"))
    if entropies and entropies[-1] < _GATE_ENTROPY:
        text = f"mean gate entropy {entropies[-1]:.3f} nats (below {_GATE_ENTROPY:g})"
        yield "gate-entropy", text
    if largest and largest[-1] > _GATE_MAX:
        yield "gate-max", f"mean of the largest gate {largest[-1]:.3f} (above {_GATE_MAX:g})"


def scaled_span(span: int, iterations: int) -> int:
    """Return ``span`` iterations, limited to a share of a run of ``iterations``; 0: unknown."""
    return min(span, max(_MIN_SPAN, iterations // _RUN_SHARE)) if iterations else span


def _values(beats: Sequence[HeartbeatRow], name: str) -> list[float]:
    """Return the values of ``name`` in the heartbeats that contain it."""
    return [value for beat in beats if (value := vars(beat)[name]) is not None]


SCHEMA_VERSION = 1
# Characters of the loss curve, and those that a narrow terminal has at least.
_CURVE_WIDTH, _MIN_CURVE_WIDTH = 24, 8
# One in this many values, the largest ones, is clipped to the top of the scale.
_CLIP_EVERY = 8
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
_REFRESH_SECONDS = 2.0
_COLUMNS = ("run", "state", "iteration", "loss", "", "val loss", "tok/s", "eta", "MiB", "health")
_LEFT = ("run", "state", "", "health")
# Columns dropped on a narrow terminal, in this order; "run" and "health" always stay.
_DROP_ORDER = ("MiB", "val loss", "tok/s", "eta", "state", "")
_HEALTH_WIDTH = 20


@dataclass(frozen=True)
class RunLine:
    """One run. A value is None if it is unknown."""

    run: str
    state: str
    iteration: int
    iterations: int
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    memory_mib: float | None
    # Training losses, reduced to the width of the curve.
    curve: list[float]
    # Rule name → alarm text.
    alarms: dict[str, str]


class WatchedRuns:
    """Planned runs whose lines are read repeatedly; the files of a run that has ended, once."""

    def __init__(self, runs: Sequence[Run[Any]], stall_seconds: int) -> None:
        self._runs = runs
        self._stall_seconds = stall_seconds
        # Of the runs that have ended, by directory: a run that goes on has another status.
        self._ended: dict[Path, tuple[RunStatus, RunLine]] = {}

    def lines(self, now: float) -> list[RunLine]:
        lines = []
        for planned in self._runs:
            run = RunDir(planned.path)
            if (status := read_status(run)) is None:
                continue
            ended, line = self._ended.get(run.path, (None, None))
            if line is None or status != ended:
                line = _line(planned.label, run, status, now, self._stall_seconds)
            if status.state is not State.RUNNING:
                self._ended[run.path] = status, line
            lines.append(line)
        return lines


def _line(name: str, run: RunDir, status: RunStatus, now: float, stall_seconds: int) -> RunLine:
    """Return the line of a run; of a damaged one without figures, which may depend on the damage."""
    damage = status.message if status.state is State.DAMAGED else ""
    try:
        facts = None if damage else read_watched_records(run, now)
    except RecordError as error:
        damage = f"{error.problems[0].where}: {error.problems[0].what}"
        damage = damage.removeprefix(f"{run.path}{os.sep}")
    if damage or facts is None:
        return RunLine(name, State.DAMAGED.word, 0, 0, *(None,) * 5, [], {"damaged": damage})
    # A heartbeat may lack some fields: take the newest value of each.
    newest = {k: v for beat in facts.beats for k, v in vars(beat).items() if v is not None}
    reserved = [beats[-1].mem_reserved_mib for beats in facts.heartbeats.values() if beats]
    return RunLine(
        run=name,
        state=status.state.word,
        iteration=max(status.iteration, newest.get("step", 0)),
        iterations=status.iterations,
        loss=facts.train[-1].loss if facts.train else None,
        val_loss=facts.evals[-1].val_loss if facts.evals else None,
        tokens_per_second=newest.get("toks_per_s"),
        eta_seconds=newest.get("eta_s") if facts.is_running else None,
        memory_mib=sum(reserved) if reserved else None,
        curve=_downsampled([row.loss for row in facts.train]),
        alarms=raised_alarms(facts, stall_seconds),
    )


def watch(read: Callable[[], list[RunLine]]) -> None:
    """Refresh the screen from ``read`` until no run is running or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, safe_box=is_ascii_only())
    # rich's stderr proxy would hide the encoding of the terminal from is_ascii_only().
    with Live(console=console, auto_refresh=False, redirect_stderr=False) as live:
        while True:
            # A low terminal shows the first lines.
            lines = sorted(read(), key=lambda line: line.state != "running")
            live.update(lines_to_table(lines, console.width), refresh=True)
            if not any(line.state == "running" for line in lines):
                return
            time.sleep(_REFRESH_SECONDS)


def lines_to_table(lines: Sequence[RunLine], width: int) -> Any:
    """Return a rich table with the columns that fit into ``width``; only running runs have whole alarms."""
    from rich.table import Table
    from rich.text import Text

    rows = [{name: visible(cell) for name, cell in _cells(line).items()} for line in lines]
    for line, row in zip(lines, rows, strict=True):
        if line.state != "running":
            row["health"] = ", ".join(line.alarms) or "ok"
    widths = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in _COLUMNS}
    # Health texts may wrap, and a curve may have fewer characters.
    widths["health"] = min(widths["health"], _HEALTH_WIDTH)
    widths[""] = min(widths[""], _MIN_CURVE_WIDTH)
    names, free = list(_COLUMNS), width + 2 - sum(2 + each for each in widths.values())
    for name in _DROP_ORDER:
        if free < 0:
            names.remove(name)
            free += widths[name] + 2
    widths[""] = min(_CURVE_WIDTH, widths[""] + max(0, free))
    grid = Table(box=None, pad_edge=False)
    for name in names:
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        grid.add_column(name, justify=justify, min_width=widths[name], no_wrap=name != "health")
    for line, row in zip(lines, rows, strict=True):
        row[""] = _curve(line.curve, widths[""])
        # Not strings, whose brackets are markup.
        grid.add_row(*(Text(row[name]) for name in names))
    return grid


def _cells(line: RunLine) -> dict[str, str]:
    total = f"/{line.iterations:,}" if line.iterations else ""
    return {
        "run": line.run,
        "state": line.state,
        "iteration": f"{line.iteration:,}{total}",
        "loss": _number(line.loss, ".4f"),
        "": _curve(line.curve, _CURVE_WIDTH),
        "val loss": _number(line.val_loss, ".4f"),
        "tok/s": _number(line.tokens_per_second, ",.0f"),
        "eta": "-" if line.eta_seconds is None else format_duration(line.eta_seconds),
        "MiB": _number(line.memory_mib, ",.0f"),
        "health": "; ".join(f"{name}: {text}" for name, text in line.alarms.items()) or "ok",
    }


def lines_to_text(lines: Sequence[RunLine]) -> str:
    rows = [tuple(_cells(line).values()) for line in lines]
    right = {i for i, name in enumerate(_COLUMNS) if name not in _LEFT}
    return "".join(f"{line}\n" for line in text_lines([_COLUMNS, *rows], right=right))


def lines_to_json(lines: Sequence[RunLine]) -> str:
    return json_document(SCHEMA_VERSION, {"runs": [asdict(line) for line in lines]})


def sparkline(values: Sequence[float], blocks: str) -> str:
    """Return a curve with one character per value; the lowest of ``blocks`` is the minimum.

    In a long curve the largest values share the highest block, because a loss starts far above the
    rest.
    """
    if not values:
        return ""
    ascending = sorted(values)
    low, high = ascending[0], ascending[-1 - len(values) // _CLIP_EVERY]
    span, top = high - low, len(blocks) - 1
    return "".join(blocks[round(top * (min(v, high) - low) / span) if span else 0] for v in values)


def _curve(values: Sequence[float], width: int) -> str:
    return sparkline(_downsampled(values, width), ASCII_BLOCKS if is_ascii_only() else BLOCKS)


def _downsampled(values: Sequence[float], width: int = _CURVE_WIDTH) -> list[float]:
    """Return means over equal parts of the values, one per character of the curve."""
    size = math.ceil(len(values) / width) if values else 1
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
