"""Checks of settings in the tracker and in the run's own records: present, consistent and equal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lib.compare.facts import UNKNOWN
from lib.verify.evidence import Evidence
from lib.verify.rows import Remark, Row, Verdict, row, shown, spread


@dataclass(frozen=True)
class Key:
    """A setting by its tracker name."""

    name: str
    # Symbol whose declaration allows the setting to differ; "" if none does.
    symbol: str
    # Reads the value from the run's own records.
    own: Callable[[Evidence], Any]
    # Returns the reason why two runs may differ without a declaration; "" if they may not.
    reason: Callable[[Evidence, Evidence], str] = lambda first, each: ""


def key_row(key: Key, runs: Sequence[Evidence]) -> Row:
    """Return the row of one setting; a missing value is UNKNOWN and never equal."""
    recorded = [(run, key.own(run)) for run in runs]
    remarks = [
        *_missing(key, recorded),
        *_contradictions(key, recorded),
        *_differences(key, recorded),
    ]
    text = spread((run.name, value) for run, value in recorded)
    if different := [run for run, value in recorded if value != recorded[0][1]]:
        reason = key.reason(runs[0], different[0]) or f"declared to differ ({key.symbol})"
        text = f"{reason}: {text}"
    return row(key.name, text, remarks)


def symbols_row(runs: Sequence[Evidence]) -> Row:
    """Return the row that compares every symbol in the tracker with the run's own value."""
    remarks = []
    for run in runs:
        for name, value in run.facts.symbols.items():
            tracked = run.tracked(name)
            if tracked == UNKNOWN:
                remarks.append(Remark(Verdict.UNKNOWN, _untracked(run, name), run.name))
            elif tracked != value:
                what = f"{name}: tracker {shown(tracked)}, run {shown(value)}"
                remarks.append(Remark(Verdict.FAIL, what, run.name))
    count = len(runs[0].facts.symbols)
    return row("symbols", f"all {count} match the tracker", remarks)


def manifest_row(runs: Sequence[Evidence], digest: Callable[[Evidence], str]) -> Row:
    """Return the row that compares the manifest with the digest recorded by the tracker."""
    remarks = []
    for run in runs:
        tracked = run.tracked("manifest_sha256")
        if tracked == UNKNOWN:
            remarks.append(Remark(Verdict.UNKNOWN, _untracked(run, "manifest_sha256"), run.name))
        elif tracked != digest(run):
            what = "manifest.json has changed since the tracker recorded its digest"
            remarks.append(Remark(Verdict.FAIL, what, run.name))
    unreachable = any(isinstance(run.told, str) for run in runs)
    advice = "another SOURCE=, or scripts/verify_results.py --folder DIR" if unreachable else ""
    return row("manifest", "matches the tracker's digest", remarks, advice)


def _untracked(run: Evidence, name: str) -> str:
    return run.told if isinstance(run.told, str) else f"the tracker has no {name} for {run.name}"


_Recorded = Sequence[tuple[Evidence, Any]]


def _missing(key: Key, recorded: _Recorded) -> Iterator[Remark]:
    for run, value in recorded:
        if run.tracked(key.name) == UNKNOWN:
            yield Remark(Verdict.UNKNOWN, _untracked(run, key.name), run.name)
        if value == UNKNOWN:
            what = f"the manifest of {run.name} has no {key.name}"
            yield Remark(Verdict.UNKNOWN, what, run.name)


def _contradictions(key: Key, recorded: _Recorded) -> Iterator[Remark]:
    for run, value in recorded:
        tracked = run.tracked(key.name)
        if UNKNOWN not in (tracked, value) and tracked != value:
            what = f"{run.name}: tracker {shown(tracked)}, manifest {shown(value)}"
            yield Remark(Verdict.FAIL, what, run.name)


def _differences(key: Key, recorded: _Recorded) -> Iterator[Remark]:
    """Compare every run with the first, in the manifests and in the tracker."""
    first, value = recorded[0]
    tracked = first.tracked(key.name)
    for side, reference, values in (
        ("manifests", value, recorded),
        ("tracker", tracked, [(run, run.tracked(key.name)) for run, _ in recorded]),
    ):
        present = [(run, setting) for run, setting in values if setting != UNKNOWN]
        different = [
            run
            for run, setting in present
            if reference != UNKNOWN
            and setting != reference
            and key.symbol not in first.axis | run.axis
            and not key.reason(first, run)
        ]
        if different:
            what = f"{side}: {spread((run.name, setting) for run, setting in present)}"
            yield from (Remark(Verdict.FAIL, what, run.name) for run in different)
