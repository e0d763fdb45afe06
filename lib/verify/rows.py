"""One line of the checklist, and how values of several runs are told."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_NAMED = 3
_MOST_REASONS = 8
_WIDTH = 48


class Verdict(StrEnum):
    """UNKNOWN is no PASS: nobody wrote down what has to be known."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Row:
    """What was looked at, what came of it, whom it concerns, and what to type."""

    check: str
    verdict: Verdict
    what: str
    runs: Sequence[str] = ()
    next: str = ""


@dataclass(frozen=True)
class Remark:
    """A reason for a verdict, and the run that gives it."""

    verdict: Verdict
    what: str
    run: str = ""


def row(check: str, said: str, remarks: Iterable[Remark], next: str = "") -> Row:
    """FAIL where a remark is, else UNKNOWN where one is, else PASS with ``said``."""
    found = list(remarks)
    if not found:
        return Row(check, Verdict.PASS, said)
    failed = any(remark.verdict is Verdict.FAIL for remark in found)
    reasons = list(dict.fromkeys(remark.what for remark in found))
    more = len(reasons) - _MOST_REASONS
    what = "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
    runs = [run for run in dict.fromkeys(remark.run for remark in found) if run]
    return Row(check, Verdict.FAIL if failed else Verdict.UNKNOWN, what, runs, next)


def spread(values: Iterable[tuple[str, Any]]) -> str:
    """(run, value) pairs as ``2 (a, b), 4 (c)``; the value alone where all runs have it."""
    grouped: dict[str, list[str]] = {}
    for run, value in values:
        grouped.setdefault(shown(value), []).append(run)
    if len(grouped) == 1:
        return next(iter(grouped))
    return ", ".join(f"{value} ({_names(runs)})" for value, runs in grouped.items())


def shown(value: Any) -> str:
    """A value in a line of text."""
    text = {None: "none", True: "yes", False: "no"}.get(value) if _is_plain(value) else None
    text = str(value) if text is None else text
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _names(runs: Sequence[str]) -> str:
    more = len(runs) - _NAMED
    return ", ".join(runs[:_NAMED]) + (f" and {more} more" if more > 0 else "")
