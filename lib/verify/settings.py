"""Settings as the tracker and as the run's own records have them: both there, alike, and equal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lib.compare.facts import UNKNOWN
from lib.verify.evidence import Evidence
from lib.verify.rows import Remark, Row, Verdict, row, shown, spread


@dataclass(frozen=True)
class Key:
    """A setting by the name that trackers have for it."""

    name: str
    # Declaring it lets the setting differ; "" where nothing does.
    symbol: str
    # What the run's own records say.
    own: Callable[[Evidence], Any]
    # Why two runs may differ in it, though nothing was declared; "" where they may not.
    reason: Callable[[Evidence, Evidence], str] = lambda first, each: ""


def key_row(key: Key, runs: Sequence[Evidence]) -> Row:
    """One setting: a value that is missing is UNKNOWN, never equal."""
    own = [(each, key.own(each)) for each in runs]
    remarks = [*_missing(key, own), *_contradictions(key, own), *_differences(key, own)]
    said = spread((each.name, value) for each, value in own)
    if others := [each for each, value in own if value != own[0][1]]:
        why = key.reason(runs[0], others[0]) or f"declared to differ ({key.symbol})"
        said = f"{why}: {said}"
    return row(key.name, said, remarks)


def symbols_row(runs: Sequence[Evidence]) -> Row:
    """Every symbol of each run: what the tracker has is what made the run."""
    remarks = []
    for each in runs:
        for name, value in each.facts.symbols.items():
            told = each.tracked(name)
            if told == UNKNOWN:
                remarks.append(Remark(Verdict.UNKNOWN, _untold(each, name), each.name))
            elif told != value:
                what = f"{name}: the tracker says {shown(told)}, the run {shown(value)}"
                remarks.append(Remark(Verdict.FAIL, what, each.name))
    count = len(runs[0].facts.symbols)
    return row("symbols", f"all {count} as the tracker has them", remarks)


def manifest_row(runs: Sequence[Evidence], digest: Callable[[Evidence], str]) -> Row:
    """The tracker was told the digest of the manifest that is there now."""
    remarks = []
    for each in runs:
        told = each.tracked("manifest_sha256")
        if told == UNKNOWN:
            remarks.append(Remark(Verdict.UNKNOWN, _untold(each, "manifest_sha256"), each.name))
        elif told != digest(each):
            what = "manifest.json is another than when the tracker was told its digest"
            remarks.append(Remark(Verdict.FAIL, what, each.name))
    lost = any(isinstance(each.told, str) for each in runs)
    advice = "another SOURCE=, or scripts/verify_results.py --folder DIR" if lost else ""
    return row("manifest", "the one that the tracker knows", remarks, advice)


def _untold(each: Evidence, name: str) -> str:
    return each.told if isinstance(each.told, str) else f"the tracker has no {name} of {each.name}"


_Own = Sequence[tuple[Evidence, Any]]


def _missing(key: Key, own: _Own) -> Iterator[Remark]:
    for each, value in own:
        if each.tracked(key.name) == UNKNOWN:
            yield Remark(Verdict.UNKNOWN, _untold(each, key.name), each.name)
        if value == UNKNOWN:
            what = f"the manifest has no {key.name} of {each.name}"
            yield Remark(Verdict.UNKNOWN, what, each.name)


def _contradictions(key: Key, own: _Own) -> Iterator[Remark]:
    for each, value in own:
        told = each.tracked(key.name)
        if UNKNOWN not in (told, value) and told != value:
            what = f"the tracker says {shown(told)}, the manifest {shown(value)} of {each.name}"
            yield Remark(Verdict.FAIL, what, each.name)


def _differences(key: Key, own: _Own) -> Iterator[Remark]:
    """Against the first run, in the manifests and in the tracker, unless there is a reason."""
    first, value = own[0]
    told = first.tracked(key.name)
    for who, reference, values in (
        ("manifests", value, own),
        ("tracker", told, [(each, each.tracked(key.name)) for each, _ in own]),
    ):
        known = [(each, found) for each, found in values if found != UNKNOWN]
        others = [
            each
            for each, found in known
            if reference != UNKNOWN
            and found != reference
            and key.symbol not in first.axis | each.axis
            and not key.reason(first, each)
        ]
        if others:
            what = f"{who}: {spread((each.name, found) for each, found in known)}"
            yield from (Remark(Verdict.FAIL, what, each.name) for each in others)
