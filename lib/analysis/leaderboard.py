"""The runs of sweeps, best first, read from their directories.

A run that another study had done already lies there; the file ``ELSEWHERE`` says where.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.analysis.table import Stat
from lib.binding import Value
from lib.compare.facts import Facts, read_facts
from lib.compare.keys import observed_differences
from lib.errors import ConfigError, Problem
from lib.files import write_atomic
from lib.plan import run_identity
from lib.rundir import RunDir
from lib.status import State, read_status

ELSEWHERE = "elsewhere.txt"
# Seeds of the same settings are one entry.
_SEED = "SEED"


@dataclass(frozen=True)
class Entry:
    """One combination of settings over its seeds. Loss in nats per token."""

    val_loss: Stat
    # The symbols in which the sweep's runs differ.
    settings: Mapping[str, Value]
    parameters: int
    tokens: int
    # Mean over the seeds.
    train_seconds: float
    # Directories of the runs.
    runs: Sequence[str]


@dataclass(frozen=True)
class Leaderboard:
    """Entries by loss, and what was left out, with the reason."""

    entries: Sequence[Entry]
    left_out: Sequence[str]


@dataclass(frozen=True)
class _Done:
    name: str
    symbols: Mapping[str, Value]
    final: Mapping[str, Any]
    seconds: float
    facts: Facts


def note_elsewhere(folder: Path, runs: Sequence[Path]) -> None:
    """Remember those of ``runs`` that lie outside ``folder``, besides those that it knows."""
    outside = [os.path.relpath(run, folder) for run in runs if run.parent != folder]
    known = _elsewhere(folder)
    if more := [place for place in outside if place not in known]:
        write_atomic(folder / ELSEWHERE, "".join(f"{place}\n" for place in [*known, *more]))


def read_leaderboard(folder: Path, ignored: Sequence[str] = ()) -> Leaderboard:
    """Rank the finished runs of ``folder`` and those that it took from elsewhere; symbols in ``ignored`` cannot change a result.

    Runs that differ from most in what was observed, or in code, are left out, and so is what is
    not finished. ConfigError when there is nothing to rank.
    """
    done, left_out = [], []
    for path in _runs(folder):
        found = _read(RunDir(path))
        if isinstance(found, str):
            left_out.append(f"{path.name}: {found}")
        else:
            done.append(found)
    if not done:
        what = "there is no finished run to rank"
        raise ConfigError(Problem(what, str(folder), 'type: make SWEEP="LEARNING_RATE=1e-4,3e-4"'))
    alike, others = _alike(done)
    left_out += others
    entries = _entries(alike, ignored)
    return Leaderboard(sorted(entries, key=lambda entry: entry.val_loss.mean), left_out)


def _runs(folder: Path) -> list[Path]:
    """Directories of the sweeps' runs; one from elsewhere only while the folder has not its own."""
    own = sorted(p for p in folder.glob("*-s*-*") if ".old-" not in p.name)
    known = {run_identity(path) for path in own}
    taken = [folder / place for place in _elsewhere(folder)]
    return own + [path for path in taken if path.exists() and run_identity(path) not in known]


def _elsewhere(folder: Path) -> list[str]:
    path = folder / ELSEWHERE
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _read(run: RunDir) -> _Done | str:
    """A finished run, or why it is none."""
    status = read_status(run)
    if status is None or status.state is not State.SUCCESS:
        return "not started" if status is None else status.state.lower()
    try:
        symbols = json.loads(run.resolved_config.read_text())["symbols"]
        summary = json.loads(run.summary.read_text())
        seconds = float(summary["timing"]["train_seconds"])
        return _Done(run.path.name, symbols, summary["final"], seconds, read_facts(run))
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        return f"damaged: {type(error).__name__}: {error}"


def _alike(done: Sequence[_Done]) -> tuple[list[_Done], list[str]]:
    """The most runs that may be compared with one of them, and why each other may not."""
    groups = [[x for x in done if not observed_differences(one.facts, x.facts)] for one in done]
    # A run of which nothing is known is not even like itself.
    largest = max(groups, key=len) or [done[0]]
    reference = largest[0]
    others = []
    for found in done:
        if found not in largest:
            why = "; ".join(map(str, observed_differences(reference.facts, found.facts)))
            others.append(f"{found.name}: not comparable: {why}")
    return largest, others


def _entries(done: Sequence[_Done], ignored: Sequence[str]) -> list[Entry]:
    names = [name for found in done for name in found.symbols if name not in (*ignored, _SEED)]
    differing = [n for n in dict.fromkeys(names) if len({f.symbols.get(n) for f in done}) > 1]
    groups: dict[tuple, list[_Done]] = {}
    for found in done:
        groups.setdefault(tuple(found.symbols.get(n) for n in differing), []).append(found)
    return [
        _entry(dict(zip(differing, values, strict=True)), group) for values, group in groups.items()
    ]


def _entry(settings: Mapping[str, Value], group: Sequence[_Done]) -> Entry:
    loss = Stat.of([float(found.final["val_loss"]) for found in group])
    assert loss is not None
    first = group[0].final
    return Entry(
        val_loss=loss,
        settings=settings,
        parameters=int(first["parameters"]),
        tokens=int(first["tokens"]),
        train_seconds=sum(found.seconds for found in group) / len(group),
        runs=[found.name for found in group],
    )
