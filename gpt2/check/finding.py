"""Findings of checks, and the comparison that makes them; imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CheckFinding:
    """One violated property, with the expected and the found value as text."""

    # Stable kebab-case name of the property, for programs and tests. For an error it is a code:
    # check.exception (in the checked code), check.defect (in the check), or a KablateError's code.
    property: str
    expected: str
    found: str
    # Missing input, such as data to prepare; not a failure by itself.
    absent: bool = False


def expect(holds: bool, name: str, expected: str, found: str) -> list[CheckFinding]:
    """Return a finding unless the property ``name`` holds."""
    return [] if holds else [CheckFinding(name, expected, found)]


def within(name: str, expected: str, error: float, tolerance: float) -> list[CheckFinding]:
    """Return a finding if a relative error exceeds ``tolerance``, or is NaN."""
    return expect(error <= tolerance, name, expected, f"a relative error of {error:.1e}")


def compare(
    name: str, what: str, found: Any, expected: Any, tolerance: float = 0.0
) -> list[CheckFinding]:
    """Return a finding if a value, or the first of several, is not the expected one.

    ``tolerance`` of numbers is relative.
    """
    if isinstance(expected, list) and len(expected) == len(found):
        for i, (a, e) in enumerate(zip(found, expected, strict=True), 1):
            if not _is_equal(a, e, tolerance):
                return compare(name, f"{what} {i} of {len(expected)}:", a, e, tolerance)
        return []
    return expect(
        _is_equal(found, expected, tolerance), name, f"{what} {_shown(expected)}", _shown(found)
    )


def _is_equal(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=1e-15 * (tolerance > 0))
    if isinstance(expected, tuple) and len(expected) == len(found):
        return all(map(_is_equal, found, expected, [tolerance] * len(expected)))
    return bool(found == expected)


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "(" + ", ".join(map(_shown, value)) + ")"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
