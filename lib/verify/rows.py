"""Rows of the checklist, and the text form of values of several runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_MAX_NAMES_SHOWN = 3
_MAX_REASONS_SHOWN = 8
_MAX_VALUE_CHARS = 48


class Verdict(StrEnum):
    """Verdict of a row. UNKNOWN, a fact that was not recorded, does not count as PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Row:
    """One check: verdict, explanation, affected runs and a command to run."""

    check: str
    verdict: Verdict
    what: str
    runs: Sequence[str] = ()
    next: str = ""


@dataclass(frozen=True)
class Remark:
    """A reason for a verdict, and the run that causes it."""

    verdict: Verdict
    what: str
    run: str = ""


def row(check: str, said: str, remarks: Iterable[Remark], next: str = "") -> Row:
    """Return a row: FAIL if any remark is FAIL, else UNKNOWN if any is, else PASS with ``said``."""
    causes = list(remarks)
    if not causes:
        return Row(check, Verdict.PASS, said)
    failed = any(remark.verdict is Verdict.FAIL for remark in causes)
    reasons = list(dict.fromkeys(remark.what for remark in causes))
    more = len(reasons) - _MAX_REASONS_SHOWN
    what = "; ".join(reasons[:_MAX_REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    runs = [run for run in dict.fromkeys(remark.run for remark in causes) if run]
    return Row(check, Verdict.FAIL if failed else Verdict.UNKNOWN, what, runs, next)


def spread(values: Iterable[tuple[str, Any]]) -> str:
    """Return (run, value) pairs as ``2 (a, b), 4 (c)``; only the value if all runs share it."""
    grouped: dict[str, list[str]] = {}
    for run, value in values:
        grouped.setdefault(shown(value), []).append(run)
    if len(grouped) == 1:
        return next(iter(grouped))
    return ", ".join(f"{value} ({_names(runs)})" for value, runs in grouped.items())


def shown(value: Any) -> str:
    """Return a value as text for one line."""
    text = {None: "none", True: "yes", False: "no"}.get(value) if _is_plain(value) else None
    text = str(value) if text is None else text
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _names(runs: Sequence[str]) -> str:
    more = len(runs) - _MAX_NAMES_SHOWN
    return ", ".join(runs[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
