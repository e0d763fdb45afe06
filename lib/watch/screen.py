"""The screen of ``make watch``: one line per run with its loss curve and alarms."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib.console import ascii_only
from lib.files import indented_json
from lib.plan import Run
from lib.rundir import RunDir
from lib.units import clock
from lib.watch.facts import Facts, read_facts
from lib.watch.options import WatchOptions
from lib.watch.rules import alarms

SCHEMA_VERSION = 1
_CURVE_WIDTH = 24
# One in this many values, the largest ones, is clipped to the top of the scale.
_CLIP_EVERY = 8
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*#@"
_REFRESH_SECONDS = 2.0
_TEXT_WIDTH = 200
_COLUMNS = ("run", "state", "iteration", "loss", "", "val loss", "tok/s", "eta", "MiB", "health")
_LEFT = ("run", "state", "", "health")
# Columns dropped on a narrow terminal, in this order; "run" and "health" always stay.
_DROP_ORDER = ("", "MiB", "val loss", "tok/s", "state", "eta")
_HEALTH_WIDTH = 12


@dataclass(frozen=True)
class Line:
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


def look(runs: Sequence[Run[Any]], options: WatchOptions, now: float) -> list[Line]:
    """Return one line per run that has started."""
    started = [run for run in runs if RunDir(run.path).status.exists()]
    return [_line(run, read_facts(RunDir(run.path), now), options) for run in started]


def watch(read: Callable[[], list[Line]]) -> None:
    """Refresh the screen from ``read`` until no run is running or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, safe_box=ascii_only())
    # rich's stderr proxy would hide the encoding of the terminal from ascii_only().
    first = table(read(), console.width)
    with Live(first, console=console, auto_refresh=False, redirect_stderr=False) as live:
        while True:
            lines = read()
            live.update(table(lines, console.width), refresh=True)
            if not any(line.state == "running" for line in lines):
                return
            time.sleep(_REFRESH_SECONDS)


def table(lines: Sequence[Line], width: int) -> Any:
    """Return the lines as a rich table, with as many columns as fit into ``width`` characters."""
    from rich.table import Table

    rows = [_cells(line) for line in lines]
    widths = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in _COLUMNS}
    # Health texts may wrap.
    widths["health"] = min(widths["health"], _HEALTH_WIDTH)
    names = list(_COLUMNS)
    for name in _DROP_ORDER:
        if sum(widths[column] + 2 for column in names) - 2 > width:
            names.remove(name)
    grid = Table(box=None, pad_edge=False)
    for name in names:
        overflow = {"overflow": "fold"} if name == "health" else {"no_wrap": True}
        justify = "left" if name in _LEFT else "right"
        grid.add_column(name, justify=justify, min_width=widths[name], **overflow)
    for row in rows:
        grid.add_row(*(row[name] for name in names))
    return grid


def _cells(line: Line) -> dict[str, str]:
    """Return column → text."""
    total = f"/{line.iterations:,}" if line.iterations else ""
    return {
        "run": line.run,
        "state": line.state,
        "iteration": f"{line.iteration:,}{total}",
        "loss": _number(line.loss, ".4f"),
        "": spark(line.curve, _ASCII_BLOCKS if ascii_only() else _BLOCKS),
        "val loss": _number(line.val_loss, ".4f"),
        "tok/s": _number(line.tokens_per_second, ",.0f"),
        "eta": "-" if line.eta_seconds is None else clock(line.eta_seconds),
        "MiB": _number(line.memory_mib, ",.0f"),
        "health": "; ".join(f"{name}: {text}" for name, text in line.alarms.items()) or "ok",
    }


def to_text(lines: Sequence[Line]) -> str:
    """Return the table as text without limiting its columns."""
    from rich.console import Console

    console = Console(width=_TEXT_WIDTH, highlight=False, color_system=None, safe_box=ascii_only())
    with console.capture() as captured:
        console.print(table(lines, _TEXT_WIDTH))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def to_json(lines: Sequence[Line]) -> str:
    """Return the lines as one JSON document with sorted keys."""
    document = {"schema_version": SCHEMA_VERSION, "runs": [asdict(line) for line in lines]}
    return indented_json(document)


def spark(values: Sequence[float], blocks: str) -> str:
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


def _line(run: Run[Any], facts: Facts, options: WatchOptions) -> Line:
    # A heartbeat may lack some fields: take the newest value of each.
    newest = {k: v for beat in facts.beats for k, v in beat.items() if v is not None}
    status = facts.status
    assert status is not None
    done = max(status.iteration, newest.get("step", 0))
    running = facts.is_running
    reserved = [beats[-1]["mem_reserved_mib"] for beats in facts.heartbeats.values() if beats]
    return Line(
        run=run.label,
        state=status.state.lower(),
        iteration=done,
        iterations=status.iterations,
        loss=facts.train[-1]["loss"] if facts.train else None,
        val_loss=facts.evals[-1]["val_loss"] if facts.evals else None,
        tokens_per_second=newest.get("toks_per_s"),
        eta_seconds=newest.get("eta_s") if running else None,
        memory_mib=sum(reserved) if reserved else None,
        curve=_downsampled([row["loss"] for row in facts.train]),
        alarms=alarms(facts, options),
    )


def _downsampled(values: Sequence[float]) -> list[float]:
    """Return means over equal parts of the values, one per character of the curve."""
    size = math.ceil(len(values) / _CURVE_WIDTH) if values else 1
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
